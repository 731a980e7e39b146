// What the kernels share that keep patches of the input in shared memory, as lines of places (HaloParams):
// how rows get there, and which output a place is.
#pragma once

#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/conv/halo.h"
#include "kernels/cuda/device/pipeline.cuh"
#include "kernels/cuda/device/tensor_maps.h"

namespace lowbit::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The output of each place of a tile.
struct PixelsOfPlaces {
  const ConvParams& p;
  const HaloParams& h;
  int first;
  __device__ __forceinline__ int operator()(int row) const {
    const int place = first + row, line = Divide(place, h.by_pitch), ox = place - line * h.pitch;
    const int image = Divide(line, h.by_rows), oy = line - image * h.image_rows;
    const bool there = ox < p.out_w && oy < p.out_h && image < h.images;
    return there ? (image * p.out_h + oy) * p.out_w + ox : -1;
  }
};
#endif

// The input in boxes of a row of `pitch` pixels and a slab of channels.
inline cudaError_t EncodeRows(const ConvParams& p, const HaloParams& h, CUtensorMap* map) {
  const auto wide = [](int v) { return static_cast<cuuint64_t>(v); };
  const cuuint64_t sizes[] = {wide(p.pixel_bytes), wide(p.in_w), wide(p.in_h), wide(h.images)};
  const cuuint64_t strides[] = {wide(p.pixel_bytes), wide(p.pixel_bytes) * wide(p.in_w),
                                wide(p.pixel_bytes) * wide(p.in_w) * wide(p.in_h)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(h.slab), static_cast<cuuint32_t>(h.pitch), 1, 1};
  return EncodeBoxes(map, p.x, sizes, strides, box);
}

}  // namespace lowbit::cuda
