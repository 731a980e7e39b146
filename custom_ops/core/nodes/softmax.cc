// LowBitSoftmax: a table by the distance from the largest code of the row.
#include <algorithm>

#include "core/nodes/node_kinds.h"
#include "core/status.h"

namespace lowbit {

SoftmaxNode DecodeSoftmax(const NodeReader& node) {
  constexpr int64_t kTableSize = 256;
  const OperandType x = ReadCodes(node, "x_encoding");
  static_cast<void>(node.ScaleOf("x_scale"));
  static_cast<void>(node.ZeroPointOf("x_zero_point", x));
  SoftmaxNode out;
  out.x_signed = x.encoding == Encoding::kSigned;
  out.axis = node.Int("axis", -kMaxAttribute, kMaxAttribute);
  out.table = node.Int32sOf("table", kTableSize);
  out.quantizer = ReadQuantizer(node);
  const auto [least, most] = std::minmax_element(out.table.begin(), out.table.end());
  Require(*least >= 0 && *most <= SoftmaxNode::kMaxEntry, node.op(), ": input 'table' holds ",
          *least < 0 ? *least : *most, ", expected 0..", SoftmaxNode::kMaxEntry);
  Require(out.table.front() >= 1, node.op(), ": input 'table' begins with 0, a row would have the sum 0");
  return out;
}

size_t SoftmaxNode::Axis(size_t rank) const {
  const int64_t dims = static_cast<int64_t>(rank);
  Require(axis >= -dims && axis < dims, "attribute 'axis' is ", axis, ", the tensor has rank ", rank);
  return static_cast<size_t>(axis < 0 ? axis + dims : axis);
}

std::vector<int64_t> OutputDims(const SoftmaxNode& node, const FedShape& x) {
  CheckFed(x, CodeType(node.x_signed), "x");
  const int64_t length = x.dims[node.Axis(x.dims.size())];
  Require(length <= kMaxPixels, "x has rows of ", length, " codes, expected at most ", kMaxPixels,
          ": their sum must fit int64");
  return ToVector(x.dims);
}

}  // namespace lowbit
