// Running a node of the matmul family: shapes in, kernel call out.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <utility>

#include "core/cpu/kernel_table.h"
#include "core/cpu/operators/elementwise_common.h"
#include "core/cpu/operators/factories.h"
#include "core/cpu/tune_cache.h"
#include "core/nodes/matmul_shape.h"
#include "core/selection.h"
#include "core/stated_codes.h"
#include "core/status.h"

namespace lowbit {
namespace {

using Tensors = std::span<const std::optional<ConstTensor>>;

// Stands for a dimension that the model leaves open, where a kernel is chosen before any image was seen: the
// middle of an ImageNet network.
constexpr int64_t kTypicalPixels = 28;
// The order of the kernels depends on the rows of a matrix product where they are few.
constexpr int64_t kMaxTypicalRows = 256;

size_t InputIndex(const char* op, std::string_view input) {
  const std::vector<InputSchema>& inputs = FindOpSchema(op)->inputs;
  const auto found =
      std::find_if(inputs.begin(), inputs.end(), [&](const InputSchema& each) { return input == each.name; });
  return static_cast<size_t>(found - inputs.begin());
}

class MatmulOperator final : public Operator {
 public:
  MatmulOperator(const MatmulNode& node, bool x_has_stated_bits)
      : op_(node.op), shape_(node), residual_index_(InputIndex(node.op, "residual")) {
    if (!x_has_stated_bits && node.conv.x.bits < 8) low_bits_.emplace(node.conv.x);
  }

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

  // What the model states of the images: batch (rows of a Gemm), height, width, of volumes the depth too; -1
  // where it does not.
  std::vector<int64_t> StatedShape(const std::vector<int64_t>& x_shape) const {
    const auto dim = [](int64_t size) { return size > 0 ? size : int64_t{-1}; };
    const MatmulLayout& layout = shape_.layout();
    if (layout.is_gemm) {
      const int64_t rank = static_cast<int64_t>(x_shape.size());
      const int64_t axis = layout.axis < 0 ? layout.axis + rank : layout.axis;
      if (axis < 0 || axis >= rank) return {-1, 1, 1};
      const auto end = x_shape.begin() + axis;
      const bool known = std::all_of(x_shape.begin(), end, [](int64_t size) { return size > 0; });
      return {known ? ElementCount({x_shape.begin(), end}) : -1, 1, 1};
    }
    const size_t rank = static_cast<size_t>(layout.spatial) + 2;
    std::vector<int64_t> x(rank, -1);
    if (x_shape.size() == rank) std::transform(x_shape.begin(), x_shape.end(), x.begin(), dim);
    const auto both = [](int64_t a, int64_t b) { return a > 0 && b > 0 ? a * b : int64_t{-1}; };
    if (layout.spatial == 1) return {x[0], 1, x[1]};
    if (layout.spatial == 2) return {x[0], x[1], x[2]};
    switch (layout.volume) {
      case VolumeLayout::kPlanes:
        return {both(x[0], x[1]), x[2], x[3]};
      case VolumeLayout::kColumns:
        return {x[0], x[1], both(x[2], x[3])};
      case VolumeLayout::kWhole:
        break;
    }
    return {x[0], x[2], x[3], x[1]};
  }

  // A shape like those that will be fed: what is known at creation, typical sizes for the rest.
  ConvShape TypicalShape(const std::vector<int64_t>& x_shape) const {
    const std::vector<int64_t> stated = StatedShape(x_shape);
    if (shape_.layout().is_gemm) return {std::clamp(stated[0], int64_t{1}, kMaxTypicalRows), 1, 1, 1, 1};
    const auto size = [&](int64_t known, int64_t least) {
      return known > 0 ? known : std::max(kTypicalPixels, least);
    };
    // The smallest size that leaves an output pixel: the window itself, or more than the pads cut off.
    const ConvGeometry& g = shape_.geometry();
    const int64_t least_w = g.transposed ? g.pad_left + g.pad_right + 1 : g.dilation_w * (g.kernel_w - 1) + 1;
    const int64_t least_h = g.transposed ? g.pad_top + g.pad_bottom + 1 : g.dilation_h * (g.kernel_h - 1) + 1;
    const int64_t least_d = g.dilation_d * (g.kernel_d - 1) + 1;
    const int64_t depth = stated.size() == 4 ? size(stated[3], least_d) : 1;
    return InferConvShape(g, 1, size(stated[1], least_h), size(stated[2], least_w), depth);
  }

  std::vector<int64_t> OutputShape(Tensors inputs) const override {
    const ConvShape images = Resolve(inputs);
    return shape_.OutputDims(inputs[0]->shape, images);
  }

