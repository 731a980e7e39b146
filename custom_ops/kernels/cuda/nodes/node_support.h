// The families of nodes, and what their host sides share: plans and nodes from functions, constants in the
// device's memory, launches, numbers that become template arguments.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"
#include "kernels/cuda/conv/conv_params.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/memory.h"
#include "kernels/cuda/device/one_of.h"
#include "kernels/cuda/nodes/cuda_node.h"

namespace lowbit::cuda {

using Shapes = std::span<const TensorShape>;
using NodePlanPtr = std::shared_ptr<const NodePlan>;
using PackedNodePtr = std::unique_ptr<PackedNode>;

// One overload per kind of node, beside its kernels; node.cc dispatches to them.
// affine.cu
PackedNodePtr Pack(const AffineNode& node, const Device& device);
PackedNodePtr Pack(const LookupNode& node, const Device& device);
// binary.cu
PackedNodePtr Pack(const BinaryNode& node, const Device& device);
PackedNodePtr Pack(const FloatBinaryOp& op, const Device& device);
// pool.cu
PackedNodePtr Pack(const MaxPoolNode& node, const Device& device);
PackedNodePtr Pack(const AveragePoolNode& node, const Device& device);
PackedNodePtr Pack(const GlobalAveragePoolNode& node, const Device& device);
// concat.cu
PackedNodePtr Pack(const ConcatNode& node, const Device& device);
PackedNodePtr Pack(const JoinOp& op, const Device& device);
// move.cu
PackedNodePtr Pack(const ReshapeOp& op, const Device& device);
PackedNodePtr Pack(const ResizeNode& node, const Device& device);
PackedNodePtr Pack(const DepthToSpaceNode& node, const Device& device);
PackedNodePtr Pack(const TransposeOp& op, const Device& device);
PackedNodePtr Pack(const SliceOp& op, const Device& device);
PackedNodePtr Pack(const SplitOp& op, const Device& device);
PackedNodePtr Pack(const PadOp& op, const Device& device);
PackedNodePtr Pack(const NearestOp& op, const Device& device);
// image.cu
PackedNodePtr Pack(const ImageNode& node, const Device& device);
// fed_matmul.cu
PackedNodePtr Pack(const FedMatmulNode& node, const Device& device);
// gated_image.cu. The product of one pixel an image, packed with the numbers of its codes' table, and `multiply`, whose first
// operand is the image of codes that it multiplies, as its second one: fed what the product reads, then the image. nullptr at
// shapes that have no such kernel.
std::shared_ptr<const NodePlan> PlanGated(const std::shared_ptr<const PackedConv>& conv,
                                          const ConvShape& shape, const BinarySpec& multiply,
                                          const TensorShape& image);
// softmax.cu
PackedNodePtr Pack(const SoftmaxNode& node, const Device& device);
// quantize.cu
PackedNodePtr Pack(const QuantizeNode& node, const Device& device);
PackedNodePtr Pack(const ThresholdNode& node, const Device& device);
PackedNodePtr Pack(const DequantizeNode& node, const Device& device);
// cast.cu
PackedNodePtr Pack(const CastOp& op, const Device& device);
// float_ops.cu
PackedNodePtr Pack(const SoftmaxOp& op, const Device& device);
PackedNodePtr Pack(const UnaryOp& op, const Device& device);
PackedNodePtr Pack(const FloatPoolOp& op, const Device& device);
// What becomes of a product's sums: what is fed behind x is added (adds), then a Relu or a Clip leaves what lies between;
// numbers that are none pass.
struct Limits {
  float low = -std::numeric_limits<float>::infinity(), high = std::numeric_limits<float>::infinity();
  bool adds = false;
};
// Those of a Relu or a Clip. Throws Error for other nodes.
Limits LimitsOf(const StandardNode& activation);
// Of a product that is fed one tensor though its limits add another: there are none, what adds them comes behind.
inline Limits LimitsOf(Shapes fed, const Limits& limits) {
  return limits.adds && fed.size() == 1 ? Limits() : limits;
}
// The node without what is uploaded, which is not copied for that.
inline FloatGemmOp WithoutConstants(const FloatGemmOp& op) {
  return {op.k, op.n, op.transpose_a, {}, {}, op.is_matmul};
}
inline FloatConvOp WithoutConstants(const FloatConvOp& op) {
  return {op.in_channels, op.out_channels, op.group, op.window, op.auto_pad, {}, {}};
}
// float_product.cu
PackedNodePtr Pack(const FloatGemmOp& op, const Device& device, FloatPrecision precision,
                   const Limits& limits = {});
PackedNodePtr Pack(const FloatMatmulOp& op, const Device& device, FloatPrecision precision,
                   const Limits& limits = {});
PackedNodePtr Pack(const FloatConvOp& op, const Device& device, FloatPrecision precision,
                   const Limits& limits = {});
// The same in float32 with what tests and benchmarks ask for instead of what is estimated to be cheapest: one of the
// tiles, of which a Conv has all but the last, where it can make the slices, and at most so many slices of the sums:
// powers of two up to 16, without Tensor Cores up to 64 and 3, 6, 12, 24 and 48, too.
struct FloatTiling {
  static constexpr int kTiles = 8, kTensorTiles = 4;
  int tile = -1, slices = 0;  // -1 and 0: the cheapest
};
PackedNodePtr PackTiled(const FloatGemmOp& op, const Device& device, const Limits& limits,
                        const FloatTiling& tiling = {});
PackedNodePtr PackTiled(const FloatConvOp& op, const Device& device, const Limits& limits,
                        const FloatTiling& tiling = {});
// Codes with the channels last where MakesCodes, and where not as PackTiled; y is the tensor of floats either way. A grid
// may have no such kernel.
bool MayMakeCodes(const FloatConvOp& op, const Quantizer& codes);
PackedNodePtr PackToCodes(const FloatConvOp& op, const Device& device, const Limits& limits,
                          const Quantizer& codes);
bool MakesCodes(const FloatConvOp& op, const TensorShape& x, const TensorShape& y, const Device& device);
// How a product in float32 is summed, which the node and its shapes alone decide: `steps` of `step` elements each, the
// last one of what is left, are cut into slices, of which number s begins at s * steps / count. Each is summed front to
// back with fma, then their sums by a binary tree. The elements are so many channels at each tap, then the next ones.
struct SumSlices {
  int count = 1, steps = 0, step = 0;
  int channels = 1, taps = 1;

