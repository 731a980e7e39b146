#include "ep/cuda/stopwatch.h"

#include <algorithm>
#include <cstring>

#include "core/node_reader.h"
#include "ep/cuda/cuda_call.h"

namespace lowbit::ep {

Stopwatch::Stopwatch() {
  CheckCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
  CheckCuda(cudaEventCreate(&begin_), "making an event");
  CheckCuda(cudaEventCreate(&end_), "making an event");
}

Stopwatch::~Stopwatch() {
  static_cast<void>(cudaEventDestroy(end_));
  static_cast<void>(cudaEventDestroy(begin_));
  static_cast<void>(cudaStreamDestroy(stream_));
}

double Stopwatch::Microseconds(const std::function<void()>& enqueue) const {
  CheckCuda(cudaEventRecord(begin_, stream_), "recording an event");
  enqueue();
  CheckCuda(cudaEventRecord(end_, stream_), "recording an event");
  CheckCuda(cudaEventSynchronize(end_), "waiting for a measurement");
  float milliseconds = 0;
  CheckCuda(cudaEventElapsedTime(&milliseconds, begin_, end_), "reading a measurement");
  return 1e3 * static_cast<double>(milliseconds);
}

double Median(std::vector<double>& numbers) {
  const auto middle = numbers.begin() + static_cast<int64_t>(numbers.size() / 2);
  std::nth_element(numbers.begin(), middle, numbers.end());
  return *middle;
}

void FillWithNoise(uint8_t* data, const TensorShape& tensor, CudaDevice& device) {
  constexpr size_t kNoise = 1 << 20;
  const size_t bytes = static_cast<size_t>(ElementCount(tensor.dims)) * ElementSize(tensor.type);
  std::vector<uint8_t> noise(std::min(bytes, kNoise));
  uint32_t random = 1;
  const auto next = [&] { return random = random * 1664525 + 1013904223; };
  if (tensor.type == ElementType::kFloat) {
    for (size_t at = 0; at + sizeof(float) <= noise.size(); at += sizeof(float)) {
      const float value = static_cast<float>(static_cast<int32_t>(next())) * 0x1p-31f;
      std::memcpy(&noise[at], &value, sizeof(float));
    }
  } else if (tensor.type != ElementType::kInt32) {
    for (uint8_t& byte : noise) byte = static_cast<uint8_t>(next() >> 24);
  }
  const cudaStream_t stream = device.CopyStream();
  for (size_t at = 0; at < bytes; at += kNoise) {
    CheckCuda(cudaMemcpyAsync(data + at, noise.data(), std::min(bytes - at, noise.size()),
                              cudaMemcpyHostToDevice, stream),
              "filling a tensor");
  }
  CheckCuda(cudaStreamSynchronize(stream), "filling a tensor");
}

}  // namespace lowbit::ep
