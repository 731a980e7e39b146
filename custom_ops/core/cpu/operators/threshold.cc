// LowBitThreshold: float32 to codes by counting thresholds, optionally moving channels last.
#include <algorithm>

#include "core/cpu/operators/elementwise_common.h"
#include "core/cpu/operators/factories.h"

namespace lowbit {
namespace {

class ThresholdOperator final : public Operator {
 public:
  ThresholdOperator(ThresholdNode node, const OperatorOptions& options)
      : node_(std::move(node)), kernels_(SelectElementwise(options, true)) {
    PrepareThresholds(node_.spec);
  }

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return OutputDims(node_, Fed(inputs, 0, "x"));
  }
  ElementType OutputType() const override { return OutputTypeOf(node_); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    const auto* x = static_cast<const float*>(inputs[0]->data);
    auto* out = static_cast<uint8_t*>(y);
    const int64_t count = BoundedCount(shape);
    if (count == 0) return;
    const ThresholdSpec& spec = node_.spec;
    const int64_t cost = 5 + std::min<int64_t>(spec.count, 16);
    if (!node_.to_channels_last) {
      ParallelRanges(pool, count / spec.channels, cost * spec.channels, [&](int64_t begin, int64_t end) {
        kernels_.threshold_rows(spec, x + begin * spec.channels, end - begin, out + begin * spec.channels);
      });
      return;
    }
    const int64_t channels = shape.back(), pixels = count / channels / shape.front();
    // Blocks of pixels, counted through the batch.
    const int64_t blocks = (pixels + kPixelBlock - 1) / kPixelBlock;
    ParallelRanges(pool, shape.front() * blocks, cost * channels * kPixelBlock,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) {
                       const int64_t image = i / blocks, first = i % blocks * kPixelBlock;
                       kernels_.threshold_planes(spec, 0, x + image * channels * pixels + first, pixels,
                                                 channels, std::min(kPixelBlock, pixels - first),
                                                 out + (image * pixels + first) * channels, channels);
                     }
                   });
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("threshold", kernels_); }

 private:
  static constexpr int64_t kPixelBlock = 512;  // as in LowBitQuantize

  ThresholdNode node_;
  const ElementwiseKernels& kernels_;
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(ThresholdNode node, const OperatorOptions& options) {
  return std::make_unique<ThresholdOperator>(std::move(node), options);
}

}  // namespace lowbit
