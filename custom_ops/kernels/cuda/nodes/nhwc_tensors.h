// Float images with the channels last (core/channels_last.h): float16 numbers, or float32 ones.
#pragma once

#include "core/float_precision.h"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {

// Channels that a thread has at once.
inline constexpr int kChannelsOfThread = 8;

// The bytes of a number that products of this precision read.
inline constexpr int BytesOfNumber(FloatPrecision precision) {
  return precision == FloatPrecision::kFloat16 ? 2 : 4;
}
// Whether an image [N, C, H, W] or [N, C, W] may lie so.
bool FitsChannelsLast(const TensorShape& image);
// From float32 as ONNX has it. Throws Error.
void LaunchToNhwc(const Run& run, bool halves, const float* x, void* y, const TensorShape& image);

// An image of few channels with zeros around it, [images][rows][columns][channels] and zeros behind the last row:
// `channels` of them, 4 or 8, of which x has some.
struct FewChannelsImage {
  bool halves = false;
  int images = 0, rows = 0, columns = 0, channels = 0;
  int top = 0, left = 0;  // where x begins

  static constexpr int kBytesBehind = 128;
  int PixelBytes() const { return channels * (halves ? 2 : 4); }
  int64_t RowBytes() const { return int64_t{columns} * PixelBytes(); }
  int64_t Bytes() const { return int64_t{images} * rows * RowBytes() + kBytesBehind; }
};
// Throws Error.
void LaunchToFewChannels(const Run& run, const float* x, void* y, const TensorShape& image,
                         const FewChannelsImage& to);

}  // namespace lowbit::cuda
