// What the float products of CUDA cores and of Tensor Cores share: their parameters and where their columns lie.
// Rows are outputs (of the node or a group), columns are rows of A or pixels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/float_precision.h"
#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_support.h"
#include "kernels/cuda/nodes/pool_window.cuh"

namespace lowbit::cuda {

// Channels of an image whose convolutions have kernels of their own (few_channels.cuh, one_channel.cuh).
inline constexpr int kMostFewChannels = 4;

// What estimates count with, of a multiprocessor. They decide how sums are split, so that another number here is another
// bit. All but those of mma.sync are fitted to what tiles of ResNet-50's layers take on an H100 (lowbit_cuda_float_bench,
// batch 1 and 16): what is chosen takes 1.05 to 1.07 times what the best tiles take at batch 1, and 1.04 to 1.05 at 16.
struct ProductRates {
  // In a clock: bytes of the L2 cache, of a cluster.
  static constexpr double kBytes = 18, kSent = 9.6;
  // In a clock, of very many outputs under way: products of float16, TF32 and 3xTF32 by mma.sync, by wgmma.
  static constexpr double kMmaHalves = 400, kMmaTf32 = 220, kMma3xTf32 = 80, kWgmmaHalves = 1000,
                          kWgmmaTf32 = 600, kWgmma3xTf32 = 400;
  static constexpr double kHiding = 3800;  // outputs under way that are half as fast
  // Clocks of the first block, of its cluster, of each block of that.
  static constexpr double kStart = 1500, kJoin = 430, kJoinOfSlice = 86;
  // Of convolutions with the channels last: in a clock products and bytes of boxes; clocks of a wave of blocks,
  // of a copy that is waited for, of an output of two bytes that is stored, of one that is sent, of each block
  // of a cluster. From registers less is multiplied by tiles of fewer than 128 outputs, and by a warpgroup alone.
  static constexpr double kBoxedHalves = 2048, kBoxedTf32 = 735, kBoxed3xTf32 = 245, kBoxBytes = 56,
                          kBoxWave = 1900, kBoxLatency = 300, kBoxStored = 0.14, kBoxSent = 0.22,
                          kBoxJoinOfSlice = 156, kBoxedNarrow = 0.8, kBoxedAlone = 0.7;
  static constexpr double JoinOf(int slices) { return slices > 1 ? kJoin + kJoinOfSlice * slices : 0; }
};

struct ProductParams : Tensors<float, float> {
  const float* bias = nullptr;      // [groups][rows], or null
  const float* residual = nullptr;  // as y, where limits.adds
  Limits limits;
  int rows = 0, columns = 0;
  // Gemm: element k of column j is x[j * column_step + k * k_step], and of y row i of column j is
  // y[j * rows + i].
  int64_t column_step = 0, k_step = 1;
  // Conv
  int channels = 0, groups = 1;  // channels of a group; of a Gemm the length of the sums
  Windows windows;
  FastDivisor by_pixels, by_kernel_w;
};

__device__ __forceinline__ float Limited(const Limits& limits, float sum) {
  sum = sum < limits.low ? limits.low : sum;
  return sum > limits.high ? limits.high : sum;
}

// What is added to the sum at a place of y.
__device__ __forceinline__ float ResidualAt(const ProductParams& p, int64_t at) {
  return p.limits.adds ? p.residual[at] : 0.0f;
}

// What is stored of a sum, to which *bias is added where there are biases.
__device__ __forceinline__ float FinishSum(const ProductParams& p, const float* bias, float sum,
                                           float residual) {
  if (p.bias != nullptr) sum = __fadd_rn(sum, *bias);
  if (p.limits.adds) sum = __fadd_rn(sum, residual);
  return Limited(p.limits, sum);
}
__device__ __forceinline__ float FinishSum(const ProductParams& p, int output, float sum, float residual) {
  return FinishSum(p, p.bias == nullptr ? nullptr : p.bias + output, sum, residual);
}

// Where the outputs of a Gemm lie, those of a column side by side.
struct GemmColumn {
  __device__ static __forceinline__ int64_t Target(const ProductParams& p, int, int i, int j) {
    return static_cast<int64_t>(j) * p.rows + i;
  }
  // From a line of outputs side by side to the next one: of a column.
  __device__ static __forceinline__ int64_t LineStep(const ProductParams& p) { return p.rows; }
};

// A pixel of a convolution and the channels of its group.
struct ConvColumn {
  const float* image = nullptr;
  int64_t top = 0, left = 0;

