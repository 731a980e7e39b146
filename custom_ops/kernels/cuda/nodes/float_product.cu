// Gemm, MatMul and Conv in float32, correct and plain: products of tiles in shared memory on the CUDA cores,
// summed with fma. Rows are outputs (of the node or a group), columns are rows of A or pixels.
#include "core/fed_matmul.h"
#include "core/nodes/node_kinds.h"
#include "kernels/cuda/nodes/float_product.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kSide = 16;   // threads along either side of a tile
constexpr int kDepth = 16;  // steps along k that a tile holds

struct FloatParams : ProductParams {
  const float* weights = nullptr;  // [groups][rows][k], k channel by channel
  int k = 0;
  FastDivisor by_taps;
  int64_t group_step = 0;  // of a fed product: from batch to batch of B
};

// Element k of a column.
struct GemmSource {
  const FloatParams& p;
  const float* column;

  __device__ __forceinline__ GemmSource(const FloatParams& params, int, int j)
      : p(params), column(params.x + min(j, params.columns - 1) * params.column_step) {}
  __device__ __forceinline__ float operator()(int k) const { return column[k * p.k_step]; }
};
// Of a fed product, whose rows are those of A and whose columns are B's, a group being a batch.
struct MatmulSource {
  const FloatParams& p;
  const float* column;

  __device__ __forceinline__ MatmulSource(const FloatParams& params, int group, int j)
      : p(params),
        column(params.x + group * params.group_step + min(j, params.columns - 1) * params.column_step) {}
  __device__ __forceinline__ float operator()(int k) const { return column[k * p.k_step]; }
};
struct MatmulColumn {
  __device__ static __forceinline__ int64_t Target(const FloatParams& p, int group, int i, int j) {
    return (static_cast<int64_t>(group) * p.rows + i) * p.columns + j;
  }
};
struct ConvSource {
  const FloatParams& p;
  const ConvColumn column;

  __device__ __forceinline__ ConvSource(const FloatParams& params, int group, int j)
      : p(params), column(params, group, j) {}
  __device__ __forceinline__ float operator()(int k) const {
    const auto [channel, tap] = Divided(static_cast<unsigned>(k), p.by_taps);
    const auto [ty, tx] = Divided(tap, p.by_kernel_w);
    const float* const x = column.At(p, ty, tx);
    return x == nullptr ? 0.0f : x[channel * ConvColumn::ChannelStep(p)];
  }
};

// kMicro x kMicro outputs a thread.
template <typename Source, typename Column, int kMicro>
__global__ void __launch_bounds__(kThreads) ProductTiles(const __grid_constant__ FloatParams p) {
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
    const int output = group * p.rows + i0 + ty + i;
#pragma unroll
    for (int j = 0; j < kMicro; ++j) {
      if (j0 + tx + j < p.columns) {
        p.y[Column::Target(p, group, i0 + ty + i, j0 + tx + j)] = FinishSum(p, output, sums[i][j]);
      }
    }
  }
}

// Few outputs of a group (depthwise): a thread sums one.
__global__ void __launch_bounds__(kThreads) ConvNarrow(const __grid_constant__ FloatParams p) {
  const int j = static_cast<int>(StartThread());
  if (j >= p.columns) return;
  const int channel = static_cast<int>(blockIdx.y), group = channel / p.rows;
  const ConvSource source(p, group, j);
  const float* weights = p.weights + static_cast<int64_t>(channel) * p.k;
  float sum = 0;
  for (int k = 0; k < p.k; ++k) sum = __fmaf_rn(weights[k], source(k), sum);
  p.y[ConvColumn::Target(p, group, channel - group * p.rows, j)] = FinishSum(p, channel, sum);
}

// Few columns: a warp sums one row for kColumns of them, its lanes side by side along k.
constexpr int kColumns = 4;
__global__ void __launch_bounds__(kThreads) GemmNarrow(const __grid_constant__ FloatParams p) {
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
      p.y[static_cast<int64_t>(j0 + j) * p.rows + i] = FinishSum(p, i, sums[j]);
    }
  }
}

constexpr int64_t kMostGridRows = 65535;

// Tiles of 64 x 64 where they fill the GPU, else of 32 x 32.
template <typename Source, typename Column>
void LaunchTiles(const Run& run, const FloatParams& p, int multiprocessors) {
  const auto grid = [&](int tile) {
    return dim3(BlocksFor(p.columns, tile), BlocksFor(p.rows, tile), static_cast<unsigned>(p.groups));
  };
  const dim3 large = grid(4 * kSide), small = grid(2 * kSide);
  const int64_t blocks = int64_t{large.x} * large.y * large.z;
  Require(large.z <= kMostGridRows && small.y <= kMostGridRows, "a float product of ", p.rows, " outputs in ",
          p.groups, " groups is too large");
  if (blocks >= multiprocessors) return run.Launch(ProductTiles<Source, Column, 4>, large, kThreads, p);
  run.Launch(ProductTiles<Source, Column, 2>, small, kThreads, p);
}

