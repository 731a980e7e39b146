// 1x1 convolutions on wgmma (sm_90a): blocks keep their weights and stay for many tiles, fetched by TMA.
#pragma once

#include "kernels/cuda/conv/launch.h"

namespace lowbit::cuda {

struct ConvRow;

extern const ConvRow kResidentRow;

cudaError_t LaunchResident(const ConvParams& params, const ConvConfig& config, const LaunchOptions& options);

}  // namespace lowbit::cuda
