// Sliding windows of pools and float convolutions.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/node_reader.h"
#include "kernels/cuda/nodes/codes.cuh"

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
  // Taps inside the padded image; with ceil_mode the last window may reach beyond even that.
  __device__ __forceinline__ int64_t Padded(int64_t o) const {
    const int64_t room = in + pad_end - (o * stride - pad_begin);
    const int64_t reached = (room + dilation - 1) / dilation;
    return kernel < reached ? kernel : reached;
  }
};

// The windows of a plane's outputs, numbered in rows.
struct Windows {
  WindowDim h, w;
  FastDivisor by_h, by_w;  // the outputs of a column, of a row

  struct Place {
    unsigned plane, row, column;
  };
  __device__ __forceinline__ Place PlaceOf(unsigned output) const {
    const auto [line, column] = Divided(output, by_w);
    const auto [plane, row] = Divided(line, by_h);
    return {plane, row, column};
  }
};

// `x` and `y` begin with the spatial dims, one or two of them.
inline Windows WindowsOf(const Window& window, const int64_t* x, const int64_t* y) {
  Windows out;
  const auto spatial = static_cast<size_t>(window.spatial);
  for (size_t i = 0; i < spatial; ++i) {
    const size_t d = i + kMaxSpatial - spatial;
    WindowDim& dim = d == 1 ? out.h : out.w;  // nvcc takes no list for a conditional expression
    dim = {window.kernel[d],
           window.stride[d],
           window.dilation[d],
           window.pad_begin[d],
           window.pad_end[d],
           x[i],
           y[i]};
  }
  out.by_h = MakeDivisor(std::max<int64_t>(1, out.h.out));
  out.by_w = MakeDivisor(std::max<int64_t>(1, out.w.out));
  return out;
}

}  // namespace lowbit::cuda
