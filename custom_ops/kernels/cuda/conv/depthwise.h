// Depthwise convolutions by dp4a, 16 channels a thread.
#pragma once

#include "kernels/cuda/conv/launch.h"
#include "kernels/cuda/conv/weight_layouts.h"

namespace lowbit::cuda {

struct ConvRow;

extern const ConvRow kDepthwiseRow;
extern const WeightLayout kDepthwiseWeights;

cudaError_t LaunchDepthwise(const ConvParams& params, const LaunchOptions& options);

}  // namespace lowbit::cuda
