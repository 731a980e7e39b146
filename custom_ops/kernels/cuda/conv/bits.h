// Convolutions of stride 1 whose weights and codes have few bits, as population counts on wgmma (sm_90a).
#pragma once

#include <algorithm>

#include "kernels/cuda/conv/halo.h"

namespace lowbit::cuda {

struct WeightLayout;

extern const ConvRow kBitsRow;
extern const WeightLayout kBitWeights;

// Codes of so many channels of a place are a word of each plane. A step along K multiplies two words: of channels or
// of taps.
inline constexpr int kBitWord = 128, kBitUnit = 32, kUnitsOfWord = kBitWord / kBitUnit,
                     kBitWordBytes = kBitWord / 8;
// One plane of a step has 32 bytes of each row of B, rows in eights as wgmma reads them without swizzle. Rows of
// ones follow the channels' of the lowest plane: they count a pixel's own bits.
inline constexpr int kBitRowBytes = 2 * kBitWordBytes, kOnesRows = 16;

// Slabs of bytes on their way to planes.
inline constexpr int kMaxBitSlots = 4;

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

// step[i]: of each step, where the first word's place is from that of the tile, and how much further the second
// word's, in places; the one in the low half, the other in the high one. k_tiles: steps.
struct BitsParams : HaloParams {
  int planes = 1, x_bits = 1;     // of the instance
  int rows = 0;                   // of a plane of B
  int w_shift = 0, w_lowest = 0;  // WeightBits
  const uint8_t* ones = nullptr;  // [k_tiles][kOnesRows], as rows of B
  int words = 0, places = 0;      // of a plane of codes, of a word
  int slots = 0;                  // for slabs of bytes; there are as many planes for patches as stages
};

cudaError_t LaunchBits(const BitsParams& params, const ConvConfig& config, const LaunchOptions& options);

}  // namespace lowbit::cuda
