#include "kernels/cuda/device/queue.h"

#include <algorithm>

#include "kernels/cuda/device/kernel_handle.h"

namespace lowbit::cuda {
namespace {

// The node that the last launch on a capturing stream became.
cudaError_t LastNode(cudaStream_t stream, cudaGraphNode_t* node) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaGraphNode_t* last = nullptr;
  size_t count = 0;
#if CUDART_VERSION >= 13000
  const cudaError_t error =
      cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &last, nullptr, &count);
#else
  const cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, nullptr, &last, &count);
#endif
  if (error != cudaSuccess) return error;
  if (status != cudaStreamCaptureStatusActive || count != 1) return cudaErrorStreamCaptureUnmatched;
  *node = last[0];
  return cudaSuccess;
}

}  // namespace

cudaError_t Queue::Enqueue(const KernelHandle& kernel, dim3 grid, dim3 block, const Extras& extras,
                           void** args) {
  if (updated_ != nullptr) {
    if (next_ == updated_->size()) return cudaErrorInvalidValue;
    cudaKernelNodeParams params = {};
    params.func = const_cast<void*>(kernel.function);
    params.gridDim = grid;
    params.blockDim = block;
    params.sharedMemBytes = static_cast<unsigned>(extras.shared_bytes);
    params.kernelParams = args;
    return cudaGraphExecKernelNodeSetParams(executable_, (*updated_)[next_++], &params);
  }
  cudaLaunchAttribute all[kMaxAttributes + 1] = {};
  std::copy_n(extras.attributes, extras.attribute_count, all);
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = extras.shared_bytes;
  config.stream = stream_;
  config.attrs = all;
  config.numAttrs = static_cast<unsigned>(extras.attribute_count);
  if (overlap_) {
    all[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    all[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  const cudaError_t error = cudaLaunchKernelExC(&config, kernel.function, args);
  if (error != cudaSuccess || recorded_ == nullptr) return error;
  recorded_->push_back(nullptr);
  return LastNode(stream_, &recorded_->back());
}

}  // namespace lowbit::cuda
