// Running a node of the matmul family: shapes in, kernel call out.
#include "core/operators/matmul.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

#include "core/kernel_table.h"
#include "core/status.h"
#include "core/tune_cache.h"

namespace lowbit {
namespace {

using Tensors = std::span<const std::optional<ConstTensor>>;

// Stands for a dimension that the model leaves open, where a kernel is chosen before any image was seen: the
// middle of an ImageNet network.
constexpr int64_t kTypicalPixels = 28;
// The order of the kernels depends on the rows of a matrix product where they are few.
constexpr int64_t kMaxTypicalRows = 256;

class MatmulOperator final : public Operator {
 public:
  MatmulOperator(const NodeReader& node, const ConvSpec& spec, const MatmulLayout& layout)
      : op_(node.op()),
        geometry_(spec.geometry),
        layout_(layout),
        x_type_(StorageOf(spec.x.encoding)),
        residual_index_(node.Index("residual")),
        has_residual_(spec.epilogue.has_residual),
        residual_type_(spec.epilogue.residual_signed ? ElementType::kInt8 : ElementType::kUInt8),
        y_type_(!spec.epilogue.quantized_output ? ElementType::kFloat
                : spec.epilogue.y_signed        ? ElementType::kInt8
                                                : ElementType::kUInt8) {}

  void SetKernel(const KernelChoice& choice, const std::string& tune_key,
                 std::unique_ptr<ConvKernel> kernel) {
    plan_.tune_key = tune_key;
    plan_.kernel = choice.row->name;
    plan_.tuned = choice.tuned;
    plan_.refused = choice.refused;
    for (const KernelCandidate& each : choice.candidates)
      plan_.candidates.push_back({each.row->name, each.cycles});
    kernel_ = std::move(kernel);
  }

  // What the model states of the images: batch (rows of a Gemm), height, width; -1 where it does not.
  std::array<int64_t, 3> StatedShape(const std::vector<int64_t>& x_shape) const {
    const auto dim = [](int64_t size) { return size > 0 ? size : int64_t{-1}; };
    if (layout_.is_gemm) {
      const int64_t rank = static_cast<int64_t>(x_shape.size());
      const int64_t axis = layout_.axis < 0 ? layout_.axis + rank : layout_.axis;
      if (axis < 0 || axis >= rank) return {-1, 1, 1};
      const auto end = x_shape.begin() + axis;
      const bool known = std::all_of(x_shape.begin(), end, [](int64_t size) { return size > 0; });
      return {known ? ElementCount({x_shape.begin(), end}) : -1, 1, 1};
    }
    const size_t rank = static_cast<size_t>(layout_.spatial) + 2;
    if (x_shape.size() != rank) return {-1, layout_.spatial == 1 ? 1 : -1, -1};
    return {dim(x_shape[0]), layout_.spatial == 1 ? 1 : dim(x_shape[1]), dim(x_shape[rank - 2])};
  }

  // A shape like those that will be fed: what is known at creation, typical sizes for the rest.
  ConvShape TypicalShape(const std::vector<int64_t>& x_shape) const {
    const std::array<int64_t, 3> stated = StatedShape(x_shape);
    if (layout_.is_gemm) return {std::clamp(stated[0], int64_t{1}, kMaxTypicalRows), 1, 1, 1, 1};
    const auto size = [&](int64_t known, int64_t least) {
      return known > 0 ? known : std::max(kTypicalPixels, least);
    };
    // The smallest size that leaves an output pixel: the window itself, or more than the pads cut off.
    const ConvGeometry& g = geometry_;
    const int64_t least_w = g.transposed ? g.pad_left + g.pad_right + 1 : g.dilation_w * (g.kernel_w - 1) + 1;
    const int64_t least_h = g.transposed ? g.pad_top + g.pad_bottom + 1 : g.dilation_h * (g.kernel_h - 1) + 1;
    return InferConvShape(g, 1, size(stated[1], least_h), size(stated[2], least_w));
  }

  std::vector<int64_t> OutputShape(Tensors inputs) const override {
    const ConvShape shape = Resolve(inputs);
    const std::vector<int64_t>& x = inputs[0]->shape;
    if (!layout_.is_gemm) {
      if (layout_.spatial == 1) return {shape.batch, shape.out_w, geometry_.out_channels};
      return {shape.batch, shape.out_h, shape.out_w, geometry_.out_channels};
    }
    std::vector<int64_t> y(x.begin(), x.begin() + GemmAxis(x));
    y.push_back(geometry_.out_channels);
    return y;
  }

  ElementType OutputType() const override { return y_type_; }

  void Run(Tensors inputs, void* y, ThreadPool& pool) const override {
    const ConvShape shape = Resolve(inputs);
    if (shape.batch == 0) return;
    const void* residual = has_residual_ ? inputs[residual_index_]->data : nullptr;
    kernel_->Run({shape, inputs[0]->data, residual, y}, pool);
  }

  OperatorPlan Plan(Tensors inputs) const override {
    const bool fed = !inputs.empty() && inputs[0].has_value();
    const ConvShape shape = fed ? Resolve(inputs) : TypicalShape({});
    OperatorPlan plan = plan_;
    plan.workspace_bytes = kernel_->WorkspaceBytes(shape);
    plan.packed_bytes = kernel_->PackedBytes();
    return plan;
  }

