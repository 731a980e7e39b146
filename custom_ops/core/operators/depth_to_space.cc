// LowBitDepthToSpace: blocks of channels become blocks of pixels; codes only move.
#include <cstring>

#include "core/operators/elementwise_common.h"
#include "core/operators/factories.h"
#include "core/status.h"

namespace lowbit {
namespace {

class DepthToSpaceOperator final : public Operator {
 public:
  // `channels_first`: channel c * block^2 + i * block + j of x goes to row i and column j of a block (CRD);
  // else it is channel (i * block + j) * C + c (DCR).
  DepthToSpaceOperator(int64_t block, bool channels_first, bool is_signed)
      : block_(block), channels_first_(channels_first), is_signed_(is_signed) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    const ConstTensor& x = Fed(inputs, 0, OutputType(), "x");
    std::vector<int64_t> y = x.shape;
    Require(y.size() == 4, "x has shape ", ShapeText(y), ", expected rank 4");
    Require(y[3] % (block_ * block_) == 0, "x has ", y[3], " channels, expected a multiple of ",
            block_ * block_);
    y[1] = CheckedProduct(y[1], block_, "the output's height");
    y[2] = CheckedProduct(y[2], block_, "the output's width");
    y[3] /= block_ * block_;
    BoundedCount(y);
    return y;
  }
  ElementType OutputType() const override { return StorageOf(Storage(is_signed_).encoding); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    if (BoundedCount(shape) == 0) return;
    const int64_t channels = shape[3], width = inputs[0]->shape[2], block = block_;
    const int64_t run = block * channels;  // the bytes of one pixel of x that lie side by side in a row of y
    const int64_t pixel = block * run;
    // Where byte k of such a run comes from, relative to the first one.
    std::vector<int64_t> from(static_cast<size_t>(run));
    for (int64_t k = 0; k < run; ++k) {
      from[static_cast<size_t>(k)] = channels_first_ ? k % channels * block * block + k / channels : k;
    }
    const bool in_order = !channels_first_ || channels == 1;
    const int64_t row_step = channels_first_ ? block : run;  // from one row of a block to the next, in x
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
  int64_t block_;
  bool channels_first_, is_signed_;
};

}  // namespace

LOWBIT_OPERATOR_FACTORY(CreateDepthToSpace) {
  (void)options;  // one kernel serves every level
  const NodeReader node(schema, attributes, constants, present);
  const std::string& mode = node.String("mode");
  Require(mode == "DCR" || mode == "CRD", node.op(), ": attribute 'mode' is '", mode,
          "', expected DCR or CRD");
  return std::make_unique<DepthToSpaceOperator>(node.Int("blocksize", 1, kMaxAttribute), mode == "CRD",
                                                node.EncodingOf("x_encoding") == Encoding::kSigned);
}

}  // namespace lowbit
