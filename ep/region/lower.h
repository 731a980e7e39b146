// From the nodes of a region to the operations that remain: reshapes only rename memory, those that a back
// end fuses become one, and those that nobody needs do nothing. (ONNX Runtime runs such nodes, and refuses
// models by them: what they are fed is still checked.)
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "core/cpu/operator.h"
#include "core/nodes.h"
#include "core/nodes/standard_nodes.h"
#include "ep/region/backend.h"
#include "ep/region/graph.h"

namespace lowbit::ep {

// A node of domain ai.lowbit as CreateOperator and DecodeNode take it.
struct LowBitInputs {
  const OpSchema* schema = nullptr;
  AttributeMap attributes;
  std::vector<std::optional<ConstTensor>> constants;
  std::vector<bool> present;
  std::vector<size_t> fed;  // which of the inputs a run feeds
};
// Throws Error, without the node's name.
LowBitInputs ReadLowBit(const Graph& graph, const Node& node);

// The node as it is computed, with the channels that the region adds. Where weights may be missing they are
// where the graph has no data of them. Throws Error, without the node's name.
NodeSpec DecodeLowBit(const Graph& graph, const Node& node, Weights weights = Weights::kNeeded);
// The same without weights, as the model has it; nullopt for nodes of other domains, and for those that
// cannot be: who compiles them says why.
std::optional<NodeSpec> DecodeWithoutWeights(const Graph& graph, const Node& node);

// A node of ONNX's own domain; of a Split the first part that it makes. Throws Error with the reason where
// the region compiler does not know it.
StandardNode ReadStandard(const Graph& graph, const Node& node);

// Whether the node is one of those that may only give their input other dims; whether it does so,
// ReadStandard says.
bool NamesReshape(const Node& node);

// What a node that takes a part of its input takes of each dim. Throws Error.
using CutFunction = std::function<std::vector<SliceRange>(std::span<const int64_t> x)>;

struct LoweredOp {
  std::vector<const Node*> nodes;    // one, or several that are fused
  std::optional<ReshapeOp> reshape;  // where it is set, `output` lies where `fed[0]` does
  CutFunction cut;                   // of a Slice and of a Split
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