  // Which of [channels][taps] the k-th is.
  int64_t ElementAt(int64_t k) const {
    const int64_t run = k / channels;
    return (run / taps * channels + k % channels) * taps + run % taps;
  }
};
SumSlices SlicesOf(const FloatGemmOp& op, const TensorShape& x, const TensorShape& y,
                   const FloatTiling& tiling = {});
SumSlices SlicesOf(const FloatConvOp& op, const TensorShape& x, const TensorShape& y,
                   const FloatTiling& tiling = {});
// About how many clocks of a multiprocessor it takes so, of the GPUs that the kernels were made for.
double CostOfTiles(const FloatConvOp& op, const TensorShape& x, const TensorShape& y);
// winograd.cu. Whether a convolution has forms of it: squares of 2x2 outputs, made by one kernel, and of 4x4, by way of
// memory. Either serves the shapes where it is estimated to be cheapest, whatever GPU is there.
bool HasWinograd(const FloatConvOp& op);
// What tests ask for instead: outputs along the squares, with at most so many slices of the channels; 0: the cheapest.
struct WinogradTiling {
  static constexpr int kTiles = 3;  // of winograd_sm90.cu
  int made = 0, slices = 0, tile = -1;
};
PackedNodePtr PackWinograd(const FloatConvOp& op, const Device& device, const Limits& limits,
                           const WinogradTiling& tiling = {});
// winograd_planes.cu. That of 4x4 outputs, and about how many clocks of a multiprocessor it takes.
PackedNodePtr PackWinogradPlanes(const FloatConvOp& op, const Device& device, const Limits& limits,
                                 int slices);
double CostOfPlanes(const FloatConvOp& op, const TensorShape& x, const TensorShape& y);
// tensor_product.cu. Whether Tensor Cores of this device make the product, all others being in float32.
bool HasTensorProduct(const FloatGemmOp& op, const Device& device, FloatPrecision precision);
bool HasTensorProduct(const FloatConvOp& op, const Device& device, FloatPrecision precision);
PackedNodePtr PackTensorProduct(const FloatGemmOp& op, const Device& device, FloatPrecision precision,
                                const Limits& limits, const FloatTiling& tiling = {});
PackedNodePtr PackTensorProduct(const FloatConvOp& op, const Device& device, FloatPrecision precision,
                                const Limits& limits, const FloatTiling& tiling = {});
// tensor_product_sm90.cu: the same on Hopper.
PackedNodePtr PackWgmmaProduct(const FloatGemmOp& op, const Device& device, FloatPrecision precision,
                               const Limits& limits, const FloatTiling& tiling);
PackedNodePtr PackWgmmaProduct(const FloatConvOp& op, const Device& device, FloatPrecision precision,
                               const Limits& limits, const FloatTiling& tiling);
// nhwc_conv_sm90.cu: convolutions of images whose channels lie last on Hopper, which makes all of those that it has kernels
// for. Images that lie as ONNX has them are turned by a kernel of their own.
bool HasNhwcConv(const FloatConvOp& op, const Device& device, FloatPrecision precision);
PackedNodePtr PackNhwcConv(const FloatConvOp& op, const Device& device, FloatPrecision precision,
                           const Limits& limits, const FloatTiling& tiling);
// nhwc_tensors.cu: a pool that reads and makes such images, too, with the numbers that products of this precision read.
PackedNodePtr PackNhwcPool(const FloatPoolOp& op, FloatPrecision precision, PackedNodePtr plain);

// One launch of a plan: what it is fed, where its output goes, the queue that takes its kernels.
struct Run {
  std::span<const void* const> fed;
  void* y;
  void* workspace;
  Queue& queue;
  const std::string& plan;  // its text, for messages

