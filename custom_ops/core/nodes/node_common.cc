#include "core/nodes/node_common.h"

#include <algorithm>

#include "core/status.h"

namespace lowbit {

OperandType ReadCodes(const NodeReader& node, std::string_view encoding) {
  return {8, node.EncodingOf(encoding)};
}

Quantizer ReadOutputRange(const NodeReader& node) {
  const OperandType type = node.Operand("y_bits", "y_encoding");
  Quantizer out;
  out.is_signed = type.encoding == Encoding::kSigned;
  out.lo = static_cast<int32_t>(node.OptionalInt("y_min", type.MinCode(), type.MinCode(), type.MaxCode()));
  out.hi = static_cast<int32_t>(node.OptionalInt("y_max", type.MaxCode(), type.MinCode(), type.MaxCode()));
  Require(out.lo <= out.hi, node.op(), ": y_min ", out.lo, " is larger than y_max ", out.hi);
  return out;
}

Quantizer ReadQuantizer(const NodeReader& node) {
  Quantizer out = ReadOutputRange(node);
  out.quantized = node.Present("y_scale");
  if (out.quantized) {
    out.scale = node.ScaleOf("y_scale");
    out.zero_point = node.ZeroPointOf("y_zero_point", node.Operand("y_bits", "y_encoding"));
  } else {
    Require(!node.Present("y_zero_point"), node.op(), ": y_zero_point is given without y_scale");
  }
  return out;
}

int64_t ConstantLength(const NodeReader& node, std::string_view input, ElementType type) {
  const int64_t length = ElementCount(node.Constant(input, type).shape);
  Require(length >= 1 && length <= kMaxAttribute, node.op(), ": input '", input, "' has ", length,
          " elements, expected one, or one per channel");
  return length;
}

int64_t BoundedCount(std::span<const int64_t> shape) {
  constexpr int64_t kMaxElements = int64_t{1} << 46;
  const int64_t count = ElementCount(shape);
  Require(count <= kMaxElements, "shape ", ShapeText(shape), " has more than 2^46 elements");
  return count;
}

void CheckFed(const FedShape& tensor, ElementType type, std::string_view what) {
  Require(tensor.type == type, "input '", what, "' is ", TypeName(tensor.type), ", expected ",
          TypeName(type));
  BoundedCount(tensor.dims);
}

void RequireChannels(std::span<const int64_t> x, int64_t channels) {
  if (channels == 1) return;
  Require(!x.empty() && x.back() == channels, "x has shape ", ShapeText(x), ", expected ", channels,
          " channels in the last dimension");
}

std::vector<int64_t> ShapeOfCodes(std::span<const int64_t> x, bool to_channels_last, int64_t channels) {
  std::vector<int64_t> y = ToVector(x);
  if (to_channels_last) {
    Require(y.size() >= 2, "x has shape ", ShapeText(y), ", expected rank 2 or more");
    std::rotate(y.begin() + 1, y.begin() + 2, y.end());
  }
  Require(channels == 1 || (!y.empty() && y.back() == channels), "x has shape ", ShapeText(x), ", expected ",
          channels, " channels");
  return y;
}

}  // namespace lowbit
