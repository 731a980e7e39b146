// LowBitQuantize: float32 to codes, optionally moving channels last.
#include <algorithm>

#include "core/cpu/operators/elementwise_common.h"
#include "core/cpu/operators/factories.h"

namespace lowbit {
namespace {

class QuantizeOperator final : public Operator {
 public:
  QuantizeOperator(QuantizeNode node, const OperatorOptions& options)
      : node_(std::move(node)), kernels_(SelectElementwise(options, node_.fast_is_exact)) {}

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
    if (!node_.to_channels_last && node_.grids.size() == 1) {
      // One plane of all elements: there is nothing to move.
      ParallelRanges(pool, count, 5, [&](int64_t begin, int64_t end) {
        kernels_.quantize_planes(node_.grids.front(), x + begin, 0, 1, end - begin, out + begin, 1);
      });
      return;
    }
    if (!node_.to_channels_last) {
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
        if (node_.grids.size() == 1) {
          kernels_.quantize_planes(node_.grids.front(), from, pixels, channels, width, to, channels);
          continue;
        }
        for (int64_t c = 0; c < channels; ++c) {
          kernels_.quantize_planes(node_.grids[static_cast<size_t>(c)], from + c * pixels, 0, 1, width,
                                   to + c, channels);
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
    const int64_t channels = static_cast<int64_t>(node_.grids.size());
    ParallelRanges(pool, count / channels, 20 * channels, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * channels; i < end * channels; ++i) {
        ElementwiseReference().quantize_planes(node_.grids[static_cast<size_t>(i % channels)], x + i, 0, 1, 1,
                                               y + i, 1);
      }
    });
  }

  QuantizeNode node_;
  const ElementwiseKernels& kernels_;
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(QuantizeNode node, const OperatorOptions& options) {
  return std::make_unique<QuantizeOperator>(std::move(node), options);
}

}  // namespace lowbit
