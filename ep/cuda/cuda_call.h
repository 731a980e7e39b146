// Calls of the CUDA runtime: errors become Error, and the calling thread's device and capture mode are
// restored.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace lowbit::ep {

// Whether no further call in this process can succeed after this error (CUDA calls such errors sticky).
bool IsLost(cudaError_t error);

// What the error means, and, where the device is lost, what is left to do.
std::string ErrorText(cudaError_t error);

// Throws Error unless `error` is cudaSuccess. `what` completes "CUDA: ... failed".
void CheckCuda(cudaError_t error, const char* what);

// Makes `ordinal` the calling thread's device. A thread of the host program may be capturing a graph of its
// own while lowbit allocates or asks for events here: in relaxed mode that is allowed, and does not touch the
// capture.
class DeviceScope {
 public:
  explicit DeviceScope(int ordinal);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace lowbit::ep
