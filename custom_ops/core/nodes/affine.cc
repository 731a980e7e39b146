// LowBitAffine and LowBitRequantize: one number in, one number out, per channel.
#include <algorithm>
#include <cmath>

#include "core/nodes/node_kinds.h"
#include "core/status.h"

namespace lowbit {

AffineNode DecodeAffine(const NodeReader& node) {
  AffineSpec spec;
  const OperandType x = ReadCodes(node, "x_encoding");
  spec.x_signed = x.encoding == Encoding::kSigned;
  spec.quantizer = ReadQuantizer(node);
  spec.has_affine = true;
  spec.channels = std::max(ConstantLength(node, "scale", ElementType::kFloat),
                           ConstantLength(node, "shift", ElementType::kFloat));
  spec.scale = node.BroadcastFloatsOf("scale", spec.channels);
  spec.shift = node.BroadcastFloatsOf("shift", spec.channels);
  for (size_t c = 0; c < spec.scale.size(); ++c) {
    Require(std::isfinite(spec.scale[c]) && std::isfinite(spec.shift[c]), node.op(),
            ": scale and shift must be finite, channel ", c, " has ", spec.scale[c], " and ", spec.shift[c]);
  }
  const auto channels = static_cast<size_t>(spec.channels);
  spec.x_scale.assign(channels, node.ScaleOf("x_scale"));
  spec.x_zero_point.assign(channels, node.ZeroPointOf("x_zero_point", x));
  spec.y_scale.assign(channels, spec.quantizer.scale);
  spec.y_zero_point.assign(channels, spec.quantizer.zero_point);
  return {std::move(spec)};
}

AffineNode DecodeRequantize(const NodeReader& node) {
  AffineSpec spec;
  const OperandType x = ReadCodes(node, "x_encoding");
  const OperandType y = node.Operand("y_bits", "y_encoding");
  spec.x_signed = x.encoding == Encoding::kSigned;
  spec.quantizer = ReadOutputRange(node);
  spec.channels = std::max({ConstantLength(node, "x_scale", ElementType::kFloat),
                            ConstantLength(node, "x_zero_point", ElementType::kInt32),
                            ConstantLength(node, "y_scale", ElementType::kFloat),
                            ConstantLength(node, "y_zero_point", ElementType::kInt32)});
  spec.x_scale = node.BroadcastScalesOf("x_scale", spec.channels);
  spec.x_zero_point = node.BroadcastInt32sOf("x_zero_point", spec.channels);
  spec.y_scale = node.BroadcastScalesOf("y_scale", spec.channels);
  spec.y_zero_point = node.BroadcastInt32sOf("y_zero_point", spec.channels);
  for (const int32_t zero_point : spec.x_zero_point) node.CheckZeroPoint("x_zero_point", zero_point, x);
  for (const int32_t zero_point : spec.y_zero_point) node.CheckZeroPoint("y_zero_point", zero_point, y);
  return {std::move(spec)};
}

std::vector<int64_t> OutputDims(const AffineNode& node, const FedShape& x) {
  CheckFed(x, CodeType(node.spec.x_signed), "x");
  RequireChannels(x.dims, node.spec.channels);
  return ToVector(x.dims);
}

}  // namespace lowbit
