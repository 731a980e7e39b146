// Entry points of the .cu files: they pick a template instance and enqueue it.
#pragma once

#include "kernels/cuda/conv/launch.h"

namespace lowbit::cuda {

cudaError_t LaunchPlain(const ConvParams& params, const LaunchOptions& options);
cudaError_t LaunchMma(const ConvParams& params, const ConvConfig& config, const LaunchOptions& options);
cudaError_t LaunchWgmma(const ConvParams& params, const ConvConfig& config, const LaunchOptions& options);
cudaError_t LaunchResident(const ConvParams& params, const ConvConfig& config, const LaunchOptions& options);
cudaError_t LaunchTeam(const ConvParams& params, const ConvConfig& config, const LaunchOptions& options);
// `x_signed` of the options is that of the second.
cudaError_t LaunchResidualPair(const ConvParams& first, bool first_signed, const ConvParams& second,
                               const ConvConfig& config, const LaunchOptions& options);
cudaError_t LaunchHalo(const ConvParams& params, const HaloParams& halo, const ConvConfig& config,
                       const LaunchOptions& options);
cudaError_t LaunchWindows(const ConvParams& params, const HaloParams& halo, const ConvConfig& config,
                          const LaunchOptions& options);
cudaError_t LaunchImage(const ConvParams& params, const ImageParams& image, ImageSource source,
                        const ConvConfig& config, const LaunchOptions& options);
// Float planes on sm_90a, where FitsPlanes says so; `image` and `p` as for LaunchImage.
bool FitsPlanes(const ConvParams& p, const ImageParams& image, const Device& device);
cudaError_t LaunchPlanes(const ConvParams& p, const ImageParams& image, const ConvConfig& config,
                         const LaunchOptions& options);
cudaError_t LaunchDepthwise(const ConvParams& params, const LaunchOptions& options);
cudaError_t LaunchVector(const ConvParams& params, const LaunchOptions& options);
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
