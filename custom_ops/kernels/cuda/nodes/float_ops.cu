// Standard float32 nodes between lowbit nodes, one value or window at a time: activations, Softmax, pools.
// Sums have a fixed order, so equal inputs give equal outputs.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_families.h"
#include "kernels/cuda/nodes/node_support.h"
#include "kernels/cuda/nodes/pool_params.h"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

struct UnaryParams {
  const float* x = nullptr;
  float* y = nullptr;
  unsigned count = 0;
  UnaryOp op;
};

__device__ __forceinline__ float Limit(float v, float low, float high) {
  v = v < low ? low : v;
  return v > high ? high : v;
}

__device__ __forceinline__ float Apply(const UnaryOp& op, float v) {
  switch (op.kind) {
    case UnaryKind::kRelu:
      return v < 0.0f ? 0.0f : v;
    case UnaryKind::kClip:
      return Limit(v, op.a, op.b);
    case UnaryKind::kSigmoid:
      return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-v)));
    case UnaryKind::kTanh:
      return tanhf(v);
    case UnaryKind::kLeakyRelu:
      return v < 0.0f ? __fmul_rn(op.a, v) : v;
    case UnaryKind::kHardSigmoid:
      return Limit(__fadd_rn(__fmul_rn(op.a, v), op.b), 0.0f, 1.0f);
    case UnaryKind::kHardSwish:
      return __fmul_rn(v, Limit(__fadd_rn(__fmul_rn(1.0f / 6.0f, v), 0.5f), 0.0f, 1.0f));
  }
  return v;
}

template <int kCount>
__global__ void __launch_bounds__(kThreads) Unary(const __grid_constant__ UnaryParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kCount;
  if (at >= p.count) return;
  if constexpr (kCount == 4) {
    if (at + 4 <= p.count) {
      const float4 v = *reinterpret_cast<const float4*>(p.x + at);
      *reinterpret_cast<float4*>(p.y + at) =
          make_float4(Apply(p.op, v.x), Apply(p.op, v.y), Apply(p.op, v.z), Apply(p.op, v.w));
      return;
    }
  }
  for (int64_t i = at; i < min(at + kCount, static_cast<int64_t>(p.count)); ++i) p.y[i] = Apply(p.op, p.x[i]);
}

struct Plus {
  __device__ __forceinline__ float operator()(float a, float b) const { return __fadd_rn(a, b); }
};
// A NaN is never larger.
struct Larger {
  __device__ __forceinline__ float operator()(float a, float b) const { return b > a ? b : a; }
};

// All threads of a group of kGroup (a warp or the block) get the combination of their values.
template <int kGroup, typename Combine>
__device__ __forceinline__ float CombineGroup(float v, const Combine& combine) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) v = combine(v, __shfl_xor_sync(0xFFFFFFFFu, v, step));
  if constexpr (kGroup > kWarp) {
    __shared__ float of_warp[kGroup / kWarp];
    __syncthreads();
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = v;
    __syncthreads();
    v = of_warp[0];
#pragma unroll
    for (int i = 1; i < kGroup / kWarp; ++i) v = combine(v, of_warp[i]);
  }
  return v;
}

struct SoftmaxParams {
  const float* x = nullptr;
  float* y = nullptr;
  unsigned rows = 0, size = 0;  // softmax runs over `size` elements
  FastDivisor inner;            // which lie this far apart
  bool log = false;
};

__device__ __forceinline__ float SoftmaxValue(const SoftmaxParams& p, float shifted, float sum) {
  return p.log ? __fsub_rn(shifted, logf(sum)) : __fdiv_rn(expf(shifted), sum);
}

// Contiguous rows, a group of threads each.
template <int kGroup>
__global__ void __launch_bounds__(kThreads) SoftmaxRows(const __grid_constant__ SoftmaxParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kGroup) + threadIdx.x / kGroup;
  if (row >= p.rows) return;  // whole groups
  const float* x = p.x + row * p.size;
  float* y = p.y + row * p.size;
  const unsigned lane = threadIdx.x % kGroup;
  float largest = -INFINITY;
  for (unsigned i = lane; i < p.size; i += kGroup) largest = Larger()(largest, x[i]);
  largest = CombineGroup<kGroup>(largest, Larger());
  float sum = 0;
  for (unsigned i = lane; i < p.size; i += kGroup) sum = __fadd_rn(sum, expf(__fsub_rn(x[i], largest)));
  sum = CombineGroup<kGroup>(sum, Plus());
  for (unsigned i = lane; i < p.size; i += kGroup) y[i] = SoftmaxValue(p, __fsub_rn(x[i], largest), sum);
}

