// What a kernel needs before its first launch, and functions of the driver.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/queue.h"

namespace lowbit::cuda {

// Lets `kKernel` use all shared memory of the device, and clusters of any size; once for each device.
template <auto kKernel>
cudaError_t PrepareKernel(const Device& device) {
  constexpr int kFirstClusters = 90;
  static std::atomic<uint64_t> prepared_with[2] = {};  // clusters: tests take a GPU for an older one, too
  std::atomic<uint64_t>& prepared = prepared_with[device.capability >= kFirstClusters ? 1 : 0];
  const uint64_t bit = uint64_t{1} << device.ordinal % 64;
  if (device.ordinal < 64 && (prepared.load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
  cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_bytes);
  if (error == cudaSuccess && device.capability >= kFirstClusters) {
    error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error == cudaSuccess) prepared.fetch_or(bit, std::memory_order_release);
  return error;
}

// What is launched: blocks, of how many threads, how much dynamic shared memory, how many of them a cluster.
struct LaunchShape {
  dim3 grid;
  int threads;
  int shared_bytes;
  dim3 cluster = {1, 1, 1};
};

inline dim3 Dim(int x, int y = 1, int z = 1) {
  return {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
}

// Whether a kernel has an instance. LOWBIT_CUDA_SAMPLE is for builds that show that device code compiles and that no GPU
// runs, such as CI's: they have every kernel with some of its shapes and ways to finish.
constexpr bool HasInstance([[maybe_unused]] bool is_in_sample) {
#ifdef LOWBIT_CUDA_SAMPLE
  return is_in_sample;
#else
  return true;
#endif
}

// Prepares a kernel and launches it.
template <auto kKernel, typename... Params>
cudaError_t LaunchKernel(Queue& queue, const Device& device, const LaunchShape& shape,
                         const Params&... params) {
  const cudaError_t error = PrepareKernel<kKernel>(device);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = shape.cluster.x;
  cluster.val.clusterDim.y = shape.cluster.y;
  cluster.val.clusterDim.z = shape.cluster.z;
  const bool has_clusters = shape.cluster.x * shape.cluster.y * shape.cluster.z > 1;
  return queue.LaunchWith({static_cast<size_t>(shape.shared_bytes), &cluster, has_clusters ? 1 : 0}, kKernel,
                          shape.grid, Dim(shape.threads), params...);
}

// Blocks of `size` that hold `count`: of threads, of elements.
inline unsigned BlocksFor(int64_t count, int64_t size) {
  return static_cast<unsigned>((count + size - 1) / size);
}

// A function of the driver, found at run time: the library must load where there is no driver.
inline void* DriverFunction(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? entry : nullptr;
}

}  // namespace lowbit::cuda
