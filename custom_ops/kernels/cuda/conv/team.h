// 1x1 convolutions on wgmma (sm_90a): the warpgroups of a block share its weights.
#pragma once

#include "kernels/cuda/conv/launch.h"

namespace lowbit::cuda {

struct ConvRow;

extern const ConvRow kTeamRow;

// Slots of a block, and warpgroups, as many as registers allow.
inline constexpr int kMaxTeamSlots = 8;
constexpr int MaxTeamGroups(int tile_n) { return tile_n > 64 ? 4 : 6; }

// Tiles in columns of channels, one column after the other.
struct TeamParams : TileParams, PixelParams {
  TileShares shares;
  int weight_columns = 1;  // whose weights a block may keep
  FastDivisor by_column;   // tiles of a column
};

cudaError_t LaunchTeam(const TeamParams& params, const ConvConfig& config, const LaunchOptions& options);

}  // namespace lowbit::cuda