// A thread a row; neighbouring threads read neighbouring elements.
__global__ void __launch_bounds__(kThreads) SoftmaxColumns(const __grid_constant__ SoftmaxParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const unsigned row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= p.rows) return;
  const unsigned outer = Quotient(row, p.inner), column = row - outer * p.inner.divisor;
  const int64_t step = p.inner.divisor, first = outer * p.size * step + column;
  float largest = -INFINITY;
  for (unsigned i = 0; i < p.size; ++i) largest = Larger()(largest, p.x[first + i * step]);
  float sum = 0;
  for (unsigned i = 0; i < p.size; ++i) {
    sum = __fadd_rn(sum, expf(__fsub_rn(p.x[first + i * step], largest)));
  }
  for (unsigned i = 0; i < p.size; ++i) {
    p.y[first + i * step] = SoftmaxValue(p, __fsub_rn(p.x[first + i * step], largest), sum);
  }
}

struct FloatPoolParams {
  const float* x = nullptr;
  float* y = nullptr;
  unsigned count = 0;   // outputs
  unsigned pixels = 0;  // of a plane of x
  FastDivisor by_out_w, by_out_h;
  WindowDim h, w;
  bool max = true, count_include_pad = false;
};

__global__ void __launch_bounds__(kThreads) FloatPool(const __grid_constant__ FloatPoolParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const unsigned index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= p.count) return;
  const unsigned line = Quotient(index, p.by_out_w), column = index - line * p.by_out_w.divisor;
  const unsigned plane = Quotient(line, p.by_out_h), row = line - plane * p.by_out_h.divisor;
  const WindowDim::Span rows = p.h.Inside(row), columns = p.w.Inside(column);
  const float* x = p.x + static_cast<int64_t>(plane) * p.pixels;
  float result = p.max ? -FLT_MAX : 0.0f;
  for (int64_t i = 0; i < rows.count; ++i) {
    const float* from = x + (rows.first + i * p.h.dilation) * p.w.in + columns.first;
    for (int64_t j = 0; j < columns.count; ++j) {
      const float v = from[j * p.w.dilation];
      result = p.max ? Larger()(result, v) : __fadd_rn(result, v);
    }
  }
  if (!p.max) {
    const int64_t taps =
        p.count_include_pad ? p.h.Padded(row) * p.w.Padded(column) : rows.count * columns.count;
    result = __fdiv_rn(result, static_cast<float>(taps));
  }
  p.y[index] = result;
}

// A warp a plane.
__global__ void __launch_bounds__(kThreads) FloatGlobalPool(const __grid_constant__ FloatPoolParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const int64_t plane = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (plane >= p.count) return;  // whole warps
  const float* x = p.x + plane * p.pixels;
  float result = p.max ? -FLT_MAX : 0.0f;
#pragma unroll 4
  for (unsigned i = threadIdx.x % kWarp; i < p.pixels; i += kWarp) {
    result = p.max ? Larger()(result, x[i]) : __fadd_rn(result, x[i]);
  }
  result = p.max ? CombineGroup<kWarp>(result, Larger()) : CombineGroup<kWarp>(result, Plus());
  if (threadIdx.x % kWarp == 0) p.y[plane] = p.max ? result : __fdiv_rn(result, static_cast<float>(p.pixels));
}