// The node tells by its type alone.
void LaunchProduct(const FloatGemmOp&, const Run& run, const FloatParams& p, int multiprocessors) {
  constexpr int kNarrow = 32;
  if (p.columns > kNarrow) return LaunchTiles<GemmSource, GemmColumn>(run, p, multiprocessors);
  const dim3 grid(BlocksFor(p.rows, kThreads / kWarp), BlocksFor(p.columns, kColumns));
  run.Launch(GemmNarrow, grid, kThreads, p);
}

void LaunchProduct(const FloatConvOp&, const Run& run, const FloatParams& p, int multiprocessors) {
  constexpr int kNarrow = 8;
  const int64_t outputs = int64_t{p.rows} * p.groups;
  if (p.groups == 1 || p.rows >= kNarrow || outputs > kMostGridRows) {
    return LaunchTiles<ConvSource, ConvColumn>(run, p, multiprocessors);
  }
  run.Launch(ConvNarrow, dim3(BlocksFor(p.columns, kThreads), static_cast<unsigned>(outputs)), kThreads, p);
}

// Batches of a fed product that one launch makes: A's lie one after the other, as `weights` do, B's are so
// far apart.
struct Batches {
  int64_t a = 0, b = 0, b_step = 0, count = 0;
};

std::vector<Batches> JoinedBatches(const FedMatmulShape& shape) {
  std::vector<Batches> joined;
  for (const auto& [a, b] : shape.batches) {
    Batches* const last = joined.empty() ? nullptr : &joined.back();
    if (last != nullptr && last->count == 1) last->b_step = b - last->b;
    if (last != nullptr && last->count < kMostGridRows && a == last->a + last->count * shape.m * shape.k &&
        b == last->b + last->count * last->b_step) {
      ++last->count;
    } else {
      joined.push_back({a, b, 0, 1});
    }
  }
  return joined;
}

template <typename Op>
PackedNodePtr PackProduct(const char* name, const Op& op, const Device& device, FloatPrecision precision,
                          const Limits& limits) {
  if (HasTensorProduct(op, device, precision)) return PackTensorProduct(op, device, precision, limits);
  FloatParams shared;
  Describe(op, limits, shared);
  shared.k = CheckedSize(shared.channels * TapsOf(op), "sums of length");
  shared.by_taps = MakeDivisor(TapsOf(op));
  const auto launch = [multiprocessors = device.multiprocessors](const Run& run, const FloatParams& p) {
    LaunchProduct(Op(), run, p, multiprocessors);
  };
  return MakeProduct(name, op, shared, op.weights, device, launch);
}

}  // namespace

PackedNodePtr Pack(const FloatGemmOp& op, const Device& device, FloatPrecision precision,
                   const Limits& limits) {
  return PackProduct("float_gemm", op, device, precision, limits);
}
// On CUDA cores whatever the precision is: neither operand is packed.
PackedNodePtr Pack(const FloatMatmulOp&, const Device& device, FloatPrecision, const Limits& limits) {
  const auto plan = [limits, multiprocessors = device.multiprocessors](Shapes fed, const TensorShape&) {
    FedMatmulShape shape;
    FloatProductOf(fed[0].dims, fed[1].dims, &shape);
    FloatParams geometry;
    geometry.limits = limits;
    geometry.rows = CheckedSize(shape.m, "rows");
    geometry.columns = CheckedSize(shape.n, "columns");
    geometry.k = CheckedSize(shape.k, "sums of length");
    geometry.column_step = shape.b_column;
    geometry.k_step = shape.b_k;
    const auto launch = [=, all = JoinedBatches(shape)](const Run& run) {
      FloatParams p = geometry;
      p.y = static_cast<float*>(run.y);
      for (const Batches& batches : all) {
        p.weights = static_cast<const float*>(run.fed[0]) + batches.a;
        p.x = static_cast<const float*>(run.fed[1]) + batches.b;
        p.group_step = batches.b_step;
        p.groups = static_cast<int>(batches.count);
        LaunchTiles<MatmulSource, MatmulColumn>(run, p, multiprocessors);
        p.y += batches.count * p.rows * p.columns;
      }
    };
    return MakePlan("float_matmul", launch);
  };
  return MakeNode(plan);
}
PackedNodePtr Pack(const FloatConvOp& op, const Device& device, FloatPrecision precision,
                   const Limits& limits) {
  return PackProduct("float_conv", op, device, precision, limits);
}

}  // namespace lowbit::cuda
