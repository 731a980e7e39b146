// Depthwise convolutions by dp4a, four channels a thread.
#pragma once

#include "kernels/cuda/conv/launch.h"
#include "kernels/cuda/conv/weight_layouts.h"

namespace lowbit::cuda {

struct ConvRow;

extern const ConvRow kDepthwiseRow;
extern const WeightLayout kDepthwiseWeights;
inline constexpr int kDepthwiseRun = 4;  // channels of a thread
// Whether channels are groups of their own, in runs that a thread has.
bool FitsDepthwise(const ConvGeometry& g, const OperandType& x);

struct DepthwiseParams : ConvParams, WindowParams, TapParams {
  bool requantizes = false;  // four channels at once, else one by one
  bool is_row = false;       // windows that have a kernel of their own (ConvDepthwiseRow)
  uint32_t fill = 0;         // four times the code that stands for real zero
  int threads = 0;
  FastDivisor by_runs, by_pieces, by_rows;  // runs of channels, a row's pixels by threads, rows of an image
};

// How many neighbouring pixels a thread makes where windows of a row are `stride` apart, and have a kernel of their own.
constexpr int PixelsOfThread(int stride) { return stride == 1 ? 4 : 2; }

cudaError_t LaunchDepthwise(const DepthwiseParams& params, const ConvConfig&, const LaunchOptions& options);

}  // namespace lowbit::cuda