NodePlanPtr PlanSoftmax(const SoftmaxOp& op, const TensorShape& y) {
  const std::span<const int64_t> dims = y.dims;
  const size_t axis = AxisOf(op.axis, dims.size());
  const int64_t count = CountOf(dims);
  if (count == 0) return MakePlan("softmax", [](Fed, void*, void*, Queue&) {});
  const int64_t size = CountOf(dims.subspan(axis, op.flattened ? dims.size() - axis : 1));
  SoftmaxParams geometry;
  geometry.size = static_cast<unsigned>(size);
  geometry.rows = static_cast<unsigned>(count / size);
  geometry.inner = MakeDivisor(op.flattened ? 1 : CountOf(dims.subspan(axis + 1)));
  geometry.log = op.log;
  return MakePlan("softmax", [geometry](Fed from, void* to, void*, Queue& queue) {
    constexpr unsigned kWarpRow = 512;  // elements of a row that a warp still reads in few steps
    SoftmaxParams p = geometry;
    p.x = static_cast<const float*>(from[0]);
    p.y = static_cast<float*>(to);
    const dim3 block(kThreads);
    const cudaError_t error =
        p.inner.divisor > 1  ? queue.Launch(SoftmaxColumns, GridFor(p.rows, kThreads), block, p)
        : p.size <= kWarpRow ? queue.Launch(SoftmaxRows<kWarp>, GridFor(p.rows, kThreads / kWarp), block, p)
                             : queue.Launch(SoftmaxRows<kThreads>, GridFor(p.rows, 1), block, p);
    CheckLaunch(error, "softmax");
  });
}

NodePlanPtr PlanFloatPool(const FloatPoolOp& op, const TensorShape& x, const TensorShape& y) {
  using Kind = FloatPoolOp::Kind;
  const bool global = op.kind == Kind::kGlobalMax || op.kind == Kind::kGlobalAverage;
  FloatPoolParams geometry;
  geometry.max = op.kind == Kind::kMax || op.kind == Kind::kGlobalMax;
  geometry.count_include_pad = op.count_include_pad;
  geometry.count = static_cast<unsigned>(CountOf(y.dims));
  geometry.pixels = static_cast<unsigned>(CountOf(std::span(x.dims).subspan(2)));
  if (!global) {
    const auto dims = WindowDims(WindowOf(op, x.dims), x.dims.data() + 2, y.dims.data() + 2);
    geometry.h = dims[0];
    geometry.w = dims[1];
    geometry.by_out_h = MakeDivisor(std::max<int64_t>(1, geometry.h.out));
    geometry.by_out_w = MakeDivisor(std::max<int64_t>(1, geometry.w.out));
  }
  return MakePlan(global ? "float_global_pool" : "float_pool", [geometry, global](Fed from, void* to, void*,
                                                                                  Queue& queue) {
    if (geometry.count == 0) return;
    FloatPoolParams p = geometry;
    p.x = static_cast<const float*>(from[0]);
    p.y = static_cast<float*>(to);
    const dim3 block(kThreads);
    CheckLaunch(global ? queue.Launch(FloatGlobalPool, GridFor(p.count, kThreads / kWarp), block, p)
                       : queue.Launch(FloatPool, GridFor(p.count, kThreads), block, p),
                "float_pool");
  });
}

}  // namespace

std::unique_ptr<PackedNode> PackSoftmax(const SoftmaxOp& op) {
  return MakeNode([op](Shapes, const TensorShape& y) { return PlanSoftmax(op, y); });
}

std::unique_ptr<PackedNode> PackUnary(const UnaryOp& op) {
  return MakeNode([op](Shapes, const TensorShape& y) {
    return MakePlan("unary", [op, count = CountOf(y.dims)](Fed from, void* to, void*, Queue& queue) {
      if (count == 0) return;
      const UnaryParams p{static_cast<const float*>(from[0]), static_cast<float*>(to),
                          static_cast<unsigned>(count), op};
      const dim3 block(kThreads);
      CheckLaunch(CommonUnit({p.x, p.y}) == 16
                      ? queue.Launch(Unary<4>, GridFor((count + 3) / 4, kThreads), block, p)
                      : queue.Launch(Unary<1>, GridFor(count, kThreads), block, p),
                  "unary");
    });
  });
}

std::unique_ptr<PackedNode> PackFloatPool(const FloatPoolOp& op) {
  return MakeNode([op](Shapes fed, const TensorShape& y) { return PlanFloatPool(op, fed[0], y); });
}

}  // namespace lowbit::cuda