  template <typename Params>
  void Launch(void (*kernel)(Params), dim3 grid, int threads, const Params& p) const {
    Check(queue.Launch(kernel, grid, dim3(static_cast<unsigned>(threads)), p));
  }
  void Check(cudaError_t launched) const {
    Require(launched == cudaSuccess, "CUDA: launching ", plan, " failed: ", cudaGetErrorString(launched));
  }
  // At least `work` threads.
  template <typename Params>
  void LaunchFor(int64_t work, void (*kernel)(Params), int threads, const Params& p) const {
    Launch(kernel, dim3(BlocksFor(work, threads)), threads, p);
  }
};

// A plan whose launch is a function.
using LaunchFunction = std::function<void(const Run& run)>;
NodePlanPtr MakePlan(std::string text, LaunchFunction launch, size_t workspace_bytes = 0);

// The same for kernels that make a tensor of `count` elements at `y` from one at `x`, all members of their
// parameters: `launch` gets those with the tensors of the run, and is not called where there is no element.
// Where limits.adds says so, `residual` is the tensor fed behind x.
template <typename Params, typename Launch>
NodePlanPtr MakeKernelPlan(std::string text, const Params& geometry, Launch launch,
                           size_t workspace_bytes = 0) {
  const auto fill_in = [geometry, launch = std::move(launch)](const Run& run) {
    if (geometry.count == 0) return;
    Params p = geometry;
    p.x = static_cast<decltype(p.x)>(run.fed[0]);
    p.y = static_cast<decltype(p.y)>(run.y);
    if constexpr (requires { p.residual; }) {
      if (p.limits.adds) p.residual = static_cast<decltype(p.residual)>(run.fed[1]);
    }
    launch(run, p);
  };
  return MakePlan(std::move(text), LaunchFunction(fill_in), workspace_bytes);
}

// Collects a node's constants on the host, to be uploaded together. Arrays are aligned to 256 bytes.
class NodeConstants {
 public:
  // Upload sets `pointer`, but for an empty array, of which it stays as it is.
  template <typename T>
  void Add(const std::vector<T>& values, const T*& pointer) {
    if (values.empty()) return;
    const size_t offset = bytes_.size(), bytes = values.size() * sizeof(T);
    bytes_.resize(offset + (bytes + 255) / 256 * 256);
    std::memcpy(bytes_.data() + offset, values.data(), bytes);
    set_.push_back([&pointer, offset](const DeviceMemory& memory) {
      pointer = reinterpret_cast<const T*>(memory.At(offset));
    });
  }
  // Whoever reads the constants holds the result.
  std::shared_ptr<const DeviceMemory> Upload(const Device& device) const;

