// Two tensors, one out, numpy broadcasting: LowBitAdd and LowBitMul on codes, Add, Sub, Mul and Div on
// float32, the latter with a quantizer behind them.
#include <algorithm>
#include <cmath>
#include <utility>

#include "core/epilogue.h"
#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

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
  const auto [outer, inner] = Divided(vector, p.inner_vectors);
  const unsigned column = inner * static_cast<unsigned>(per_vector);
  Place out;
  out.a = p.a_stands ? 0 : column;
  out.b = p.b_stands ? 0 : column;
  out.y = outer * p.inner_size + column;
  out.valid = static_cast<int>(p.inner_size - column);
  unsigned rest = outer;
  for (int i = 0; i < p.outer_levels; ++i) {
    const auto [next, index] = Divided(rest, p.size[i]);
    out.a += index * p.a_step[i];
    out.b += index * p.b_step[i];
    rest = next;
  }
  return out;
}

struct CodeOperand {
  const uint8_t* x = nullptr;
  CodeReader reader;
  float scale = 1;

  template <int kBytes>
  __device__ __forceinline__ Codes<kBytes> Load(unsigned at, bool stands, int valid) const {
    return stands ? Splat<kBytes>(x[at] * 0x01010101u) : LoadCodes<kBytes>(x + at, valid);
  }
  template <int kBytes>
  __device__ __forceinline__ float Value(const Codes<kBytes>& codes, int i) const {
    return __fmul_rn(CodeValue(codes, i, reader), scale);
  }
};

enum class CodesOp : uint8_t { kAdd, kMul, kAddTable };

constexpr int kCodes = 256;

struct BinaryParams {
  CodeOperand a, b;
  const float* b_table = nullptr;  // of kAddTable
  void* y = nullptr;
  BroadcastParams nest;
  Divider divider;
  CodeRounder rounder;
};

template <int kBytes, CodesOp kOp, bool kFast, bool kFloat>
__global__ void __launch_bounds__(kThreads) BinaryCodes(const __grid_constant__ BinaryParams p) {
  __shared__ float table[kOp == CodesOp::kAddTable ? kCodes : 1];
  if constexpr (kOp == CodesOp::kAddTable) {
    static_assert(kThreads == kCodes);
    table[threadIdx.x] = p.b_table[threadIdx.x];
    __syncthreads();
  }
  const unsigned vector = StartThread();
  if (vector >= p.nest.vectors) return;
  const Place at = Locate(p.nest, vector, kBytes);
  const Codes<kBytes> a = p.a.Load<kBytes>(at.a, p.nest.a_stands, at.valid);
  const Codes<kBytes> b = p.b.Load<kBytes>(at.b, p.nest.b_stands, at.valid);
  const auto value = [&](int i) {
    const float va = p.a.Value(a, i);
    const float vb = kOp == CodesOp::kAddTable ? table[b[i]] : p.b.Value(b, i);
    return kOp == CodesOp::kMul ? __fmul_rn(va, vb) : __fadd_rn(va, vb);
  };
  if constexpr (kFloat) {
    static_assert(kBytes == 1);
    static_cast<float*>(p.y)[at.y] = value(0);
  } else {
    const auto divided = [&](int i) { return Divide<kFast>(value(i), p.divider); };
    StoreCodes(static_cast<uint8_t*>(p.y) + at.y, RoundCodes<kBytes>(p.rounder, divided), at.valid);
  }
}

// What becomes of the results of BinaryFloats.
enum class FloatsTo : uint8_t { kFloats, kCodes, kCodesFast };

