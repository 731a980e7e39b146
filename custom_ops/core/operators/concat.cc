// LowBitConcat.
#include <utility>

#include "core/operators/elementwise_common.h"
#include "core/operators/factories.h"

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

  ConcatNode node_;
  const ElementwiseKernels* kernels_;
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(ConcatNode node, const OperatorOptions& options) {
  return std::make_unique<ConcatOperator>(std::move(node), options);
}

}  // namespace lowbit
