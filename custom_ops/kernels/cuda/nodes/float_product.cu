// Gemm, MatMul and Conv in float32, correct and plain: products of tiles in shared memory on the CUDA cores,
// summed with fma. Rows are outputs (of the node or a group), columns are rows of A or
// pixels.
#include <algorithm>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_families.h"
#include "kernels/cuda/nodes/node_support.h"
#include "kernels/cuda/nodes/pool_params.h"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSide = 16;   // threads along either side of a tile
constexpr int kDepth = 16;  // steps along k that a tile holds
constexpr int kWarp = 32;

struct ProductParams {
  const float* x = nullptr;
  const float* weights = nullptr;  // [groups][rows][k]
  const float* bias = nullptr;     // [groups][rows], or null
  float* y = nullptr;
  int rows = 0, columns = 0, k = 0;
  // Gemm: element k of column j is x[j * column_step + k * k_step], and of y row i of column j is
  // y[j * rows + i].
  int64_t column_step = 0, k_step = 1;
  // Conv
  int channels = 0, groups = 1;  // channels of a group
  WindowDim h, w;
  FastDivisor by_pixels, by_out_w, by_taps, by_kernel_w;
};

struct GemmSource {
  const ProductParams& p;
  const float* column;

  __device__ __forceinline__ GemmSource(const ProductParams& params, int, int j)
      : p(params), column(params.x + min(j, params.columns - 1) * params.column_step) {}
  __device__ __forceinline__ float operator()(int k) const { return column[k * p.k_step]; }
  __device__ static __forceinline__ int64_t Target(const ProductParams& p, int, int i, int j) {
    return static_cast<int64_t>(j) * p.rows + i;
  }
};

struct ConvSource {
  const ProductParams& p;
  const float* image;
  int64_t top, left;

  __device__ __forceinline__ ConvSource(const ProductParams& params, int group, int j) : p(params) {
    const auto pixel = static_cast<unsigned>(min(j, p.columns - 1));
    const unsigned n = Quotient(pixel, p.by_pixels), inside = pixel - n * p.by_pixels.divisor;
    const unsigned row = Quotient(inside, p.by_out_w);
    top = row * p.h.stride - p.h.pad_begin;
    left = (inside - row * p.by_out_w.divisor) * p.w.stride - p.w.pad_begin;
    image = p.x + (static_cast<int64_t>(n) * p.groups + group) * p.channels * p.h.in * p.w.in;
  }
  __device__ __forceinline__ float operator()(int k) const {
    const unsigned channel = Quotient(static_cast<unsigned>(k), p.by_taps);
    const unsigned tap = static_cast<unsigned>(k) - channel * p.by_taps.divisor;
    const unsigned ty = Quotient(tap, p.by_kernel_w), tx = tap - ty * p.by_kernel_w.divisor;
    const int64_t y = top + ty * p.h.dilation, x = left + tx * p.w.dilation;
    if (y < 0 || y >= p.h.in || x < 0 || x >= p.w.in) return 0.0f;
    return image[(channel * p.h.in + y) * p.w.in + x];
  }
  __device__ static __forceinline__ int64_t Target(const ProductParams& p, int group, int i, int j) {
    const unsigned n = Quotient(static_cast<unsigned>(j), p.by_pixels);
    const unsigned pixel = static_cast<unsigned>(j) - n * p.by_pixels.divisor;
    return ((static_cast<int64_t>(n) * p.groups + group) * p.rows + i) * p.by_pixels.divisor + pixel;
  }
};

