// Sliding windows of pools and float convolutions.
#pragma once

#include <array>
#include <cstdint>

#include "core/node_reader.h"

namespace lowbit::cuda {

// One spatial dim of a pool. Attributes may claim windows far larger than the image, hence 64 bits.
struct WindowDim {
  int64_t kernel = 1, stride = 1, dilation = 1, pad_begin = 0, pad_end = 0;
  int64_t in = 1, out = 1;

  // Taps of output `o` that lie inside the image: the first one's pixel, and how many.
  struct Span {
    int64_t first, count;
  };
  __device__ __forceinline__ Span Inside(int64_t o) const {
    const int64_t first = o * stride - pad_begin;
    if (first >= 0 && first + (kernel - 1) * dilation < in) return {first, kernel};
    const int64_t skipped = first < 0 ? (-first + dilation - 1) / dilation : 0;
    const int64_t reached = first < in ? (in - 1 - first) / dilation + 1 : 0;
    const int64_t end = kernel < reached ? kernel : reached;
    return {first + skipped * dilation, end > skipped ? end - skipped : 0};
  }
  // The same of an undilated window whose numbers are small.
  __device__ __forceinline__ Span InsideSmall(int o) const {
    const int first = o * static_cast<int>(stride) - static_cast<int>(pad_begin);
    const int begin = max(first, 0), end = min(first + static_cast<int>(kernel), static_cast<int>(in));
    return {begin, max(end - begin, 0)};
  }
  // Taps inside the padded image; with ceil_mode the last window may reach beyond even that.
  __device__ __forceinline__ int64_t Padded(int64_t o) const {
    const int64_t room = in + pad_end - (o * stride - pad_begin);
    const int64_t reached = (room + dilation - 1) / dilation;
    return kernel < reached ? kernel : reached;
  }
};

// Index 0 the height. `x` and `y` hold the spatial dims alone, one or two of them.
inline std::array<WindowDim, 2> WindowDims(const Window& window, const int64_t* x, const int64_t* y) {
  std::array<WindowDim, 2> out;
  const auto spatial = static_cast<size_t>(window.spatial);
  for (size_t i = 0; i < spatial; ++i) {
    const size_t d = i + kMaxSpatial - spatial;
    out[d - 1] = {window.kernel[d],
                  window.stride[d],
                  window.dilation[d],
                  window.pad_begin[d],
                  window.pad_end[d],
                  x[i],
                  y[i]};
  }
  return out;
}

}  // namespace lowbit::cuda