 private:
  std::vector<uint8_t> bytes_;
  std::vector<std::function<void(const DeviceMemory&)>> set_;
};

// The plan, which holds `constants` as long as it lives.
NodePlanPtr Hold(NodePlanPtr plan, std::shared_ptr<const DeviceMemory> constants);

// A node whose plans are made by a function. They hold its constants. `overwrites`: as of PackedNode.
using PlanFunction = std::function<NodePlanPtr(Shapes fed, const TensorShape& y)>;
PackedNodePtr MakeNode(PlanFunction plan, std::shared_ptr<const DeviceMemory> constants = nullptr,
                       std::optional<size_t> overwrites = std::nullopt);

// `first`, then `second`. What the first makes, of so many bytes, lies in the workspace, before what either launch needs.
// The second is fed it last, behind one other tensor where there is one.
NodePlanPtr PlanInTurn(const NodePlanPtr& first, const NodePlanPtr& second, int64_t between_bytes);
int64_t BytesOfFloats(const TensorShape& tensor);
// An Add of float tensors, and what cuts its sums off, where they lie.
NodePlanPtr PlanAdd(Shapes operands, const TensorShape& y, const Limits& limits, const Device& device);
// A product whose limits add, of a node whose constants need not be there: where the tensor that is added has other dims
// than what the product makes, or y has, the addition and what cuts it off are kernels of their own.
PackedNodePtr PackWithAdd(const StandardNode& node, PackedNodePtr product, const Limits& limits,
                          const Device& device);

// Channels of codes that other tensors get, with the tables in a device's memory.
class StoredChannels {
 public:
  StoredChannels() = default;
  StoredChannels(std::span<const ChannelMove> moves, bool keeps_output, const Device& device);

  // Whether kernels can store them so.
  static bool Fit(std::span<const ChannelMove> moves);
  // Whether those that make floats can round them so besides.
  static bool FitFloats(std::span<const ChannelMove> moves);
  size_t Count() const { return places_.list.size(); }
  const ConvPlaces& Where() const { return places_; }
  const std::shared_ptr<const DeviceMemory>& Tables() const { return tables_; }
  // What a choice of kernels depends on.
  std::string Text() const;

 private:
  ConvPlaces places_;
  std::shared_ptr<const DeviceMemory> tables_;
};

// Sets the places in the parameters of a kernel, which stores vectors of `unit` bytes; their tensors are fed last.
template <typename Params>
void SetPlaces(const StoredChannels& stored, const Run& run, int unit, Params& p) {
  Require(stored.Count() == 0 || unit > 1, run.plan,
          " stores codes elsewhere, but not at multiples of 4 bytes");
  const std::span<const void* const> tensors = run.fed.last(stored.Count());
  if (!stored.Where().keeps_output) p.y = nullptr;
  for (const void* const tensor : tensors) {
    const ConvPlace& place = stored.Where().list[static_cast<size_t>(p.place_count)];
    p.places[p.place_count++] = {static_cast<uint8_t*>(const_cast<void*>(tensor)) + place.at,
                                 static_cast<int>(place.channels), static_cast<int>(place.first),
                                 static_cast<int>(place.first + place.count), place.table};
  }
}

// A node that makes codes and may store channels of them elsewhere.
using StoringPlanFunction =
    std::function<NodePlanPtr(Shapes fed, const TensorShape& y, const StoredChannels& stored)>;
PackedNodePtr MakeStoringNode(StoringPlanFunction plan, const Device& device);

// Kernels count elements in 31 bits and bytes in 64. Throws for tensors beyond.
int64_t CountOf(std::span<const int64_t> dims);

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

}  // namespace lowbit::cuda
