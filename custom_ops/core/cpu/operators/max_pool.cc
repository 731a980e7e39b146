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
    RunBand(inputs, y, pool_shape, {{0, pool_shape.Rows()}}, pool);
  }

  std::optional<RowWindow> Rows(FedTensors inputs) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    const std::vector<int64_t>& x = inputs[0]->shape;
    if (node_.window.spatial != 2 || x[0] != 1) return std::nullopt;
    return RowWindow{.in_rows = x[1],
                     .out_rows = shape[1],
                     .stride = node_.window.stride[1],
                     .extent = node_.window.Extent(1),
                     .pad = node_.window.pad_begin[1],
                     .in_bytes = static_cast<size_t>(x[2] * x[3]),
                     .out_bytes = static_cast<size_t>(shape[2] * shape[3])};
  }
  void RunRows(FedTensors inputs, void* y, const RowBand& band, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    RunBand(inputs, y, PoolShape(node_.window, inputs[0]->shape, shape), band, pool);
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("max_pool", kernels_); }

 private:
  void RunBand(FedTensors inputs, void* y, const PoolShape& shape, const RowBand& band,
               ThreadPool& pool) const {
    const int64_t row_bytes = shape.out_w * shape.channels;
    const auto rows = [&](int64_t begin, int64_t end) {
      for (int64_t row = band.rows.begin + begin; row < band.rows.begin + end; ++row) {
        const PoolShape::RowSpans spans = shape.RowSpan(row);
        const uint8_t* image_row = shape.ImageRow(FedBytes(inputs, 0), row, spans, band.x_first);
        uint8_t* const y_row = static_cast<uint8_t*>(y) + (row - band.y_first) * row_bytes;
        for (int64_t column = 0; column < shape.out_w; ++column) {
          kernels_.max_taps(shape.TapsOf(image_row, spans, column), node_.is_signed,
                            y_row + column * shape.channels);
        }
      }
    };
    ParallelRanges(pool, band.rows.count(), shape.RowWork(), rows);
  }

  MaxPoolNode node_;
  const ElementwiseKernels& kernels_;
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(MaxPoolNode node, const OperatorOptions& options) {
  return std::make_unique<MaxPoolOperator>(node, options);
}

}  // namespace lowbit
