// LowBitConcat.
#include <algorithm>
#include <cmath>
#include <string>

#include "core/operators/elementwise_common.h"
#include "core/operators/factories.h"
#include "core/status.h"

namespace lowbit {
namespace {

// One input: copied where its grid is the output's, else requantized.
struct Part {
  bool copied = false;
  AffineSpec spec;
};

class ConcatOperator final : public Operator {
 public:
  ConcatOperator(std::vector<Part> parts, const Quantizer& quantizer, int64_t axis, bool fast_is_exact,
                 const OperatorOptions& options)
      : parts_(std::move(parts)),
        quantizer_(quantizer),
        axis_(axis),
        kernels_(SelectElementwise(options, fast_is_exact)) {
    if (&kernels_ == &ElementwiseReference()) return;
    for (Part& part : parts_) {
      if (!part.copied) FitLine(part.spec, kernels_);
    }
  }

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    Require(inputs.size() == kFirst + parts_.size(), "got ", inputs.size() - std::min(inputs.size(), kFirst),
            " tensors to join, expected ", parts_.size());
    std::vector<int64_t> y;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const ConstTensor& x =
          Fed(inputs, kFirst + i, StorageOf(Storage(parts_[i].spec.x_signed).encoding), "x");
      if (i == 0) {
        y = x.shape;
        continue;
      }
      const size_t axis = Axis(y);
      Require(x.shape.size() == y.size(), "tensors of shape ", ShapeText(y), " and ", ShapeText(x.shape),
              " cannot be joined");
      for (size_t d = 0; d < y.size(); ++d) {
        Require(d == axis || x.shape[d] == y[d], "tensors of shape ", ShapeText(y), " and ",
                ShapeText(x.shape), " cannot be joined along axis ", axis);
      }
      y[axis] += x.shape[axis];
    }
    Axis(y);
    BoundedCount(y);
    return y;
  }
  ElementType OutputType() const override { return OutputElementType(quantizer_); }

  // Joining along an axis interleaves rows: a row is everything from the axis on.
  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t> shape = OutputShape(inputs);
    const size_t axis = Axis(shape);
    const auto row_of = [&](const std::vector<int64_t>& s) {
      return BoundedCount(std::span(s).subspan(axis));
    };
    const int64_t rows = BoundedCount(std::span(shape).first(axis)), y_row = row_of(shape);
    const auto range = [&](int64_t begin, int64_t end) {
      uint8_t* out = static_cast<uint8_t*>(y) + begin * y_row;
      for (size_t i = 0; i < parts_.size(); ++i) {
        const int64_t width = row_of(inputs[kFirst + i]->shape);
        const uint8_t* x = FedBytes(inputs, kFirst + i) + begin * width;
        if (parts_[i].copied) {
          kernels_.copy_rows(x, out, end - begin, width, y_row);
        } else {
          kernels_.affine(parts_[i].spec, x, out, end - begin, width, y_row);
        }
        out += width;
      }
    };
    if (y_row > 0) ParallelRanges(pool, rows, 2 * y_row, range);
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("concat", kernels_); }

 private:
  static constexpr size_t kFirst = 4;  // place of the first tensor in the schema

  size_t Axis(const std::vector<int64_t>& shape) const {
    const int64_t rank = static_cast<int64_t>(shape.size());
    Require(axis_ >= -rank && axis_ < rank, "attribute 'axis' is ", axis_, ", the tensors have rank ", rank);
    return static_cast<size_t>(axis_ < 0 ? axis_ + rank : axis_);
  }

  std::vector<Part> parts_;
  Quantizer quantizer_;
  int64_t axis_;
  const ElementwiseKernels& kernels_;
};

// "unsigned,signed" or empty.
std::vector<bool> ReadEncodings(const NodeReader& node, size_t count) {
  std::vector<bool> is_signed;
  const std::string& text = node.String("x_encodings");
  if (text.empty()) return std::vector<bool>(count, false);
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string name = text.substr(begin, end - begin);
    Require(name == "unsigned" || name == "signed", node.op(), ": attribute 'x_encodings' holds '", name,
            "', expected unsigned or signed");
    is_signed.push_back(name == "signed");
    begin = end + 1;
  }
  Require(is_signed.size() == count, node.op(), ": attribute 'x_encodings' has ", is_signed.size(),
          " entries for ", count, " tensors");
  return is_signed;
}

}  // namespace

LOWBIT_OPERATOR_FACTORY(CreateConcat) {
  const NodeReader node(schema, attributes, constants, present);
  const size_t count = present.size() - node.Index("x");
  const std::vector<bool> is_signed = ReadEncodings(node, count);
  const std::vector<float> scales = node.FloatsOf("x_scales", static_cast<int64_t>(count));
  const std::vector<int32_t> zero_points = node.Int32sOf("x_zero_points", static_cast<int64_t>(count));
  const Quantizer quantizer = ReadQuantizer(node);

  std::vector<Part> parts(count);
  bool fast_is_exact = true;
  for (size_t i = 0; i < count; ++i) {
    Require(std::isfinite(scales[i]) && scales[i] > 0, node.op(), ": input 'x_scales' holds ", scales[i],
            ", expected finite scales > 0");
    node.CheckZeroPoint("x_zero_points", zero_points[i], Storage(is_signed[i]));
    AffineSpec& spec = parts[i].spec;
    parts[i].copied = scales[i] == quantizer.scale && zero_points[i] == quantizer.zero_point &&
                      is_signed[i] == quantizer.is_signed;
    spec.x_signed = is_signed[i];
    spec.x_scale = {scales[i]};
    spec.x_zero_point = {zero_points[i]};
    spec.y_scale = {quantizer.scale};
    spec.y_zero_point = {quantizer.zero_point};
    spec.quantizer = quantizer;
    PrepareAffine(spec);
    fast_is_exact = fast_is_exact && (parts[i].copied || spec.fast_is_exact);
  }
  return std::make_unique<ConcatOperator>(
      std::move(parts), quantizer, node.Int("axis", -kMaxAttribute, kMaxAttribute), fast_is_exact, options);
}

}  // namespace lowbit
