// LowBitMaxPool.
#include "core/cpu/operators/elementwise_common.h"
#include "core/cpu/operators/factories.h"
#include "core/cpu/operators/pool_shape.h"

namespace lowbit {
namespace {

class MaxPoolOperator final : public Operator {
 public:
  MaxPoolOperator(const MaxPoolNode& node, const OperatorOptions& options)
      : node_(node), kernels_(SelectElementwise(options, true)) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return OutputDims(node_, Fed(inputs, 0, "x"));
  }
  ElementType OutputType() const override { return OutputTypeOf(node_); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    const PoolShape pool_shape(node_.window, inputs[0]->shape, shape);
    const int64_t row_bytes = pool_shape.out_w * pool_shape.channels;
    const auto rows = [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const PoolShape::RowSpans spans = pool_shape.RowSpan(row);
        const uint8_t* image_row = pool_shape.ImageRow(FedBytes(inputs, 0), row, spans);
        for (int64_t column = 0; column < pool_shape.out_w; ++column) {
          const Taps taps = pool_shape.TapsOf(image_row, spans, column);
          kernels_.max_taps(taps, node_.is_signed,
                            static_cast<uint8_t*>(y) + row * row_bytes + column * pool_shape.channels);
        }
      }
    };
    ParallelRanges(pool, pool_shape.Rows(), pool_shape.RowWork(), rows);
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("max_pool", kernels_); }

 private:
  MaxPoolNode node_;
  const ElementwiseKernels& kernels_;
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(MaxPoolNode node, const OperatorOptions& options) {
  return std::make_unique<MaxPoolOperator>(node, options);
}

}  // namespace lowbit
