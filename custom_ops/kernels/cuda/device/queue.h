// Where kernels are launched. Every launch of this library goes through a Queue, so that one piece of code
// serves three ends: enqueuing on a stream, recording the nodes of a graph that is being captured, and giving
// the recorded nodes of an instantiated graph new arguments (other tensors, same shapes).
//
// Why kernels that overlap never meet in memory: a kernel may start while its predecessor on the stream, or
// before it in a captured chain, still runs (programmatic dependent launch). Every thread of every kernel of
// this library calls WaitForPredecessors (device/ptx.cuh), or waits at a barrier for one that did, before its
// first access to memory but the node's own constants, which nothing writes after packing, and before its
// first return. Two things follow.
//   1. What a kernel reads or writes, it reads or writes after its predecessor is complete and flushed.
//   2. The predecessor completed only after its own wait, hence after *its* predecessor, and so on: when a
//      kernel's wait returns, all kernels before it are complete. It may therefore overwrite what any of them
//      read (a buffer that the memory plan gives to a new tensor), and read what any of them wrote.
// A kernel that returned early without waiting would break the chain in 2 for all that follow.
// LetSuccessorsStart needs no such care: it only lets the next kernel come as far as its wait, and as it
// takes effect once all blocks of a grid have called it or ended, waiting blocks never keep blocks that they
// wait for from running.
#pragma once

#include <cuda_runtime.h>

#include <vector>

namespace lowbit::cuda {

// Of device/kernel_handle.h, which files with kernels include: the emulated GPU has another one, and what packs
// and plans is compiled once for both.
struct KernelHandle;
template <typename... Params>
KernelHandle HandleOf(void (*kernel)(Params...));

// The kernel nodes that one step of a captured region became, in the order of their launches.
using RecordedNodes = std::vector<cudaGraphNode_t>;

class Queue {
 public:
  // `overlap`: on sm_90 and later a kernel may start before its predecessor on the stream ends (programmatic
  // dependent launch); every kernel of this library waits for it before it touches anything but its own
  // constants.
  explicit Queue(cudaStream_t stream, bool overlap = true) : stream_(stream), overlap_(overlap) {}

  // Launches append their graph nodes to `nodes` from here on; the stream is being captured.
  void Record(RecordedNodes* nodes) { recorded_ = nodes; }
  // Launches give the nodes of `nodes`, one after the other, their arguments in `executable` from here on;
  // nothing is enqueued. The launches must be those that recorded the nodes, with other pointers.
  void Update(cudaGraphExec_t executable, const RecordedNodes* nodes) {
    executable_ = executable;
    updated_ = nodes;
    next_ = 0;
  }

  cudaStream_t stream() const { return stream_; }
  bool overlap() const { return overlap_; }

  // The short form: no dynamic shared memory, no attributes besides the one of programmatic launch.
  template <typename... Params, typename... Args>
  cudaError_t Launch(void (*kernel)(Params...), dim3 grid, dim3 block, const Args&... args) {
    return LaunchWith({}, kernel, grid, block, args...);
  }
  static constexpr int kMaxAttributes = 3;
  struct Extras {
    size_t shared_bytes = 0;
    const cudaLaunchAttribute* attributes = nullptr;
    int attribute_count = 0;  // at most kMaxAttributes
  };
  template <typename... Params, typename... Args>
  cudaError_t LaunchWith(const Extras& extras, void (*kernel)(Params...), dim3 grid, dim3 block,
                         const Args&... args) {
    const auto launch = [&](const Params&... params) {
      void* pointers[] = {const_cast<void*>(static_cast<const void*>(&params))...};
      return Enqueue(HandleOf(kernel), grid, block, extras, pointers);
    };
    return launch(args...);
  }

 private:
  cudaError_t Enqueue(const KernelHandle& kernel, dim3 grid, dim3 block, const Extras& extras, void** args);

  cudaStream_t stream_;
  bool overlap_;
  RecordedNodes* recorded_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
  const RecordedNodes* updated_ = nullptr;
  size_t next_ = 0;
};

}  // namespace lowbit::cuda
