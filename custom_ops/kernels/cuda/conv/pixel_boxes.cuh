// What the tensor memory accelerator fetches and stores for convolutions on Hopper (sm_90a): boxes of the
// input's pixels, which walk along the pixels that a tap of neighbouring outputs reads, and boxes of output
// codes.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/device/pipeline.cuh"
#include "kernels/cuda/device/tensor_maps.h"

namespace lowbit::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Where the windows of outputs begin in the input: column, row, image.
struct PixelPlace {
  int w, h, n;
};

// That of output m.
__device__ __forceinline__ PixelPlace FirstPixel(const PixelParams& p, int m) {
  if (p.flat) return {m, 0, 0};
  const int n = Divide(m, p.by_image), rest = m - n * static_cast<int>(p.by_image.divisor);
  const int oy = Divide(rest, p.by_row), ox = rest - oy * static_cast<int>(p.by_row.divisor);
  return {ox * p.stride_w - p.pad_left, oy * p.stride_h - p.pad_top, n};
}

// Walks along the tiles of k: the channels that a box has, the tap that is dx columns and dy rows into the
// windows. Tiles do not reach into a second tap.
struct TapWalk {
  int channel = 0, dx = 0, dy = 0;

  TapWalk() = default;
  __device__ __forceinline__ TapWalk(const ColumnParams& p, int k_tile) {
    const int tap = Divide(k_tile * kRowBytes, p.by_channels), ty = Divide(tap, p.by_kernel_w);
    channel = k_tile * kRowBytes - tap * p.channels;
    dx = (tap - ty * p.kernel_w) * p.dilation_w;
    dy = ty * p.dilation_h;
  }
  __device__ __forceinline__ void Step(const ColumnParams& p) {
    channel += kRowBytes;
    if (channel < p.channels) return;
    channel = 0;
    dx += p.dilation_w;
    if (dx < p.kernel_w * p.dilation_w) return;
    dx = 0;
    dy += p.dilation_h;
  }
};

// A box of `map`: the pixels of consecutive outputs from the one at `at` on, dx columns and dy rows into
// their windows, the channels of a row of the box from c on.
__device__ __forceinline__ void PixelCopy(uint32_t shared, const CUtensorMap& map, int c,
                                          const PixelPlace& at, int dx, int dy, uint32_t barrier) {
  WindowCopy(shared, map, c, at.w, at.h, at.n, dx, dy, barrier);
}

// All channels of 64 pixels of a 1x1 convolution, those of outputs from m on, in boxes behind each other.
template <typename Params>
__device__ __forceinline__ void StreamCopy(uint32_t shared, const CUtensorMap& map, const Params& p, int m,
                                           uint32_t barrier) {
  const PixelPlace first = FirstPixel(p, m);
  ArriveExpecting(barrier, p.k_tiles * 64 * kRowBytes);
  for (int k = 0; k < p.k_tiles; ++k) {
    PixelCopy(shared + k * 64 * kRowBytes, map, k * kRowBytes, first, 0, 0, barrier);
  }
}

// What moves the 16-byte chunks of a row of a box of codes: exchanged by the bits of the row, of its half or
// quarter where two or four rows share 128 bytes.
template <int kTileN>
__device__ __forceinline__ int CodesSwizzle(int row) {
  static_assert(kTileN == 128 || kTileN == 64 || kTileN == 32);
  return (kTileN == 128 ? row % 8 : kTileN == 64 ? row / 2 % 4 : row / 4 % 2) * 16;
}

// Where a thread of a warpgroup finds the outputs whose sums it has, in a tile of 64 pixels: the first one's
// row and column, and their codes in a box of the tile.
template <int kTileN>
struct OwnCodes {
  int row, column, swizzle;

  __device__ __forceinline__ explicit OwnCodes(int thread)
      : row(thread / 32 * 16 + thread % 32 / 4), column(thread % 4 * 4), swizzle(CodesSwizzle<kTileN>(row)) {}

  // Rounds sums that began with the biases to codes in the box at `box`, in the place of residuals where
  // there are any. They may be stored behind FenceAsyncProxy and a barrier.
  template <Finish kFinish>
  __device__ __forceinline__ void Round(const EpilogueParams& e, const BlockState<kTileN>& state,
                                        const int (&sums)[kTileN / 2], uint8_t* box) const {
    uint8_t* const rows = box + row * kTileN;
    RequantizeFragments<kFinish, true, 8 * kTileN / 4>(
        e, state, [&](const auto& f) { ForEachFour<kTileN>(sums, row, column, f); },
        [&](int, int at_column) { return reinterpret_cast<unsigned*>(rows + (at_column ^ swizzle)); });
  }
};
#endif

// The input in boxes of `pixels` pixels and kBytes channels, 128 or 64. They walk along the pixels that the
// first taps of outputs' windows read, in steps of the strides, from image to image; where those are all
// pixels, along one long row. What lies outside the image, and channels past the last, are read as 0.
template <int kBytes = kRowBytes>
cudaError_t EncodePixels(const uint8_t* x, int m, const PixelParams& p, int pixels, CUtensorMap* map) {
  static_assert(kBytes == 128 || kBytes == 64);
  const auto wide = [](int v) { return static_cast<cuuint64_t>(v); };
  const int in_w = p.flat ? m : p.in_w, in_h = p.flat ? 1 : p.in_h, out_w = p.flat ? m : p.out_w,
            out_h = p.flat ? 1 : p.out_h;
  const int batch = p.flat ? 1 : m / (p.out_h * p.out_w);
  const cuuint64_t sizes[] = {wide(p.pixel_bytes), wide(in_w), wide(in_h), wide(batch)};
  const cuuint64_t strides[] = {wide(p.pixel_bytes), wide(p.pixel_bytes) * wide(in_w),
                                wide(p.pixel_bytes) * wide(in_w) * wide(in_h)};
  const int lower[] = {-p.pad_left, -p.pad_top};
  const int upper[] = {(out_w - 1) * p.stride_w - p.pad_left - in_w + 1,
                       (out_h - 1) * p.stride_h - p.pad_top - in_h + 1};
  const cuuint32_t steps[] = {1, static_cast<cuuint32_t>(p.stride_w), static_cast<cuuint32_t>(p.stride_h), 1};
  return EncodeWindows(map, x, sizes, strides, lower, upper, kBytes, static_cast<cuuint32_t>(pixels), steps);
}

// Codes [pixels][channels] in boxes of 64 pixels and kTileN channels. What lies past the last of either is
// neither read nor written.
template <int kTileN>
cudaError_t EncodeCodes(const void* codes, int pixels, int channels, CUtensorMap* map) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(channels), static_cast<cuuint64_t>(pixels)};
  const cuuint32_t box[] = {kTileN, 64};
  return EncodeBoxes(map, codes, sizes, sizes, box);
}

}  // namespace lowbit::cuda
