// LowBitQuantize and LowBitDequantize: between float32 and codes, optionally moving channels.
#include <algorithm>

#include "core/nodes/node_kinds.h"
#include "core/status.h"

namespace lowbit {

QuantizeNode MakeQuantizeNode(std::vector<Quantizer> grids, bool to_channels_last) {
  bool fast_is_exact = true;
  for (const Quantizer& grid : grids) {
    // The kernels clip x to +-1024 * y_scale before they divide.
    const double scale = static_cast<double>(grid.scale);
    fast_is_exact = fast_is_exact && FastIsExact(grid, 1024 * scale, scale);
  }
  return {std::move(grids), to_channels_last, fast_is_exact};
}

DequantizeNode MakeDequantizeNode(bool x_signed, std::vector<float> scales, std::vector<int32_t> zero_points,
                                  bool to_channels_first) {
  AffineSpec spec;
  spec.x_signed = x_signed;
  spec.quantizer.quantized = false;
  spec.channels = static_cast<int64_t>(scales.size());
  spec.y_scale.assign(scales.size(), 1.0f);
  spec.y_zero_point.assign(scales.size(), 0);
  spec.x_scale = std::move(scales);
  spec.x_zero_point = std::move(zero_points);
  return {std::move(spec), to_channels_first};
}

QuantizeNode DecodeQuantize(const NodeReader& node) {
  const OperandType y = node.Operand("y_bits", "y_encoding");
  const int64_t channels = std::max(ConstantLength(node, "y_scale", ElementType::kFloat),
                                    ConstantLength(node, "y_zero_point", ElementType::kInt32));
  const std::vector<float> scales = node.BroadcastScalesOf("y_scale", channels);
  const std::vector<int32_t> zero_points = node.BroadcastInt32sOf("y_zero_point", channels);
  std::vector<Quantizer> grids(static_cast<size_t>(channels), ReadOutputRange(node));
  for (size_t c = 0; c < grids.size(); ++c) {
    node.CheckZeroPoint("y_zero_point", zero_points[c], y);
    grids[c].scale = scales[c];
    grids[c].zero_point = zero_points[c];
  }
  return MakeQuantizeNode(std::move(grids), node.Flag("to_channels_last"));
}

DequantizeNode DecodeDequantize(const NodeReader& node) {
  const OperandType x = ReadCodes(node, "x_encoding");
  const int64_t channels = std::max(ConstantLength(node, "x_scale", ElementType::kFloat),
                                    ConstantLength(node, "x_zero_point", ElementType::kInt32));
  std::vector<float> scales = node.BroadcastScalesOf("x_scale", channels);
  std::vector<int32_t> zero_points = node.BroadcastInt32sOf("x_zero_point", channels);
  for (const int32_t zero_point : zero_points) node.CheckZeroPoint("x_zero_point", zero_point, x);
  return MakeDequantizeNode(x.encoding == Encoding::kSigned, std::move(scales), std::move(zero_points),
                            node.Flag("to_channels_first"));
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
