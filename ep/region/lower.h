// From the nodes of a region to the operations that remain: reshapes only rename memory, those that a back
// end fuses become one, and those that nobody needs do nothing. (ONNX Runtime runs such nodes, and refuses
// models by them: what they are fed is still checked.)
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "core/nodes/standard_nodes.h"
#include "ep/region/backend.h"
#include "ep/region/decode.h"
#include "ep/region/graph.h"
#include "ep/region/moves.h"

namespace lowbit::ep {

// What a node that takes a part of its input takes of each dim. Throws Error.
using CutFunction = std::function<std::vector<SliceRange>(std::span<const int64_t> x)>;

struct LoweredOp {
  std::vector<const Node*> nodes;    // one, or several that are fused
  std::optional<ReshapeOp> reshape;  // where it is set, `output` lies where `fed[0]` does
  CutFunction cut;                   // of a Slice and of a Split
  MoveFunction moves;                // of one node that only moves channels
  std::vector<ValueId> fed;
  ValueId output = kAbsent;
  bool is_needed = true;  // where it is not, `nodes` is one node
};

// The graph as regions are made of it: ep/region/codes.h, ep/region/channels.h. Doing it again changes
// nothing. Throws Error.
Graph Prepared(const Graph& graph, const Backend& backend);

// The graph with a Split for each part of one: each node then makes one tensor, and a part that nobody reads
// is no step. The places of the outputs stay, so that each node says which part it makes.
Graph WithOneOutputEach(Graph graph);

// In an order in which they can run. Throws Error, naming the node. Nodes make one tensor each.
std::vector<LoweredOp> Lower(const Graph& graph, const Backend& backend);

}  // namespace lowbit::ep
