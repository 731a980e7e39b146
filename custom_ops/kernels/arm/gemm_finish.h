// The end of a tile: int32 sums in memory, which become bytes or floats of y.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/tile_output.h"

namespace lowbit {

// sums += row_sums[pixel] * weight[channel]; both belong to the first of `sums`.
void AddRowSums(const TileSums& s, const int32_t* row_sums, const int32_t* weight);
void FinishSums(const TileOutput& output, const TileSums& s);

}  // namespace lowbit
