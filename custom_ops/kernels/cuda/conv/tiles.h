// Implicit GEMM over tiles of the input and the weights, of any convolution: mma.sync (sm_75 and later),
// wgmma from shared memory (sm_90a). K may be split over a cluster, or over blocks that add through the
// workspace.
#pragma once

#include "kernels/cuda/conv/launch.h"

namespace lowbit::cuda {

struct ConvProblem;
struct ConvRow;

extern const ConvRow kMmaRow, kWgmmaRow;

inline constexpr int kMaxTileStages = 8;     // of wgmma
inline constexpr int kMostBoxColumns = 128;  // tile_n where ConvConfig::boxes
inline constexpr int kMostSplitRows = 128;   // tile_m but where ConvConfig::boxes and sums stay in registers

// All but the tensors and constants of a launch.
GatherParams GatherParamsOf(const ConvProblem& problem, const ConvConfig& config);

cudaError_t LaunchMma(const GatherParams& params, const ConvConfig& config, bool vector16,
                      const LaunchOptions& options);
// LaunchWgmma calls LaunchBoxes for what fetches boxes.
cudaError_t LaunchWgmma(const GatherParams& params, const ConvConfig& config, const LaunchOptions& options);
cudaError_t LaunchBoxes(const GatherParams& params, const ConvConfig& config, const LaunchOptions& options);

}  // namespace lowbit::cuda
