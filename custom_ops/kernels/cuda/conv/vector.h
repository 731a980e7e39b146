// Products of few rows, a block eight output channels: mma.sync.
#pragma once

#include "kernels/cuda/conv/launch.h"

namespace lowbit::cuda {

struct ConvRow;

extern const ConvRow kVectorRow;

inline constexpr int kMaxVectorRows = 16;

struct VectorParams : ConvParams {
  int n_padded = 0;  // of the weights, which lie as those of tile kernels
};

cudaError_t LaunchVector(const VectorParams& params, const ConvConfig&, const LaunchOptions& options);

}  // namespace lowbit::cuda
