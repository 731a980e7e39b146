// Products of few rows, a block eight output channels: mma.sync.
#pragma once

#include "kernels/cuda/conv/launch.h"

namespace lowbit::cuda {

struct ConvRow;

extern const ConvRow kVectorRow;

inline constexpr int kMaxVectorRows = 16;

cudaError_t LaunchVector(const ConvParams& params, const LaunchOptions& options);

}  // namespace lowbit::cuda
