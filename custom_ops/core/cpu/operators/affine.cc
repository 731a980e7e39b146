// LowBitAffine and LowBitRequantize: one number in, one number out, per channel.
#include <utility>

#include "core/cpu/operators/elementwise_common.h"
#include "core/cpu/operators/factories.h"

namespace lowbit {
namespace {

class AffineOperator final : public Operator {
 public:
  AffineOperator(AffineNode node, const OperatorOptions& options) : node_(std::move(node)) {
    PrepareAffine(node_.spec);
    kernels_ = &SelectElementwise(options, node_.spec.fast_is_exact);
    if (kernels_ != &ElementwiseReference()) FitLine(node_.spec, *kernels_);
  }

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return OutputDims(node_, Fed(inputs, 0, "x"));
  }
  ElementType OutputType() const override { return OutputTypeOf(node_); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    const uint8_t* x = FedBytes(inputs, 0);
    const int64_t size = static_cast<int64_t>(ElementSize(OutputType()));
    const auto range = [&](int64_t begin, int64_t end) {
      kernels_->affine(node_.spec, x + begin, static_cast<uint8_t*>(y) + begin * size, 1, end - begin, 0);
    };
    ParallelRanges(pool, BoundedCount(shape), 1 + size, range, node_.spec.channels);
  }
  OperatorPlan Plan(FedTensors) const override {
    return ElementwisePlan(node_.spec.has_affine ? "affine" : "requantize", *kernels_);
  }

 private:
  AffineNode node_;
  const ElementwiseKernels* kernels_;
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(AffineNode node, const OperatorOptions& options) {
  return std::make_unique<AffineOperator>(std::move(node), options);
}

}  // namespace lowbit
