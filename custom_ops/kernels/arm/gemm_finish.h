// The end of a tile: int32 sums in memory, which become bytes or floats of y.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/tile_output.h"

namespace lowbit {

// `pixels` rows of sums, `pitch` (8, 16 or 32) apart, of `count` channels that exist.
struct GemmSums {
  int32_t* sums;
  size_t pitch;
  size_t pixel, pixels;  // the first one, counted from the block's
  size_t channel, count;
};

// sums += row_sums[pixel] * weight[channel]; both belong to the first of `sums`.
void AddRowSums(const GemmSums& s, const int32_t* row_sums, const int32_t* weight);
void FinishSums(const TileOutput& output, const GemmSums& s);

}  // namespace lowbit
