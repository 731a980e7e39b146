// What the host sides of the kernels that are no convolutions share.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"
#include "kernels/cuda/device/memory.h"
#include "kernels/cuda/nodes/code_params.h"
#include "kernels/cuda/nodes/cuda_node.h"

namespace lowbit::cuda {

using Fed = std::span<const void* const>;
using Shapes = std::span<const TensorShape>;
using NodePlanPtr = std::shared_ptr<const NodePlan>;

// A plan whose launch is a function.
using LaunchFunction = std::function<void(Fed fed, void* y, void* workspace, Queue& queue)>;
NodePlanPtr MakePlan(std::string text, LaunchFunction launch, size_t workspace_bytes = 0);

// A node whose plans are made by a function.
using PlanFunction = std::function<NodePlanPtr(Shapes fed, const TensorShape& y)>;
std::unique_ptr<PackedNode> MakeNode(PlanFunction plan);

// Collects a node's constants on the host; an offset, a multiple of 256, stands for each until they are
// uploaded together.
class NodeConstants {
 public:
  template <typename T>
  size_t Add(const std::vector<T>& values) {
    const size_t offset = bytes_.size(), bytes = values.size() * sizeof(T);
    bytes_.resize(offset + (bytes + 255) / 256 * 256);
    if (bytes > 0) std::memcpy(bytes_.data() + offset, values.data(), bytes);
    return offset;
  }
  const std::vector<uint8_t>& Bytes() const { return bytes_; }

 private:
  std::vector<uint8_t> bytes_;
};
// The plans that read the constants hold them.
std::shared_ptr<const DeviceMemory> UploadConstants(const NodeConstants& constants, const Device& device);

// Kernels count elements in 31 bits and bytes in 64. Throws for tensors beyond.
int64_t CountOf(std::span<const int64_t> dims);

// Blocks of `threads` for `work` threads.
inline dim3 GridFor(int64_t work, int threads) {
  return dim3(static_cast<unsigned>((work + threads - 1) / threads));
}

// The largest of 16, 4 and 1 that divides all addresses; then all byte counts.
inline int CommonUnit(std::initializer_list<const void*> pointers) {
  uintptr_t bits = 0;
  for (const void* pointer : pointers) bits |= reinterpret_cast<uintptr_t>(pointer);
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1;
}
inline int CommonUnit(int64_t bytes) { return bytes % 16 == 0 ? 16 : bytes % 4 == 0 ? 4 : 1; }

// Threads that an H200 holds at once.
inline constexpr int64_t kOneWave = 132 * 2048;

// `unit`, or 4 where vectors of 16 bytes would leave most of the GPU idle: nodes that compute much per byte.
inline int SpreadUnit(int unit, int64_t bytes) {
  return bytes / 16 < kOneWave / 2 ? std::min(unit, 4) : unit;
}

// Calls fn(std::integral_constant<bool, b>) for the value of `b`, so that it becomes a template argument.
template <typename Fn>
auto WithBool(bool b, const Fn& fn) {
  return b ? fn(std::true_type{}) : fn(std::false_type{});
}
// The same with `value`, one of kValues.
template <int... kValues, typename Fn>
void WithInt(int value, const Fn& fn) {
  ((value == kValues ? fn(std::integral_constant<int, kValues>{}) : void()), ...);
}

inline void CheckLaunch(cudaError_t error, const char* kernel) {
  Require(error == cudaSuccess, "CUDA: launching ", kernel, " failed: ", cudaGetErrorString(error));
}

}  // namespace lowbit::cuda
