// LowBitMaxPool.
#include "core/operators/elementwise_common.h"
#include "core/operators/factories.h"
#include "core/operators/pool_shape.h"

namespace lowbit {
namespace {

class MaxPoolOperator final : public Operator {
 public:
  MaxPoolOperator(bool is_signed, const Window& window, bool ceil_mode, const OperatorOptions& options)
      : is_signed_(is_signed),
        window_(window),
        ceil_mode_(ceil_mode),
        kernels_(SelectElementwise(options, true)) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return PoolOutputShape(window_, ceil_mode_, Fed(inputs, 0, OutputType(), "x"));
  }
  ElementType OutputType() const override { return StorageOf(Storage(is_signed_).encoding); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    const PoolShape pool_shape(window_, inputs[0]->shape, shape);
    const int64_t row_bytes = pool_shape.out_w * pool_shape.channels;
    const auto rows = [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const PoolShape::Span span = pool_shape.RowSpan(row);
        const uint8_t* image_row = pool_shape.ImageRow(FedBytes(inputs, 0), row, span);
        for (int64_t column = 0; column < pool_shape.out_w; ++column) {
          const Taps taps = pool_shape.TapsOf(image_row, span, column);
          kernels_.max_taps(taps, is_signed_,
                            static_cast<uint8_t*>(y) + row * row_bytes + column * pool_shape.channels);
        }
      }
    };
    ParallelRanges(pool, pool_shape.Rows(), pool_shape.RowWork(), rows);
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("max_pool", kernels_); }

 private:
  bool is_signed_;
  Window window_;
  bool ceil_mode_;
  const ElementwiseKernels& kernels_;
};

}  // namespace

LOWBIT_OPERATOR_FACTORY(CreateMaxPool) {
  const NodeReader node(schema, attributes, constants, present);
  return std::make_unique<MaxPoolOperator>(node.EncodingOf("x_encoding") == Encoding::kSigned,
                                           ReadPoolWindow(node, true), node.Flag("ceil_mode"), options);
}

}  // namespace lowbit
