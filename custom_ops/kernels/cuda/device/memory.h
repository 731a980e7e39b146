// Device memory that a node owns, and the calls around it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/status.h"
#include "kernels/cuda/device/device.h"

namespace lowbit::cuda {

inline void Check(cudaError_t error, const char* what) {
  Require(error == cudaSuccess, "CUDA: ", what, " failed: ", cudaGetErrorString(error));
}

// The device that calls of this thread go to, until the end of the scope. One that is not there (Device::Absent) gets
// none.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal) {
    if (ordinal < 0) return;
    Check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != ordinal) Check(cudaSetDevice(ordinal), "cudaSetDevice");
    changed_ = previous_ != ordinal;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// A thread of the host program may be capturing a graph of its own while memory is made or freed here; a
// thread in relaxed mode may do so, and does not touch that capture.
class RelaxedCapture {
 public:
  RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// One allocation, filled once. Copies go through a stream and wait for it: cudaMemcpy from pageable memory
// may return before the last bytes have arrived, and is ordered with the default stream alone, which those
// that run the kernels do not wait for.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  ~DeviceMemory() {
    if (data_ == nullptr || !on_host_.empty()) return;
    const RelaxedCapture relaxed;
    cudaFree(data_);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // To the GPU of this thread, or of one that is not there (Device::Absent) into memory of the host.
  void Upload(const void* source, size_t bytes, const Device& device) {
    if (device.IsAbsent()) {
      const auto* from = static_cast<const uint8_t*>(source);
      on_host_.assign(from, from + bytes);
      data_ = on_host_.data();
      return;
    }
    const RelaxedCapture relaxed;
    Check(cudaMalloc(&data_, bytes), "allocating a node's constants");
    bytes_ = bytes;
    CopyNow(data_, source, cudaMemcpyHostToDevice, "copying a node's constants");
  }
  std::vector<uint8_t> Download() const {
    if (!on_host_.empty()) return on_host_;
    const RelaxedCapture relaxed;
    std::vector<uint8_t> out(bytes_);
    CopyNow(out.data(), data_, cudaMemcpyDeviceToHost, "reading a node's constants");
    return out;
  }
  const uint8_t* At(size_t offset) const { return static_cast<const uint8_t*>(data_) + offset; }

 private:
  void CopyNow(void* to, const void* from, cudaMemcpyKind kind, const char* what) const {
    Check(cudaMemcpyAsync(to, from, bytes_, kind, cudaStreamPerThread), what);
    Check(cudaStreamSynchronize(cudaStreamPerThread), what);
  }

  void* data_ = nullptr;
  size_t bytes_ = 0;
  std::vector<uint8_t> on_host_;
};

}  // namespace lowbit::cuda
