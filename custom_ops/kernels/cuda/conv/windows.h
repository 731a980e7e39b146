// Convolutions of stride 1 on wgmma (sm_90a): a block keeps a patch of the input, weights pass through; K may
// be split.
#pragma once

#include "kernels/cuda/conv/halo.h"

namespace lowbit::cuda {

struct ConvRow;

extern const ConvRow kWindowsRow;

// Tiles of weights, how many of them at once, slabs of a patch.
inline constexpr int kMaxWindowWeights = 2 * kMaxHaloWeights, kMaxWindowStages = 8, kMaxWindowSlabs = 16;

struct WindowsParams : HaloParams, SumsParams {
  int taps = 1;
};

cudaError_t LaunchWindows(const WindowsParams& params, const ConvConfig& config,
                          const LaunchOptions& options);

}  // namespace lowbit::cuda
