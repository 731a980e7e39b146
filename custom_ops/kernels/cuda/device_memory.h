// Device memory that a node owns, and the calls around it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/status.h"

namespace lowbit::cuda {

inline void Check(cudaError_t error, const char* what) {
  Require(error == cudaSuccess, "CUDA: ", what, " failed: ", cudaGetErrorString(error));
}

// The device that calls of this thread go to, until the end of the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal) {
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

// One allocation, filled once.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  ~DeviceMemory() {
    if (data_ != nullptr) cudaFree(data_);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void Upload(const void* source, size_t bytes) {
    Check(cudaMalloc(&data_, bytes), "allocating a node's constants");
    bytes_ = bytes;
    Check(cudaMemcpy(data_, source, bytes, cudaMemcpyHostToDevice), "copying a node's constants");
  }
  std::vector<uint8_t> Download() const {
    std::vector<uint8_t> out(bytes_);
    Check(cudaMemcpy(out.data(), data_, bytes_, cudaMemcpyDeviceToHost), "reading a node's constants");
    return out;
  }
  const uint8_t* At(size_t offset) const { return static_cast<const uint8_t*>(data_) + offset; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace lowbit::cuda
