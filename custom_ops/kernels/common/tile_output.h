// Where the outputs of a block of pixels go, and sums in memory that become such. Plain data only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/epilogue_tables.h"

namespace lowbit {

// The first pixel of the block is pixel first_pixel of y, the others lie pixel_step apart.
struct TileOutput {
  const EpilogueView* epilogue;
  size_t first_pixel, pixel_step;
  const uint8_t* residual;  // codes, shape of y, or null
  void* y;
};

// `pixels` rows of sums, `pitch` (8, 16 or 32) apart, of `count` channels that exist.
struct TileSums {
  int32_t* sums;
  size_t pitch;
  size_t pixel, pixels;  // the first one, counted from the block's
  size_t channel, count;
};

}  // namespace lowbit
