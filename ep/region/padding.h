// The channels that a region adds to a node (ep/region/channels.h): filters of zeros.
#pragma once

#include <cstdint>

#include "core/nodes.h"

namespace lowbit::ep {

// A node with so many channels more in x and in y.
void PadChannels(NodeSpec& spec, int64_t x_padding, int64_t y_padding);

}  // namespace lowbit::ep
