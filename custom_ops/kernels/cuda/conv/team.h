// 1x1 convolutions on wgmma (sm_90a): the warpgroups of a block share its weights.
#pragma once

#include "kernels/cuda/conv/launch.h"

namespace lowbit::cuda {

struct ConvRow;

extern const ConvRow kTeamRow;

// Slots of a block, and warpgroups, as many as registers allow.
inline constexpr int kMaxTeamSlots = 8;
constexpr int MaxTeamGroups(int tile_n) { return tile_n > 64 ? 4 : 6; }

// Columns of channels whose weights a block has room for.
inline constexpr int kTeamColumns = 2;

// Tiles in a line, which blocks share: all columns of channels, one after the other. Or, `by_pixel`, as many lines as there are
// pairs of columns, each with blocks of its own: pixels one after the other, those of one column and then of the other.
struct TeamParams : TileParams, PixelParams {
  TileShares shares;  // of a line
  int lines = 1;
  int pixels_offset = 0;  // of slots, behind the weights
  bool by_pixel = false;
  FastDivisor by_row;  // tiles of a column; columns of a pair
};

cudaError_t LaunchTeam(const TeamParams& params, const ConvConfig& config, const LaunchOptions& options);

}  // namespace lowbit::cuda
