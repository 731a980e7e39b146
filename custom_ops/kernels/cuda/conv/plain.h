// One thread per output, dp4a: the GPU's own reference, which computes every node; and the passes around the
// tile kernels.
#pragma once

#include "kernels/cuda/conv/launch.h"

namespace lowbit::cuda {

struct ConvRow;

extern const ConvRow kPlainRow;

cudaError_t LaunchPlain(const ConvParams& params, const LaunchOptions& options);
// Adds the partial sums of Split::kWorkspace and finishes them.
cudaError_t LaunchReduce(const ConvParams& params, const LaunchOptions& options);

// Input passes of the tile kernels.
// y[pixel][group][channels] = mul * x[pixel][group][group_in] - sub, channels beyond group_in 0.
struct RepackParams {
  const uint8_t* x = nullptr;
  uint8_t* y = nullptr;
  int64_t pixels = 0;
  int groups = 1, group_in = 0, channels = 0;
  int mul = 1, sub = 0;
};
cudaError_t LaunchRepack(const RepackParams& params, const LaunchOptions& options);
// x_sums[group][pixel] = sum of (q - zero) over the taps inside the image and the group's group_in channels;
// params.x as the tile kernel sees it.
cudaError_t LaunchPixelSums(const ConvParams& params, int group_in, int zero, int32_t* x_sums,
                            const LaunchOptions& options);

}  // namespace lowbit::cuda
