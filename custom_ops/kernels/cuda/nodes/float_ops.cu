// Standard float32 nodes between lowbit nodes, one value or window at a time: activations, Softmax, pools.
// Sums have a fixed order, so equal inputs give equal outputs.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_support.h"
#include "kernels/cuda/nodes/pool_window.cuh"

namespace lowbit::cuda {
namespace {

struct UnaryParams : Tensors<float, float> {
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

// kCount 4 or 1 values a thread.
template <int kCount>
__global__ void __launch_bounds__(kThreads) Unary(const __grid_constant__ UnaryParams p) {
  const unsigned at = StartThread() * kCount;
  if (at >= p.count) return;
  const int valid = static_cast<int>(p.count - at);
  float v[kCount];
  LoadFloats(p.x + at, v, valid);
#pragma unroll
  for (float& value : v) value = Apply(p.op, value);
  StoreFloats(p.y + at, v, valid);
}

struct Plus {
  __device__ __forceinline__ float operator()(float a, float b) const { return __fadd_rn(a, b); }
};
// A NaN is never larger.
struct Larger {
  __device__ __forceinline__ float operator()(float a, float b) const { return b > a ? b : a; }
};

struct SoftmaxParams : Tensors<float, float> {
  unsigned rows = 0, size = 0;  // softmax runs over `size` elements
  FastDivisor inner;            // which lie this far apart
  bool log = false;
};

// A row of elements by kGroup threads. A single thread has one whose elements lie apart: neighbouring threads
// then read neighbouring elements.
template <int kGroup>
__global__ void __launch_bounds__(kThreads) Softmax(const __grid_constant__ SoftmaxParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const unsigned row = blockIdx.x * (kThreads / kGroup) + threadIdx.x / kGroup, lane = threadIdx.x % kGroup;
  if (row >= p.rows) return;  // whole groups
  const int64_t step = kGroup == 1 ? p.inner.divisor : 1;
  const auto [outer, column] = kGroup == 1 ? Divided(row, p.inner) : Division{row, 0};
  const int64_t first = outer * p.size * step + column;
  float largest = -INFINITY;
  for (unsigned i = lane; i < p.size; i += kGroup) largest = Larger()(largest, p.x[first + i * step]);
  largest = CombineGroup<kGroup>(largest, Larger());
  float sum = 0;
  for (unsigned i = lane; i < p.size; i += kGroup) {
    sum = __fadd_rn(sum, expf(__fsub_rn(p.x[first + i * step], largest)));
  }
  sum = CombineGroup<kGroup>(sum, Plus());
  for (unsigned i = lane; i < p.size; i += kGroup) {
    const float shifted = __fsub_rn(p.x[first + i * step], largest);
    p.y[first + i * step] = p.log ? __fsub_rn(shifted, logf(sum)) : __fdiv_rn(expf(shifted), sum);
  }
}

struct FloatPoolParams : Tensors<float, float> {
  unsigned pixels = 0;  // of a plane of x
  Windows windows;
  bool max = true, count_include_pad = false;
};

__global__ void __launch_bounds__(kThreads) FloatPool(const __grid_constant__ FloatPoolParams p) {
  const unsigned index = StartThread();
  if (index >= p.count) return;
  const WindowDim &h = p.windows.h, &w = p.windows.w;
  const auto [plane, row, column] = p.windows.PlaceOf(index);
  const WindowDim::Span rows = h.Inside(row), columns = w.Inside(column);
  const float* x = p.x + static_cast<int64_t>(plane) * p.pixels;
  float result = p.max ? -FLT_MAX : 0.0f;
  for (int64_t i = 0; i < rows.count; ++i) {
    const float* from = x + (rows.first + i * h.dilation) * w.in + columns.first;
    for (int64_t j = 0; j < columns.count; ++j) {
      const float v = from[j * w.dilation];
      result = p.max ? Larger()(result, v) : __fadd_rn(result, v);
    }
  }
  if (!p.max) {
    const int64_t taps = p.count_include_pad ? h.Padded(row) * w.Padded(column) : rows.count * columns.count;
    result = __fdiv_rn(result, static_cast<float>(taps));
  }
  p.y[index] = result;
}

// A warp a plane.
__global__ void __launch_bounds__(kThreads) FloatGlobalPool(const __grid_constant__ FloatPoolParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const unsigned plane = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (plane >= p.count) return;  // whole warps
  const float* x = p.x + static_cast<int64_t>(plane) * p.pixels;
  float result = p.max ? -FLT_MAX : 0.0f;
#pragma unroll 4
  for (unsigned i = threadIdx.x % kWarp; i < p.pixels; i += kWarp) {
    result = p.max ? Larger()(result, x[i]) : __fadd_rn(result, x[i]);
  }
  result = p.max ? CombineGroup<kWarp>(result, Larger()) : CombineGroup<kWarp>(result, Plus());
  if (threadIdx.x % kWarp == 0) p.y[plane] = p.max ? result : __fdiv_rn(result, static_cast<float>(p.pixels));
}

constexpr unsigned kPoolChannels = 16, kPoolRows = kThreads / kPoolChannels;

// Channels are innermost in x: a block pools kPoolChannels of them, every row of threads some of the pixels.
struct LastPoolParams : Tensors<float, float> {  // count: numbers of y
  unsigned pixels = 0, channels = 0;
  FastDivisor by_channels;  // blocks along the channels
  bool max = true;
};

__global__ void __launch_bounds__(kThreads) FloatGlobalPoolLast(const __grid_constant__ LastPoolParams p) {
  __shared__ float parts[kPoolRows][kPoolChannels];
  LetSuccessorsStart();
  WaitForPredecessors();
  const auto [image, block] = Divided(blockIdx.x, p.by_channels);
  const unsigned lane = threadIdx.x % kPoolChannels, row = threadIdx.x / kPoolChannels;
  const unsigned channel = block * kPoolChannels + lane;
  const float none = p.max ? -FLT_MAX : 0.0f;
  float result = none;
  if (channel < p.channels) {
    const float* x = p.x + static_cast<int64_t>(image) * p.pixels * p.channels + channel;
#pragma unroll 8
    for (unsigned i = row; i < p.pixels; i += kPoolRows) {
      const float v = x[static_cast<int64_t>(i) * p.channels];
      result = p.max ? Larger()(result, v) : __fadd_rn(result, v);
    }
  }
  parts[row][lane] = result;
  __syncthreads();
  if (row > 0 || channel >= p.channels) return;
  result = none;
#pragma unroll
  for (unsigned r = 0; r < kPoolRows; ++r) {
    result = p.max ? Larger()(result, parts[r][lane]) : __fadd_rn(result, parts[r][lane]);
  }
  p.y[static_cast<int64_t>(image) * p.channels + channel] =
      p.max ? result : __fdiv_rn(result, static_cast<float>(p.pixels));
}

NodePlanPtr PlanSoftmax(const SoftmaxOp& op, const TensorShape& y) {
  const std::span<const int64_t> dims = y.dims;
  const size_t axis = AxisOf(op.axis, dims.size());
  SoftmaxParams geometry;
  geometry.count = static_cast<unsigned>(CountOf(dims));
  geometry.size = static_cast<unsigned>(CountOf(dims.subspan(axis, op.flattened ? dims.size() - axis : 1)));
  geometry.rows = geometry.count / std::max(1u, geometry.size);
  geometry.inner = MakeDivisor(op.flattened ? 1 : std::max<int64_t>(1, CountOf(dims.subspan(axis + 1))));
  geometry.log = op.log;
  return MakeKernelPlan("softmax", geometry, [](const Run& run, const SoftmaxParams& p) {
    constexpr unsigned kWarpRow = 512;  // elements of a row that a warp still reads in few steps
    if (p.inner.divisor > 1) return run.LaunchFor(p.rows, Softmax<1>, kThreads, p);
    if (p.size > kWarpRow) return run.Launch(Softmax<kThreads>, dim3(p.rows), kThreads, p);
    run.LaunchFor(int64_t{p.rows} * kWarp, Softmax<kWarp>, kThreads, p);
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
  if (!global) geometry.windows = WindowsOf(WindowOf(op, x.dims), x.dims.data() + 2, y.dims.data() + 2);
  const auto launch = [global](const Run& run, const FloatPoolParams& p) {
    if (!global) return run.LaunchFor(p.count, FloatPool, kThreads, p);
    run.LaunchFor(int64_t{p.count} * kWarp, FloatGlobalPool, kThreads, p);
  };
  return MakeKernelPlan(global ? "float_global_pool" : "float_pool", geometry, launch);
}

}  // namespace

PackedNodePtr Pack(const SoftmaxOp& op, const Device&) {
  return MakeNode([op](Shapes, const TensorShape& y) { return PlanSoftmax(op, y); });
}

PackedNodePtr Pack(const UnaryOp& op, const Device&) {
  return MakeNode([op](Shapes, const TensorShape& y) {
    const UnaryParams geometry{{.count = static_cast<unsigned>(CountOf(y.dims))}, op};
    return MakeKernelPlan("unary", geometry, [](const Run& run, const UnaryParams& p) {
      if (CommonUnit({p.x, p.y}) < 16) return run.LaunchFor(p.count, Unary<1>, kThreads, p);
      run.LaunchFor(BlocksFor(p.count, 4), Unary<4>, kThreads, p);
    });
  });
}

PackedNodePtr PackPooled(const TransposeOp& transpose, const FloatPoolOp& pool) {
  Require(FusesPool(transpose, pool),
          "a Transpose is fused with a global pool alone, of channels that were last");
  return MakeNode([max = pool.kind == FloatPoolOp::Kind::kGlobalMax](Shapes fed, const TensorShape& y) {
    const std::span<const int64_t> x = fed[0].dims;
    LastPoolParams geometry;
    geometry.count = static_cast<unsigned>(CountOf(y.dims));
    geometry.pixels = static_cast<unsigned>(CountOf(x.subspan(1, x.size() - 2)));
    geometry.channels = static_cast<unsigned>(x.back());
    geometry.by_channels = MakeDivisor(BlocksFor(std::max<int64_t>(1, x.back()), kPoolChannels));
    geometry.max = max;
    const int64_t blocks = x.front() * geometry.by_channels.divisor;
    return MakeKernelPlan("float_global_pool_last", geometry,
                          [blocks](const Run& run, const LastPoolParams& p) {
                            run.Launch(FloatGlobalPoolLast, dim3(static_cast<unsigned>(blocks)), kThreads, p);
                          });
  });
}

PackedNodePtr Pack(const FloatPoolOp& op, const Device&) {
  return MakeNode([op](Shapes fed, const TensorShape& y) { return PlanFloatPool(op, fed[0], y); });
}

}  // namespace lowbit::cuda
