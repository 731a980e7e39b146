// LowBitDequantize: codes to float32, optionally moving channels first.
#include <algorithm>

#include "core/cpu/operators/elementwise_common.h"
#include "core/cpu/operators/factories.h"

namespace lowbit {
namespace {

class DequantizeOperator final : public Operator {
 public:
  DequantizeOperator(DequantizeNode node, const OperatorOptions& options) : node_(std::move(node)) {
    PrepareAffine(node_.spec);
    kernels_ = &SelectElementwise(options, node_.spec.fast_is_exact);
  }

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return OutputDims(node_, Fed(inputs, 0, "x"));
  }
  ElementType OutputType() const override { return ElementType::kFloat; }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    OutputShape(inputs);
    const AffineSpec& spec = node_.spec;
    const std::vector<int64_t>& shape = inputs[0]->shape;
    const uint8_t* x = FedBytes(inputs, 0);
    auto* out = static_cast<float*>(y);
    const int64_t count = BoundedCount(shape);
    if (count == 0) return;
    const int64_t channels = shape.empty() ? 1 : shape.back();
    const int64_t pixels = node_.to_channels_first ? count / channels / shape.front() : 1;
    if (pixels == 1) {  // [N, C] and [N, 1, 1, C] stay as they lie in memory
      ParallelRanges(
          pool, count, 5,
          [&](int64_t begin, int64_t end) {
            kernels_->affine(spec, x + begin, out + begin, 1, end - begin, 0);
          },
          spec.channels);
      return;
    }
    const int64_t blocks = (pixels + kPixelBlock - 1) / kPixelBlock;
    ParallelRanges(pool, shape.front() * blocks, 5 * channels * kPixelBlock, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t image = i / blocks, first = i % blocks * kPixelBlock;
        const int64_t width = std::min(kPixelBlock, pixels - first);
        const uint8_t* from = x + (image * pixels + first) * channels;
        float* to = out + image * channels * pixels + first;
        if (spec.channels == 1) {
          kernels_->dequantize_planes(spec.x_signed, spec.x_zero_point[0], spec.x_scale[0], from, channels,
                                      channels, width, to, pixels);
          continue;
        }
        for (int64_t c = 0; c < channels; ++c) {
          const auto index = static_cast<size_t>(c);
          kernels_->dequantize_planes(spec.x_signed, spec.x_zero_point[index], spec.x_scale[index], from + c,
                                      channels, 1, width, to + c * pixels, pixels);
        }
      }
    });
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("dequantize", *kernels_); }

 private:
  static constexpr int64_t kPixelBlock = 512;  // 2 KiB of every output plane

  DequantizeNode node_;
  const ElementwiseKernels* kernels_;
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(DequantizeNode node, const OperatorOptions& options) {
  return std::make_unique<DequantizeOperator>(std::move(node), options);
}

}  // namespace lowbit
