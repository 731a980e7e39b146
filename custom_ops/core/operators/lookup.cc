// LowBitLookup: a 256-entry table, for all channels or one per channel.
#include <cstring>

#include "core/operators/elementwise_common.h"
#include "core/operators/factories.h"
#include "core/status.h"

namespace lowbit {
namespace {

constexpr int64_t kTableSize = 256;

class LookupOperator final : public Operator {
 public:
  LookupOperator(bool x_signed, bool y_signed, int64_t channels, std::vector<uint8_t> table,
                 const OperatorOptions& options)
      : x_type_(StorageOf(Storage(x_signed).encoding)),
        y_type_(StorageOf(Storage(y_signed).encoding)),
        channels_(channels),
        table_(std::move(table)),
        kernels_(SelectElementwise(options, true)) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    const ConstTensor& x = Fed(inputs, 0, x_type_, "x");
    RequireChannels(x, channels_);
    return x.shape;
  }
  ElementType OutputType() const override { return y_type_; }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    const uint8_t* x = FedBytes(inputs, 0);
    uint8_t* out = static_cast<uint8_t*>(y);
    const auto range = [&](int64_t begin, int64_t end) {
      if (channels_ == 1) {
        kernels_.lookup(table_.data(), x + begin, out + begin, end - begin);
        return;
      }
      for (int64_t i = begin, c = 0; i < end; ++i) {
        out[i] = table_[static_cast<size_t>(c * kTableSize + x[i])];
        if (++c == channels_) c = 0;
      }
    };
    ParallelRanges(pool, BoundedCount(shape), 2, range, channels_);
  }
  OperatorPlan Plan(FedTensors) const override {
    return ElementwisePlan("lookup", channels_ == 1 ? kernels_ : ElementwiseReference());
  }

 private:
  ElementType x_type_, y_type_;
  int64_t channels_;  // 1: one table
  std::vector<uint8_t> table_;
  const ElementwiseKernels& kernels_;
};

}  // namespace

LOWBIT_OPERATOR_FACTORY(CreateLookup) {
  const NodeReader node(schema, attributes, constants, present);
  const ConstTensor& table = node.Constant("table", ElementType::kUInt8);
  const bool per_channel = table.shape.size() == 2;
  Require((per_channel || table.shape.size() == 1) && table.shape.back() == kTableSize && table.shape[0] >= 1,
          node.op(), ": input 'table' has shape ", ShapeText(table.shape), ", expected [256] or [C, 256]");
  const auto* bytes = static_cast<const uint8_t*>(table.data);
  return std::make_unique<LookupOperator>(
      node.EncodingOf("x_encoding") == Encoding::kSigned, node.EncodingOf("y_encoding") == Encoding::kSigned,
      per_channel ? table.shape[0] : 1, std::vector<uint8_t>(bytes, bytes + BoundedCount(table.shape)),
      options);
}

}  // namespace lowbit
