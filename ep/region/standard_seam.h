// Until core/standard_nodes.h decodes standard nodes itself: none is known.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "core/node_reader.h"
#include "core/nodes.h"
#include "core/standard_nodes.h"
#include "core/status.h"

namespace lowbit {

struct StandardInput {
  bool present = false;
  std::optional<ElementType> type;
  std::optional<std::vector<int64_t>> dims;
  std::optional<ConstTensor> constant;
  std::optional<std::vector<int64_t>> constant_ints;
};

inline StandardNode DecodeStandard(std::string_view op, int, const AttributeMap&,
                                   std::span<const StandardInput> inputs) {
  Require(op == "Reshape" && inputs.size() == 2 && inputs[1].constant_ints.has_value(), "regions do not run ",
          op, " yet");
  ReshapeOp reshape;
  reshape.kind = ReshapeOp::Kind::kReshape;
  reshape.dims = *inputs[1].constant_ints;
  return reshape;
}
inline std::vector<size_t> FedInputs(const StandardNode&, size_t) { return {0}; }
inline TensorShape OutputOf(const StandardNode& node, std::span<const TensorShape> fed) {
  TensorShape y{fed[0].type, std::get<ReshapeOp>(node).dims};
  int64_t known = 1;
  for (size_t i = 0; i < y.dims.size(); ++i) {
    if (y.dims[i] == 0) y.dims[i] = fed[0].dims[i];
    if (y.dims[i] > 0) known *= y.dims[i];
  }
  for (int64_t& dim : y.dims) {
    if (dim < 0) dim = ElementCount(fed[0].dims) / known;
  }
  return y;
}

}  // namespace lowbit
