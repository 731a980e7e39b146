// Two tensors, one out, numpy broadcasting: LowBitAdd and LowBitMul on codes, Add, Sub, Mul and Div on
// float32.
#include <algorithm>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_families.h"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxLevels = 8;

// The loop nest of BroadcastLevels: a thread makes one vector of the innermost level.
struct BroadcastParams {
  unsigned vectors = 0, inner_size = 1;
  FastDivisor inner_vectors;
  int outer_levels = 0;
  FastDivisor size[kMaxLevels];
  unsigned a_step[kMaxLevels] = {}, b_step[kMaxLevels] = {};
  bool a_stands = false, b_stands = false;  // one element for the whole innermost level
};

// Element offsets of a vector.
struct Place {
  unsigned a = 0, b = 0, y = 0;
  int valid = 0;  // elements up to the end of the innermost level
};

__device__ __forceinline__ Place Locate(const BroadcastParams& p, unsigned vector, int per_vector) {
  unsigned rest = Quotient(vector, p.inner_vectors);
  const unsigned column = (vector - rest * p.inner_vectors.divisor) * static_cast<unsigned>(per_vector);
  Place out;
  out.a = p.a_stands ? 0 : column;
  out.b = p.b_stands ? 0 : column;
  out.y = rest * p.inner_size + column;
  out.valid = static_cast<int>(p.inner_size - column);
  for (int i = 0; i < p.outer_levels; ++i) {
    const unsigned next = Quotient(rest, p.size[i]), index = rest - next * p.size[i].divisor;
    out.a += index * p.a_step[i];
    out.b += index * p.b_step[i];
    rest = next;
  }
  return out;
}

struct BinaryParams {
  const uint8_t *a = nullptr, *b = nullptr;
  void* y = nullptr;
  BroadcastParams nest;
  CodeReader a_reader, b_reader;
  float a_scale = 1, b_scale = 1;
  Divider divider;
  CodeRounder rounder;
};

template <int kBytes>
__device__ __forceinline__ Codes<kBytes> LoadOperand(const uint8_t* x, bool stands, int valid) {
  return stands ? SplatCode<kBytes>(x) : LoadCodes<kBytes>(x, valid);
}

template <bool kMul>
__device__ __forceinline__ float Combine(const BinaryParams& p, unsigned a, unsigned b, int i) {
  const float va = __fmul_rn(CodeValue(a ^ p.a_reader.flip, i, p.a_reader), p.a_scale);
  const float vb = __fmul_rn(CodeValue(b ^ p.b_reader.flip, i, p.b_reader), p.b_scale);
  return kMul ? __fmul_rn(va, vb) : __fadd_rn(va, vb);
}

template <int kBytes, bool kMul, bool kFast>
__global__ void __launch_bounds__(kThreads) BinaryCodes(const __grid_constant__ BinaryParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const unsigned vector = blockIdx.x * kThreads + threadIdx.x;
  if (vector >= p.nest.vectors) return;
  const Place at = Locate(p.nest, vector, kBytes);
  const Codes<kBytes> a = LoadOperand<kBytes>(p.a + at.a, p.nest.a_stands, at.valid);
  const Codes<kBytes> b = LoadOperand<kBytes>(p.b + at.b, p.nest.b_stands, at.valid);
  Codes<kBytes> y;
#pragma unroll
  for (int w = 0; w < Codes<kBytes>::kWords; ++w) {
    unsigned code[Codes<kBytes>::kPerWord];
#pragma unroll
    for (int i = 0; i < Codes<kBytes>::kPerWord; ++i) {
      code[i] = RoundedCode(Divide<kFast>(Combine<kMul>(p, a.w[w], b.w[w], i), p.divider), p.rounder);
    }
    y.w[w] = PackCodes(code, p.rounder);
  }
  StoreCodes<kBytes>(static_cast<uint8_t*>(p.y) + at.y, y, at.valid);
}

template <bool kMul>
__global__ void __launch_bounds__(kThreads) BinaryToFloat(const __grid_constant__ BinaryParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const unsigned vector = blockIdx.x * kThreads + threadIdx.x;
  if (vector >= p.nest.vectors) return;
  const Place at = Locate(p.nest, vector, 1);
  static_cast<float*>(p.y)[at.y] = Combine<kMul>(p, p.a[at.a], p.b[at.b], 0);
}

