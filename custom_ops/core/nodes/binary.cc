// LowBitAdd and LowBitMul with numpy broadcasting.
#include <algorithm>
#include <cmath>

#include "core/nodes/node_kinds.h"
#include "core/status.h"

namespace lowbit {
namespace {

BinaryNode Decode(BinaryKind kind, const NodeReader& node) {
  BinarySpec spec;
  spec.kind = kind;
  const OperandType a = ReadCodes(node, "a_encoding"), b = ReadCodes(node, "b_encoding");
  spec.a_signed = a.encoding == Encoding::kSigned;
  spec.b_signed = b.encoding == Encoding::kSigned;
  spec.a_scale = node.ScaleOf("a_scale");
  spec.b_scale = node.ScaleOf("b_scale");
  spec.a_zero_point = node.ZeroPointOf("a_zero_point", a);
  spec.b_zero_point = node.ZeroPointOf("b_zero_point", b);
  if (kind == BinaryKind::kAdd && node.Present("b_table")) {
    spec.b_table = node.FloatsOf("b_table", 256);
    Require(std::all_of(spec.b_table.begin(), spec.b_table.end(), [](float v) { return std::isfinite(v); }),
            node.op(), ": input 'b_table' holds a number that is not finite, expected real numbers");
  }
  spec.quantizer = ReadQuantizer(node);

  const double max_abs = MostOf(spec);
  spec.fast_is_exact = FastIsExact(spec.quantizer, max_abs, static_cast<double>(spec.a_scale)) &&
                       FastIsExact(spec.quantizer, max_abs, static_cast<double>(spec.b_scale));
  return {spec};
}

}  // namespace

BinaryNode DecodeAdd(const NodeReader& node) { return Decode(BinaryKind::kAdd, node); }
BinaryNode DecodeMul(const NodeReader& node) { return Decode(BinaryKind::kMul, node); }

std::vector<int64_t> BroadcastDims(std::span<const int64_t> a, std::span<const int64_t> b) {
  std::vector<int64_t> y(std::max(a.size(), b.size()));
  for (size_t i = 1; i <= y.size(); ++i) {
    const int64_t da = i <= a.size() ? a[a.size() - i] : 1, db = i <= b.size() ? b[b.size() - i] : 1;
    Require(da == db || da == 1 || db == 1, "shapes ", ShapeText(a), " and ", ShapeText(b),
            " do not broadcast");
    y[y.size() - i] = da == 1 ? db : da;
  }
  BoundedCount(y);
  return y;
}

std::vector<BroadcastLevel> BroadcastLevels(std::span<const int64_t> a, std::span<const int64_t> b,
                                            std::span<const int64_t> y) {
  std::vector<BroadcastLevel> levels;
  int64_t a_step = 1, b_step = 1;
  for (size_t i = 1; i <= y.size(); ++i) {
    const int64_t size = y[y.size() - i];
    if (size == 1) continue;
    const bool a_moves = i <= a.size() && a[a.size() - i] != 1;
    const bool b_moves = i <= b.size() && b[b.size() - i] != 1;
    const BroadcastLevel level{size, a_moves ? a_step : 0, b_moves ? b_step : 0};
    if (a_moves) a_step *= size;
    if (b_moves) b_step *= size;
    if (!levels.empty() && (levels.back().a_stride != 0) == a_moves &&
        (levels.back().b_stride != 0) == b_moves) {
      levels.back().size *= size;  // an operand that moves in both is contiguous across them
    } else {
      levels.push_back(level);
    }
  }
  if (levels.empty()) levels.push_back({1, 1, 1});
  return levels;
}

std::vector<int64_t> OutputDims(const BinaryNode& node, const FedShape& a, const FedShape& b) {
  CheckFed(a, CodeType(node.spec.a_signed), "a");
  CheckFed(b, CodeType(node.spec.b_signed), "b");
  return BroadcastDims(a.dims, b.dims);
}

}  // namespace lowbit
