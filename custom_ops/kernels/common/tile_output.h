// Where the outputs of a block of pixels go. Plain data only.
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

}  // namespace lowbit
