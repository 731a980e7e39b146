// Gemm, MatMul and Conv in float32, correct and plain: products of tiles in shared memory on the CUDA cores,
// summed with fma. Rows are outputs (of the node or a group), columns are rows of A or pixels.
#include <algorithm>

#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_support.h"
#include "kernels/cuda/nodes/pool_window.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kSide = 16;   // threads along either side of a tile
constexpr int kDepth = 16;  // steps along k that a tile holds

struct ProductParams : Tensors<float, float> {
  const float* weights = nullptr;  // [groups][rows][k]
  const float* bias = nullptr;     // [groups][rows], or null
  int rows = 0, columns = 0, k = 0;
  // Gemm: element k of column j is x[j * column_step + k * k_step], and of y row i of column j is
  // y[j * rows + i].
  int64_t column_step = 0, k_step = 1;
  // Conv
  int channels = 0, groups = 1;  // channels of a group
  Windows windows;
  FastDivisor by_pixels, by_taps, by_kernel_w;
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
    const WindowDim &h = p.windows.h, &w = p.windows.w;
    const auto [n, row, out_x] = p.windows.PlaceOf(static_cast<unsigned>(min(j, p.columns - 1)));
    top = row * h.stride - h.pad_begin;
    left = out_x * w.stride - w.pad_begin;
    image = p.x + (static_cast<int64_t>(n) * p.groups + group) * p.channels * h.in * w.in;
  }
  __device__ __forceinline__ float operator()(int k) const {
    const auto [channel, tap] = Divided(static_cast<unsigned>(k), p.by_taps);
    const auto [ty, tx] = Divided(tap, p.by_kernel_w);
    const WindowDim &h = p.windows.h, &w = p.windows.w;
    const int64_t y = top + ty * h.dilation, x = left + tx * w.dilation;
    if (y < 0 || y >= h.in || x < 0 || x >= w.in) return 0.0f;
    return image[(channel * h.in + y) * w.in + x];
  }
  __device__ static __forceinline__ int64_t Target(const ProductParams& p, int group, int i, int j) {
    const auto [n, pixel] = Divided(static_cast<unsigned>(j), p.by_pixels);
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
  const int j = static_cast<int>(StartThread());
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
void LaunchTiles(const Run& run, const ProductParams& p, int multiprocessors) {
  const auto grid = [&](int tile) {
    return dim3(BlocksFor(p.columns, tile), BlocksFor(p.rows, tile), static_cast<unsigned>(p.groups));
  };
  const dim3 large = grid(4 * kSide), small = grid(2 * kSide);
  const int64_t blocks = int64_t{large.x} * large.y * large.z;
  Require(large.z <= kMostGridRows && small.y <= kMostGridRows, "a float product of ", p.rows, " outputs in ",
          p.groups, " groups is too large");
  if (blocks >= multiprocessors) return run.Launch(ProductTiles<Source, 4>, large, kThreads, p);
  run.Launch(ProductTiles<Source, 2>, small, kThreads, p);
}

void LaunchGemm(const Run& run, const ProductParams& p, int multiprocessors) {
  constexpr int kNarrow = 32;
  if (p.columns > kNarrow) return LaunchTiles<GemmSource>(run, p, multiprocessors);
  const dim3 grid(BlocksFor(p.rows, kThreads / kWarp), BlocksFor(p.columns, kColumns));
  run.Launch(GemmNarrow, grid, kThreads, p);
}

void LaunchConv(const Run& run, const ProductParams& p, int multiprocessors) {
  constexpr int kNarrow = 8;
  const int64_t outputs = int64_t{p.rows} * p.groups;
  if (p.groups == 1 || p.rows >= kNarrow || outputs > kMostGridRows) {
    return LaunchTiles<ConvSource>(run, p, multiprocessors);
  }
  run.Launch(ConvNarrow, dim3(BlocksFor(p.columns, kThreads), static_cast<unsigned>(outputs)), kThreads, p);
}

int Checked(int64_t value, const char* what) {
  Require(value >= 0 && value < int64_t{1} << 31, "a float product with ", what, " ", value,
          ", expected less than 2^31");
  return static_cast<int>(value);
}

// A node of constants and what `geometry_of` adds to their parameters for tensors of given shapes.
template <typename Geometry>
PackedNodePtr MakeProduct(const char* name, ProductParams shared, const std::vector<float>& weights,
                          const std::vector<float>& bias, const Device& device, const Geometry& geometry_of,
                          void (*launch)(const Run& run, const ProductParams& p, int multiprocessors)) {
  NodeConstants constants;
  constants.Add(weights, shared.weights);
  constants.Add(bias, shared.bias);
  const auto memory = constants.Upload(device);
  const auto plan = [=, multiprocessors = device.multiprocessors](Shapes fed, const TensorShape& y) {
    ProductParams geometry = shared;
    geometry.count = static_cast<unsigned>(CountOf(y.dims));
    geometry_of(geometry, fed[0], y);
    return MakeKernelPlan(name, geometry,
                          [=](const Run& run, const ProductParams& p) { launch(run, p, multiprocessors); });
  };
  return MakeNode(plan, memory);
}

}  // namespace

PackedNodePtr Pack(const FloatGemmOp& op, const Device& device) {
  ProductParams shared;
  shared.rows = Checked(op.n, "n");
  shared.k = Checked(op.k, "k");
  const auto geometry_of = [transposed = op.transpose_a](ProductParams& p, const auto&, const auto&) {
    p.columns = p.rows == 0 ? 0 : static_cast<int>(p.count) / p.rows;
    p.column_step = transposed ? 1 : p.k;
    p.k_step = transposed ? p.columns : 1;
  };
  return MakeProduct("float_gemm", shared, op.weights, op.bias, device, geometry_of, LaunchGemm);
}

PackedNodePtr Pack(const FloatConvOp& op, const Device& device) {
  ProductParams shared;
  shared.groups = Checked(op.group, "groups");
  shared.channels = Checked(op.in_channels / op.group, "channels");
  shared.rows = Checked(op.out_channels / op.group, "outputs");
  FloatConvOp window = op;  // without what is uploaded
  window.weights.clear();
  window.bias.clear();
  const auto geometry_of = [window](ProductParams& p, const TensorShape& x, const TensorShape& y) {
    p.windows = WindowsOf(WindowOf(window, x.dims), x.dims.data() + 2, y.dims.data() + 2);
    const WindowDim &h = p.windows.h, &w = p.windows.w;
    const int64_t pixels = h.out * w.out, taps = h.kernel * w.kernel;
    p.columns = Checked(x.dims[0] * pixels, "pixels");
    p.k = Checked(p.channels * taps, "sums of length");
    p.by_pixels = MakeDivisor(std::max<int64_t>(1, pixels));
    p.by_taps = MakeDivisor(taps);
    p.by_kernel_w = MakeDivisor(w.kernel);
  };
  return MakeProduct("float_conv", shared, op.weights, op.bias, device, geometry_of, LaunchConv);
}

}  // namespace lowbit::cuda
