// Graphs for the tests, and what they compute node by node.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/cpu/isa.h"
#include "core/cpu/operator.h"
#include "core/packed_weights.h"
#include "core/status.h"
#include "core/thread_pool.h"
#include "ep/region/backend.h"
#include "ep/region/graph.h"
#include "ep/region/lower.h"

namespace lowbit::ep {

// Bytes of a tensor in memory of its own.
struct Tensor {
  TensorShape shape;
  std::vector<uint8_t> bytes;

  explicit Tensor(TensorShape s = {}) : shape(std::move(s)) {
    size_t count = ElementSize(shape.type);
    for (const int64_t dim : shape.dims) count *= static_cast<size_t>(dim);
    bytes.resize(count);
  }
};

inline Tensor RandomTensor(const std::vector<int64_t>& dims, std::mt19937& random) {
  Tensor tensor({ElementType::kUInt8, dims});
  for (uint8_t& byte : tensor.bytes) byte = static_cast<uint8_t>(random());
  return tensor;
}

// Owns the constants of its graph. Values are uint8 unless they say otherwise.
class GraphBuilder {
 public:
  Graph graph;

  ValueId AddValue(std::optional<ElementType> type = ElementType::kUInt8) {
    Value value;
    value.name = "v" + std::to_string(graph.values.size());
    value.type = type;
    graph.values.push_back(std::move(value));
    return static_cast<ValueId>(graph.values.size() - 1);
  }
  ValueId AddInput() {
    graph.inputs.push_back(AddValue());
    return graph.inputs.back();
  }
  ValueId AddConstant(const Tensor& tensor) {
    const ValueId id = AddValue(tensor.shape.type);
    const Tensor& kept = constants_.emplace_back(tensor);
    graph.values.back().dims = kept.shape.dims;
    graph.values.back().constant = ConstTensor{kept.shape.type, kept.shape.dims, kept.bytes.data()};
    return id;
  }
  template <typename T>
  ValueId AddConstant(ElementType type, const std::vector<T>& values, std::vector<int64_t> dims) {
    Tensor tensor({type, std::move(dims)});
    std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
    return AddConstant(tensor);
  }
  ValueId AddNode(const std::string& op, const std::string& domain, std::vector<ValueId> inputs,
                  AttributeMap attributes = {}) {
    const ValueId y = AddValue();
    Node node;
    node.name = op + "_" + std::to_string(graph.nodes.size());
    node.op = op;
    node.domain = domain;
    node.since_version = domain.empty() ? 13 : 1;
    node.attributes = std::move(attributes);
    node.inputs = std::move(inputs);
    node.outputs = {y};
    graph.nodes.push_back(std::move(node));
    return y;
  }

  ValueId Lookup(ValueId x, uint8_t add) {
    std::vector<uint8_t> table(256);
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<uint8_t>(3 * i + add);
    return AddNode("LowBitLookup", kDomain, {x, AddConstant(ElementType::kUInt8, table, {256})});
  }
  ValueId Add(ValueId a, ValueId b) {
    return AddNode("LowBitAdd", kDomain,
                   {a, Scale(0.5f), Zero(), b, Scale(0.25f), Zero(), Scale(0.5f), Zero()});
  }
  ValueId Concat(const std::vector<ValueId>& parts, float scale = 0.5f) {
    const std::vector<float> scales(parts.size(), scale);
    const std::vector<int32_t> zeros(parts.size(), 0);
    const auto count = static_cast<int64_t>(parts.size());
    std::vector<ValueId> inputs = {AddConstant(ElementType::kFloat, scales, {count}),
                                   AddConstant(ElementType::kInt32, zeros, {count}), Scale(0.5f), Zero()};
    inputs.insert(inputs.end(), parts.begin(), parts.end());
    return AddNode("LowBitConcat", kDomain, inputs, {{"axis", int64_t{-1}}});
  }
  ValueId AddInts(const std::vector<int64_t>& values) {
    const ValueId id = AddValue(std::nullopt);
    graph.values.back().constant_ints = values;
    graph.values.back().dims = std::vector<int64_t>{static_cast<int64_t>(values.size())};
    return id;
  }
  ValueId Reshape(ValueId x, const std::vector<int64_t>& dims) {
    return AddNode("Reshape", "", {x, AddInts(dims)});
  }
  ValueId Transpose(ValueId x, const std::vector<int64_t>& perm) {
    return AddNode("Transpose", "", {x}, {{"perm", perm}});
  }
  // The parts in order.
  std::vector<ValueId> Split(ValueId x, int64_t axis, const std::vector<int64_t>& sizes) {
    AddNode("Split", "", {x, AddInts(sizes)}, {{"axis", axis}});
    const size_t node = graph.nodes.size() - 1;
    while (graph.nodes[node].outputs.size() < sizes.size()) {
      const ValueId part = AddValue();
      graph.nodes[node].outputs.push_back(part);
    }
    return graph.nodes[node].outputs;
  }
  ValueId Foreign(const std::vector<ValueId>& inputs) { return AddNode("Foreign", "elsewhere", inputs); }

 private:
  ValueId Scale(float value) { return AddConstant(ElementType::kFloat, std::vector<float>{value}, {}); }
  ValueId Zero() { return AddConstant(ElementType::kInt32, std::vector<int32_t>{0}, {}); }

