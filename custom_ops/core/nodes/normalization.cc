// LowBitNormalization.
#include <algorithm>
#include <cmath>

#include "core/nodes/node_kinds.h"
#include "core/status.h"

namespace lowbit {

NormalizationNode DecodeNormalization(const NodeReader& node) {
  constexpr int64_t kMaxAxis = 64;
  NormalizationNode out;
  NormalizationSpec& spec = out.spec;
  const OperandType x = ReadCodes(node, "x_encoding");
  spec.x_signed = x.encoding == Encoding::kSigned;
  spec.x_zero_point = node.ZeroPointOf("x_zero_point", x);
  spec.quantizer = ReadQuantizer(node);
  out.x_scale = node.ScaleOf("x_scale");
  out.epsilon = node.Float("epsilon");
  Require(std::isfinite(out.epsilon) && out.epsilon > 0, node.op(), ": attribute 'epsilon' is ", out.epsilon,
          ", expected a finite number > 0");
  Require(std::isfinite(static_cast<float>(out.x_scale / std::sqrt(static_cast<double>(out.epsilon)))),
          node.op(), ": x_scale ", out.x_scale, " / sqrt(epsilon ", out.epsilon,
          ") is more than float32 holds");
  out.axis = node.Int("axis", -kMaxAxis, kMaxAxis);
  out.groups = node.Int("groups", 1, kMaxAttribute);

  const int64_t count = std::max(ConstantLength(node, "gamma", ElementType::kFloat),
                                 ConstantLength(node, "beta", ElementType::kFloat));
  out.gamma = node.BroadcastFloatsOf("gamma", count);
  out.beta = node.BroadcastFloatsOf("beta", count);
  const auto largest = [&](const std::vector<float>& values, const char* what) {
    double bound = 0;
    for (const float value : values) {
      Require(std::isfinite(value), node.op(), ": input '", what, "' holds ", value,
              ", expected finite numbers");
      bound = std::max(bound, std::fabs(static_cast<double>(value)));
    }
    return bound;
  };
  // A value's distance from the mean is at most sqrt(n - 1) < 2^12 deviations.
  const double max_abs = 4096 * largest(out.gamma, "gamma") + largest(out.beta, "beta");
  Require(max_abs < 1e38, node.op(), ": inputs 'gamma' and 'beta' reach ", static_cast<float>(max_abs),
          ", expected results that float32 holds");
  spec.fast_is_exact = FastIsExact(spec.quantizer, max_abs, 1.0);
  return out;
}

std::vector<int64_t> OutputDims(const NormalizationNode& node, const FedShape& x) {
  NormalizationShape(node, x);
  return ToVector(x.dims);
}

NormalizationShape::NormalizationShape(const NormalizationNode& node, const FedShape& x) {
  CheckFed(x, CodeType(node.spec.x_signed), "x");
  const int64_t rank = static_cast<int64_t>(x.dims.size());
  const int64_t axis = node.axis < 0 ? node.axis + rank : node.axis;
  Require(axis >= 0 && axis < rank, "x has shape ", ShapeText(x.dims), ", attribute 'axis' is ", node.axis);
  const auto first = static_cast<size_t>(axis);
  channels = x.dims.back();
  outer = BoundedCount(x.dims.first(first));
  elements = BoundedCount(x.dims.subspan(first));
  if (outer == 0 || elements == 0) {
    outer = elements = 0;
    return;
  }
  Require(channels % node.groups == 0, "x has ", channels, " channels, expected a multiple of the ",
          node.groups, " groups");
  const auto count = static_cast<int64_t>(node.gamma.size());
  Require(count == 1 || count == channels || (count == elements && node.groups == 1), "inputs 'gamma' and ",
          "'beta' have ", count, " elements, expected 1, ", channels, " (per channel) or, in one group, ",
          elements);
  const int64_t summed = elements / node.groups;
  Require(summed <= kMaxNormalized, "x has ", summed, " elements to a mean, expected at most ",
          kMaxNormalized, ": their sums must fit int64");
}

}  // namespace lowbit
