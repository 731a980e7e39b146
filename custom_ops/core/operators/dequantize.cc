// LowBitDequantize: codes to float32, optionally moving channels first.
#include <algorithm>

#include "core/operators/elementwise_common.h"
#include "core/operators/factories.h"
#include "core/status.h"

namespace lowbit {
namespace {

class DequantizeOperator final : public Operator {
 public:
  DequantizeOperator(AffineSpec spec, bool to_channels_first, const OperatorOptions& options)
      : spec_(std::move(spec)), to_channels_first_(to_channels_first) {
    PrepareAffine(spec_);
    kernels_ = &SelectElementwise(options, spec_.fast_is_exact);
  }

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    const ConstTensor& x = Fed(inputs, 0, StorageOf(Storage(spec_.x_signed).encoding), "x");
    RequireChannels(x, spec_.channels);
    std::vector<int64_t> y = x.shape;
    if (to_channels_first_) {
      Require(y.size() >= 2, "x has shape ", ShapeText(y), ", expected rank 2 or more");
      std::rotate(y.begin() + 1, y.end() - 1, y.end());
    }
    return y;
  }
  ElementType OutputType() const override { return ElementType::kFloat; }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    OutputShape(inputs);
    const std::vector<int64_t>& shape = inputs[0]->shape;
    const uint8_t* x = FedBytes(inputs, 0);
    auto* out = static_cast<float*>(y);
    const int64_t count = BoundedCount(shape);
    if (count == 0) return;
    const int64_t channels = shape.empty() ? 1 : shape.back();
    const int64_t pixels = to_channels_first_ ? count / channels / shape.front() : 1;
    if (pixels == 1) {  // [N, C] and [N, 1, 1, C] stay as they lie in memory
      ParallelRanges(
          pool, count, 5,
          [&](int64_t begin, int64_t end) {
            kernels_->affine(spec_, x + begin, out + begin, 1, end - begin, 0);
          },
          spec_.channels);
      return;
    }
    const int64_t blocks = (pixels + kPixelBlock - 1) / kPixelBlock;
    ParallelRanges(pool, shape.front() * blocks, 5 * channels * kPixelBlock, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t image = i / blocks, first = i % blocks * kPixelBlock;
        const int64_t width = std::min(kPixelBlock, pixels - first);
        const uint8_t* from = x + (image * pixels + first) * channels;
        float* to = out + image * channels * pixels + first;
        if (spec_.channels == 1) {
          kernels_->dequantize_planes(spec_.x_signed, spec_.x_zero_point[0], spec_.x_scale[0], from, channels,
                                      channels, width, to, pixels);
          continue;
        }
        for (int64_t c = 0; c < channels; ++c) {
          const auto index = static_cast<size_t>(c);
          kernels_->dequantize_planes(spec_.x_signed, spec_.x_zero_point[index], spec_.x_scale[index],
                                      from + c, channels, 1, width, to + c * pixels, pixels);
        }
      }
    });
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("dequantize", *kernels_); }

 private:
  static constexpr int64_t kPixelBlock = 512;  // 2 KiB of every output plane

  AffineSpec spec_;
  bool to_channels_first_;
  const ElementwiseKernels* kernels_;
};

}  // namespace

LOWBIT_OPERATOR_FACTORY(CreateDequantize) {
  const NodeReader node(schema, attributes, constants, present);
  const OperandType x = ReadCodes(node, "x_encoding");
  AffineSpec spec;
  spec.x_signed = x.encoding == Encoding::kSigned;
  spec.quantizer.quantized = false;
  spec.channels = std::max(ConstantLength(node, "x_scale", ElementType::kFloat),
                           ConstantLength(node, "x_zero_point", ElementType::kInt32));
  spec.x_scale = node.BroadcastScalesOf("x_scale", spec.channels);
  spec.x_zero_point = node.BroadcastInt32sOf("x_zero_point", spec.channels);
  for (const int32_t zero_point : spec.x_zero_point) node.CheckZeroPoint("x_zero_point", zero_point, x);
  spec.y_scale.assign(static_cast<size_t>(spec.channels), 1.0f);
  spec.y_zero_point.assign(static_cast<size_t>(spec.channels), 0);
  return std::make_unique<DequantizeOperator>(std::move(spec), node.Flag("to_channels_first"), options);
}

}  // namespace lowbit