  std::deque<Tensor> constants_;  // their addresses stay
};

// The operator of a lowbit node and which of its inputs are fed.
struct NodeOperator {
  std::unique_ptr<Operator> op;
  size_t inputs = 0;
  std::vector<size_t> fed;

  NodeOperator(const Graph& graph, const Node& node) {
    LowBitInputs read = ReadLowBit(graph, node);
    inputs = read.present.size();
    fed = read.fed;
    OperatorOptions options;
    options.isa = DefaultIsa();
    op = CreateOperator(*read.schema, read.attributes, read.constants, read.present, options);
  }
  std::vector<std::optional<ConstTensor>> Bind(std::span<const TensorShape> shapes,
                                               std::span<const void* const> data) const {
    std::vector<std::optional<ConstTensor>> bound(inputs);
    for (size_t i = 0; i < fed.size(); ++i) {
      bound[fed[i]] = ConstTensor{shapes[i].type, shapes[i].dims, data.empty() ? nullptr : data[i]};
    }
    return bound;
  }
};

// The elements of x that begin at `begin` along an axis, as many as `y` has; or those of x under permuted dims.
inline void EvaluateMove(const Tensor& x, Tensor& y, const std::vector<int64_t>& begin,
                         const std::vector<int64_t>& perm) {
  const std::vector<int64_t>&from = x.shape.dims, &to = y.shape.dims;
  std::vector<int64_t> index(to.size(), 0);
  for (uint8_t& byte : y.bytes) {
    int64_t offset = 0;
    for (size_t d = 0; d < from.size(); ++d) {
      int64_t at = 0;
      for (size_t i = 0; i < to.size(); ++i) {
        if (perm[i] == static_cast<int64_t>(d)) at = index[i] + begin[i];
      }
      offset = offset * from[d] + at;
    }
    byte = x.bytes[static_cast<size_t>(offset)];
    for (size_t d = to.size(); d-- > 0;) {
      if (++index[d] < to[d]) break;
      index[d] = 0;
    }
  }
}

// The outputs of a graph, one node after the other, every tensor in memory of its own.
inline std::vector<Tensor> Evaluate(const Graph& graph, const std::vector<Tensor>& inputs) {
  std::map<ValueId, Tensor> tensors;
  for (size_t i = 0; i < inputs.size(); ++i) tensors[graph.inputs[i]] = inputs[i];
  const auto tensor = [&](ValueId id) -> const Tensor& {
    const Value& value = graph.values[static_cast<size_t>(id)];
    if (value.constant && !tensors.contains(id)) {
      Tensor constant({value.constant->type, value.constant->shape});
      std::memcpy(constant.bytes.data(), value.constant->data, constant.bytes.size());
      tensors[id] = constant;
    }
    return tensors.at(id);
  };
  InlineThreadPool pool;
  for (const Node& node : graph.nodes) {
    if (node.op == "Split") {
      const Tensor x = tensor(node.inputs[0]);
      const std::vector<int64_t>& sizes = *graph.values[static_cast<size_t>(node.inputs[1])].constant_ints;
      const auto rank = static_cast<int64_t>(x.shape.dims.size());
      const int64_t axis = (std::get<int64_t>(node.attributes.at("axis")) + rank) % rank;
      std::vector<int64_t> begin(x.shape.dims.size(), 0), perm;
      for (int64_t i = 0; i < rank; ++i) perm.push_back(i);
      for (size_t i = 0; i < sizes.size(); ++i) {
        TensorShape shape = x.shape;
        shape.dims[static_cast<size_t>(axis)] = sizes[i];
        EvaluateMove(x, tensors[node.outputs[i]] = Tensor(shape), begin, perm);
        begin[static_cast<size_t>(axis)] += sizes[i];
      }
      continue;
    }
    Tensor& y = tensors[node.outputs[0]];
    if (node.op == "Transpose") {
      const Tensor& x = tensor(node.inputs[0]);
      const auto& perm = std::get<std::vector<int64_t>>(node.attributes.at("perm"));
      TensorShape shape = x.shape;
      for (size_t i = 0; i < perm.size(); ++i) shape.dims[i] = x.shape.dims[static_cast<size_t>(perm[i])];
      EvaluateMove(x, y = Tensor(shape), std::vector<int64_t>(perm.size(), 0), perm);
      continue;
    }
    if (node.domain.empty()) {
      const Tensor& x = tensor(node.inputs[0]);
      const std::vector shapes = {x.shape};
      y = Tensor(OutputOf(ReadStandard(graph, node), shapes));
      y.bytes = x.bytes;
      continue;
    }
    const NodeOperator op(graph, node);
    std::vector<TensorShape> shapes;
    std::vector<const void*> data;
    for (const size_t i : op.fed) {
      shapes.push_back(tensor(node.inputs[i]).shape);
      data.push_back(tensor(node.inputs[i]).bytes.data());
    }
    const auto bound = op.Bind(shapes, data);
    y = Tensor({op.op->OutputType(), op.op->OutputShape(bound)});
    op.op->Run(bound, y.bytes.data(), pool);
  }
  std::vector<Tensor> outputs;
  for (const ValueId id : graph.outputs) outputs.push_back(tensor(id));
  return outputs;
}

}  // namespace lowbit::ep
