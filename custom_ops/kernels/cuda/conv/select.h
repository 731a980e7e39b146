// Which tile, which split: pure functions from numbers to configurations, testable without a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/conv/cuda_conv.h"

namespace lowbit::cuda {

// What Algorithm::kHalo and kWindows need to know, as HaloParams has it; no tiles where they do not apply.
struct HaloLine {
  int64_t tiles = 0;
  int pitch = 0, reach = 0, slab = 0, channels = 0;
};

// A convolution seen as `groups` matrix products [m, k] x [k, n] of bytes.
struct GemmProblem {
  int64_t m = 0, n = 0, k = 0, groups = 1;
  bool tiled = false;       // the tile kernels apply at all (PackedConv says why not)
  bool requantizes = true;  // the epilogue has a fast path: in registers, where K is not split
  bool vector16 = true;     // channels come in runs of 16 bytes, else of 4
  bool residual = false;    // fetched while the block multiplies
  bool boxes = false;       // the tensor memory accelerator can fetch the pixels of every tap
  bool streams = false;     // a 1x1 convolution that Algorithm::kResident and kTeam can do
  HaloLine halo = {};
  // The kernels for few input channels and for depthwise convolutions apply.
  bool image = false, depthwise = false;
  bool vector = false;                                // Algorithm::kVector applies
  int image_weight_bytes = 0, image_patch_bytes = 0;  // shared memory of a block of the first
};

// Estimated microseconds on `device`; 0 for kernels that are never worth less than all others.
double EstimateMicroseconds(const GemmProblem& problem, const ConvConfig& config, const Device& device);
// Two kernels in turns take this many times what they take in rows of equals, which is what estimates are of:
// one kernel in their place is compared with that.
inline constexpr double kUnlikeNeighbours = 1.3;

// The configurations that fit the device, the cheapest estimate first; the plain kernel last.
std::vector<ConvConfig> RankConfigs(const GemmProblem& problem, const Device& device);

// Dynamic shared memory of a block.
int SharedBytes(const GemmProblem& problem, const ConvConfig& config);
// That of which two blocks do not fit a multiprocessor (ConvConfig::apart).
int ApartBytes(const Device& device);
// The part of it that holds tiles; the exchange area of a cluster follows.
int TileBytes(const ConvConfig& config);

// The products of a ResidualPair.
struct ResidualPairProblem {
  GemmProblem first, second;
};
double EstimateMicroseconds(const ResidualPairProblem& problem, const ConvConfig& config,
                            const Device& device);
// Those of Algorithm::kResidualPair that fit the device and kSeparate, the cheapest estimate first.
std::vector<ConvConfig> RankConfigs(const ResidualPairProblem& problem, const Device& device);
int SharedBytes(const ResidualPairProblem& problem, const ConvConfig& config);
int PersistentBlocks(const ResidualPairProblem& problem, const ConvConfig& config, const Device& device);

// Of the configuration that the cost model chooses.
template <typename Problem>
double EstimateOfBest(const Problem& problem, const Device& device) {
  return EstimateMicroseconds(problem, RankConfigs(problem, device).front(), device);
}

// Rows of a patch of Algorithm::kHalo or kWindows, and the bytes of one of its slabs.
int HaloRows(const GemmProblem& problem, const ConvConfig& config);
int HaloPlaneBytes(const GemmProblem& problem, const ConvConfig& config);

// The slabs that a block of Algorithm::kWindows sums over, at most.
int WindowSlabs(const GemmProblem& problem, const ConvConfig& config);

// Columns of channels that tiles of one block of Algorithm::kTeam may lie in: 1 or 2.
int TeamColumns(const GemmProblem& problem, const ConvConfig& config);

// All blocks of Algorithm::kTeam. Blocks of kResident or kHalo along m: as many as run at once, each with as
// many tiles or one less; of kHalo with one slot, one for every patch.
int PersistentBlocks(const GemmProblem& problem, const ConvConfig& config, const Device& device);

inline constexpr int kTileK = 128;
inline constexpr int kMostBoxColumns = 128;       // tile_n where ConvConfig::boxes
inline constexpr int kMaxResidualPairStages = 6;  // of Algorithm::kResidualPair
// Of Algorithm::kVector.
inline constexpr int kMaxVectorRows = 16;

}  // namespace lowbit::cuda
