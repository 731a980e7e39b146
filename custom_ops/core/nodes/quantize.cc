// LowBitQuantize and LowBitDequantize: between float32 and codes, optionally moving channels.
#include <algorithm>

#include "core/nodes/node_kinds.h"
#include "core/status.h"

namespace lowbit {

QuantizeNode DecodeQuantize(const NodeReader& node) {
  const OperandType y = node.Operand("y_bits", "y_encoding");
  const int64_t channels = std::max(ConstantLength(node, "y_scale", ElementType::kFloat),
                                    ConstantLength(node, "y_zero_point", ElementType::kInt32));
  const std::vector<float> scales = node.BroadcastScalesOf("y_scale", channels);
  const std::vector<int32_t> zero_points = node.BroadcastInt32sOf("y_zero_point", channels);
  QuantizeNode out;
  out.grids.assign(static_cast<size_t>(channels), ReadOutputRange(node));
  out.fast_is_exact = true;
  for (size_t c = 0; c < out.grids.size(); ++c) {
    node.CheckZeroPoint("y_zero_point", zero_points[c], y);
    out.grids[c].scale = scales[c];
    out.grids[c].zero_point = zero_points[c];
    // The kernels clip x to +-1024 * y_scale before they divide.
    const double scale = static_cast<double>(scales[c]);
    out.fast_is_exact = out.fast_is_exact && FastIsExact(out.grids[c], 1024 * scale, scale);
  }
  out.to_channels_last = node.Flag("to_channels_last");
  return out;
}

DequantizeNode DecodeDequantize(const NodeReader& node) {
  const OperandType x = ReadCodes(node, "x_encoding");
  AffineSpec spec;
  spec.x_signed = x.encoding == Encoding::kSigned;
  spec.quantizer.quantized = false;
  spec.channels = std::max(ConstantLength(node, "x_scale", ElementType::kFloat),
                           ConstantLength(node, "x_zero_point", ElementType::kInt32));
  spec.x_scale = node.BroadcastScalesOf("x_scale", spec.channels);
  spec.x_zero_point = node.BroadcastInt32sOf("x_zero_point", spec.channels);
  for (const int32_t zero_point : spec.x_zero_point) node.CheckZeroPoint("x_zero_point", zero_point, x);
  spec.y_scale.assign(static_cast<size_t>(spec.channels), 1.0f);
  spec.y_zero_point.assign(static_cast<size_t>(spec.channels), 0);
  return {std::move(spec), node.Flag("to_channels_first")};
}

std::vector<int64_t> OutputDims(const QuantizeNode& node, const FedShape& x) {
  CheckFed(x, ElementType::kFloat, "x");
  return ShapeOfCodes(x.dims, node.to_channels_last, static_cast<int64_t>(node.grids.size()));
}

std::vector<int64_t> OutputDims(const DequantizeNode& node, const FedShape& x) {
  CheckFed(x, CodeType(node.spec.x_signed), "x");
  RequireChannels(x.dims, node.spec.channels);
  std::vector<int64_t> y = ToVector(x.dims);
  if (node.to_channels_first) {
    Require(y.size() >= 2, "x has shape ", ShapeText(y), ", expected rank 2 or more");
    std::rotate(y.begin() + 1, y.end() - 1, y.end());
  }
  return y;
}

}  // namespace lowbit
