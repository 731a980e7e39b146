// What the kernel of chained convolutions (chain.h) receives.
#pragma once

#include "kernels/cuda/conv/conv_params.h"
#include "kernels/cuda/conv/launch.h"

namespace lowbit::cuda {

// Channels that lie together in shared memory: a box of 64 pixels and 64 channels.
inline constexpr int kChainBox = 64, kChainBoxBytes = 64 * kChainBox;
inline constexpr int kMaxChainBoxes = 16, kMaxChainGroups = 7;

struct ChainProduct {
  const uint8_t* weights = nullptr;  // as TileParams has them
  int n = 0, n_padded = 0, k = 0;
  int k_tiles = 0, k_boxes = 0, n_boxes = 0;
  int own_boxes = 0;  // of n_boxes, those of a block of a cluster, at most
  // The input, not of the second.
  const uint8_t* x = nullptr;
  PixelParams pixels;
  EpilogueParams epilogue;
};

// Steps of a window along k: of each tap, a box of channels at a time.
inline constexpr int kMaxWindowSteps = 32;

// A convolution with windows of stride 1 that makes what the residuals' product reads, where there is one, else the
// first, and nobody else does. A tile is then
// neighbouring rows of an image, or a part of one row. In shared memory its rows lie `pitch` places apart, as those of
// the patch that its windows read: what a tap sees is the same places from another one on.
struct ChainWindows {
  ChainProduct product;
  WindowParams image;
  int images = 0;
  int columns = 0, rows = 0;                  // of outputs, a tile
  int pitch = 0, reach = 0;                   // reach: rows that a patch has beyond those of its outputs
  int plane_bytes = 0;                        // of a box of channels of a patch
  int steps = 0, step[kMaxWindowSteps] = {};  // from an output's place to what its window reads, in 16 bytes
  FastDivisor by_parts, by_bands;             // parts of a row; tiles one below the other in an image
};

struct ChainParams {
  ChainProduct first, second;
  bool has_windows = false;
  ChainWindows windows;
  // Where the residuals of the first are no tensor: the product that makes them, of as many outputs.
  bool makes_residuals = false;
  ChainProduct residuals;
  int m = 0, tiles = 0;
  // Blocks that share tiles, as a cluster.
  int ranks = 1;
  // A block's warpgroups, and how many of them share a tile.
  int teams = 1, team_groups = 1;
  int team_bytes = 0, shared_bytes = 0, clusters = 0;
  bool x_signed = false, y_signed = false;
  const uint8_t* residual = nullptr;
  void *y = nullptr, *z = nullptr;
};

// How the sums of both are finished.
struct ChainFinish {
  Finish first, second;
};

// Whether residuals that another product makes are floats that are multiplied alone, where the first one's sums are
// finished so; else integers.
constexpr bool MakesFloats(Finish first) {
  return first == Finish::kFloatsOnLine || first == Finish::kFloatsInverse || first == Finish::kCappedOnLine;
}

// As each asks for, in the pairs that networks have; else as any floats.
inline ChainFinish FinishOf(const ChainParams& p) {
  using enum Finish;
  const Finish first = FinishOf(p.first.epilogue), second = FinishOf(p.second.epilogue);
  if (first == kIntegers) return {first, second};
  const bool fits_bytes = second == kFloatsFromZero &&
                          (first == kFloatsFromZero || first == kFloatsOnLine || first == kFloatsInverse);
  const EpilogueParams& r = p.residuals.epilogue;
  const bool is_tail = second == kTail || second == kLackingTail,
             makes_tail = !p.makes_residuals || (r.on_lines && r.table == nullptr);
  if (is_tail && makes_tail) {
    if (first == kCappedInTail) return {first, kLackingTail};
    const bool lacks_lines = second == kLackingTail || (p.makes_residuals && r.lacks_lines);
    if (first == kCappedTailOnLine && !lacks_lines) return {first, second};
    if (first == kCappedTailOnLine || first == kCappedLackingOnLine)
      return {kCappedLackingOnLine, kLackingTail};
  }
  const bool fits_capped = first == kCappedOnLine && second == kCappedFromZero;
  const bool fits_words = first == kWordsTailOnLine && second == kTail && !r.on_lines;
  const bool makes_fitting = !p.makes_residuals || !MakesFloats(first) || AreWordsMultiplied(r);
  if ((fits_bytes || fits_capped || fits_words) && makes_fitting) return {first, second};
  return {p.first.epilogue.has_residual ? kFloatsAdding : kFloats, kFloats};
}

// Whether kernels for these finishes finish what windows make as they do the second's sums: so, or as any floats.
inline bool FitsWindows(const EpilogueParams& windows, const ChainFinish& chain) {
  using enum Finish;
  if (chain.first == kIntegers) return false;
  const Finish own = FinishOf(windows);
  return own == chain.second ||
         (chain.second == kFloats &&
          (own == kFloatsFromZero || own == kCappedFromZero || own == kTail || own == kLackingTail));
}

// Whether residuals that another product makes may have a tail behind them, where the first one's sums are
// finished so.
constexpr bool MayMakeBehindTail(Finish first) {
  return first == Finish::kFloatsAdding || first == Finish::kCappedTailOnLine ||
         first == Finish::kCappedLackingOnLine || first == Finish::kCappedInTail;
}

cudaError_t LaunchChain(const ChainParams& params, const LaunchOptions& options);

}  // namespace lowbit::cuda
