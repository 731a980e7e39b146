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
  const HaloParams& p;
  int first;

  // Of the input, where the places of a line begin: row and column.
  struct Start {
    int y, x, image;
  };
  static __device__ __forceinline__ Start StartOf(const HaloParams& p, int line) {
    const int image = Divide(line, p.by_rows);
    return {line - image * p.image_rows - p.pad_top, -p.pad_left, image};
  }
  __device__ __forceinline__ int operator()(int row) const {
    int image, oy, ox;
    const int pixel = Find(row, image, oy, ox) ? (image * p.out_h + oy) * p.out_w + ox : p.m;
    return pixel < p.m ? pixel : -1;
  }
  __device__ __forceinline__ int BorderClass(int row) const {
    int image, oy, ox;
    return Find(row, image, oy, ox) ? ClassAt(p.border, p, oy, ox) : 0;
  }

 private:
  __device__ __forceinline__ bool Find(int row, int& image, int& oy, int& ox) const {
    const int place = first + row, line = Divide(place, p.by_pitch);
    ox = place - line * p.pitch;
    image = Divide(line, p.by_rows);
    oy = line - image * p.image_rows;
    return ox < p.out_w && oy < p.out_h && image < p.images;
  }
};
#endif

// The input in boxes of a row of `pitch` pixels and a slab of channels.
inline cudaError_t EncodeRows(const HaloParams& p, CUtensorMap* map) {
  const auto wide = [](int v) { return static_cast<cuuint64_t>(v); };
  const cuuint64_t channels = wide(p.slab) * wide(p.slabs);
  const cuuint64_t sizes[] = {channels, wide(p.in_w), wide(p.in_h), wide(p.images)};
  const cuuint64_t strides[] = {channels, channels * wide(p.in_w), channels * wide(p.in_w) * wide(p.in_h)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(p.slab), static_cast<cuuint32_t>(p.pitch), 1, 1};
  return EncodeBoxes(map, p.x, sizes, strides, box);
}

}  // namespace lowbit::cuda
