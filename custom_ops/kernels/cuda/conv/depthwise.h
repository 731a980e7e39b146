// Depthwise convolutions by dp4a, 16 channels a thread.
#pragma once

#include "kernels/cuda/conv/launch.h"
#include "kernels/cuda/conv/weight_layouts.h"

namespace lowbit::cuda {

struct ConvRow;

extern const ConvRow kDepthwiseRow;
extern const WeightLayout kDepthwiseWeights;
// Whether channels are groups of their own, in runs that a thread has.
bool FitsDepthwise(const ConvGeometry& g, const OperandType& x);

struct DepthwiseParams : ConvParams, WindowParams, TapParams {
  bool requantizes = false;                         // sixteen channels at once, else one by one
  uint32_t fill = 0;                                // four times the code that stands for real zero
  FastDivisor by_image, by_row, by_runs, by_fours;  // of channels, of pixels in a row
};

cudaError_t LaunchDepthwise(const DepthwiseParams& params, const ConvConfig&, const LaunchOptions& options);

}  // namespace lowbit::cuda
