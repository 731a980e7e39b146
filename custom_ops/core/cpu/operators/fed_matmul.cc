// LowBitMatMul.
#include "core/cpu/fed_matmul_kernel.h"
#include "core/cpu/operators/elementwise_common.h"
#include "core/cpu/operators/factories.h"

namespace lowbit {
namespace {

class FedMatmulOperator final : public Operator {
 public:
  FedMatmulOperator(FedMatmulNode node, const OperatorOptions& options)
      : node_(std::move(node)),
        kernel_(options.use_reference ? FedMatmulReference(node_.spec)
                                      : FedMatmulFor(node_.spec, options.isa)) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return OutputDims(node_, Fed(inputs, kA, "a"), Fed(inputs, kB, "b"));
  }
  ElementType OutputType() const override { return OutputTypeOf(node_); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    FedMatmulShape shape;
    ProductOf(node_, Fed(inputs, kA, "a"), Fed(inputs, kB, "b"), &shape);
    if (shape.batches.empty()) return;
    kernel_->Run(shape, FedBytes(inputs, kA), FedBytes(inputs, kB), y, pool);
  }

  OperatorPlan Plan(FedTensors) const override {
    OperatorPlan plan;
    plan.kernel = kernel_->Name();
    return plan;
  }

 private:
  static constexpr size_t kA = 0, kB = 3;  // places of the data inputs in the schema
  FedMatmulNode node_;
  std::unique_ptr<FedMatmulKernel> kernel_;
};

}  // namespace

Epilogue EpilogueOf(const FedMatmulSpec& spec, int64_t channels) {
  const std::vector<float> scale(static_cast<size_t>(channels), spec.multiplier);
  const Quantizer& q = spec.quantizer;
  Epilogue e;
  e.quantized_output = q.quantized;
  if (!q.quantized) {
    e.kind = EpilogueKind::kFloat;
    e.acc_scale = scale;
    return e;
  }
  e.multiplier = scale;
  e.zero_point = e.y_zero_point = q.zero_point;
  e.lo = e.y_lo = q.lo;
  e.hi = e.y_hi = q.hi;
  e.y_signed = q.is_signed;
  return e;
}

std::unique_ptr<Operator> MakeOperator(FedMatmulNode node, const OperatorOptions& options) {
  return std::make_unique<FedMatmulOperator>(std::move(node), options);
}

}  // namespace lowbit