  ElementType OutputType() const override { return shape_.OutputType(); }

  void Run(Tensors inputs, void* y, ThreadPool& pool) const override {
    const ConvShape shape = Resolve(inputs);
    if (shape.batch == 0) return;
    const void* residual = shape_.has_residual() ? inputs[residual_index_]->data : nullptr;
    std::vector<uint8_t> copy;
    kernel_->Run({shape, WithStatedBits(*inputs[0], copy, pool), residual, y}, pool);
  }

  // A residual is read where y is written: its rows would be those of y.
  std::optional<RowWindow> Rows(Tensors inputs) const override {
    const MatmulLayout& layout = shape_.layout();
    if (layout.is_gemm || layout.spatial != 2 || shape_.has_residual() || low_bits_ || !kernel_->TakesBands())
      return std::nullopt;
    const ConvShape shape = Resolve(inputs);
    if (shape.batch != 1) return std::nullopt;
    const ConvGeometry& g = shape_.geometry();
    return RowWindow{
        .in_rows = shape.in_h,
        .out_rows = shape.out_h,
        .stride = g.stride_h,
        .extent = (g.kernel_h - 1) * g.dilation_h + 1,
        .pad = g.pad_top,
        .in_bytes = static_cast<size_t>(shape.in_w * g.in_channels),
        .out_bytes = static_cast<size_t>(shape.out_w * g.out_channels) * ElementSize(OutputType())};
  }

  void RunRows(Tensors inputs, void* y, const RowBand& band, ThreadPool& pool) const override {
    kernel_->Run({Resolve(inputs), inputs[0]->data, nullptr, y, band}, pool);
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
  ConvShape Resolve(Tensors inputs) const {
    Require(inputs.size() > residual_index_, op_, ": input 'x' is missing");
    FedShape x, residual;
    const auto view = [](const std::optional<ConstTensor>& tensor, FedShape& shape) {
      if (tensor.has_value()) shape = {tensor->type, tensor->shape};
      return tensor.has_value() ? &shape : nullptr;
    };
    return shape_.Images(view(inputs[0], x), view(inputs[residual_index_], residual));
  }

  // The codes of x, or `copy` with the low bits of their bytes where some have more than are stated.
  const void* WithStatedBits(const ConstTensor& x, std::vector<uint8_t>& copy, ThreadPool& pool) const {
    if (!low_bits_) return x.data;
    const auto count = static_cast<size_t>(ElementCount(x.shape));
    const std::span<const uint8_t> codes(static_cast<const uint8_t*>(x.data), count);
    std::atomic<bool> holds = true;
    ParallelRanges(pool, static_cast<int64_t>(count), 1, [&](int64_t begin, int64_t end) {
      if (!AreLowBits(codes.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
                      *low_bits_))
        holds = false;
    });
    if (holds) return x.data;
    copy.resize(count);
    std::transform(codes.begin(), codes.end(), copy.begin(),
                   [&](uint8_t byte) { return low_bits_->Of(byte); });
    return copy.data();
  }

  const char* op_;
  MatmulShape shape_;
  size_t residual_index_;
  std::optional<LowBits> low_bits_;  // of x, where nothing proves that its bytes hold no others
  OperatorPlan plan_;                // without the sizes, which depend on the shape
  std::unique_ptr<ConvKernel> kernel_;
};

// "1x28x28", with ? where the model leaves a size open. For tuning, which minimal builds lack.
[[maybe_unused]] std::string StatedText(const std::vector<int64_t>& stated) {
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

// The kernel that is chosen packs the weights; the operator keeps nothing of the node but what shapes depend
// on, so that the unpacked weights die with the caller's node.
std::unique_ptr<Operator> MakeOperator(const MatmulNode& node, const OperatorOptions& options) {
  const ConvSpec& spec = node.conv;
  Require(!spec.weights.empty(), node.op, ": the node has no weights");
  auto op = std::make_unique<MatmulOperator>(node, options.x_has_stated_bits);
  const ConvShape typical = op->TypicalShape(options.x_shape);
  const std::string only = options.use_reference ? ReferenceKernelFor(spec) : options.kernel;
  std::string key, tuned;
  if constexpr (!kMinimal) {
    key = TuneKey(spec, StatedText(op->StatedShape(options.x_shape)), options.isa);
    if (options.tuned && only.empty() && TuneCacheEnabled()) {
      tuned = TunedKernel(key, options.threads, [&](const std::string& warning) { Warn(options, warning); });
    }
  }
  const KernelChoice choice = SelectConvKernel(spec, typical, options.isa, only, tuned);
  op->SetKernel(choice, key, choice.row->create(spec));
  return op;
}

}  // namespace lowbit
