// LowBitAffine and LowBitRequantize: one number in, one number out, per channel.
#include <algorithm>
#include <cmath>

#include "core/operators/elementwise_common.h"
#include "core/operators/factories.h"
#include "core/status.h"

namespace lowbit {
namespace {

class AffineOperator final : public Operator {
 public:
  AffineOperator(const char* plan_name, AffineSpec spec, const OperatorOptions& options)
      : plan_name_(plan_name), spec_(std::move(spec)) {
    PrepareAffine(spec_);
    kernels_ = &SelectElementwise(options, spec_.fast_is_exact);
    if (kernels_ != &ElementwiseReference()) FitLine(spec_, *kernels_);
  }

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    const ConstTensor& x = Fed(inputs, 0, StorageOf(Storage(spec_.x_signed).encoding), "x");
    RequireChannels(x, spec_.channels);
    return x.shape;
  }
  ElementType OutputType() const override { return OutputElementType(spec_.quantizer); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    const uint8_t* x = FedBytes(inputs, 0);
    const int64_t size = static_cast<int64_t>(ElementSize(OutputType()));
    const auto range = [&](int64_t begin, int64_t end) {
      kernels_->affine(spec_, x + begin, static_cast<uint8_t*>(y) + begin * size, 1, end - begin, 0);
    };
    ParallelRanges(pool, BoundedCount(shape), 1 + size, range, spec_.channels);
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan(plan_name_, *kernels_); }

 private:
  const char* plan_name_;
  AffineSpec spec_;
  const ElementwiseKernels* kernels_;
};

}  // namespace

LOWBIT_OPERATOR_FACTORY(CreateAffine) {
  const NodeReader node(schema, attributes, constants, present);
  AffineSpec spec;
  const OperandType x = ReadCodes(node, "x_encoding");
  spec.x_signed = x.encoding == Encoding::kSigned;
  spec.quantizer = ReadQuantizer(node);
  spec.has_affine = true;
  spec.channels = std::max(ConstantLength(node, "scale", ElementType::kFloat),
                           ConstantLength(node, "shift", ElementType::kFloat));
  spec.scale = node.BroadcastFloatsOf("scale", spec.channels);
  spec.shift = node.BroadcastFloatsOf("shift", spec.channels);
  for (size_t c = 0; c < spec.scale.size(); ++c) {
    Require(std::isfinite(spec.scale[c]) && std::isfinite(spec.shift[c]), node.op(),
            ": scale and shift must be finite, channel ", c, " has ", spec.scale[c], " and ", spec.shift[c]);
  }
  const auto channels = static_cast<size_t>(spec.channels);
  spec.x_scale.assign(channels, node.ScaleOf("x_scale"));
  spec.x_zero_point.assign(channels, node.ZeroPointOf("x_zero_point", x));
  spec.y_scale.assign(channels, spec.quantizer.scale);
  spec.y_zero_point.assign(channels, spec.quantizer.zero_point);
  return std::make_unique<AffineOperator>("affine", std::move(spec), options);
}

LOWBIT_OPERATOR_FACTORY(CreateRequantize) {
  const NodeReader node(schema, attributes, constants, present);
  AffineSpec spec;
  const OperandType x = ReadCodes(node, "x_encoding");
  const OperandType y = node.Operand("y_bits", "y_encoding");
  spec.x_signed = x.encoding == Encoding::kSigned;
  spec.quantizer = ReadOutputRange(node);
  spec.channels = std::max({ConstantLength(node, "x_scale", ElementType::kFloat),
                            ConstantLength(node, "x_zero_point", ElementType::kInt32),
                            ConstantLength(node, "y_scale", ElementType::kFloat),
                            ConstantLength(node, "y_zero_point", ElementType::kInt32)});
  spec.x_scale = node.BroadcastScalesOf("x_scale", spec.channels);
  spec.x_zero_point = node.BroadcastInt32sOf("x_zero_point", spec.channels);
  spec.y_scale = node.BroadcastScalesOf("y_scale", spec.channels);
  spec.y_zero_point = node.BroadcastInt32sOf("y_zero_point", spec.channels);
  for (const int32_t zero_point : spec.x_zero_point) node.CheckZeroPoint("x_zero_point", zero_point, x);
  for (const int32_t zero_point : spec.y_zero_point) node.CheckZeroPoint("y_zero_point", zero_point, y);
  return std::make_unique<AffineOperator>("requantize", std::move(spec), options);
}

}  // namespace lowbit