struct FloatBinaryParams {
  const float *a = nullptr, *b = nullptr;
  float* y = nullptr;
  BroadcastParams nest;
  FloatBinaryKind kind = FloatBinaryKind::kAdd;
};

__device__ __forceinline__ float Apply(FloatBinaryKind kind, float a, float b) {
  switch (kind) {
    case FloatBinaryKind::kAdd:
      return __fadd_rn(a, b);
    case FloatBinaryKind::kSub:
      return __fsub_rn(a, b);
    case FloatBinaryKind::kMul:
      return __fmul_rn(a, b);
    default:
      return __fdiv_rn(a, b);
  }
}

// Four at a time where addresses allow it.
template <bool kFours>
__device__ __forceinline__ float4 LoadOperand(const float* x, bool stands) {
  if constexpr (kFours) {
    if (!stands) return *reinterpret_cast<const float4*>(x);
  }
  return make_float4(*x, *x, *x, *x);
}

template <bool kFours>
__global__ void __launch_bounds__(kThreads) BinaryFloats(const __grid_constant__ FloatBinaryParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const unsigned vector = blockIdx.x * kThreads + threadIdx.x;
  if (vector >= p.nest.vectors) return;
  const Place at = Locate(p.nest, vector, kFours ? 4 : 1);
  const float4 a = LoadOperand<kFours>(p.a + at.a, p.nest.a_stands);
  const float4 b = LoadOperand<kFours>(p.b + at.b, p.nest.b_stands);
  if constexpr (kFours) {
    *reinterpret_cast<float4*>(p.y + at.y) = make_float4(Apply(p.kind, a.x, b.x), Apply(p.kind, a.y, b.y),
                                                         Apply(p.kind, a.z, b.z), Apply(p.kind, a.w, b.w));
  } else {
    p.y[at.y] = Apply(p.kind, a.x, b.x);
  }
}

using Levels = std::vector<BroadcastLevel>;

Levels LevelsOf(Shapes fed, const TensorShape& y) {
  Levels levels = BroadcastLevels(fed[0].dims, fed[1].dims, y.dims);
  Require(levels.size() <= kMaxLevels, "shapes that broadcast in ", levels.size(),
          " alternating groups of dims, expected at most ", kMaxLevels);
  return levels;
}

BroadcastParams NestOf(const Levels& levels, int per_vector) {
  BroadcastParams p;
  const BroadcastLevel& inner = levels.front();
  const int64_t inner_vectors = (inner.size + per_vector - 1) / per_vector;
  p.inner_size = static_cast<unsigned>(inner.size);
  p.inner_vectors = MakeDivisor(inner_vectors);
  p.a_stands = inner.a_stride == 0;
  p.b_stands = inner.b_stride == 0;
  int64_t vectors = inner_vectors;
  for (size_t i = 1; i < levels.size(); ++i) {
    const auto level = static_cast<size_t>(p.outer_levels++);
    p.size[level] = MakeDivisor(levels[i].size);
    p.a_step[level] = static_cast<unsigned>(levels[i].a_stride);
    p.b_step[level] = static_cast<unsigned>(levels[i].b_stride);
    vectors *= levels[i].size;
  }
  p.vectors = static_cast<unsigned>(vectors);
  return p;
}

// Elements of `size` bytes that a thread can take at a time: rows must begin where vectors do, but a single
// row may end inside one.
int UnitOf(const Levels& levels, int size, const void* a, const void* b, const void* y) {
  const BroadcastLevel& inner = levels.front();
  int unit = CommonUnit({y});
  if (inner.a_stride != 0) unit = std::min(unit, CommonUnit({a}));
  if (inner.b_stride != 0) unit = std::min(unit, CommonUnit({b}));
  if (levels.size() > 1 || size > 1) unit = std::min(unit, CommonUnit(inner.size * size));
  return unit;
}

