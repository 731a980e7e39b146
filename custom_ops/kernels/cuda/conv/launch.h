// Launching a tile kernel: which instance of it, grid, cluster.
#pragma once

#include "kernels/cuda/conv/conv_params.h"
#include "kernels/cuda/conv/cuda_conv.h"
#include "kernels/cuda/device/launch.h"

namespace lowbit::cuda {

struct LaunchOptions {
  Queue& queue;
  const Device& device;
  bool x_signed = false;
  bool vector16 = true;
};

// f<kSigned, kFinish>() for the instance of a kernel that finishes sums so; they are floats only where no
// input has a sign (PackedConv::SumFormOf). kMayLeave: there are instances whose sums leave the registers.
template <bool kMayLeave, typename F>
cudaError_t WithFinish(Finish finish, bool is_signed, const F& f) {
  const auto of_any_input = [&]<Finish kFinish>() {
    return is_signed ? f.template operator()<true, kFinish>() : f.template operator()<false, kFinish>();
  };
  if constexpr (kMayLeave) {
    if (finish == Finish::kThroughMemory) return of_any_input.template operator()<Finish::kThroughMemory>();
  }
  if (finish == Finish::kIntegers) return of_any_input.template operator()<Finish::kIntegers>();
  if (is_signed) return cudaErrorInvalidValue;
  switch (finish) {
    case Finish::kFloatsFromZero:
      return f.template operator()<false, Finish::kFloatsFromZero>();
    case Finish::kFloatsOnLine:
      return f.template operator()<false, Finish::kFloatsOnLine>();
    case Finish::kFloatsFromLowest:
      return f.template operator()<false, Finish::kFloatsFromLowest>();
    default:
      return cudaErrorInvalidValue;
  }
}

// `more`: what the kernel takes besides.
template <auto kKernel, typename... More>
cudaError_t LaunchTiled(const ConvParams& p, const ConvConfig& config, const LaunchOptions& options,
                        int threads, const More&... more) {
  const cudaError_t error = PrepareKernel<kKernel>(options.device);
  if (error != cudaSuccess) return error;
  const bool cluster = config.splits > 1 && config.split == Split::kCluster;
  const dim3 grid(static_cast<unsigned>((p.m + config.tile_m - 1) / config.tile_m),
                  static_cast<unsigned>(p.n_tiles * p.groups), static_cast<unsigned>(p.splits));
  cudaLaunchAttribute shape = {};
  shape.id = cudaLaunchAttributeClusterDimension;
  shape.val.clusterDim.x = shape.val.clusterDim.y = 1;
  shape.val.clusterDim.z = static_cast<unsigned>(config.splits);
  return options.queue.LaunchWith({static_cast<size_t>(p.shared_bytes), &shape, cluster ? 1 : 0}, kKernel,
                                  grid, dim3(static_cast<unsigned>(threads)), p, cluster, more...);
}

}  // namespace lowbit::cuda
