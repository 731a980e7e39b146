// The outputs of standard nodes, and their parameters for a shape at hand.
#include <algorithm>
#include <numeric>
#include <type_traits>

#include "core/nodes/node_kinds.h"
#include "core/nodes/standard_nodes.h"
#include "core/status.h"

namespace lowbit {
namespace {

using Dims = std::vector<int64_t>;
using View = std::span<const int64_t>;

int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// The dims that Reshape's `dims` mean for x.
Dims Reshaped(const ReshapeOp& op, View x) {
  Dims y = op.dims;
  std::optional<size_t> open;
  int64_t known = 1;
  for (size_t i = 0; i < y.size(); ++i) {
    if (y[i] == -1) {
      open = i;
      continue;
    }
    if (y[i] == 0 && op.copy_zero) {
      Require(i < x.size(), "the new shape ", ShapeText(op.dims), " copies dim ", i, " of ", ShapeText(x),
              ", which has none such");
      y[i] = x[i];
    }
    known = CheckedProduct(known, y[i], "the new shape");
  }
  const int64_t count = BoundedCount(x);
  if (open) {
    Require(known > 0 && count % known == 0, "shape ", ShapeText(x), " cannot become ", ShapeText(op.dims));
    y[*open] = count / known;
    return y;
  }
  Require(known == count, "shape ", ShapeText(x), " cannot become ", ShapeText(op.dims));
  return y;
}

Dims Flattened(View x, int64_t axis) {
  const int64_t rank = static_cast<int64_t>(x.size());
  // One beyond the last dim is allowed: all of x, then 1.
  Require(axis >= -rank && axis <= rank, "attribute 'axis' is ", axis, ", x has shape ", ShapeText(x));
  const size_t first = static_cast<size_t>(axis < 0 ? axis + rank : axis);
  return {BoundedCount(x.first(first)), BoundedCount(x.subspan(first))};
}

// Marks the dims that `axes` name.
std::vector<bool> Marked(const Dims& axes, size_t rank, bool each_once = true) {
  std::vector<bool> marked(rank);
  for (const int64_t axis : axes) {
    const size_t at = AxisOf(axis, rank);
    Require(!each_once || !marked[at], "axis ", axis, " stands twice in ", ShapeText(axes));
    marked[at] = true;
  }
  return marked;
}

Dims Squeezed(View x, const Dims& axes) {
  const std::vector<bool> marked = Marked(axes, x.size(), false);  // as ONNX Runtime, where one stands twice
  Dims y;
  for (size_t i = 0; i < x.size(); ++i) {
    const bool drop = axes.empty() ? x[i] == 1 : marked[i];
    Require(!drop || x[i] == 1, "dim ", i, " of ", ShapeText(x), " is squeezed, expected it to be 1");
    if (!drop) y.push_back(x[i]);
  }
  return y;
}

Dims Unsqueezed(View x, const Dims& axes) {
  const std::vector<bool> marked = Marked(axes, x.size() + axes.size());
  Dims y;
  for (size_t i = 0, from = 0; i < marked.size(); ++i) y.push_back(marked[i] ? 1 : x[from++]);
  return y;
}

Dims OutputDims(const ReshapeOp& op, View x) {
  switch (op.kind) {
    case ReshapeOp::Kind::kReshape:
      return Reshaped(op, x);
    case ReshapeOp::Kind::kFlatten:
      return Flattened(x, op.axis);
    case ReshapeOp::Kind::kSqueeze:
      return Squeezed(x, op.dims);
    case ReshapeOp::Kind::kUnsqueeze:
      return Unsqueezed(x, op.dims);
    case ReshapeOp::Kind::kSame:
      break;
  }
  return ToVector(x);
}

Dims OutputDims(const TransposeOp& op, View x) {
  Dims y;
  for (const size_t from : PermOf(op, x.size())) y.push_back(x[from]);
  return y;
}

Dims OutputDims(const SliceOp& op, View x) {
  Dims y;
  for (const SliceRange& range : RangesOf(op, x)) y.push_back(range.count);
  return y;
}

Dims OutputDims(const SplitOp& op, View x) {
  Dims y;
  for (const SliceRange& range : RangesOf(op, x)) y.push_back(range.count);
  return y;
}

Dims OutputDims(const PadOp& op, View x) {
  const std::vector<PadWidth> widths = WidthsOf(op, x.size());
  Dims y = ToVector(x);
  for (size_t i = 0; i < y.size(); ++i) {
    Require(y[i] <= kMaxPixels, "dim ", i, " of ", ShapeText(x), ", expected at most ", kMaxPixels);
    y[i] += widths[i].begin + widths[i].end;
  }
  return y;
}

Dims OutputDims(const NearestOp& op, View x) {
  const std::vector<std::optional<size_t>> entries = EntriesOf(op, x.size());
  Dims y = ToVector(x);
  for (size_t i = 0; i < y.size(); ++i) {
    Require(x[i] >= 1 && x[i] <= kMaxPixels, "x has shape ", ShapeText(x), ", expected dims of 1..",
            kMaxPixels);
    if (entries[i]) y[i] = op.along.OutputSize(*entries[i], x[i]);
  }
  return y;
}

Dims OutputDims(const FloatGemmOp& op, View x) {
  Require(op.is_matmul ? !x.empty() : x.size() == 2, "A has shape ", ShapeText(x), ", expected rank ",
          op.is_matmul ? "1 or more" : "2");
  Dims y = ToVector(x);
  if (op.transpose_a) std::swap(y[0], y[1]);
  Require(y.back() == op.k, "A has shape ", ShapeText(x), ", expected ", op.k,
          " features to multiply with B");
  y.back() = op.n;
  return y;
}

// [N, C, D1..] with as many spatial dims as the window has.
void CheckImage(const Window& window, View x) {
  const size_t rank = static_cast<size_t>(window.spatial) + 2;
  Require(x.size() == rank, "x has shape ", ShapeText(x), ", expected rank ", rank);
  for (const int64_t size : x.subspan(2)) {
    Require(size >= 1 && size <= kMaxPixels, "x has shape ", ShapeText(x), ", expected 1..", kMaxPixels,
            " pixels a side");
  }
}

// The place of dim `i` of an image in a window's arrays.
size_t WindowIndex(const Window& window, size_t i) {
  return i - 2 + kMaxSpatial - static_cast<size_t>(window.spatial);
}

Window WithPads(const Window& given, AutoPad auto_pad, View x) {
  CheckImage(given, x);
  if (auto_pad == AutoPad::kExplicit) return given;
  Window window = given;
  for (size_t i = 2; i < x.size(); ++i) {
    const size_t d = WindowIndex(window, i);
    const int64_t out = CeilDivide(x[i], window.stride[d]);
    const int64_t covered = (out - 1) * window.stride[d] + window.Extent(static_cast<int>(d));
    const int64_t total = std::max<int64_t>(0, covered - x[i]), less = total / 2;
    window.pad_begin[d] = auto_pad == AutoPad::kSameUpper ? less : total - less;
    window.pad_end[d] = total - window.pad_begin[d];
  }
  return window;
}

// As in ONNX Runtime, whose division truncates: a window that is larger than the padded image by less than a
// stride still gives one pixel, by less than two strides none.
int64_t PoolOutputSize(const Window& window, int i, int64_t size, bool ceil_mode) {
  const auto d = static_cast<size_t>(i);
  const int64_t span = size + window.pad_begin[d] + window.pad_end[d] - window.Extent(i);
  return span < 0 && span > -2 * window.stride[d] ? span / window.stride[d] + 1
                                                  : WindowOutputSize(window, i, size, ceil_mode);
}

Dims OutputDims(const FloatConvOp& op, View x) {
  const Window window = WindowOf(op, x);
  Require(x[1] == op.in_channels, "x has shape ", ShapeText(x), ", expected ", op.in_channels, " channels");
  Dims y = {x[0], op.out_channels};
  for (size_t i = 2; i < x.size(); ++i) {
    y.push_back(WindowOutputSize(window, static_cast<int>(WindowIndex(window, i)), x[i], false));
  }
  return y;
}

Dims OutputDims(const FloatPoolOp& op, View x) {
  if (op.kind == FloatPoolOp::Kind::kMax || op.kind == FloatPoolOp::Kind::kAverage) {
    const Window window = WindowOf(op, x);
    Dims y = {x[0], x[1]};
    for (size_t i = 2; i < x.size(); ++i) {
      y.push_back(PoolOutputSize(window, static_cast<int>(WindowIndex(window, i)), x[i], op.ceil_mode));
    }
    return y;
  }
  Require(x.size() >= 3, "x has shape ", ShapeText(x), ", expected rank 3 or more");
  Require(BoundedCount(x.subspan(2)) >= 1, "x has shape ", ShapeText(x), ", expected at least one pixel");
  Dims y = {x[0], x[1]};
  y.resize(x.size(), 1);
  return y;
}

Dims OutputDims(const SoftmaxOp& op, View x) {
  AxisOf(op.axis, x.size());
  return ToVector(x);
}

Dims OutputDims(const UnaryOp&, View x) { return ToVector(x); }

const TensorShape& At(std::span<const TensorShape> fed, size_t index) {
  Require(index < fed.size(), "input ", index, " is missing");
  return fed[index];
}

TensorShape Joined(const JoinOp& op, std::span<const TensorShape> fed) {
  TensorShape y = At(fed, 0);
  const size_t axis = AxisOf(op.axis, y.dims.size());
  for (const TensorShape& x : fed.subspan(1)) {
    Require(x.type == y.type, "tensors of different element types cannot be joined");
    Require(x.dims.size() == y.dims.size(), "tensors of shape ", ShapeText(y.dims), " and ",
            ShapeText(x.dims), " cannot be joined");
    for (size_t i = 0; i < y.dims.size(); ++i) {
      Require(i == axis || x.dims[i] == y.dims[i], "tensors of shape ", ShapeText(y.dims), " and ",
              ShapeText(x.dims), " cannot be joined along axis ", axis);
    }
    y.dims[axis] += x.dims[axis];
  }
  return y;
}

// The ops that move elements of any type, those of float32, and the lowbit nodes among the standard ones.
template <typename Op>
TensorShape Output(const Op& op, std::span<const TensorShape> fed) {
  const TensorShape& x = At(fed, 0);
  constexpr bool kMoves = std::is_same_v<Op, ReshapeOp> || std::is_same_v<Op, TransposeOp> ||
                          std::is_same_v<Op, SliceOp> || std::is_same_v<Op, SplitOp> ||
                          std::is_same_v<Op, NearestOp>;
  if constexpr (!kMoves) CheckFed({x.type, x.dims}, ElementType::kFloat, "x");
  return {x.type, OutputDims(op, x.dims)};
}

TensorShape Output(const CastOp& op, std::span<const TensorShape> fed) { return {op.to, At(fed, 0).dims}; }

TensorShape Output(const PadOp& op, std::span<const TensorShape> fed) {
  const TensorShape& x = At(fed, 0);
  Require(ElementSize(x.type) == op.value.size(), "x has elements of ", ElementSize(x.type),
          " bytes, the padding has ", op.value.size());
  return {x.type, OutputDims(op, x.dims)};
}

TensorShape Output(const JoinOp& op, std::span<const TensorShape> fed) { return Joined(op, fed); }

TensorShape Output(const FloatBinaryOp&, std::span<const TensorShape> fed) {
  const TensorShape &a = At(fed, 0), &b = At(fed, 1);
  CheckFed({a.type, a.dims}, ElementType::kFloat, "A");
  CheckFed({b.type, b.dims}, ElementType::kFloat, "B");
  return {ElementType::kFloat, BroadcastDims(a.dims, b.dims)};
}

TensorShape Output(const FloatMatmulOp&, std::span<const TensorShape> fed) {
  const TensorShape &a = At(fed, 0), &b = At(fed, 1);
  CheckFed({a.type, a.dims}, ElementType::kFloat, "A");
  CheckFed({b.type, b.dims}, ElementType::kFloat, "B");
  return {ElementType::kFloat, FloatProductOf(a.dims, b.dims, nullptr)};
}

TensorShape Output(const QuantizeNode& node, std::span<const TensorShape> fed) {
  const TensorShape& x = At(fed, 0);
  return {OutputTypeOf(node), OutputDims(node, FedShape{x.type, x.dims})};
}

TensorShape Output(const DequantizeNode& node, std::span<const TensorShape> fed) {
  const TensorShape& x = At(fed, 0);
  return {OutputTypeOf(node), OutputDims(node, FedShape{x.type, x.dims})};
}

}  // namespace

size_t AxisOf(int64_t axis, size_t rank) {
  const int64_t dims = static_cast<int64_t>(rank);
  Require(axis >= -dims && axis < dims, "axis ", axis, " of a tensor of rank ", rank);
  return static_cast<size_t>(axis < 0 ? axis + dims : axis);
}

std::vector<size_t> PermOf(const TransposeOp& op, size_t rank) {
  std::vector<size_t> perm(op.perm.begin(), op.perm.end());
  if (perm.empty()) {
    perm.resize(rank);
    std::iota(perm.rbegin(), perm.rend(), size_t{0});
  }
  Require(perm.size() == rank, "attribute 'perm' is ", ShapeText(op.perm), ", x has rank ", rank);
  return perm;
}

std::vector<std::optional<size_t>> EntriesOf(const NearestOp& op, size_t rank) {
  Marked(op.axes, rank);  // no axis twice
  Require(!op.axes.empty() || op.along.Spatial() == rank, "x has rank ", rank, ", its Resize has ",
          op.along.Spatial(), " scales or sizes");
  std::vector<std::optional<size_t>> entries(rank);
  for (size_t i = 0; i < op.along.Spatial(); ++i) {
    entries[op.axes.empty() ? i : AxisOf(op.axes[i], rank)] = i;
  }
  return entries;
}

std::vector<SliceRange> RangesOf(const SliceOp& op, View x) {
  std::vector<SliceRange> ranges;
  for (const int64_t size : x) ranges.push_back({0, 1, size});
  Marked(op.axes, x.size());  // no axis twice
  for (size_t i = 0; i < op.axes.size(); ++i) {
    const size_t axis = AxisOf(op.axes[i], x.size());
    const int64_t size = x[axis], step = op.steps[i];
    // ONNX: negative positions count from the end, then all are clamped to what the direction can reach.
    const auto clamped = [&](int64_t at, int64_t lo, int64_t hi) {
      return std::clamp(at < 0 ? at + size : at, lo, hi);
    };
    SliceRange range{0, step, 0};
    if (step > 0) {
      range.begin = clamped(op.starts[i], 0, size);
      const int64_t end = clamped(op.ends[i], 0, size);
      range.count = end > range.begin ? CeilDivide(end - range.begin, step) : 0;
    } else if (size > 0) {
      range.begin = clamped(op.starts[i], 0, size - 1);
      const int64_t end = clamped(op.ends[i], -1, size - 1);
      range.count = end < range.begin ? CeilDivide(range.begin - end, -step) : 0;
    }
    ranges[axis] = range;
  }
  return ranges;
}

std::vector<SliceRange> RangesOf(const SplitOp& op, View x) {
  std::vector<SliceRange> ranges;
  for (const int64_t size : x) ranges.push_back({0, 1, size});
  const int64_t size = x[AxisOf(op.axis, x.size())];
  SliceRange& cut = ranges[AxisOf(op.axis, x.size())];
  if (!op.sizes.empty()) {
    int64_t sum = 0;  // of at most kMaxRank * kMaxPixels
    for (size_t i = 0; i < op.sizes.size(); ++i) {
      if (static_cast<int64_t>(i) == op.part) cut = {sum, 1, op.sizes[i]};
      sum += op.sizes[i];
    }
    Require(sum == size, "x has shape ", ShapeText(x), ", the parts along axis ", op.axis, " have the sizes ",
            ShapeText(op.sizes));
    return ranges;
  }
  const int64_t each = CeilDivide(size, op.parts);
  const int64_t last = size - each * (op.parts - 1);
  Require(last >= 0 && (op.uneven || last == each), "x has shape ", ShapeText(x), ", axis ", op.axis,
          " cannot be cut into ", op.parts, op.uneven ? " parts" : " equal parts");
  cut = {op.part * each, 1, op.part + 1 == op.parts ? last : each};
  return ranges;
}

std::vector<PadWidth> WidthsOf(const PadOp& op, size_t rank) {
  const size_t count = op.axes.empty() ? rank : op.axes.size();
  Require(op.pads.size() == 2 * count, op.pads.size(), " pads for ", count, " axes of a tensor of rank ",
          rank);
  Marked(op.axes, rank);  // no axis twice
  std::vector<PadWidth> widths(rank);
  for (size_t i = 0; i < count; ++i) {
    const size_t axis = op.axes.empty() ? i : AxisOf(op.axes[i], rank);
    widths[axis] = {op.pads[i], op.pads[i + count]};
  }
  return widths;
}

Window WindowOf(const FloatConvOp& op, View x) { return WithPads(op.window, op.auto_pad, x); }
Window WindowOf(const FloatPoolOp& op, View x) { return WithPads(op.window, op.auto_pad, x); }

std::vector<size_t> FedInputs(const StandardNode& node, size_t inputs) {
  size_t count = 1;
  if (std::holds_alternative<JoinOp>(node)) count = inputs;
  if (std::holds_alternative<FloatBinaryOp>(node) || std::holds_alternative<FloatMatmulOp>(node)) count = 2;
  std::vector<size_t> fed(count);
  std::iota(fed.begin(), fed.end(), size_t{0});
  return fed;
}

TensorShape OutputOf(const StandardNode& node, std::span<const TensorShape> fed) {
  for (const TensorShape& tensor : fed) BoundedCount(tensor.dims);
  TensorShape y = std::visit([&](const auto& each) { return Output(each, fed); }, node);
  BoundedCount(y.dims);
  return y;
}

}  // namespace lowbit
