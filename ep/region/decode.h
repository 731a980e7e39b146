// What the nodes of a graph mean: nodes of domain ai.lowbit and of ONNX's own as the core knows them.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "core/cpu/operator.h"
#include "core/nodes.h"
#include "core/nodes/standard_nodes.h"
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
bool NamesReshape(const Graph& graph, const Node& node);

// Whether the node is ONNX's Split, which alone makes several tensors.
bool IsSplit(const Node& node);
// The first output that somebody may read. Throws Error where there is none.
size_t GivenOutput(const Node& node);

}  // namespace lowbit::ep
