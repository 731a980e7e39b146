// The emulated GPU's ../../../../queue.h: a launch runs the grid at once, or becomes a node of the graph that
// is being captured.
#pragma once

#include <cuda_runtime.h>

#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cuda/emulator/machine.h"
#include "kernels/cuda/emulator/runtime.h"

namespace lowbit::cuda {

using RecordedNodes = std::vector<cudaGraphNode_t>;

class Queue {
 public:
  explicit Queue(cudaStream_t stream, bool overlap = true) : stream_(stream), overlap_(overlap) {}

  void Record(RecordedNodes* nodes) { recorded_ = nodes; }
  void Update(cudaGraphExec_t executable, const RecordedNodes* nodes) {
    executable_ = executable;
    updated_ = nodes;
    next_ = 0;
  }

  cudaStream_t stream() const { return stream_; }
  bool overlap() const { return overlap_; }

  template <typename... Params, typename... Args>
  cudaError_t Launch(void (*kernel)(Params...), dim3 grid, dim3 block, const Args&... args) {
    return LaunchWith({}, kernel, grid, block, args...);
  }
  struct Extras {
    size_t shared_bytes = 0;
    const cudaLaunchAttribute* attributes = nullptr;
    int attribute_count = 0;
  };
  template <typename... Params, typename... Args>
  cudaError_t LaunchWith(const Extras& extras, void (*kernel)(Params...), dim3 grid, dim3 block,
                         const Args&... args) {
    const std::tuple<std::decay_t<Params>...> params(args...);
    emulator::Launch launch = {grid, block, dim3(1, 1, 1), extras.shared_bytes,
                               [=] { std::apply(kernel, params); }};
    for (int i = 0; i < extras.attribute_count; ++i) {
      if (extras.attributes[i].id != cudaLaunchAttributeClusterDimension) continue;
      const auto& size = extras.attributes[i].val.clusterDim;
      launch.cluster = dim3(size.x, size.y, size.z);
    }
    if (!emulator::IsValid(launch)) return cudaErrorInvalidConfiguration;
    if (updated_ != nullptr) {
      if (next_ == updated_->size()) return cudaErrorInvalidValue;
      emulator::SetNode(executable_, (*updated_)[next_++], std::move(launch));
      return cudaSuccess;
    }
    const cudaGraphNode_t node = emulator::Enqueue(std::move(launch));
    if (recorded_ != nullptr) recorded_->push_back(node);
    return cudaSuccess;
  }

 private:
  cudaStream_t stream_;
  bool overlap_;
  RecordedNodes* recorded_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
  const RecordedNodes* updated_ = nullptr;
  size_t next_ = 0;
};

}  // namespace lowbit::cuda
