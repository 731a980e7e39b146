// LowBitGlobalAveragePool.
#include <algorithm>
#include <array>

#include "core/cpu/operators/elementwise_common.h"
#include "core/cpu/operators/factories.h"

namespace lowbit {
namespace {

// Channels that one task sums at a time: their 32-bit sums lie on its stack.
constexpr int64_t kChannelBlock = 256;

class GlobalAveragePoolOperator final : public Operator {
 public:
  GlobalAveragePoolOperator(const GlobalAveragePoolNode& node, const OperatorOptions& options)
      : node_(node),
        kernels_(SelectElementwise(options,
                                   FastIsExact(node.spec.quantizer, 256.0 * static_cast<double>(node.x_scale),
                                               static_cast<double>(node.x_scale)))) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return OutputDims(node_, Fed(inputs, 0, "x"));
  }
  ElementType OutputType() const override { return OutputTypeOf(node_); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t>& x = inputs[0]->shape;
    const std::vector<int64_t> shape = OutputShape(inputs);
    const int64_t pixels = BoundedCount(std::span(x).subspan(1, x.size() - 2)), channels = shape.back();
    const int64_t size = static_cast<int64_t>(ElementSize(OutputType()));
    const float count = static_cast<float>(pixels);
    const GlobalAverageSpec& spec = node_.spec;
    const float multiplier =
        spec.quantizer.quantized ? node_.x_scale / (spec.quantizer.scale * count) : node_.x_scale / count;

    const int64_t blocks = (channels + kChannelBlock - 1) / kChannelBlock;
    const auto range = [&](int64_t begin, int64_t end) {
      std::array<int32_t, kChannelBlock> sums;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t image = i / blocks, first = i % blocks * kChannelBlock;
        const int64_t width = std::min(kChannelBlock, channels - first);
        kernels_.sum_pixels(FedBytes(inputs, 0) + image * pixels * channels + first, spec.x_signed, pixels,
                            channels, width, sums.data());
        // |sum of codes| and |pixels * zero point| are at most 255 * 2^23 < 2^31, and so is their difference,
        // the sum of code - zero_point.
        for (int64_t c = 0; c < width; ++c) {
          sums[static_cast<size_t>(c)] -= static_cast<int32_t>(pixels) * node_.x_zero_point;
        }
        kernels_.scale_sums(spec, sums.data(), multiplier,
                            static_cast<uint8_t*>(y) + (image * channels + first) * size, width);
      }
    };
    ParallelRanges(pool, shape.front() * blocks, std::min(kChannelBlock, channels) * pixels, range);
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("global_average_pool", kernels_); }

 private:
  GlobalAveragePoolNode node_;
  const ElementwiseKernels& kernels_;
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(GlobalAveragePoolNode node, const OperatorOptions& options) {
  return std::make_unique<GlobalAveragePoolOperator>(node, options);
}

}  // namespace lowbit
