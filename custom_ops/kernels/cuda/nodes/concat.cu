// LowBitConcat and Concat: a row is everything from the axis on, and the rows of the inputs take turns. One
// launch serves up to kMaxParts inputs; a block belongs to one of them.
#include <algorithm>

#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

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
  const auto [row, column] = Divided(unit, part.width);
  Codes<kBytes> codes = LoadCodes<kBytes>(part.x + static_cast<int64_t>(unit) * kBytes);
  if (!part.copied) {
    codes = RoundCodes<kBytes>(p.rounder, [&](int i) {
      return Divide<kFast>(__fmul_rn(CodeValue(codes, i, part.reader), part.x_scale), p.divider);
    });
  }
  StoreCodes(p.y + (static_cast<int64_t>(row) * p.y_row + part.y_first + column) * kBytes, codes);
}

struct JoinPlan {
  JoinParams shared;  // without parts
  bool fast = true;
  int64_t rows = 0, y_row_bytes = 0;
  std::vector<JoinedPart> parts;
  std::vector<int64_t> row_bytes;  // of each
};

// Parts [first, first + kMaxParts) of the plan, whose rows begin at byte `offset` of y's.
void LaunchParts(const Run& run, const JoinPlan& plan, size_t first, int64_t& offset, int unit) {
  JoinParams p = plan.shared;
  p.y = static_cast<uint8_t*>(run.y);
  p.y_row = static_cast<unsigned>(plan.y_row_bytes / unit);
  unsigned blocks = 0;
  for (size_t i = first; i < std::min(plan.parts.size(), first + kMaxParts); ++i) {
    const int64_t width = plan.row_bytes[i] / unit;
    if (width == 0) continue;
    JoinedPart& part = p.part[p.parts++] = plan.parts[i];
    part.x = static_cast<const uint8_t*>(run.fed[i]);
    part.first_block = blocks;
    part.units = static_cast<unsigned>(plan.rows * width);
    part.y_first = static_cast<unsigned>(offset / unit);
    part.width = MakeDivisor(width);
    blocks += BlocksFor(part.units, kThreads);
    offset += plan.row_bytes[i];
  }
  if (p.parts == 0) return;
  std::visit([&](auto bytes, auto fast) { run.Launch(Join<bytes, fast>, dim3(blocks), kThreads, p); },
             OneOf<16, 4, 1>(unit), OneOf(plan.fast));
}

NodePlanPtr PlanJoin(JoinPlan plan, Shapes fed, const TensorShape& y, int64_t axis) {
  const size_t begin = AxisOf(axis, y.dims.size());
  const auto row_bytes = [&](const TensorShape& shape) {
    return CountOf(std::span(shape.dims).subspan(begin)) * static_cast<int64_t>(ElementSize(shape.type));
  };
  plan.rows = CountOf(std::span(y.dims).first(begin));
  plan.y_row_bytes = row_bytes(y);
  for (const TensorShape& shape : fed) plan.row_bytes.push_back(row_bytes(shape));
  return MakePlan("concat_parts" + std::to_string(fed.size()), [plan](const Run& run) {
    if (plan.rows == 0 || plan.y_row_bytes == 0) return;
    int unit = CommonUnit({run.y});
    for (size_t i = 0; i < plan.parts.size(); ++i) {
      unit = std::min({unit, CommonUnit({run.fed[i]}), CommonUnit(plan.row_bytes[i])});
    }
    int64_t offset = 0;
    for (size_t i = 0; i < plan.parts.size(); i += kMaxParts) LaunchParts(run, plan, i, offset, unit);
  });
}

class PackedConcat final : public PackedNode {
 public:
  PackedConcat(const ConcatNode& node, JoinPlan plan) : node_(node), plan_(std::move(plan)) {}

  NodePlanPtr Plan(Shapes fed, const TensorShape& y) const override {
    return PlanJoin(plan_, fed, y, node_.axis);
  }
  const ConcatNode* Concat() const override { return &node_; }

 private:
  ConcatNode node_;
  JoinPlan plan_;
};

}  // namespace

PackedNodePtr Pack(const ConcatNode& node, const Device&) {
  JoinPlan plan;
  plan.shared.divider = MakeDivider(node.quantizer.scale);
  plan.shared.rounder = MakeRounder(node.quantizer);
  for (const auto& [copied, spec] : node.parts) {
    JoinedPart& part = plan.parts.emplace_back();
    part.copied = copied;
    part.reader = MakeReader(spec.x_signed, spec.x_zero_point.front());
    part.x_scale = spec.x_scale.front();
    const double max_abs = 256.0 * static_cast<double>(part.x_scale);
    plan.fast = plan.fast && (copied || FastIsExact(node.quantizer, max_abs, 1.0));
  }
  return std::make_unique<PackedConcat>(node, std::move(plan));
}

PackedNodePtr Pack(const JoinOp& op, const Device&) {
  return MakeNode([axis = op.axis](Shapes fed, const TensorShape& y) {
    JoinPlan plan;
    plan.parts.resize(fed.size());
    return PlanJoin(plan, fed, y, axis);
  });
}

}  // namespace lowbit::cuda
