// LowBitGlobalAveragePool.
#include <algorithm>
#include <array>

#include "core/operators/elementwise_common.h"
#include "core/operators/factories.h"
#include "core/status.h"

namespace lowbit {
namespace {

// Channels that one task sums at a time: their 32-bit sums lie on its stack.
constexpr int64_t kChannelBlock = 256;

class GlobalAveragePoolOperator final : public Operator {
 public:
  GlobalAveragePoolOperator(const GlobalAverageSpec& spec, float x_scale, int32_t x_zero_point,
                            bool keep_dims, const OperatorOptions& options)
      : spec_(spec),
        x_scale_(x_scale),
        x_zero_point_(x_zero_point),
        keep_dims_(keep_dims),
        kernels_(SelectElementwise(options, FastIsExact(spec.quantizer, 256.0 * static_cast<double>(x_scale),
                                                        static_cast<double>(x_scale)))) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    const ConstTensor& x = Fed(inputs, 0, StorageOf(Storage(spec_.x_signed).encoding), "x");
    Require(x.shape.size() >= 2, "x has shape ", ShapeText(x.shape), ", expected rank 2 or more");
    const int64_t pixels = Pixels(x);
    Require(pixels >= 1 && pixels <= kMaxSumPixels, "x has ", pixels, " pixels, expected 1..", kMaxSumPixels,
            ": the sum must fit int32");
    std::vector<int64_t> y = {x.shape.front()};
    if (keep_dims_) y.insert(y.end(), x.shape.size() - 2, 1);
    y.push_back(x.shape.back());
    return y;
  }
  ElementType OutputType() const override { return OutputElementType(spec_.quantizer); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const ConstTensor& x = *inputs[0];
    const std::vector<int64_t> shape = OutputShape(inputs);
    const int64_t pixels = Pixels(x), channels = shape.back();
    const int64_t size = static_cast<int64_t>(ElementSize(OutputType()));
    const float count = static_cast<float>(pixels);
    const float multiplier =
        spec_.quantizer.quantized ? x_scale_ / (spec_.quantizer.scale * count) : x_scale_ / count;

    const int64_t blocks = (channels + kChannelBlock - 1) / kChannelBlock;
    const auto range = [&](int64_t begin, int64_t end) {
      std::array<int32_t, kChannelBlock> sums;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t image = i / blocks, first = i % blocks * kChannelBlock;
        const int64_t width = std::min(kChannelBlock, channels - first);
        kernels_.sum_pixels(FedBytes(inputs, 0) + image * pixels * channels + first, spec_.x_signed, pixels,
                            channels, width, sums.data());
        // |sum of codes| and |pixels * zero point| are at most 255 * 2^23 < 2^31, and so is their difference,
        // the sum of code - zero_point.
        for (int64_t c = 0; c < width; ++c) {
          sums[static_cast<size_t>(c)] -= static_cast<int32_t>(pixels) * x_zero_point_;
        }
        kernels_.scale_sums(spec_, sums.data(), multiplier,
                            static_cast<uint8_t*>(y) + (image * channels + first) * size, width);
      }
    };
    ParallelRanges(pool, shape.front() * blocks, std::min(kChannelBlock, channels) * pixels, range);
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("global_average_pool", kernels_); }

 private:
  static int64_t Pixels(const ConstTensor& x) {
    return BoundedCount(std::span(x.shape).subspan(1, x.shape.size() - 2));
  }

  GlobalAverageSpec spec_;
  float x_scale_;
  int32_t x_zero_point_;
  bool keep_dims_;
  const ElementwiseKernels& kernels_;
};

}  // namespace

LOWBIT_OPERATOR_FACTORY(CreateGlobalAveragePool) {
  const NodeReader node(schema, attributes, constants, present);
  const OperandType x = ReadCodes(node, "x_encoding");
  GlobalAverageSpec spec;
  spec.x_signed = x.encoding == Encoding::kSigned;
  spec.quantizer = ReadQuantizer(node);
  return std::make_unique<GlobalAveragePoolOperator>(
      spec, node.ScaleOf("x_scale"), node.ZeroPointOf("x_zero_point", x), node.Flag("keepdims"), options);
}

}  // namespace lowbit
