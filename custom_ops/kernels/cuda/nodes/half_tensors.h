// Images of float16 numbers with the channels last (core/half_tensors.h).
#pragma once

#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {

// Channels that a thread has at once, in 16 bytes.
inline constexpr int kHalvesOfThread = 8;

// Whether an image [N, C, H, W] or [N, C, W] may lie so.
bool FitsHalves(const TensorShape& image);
inline int64_t BytesOfHalves(const TensorShape& image) { return CountOf(image.dims) * 2; }
// From float32 as ONNX has it. Throws Error.
void LaunchToHalves(const Run& run, const float* x, void* y, const TensorShape& image);

// An image of few channels with zeros around it, [images][rows][columns][channels] and zeros behind the last row:
// `channels` of float16, 4 or 8, of which x has some.
struct FewHalves {
  int images = 0, rows = 0, columns = 0, channels = 0;
  int top = 0, left = 0;  // where x begins

  static constexpr int kBytesBehind = 128;
  int64_t RowBytes() const { return int64_t{columns} * channels * 2; }
  int64_t Bytes() const { return int64_t{images} * rows * RowBytes() + kBytesBehind; }
};
// Throws Error.
void LaunchToFewHalves(const Run& run, const float* x, void* y, const TensorShape& image, const FewHalves& to);

}  // namespace lowbit::cuda
