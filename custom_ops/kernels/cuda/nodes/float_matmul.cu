// MatMul of two fed tensors in float32, which nothing is packed of: products of tiles in shared memory on the CUDA
// cores, summed with fma, whatever float_precision is.
#include <algorithm>
#include <vector>

#include "core/fed_matmul.h"
#include "core/nodes/node_kinds.h"
#include "kernels/cuda/nodes/float_product.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kSide = 16;   // threads along either side of a tile
constexpr int kDepth = 16;  // steps along k that a tile holds

// Of batches that one launch makes: A's and y's lie one after the other, B's are so far apart.
struct MatmulParams {
  const float *a = nullptr, *b = nullptr;
  float* y = nullptr;
  Limits limits;
  int rows = 0, columns = 0, k = 0;
  int64_t b_step = 0, column_step = 0, k_step = 0;
};

// kMicro x kMicro outputs a thread.
template <int kMicro>
__global__ void __launch_bounds__(kThreads) MatmulTiles(const __grid_constant__ MatmulParams p) {
  constexpr int kTile = kSide * kMicro;
  __shared__ float a_tile[kDepth][kTile + 4], b_tile[kDepth][kTile + 4];
  LetSuccessorsStart();
  WaitForPredecessors();
  const int64_t batch = blockIdx.z;
  const int tid = static_cast<int>(threadIdx.x), own = tid % kTile;  // the column that this thread fetches
  const int i0 = static_cast<int>(blockIdx.y) * kTile, j0 = static_cast<int>(blockIdx.x) * kTile;
  const int tx = tid % kSide * kMicro, ty = tid / kSide * kMicro;
  const float* const a = p.a + batch * p.rows * p.k;
  const float* const column = p.b + batch * p.b_step + min(j0 + own, p.columns - 1) * p.column_step;
  float sums[kMicro][kMicro] = {};
  for (int k0 = 0; k0 < p.k; k0 += kDepth) {
    for (int e = tid; e < kDepth * kTile; e += kThreads) {
      const int k = e % kDepth, i = e / kDepth;
      const bool inside = k0 + k < p.k && i0 + i < p.rows;
      a_tile[k][i] = inside ? a[static_cast<int64_t>(i0 + i) * p.k + k0 + k] : 0.0f;
    }
    for (int k = tid / kTile; k < kDepth; k += kThreads / kTile) {
      b_tile[k][own] = k0 + k < p.k ? column[(k0 + k) * p.k_step] : 0.0f;
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
    float* const y = p.y + (batch * p.rows + i0 + ty + i) * p.columns + j0 + tx;
#pragma unroll
    for (int j = 0; j < kMicro; ++j) {
      if (j0 + tx + j < p.columns) y[j] = Limited(p.limits, sums[i][j]);
    }
  }
}

constexpr int64_t kMostGridRows = 65535;

// Tiles of 64 x 64 where they fill the GPU, else of 32 x 32.
void LaunchTiles(const Run& run, const MatmulParams& p, int64_t batches, int multiprocessors) {
  const auto grid = [&](int tile) {
    return dim3(BlocksFor(p.columns, tile), BlocksFor(p.rows, tile), static_cast<unsigned>(batches));
  };
  const dim3 large = grid(4 * kSide), small = grid(2 * kSide);
  Require(small.y <= kMostGridRows, "a float product of ", p.rows, " outputs is too large");
  if (int64_t{large.x} * large.y * large.z >= multiprocessors) {
    return run.Launch(MatmulTiles<4>, large, kThreads, p);
  }
  run.Launch(MatmulTiles<2>, small, kThreads, p);
}

struct Batches {
  int64_t a = 0, b = 0, b_step = 0, count = 0;
};

// Those that one launch makes.
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

}  // namespace

PackedNodePtr Pack(const FloatMatmulOp&, const Device& device, FloatPrecision, const Limits& limits) {
  const auto plan = [limits, multiprocessors = device.multiprocessors](Shapes fed, const TensorShape&) {
    FedMatmulShape shape;
    FloatProductOf(fed[0].dims, fed[1].dims, &shape);
    MatmulParams geometry;
    geometry.limits = limits;
    geometry.rows = CheckedSize(shape.m, "rows");
    geometry.columns = CheckedSize(shape.n, "columns");
    geometry.k = CheckedSize(shape.k, "sums of length");
    geometry.column_step = shape.b_column;
    geometry.k_step = shape.b_k;
    return MakePlan("float_matmul", [=, all = JoinedBatches(shape)](const Run& run) {
      MatmulParams p = geometry;
      p.y = static_cast<float*>(run.y);
      for (const Batches& batches : all) {
        p.a = static_cast<const float*>(run.fed[0]) + batches.a;
        p.b = static_cast<const float*>(run.fed[1]) + batches.b;
        p.b_step = batches.b_step;
        LaunchTiles(run, p, batches.count, multiprocessors);
        p.y += batches.count * p.rows * p.columns;
      }
    });
  };
  return MakeNode(plan);
}

}  // namespace lowbit::cuda
