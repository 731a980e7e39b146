// LowBitResize: nearest neighbour, codes are copied.
#include <cstring>
#include <utility>

#include "core/operators/elementwise_common.h"
#include "core/operators/factories.h"

namespace lowbit {
namespace {

class ResizeOperator final : public Operator {
 public:
  explicit ResizeOperator(ResizeNode node) : node_(std::move(node)) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    return OutputDims(node_, Fed(inputs, 0, "x"));
  }
  ElementType OutputType() const override { return OutputTypeOf(node_); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t>& in = inputs[0]->shape;
    const std::vector<int64_t> shape = OutputShape(inputs);
    const int64_t channels = shape.back();
    if (BoundedCount(shape) == 0) return;

    // Byte offset of the source per output index, one list per spatial dim.
    std::vector<std::vector<int64_t>> offsets(node_.Spatial());
    int64_t stride = channels;
    for (size_t i = node_.Spatial(); i-- > 0;) {
      offsets[i] = node_.SourceIndices(i, in[i + 1], shape[i + 1]);
      for (int64_t& offset : offsets[i]) offset *= stride;
      stride *= in[i + 1];
    }

    // A row is one run of output pixels along the last spatial dim.
    const std::vector<int64_t>& columns = offsets.back();
    const int64_t width = static_cast<int64_t>(columns.size());
    const int64_t rows = BoundedCount(std::span(shape).first(node_.Spatial()));
    ParallelRanges(pool, rows, 2 * width * channels, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        int64_t rest = row, offset = 0;
        for (size_t i = node_.Spatial() - 1; i-- > 0;) {
          const int64_t size = static_cast<int64_t>(offsets[i].size());
          offset += offsets[i][static_cast<size_t>(rest % size)];
          rest /= size;
        }
        const uint8_t* x = FedBytes(inputs, 0) + rest * stride + offset;
        uint8_t* out = static_cast<uint8_t*>(y) + row * width * channels;
        for (int64_t column = 0; column < width; ++column) {
          std::memcpy(out + column * channels, x + columns[static_cast<size_t>(column)],
                      static_cast<size_t>(channels));
        }
      }
    });
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("resize", ElementwiseReference()); }

 private:
  ResizeNode node_;
};

}  // namespace

std::unique_ptr<Operator> MakeOperator(ResizeNode node, const OperatorOptions&) {
  return std::make_unique<ResizeOperator>(std::move(node));  // one kernel serves every level
}

}  // namespace lowbit