struct FloatBinaryParams {
  const float *a = nullptr, *b = nullptr;
  void* y = nullptr;
  BroadcastParams nest;
  FloatBinaryKind kind = FloatBinaryKind::kAdd;
  QuantizerGrid grid;  // but for kFloats
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

template <int kCount>
__device__ __forceinline__ void LoadOperand(const float* x, bool stands, float (&v)[kCount]) {
  if (!stands) return LoadFloats(x, v);
#pragma unroll
  for (float& value : v) value = *x;
}

// kCount 4 or 1 values a thread.
template <int kCount, FloatsTo kTo>
__global__ void __launch_bounds__(kThreads) BinaryFloats(const __grid_constant__ FloatBinaryParams p) {
  const unsigned vector = StartThread();
  if (vector >= p.nest.vectors) return;
  const Place at = Locate(p.nest, vector, kCount);
  float a[kCount], b[kCount];
  LoadOperand(p.a + at.a, p.nest.a_stands, a);
  LoadOperand(p.b + at.b, p.nest.b_stands, b);
#pragma unroll
  for (int i = 0; i < kCount; ++i) a[i] = Apply(p.kind, a[i], b[i]);
  if constexpr (kTo == FloatsTo::kFloats) {
    StoreFloats(static_cast<float*>(p.y) + at.y, a);
  } else {
    const auto code = [&](int i) { return QuantizedCode<kTo == FloatsTo::kCodesFast>(a[i], p.grid); };
    StoreCodes(static_cast<uint8_t*>(p.y) + at.y, MakeCodes<kCount>(code));
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
  int64_t vectors = (inner.size + per_vector - 1) / per_vector;
  p.inner_size = static_cast<unsigned>(inner.size);
  p.inner_vectors = MakeDivisor(vectors);
  p.a_stands = inner.a_stride == 0;
  p.b_stands = inner.b_stride == 0;
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

// Codes that a thread can take at a time: rows must begin where vectors do, but a single row may end inside one.
int UnitOf(const Levels& levels, const Run& run) {
  const BroadcastLevel& inner = levels.front();
  int unit = CommonUnit({run.y});
  if (inner.a_stride != 0) unit = std::min(unit, CommonUnit({run.fed[0]}));
  if (inner.b_stride != 0) unit = std::min(unit, CommonUnit({run.fed[1]}));
  if (levels.size() > 1) unit = std::min(unit, CommonUnit(inner.size));
  return unit;
}

void LaunchCodes(const Run& run, BinaryParams p, const Levels& levels, CodesOp op, bool fast, bool to_float) {
  p.a.x = static_cast<const uint8_t*>(run.fed[0]);
  p.b.x = static_cast<const uint8_t*>(run.fed[1]);
  p.y = run.y;
  const int unit = to_float ? 1 : SpreadUnit(UnitOf(levels, run), NestOf(levels, 1).vectors);
  p.nest = NestOf(levels, unit);
  std::visit(
      [&](auto bytes, auto op_, auto fast_, auto float_) {
        // Floats are not divided, and stored one at a time.
        constexpr int kBytes = float_ ? 1 : bytes;
        constexpr bool kFast = fast_ || float_;
        run.LaunchFor(p.nest.vectors, BinaryCodes<kBytes, op_, kFast, float_>, kThreads, p);
      },
      OneOf<16, 4, 1>(unit), OneOf<CodesOp::kAdd, CodesOp::kMul, CodesOp::kAddTable>(op), OneOf(fast),
      OneOf(to_float));
}

void LaunchFloats(const Run& run, FloatBinaryParams p, const Levels& levels, FloatsTo to) {
  p.a = static_cast<const float*>(run.fed[0]);
  p.b = static_cast<const float*>(run.fed[1]);
  p.y = run.y;
  // Four floats, or their four codes, lie at multiples of 16 or 4 bytes.
  const BroadcastLevel& inner = levels.front();
  const bool fours = CommonUnit(inner.size) >= 4 &&
                     CommonUnit({run.y}) >= (to == FloatsTo::kFloats ? 16 : 4) &&
                     (inner.a_stride == 0 || CommonUnit({run.fed[0]}) == 16) &&
                     (inner.b_stride == 0 || CommonUnit({run.fed[1]}) == 16);
  p.nest = NestOf(levels, fours ? 4 : 1);
  std::visit(
      [&](auto count, auto to_) { run.LaunchFor(p.nest.vectors, BinaryFloats<count, to_>, kThreads, p); },
      OneOf<4, 1>(fours ? 4 : 1), OneOf<FloatsTo::kFloats, FloatsTo::kCodes, FloatsTo::kCodesFast>(to));
}

PackedNodePtr MakeFloatBinary(const char* name, const FloatBinaryParams& shared, FloatsTo to) {
  return MakeNode([=](Shapes fed, const TensorShape& y) {
    const Levels levels = LevelsOf(fed, y);
    const bool empty = CountOf(y.dims) == 0;
    return MakePlan(name, [=](const Run& run) {
      if (!empty) LaunchFloats(run, shared, levels, to);
    });
  });
}

// The addition of a tensor and the numbers of what a table has for the codes of another one, which is the
// second operand of what is left; nothing where the table is of each channel, or numbers stand for codes
// already.
std::optional<BinaryNode> WithTable(const LookupNode& lookup, const BinaryNode& add, bool mapped_first) {
  BinaryNode out = add;
  BinarySpec& spec = out.spec;
  if (mapped_first) {  // sums are the same the other way round
    std::swap(spec.a_signed, spec.b_signed);
    std::swap(spec.a_scale, spec.b_scale);
    std::swap(spec.a_zero_point, spec.b_zero_point);
  }
  if (spec.kind != BinaryKind::kAdd || !spec.b_table.empty() || lookup.channels != 1 ||
      spec.b_signed != lookup.y_signed) {
    return std::nullopt;
  }
  for (const uint8_t byte : lookup.table) {
    const int32_t code = lookup.y_signed ? static_cast<int8_t>(byte) : byte;
    spec.b_table.push_back(DequantizeCode(code, spec.b_scale, spec.b_zero_point));
    if (!std::isfinite(spec.b_table.back())) return std::nullopt;
  }
  spec.b_signed = lookup.x_signed;
  return out;
}

// Fed in the other order.
class PackedMapped final : public PackedNode {
 public:
  PackedMapped(const BinaryNode& add, const Device& device) : add_(PackNode(add, device)) {}

  NodePlanPtr Plan(Shapes fed, const TensorShape& y) const override {
    Require(fed.size() == 2, "a table and an addition were fed ", fed.size(), " tensors, expected 2");
    const TensorShape of_add[] = {fed[1], fed[0]};
    return MakePlan("add_table", [plan = add_->Plan(of_add, y)](const Run& run) {
      const void* const tensors[] = {run.fed[1], run.fed[0]};
      plan->Launch(tensors, run.y, run.workspace, run.queue);
    });
  }

 private:
  PackedNodePtr add_;
};

}  // namespace

bool FusesMapped(const LookupNode& lookup, const BinaryNode& add, bool mapped_first) {
  return WithTable(lookup, add, mapped_first).has_value();
}

PackedNodePtr PackMapped(const LookupNode& lookup, const BinaryNode& add, bool mapped_first,
                         const Device& device) {
  const std::optional<BinaryNode> node = WithTable(lookup, add, mapped_first);
  Require(node.has_value(), "a table and an addition that do not fit each other");
  return std::make_unique<PackedMapped>(*node, device);
}

PackedNodePtr Pack(const BinaryNode& node, const Device& device) {
  const BinarySpec& spec = node.spec;
  BinaryParams shared;
  shared.a = {nullptr, MakeReader(spec.a_signed, spec.a_zero_point), spec.a_scale};
  shared.b = {nullptr, MakeReader(spec.b_signed, spec.b_zero_point), spec.b_scale};
  shared.divider = MakeDivider(spec.quantizer.scale);
  shared.rounder = MakeRounder(spec.quantizer);
  NodeConstants constants;
  constants.Add(spec.b_table, shared.b_table);
  const auto memory = constants.Upload(device);
  const bool to_float = !spec.quantizer.quantized, fast = FastIsExact(spec.quantizer, MostOf(spec), 1.0);
  const CodesOp op = !spec.b_table.empty()           ? CodesOp::kAddTable
                     : spec.kind == BinaryKind::kMul ? CodesOp::kMul
                                                     : CodesOp::kAdd;
  const char* const name = op == CodesOp::kMul ? "mul" : op == CodesOp::kAdd ? "add" : "add_table";
  const auto plan = [=](Shapes fed, const TensorShape& y) {
    const Levels levels = LevelsOf(fed, y);
    const bool empty = CountOf(y.dims) == 0;
    return MakePlan(name, [=](const Run& run) {
      if (!empty) LaunchCodes(run, shared, levels, op, fast, to_float);
    });
  };
  return MakeNode(plan, memory);
}

PackedNodePtr Pack(const FloatBinaryOp& op, const Device&) {
  FloatBinaryParams shared;
  shared.kind = op.kind;
  return MakeFloatBinary("float_binary", shared, FloatsTo::kFloats);
}

PackedNodePtr PackQuantized(const FloatBinaryOp& op, const QuantizeNode& quantize) {
  Require(FusesQuantize(quantize),
          "float numbers are quantized where they are made for one grid, as they lie");
  FloatBinaryParams shared;
  shared.kind = op.kind;
  const Quantizer& grid = quantize.grids.front();
  shared.grid = MakeGrid(grid);
  return MakeFloatBinary("float_binary_quantize", shared,
                         QuantizesFast(grid) ? FloatsTo::kCodesFast : FloatsTo::kCodes);
}

}  // namespace lowbit::cuda
