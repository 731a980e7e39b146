// What the kernel of stem_pool.h receives.
#pragma once

#include <cstdint>

#include "kernels/cuda/conv/cell_weights.h"
#include "kernels/cuda/conv/conv_params.h"

namespace lowbit::cuda {

// Columns of pooled pixels of a block.
inline constexpr int kPoolTileColumns = 28;
// Blocks of a multiprocessor, as registers allow; one less for four channels.
inline constexpr int kPoolBlocks = 4;
struct PooledParams {
  const float* x = nullptr;  // planes
  const uint8_t* weights = nullptr;
  uint8_t* y = nullptr;
  bool in_twos = false;  // two pixels of a row are one aligned copy
  int n = 0;             // channels
  int m = 0;             // pooled pixels, of all images
  int in_h = 0, in_w = 0, out_h = 0, out_w = 0, pooled_h = 0, pooled_w = 0;
  int lead_rows = 0, lead_columns = 0;  // cells before that of an output's own place, in padding at the edge
  int pool_top = 0, pool_left = 0;
  int tiles_x = 1, images = 0;
  FastDivisor by_tiles_x;
  int strips = 1, strip_rows = 0, longer_strips = 0;
  bool is_early = false;  // the next kernel may start at once
  uint32_t fill = 0;      // four times the code of padding
  PixelRounding rounding;
  uint32_t add[kMaxImageChannels] = {};  // what turns a word's sum of rounded floats into codes
  EpilogueParams epilogue;
};

}  // namespace lowbit::cuda
