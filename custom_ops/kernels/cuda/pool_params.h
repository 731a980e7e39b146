// What the kernel of conv_pool.h receives, and what its packed weights are.
#pragma once

#include <cstdint>

#include "kernels/cuda/conv_params.h"

namespace lowbit::cuda {

// The image is cells of 2 x 2 pixels. With both strides 2, a window begins at the same place of a cell for
// every output, and lies in kCellTaps x kCellTaps cells; weights of pixels that it leaves out are 0. A cell
// is the codes of its pixels, row by row, without gaps: as many words as the image has channels.
inline constexpr int kCellTaps = 4;
// Channels of a block; its columns of pooled pixels.
inline constexpr int kPoolTileN = 64, kPoolTileColumns = 28;
// Of a multiprocessor, as registers allow; one less for four channels.
inline constexpr int kPoolBlocks = 4;
// One step of k32 of a tile's weights, as wgmma reads it without swizzle.
inline constexpr int kCellMatrixBytes = kPoolTileN * 32;
// Four rows of cells take turns in the registers of A. For the next row of outputs, one of them is the next
// row of cells instead of the first, so that the weights are in another order: rows of cells 0 1 2 3, 3 0 1
// 2, 2 3 0 1, 1 2 3 0. The latter two are the halves of the former two, exchanged.
inline constexpr int kCellOrders = 2;
// Of a tile's weights, for every channel of the image.
inline constexpr int kCellChannelBytes = kCellOrders * 2 * kCellMatrixBytes;

struct PooledParams {
  const float* x = nullptr;  // planes
  const uint8_t* weights = nullptr;
  uint8_t* y = nullptr;
  bool in_pairs = false;  // two pixels of a row are one aligned copy
  int n = 0;              // channels
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
