// LowBitLookup: a 256-entry table, for all channels or one per channel.
#include <utility>

#include "core/cpu/operators/elementwise_common.h"
#include "core/cpu/operators/factories.h"

namespace lowbit {
namespace {

constexpr int64_t kTableSize = 256;

class LookupOperator final : public Operator {
 public:
  LookupOperator(LookupNode node, const OperatorOptions& options)
      : node_(std::move(node)), kernels_(SelectElementwise(options, true)) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return OutputDims(node_, Fed(inputs, 0, "x"));
  }
  ElementType OutputType() const override { return OutputTypeOf(node_); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    const uint8_t* x = FedBytes(inputs, 0);
    uint8_t* out = static_cast<uint8_t*>(y);
    const auto range = [&](int64_t begin, int64_t end) {
      if (node_.channels == 1) {
        kernels_.lookup(node_.table.data(), x + begin, out + begin, end - begin);
        return;
      }
      for (int64_t i = begin, c = 0; i < end; ++i) {
        out[i] = node_.table[static_cast<size_t>(c * kTableSize + x[i])];
        if (++c == node_.channels) c = 0;
      }
    };
    ParallelRanges(pool, BoundedCount(shape), 2, range, node_.channels);
  }
  OperatorPlan Plan(FedTensors) const override {
    return ElementwisePlan("lookup", node_.channels == 1 ? kernels_ : ElementwiseReference());
  }

 private:
  LookupNode node_;
  const ElementwiseKernels& kernels_;
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(LookupNode node, const OperatorOptions& options) {
  return std::make_unique<LookupOperator>(std::move(node), options);
}

}  // namespace lowbit
