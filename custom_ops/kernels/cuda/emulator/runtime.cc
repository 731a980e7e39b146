// As much of the CUDA runtime as the tests of kernels and the execution provider use, for one emulated H200. Memory of
// the device is the program's own. Launches are done when they return: events tell nothing, streams are one.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "kernels/cuda/device/kernel_handle.h"
#include "kernels/cuda/device/queue.h"
#include "kernels/cuda/emulator/machine.h"
#include "kernels/cuda/emulator/shared_memory.h"

namespace emulator = lowbit::cuda::emulator;

struct CUgraphNode_st {
  emulator::Launch launch;
};
struct CUgraph_st {
  std::vector<std::unique_ptr<CUgraphNode_st>> nodes;
};
struct CUgraphExec_st {
  std::vector<std::pair<cudaGraphNode_t, emulator::Launch>> launches;
};

namespace {

constexpr size_t kMemoryAlignment = 256, kMostThreads = 1024, kSharedBytes = size_t{227} << 10,
                 kMostClusterBlocks = 16;

cudaGraph_t captured = nullptr;  // of the one stream that may be capturing

size_t Volume(const dim3& d) { return size_t{d.x} * d.y * d.z; }

CUresult Encode(CUtensorMap* map, int rank, void* base, const cuuint64_t* sizes, const cuuint64_t* strides,
                CUtensorMapSwizzle swizzle, emulator::TensorMap out) {
  constexpr uint64_t kAlignment = 16;
  if (reinterpret_cast<uintptr_t>(base) % kAlignment != 0) return CUDA_ERROR_INVALID_VALUE;
  out.base = static_cast<uint8_t*>(base);
  for (int i = 0; i < 4; ++i) {
    if (i < rank && (sizes[i] == 0 || sizes[i] > (uint64_t{1} << 31))) return CUDA_ERROR_INVALID_VALUE;
    out.sizes[i] = i < rank ? static_cast<int>(sizes[i]) : 1;
  }
  for (int i = 0; i + 1 < rank; ++i) {
    if (strides[i] % kAlignment != 0) return CUDA_ERROR_INVALID_VALUE;
    out.strides[i] = static_cast<int64_t>(strides[i]);
  }
  out.swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
                : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                : swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                                       : 0;
  if (out.swizzle != 0 && out.box[0] > out.swizzle) return CUDA_ERROR_INVALID_VALUE;
  static_assert(sizeof(emulator::TensorMap) <= sizeof(CUtensorMap));
  std::memcpy(static_cast<void*>(map), &out, sizeof out);
  return CUDA_SUCCESS;
}

CUresult EncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* base,
                     const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                     const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  emulator::TensorMap out = {};
  for (cuuint32_t i = 0; i < 4; ++i) {
    out.box[i] = i < rank ? static_cast<int>(box[i]) : 1;
    if (i < rank && (steps[i] != 1 || box[i] == 0 || box[i] > 256)) return CUDA_ERROR_INVALID_VALUE;
  }
  return Encode(map, static_cast<int>(rank), base, sizes, strides, swizzle, out);
}

CUresult EncodeIm2col(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* base,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const int* lower, const int* upper,
                      cuuint32_t channels, cuuint32_t pixels, const cuuint32_t* steps, CUtensorMapInterleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (rank != 4 || channels > 256 || pixels > 1024) return CUDA_ERROR_INVALID_VALUE;
  emulator::TensorMap out = {};
  out.box[0] = static_cast<int>(channels);
  out.box[1] = static_cast<int>(pixels);
  out.box[2] = out.box[3] = 1;
  for (int i = 0; i < 4; ++i) {
    if (steps[i] < 1 || steps[i] > 8) return CUDA_ERROR_INVALID_VALUE;
    out.steps[i] = static_cast<int>(steps[i]);
  }
  for (int i = 0; i < 2; ++i) {
    constexpr int kMost = 127, kLeast = -128;
    if (lower[i] < kLeast || lower[i] > kMost || upper[i] < kLeast || upper[i] > kMost)
      return CUDA_ERROR_INVALID_VALUE;
    out.lower[i] = lower[i];
    out.upper[i] = upper[i];
  }
  return Encode(map, 4, base, sizes, strides, swizzle, out);
}

// Whether a GPU would take it.
bool IsValid(const emulator::Launch& launch) {
  const size_t cluster = Volume(launch.cluster);
  return Volume(launch.grid) > 0 && launch.grid.y < 65536 && launch.grid.z < 65536 &&
         Volume(launch.block) > 0 && Volume(launch.block) <= kMostThreads &&
         launch.shared_bytes <= kSharedBytes && cluster <= kMostClusterBlocks &&
         launch.grid.x % launch.cluster.x == 0 && launch.grid.y % launch.cluster.y == 0 &&
         launch.grid.z % launch.cluster.z == 0;
}

