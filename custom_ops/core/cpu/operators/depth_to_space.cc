// LowBitDepthToSpace: blocks of channels become blocks of pixels; codes only move.
#include <cstring>

#include "core/cpu/operators/elementwise_common.h"
#include "core/cpu/operators/factories.h"

namespace lowbit {
namespace {

class DepthToSpaceOperator final : public Operator {
 public:
  explicit DepthToSpaceOperator(const DepthToSpaceNode& node) : node_(node) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return OutputDims(node_, Fed(inputs, 0, "x"));
  }
  ElementType OutputType() const override { return OutputTypeOf(node_); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    if (BoundedCount(shape) == 0) return;
    const int64_t channels = shape[3], width = inputs[0]->shape[2], block = node_.block;
    const int64_t run = block * channels;  // the bytes of one pixel of x that lie side by side in a row of y
    const int64_t pixel = block * run;
    // Where byte k of such a run comes from, relative to the first one.
    std::vector<int64_t> from(static_cast<size_t>(run));
    for (int64_t k = 0; k < run; ++k) {
      from[static_cast<size_t>(k)] = node_.channels_first ? k % channels * block * block + k / channels : k;
    }
    const bool in_order = !node_.channels_first || channels == 1;
    const int64_t row_step = node_.channels_first ? block : run;  // from one row of a block to the next, in x
    ParallelRanges(pool, shape[0] * shape[1], 2 * width * run, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const uint8_t* x = FedBytes(inputs, 0) + row / block * width * pixel + row % block * row_step;
        uint8_t* out = static_cast<uint8_t*>(y) + row * width * run;
        for (int64_t i = 0; i < width; ++i, x += pixel, out += run) {
          if (in_order) {
            std::memcpy(out, x, static_cast<size_t>(run));
            continue;
          }
          for (int64_t k = 0; k < run; ++k) out[k] = x[from[static_cast<size_t>(k)]];
        }
      }
    });
  }
  OperatorPlan Plan(FedTensors) const override {
    return ElementwisePlan("depth_to_space", ElementwiseReference());
  }

 private:
  DepthToSpaceNode node_;
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(DepthToSpaceNode node, const OperatorOptions&) {
  return std::make_unique<DepthToSpaceOperator>(node);  // one kernel serves every level
}

}  // namespace lowbit
