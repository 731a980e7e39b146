// LowBitConcat and Concat: a row is everything from the axis on, and the rows of the inputs take turns. One
// launch serves up to kMaxParts inputs; a block belongs to one of them.
#include <algorithm>
#include <array>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_families.h"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxParts = 56;  // what the 4 KB of a kernel's parameters hold

// One input. Units are vectors of the launch's size.
struct JoinedPart {
  const uint8_t* x = nullptr;
  unsigned first_block = 0, units = 0;
  unsigned y_first = 0;  // unit of y's row
  bool copied = true;
  FastDivisor width;  // units of a row
  CodeReader reader;
  float x_scale = 1;
};

struct JoinParams {
  uint8_t* y = nullptr;
  unsigned y_row = 0;  // units
  int parts = 0;
  Divider divider;
  CodeRounder rounder;
  JoinedPart part[kMaxParts];
};
static_assert(sizeof(JoinParams) <= 4096);

template <int kBytes, bool kFast>
__device__ __forceinline__ Codes<kBytes> Requantize(const JoinParams& p, const JoinedPart& part,
                                                    Codes<kBytes> codes) {
#pragma unroll
  for (unsigned& word : codes.w) {
    unsigned code[Codes<kBytes>::kPerWord];
#pragma unroll
    for (int i = 0; i < Codes<kBytes>::kPerWord; ++i) {
      const float v = __fmul_rn(CodeValue(word ^ part.reader.flip, i, part.reader), part.x_scale);
      code[i] = RoundedCode(Divide<kFast>(v, p.divider), p.rounder);
    }
    word = PackCodes(code, p.rounder);
  }
  return codes;
}

template <int kBytes, bool kFast>
__global__ void __launch_bounds__(kThreads) Join(const __grid_constant__ JoinParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  int index = 0;  // the last part that begins at or before this block
  for (int step = 32; step > 0; step /= 2) {
    if (index + step < p.parts && p.part[index + step].first_block <= blockIdx.x) index += step;
  }
  const JoinedPart& part = p.part[index];
  const unsigned unit = (blockIdx.x - part.first_block) * kThreads + threadIdx.x;
  if (unit >= part.units) return;
  const unsigned row = Quotient(unit, part.width), column = unit - row * part.width.divisor;
  Codes<kBytes> codes = LoadCodes<kBytes>(part.x + static_cast<int64_t>(unit) * kBytes);
  if (!part.copied) codes = Requantize<kBytes, kFast>(p, part, codes);
  StoreCodes<kBytes>(p.y + (static_cast<int64_t>(row) * p.y_row + part.y_first + column) * kBytes, codes);
}

// What a plan keeps of one input.
struct PlannedPart {
  int64_t row_bytes = 0;
  bool copied = true;
  CodeReader reader;
  float x_scale = 1;
};

struct JoinPlan {
  int64_t rows = 0, y_row_bytes = 0;
  std::vector<PlannedPart> parts;
  bool fast = true;
  Divider divider;
  CodeRounder rounder;
};

int UnitOf(const JoinPlan& plan, Fed from, const void* to) {
  int unit = CommonUnit({to});
  for (size_t i = 0; i < plan.parts.size(); ++i) {
    unit = std::min({unit, CommonUnit({from[i]}), CommonUnit(plan.parts[i].row_bytes)});
  }
  return unit;
}

template <int kBytes>
cudaError_t LaunchParts(const JoinParams& p, int64_t blocks, bool fast, Queue& queue) {
  const dim3 grid(static_cast<unsigned>(blocks));
  return fast ? queue.Launch(Join<kBytes, true>, grid, dim3(kThreads), p)
              : queue.Launch(Join<kBytes, false>, grid, dim3(kThreads), p);
}

// Parts [first, first + kMaxParts) of the plan, whose rows begin at byte `offset` of y's.
void LaunchParts(const JoinPlan& plan, size_t first, int64_t& offset, Fed from, void* to, int unit,
                 Queue& queue) {
  JoinParams p;
  p.y = static_cast<uint8_t*>(to);
  p.y_row = static_cast<unsigned>(plan.y_row_bytes / unit);
  p.divider = plan.divider;
  p.rounder = plan.rounder;
  int64_t blocks = 0;
  for (size_t i = first; i < std::min(plan.parts.size(), first + kMaxParts); ++i) {
    const PlannedPart& planned = plan.parts[i];
    const int64_t width = planned.row_bytes / unit;
    if (width == 0) continue;
    JoinedPart& part = p.part[p.parts++];
    part.x = static_cast<const uint8_t*>(from[i]);
    part.first_block = static_cast<unsigned>(blocks);
    part.units = static_cast<unsigned>(plan.rows * width);
    part.y_first = static_cast<unsigned>(offset / unit);
    part.copied = planned.copied;
    part.width = MakeDivisor(width);
    part.reader = planned.reader;
    part.x_scale = planned.x_scale;
    blocks += (int64_t{part.units} + kThreads - 1) / kThreads;
    offset += planned.row_bytes;
  }
  if (p.parts == 0) return;
  cudaError_t error = cudaSuccess;
  WithInt<16, 4, 1>(
      unit, [&](auto bytes) { error = LaunchParts<decltype(bytes)::value>(p, blocks, plan.fast, queue); });
  CheckLaunch(error, "concat");
}

NodePlanPtr PlanJoin(JoinPlan plan, Shapes fed, const TensorShape& y, int64_t axis) {
  const size_t begin = AxisOf(axis, y.dims.size());
  const auto row_bytes = [&](const TensorShape& shape) {
    return CountOf(std::span(shape.dims).subspan(begin)) * static_cast<int64_t>(ElementSize(shape.type));
  };
  plan.rows = CountOf(std::span(y.dims).first(begin));
  plan.y_row_bytes = row_bytes(y);
  for (size_t i = 0; i < plan.parts.size(); ++i) plan.parts[i].row_bytes = row_bytes(fed[i]);
  std::string text = "concat_parts" + std::to_string(plan.parts.size());
  return MakePlan(std::move(text), [plan = std::move(plan)](Fed from, void* to, void*, Queue& queue) {
    if (plan.rows == 0 || plan.y_row_bytes == 0) return;
    const int unit = UnitOf(plan, from, to);
    int64_t offset = 0;
    for (size_t i = 0; i < plan.parts.size(); i += kMaxParts) {
      LaunchParts(plan, i, offset, from, to, unit, queue);
    }
  });
}

}  // namespace

std::unique_ptr<PackedNode> PackConcat(const ConcatNode& node) {
  JoinPlan plan;
  plan.divider = MakeDivider(node.quantizer.scale);
  plan.rounder = MakeRounder(node.quantizer);
  for (const ConcatNode::Part& part : node.parts) {
    const float x_scale = part.spec.x_scale.front();
    plan.parts.push_back(
        {0, part.copied, MakeReader(part.spec.x_signed, part.spec.x_zero_point.front()), x_scale});
    plan.fast = plan.fast && (part.copied || FastDivisionIsExact(node.quantizer.scale,
                                                                 256.0 * static_cast<double>(x_scale)));
  }
  return MakeNode(
      [plan, axis = node.axis](Shapes fed, const TensorShape& y) { return PlanJoin(plan, fed, y, axis); });
}

std::unique_ptr<PackedNode> PackJoin(const JoinOp& op) {
  return MakeNode([axis = op.axis](Shapes fed, const TensorShape& y) {
    JoinPlan plan;
    plan.parts.resize(fed.size());
    return PlanJoin(plan, fed, y, axis);
  });
}

}  // namespace lowbit::cuda