template <bool kMul, bool kFast>
cudaError_t LaunchCodes(BinaryParams& p, const Levels& levels, Queue& queue) {
  cudaError_t error = cudaSuccess;
  const int64_t count = NestOf(levels, 1).vectors;
  WithInt<16, 4, 1>(SpreadUnit(UnitOf(levels, 1, p.a, p.b, p.y), count), [&](auto bytes) {
    constexpr int kBytes = decltype(bytes)::value;
    p.nest = NestOf(levels, kBytes);
    error =
        queue.Launch(BinaryCodes<kBytes, kMul, kFast>, GridFor(p.nest.vectors, kThreads), dim3(kThreads), p);
  });
  return error;
}

cudaError_t LaunchBinary(const BinarySpec& spec, bool fast, BinaryParams& p, const Levels& levels,
                         Queue& queue) {
  return WithBool(spec.kind == BinaryKind::kMul, [&](auto mul) {
    constexpr bool kMul = decltype(mul)::value;
    if (!spec.quantizer.quantized) {
      p.nest = NestOf(levels, 1);
      return queue.Launch(BinaryToFloat<kMul>, GridFor(p.nest.vectors, kThreads), dim3(kThreads), p);
    }
    return fast ? LaunchCodes<kMul, true>(p, levels, queue) : LaunchCodes<kMul, false>(p, levels, queue);
  });
}

BinaryParams ParamsOf(const BinarySpec& spec) {
  BinaryParams p;
  p.a_reader = MakeReader(spec.a_signed, spec.a_zero_point);
  p.b_reader = MakeReader(spec.b_signed, spec.b_zero_point);
  p.a_scale = spec.a_scale;
  p.b_scale = spec.b_scale;
  p.divider = MakeDivider(spec.quantizer.scale);
  p.rounder = MakeRounder(spec.quantizer);
  return p;
}

bool FastDivisionIsExact(const BinarySpec& spec) {
  const double a = 256.0 * static_cast<double>(spec.a_scale), b = 256.0 * static_cast<double>(spec.b_scale);
  return cuda::FastDivisionIsExact(spec.quantizer.scale, spec.kind == BinaryKind::kAdd ? a + b : a * b);
}

}  // namespace

std::unique_ptr<PackedNode> PackBinary(const BinaryNode& node) {
  return MakeNode([spec = node.spec](Shapes fed, const TensorShape& y) {
    const Levels levels = LevelsOf(fed, y);
    const bool empty = CountOf(y.dims) == 0, fast = FastDivisionIsExact(spec);
    return MakePlan(spec.kind == BinaryKind::kAdd ? "add" : "mul",
                    [spec, levels, empty, fast](Fed from, void* to, void*, Queue& queue) {
                      if (empty) return;
                      BinaryParams p = ParamsOf(spec);
                      p.a = static_cast<const uint8_t*>(from[0]);
                      p.b = static_cast<const uint8_t*>(from[1]);
                      p.y = to;
                      CheckLaunch(LaunchBinary(spec, fast, p, levels, queue), "add or mul");
                    });
  });
}

std::unique_ptr<PackedNode> PackFloatBinary(const FloatBinaryOp& op) {
  return MakeNode([kind = op.kind](Shapes fed, const TensorShape& y) {
    const Levels levels = LevelsOf(fed, y);
    const bool empty = CountOf(y.dims) == 0;
    return MakePlan("float_binary", [kind, levels, empty](Fed from, void* to, void*, Queue& queue) {
      if (empty) return;
      FloatBinaryParams p;
      p.a = static_cast<const float*>(from[0]);
      p.b = static_cast<const float*>(from[1]);
      p.y = static_cast<float*>(to);
      p.kind = kind;
      const bool fours = UnitOf(levels, 4, p.a, p.b, p.y) == 16;
      p.nest = NestOf(levels, fours ? 4 : 1);
      const dim3 grid = GridFor(p.nest.vectors, kThreads);
      CheckLaunch(fours ? queue.Launch(BinaryFloats<true>, grid, dim3(kThreads), p)
                        : queue.Launch(BinaryFloats<false>, grid, dim3(kThreads), p),
                  "float_binary");
    });
  });
}

}  // namespace lowbit::cuda