// Runs the launch, or adds it to the graph that is being captured: its node, or null.
cudaGraphNode_t RunOrCapture(emulator::Launch launch) {
  if (captured == nullptr) {
    emulator::Run(launch);
    return nullptr;
  }
  captured->nodes.push_back(std::make_unique<CUgraphNode_st>(CUgraphNode_st{std::move(launch)}));
  return captured->nodes.back().get();
}

}  // namespace

namespace lowbit::cuda {

cudaError_t Queue::Enqueue(const KernelHandle& kernel, dim3 grid, dim3 block, const Extras& extras,
                           void** args) {
  emulator::Launch launch = {grid, block, dim3(1, 1, 1), extras.shared_bytes, kernel.bound_to(args)};
  for (int i = 0; i < extras.attribute_count; ++i) {
    if (extras.attributes[i].id != cudaLaunchAttributeClusterDimension) continue;
    const auto& size = extras.attributes[i].val.clusterDim;
    launch.cluster = dim3(size.x, size.y, size.z);
  }
  if (!IsValid(launch)) return cudaErrorInvalidConfiguration;
  if (updated_ != nullptr) {
    if (next_ == updated_->size()) return cudaErrorInvalidValue;
    const cudaGraphNode_t node = (*updated_)[next_++];
    for (auto& [of, what] : executable_->launches) {
      if (of == node) what = std::move(launch);
    }
    return cudaSuccess;
  }
  const cudaGraphNode_t node = RunOrCapture(std::move(launch));
  if (recorded_ != nullptr) recorded_->push_back(node);
  return cudaSuccess;
}

}  // namespace lowbit::cuda

extern "C" {

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "an error of the emulated GPU";
}
const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* address, int size, int) {
  return std::snprintf(address, static_cast<size_t>(size), "%s", "0000:00:00.0") < size
             ? cudaSuccess
             : cudaErrorInvalidValue;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = size_t{1} << 32;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "emulated H200");
  properties->major = 9;
  properties->minor = 0;
  // Where there are few multiprocessors, each gets many tiles even of a small tensor.
  const char* const asked = std::getenv("LOWBIT_EMULATED_MULTIPROCESSORS");
  properties->multiProcessorCount = asked == nullptr ? 132 : std::max(1, std::atoi(asked));
  properties->sharedMemPerBlockOptin = kSharedBytes;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const std::string_view which = name;
  *entry = which == "cuTensorMapEncodeTiled"    ? reinterpret_cast<void*>(EncodeTiled)
           : which == "cuTensorMapEncodeIm2col" ? reinterpret_cast<void*>(EncodeIm2col)
                                                : nullptr;
  *found = *entry == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t bytes) {
  // Not a byte more than was asked for, so that AddressSanitizer sees what compute-sanitizer would.
  return posix_memalign(data, kMemoryAlignment, bytes) == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* data) {
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  if (bytes > 0) std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = captured == nullptr ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = nullptr;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  captured = new CUgraph_st;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = std::exchange(captured, nullptr);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = new CUgraphExec_st;
  for (const auto& node : graph->nodes) (*executable)->launches.emplace_back(node.get(), node->launch);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  for (const auto& [node, launch] : executable->launches) emulator::Run(launch);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}

// It shares memory and semaphores with nobody.
cudaError_t cudaImportExternalMemory(cudaExternalMemory_t*, const cudaExternalMemoryHandleDesc*) {
  return cudaErrorNotSupported;
}
cudaError_t cudaExternalMemoryGetMappedBuffer(void**, cudaExternalMemory_t,
                                              const cudaExternalMemoryBufferDesc*) {
  return cudaErrorNotSupported;
}
cudaError_t cudaDestroyExternalMemory(cudaExternalMemory_t) { return cudaErrorNotSupported; }
cudaError_t cudaImportExternalSemaphore(cudaExternalSemaphore_t*, const cudaExternalSemaphoreHandleDesc*) {
  return cudaErrorNotSupported;
}
cudaError_t cudaDestroyExternalSemaphore(cudaExternalSemaphore_t) { return cudaErrorNotSupported; }
cudaError_t cudaWaitExternalSemaphoresAsync(const cudaExternalSemaphore_t*,
                                            const cudaExternalSemaphoreWaitParams*, unsigned, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t cudaSignalExternalSemaphoresAsync(const cudaExternalSemaphore_t*,
                                              const cudaExternalSemaphoreSignalParams*, unsigned,
                                              cudaStream_t) {
  return cudaErrorNotSupported;
}

}  // extern "C"
