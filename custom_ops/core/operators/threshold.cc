// LowBitThreshold: float32 to codes by counting thresholds, optionally moving channels last.
#include <algorithm>
#include <cmath>

#include "core/operators/elementwise_common.h"
#include "core/operators/factories.h"
#include "core/status.h"

namespace lowbit {
namespace {

class ThresholdOperator final : public Operator {
 public:
  ThresholdOperator(ThresholdSpec spec, bool to_channels_last, const OperatorOptions& options)
      : spec_(std::move(spec)),
        to_channels_last_(to_channels_last),
        kernels_(SelectElementwise(options, true)) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return ShapeOfCodes(Fed(inputs, 0, ElementType::kFloat, "x"), to_channels_last_, spec_.channels);
  }
  ElementType OutputType() const override {
    return StorageOf(spec_.y_signed ? Encoding::kSigned : Encoding::kUnsigned);
  }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    const auto* x = static_cast<const float*>(inputs[0]->data);
    auto* out = static_cast<uint8_t*>(y);
    const int64_t count = BoundedCount(shape);
    if (count == 0) return;
    const int64_t cost = 5 + std::min<int64_t>(spec_.count, 16);
    if (!to_channels_last_) {
      ParallelRanges(pool, count / spec_.channels, cost * spec_.channels, [&](int64_t begin, int64_t end) {
        kernels_.threshold_rows(spec_, x + begin * spec_.channels, end - begin, out + begin * spec_.channels);
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
                       kernels_.threshold_planes(spec_, 0, x + image * channels * pixels + first, pixels,
                                                 channels, std::min(kPixelBlock, pixels - first),
                                                 out + (image * pixels + first) * channels, channels);
                     }
                   });
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("threshold", kernels_); }

 private:
  static constexpr int64_t kPixelBlock = 512;  // as in LowBitQuantize

  ThresholdSpec spec_;
  bool to_channels_last_;
  const ElementwiseKernels& kernels_;
};

void CheckRow(const NodeReader& node, const ThresholdSpec& spec, size_t c, OperandType y) {
  const int64_t last = spec.base[c] + spec.count;
  Require(spec.base[c] >= y.MinCode() && last <= y.MaxCode(), node.op(), ": the codes ", spec.base[c], "..",
          last, " of channel ", c, " leave the range ", y.MinCode(), "..", y.MaxCode(),
          " of y_bits, expected codes inside it");
  const float* row = spec.thresholds.data() + c * static_cast<size_t>(spec.count);
  for (int64_t k = 0; k < spec.count; ++k) {
    Require(!std::isnan(row[k]), node.op(), ": the thresholds of channel ", c,
            " hold NaN, expected numbers (infinities are allowed)");
    Require(k == 0 || row[k - 1] <= row[k], node.op(), ": the thresholds of channel ", c,
            " are not sorted, expected dir * T to ascend: ", row[k - 1], ", ", row[k], " with dir ",
            spec.dir[c]);
  }
}

}  // namespace

LOWBIT_OPERATOR_FACTORY(CreateThreshold) {
  const NodeReader node(schema, attributes, constants, present);
  const OperandType y = node.Operand("y_bits", "y_encoding");
  const std::vector<int64_t>& shape = node.Constant("thresholds", ElementType::kFloat).shape;
  Require(shape.size() == 2 && shape[0] >= 1 && shape[0] <= kMaxAttribute && shape[1] >= 1 && shape[1] <= 255,
          node.op(), ": input 'thresholds' has shape ", ShapeText(shape), ", expected [channels, 1..255]");
  ThresholdSpec spec;
  spec.count = shape[1];
  spec.y_signed = y.encoding == Encoding::kSigned;
  spec.channels = std::max({shape[0], ConstantLength(node, "base", ElementType::kInt32),
                            ConstantLength(node, "dir", ElementType::kInt32)});
  Require(shape[0] == 1 || shape[0] == spec.channels, node.op(), ": input 'thresholds' has ", shape[0],
          " rows, expected 1 or ", spec.channels, " as base and dir have");
  // One row for all is repeated: a file must not make 255 numbers of every one that it holds, without end.
  constexpr int64_t kMaxTable = int64_t{1} << 24;
  Require(shape[0] == spec.channels || spec.channels * spec.count <= kMaxTable, node.op(), ": ",
          spec.channels, " channels share ", spec.count, " thresholds, expected at most ", kMaxTable,
          " in all; write one row per channel");
  spec.base = node.BroadcastInt32sOf("base", spec.channels);
  for (const int32_t dir : node.BroadcastInt32sOf("dir", spec.channels)) {
    Require(dir == 1 || dir == -1, node.op(), ": input 'dir' holds ", dir, ", expected +1 or -1");
    spec.dir.push_back(static_cast<float>(dir));
  }
  const std::vector<float> rows = node.FloatsOf("thresholds", shape[0] * shape[1]);
  spec.thresholds.resize(static_cast<size_t>(spec.channels * spec.count));
  for (size_t i = 0; i < spec.thresholds.size(); ++i) {
    const size_t c = i / static_cast<size_t>(spec.count);
    spec.thresholds[i] = spec.dir[c] * rows[i % rows.size()];
  }
  // A search addresses its table by int32.
  Require(spec.channels <= (int64_t{1} << 22), node.op(), ": ", spec.channels,
          " channels, expected at most 4194304");
  for (size_t c = 0; c < static_cast<size_t>(spec.channels); ++c) CheckRow(node, spec, c, y);
  PrepareThresholds(spec);
  return std::make_unique<ThresholdOperator>(std::move(spec), node.Flag("to_channels_last"), options);
}

}  // namespace lowbit
