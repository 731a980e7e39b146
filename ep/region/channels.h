// Channels that a region adds to its tensors, where kernels want a multiple of some number: filters of zeros,
// whose codes nobody reads but other zeros. All other codes stay as they are, and no kernel knows.
#pragma once

#include "ep/region/backend.h"
#include "ep/region/graph.h"

namespace lowbit::ep {

// The same graph, whose nodes say how many channels they have more than the model (Node::x_padding,
// y_padding), so that there is a multiple of Backend::ChannelMultiple wherever all nodes that make or read a
// tensor know how: convolutions, and what has as many channels as it reads. At most twice as many. Doing it
// again changes nothing.
Graph WithPaddedChannels(Graph graph, const Backend& backend);

}  // namespace lowbit::ep