 private:
  int64_t GemmAxis(const std::vector<int64_t>& x) const {
    const int64_t rank = static_cast<int64_t>(x.size());
    const int64_t axis = layout_.axis < 0 ? layout_.axis + rank : layout_.axis;
    Require(axis >= 0 && axis < rank, op_, ": attribute 'axis' is ", layout_.axis, ", x has shape ",
            ShapeText(x));
    return axis;
  }

  ConvShape GemmShape(const std::vector<int64_t>& x) const {
    const std::span<const int64_t> dims = x;
    const size_t axis = static_cast<size_t>(GemmAxis(x));
    const int64_t k = ElementCount(dims.subspan(axis));
    Require(k == geometry_.in_channels, op_, ": x has shape ", ShapeText(x), ", its dims from ", axis,
            " on hold ", k, " features, expected ", geometry_.in_channels);
    return InferConvShape(geometry_, ElementCount(dims.first(axis)), 1, 1);
  }

  ConvShape ImageShape(const std::vector<int64_t>& x) const {
    const size_t rank = static_cast<size_t>(layout_.spatial) + 2;
    Require(x.size() == rank && x.back() == geometry_.in_channels, op_, ": x has shape ", ShapeText(x),
            ", expected rank ", rank, " with ", geometry_.in_channels, " channels last");
    return InferConvShape(geometry_, x[0], layout_.spatial == 1 ? 1 : x[1], x[rank - 2]);
  }

  void CheckResidual(const ConstTensor& residual, const ConvShape& shape,
                     const std::vector<int64_t>& x) const {
    Require(residual.type == residual_type_, op_,
            ": the residual's element type is not the one residual_encoding says");
    const std::vector<int64_t>& r = residual.shape;
    bool same = r.size() == (layout_.is_gemm ? static_cast<size_t>(GemmAxis(x)) + 1 : x.size());
    same = same && r.back() == geometry_.out_channels;
    if (layout_.is_gemm) {
      for (size_t i = 0; same && i + 1 < r.size(); ++i) same = r[i] == x[i];
    } else {
      same = same && r[0] == shape.batch && r[r.size() - 2] == shape.out_w;
      same = same && (layout_.spatial == 1 || r[1] == shape.out_h);
    }
    Require(same, op_, ": the residual has shape ", ShapeText(r), ", expected the output's: ", shape.batch,
            " x ", shape.out_h, " x ", shape.out_w, " x ", geometry_.out_channels);
  }

  // Checks everything about the fed tensors; no memory is touched before.
  ConvShape Resolve(Tensors inputs) const {
    Require(inputs.size() > residual_index_ && inputs[0].has_value(), op_, ": input 'x' is missing");
    const ConstTensor& x = *inputs[0];
    Require(x.type == x_type_, op_,
            ": the element type of x is not the one x_encoding says (unsigned and bipolar: ",
            "uint8, signed: int8)");
    const ConvShape shape = layout_.is_gemm ? GemmShape(x.shape) : ImageShape(x.shape);
    if (has_residual_) {
      Require(inputs[residual_index_].has_value(), op_, ": input 'residual' is missing");
      CheckResidual(*inputs[residual_index_], shape, x.shape);
    }
    return shape;
  }

  const char* op_;
  ConvGeometry geometry_;
  MatmulLayout layout_;
  ElementType x_type_;
  size_t residual_index_;
  bool has_residual_;
  ElementType residual_type_, y_type_;
  OperatorPlan plan_;  // without the sizes, which depend on the shape
  std::unique_ptr<ConvKernel> kernel_;
};

// "1x28x28", with ? where the model leaves a size open.
std::string StatedText(const std::array<int64_t, 3>& stated) {
  std::string text;
  for (const int64_t size : stated) {
    if (!text.empty()) text += 'x';
    text += size > 0 ? std::to_string(size) : "?";
  }
  return text;
}

std::string ReferenceKernelFor(const ConvSpec& spec) {
  return spec.geometry.transposed ? "conv_transpose_reference" : "conv_reference";
}

void Warn(const OperatorOptions& options, const std::string& warning) {
  if (options.warn) {
    options.warn(warning);
  } else {
    std::fputs((warning + "\n").c_str(), stderr);
  }
}

}  // namespace

std::unique_ptr<Operator> CreateMatmul(const NodeReader& node, const ConvSpec& spec,
                                       const MatmulLayout& layout, const OperatorOptions& options) {
  auto op = std::make_unique<MatmulOperator>(node, spec, layout);
  const ConvShape typical = op->TypicalShape(options.x_shape);
  const std::string only = options.use_reference ? ReferenceKernelFor(spec) : options.kernel;
  const std::string key = TuneKey(spec, StatedText(op->StatedShape(options.x_shape)), options.isa);
  std::string tuned;
  if (options.tuned && only.empty() && TuneCacheEnabled()) {
    tuned = TunedKernel(key, options.threads, [&](const std::string& warning) { Warn(options, warning); });
  }
  const KernelChoice choice = SelectConvKernel(spec, typical, options.isa, only, tuned);
  op->SetKernel(choice, key, choice.row->create(spec));
  return op;
}

}  // namespace lowbit
