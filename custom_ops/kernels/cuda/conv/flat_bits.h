// Products of rows as they lie, of weights of 1 or 2 bits by codes of up to 4, as population counts on wgmma (sm_90a).
#pragma once

#include <algorithm>

#include "core/bit_planes.h"
#include "kernels/cuda/conv/launch.h"

namespace lowbit::cuda {

struct ConvRow;
struct WeightLayout;

extern const ConvRow kFlatBitsRow;
extern const WeightLayout kFlatBitWeights;

inline constexpr int kFlatRows = 64;  // of a tile
// A step along K multiplies two words of 128 channels: 32 bytes of each row.
inline constexpr int kFlatStepWords = 2;
// Rows of codes have a word of each in a row, weights eight rows' parts of a step.
inline constexpr int kFlatWordBytes = kFlatRows * kPlaneWordBytes,
                     kFlatEightBytes = 8 * kFlatStepWords * kPlaneWordBytes;

// Planes of codes that instances have.
constexpr int FlatCodePlanes(int x_bits) { return x_bits == 3 ? 4 : x_bits; }
// Rows of ones behind those of weights, which count a row's own bits: as many as wgmma's widths ask for.
constexpr int FlatOnesRows(int tile_n, int w_planes) { return tile_n * w_planes == 16 ? 8 : 16; }
constexpr int FlatColumns(int tile_n, int w_planes) {
  return tile_n * w_planes + FlatOnesRows(tile_n, w_planes);
}
// Whether a thread has registers for the counts of all planes.
constexpr bool HasFlatInstance(int tile_n, int w_planes, int code_planes) {
  return FlatColumns(tile_n, w_planes) / 2 * code_planes <= 160;
}

// From row to row of sums that wait in shared memory.
constexpr int FlatStagedInts(int tile_n) { return tile_n + 8; }

// k_tiles: steps.
struct FlatBitsParams : TileParams, SumsParams {
  int w_planes = 1, code_planes = 1;  // of the instance
  int w_shift = 0, w_lowest = 0;      // WeightBits
  int eights = 0;                     // of rows of a plane of weights
  int words = 0;                      // of a plane of codes
  int row_bytes = 0;                  // of codes
  bool of_planes = false;             // codes come so, else as bytes
  // Sums of all of K are finished in registers, four channels at once.
  bool finishes_fours = false;
  bool starts_early = false;  // the next kernel's blocks may come before this one has its turn
  // What a bit of the highest plane counts, negative of codes with signs; the bits that codes are read of.
  int x_top = 1;
  uint32_t x_mask = 0;
};

cudaError_t LaunchFlatBits(const FlatBitsParams& params, const ConvConfig& config,
                           const LaunchOptions& options);

}  // namespace lowbit::cuda
