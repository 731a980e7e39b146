// All of them are one gather: y in order, x at an offset to which each dim of y adds. Dims through which both
// move alike are merged first. What remains are rows that are copied, planes that are transposed, or single
// codes.
#include "ep/cpu/move.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "core/cpu/operators/elementwise_common.h"
#include "core/status.h"

namespace lowbit::ep {
namespace {

// A dim of y, and the bytes from one index to the next in x.
struct MovedDim {
  int64_t size = 1, stride = 0;
};

struct Move {
  std::vector<MovedDim> dims;  // outermost first
  int64_t base = 0;            // of the first code in x
};

std::vector<int64_t> StridesOf(std::span<const int64_t> dims) {
  std::vector<int64_t> strides(dims.size(), 1);
  for (size_t i = dims.size(); i-- > 1;) strides[i - 1] = strides[i] * dims[i];
  return strides;
}

Move Take(const std::vector<SliceRange>& ranges, std::span<const int64_t> x) {
  const std::vector<int64_t> strides = StridesOf(x);
  Move move;
  for (size_t i = 0; i < x.size(); ++i) {
    move.dims.push_back({ranges[i].count, strides[i] * ranges[i].step});
    move.base += ranges[i].begin * strides[i];
  }
  return move;
}

Move MoveOf(const SliceOp& op, std::span<const int64_t> x) { return Take(RangesOf(op, x), x); }
Move MoveOf(const SplitOp& op, std::span<const int64_t> x) { return Take(RangesOf(op, x), x); }
Move MoveOf(const TransposeOp& op, std::span<const int64_t> x) {
  const std::vector<int64_t> strides = StridesOf(x);
  Move move;
  for (const size_t from : PermOf(op, x.size())) move.dims.push_back({x[from], strides[from]});
  return move;
}
template <typename Op>
Move MoveOf(const Op&, std::span<const int64_t>) {
  Fail("it moves no codes");
}

std::vector<MovedDim> Merged(const std::vector<MovedDim>& dims) {
  std::vector<MovedDim> out;
  for (const MovedDim& d : dims) {
    if (d.size == 1) continue;
    if (!out.empty() && out.back().stride == d.stride * d.size) {
      out.back() = {out.back().size * d.size, d.stride};
    } else {
      out.push_back(d);
    }
  }
  if (out.empty()) out.push_back({1, 1});
  return out;
}

// Where index `at` of some dims, as if they were one, lies in x.
int64_t OffsetOf(std::span<const MovedDim> dims, int64_t at) {
  int64_t offset = 0;
  for (size_t i = dims.size(); i-- > 0; at /= dims[i].size) offset += at % dims[i].size * dims[i].stride;
  return offset;
}

int64_t CountOf(std::span<const MovedDim> dims) {
  int64_t count = 1;
  for (const MovedDim& d : dims) count *= d.size;
  return count;
}

// Rows are often a few dozen codes long, for which a call of memcpy takes longer than the copy.
void CopyRow(const uint8_t* x, uint8_t* y, int64_t count) {
  constexpr int64_t kUnit = 16;
  int64_t i = 0;
  for (; i + kUnit <= count; i += kUnit) std::memcpy(y + i, x + i, kUnit);
  for (; i < count; ++i) y[i] = x[i];
}

constexpr int64_t kSide = 8;  // of the squares that are transposed in registers

// y[8][8] = x[8][8] transposed; rows lie `x_row` and `y_row` bytes apart. Each round exchanges the squares of
// half the side that lie off the diagonal, in all words at once.
void TransposeSquare(const uint8_t* x, int64_t x_row, uint8_t* y, int64_t y_row) {
  std::array<uint64_t, kSide> rows;
  for (size_t i = 0; i < rows.size(); ++i) std::memcpy(&rows[i], x + static_cast<int64_t>(i) * x_row, kSide);
  const auto exchange = [&](size_t distance, uint64_t low) {
    const int bits = static_cast<int>(8 * distance);
    for (size_t i = 0; i < rows.size(); ++i) {
      if ((i & distance) != 0) continue;
      const uint64_t moved = ((rows[i] >> bits) ^ rows[i + distance]) & low;
      rows[i + distance] ^= moved;
      rows[i] ^= moved << bits;
    }
  };
  exchange(4, 0x00000000FFFFFFFFu);
  exchange(2, 0x0000FFFF0000FFFFu);
  exchange(1, 0x00FF00FF00FF00FFu);
  for (size_t i = 0; i < rows.size(); ++i) std::memcpy(y + static_cast<int64_t>(i) * y_row, &rows[i], kSide);
}

// y[j * y_row + i] = x[i * x_row + j] for `rows` j and `columns` i.
void TransposePlane(const uint8_t* x, int64_t x_row, uint8_t* y, int64_t y_row, int64_t rows,
                    int64_t columns) {
  for (int64_t j = 0; j < rows; j += kSide) {
    for (int64_t i = 0; i < columns; i += kSide) {
      if (j + kSide <= rows && i + kSide <= columns) {
        TransposeSquare(x + i * x_row + j, x_row, y + j * y_row + i, y_row);
        continue;
      }
      for (int64_t a = j; a < std::min(j + kSide, rows); ++a) {
        for (int64_t b = i; b < std::min(i + kSide, columns); ++b) y[a * y_row + b] = x[b * x_row + a];
      }
    }
  }
}

class MoveOperator final : public Operator {
 public:
  MoveOperator(StandardNode node, ElementType type) : node_(std::move(node)), type_(type) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    const FedShape x = Fed(inputs, 0, "x");
    const TensorShape shape{x.type, {x.dims.begin(), x.dims.end()}};
    CheckFed(x, type_, "x");
    return OutputOf(node_, std::span(&shape, 1)).dims;
  }
  ElementType OutputType() const override { return type_; }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    if (BoundedCount(OutputShape(inputs)) == 0) return;
    const Move move = std::visit([&](const auto& op) { return MoveOf(op, inputs[0]->shape); }, node_);
    const std::vector<MovedDim> dims = Merged(move.dims);
    const uint8_t* x = FedBytes(inputs, 0) + move.base;
    auto* out = static_cast<uint8_t*>(y);
    const MovedDim inner = dims.back();
    const std::span<const MovedDim> outer(dims.data(), dims.size() - 1);
    if (inner.stride != 1) {
      const auto row =
          std::find_if(outer.begin(), outer.end(), [](const MovedDim& d) { return d.stride == 1; });
      if (row != outer.end()) return RunPlanes(dims, static_cast<size_t>(row - outer.begin()), x, out, pool);
    }
    ParallelRanges(pool, CountOf(outer), kRowCost + 2 * inner.size, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) {
        const uint8_t* from = x + OffsetOf(outer, at);
        uint8_t* to = out + at * inner.size;
        if (inner.stride == 1) {
          CopyRow(from, to, inner.size);
        } else {
          for (int64_t i = 0; i < inner.size; ++i) to[i] = from[i * inner.stride];
        }
      }
    });
  }
  OperatorPlan Plan(FedTensors) const override {
    OperatorPlan plan;
    plan.kernel = "move";
    return plan;
  }

 private:
  static constexpr int64_t kRowCost = 64;  // of finding a row, in bytes moved

  // Dim `row` is innermost in x, the last one in y.
  static void RunPlanes(const std::vector<MovedDim>& dims, size_t row, const uint8_t* x, uint8_t* y,
                        ThreadPool& pool) {
    const int64_t rows = dims[row].size, columns = dims.back().size;
    const std::span<const MovedDim> before(dims.data(), row),
        between(dims.data() + row + 1, dims.size() - row - 2);
    const int64_t inside = CountOf(between), y_row = inside * columns;
    // Strips of 8 rows, so that few large planes are shared out, too.
    const int64_t strips = (rows + kSide - 1) / kSide;
    ParallelRanges(
        pool, CountOf(before) * inside * strips, 2 * kSide * columns, [&](int64_t begin, int64_t end) {
          for (int64_t at = begin; at < end; ++at) {
            const int64_t first = at % strips * kSide, plane = at / strips;
            const int64_t upper = plane / inside, lower = plane % inside;
            TransposePlane(x + OffsetOf(before, upper) + OffsetOf(between, lower) + first, dims.back().stride,
                           y + upper * rows * y_row + first * y_row + lower * columns, y_row,
                           std::min(kSide, rows - first), columns);
          }
        });
  }

  StandardNode node_;
  ElementType type_;
};

}  // namespace

std::unique_ptr<Operator> CreateMove(StandardNode node, ElementType type) {
  Require(std::holds_alternative<SplitOp>(node) || std::holds_alternative<SliceOp>(node) ||
              std::holds_alternative<TransposeOp>(node),
          "it moves no codes");
  Require(ElementSize(type) == 1, "it moves no codes; ONNX Runtime runs it better on a CPU");
  return std::make_unique<MoveOperator>(std::move(node), type);
}

}  // namespace lowbit::ep
