// Convolutions whose weights and codes have few bits, as population counts: of stride 1 on wgmma (sm_90a), any on
// mma.sync (sm_80 to sm_90).
#pragma once

#include <algorithm>

#include "kernels/cuda/conv/halo.h"

namespace lowbit::cuda {

struct WeightLayout;

extern const ConvRow kBitsRow, kBitsMmaRow;
extern const WeightLayout kBitWeights;

// Of a step along K: as many bits, of so many channels each.
inline constexpr int kBitStep = 256, kBitUnit = 32, kUnitsOfStep = kBitStep / kBitUnit;
// One plane of a step has 32 bytes of each row of B, rows in eights as wgmma reads them without swizzle. Rows of
// ones follow the channels' of the lowest plane: they count a pixel's own bits.
inline constexpr int kBitRowBytes = kBitStep / 8, kOnesRows = 16;

constexpr int BitStepBytes(int tile_n, int planes) { return (planes * tile_n + kOnesRows) * kBitRowBytes; }

// The bits of codes that there are instances for: those of x, or more, which are then 0.
constexpr int BitsOfInstance(int planes, int x_bits) {
  const int bits = planes > 1 ? std::max(2, x_bits) : x_bits;
  return bits > 2 ? 4 : bits;
}
// Tiles of a patch, one for each warpgroup: as many as registers allow. Wide ones have few products alone.
constexpr int MaxBitTiles(int tile_n, int planes, int x_bits) {
  if (tile_n > 64 && planes * x_bits > 2) return 0;
  const int sums = (planes + x_bits - 1) * tile_n / 2;
  return sums <= 32 ? 4 : sums <= 96 ? 2 : 1;
}

struct BitOperands {
  int planes = 1, x_bits = 1;     // of the instance
  int rows = 0;                   // of a plane of B
  int w_shift = 0, w_lowest = 0;  // WeightBits
};

// step[i]: as of HaloParams; k_tiles: steps of kBitStep.
struct BitsParams : HaloParams, BitOperands {
  const uint8_t* ones = nullptr;  // [k_tiles][kOnesRows], as rows of B
};

// mma.sync: tiles of pixels by as many channels.
inline constexpr int kBitMmaColumns = 64, kBitMmaStages = 3;
struct BitTileParams : GatherParams, BitOperands {};

cudaError_t LaunchBits(const BitsParams& params, const ConvConfig& config, const LaunchOptions& options);
cudaError_t LaunchBitsMma(const BitTileParams& params, const ConvConfig& config,
                          const LaunchOptions& options);

}  // namespace lowbit::cuda
