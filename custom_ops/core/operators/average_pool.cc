// LowBitAveragePool.
#include "core/operators/elementwise_common.h"
#include "core/operators/factories.h"
#include "core/operators/pool_shape.h"

namespace lowbit {
namespace {

class AveragePoolOperator final : public Operator {
 public:
  AveragePoolOperator(const AverageSpec& spec, const Window& window, bool ceil_mode, bool count_include_pad,
                      const OperatorOptions& options)
      : spec_(spec),
        window_(window),
        ceil_mode_(ceil_mode),
        count_include_pad_(count_include_pad),
        kernels_(SelectElementwise(options, spec.fast_is_exact)) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return PoolOutputShape(window_, ceil_mode_,
                           Fed(inputs, 0, StorageOf(Storage(spec_.x_signed).encoding), "x"));
  }
  ElementType OutputType() const override { return OutputElementType(spec_.quantizer); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    const PoolShape pool_shape(window_, inputs[0]->shape, shape);
    const int64_t pixel_bytes = pool_shape.channels * static_cast<int64_t>(ElementSize(OutputType()));
    const auto rows = [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const PoolShape::Span span = pool_shape.RowSpan(row);
        const uint8_t* image_row = pool_shape.ImageRow(FedBytes(inputs, 0), row, span);
        for (int64_t column = 0; column < pool_shape.out_w; ++column) {
          const Taps taps = pool_shape.TapsOf(image_row, span, column);
          const int64_t divisor =
              count_include_pad_ ? pool_shape.PaddedTaps(row, column) : taps.rows * taps.columns;
          kernels_.average_taps(spec_, taps, divisor,
                                static_cast<uint8_t*>(y) + (row * pool_shape.out_w + column) * pixel_bytes);
        }
      }
    };
    // Every tap is converted to float: about four times the work of moving its byte.
    ParallelRanges(pool, pool_shape.Rows(), 4 * pool_shape.RowWork(), rows);
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("average_pool", kernels_); }

 private:
  AverageSpec spec_;
  Window window_;
  bool ceil_mode_, count_include_pad_;
  const ElementwiseKernels& kernels_;
};

}  // namespace

LOWBIT_OPERATOR_FACTORY(CreateAveragePool) {
  const NodeReader node(schema, attributes, constants, present);
  const OperandType x = ReadCodes(node, "x_encoding");
  AverageSpec spec;
  spec.x_signed = x.encoding == Encoding::kSigned;
  spec.x_scale = node.ScaleOf("x_scale");
  spec.x_zero_point = node.ZeroPointOf("x_zero_point", x);
  spec.quantizer = ReadQuantizer(node);
  const Window window = ReadPoolWindow(node, false);
  const double x_scale = static_cast<double>(spec.x_scale);
  spec.fast_is_exact = window.kernel[0] * window.kernel[1] <= kMaxFastDivisor &&
                       FastIsExact(spec.quantizer, 256.0 * x_scale, x_scale);
  return std::make_unique<AveragePoolOperator>(spec, window, node.Flag("ceil_mode"),
                                               node.Flag("count_include_pad"), options);
}

}  // namespace lowbit