// kMicro x kMicro outputs a thread.
template <typename Source, int kMicro>
__global__ void __launch_bounds__(kThreads) ProductTiles(const __grid_constant__ ProductParams p) {
  constexpr int kTile = kSide * kMicro;
  __shared__ float a_tile[kDepth][kTile + 4], b_tile[kDepth][kTile + 4];
  LetSuccessorsStart();
  WaitForPredecessors();
  const int group = static_cast<int>(blockIdx.z), tid = static_cast<int>(threadIdx.x);
  const int i0 = static_cast<int>(blockIdx.y) * kTile, j0 = static_cast<int>(blockIdx.x) * kTile;
  const int tx = tid % kSide * kMicro, ty = tid / kSide * kMicro;
  const float* weights = p.weights + static_cast<int64_t>(group) * p.rows * p.k;
  const int own = tid % kTile;  // the column that this thread fetches
  const Source source(p, group, j0 + own);
  float sums[kMicro][kMicro] = {};
  for (int k0 = 0; k0 < p.k; k0 += kDepth) {
    for (int e = tid; e < kDepth * kTile; e += kThreads) {
      const int k = e % kDepth, i = e / kDepth;
      const bool inside = k0 + k < p.k && i0 + i < p.rows;
      a_tile[k][i] = inside ? weights[static_cast<int64_t>(i0 + i) * p.k + k0 + k] : 0.0f;
    }
    for (int k = tid / kTile; k < kDepth; k += kThreads / kTile) {
      b_tile[k][own] = k0 + k < p.k ? source(k0 + k) : 0.0f;
    }
    __syncthreads();
    // Each tile's sum on its own, so that errors grow with the number of tiles and not of products.
    float tile[kMicro][kMicro] = {};
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
#pragma unroll
      for (int i = 0; i < kMicro; ++i) {
#pragma unroll
        for (int j = 0; j < kMicro; ++j) {
          tile[i][j] = __fmaf_rn(a_tile[k][ty + i], b_tile[k][tx + j], tile[i][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kMicro; ++i) {
#pragma unroll
      for (int j = 0; j < kMicro; ++j) sums[i][j] = __fadd_rn(sums[i][j], tile[i][j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kMicro; ++i) {
    if (i0 + ty + i >= p.rows) return;
    const float bias = p.bias != nullptr ? p.bias[group * p.rows + i0 + ty + i] : 0.0f;
#pragma unroll
    for (int j = 0; j < kMicro; ++j) {
      if (j0 + tx + j < p.columns) {
        p.y[Source::Target(p, group, i0 + ty + i, j0 + tx + j)] = __fadd_rn(sums[i][j], bias);
      }
    }
  }
}

// Few outputs of a group (depthwise): a thread sums one.
__global__ void __launch_bounds__(kThreads) ConvNarrow(const __grid_constant__ ProductParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const int j = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (j >= p.columns) return;
  const int channel = static_cast<int>(blockIdx.y), group = channel / p.rows;
  const ConvSource source(p, group, j);
  const float* weights = p.weights + static_cast<int64_t>(channel) * p.k;
  float sum = 0;
  for (int k = 0; k < p.k; ++k) sum = __fmaf_rn(weights[k], source(k), sum);
  if (p.bias != nullptr) sum = __fadd_rn(sum, p.bias[channel]);
  p.y[ConvSource::Target(p, group, channel - group * p.rows, j)] = sum;
}

// Few columns: a warp sums one row for kColumns of them, its lanes side by side along k.
constexpr int kColumns = 4;
__global__ void __launch_bounds__(kThreads) GemmNarrow(const __grid_constant__ ProductParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const int i = static_cast<int>(blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp);
  if (i >= p.rows) return;  // whole warps
  const int lane = static_cast<int>(threadIdx.x) % kWarp, j0 = static_cast<int>(blockIdx.y) * kColumns;
  const float* weights = p.weights + static_cast<int64_t>(i) * p.k;
  const float* column[kColumns];
#pragma unroll
  for (int j = 0; j < kColumns; ++j) column[j] = p.x + min(j0 + j, p.columns - 1) * p.column_step;
  float sums[kColumns] = {};
#pragma unroll 4
  for (int k = lane; k < p.k; k += kWarp) {
    const float w = weights[k];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sums[j] = __fmaf_rn(w, column[j][k * p.k_step], sums[j]);
  }
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      sums[j] = __fadd_rn(sums[j], __shfl_xor_sync(0xFFFFFFFFu, sums[j], step));
    }
    if (lane == 0 && j0 + j < p.columns) {
      const float bias = p.bias != nullptr ? p.bias[i] : 0.0f;
      p.y[static_cast<int64_t>(j0 + j) * p.rows + i] = __fadd_rn(sums[j], bias);
    }
  }
}

constexpr int64_t kMostGridRows = 65535;

// Tiles of 64 x 64 where they fill the GPU, else of 32 x 32.
template <typename Source>
cudaError_t LaunchTiles(const ProductParams& p, int multiprocessors, Queue& queue) {
  const auto grid = [&](int tile) {
    return dim3(static_cast<unsigned>((int64_t{p.columns} + tile - 1) / tile),
                static_cast<unsigned>((int64_t{p.rows} + tile - 1) / tile), static_cast<unsigned>(p.groups));
  };
  const dim3 large = grid(4 * kSide), small = grid(2 * kSide);
  const int64_t blocks = int64_t{large.x} * large.y * large.z;
  Require(large.z <= kMostGridRows && small.y <= kMostGridRows, "a float product of ", p.rows, " outputs in ",
          p.groups, " groups is too large");
  return blocks >= multiprocessors ? queue.Launch(ProductTiles<Source, 4>, large, dim3(kThreads), p)
                                   : queue.Launch(ProductTiles<Source, 2>, small, dim3(kThreads), p);
}

cudaError_t LaunchGemm(const ProductParams& p, int multiprocessors, Queue& queue) {
  constexpr int kNarrow = 32;
  if (p.columns > kNarrow) return LaunchTiles<GemmSource>(p, multiprocessors, queue);
  const dim3 grid(GridFor(p.rows, kThreads / kWarp).x,
                  static_cast<unsigned>((p.columns + kColumns - 1) / kColumns));
  return queue.Launch(GemmNarrow, grid, dim3(kThreads), p);
}

cudaError_t LaunchConv(const ProductParams& p, int multiprocessors, Queue& queue) {
  constexpr int kNarrow = 8;
  const int64_t outputs = int64_t{p.rows} * p.groups;
  if (p.groups == 1 || p.rows >= kNarrow || outputs > kMostGridRows) {
    return LaunchTiles<ConvSource>(p, multiprocessors, queue);
  }
  const dim3 grid(GridFor(p.columns, kThreads).x, static_cast<unsigned>(outputs));
  return queue.Launch(ConvNarrow, grid, dim3(kThreads), p);
}

struct PackedProduct {
  std::shared_ptr<const DeviceMemory> memory;
  const float *weights = nullptr, *bias = nullptr;
  int multiprocessors = 1;
};

PackedProduct Pack(const std::vector<float>& weights, const std::vector<float>& bias, const Device& device) {
  NodeConstants constants;
  const size_t weights_at = constants.Add(weights), bias_at = constants.Add(bias);
  PackedProduct out;
  out.multiprocessors = device.multiprocessors;
  if (constants.Bytes().empty()) return out;
  out.memory = UploadConstants(constants, device);
  out.weights = reinterpret_cast<const float*>(out.memory->At(weights_at));
  if (!bias.empty()) out.bias = reinterpret_cast<const float*>(out.memory->At(bias_at));
  return out;
}

int Checked(int64_t value, const char* what) {
  Require(value >= 0 && value < int64_t{1} << 31, "a float product with ", what, " ", value,
          ", expected less than 2^31");
  return static_cast<int>(value);
}

ProductParams ConvGeometryOf(const FloatConvOp& op, const TensorShape& x, const TensorShape& y) {
  ProductParams p;
  p.groups = Checked(op.group, "groups");
  p.channels = Checked(op.in_channels / op.group, "channels");
  p.rows = Checked(op.out_channels / op.group, "outputs");
  const auto dims = WindowDims(WindowOf(op, x.dims), x.dims.data() + 2, y.dims.data() + 2);
  p.h = dims[0];
  p.w = dims[1];
  const int64_t pixels = p.h.out * p.w.out, taps = p.h.kernel * p.w.kernel;
  p.columns = Checked(x.dims[0] * pixels, "pixels");
  p.k = Checked(p.channels * taps, "sums of length");
  p.by_pixels = MakeDivisor(std::max<int64_t>(1, pixels));
  p.by_out_w = MakeDivisor(std::max<int64_t>(1, p.w.out));
  p.by_taps = MakeDivisor(taps);
  p.by_kernel_w = MakeDivisor(p.w.kernel);
  return p;
}

using ProductLaunch = cudaError_t (*)(const ProductParams& p, int multiprocessors, Queue& queue);

NodePlanPtr PlanProduct(const char* name, ProductLaunch launch, const PackedProduct& packed,
                        const ProductParams& geometry, int64_t count) {
  return MakePlan(name, [=](Fed from, void* to, void*, Queue& queue) {
    if (count == 0) return;
    ProductParams p = geometry;
    p.x = static_cast<const float*>(from[0]);
    p.y = static_cast<float*>(to);
    p.weights = packed.weights;
    p.bias = packed.bias;
    CheckLaunch(launch(p, packed.multiprocessors, queue), name);
  });
}

}  // namespace

std::unique_ptr<PackedNode> PackFloatGemm(const FloatGemmOp& op, const Device& device) {
  ProductParams shared;
  shared.rows = Checked(op.n, "n");
  shared.k = Checked(op.k, "k");
  return MakeNode([packed = Pack(op.weights, op.bias, device), shared, transposed = op.transpose_a](
                      Shapes, const TensorShape& y) {
    ProductParams geometry = shared;
    const int64_t count = CountOf(y.dims);
    geometry.columns = shared.rows == 0 ? 0 : static_cast<int>(count / shared.rows);
    geometry.column_step = transposed ? 1 : geometry.k;
    geometry.k_step = transposed ? geometry.columns : 1;
    return PlanProduct("float_gemm", LaunchGemm, packed, geometry, count);
  });
}

std::unique_ptr<PackedNode> PackFloatConv(const FloatConvOp& op, const Device& device) {
  FloatConvOp rest = op;  // what plans need: all but the constants
  rest.weights.clear();
  rest.bias.clear();
  return MakeNode([packed = Pack(op.weights, op.bias, device), rest](Shapes fed, const TensorShape& y) {
    const ProductParams geometry = ConvGeometryOf(rest, fed[0], y);
    const int64_t count = CountOf(y.dims);
    return PlanProduct("float_conv", LaunchConv, packed, geometry, count);
  });
}

}  // namespace lowbit::cuda
