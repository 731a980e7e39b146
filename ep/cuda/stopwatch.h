// Time on a GPU, and operands for what is timed.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <vector>

#include "ep/cuda/runtime.h"
#include "ep/region/graph.h"

namespace lowbit::ep {

// A stream with two events. Of the current device.
class Stopwatch {
 public:
  Stopwatch();
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  cudaStream_t Stream() const { return stream_; }
  // Microseconds that what `enqueue` enqueues on the stream takes. Waits for it.
  double Microseconds(const std::function<void()>& enqueue) const;

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// Takes at least one number, and reorders them.
double Median(std::vector<double>& numbers);

// Random codes, or floats from -1 to 1: kernels take less power, and run faster, on zeros. int32 gets zeros:
// it may be indices.
void FillWithNoise(uint8_t* data, const TensorShape& tensor, CudaDevice& device);

}  // namespace lowbit::ep
