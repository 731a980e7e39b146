// LowBitAdd and LowBitMul with numpy broadcasting.
#include <utility>

#include "core/cpu/operators/elementwise_common.h"
#include "core/cpu/operators/factories.h"

namespace lowbit {
namespace {

class BinaryOperator final : public Operator {
 public:
  BinaryOperator(BinaryNode node, const OperatorOptions& options)
      : node_(std::move(node)), kernels_(SelectElementwise(options, node_.spec.fast_is_exact)) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return OutputDims(node_, Fed(inputs, kA, "a"), Fed(inputs, kB, "b"));
  }
  ElementType OutputType() const override { return OutputTypeOf(node_); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    const int64_t count = BoundedCount(shape);
    if (count == 0) return;
    const std::vector<BroadcastLevel> levels = BroadcastLevels(inputs[kA]->shape, inputs[kB]->shape, shape);
    const uint8_t *a = FedBytes(inputs, kA), *b = FedBytes(inputs, kB);
    const int64_t y_size = static_cast<int64_t>(ElementSize(OutputType()));
    const BroadcastLevel inner = levels.front();
    const auto row = [&](int64_t a_offset, int64_t b_offset, int64_t y_offset, int64_t elements) {
      kernels_.binary(node_.spec, a + a_offset, inner.a_stride == 0, b + b_offset, inner.b_stride == 0,
                      static_cast<uint8_t*>(y) + y_offset * y_size, elements);
    };
    if (levels.size() == 1) {
      ParallelRanges(pool, count, 2 + y_size, [&](int64_t begin, int64_t end) {
        row(begin * inner.a_stride, begin * inner.b_stride, begin, end - begin);
      });
      return;
    }
    ParallelRanges(pool, count / inner.size, inner.size * (2 + y_size), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        int64_t a_offset = 0, b_offset = 0, rest = r;
        for (size_t i = 1; i < levels.size(); ++i) {
          const int64_t index = rest % levels[i].size;
          rest /= levels[i].size;
          a_offset += index * levels[i].a_stride;
          b_offset += index * levels[i].b_stride;
        }
        row(a_offset, b_offset, r * inner.size, inner.size);
      }
    });
  }
  OperatorPlan Plan(FedTensors) const override {
    return ElementwisePlan(node_.spec.kind == BinaryKind::kAdd ? "add" : "mul", kernels_);
  }

 private:
  static constexpr size_t kA = 0, kB = 3;  // places of the data inputs in the schema
  BinaryNode node_;
  const ElementwiseKernels& kernels_;
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(BinaryNode node, const OperatorOptions& options) {
  return std::make_unique<BinaryOperator>(std::move(node), options);
}

}  // namespace lowbit
