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

// An image of few channels with zeros around it, [images][rows][columns][fold][fold][channels] and zeros
// behind the last row: squares of pixels, or each by itself, with `channels` of which x has some. 4 channels
// where squares are 2 x 2.
struct FewChannelsImage {
  bool halves = false;
  int images = 0, rows = 0, columns = 0, fold = 1, channels = 0;
  int top = 0, left = 0;  // the pixel where x begins

  static constexpr int kBytesBehind = 128;
  int SquareBytes() const { return fold * fold * channels * (halves ? 2 : 4); }
  int64_t RowBytes() const { return int64_t{columns} * SquareBytes(); }
  int64_t Bytes() const { return int64_t{images} * rows * RowBytes() + kBytesBehind; }
};
// Throws Error.
void LaunchToFewChannels(const Run& run, const float* x, void* y, const TensorShape& image,
                         const FewChannelsImage& to);

}  // namespace lowbit::cuda
