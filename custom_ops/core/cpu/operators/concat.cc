// LowBitConcat.
#include <algorithm>
#include <array>
#include <utility>

#include "core/cpu/operators/elementwise_common.h"
#include "core/cpu/operators/factories.h"

namespace lowbit {
namespace {

class ConcatOperator final : public Operator {
 public:
  ConcatOperator(ConcatNode node, const OperatorOptions& options) : node_(std::move(node)) {
    bool fast_is_exact = true;
    for (ConcatNode::Part& part : node_.parts) {
      PrepareAffine(part.spec);
      fast_is_exact = fast_is_exact && (part.copied || part.spec.fast_is_exact);
    }
    kernels_ = &SelectElementwise(options, fast_is_exact);
    if (kernels_ == &ElementwiseReference()) return;
    for (ConcatNode::Part& part : node_.parts) {
      if (!part.copied) FitLine(part.spec, *kernels_);
    }
  }

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    std::vector<FedShape> shapes;
    for (size_t i = kFirst; i < inputs.size(); ++i) shapes.push_back(Fed(inputs, i, "x"));
    return OutputDims(node_, shapes);
  }
  ElementType OutputType() const override { return OutputTypeOf(node_); }

  // Joining along an axis interleaves rows: a row is everything from the axis on.
  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    const size_t axis = node_.Axis(shape.size());
    const auto row_of = [&](const std::vector<int64_t>& s) {
      return BoundedCount(std::span(s).subspan(axis));
    };
    const int64_t rows = BoundedCount(std::span(shape).first(axis)), y_row = row_of(shape);
    const auto range = [&](int64_t begin, int64_t end) {
      uint8_t* out = static_cast<uint8_t*>(y) + begin * y_row;
      for (size_t i = 0; i < node_.parts.size(); ++i) {
        const int64_t width = row_of(inputs[kFirst + i]->shape);
        const uint8_t* x = FedBytes(inputs, kFirst + i) + begin * width;
        if (node_.parts[i].copied) {
          kernels_->copy_rows(x, out, end - begin, width, y_row);
        } else if (width < kNarrow && width < y_row) {
          MapNarrow(node_.parts[i].spec, x, out, end - begin, width, y_row);
        } else {
          kernels_->affine(node_.parts[i].spec, x, out, end - begin, width, y_row);
        }
        out += width;
      }
    };
    if (y_row > 0) ParallelRanges(pool, rows, 2 * y_row, range);
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("concat", *kernels_); }

 private:
  static constexpr size_t kFirst = 4;  // place of the first tensor in the schema

  // Short rows are mapped side by side, as one row, and then copied to their places: the end of a row, which
  // is no whole vector, takes longer than the copy. Measured on a 512-bit x86 core with two parts of 4096
  // rows: at 12 bytes and below the map alone took most of the node's time, at 70 bytes 273 us became 102,
  // at 250 bytes 423 became 198; rows of whole vectors gain nothing and lose at most a tenth.
  static constexpr int64_t kNarrow = 256;
  void MapNarrow(const AffineSpec& spec, const uint8_t* x, uint8_t* y, int64_t rows, int64_t width,
                 int64_t y_stride) const {
    std::array<uint8_t, 4096> mapped;
    const int64_t block = static_cast<int64_t>(mapped.size()) / std::max<int64_t>(width, 1);
    for (int64_t row = 0; row < rows; row += block) {
      const int64_t n = std::min(block, rows - row);
      kernels_->affine(spec, x + row * width, mapped.data(), 1, n * width, n * width);
      kernels_->copy_rows(mapped.data(), y + row * y_stride, n, width, y_stride);
    }
  }

  ConcatNode node_;
  const ElementwiseKernels* kernels_;
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(ConcatNode node, const OperatorOptions& options) {
  return std::make_unique<ConcatOperator>(std::move(node), options);
}

}  // namespace lowbit
