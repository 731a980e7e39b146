// A region of the model as plain data, read once from ONNX Runtime (ep/ort/graph_reader.h) or from a compiled
// model. Everything behind this header knows no ONNX Runtime.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/cpu/operator.h"
#include "core/schema.h"
#include "core/types.h"

namespace lowbit::ep {

using ValueId = int32_t;
inline constexpr ValueId kAbsent = -1;  // an optional input that is left out

struct Value {
  std::string name;
  std::optional<ElementType> type;  // nullopt: a type that no lowbit op knows (the int64 shapes of Reshape)
  // As far as the model states it, -1 for what it leaves open; nullopt: not even the rank.
  std::optional<std::vector<int64_t>> dims;
  // Set for initializers; `data` lives as long as the graph's owner says (ONNX Runtime: during Compile). Type
  // and shape without data: a compiled model left it out, because packed bytes replace it.
  std::optional<ConstTensor> constant;
  std::optional<std::vector<int64_t>> constant_ints;  // the elements of an int64 or int32 initializer
  // No input, made by no node, and none of the two above: an initializer of another type, or a value of the
  // graph around a subgraph.
  bool is_outer = false;

  bool IsGiven() const { return constant || constant_ints || is_outer; }
};

struct Node {
  std::string name, op, domain;  // domain "" is ONNX
  int since_version = 0;
  AttributeMap attributes;
  std::vector<ValueId> inputs, outputs;  // what a node's subgraphs capture stands behind its own inputs
  std::optional<std::string> barred;     // why no region may take it, whatever the back end says
  bool x_has_stated_bits = false;        // proven by ep/region/codes.h; a matrix product of 8 bits needs none
  // Channels of the first input and of the output that the region adds (ep/region/channels.h).
  int64_t x_padding = 0, y_padding = 0;
};

struct Graph {
  std::vector<Value> values;
  std::vector<Node> nodes;               // topologically sorted
  std::vector<ValueId> inputs, outputs;  // of the region, in the order of the fused node
};

// "node 'name' (Op)", as errors begin.
std::string Where(const Node& node);

// The node that makes each value, -1 for inputs and initializers. Throws Error unless every id is one of a
// value, every value is made once at most and before it is read.
std::vector<int64_t> ProducersOf(const Graph& graph);

}  // namespace lowbit::ep
