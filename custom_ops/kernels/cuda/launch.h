// Launching a tile kernel: grid, cluster, programmatic dependent launch.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/kernels.h"

namespace lowbit::cuda {

template <typename Kernel>
cudaError_t LaunchTiled(Kernel kernel, const ConvParams& p, const ConvConfig& config,
                        const LaunchOptions& options, int threads) {
  const bool cluster = config.splits > 1 && config.split == Split::kCluster;
  // The same value in every call: launches from several threads must not lower each other's.
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, options.shared_limit);
  if (error != cudaSuccess) return error;
  if (cluster && config.splits > 8) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t launch = {};
  // Whole clusters: tiles past the last row compute nothing that is stored.
  const int m_tiles = (p.m + config.tile_m - 1) / config.tile_m;
  launch.gridDim = dim3(static_cast<unsigned>((m_tiles + p.multicast - 1) / p.multicast * p.multicast),
                        static_cast<unsigned>(p.n_tiles * p.groups), static_cast<unsigned>(p.splits));
  launch.blockDim = dim3(static_cast<unsigned>(threads));
  launch.dynamicSmemBytes = static_cast<size_t>(p.shared_bytes);
  launch.stream = options.stream;
  cudaLaunchAttribute attributes[2] = {};
  if (cluster || p.multicast > 1) {
    attributes[launch.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[launch.numAttrs].val.clusterDim.x = static_cast<unsigned>(p.multicast);
    attributes[launch.numAttrs].val.clusterDim.y = 1;
    attributes[launch.numAttrs++].val.clusterDim.z = static_cast<unsigned>(cluster ? config.splits : 1);
  }
  if (options.overlap) {
    attributes[launch.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[launch.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  launch.attrs = attributes;
  return cudaLaunchKernelEx(&launch, kernel, p, cluster);
}

}  // namespace lowbit::cuda
