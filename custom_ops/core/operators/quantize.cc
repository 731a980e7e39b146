// LowBitQuantize: float32 to codes, optionally moving channels last.
#include <algorithm>

#include "core/operators/elementwise_common.h"
#include "core/operators/factories.h"
#include "core/status.h"

namespace lowbit {
namespace {

class QuantizeOperator final : public Operator {
 public:
  // `grids` has one quantizer per channel, or one for all.
  QuantizeOperator(std::vector<Quantizer> grids, bool to_channels_last, bool fast_is_exact,
                   const OperatorOptions& options)
      : grids_(std::move(grids)),
        to_channels_last_(to_channels_last),
        kernels_(SelectElementwise(options, fast_is_exact)) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return ShapeOfCodes(Fed(inputs, 0, ElementType::kFloat, "x"), to_channels_last_,
                        static_cast<int64_t>(grids_.size()));
  }
  ElementType OutputType() const override { return OutputElementType(grids_.front()); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    const auto* x = static_cast<const float*>(inputs[0]->data);
    auto* out = static_cast<uint8_t*>(y);
    const int64_t count = BoundedCount(shape);
    if (count == 0) return;
    if (!to_channels_last_ && grids_.size() == 1) {
      // One plane of all elements: there is nothing to move.
      ParallelRanges(pool, count, 5, [&](int64_t begin, int64_t end) {
        kernels_.quantize_planes(grids_.front(), x + begin, 0, 1, end - begin, out + begin, 1);
      });
      return;
    }
    if (!to_channels_last_) {
      QuantizeLastChannels(x, out, count, pool);
      return;
    }
    const int64_t channels = shape.back(), pixels = count / channels / shape.front();
    // Blocks of pixels, counted through the batch.
    const int64_t blocks = (pixels + kPixelBlock - 1) / kPixelBlock;
    ParallelRanges(pool, shape.front() * blocks, 5 * channels * kPixelBlock, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t image = i / blocks, first = i % blocks * kPixelBlock;
        const int64_t width = std::min(kPixelBlock, pixels - first);
        const float* from = x + image * channels * pixels + first;
        uint8_t* to = out + (image * pixels + first) * channels;
        if (grids_.size() == 1) {
          kernels_.quantize_planes(grids_.front(), from, pixels, channels, width, to, channels);
          continue;
        }
        for (int64_t c = 0; c < channels; ++c) {
          kernels_.quantize_planes(grids_[static_cast<size_t>(c)], from + c * pixels, 0, 1, width, to + c,
                                   channels);
        }
      }
    });
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("quantize", kernels_); }

 private:
  // 512 pixels of one plane are 2 KiB, a few lines of every page of a large image.
  static constexpr int64_t kPixelBlock = 512;

  // [..., C] with a grid per channel: rare (weights are constants), so plainly element by element.
  void QuantizeLastChannels(const float* x, uint8_t* y, int64_t count, ThreadPool& pool) const {
    const int64_t channels = static_cast<int64_t>(grids_.size());
    ParallelRanges(pool, count / channels, 20 * channels, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * channels; i < end * channels; ++i) {
        ElementwiseReference().quantize_planes(grids_[static_cast<size_t>(i % channels)], x + i, 0, 1, 1,
                                               y + i, 1);
      }
    });
  }

  std::vector<Quantizer> grids_;
  bool to_channels_last_;
  const ElementwiseKernels& kernels_;
};

}  // namespace

LOWBIT_OPERATOR_FACTORY(CreateQuantize) {
  const NodeReader node(schema, attributes, constants, present);
  const OperandType y = node.Operand("y_bits", "y_encoding");
  const int64_t channels = std::max(ConstantLength(node, "y_scale", ElementType::kFloat),
                                    ConstantLength(node, "y_zero_point", ElementType::kInt32));
  const std::vector<float> scales = node.BroadcastScalesOf("y_scale", channels);
  const std::vector<int32_t> zero_points = node.BroadcastInt32sOf("y_zero_point", channels);
  std::vector<Quantizer> grids(static_cast<size_t>(channels), ReadOutputRange(node));
  bool fast_is_exact = true;
  for (size_t c = 0; c < grids.size(); ++c) {
    node.CheckZeroPoint("y_zero_point", zero_points[c], y);
    grids[c].scale = scales[c];
    grids[c].zero_point = zero_points[c];
    // The kernels clip x to +-1024 * y_scale before they divide.
    const double scale = static_cast<double>(scales[c]);
    fast_is_exact = fast_is_exact && FastIsExact(grids[c], 1024 * scale, scale);
  }
  return std::make_unique<QuantizeOperator>(std::move(grids), node.Flag("to_channels_last"), fast_is_exact,
                                            options);
}

}  // namespace lowbit