  __device__ __forceinline__ ConvColumn(const ProductParams& p, int group, int j) {
    if (j >= p.columns) return;
    const WindowDim &h = p.windows.h, &w = p.windows.w;
    const auto [n, row, out_x] = p.windows.PlaceOf(static_cast<unsigned>(j));
    top = row * h.stride - h.pad_begin;
    left = out_x * w.stride - w.pad_begin;
    image = p.x + (static_cast<int64_t>(n) * p.groups + group) * p.channels * h.in * w.in;
  }
  // The first channel at a tap, the others being ChannelStep apart; null where there is nothing but zeros.
  __device__ __forceinline__ const float* At(const ProductParams& p, unsigned ty, unsigned tx) const {
    const WindowDim &h = p.windows.h, &w = p.windows.w;
    const int64_t y = top + ty * h.dilation, x = left + tx * w.dilation;
    if (image == nullptr || y < 0 || y >= h.in || x < 0 || x >= w.in) return nullptr;
    return image + y * w.in + x;
  }
  __device__ static __forceinline__ int64_t ChannelStep(const ProductParams& p) {
    return p.windows.h.in * p.windows.w.in;
  }
  __device__ static __forceinline__ int64_t Target(const ProductParams& p, int group, int i, int j) {
    const auto [n, pixel] = Divided(static_cast<unsigned>(j), p.by_pixels);
    return ((static_cast<int64_t>(n) * p.groups + group) * p.rows + i) * p.by_pixels.divisor + pixel;
  }
  // From a row's output to the next one's.
  __device__ static __forceinline__ int64_t LineStep(const ProductParams& p) { return p.by_pixels.divisor; }
};

// ---- what either kind packs and plans

inline int CheckedSize(int64_t value, const char* what) {
  Require(value >= 0 && value < int64_t{1} << 31, "a float product with ", what, " ", value,
          ", expected less than 2^31");
  return static_cast<int>(value);
}

// All that is known before the shapes.
inline void Describe(const FloatGemmOp& op, const Limits& limits, ProductParams& p) {
  p.limits = limits;
  p.rows = CheckedSize(op.n, "n");
  p.channels = CheckedSize(op.k, "k");
}
inline void Describe(const FloatConvOp& op, const Limits& limits, ProductParams& p) {
  p.limits = limits;
  constexpr int64_t kMostGroups = 65535;  // a dim of the grid
  Require(op.group <= kMostGroups || op.out_channels == op.group, "a float product of ", op.out_channels,
          " outputs in ", op.group, " groups is too large");
  p.groups = CheckedSize(op.group, "groups");
  p.channels = CheckedSize(op.in_channels / op.group, "channels");
  p.rows = CheckedSize(op.out_channels / op.group, "outputs");
}
inline int64_t TapsOf(const FloatGemmOp&) { return 1; }
inline int64_t TapsOf(const FloatConvOp& op) {
  return op.window.kernel[kMaxSpatial - 2] * op.window.kernel[kMaxSpatial - 1];
}

inline void SetShapes(const FloatGemmOp& op, const TensorShape&, const TensorShape& y, ProductParams& p) {
  p.count = static_cast<unsigned>(CountOf(y.dims));
  p.columns = p.rows == 0 ? 0 : static_cast<int>(p.count) / p.rows;
  p.column_step = op.transpose_a ? 1 : p.channels;
  p.k_step = op.transpose_a ? p.columns : 1;
}
inline void SetShapes(const FloatConvOp& op, const TensorShape& x, const TensorShape& y, ProductParams& p) {
  p.count = static_cast<unsigned>(CountOf(y.dims));
  p.windows = WindowsOf(WindowOf(op, x.dims), x.dims.data() + 2, y.dims.data() + 2);
  const int64_t pixels = p.windows.h.out * p.windows.w.out;
  p.columns = CheckedSize(x.dims[0] * pixels, "pixels");
  p.by_pixels = MakeDivisor(std::max<int64_t>(1, pixels));
  p.by_kernel_w = MakeDivisor(p.windows.w.kernel);
}

// `shared`: what Describe gave and what else is known before the shapes, with a member `weights`. plan(parameters) once
// the shapes are known, too.
template <typename Op, typename Params, typename Weight, typename Plan>
PackedNodePtr MakeProduct(const Op& op, Params shared, const std::vector<Weight>& weights,
                          const Device& device, const Plan& plan) {
  NodeConstants constants;
  constants.Add(weights, shared.weights);
  constants.Add(op.bias, shared.bias);
  const auto memory = constants.Upload(device);
  const auto of_shapes = [=, op = WithoutConstants(op)](Shapes fed, const TensorShape& y) {
    Params geometry = shared;
    SetShapes(op, fed[0], y, geometry);
    geometry.limits = LimitsOf(fed, shared.limits);
    return plan(geometry);
  };
  return MakeNode(of_shapes, memory);
}

}  // namespace lowbit::cuda
