// Convolution as plain data: what is computed (ConvSpec), on which shape (ConvShape). Gemm is a convolution with
// a 1x1 kernel over a [rows, 1, 1, K] image; 1-D convolution has height 1, 2-D convolution depth 1. A 3-D one
// whose window is flat is a 2-D one (VolumeLayout, core/nodes.h).
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "core/types.h"

namespace lowbit {

// The constant geometry of a convolution node, validated by ParseConv: every field is positive where it must
// be and every product below fits int64 with room to spare.
struct ConvGeometry {
  int64_t in_channels = 0, out_channels = 0, group = 1;
  int64_t kernel_h = 1, kernel_w = 1;
  int64_t stride_h = 1, stride_w = 1;
  int64_t dilation_h = 1, dilation_w = 1;
  int64_t pad_top = 0, pad_left = 0, pad_bottom = 0, pad_right = 0;
  int64_t kernel_d = 1, stride_d = 1, dilation_d = 1, pad_front = 0, pad_back = 0;
  bool transposed = false;
  int64_t output_pad_h = 0, output_pad_w = 0;  // transposed only

  int64_t GroupIn() const { return in_channels / group; }
  int64_t GroupOut() const { return out_channels / group; }
  int64_t Taps() const { return kernel_d * kernel_h * kernel_w; }
  // Whether planes of a volume are convolved one by one, as the images of a batch are.
  bool IsPlanar() const { return kernel_d == 1 && stride_d == 1 && pad_front == 0 && pad_back == 0; }
  // Whether the pixels of a plane are convolved one by one, along the depth.
  bool IsColumnar() const {
    return kernel_h == 1 && kernel_w == 1 && stride_h == 1 && stride_w == 1 && pad_top == 0 &&
           pad_left == 0 && pad_bottom == 0 && pad_right == 0;
  }
  int64_t K() const { return Taps() * GroupIn(); }  // products summed into one output
  bool IsDepthwise() const { return group == in_channels && GroupOut() == 1 && group > 1; }
};

struct ConvShape {
  int64_t batch = 0, in_h = 0, in_w = 0, out_h = 0, out_w = 0;
  int64_t in_d = 1, out_d = 1;
  int64_t OutPlanes() const { return batch * out_d; }
  int64_t OutPixels() const { return OutPlanes() * out_h * out_w; }
  bool operator==(const ConvShape&) const = default;
};

// Throws Error where the output would be empty in a way ONNX forbids or a size overflows.
ConvShape InferConvShape(const ConvGeometry& geometry, int64_t batch, int64_t in_h, int64_t in_w,
                         int64_t in_d = 1);

// The four epilogues of the numeric contract (docs/numerics.md). All arithmetic is float32, each operation
// rounded once and never contracted; rint rounds half to even.
enum class EpilogueKind : uint8_t { kRequantize, kFloat, kThresholds, kTail };

// One step of a float tail, in the order of the file.
enum class TailStep : uint8_t { kBias, kAffine, kResidual, kRelu, kClip, kSilu, kHardSwish };

struct Epilogue {
  EpilogueKind kind = EpilogueKind::kRequantize;
  bool quantized_output = true;  // false: float32 output (kFloat, or kTail without y_scale)

  // kRequantize: q = clip(rint(f32(acc) * multiplier[c]) + zero_point, lo, hi). When has_residual is set,
  // these four describe the inner quantizer and the second rounding follows:
  //   v = f32(q - zero_point) * inner_scale + f32(r - residual_zero_point) * residual_scale
  //   y = clip(rint(v / y_scale) + y_zero_point, y_lo, y_hi)
  std::vector<float> multiplier;  // [out_channels]  f32(f32(x_scale * w_scale[c]) / (inner or y) scale)
  int32_t zero_point = 0, lo = 0, hi = 255;

  // kFloat, kTail: v = f32(acc) * acc_scale[c]
  std::vector<float> acc_scale;  // [out_channels]  f32(x_scale * w_scale[c])

  // kThresholds: q = base[c] + #{k : dir[c] * acc >= dir[c] * thresholds[c][k]}, compared in int64:
  // dir -1 counts the thresholds that acc does not exceed, for chains that fall.
  std::vector<int32_t> thresholds;  // [out_channels * threshold_count]
  std::vector<int32_t> base, dir;   // [out_channels], dir is +1 or -1
  int64_t threshold_count = 0;

  // kTail
  std::vector<TailStep> tail;
  std::vector<float> tail_bias, tail_scale, tail_shift;  // [out_channels]: v+bias; (v*scale)+shift
  float clip_min = 0, clip_max = 0;

  // kTail with a residual that is added as behind kRequantize: the tail, which has no such step, ends in the
  // inner quantizer, v / inner_scale rounded. So is the residual of kThresholds. No schema says so: nodes that
  // are fused have them.
  bool adds_behind_tail = false;
  bool has_residual = false;
  float residual_scale = 1, inner_scale = 1;
  int32_t residual_zero_point = 0;
  bool residual_signed = false;

  // The final quantizer of kTail and of kRequantize with residual (kRequantize without residual uses the
  // first group).
  float y_scale = 1;
  int32_t y_zero_point = 0, y_lo = 0, y_hi = 255;
  bool y_signed = false;  // storage of the output codes: int8 when set
};

// The integer values of a node's weights: their least and largest, and whether 0 is among them.
struct ValueRange {
  int32_t lo = std::numeric_limits<int32_t>::max(), hi = std::numeric_limits<int32_t>::min();
  bool has_zero = false;
};

// Kernels for few bits choose their arithmetic by the values that weights really have.
inline constexpr int kFewWeightBits = 4;

// The integer values of an output channel's weights: their least and largest, their sum, and that of their
// magnitudes.
struct ChannelValues {
  int32_t lo = 0, hi = 0;
  int64_t sum = 0, magnitude = 0;
};

// Everything constant about a convolution node, decoded and validated.
struct ConvSpec {
  ConvGeometry geometry;
  OperandType x, w;
  int32_t x_zero_point = 0;
  // Weight codes, logical order [out_channels][kernel_d][kernel_h][kernel_w][in_channels / group], one code
  // per byte (two's complement for signed codes, so that int8_t(code) is the code; uint8 for unsigned and
  // bipolar ones).
  std::vector<uint8_t> weights;
  // Read once (ReadWeightValues), for all that choose a kernel and those that pack weights.
  ValueRange weight_values;
  std::vector<ChannelValues> channel_values;  // [out_channels]
  std::vector<int32_t> w_zero_point;          // [out_channels]
  std::vector<int32_t> bias;                  // [out_channels], zeros when absent
  Epilogue epilogue;

  int32_t WeightCode(int64_t index) const {
    return w.encoding == Encoding::kSigned ? static_cast<int8_t>(weights[static_cast<size_t>(index)])
                                           : weights[static_cast<size_t>(index)];
  }
  // The integer value of a weight: code - zero point, or 2 * code - 1 for bipolar codes.
  int32_t WeightValue(int64_t out_channel, int64_t index) const {
    return w.encoding == Encoding::kBipolar
               ? 2 * WeightCode(index) - 1
               : WeightCode(index) - w_zero_point[static_cast<size_t>(out_channel)];
  }
};

// Fills weight_values and channel_values, for a node whose weights and zero points are there.
void ReadWeightValues(ConvSpec& spec);

}  // namespace lowbit
