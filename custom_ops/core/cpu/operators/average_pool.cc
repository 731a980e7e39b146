// LowBitAveragePool.
#include "core/cpu/operators/elementwise_common.h"
#include "core/cpu/operators/factories.h"
#include "core/cpu/operators/pool_shape.h"

namespace lowbit {
namespace {

class AveragePoolOperator final : public Operator {
 public:
  AveragePoolOperator(const AveragePoolNode& node, const OperatorOptions& options)
      : node_(node), kernels_(SelectElementwise(options, node.spec.fast_is_exact)) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return OutputDims(node_, Fed(inputs, 0, "x"));
  }
  ElementType OutputType() const override { return OutputTypeOf(node_); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    const PoolShape pool_shape(node_.window, inputs[0]->shape, shape);
    const int64_t pixel_bytes = pool_shape.channels * static_cast<int64_t>(ElementSize(OutputType()));
    const auto rows = [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const PoolShape::RowSpans spans = pool_shape.RowSpan(row);
        const uint8_t* image_row = pool_shape.ImageRow(FedBytes(inputs, 0), row, spans);
        for (int64_t column = 0; column < pool_shape.out_w; ++column) {
          const Taps taps = pool_shape.TapsOf(image_row, spans, column);
          const int64_t divisor = node_.count_include_pad ? pool_shape.PaddedTaps(row, column)
                                                          : taps.planes * taps.rows * taps.columns;
          kernels_.average_taps(node_.spec, taps, divisor,
                                static_cast<uint8_t*>(y) + (row * pool_shape.out_w + column) * pixel_bytes);
        }
      }
    };
    // Every tap is converted to float: about four times the work of moving its byte.
    ParallelRanges(pool, pool_shape.Rows(), 4 * pool_shape.RowWork(), rows);
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("average_pool", kernels_); }

 private:
  AveragePoolNode node_;
  const ElementwiseKernels& kernels_;
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(AveragePoolNode node, const OperatorOptions& options) {
  return std::make_unique<AveragePoolOperator>(node, options);
}

}  // namespace lowbit
