// LowBitMaxPool, LowBitAveragePool and LowBitGlobalAveragePool.
#include <algorithm>

#include "core/nodes/node_kinds.h"
#include "core/status.h"

namespace lowbit {
namespace {

// kernel_shape, strides, pads, dilations. As in ONNX Runtime a pad must be smaller than its kernel, so that
// an undilated window always meets the image and its average is never 0 / 0.
Window ReadPoolWindow(const NodeReader& node, bool dilations) {
  const Window window = ReadWindow(node, dilations);
  for (size_t d = kMaxSpatial - static_cast<size_t>(window.spatial); d < kMaxSpatial; ++d) {
    Require(std::max(window.pad_begin[d], window.pad_end[d]) < window.kernel[d], node.op(),
            ": attribute 'pads' holds ", std::max(window.pad_begin[d], window.pad_end[d]),
            ", expected less than the kernel's size ", window.kernel[d]);
  }
  ElementCount(window.kernel);  // throws where the number of taps overflows
  return window;
}

std::vector<int64_t> PoolOutputDims(const Window& window, bool ceil_mode, std::span<const int64_t> x) {
  const auto spatial = static_cast<size_t>(window.spatial);
  Require(x.size() == spatial + 2, "x has shape ", ShapeText(x), ", expected rank ", spatial + 2);
  std::vector<int64_t> y = ToVector(x);
  for (size_t i = 1; i <= spatial; ++i) {
    Require(x[i] >= 1, "x has shape ", ShapeText(x), ", expected at least one pixel");
    y[i] = WindowOutputSize(window, static_cast<int>(i - 1 + kMaxSpatial - spatial), x[i], ceil_mode);
  }
  BoundedCount(y);
  return y;
}

}  // namespace

MaxPoolNode DecodeMaxPool(const NodeReader& node) {
  return {.is_signed = node.EncodingOf("x_encoding") == Encoding::kSigned,
          .window = ReadPoolWindow(node, true),
          .ceil_mode = node.Flag("ceil_mode")};
}

AveragePoolNode DecodeAveragePool(const NodeReader& node) {
  const OperandType x = ReadCodes(node, "x_encoding");
  AverageSpec spec;
  spec.x_signed = x.encoding == Encoding::kSigned;
  spec.x_scale = node.ScaleOf("x_scale");
  spec.x_zero_point = node.ZeroPointOf("x_zero_point", x);
  spec.quantizer = ReadQuantizer(node);
  const Window window = ReadPoolWindow(node, false);
  const double x_scale = static_cast<double>(spec.x_scale);
  spec.fast_is_exact =
      ElementCount(window.kernel) <= kMaxFastDivisor && FastIsExact(spec.quantizer, 256.0 * x_scale, x_scale);
  return {spec, window, node.Flag("ceil_mode"), node.Flag("count_include_pad")};
}

GlobalAveragePoolNode DecodeGlobalAveragePool(const NodeReader& node) {
  const OperandType x = ReadCodes(node, "x_encoding");
  GlobalAverageSpec spec;
  spec.x_signed = x.encoding == Encoding::kSigned;
  spec.quantizer = ReadQuantizer(node);
  return {spec, node.ScaleOf("x_scale"), node.ZeroPointOf("x_zero_point", x), node.Flag("keepdims")};
}

std::vector<int64_t> OutputDims(const MaxPoolNode& node, const FedShape& x) {
  CheckFed(x, CodeType(node.is_signed), "x");
  return PoolOutputDims(node.window, node.ceil_mode, x.dims);
}

std::vector<int64_t> OutputDims(const AveragePoolNode& node, const FedShape& x) {
  CheckFed(x, CodeType(node.spec.x_signed), "x");
  return PoolOutputDims(node.window, node.ceil_mode, x.dims);
}

std::vector<int64_t> OutputDims(const GlobalAveragePoolNode& node, const FedShape& x) {
  CheckFed(x, CodeType(node.spec.x_signed), "x");
  Require(x.dims.size() >= 2, "x has shape ", ShapeText(x.dims), ", expected rank 2 or more");
  const int64_t pixels = BoundedCount(x.dims.subspan(1, x.dims.size() - 2));
  Require(pixels >= 1 && pixels <= kMaxSumPixels, "x has ", pixels, " pixels, expected 1..", kMaxSumPixels,
          ": the sum must fit int32");
  std::vector<int64_t> y = {x.dims.front()};
  if (node.keep_dims) y.insert(y.end(), x.dims.size() - 2, 1);
  y.push_back(x.dims.back());
  return y;
}

}  // namespace lowbit
