// Launching a tile kernel: grid, cluster, programmatic dependent launch.
#pragma once

#include <atomic>

#include "kernels/cuda/kernels.h"

namespace lowbit::cuda {

// Lets `kKernel` use all shared memory of the device, and clusters of any size; once for each device.
template <auto kKernel>
cudaError_t PrepareKernel(const Device& device) {
  static std::atomic<uint64_t> prepared{0};
  const uint64_t bit = uint64_t{1} << device.ordinal % 64;
  if (device.ordinal < 64 && (prepared.load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
  cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_bytes);
  if (error == cudaSuccess && device.capability >= 90) {
    error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error == cudaSuccess) prepared.fetch_or(bit, std::memory_order_release);
  return error;
}

// A function of the driver, found at run time: the library must load where there is no driver.
inline void* DriverFunction(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? entry : nullptr;
}

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
  // Whole clusters: tiles past the last row compute nothing that is stored.
  const int m_tiles = (p.m + config.tile_m - 1) / config.tile_m;
  const dim3 grid(static_cast<unsigned>((m_tiles + p.multicast - 1) / p.multicast * p.multicast),
                  static_cast<unsigned>(p.n_tiles * p.groups), static_cast<unsigned>(p.splits));
  cudaLaunchAttribute shape = {};
  shape.id = cudaLaunchAttributeClusterDimension;
  shape.val.clusterDim.x = static_cast<unsigned>(p.multicast);
  shape.val.clusterDim.y = 1;
  shape.val.clusterDim.z = static_cast<unsigned>(cluster ? config.splits : 1);
  const int attributes = cluster || p.multicast > 1 ? 1 : 0;
  return options.queue.LaunchWith({static_cast<size_t>(p.shared_bytes), &shape, attributes}, kKernel, grid,
                                  dim3(static_cast<unsigned>(threads)), p, cluster, more...);
}

}  // namespace lowbit::cuda
