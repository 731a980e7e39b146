#include "core/nodes/standard_nodes.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "core/nodes/node_kinds.h"
#include "core/nodes/standard_reader.h"
#include "core/status.h"

namespace lowbit {
namespace {

void CheckLength(const StandardReader& node, std::string_view what, size_t length) {
  Require(length <= static_cast<size_t>(kMaxRank), node.op(), ": '", what, "' has ", length,
          " numbers, expected at most ", kMaxRank);
}

void CheckAxes(const StandardReader& node, const std::vector<int64_t>& axes) {
  CheckLength(node, "axes", axes.size());
  for (const int64_t axis : axes) {
    Require(axis >= -kMaxRank && axis <= kMaxRank, node.op(), ": 'axes' holds ", axis);
  }
}

// ---- other dims for the same elements

StandardNode DecodeReshape(const StandardReader& node) {
  node.RequireVersion(5);
  node.RequireInputs(2);
  node.TypeOf(0);
  ReshapeOp op{ReshapeOp::Kind::kReshape, node.ConstantInts(1, "shape"), !node.Flag("allowzero"), 0};
  CheckLength(node, "shape", op.dims.size());
  int64_t open = 0, zero = 0;
  for (const int64_t dim : op.dims) {
    Require(dim >= -1 && dim <= kMaxPixels, node.op(), ": 'shape' holds ", dim, ", expected -1..",
            kMaxPixels);
    open += dim == -1 ? 1 : 0;
    zero += dim == 0 ? 1 : 0;
  }
  Require(open <= 1, node.op(), ": 'shape' leaves ", open, " dims open, expected at most one");
  Require(open == 0 || zero == 0 || op.copy_zero, node.op(),
          ": 'shape' holds 0 and -1, with allowzero nothing says what -1 is");
  return op;
}

StandardNode DecodeFlatten(const StandardReader& node) {
  node.RequireInputs(1);
  node.TypeOf(0);
  return ReshapeOp{ReshapeOp::Kind::kFlatten, {}, true, node.Axis("axis", 1)};
}

template <ReshapeOp::Kind kKind>
StandardNode DecodeSqueeze(const StandardReader& node) {
  node.RequireInputs(2);
  node.TypeOf(0);
  // To onnx an input without a name says nothing; ONNX Runtime refuses the node, so that lowbit does.
  Require(node.version() < 13 || node.InputCount() < 2 || node.Present(1), node.op(),
          ": input 'axes' has no name");
  ReshapeOp op{kKind, node.AttributeOrInput("axes", 1, 13), true, 0};
  CheckAxes(node, op.dims);
  Require(kKind == ReshapeOp::Kind::kSqueeze || !op.dims.empty(), node.op(), ": 'axes' is missing");
  return op;
}

StandardNode DecodeIdentity(const StandardReader& node) {
  node.RequireInputs(1);
  node.TypeOf(0);
  return ReshapeOp{};
}

// Outside of training the values pass.
StandardNode DecodeDropout(const StandardReader& node) {
  node.RequireVersion(7);
  Require(!node.Present(2), node.op(), ": input 'training_mode' is given, expected inference");
  node.TypeOf(0);
  node.Ignore("ratio");
  node.Ignore("seed");
  return ReshapeOp{};
}

StandardNode DecodeCast(const StandardReader& node) {
  node.RequireVersion(6);
  node.RequireInputs(1);
  node.Ignore("saturate");                                         // for 8-bit floats alone
  node.Ignore("round_mode");                                       // likewise
  constexpr std::array<int64_t, 5> kOnnxTypes = {2, 3, 6, 1, 10};  // by ElementType
  constexpr int64_t kMaxOnnxType = 1000;
  const ElementType from = node.AnyTypeOf(0);
  const int64_t onnx = node.Int("to", 0, 1, kMaxOnnxType);
  const auto* const to = std::find(kOnnxTypes.begin(), kOnnxTypes.end(), onnx);
  const auto type = static_cast<ElementType>(to - kOnnxTypes.begin());
  if (type == from) return ReshapeOp{};
  Require(type == ElementType::kFloat || (type == ElementType::kFloat16 && from == ElementType::kFloat),
          node.op(), " from ", TypeName(from), " to ONNX's type ", onnx,
          ", lowbit casts float16 and integers to float32, and float32 to float16");
  return CastOp{type};
}

// ---- moving elements

StandardNode DecodeTranspose(const StandardReader& node) {
  node.RequireInputs(1);
  node.TypeOf(0);
  TransposeOp op{node.Ints("perm")};
  CheckLength(node, "perm", op.perm.size());
  std::vector<int64_t> sorted = op.perm;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    Require(sorted[i] == static_cast<int64_t>(i), node.op(), ": attribute 'perm' is ", ShapeText(op.perm),
            ", expected every dim once");
  }
  return op;
}

StandardNode DecodeSlice(const StandardReader& node) {
  constexpr int kInputsSince = 10;
  node.RequireInputs(node.version() < kInputsSince ? 1 : 5);
  node.TypeOf(0);
  SliceOp op;
  op.starts = node.AttributeOrInput("starts", 1, kInputsSince);
  op.ends = node.AttributeOrInput("ends", 2, kInputsSince);
  op.axes = node.AttributeOrInput("axes", 3, kInputsSince);
  if (node.version() >= kInputsSince && node.Present(4)) op.steps = node.ConstantInts(4, "steps");
  CheckLength(node, "starts", op.starts.size());
  if (op.axes.empty()) {
    for (size_t i = 0; i < op.starts.size(); ++i) op.axes.push_back(static_cast<int64_t>(i));
  }
  if (op.steps.empty()) op.steps.assign(op.starts.size(), 1);
  const size_t count = op.starts.size();
  Require(op.ends.size() == count && op.axes.size() == count && op.steps.size() == count, node.op(), ": ",
          count, " starts, ", op.ends.size(), " ends, ", op.axes.size(), " axes and ", op.steps.size(),
          " steps, expected as many of each");
  CheckAxes(node, op.axes);
  for (const int64_t step : op.steps) {
    Require(step != 0 && step >= -kMaxAttribute && step <= kMaxAttribute, node.op(), ": a step of ", step,
            ", expected 1..", kMaxAttribute, " or its negative");
  }
  return op;
}

StandardNode DecodeSplit(const StandardReader& node) {
  constexpr int kSizesAreInput = 13, kMayBeUneven = 18;
  node.RequireVersion(2);
  node.RequireInputs(node.version() < kSizesAreInput ? 1 : 2);
  node.TypeOf(0);
  SplitOp op;
  op.axis = node.Axis("axis", 0);
  op.parts = static_cast<int64_t>(node.Outputs().count);
  op.part = static_cast<int64_t>(node.Outputs().meant);
  op.sizes = node.AttributeOrInput("split", 1, kSizesAreInput);
  if (node.version() >= kMayBeUneven) {
    const bool stated = node.Has("num_outputs"), sized = node.Present(1);
    Require(stated != sized, node.op(), " has ", stated ? "both" : "neither of",
            " input 'split' and attribute 'num_outputs', expected one of them");
    const int64_t parts = node.Int("num_outputs", op.parts, 1, kMaxAttribute);
    Require(parts == op.parts, node.op(), ": attribute 'num_outputs' is ", parts, ", it has ", op.parts,
            " outputs");
    op.uneven = stated;
  }
  const bool sized = node.version() < kSizesAreInput ? node.Has("split") : node.Present(1);
  Require(!sized || op.sizes.size() == node.Outputs().count, node.op(), ": 'split' has ", op.sizes.size(),
          " sizes for ", op.parts, " outputs");
  for (const int64_t size : op.sizes) {
    Require(size >= 0 && size <= kMaxPixels, node.op(), ": 'split' holds ", size, ", expected 0..",
            kMaxPixels);
  }
  return op;
}

// The bytes of the one element of a constant.
std::vector<uint8_t> ElementBytes(const StandardReader& node, size_t index, std::string_view name,
                                  ElementType type) {
  const ConstTensor& tensor = node.Constant(index, name, type);
  Require(BoundedCount(tensor.shape) == 1, node.op(), ": input '", name, "' has shape ",
          ShapeText(tensor.shape), ", expected one element");
  const auto* bytes = static_cast<const uint8_t*>(tensor.data);
  return {bytes, bytes + ElementSize(type)};
}

StandardNode DecodePad(const StandardReader& node) {
  constexpr int kInputsSince = 11;
  node.RequireVersion(2);
  node.RequireInputs(node.version() < kInputsSince ? 1 : 4);
  const std::string mode = node.String("mode", "constant");
  Require(mode == "constant", node.op(), ": mode '", mode, "', lowbit pads with a constant alone");
  const ElementType type = node.TypeOf(0);
  PadOp op;
  op.pads = node.AttributeOrInput("pads", 1, kInputsSince);
  CheckLength(node, "pads", op.pads.size() / 2);
  for (const int64_t pad : op.pads) {
    Require(pad >= 0 && pad <= kMaxAttribute, node.op(), ": 'pads' holds ", pad, ", expected 0..",
            kMaxAttribute);
  }
  op.value.assign(ElementSize(type), 0);
  if (node.version() < kInputsSince) {
    node.RequireFloat(0);
    const float value = node.Float("value", 0);
    const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
    op.value.assign(bytes, bytes + sizeof(value));
  } else if (node.Present(2)) {
    op.value = ElementBytes(node, 2, "constant_value", type);
  }
  if (node.Present(3)) op.axes = node.ConstantInts(3, "axes");
  CheckAxes(node, op.axes);
  Require(op.pads.size() % 2 == 0 && (op.axes.empty() || op.pads.size() == 2 * op.axes.size()), node.op(),
          ": ", op.pads.size(), " pads for ", op.axes.size(), " axes, expected a begin and an end for each");
  return op;
}

StandardNode DecodeResizing(const StandardReader& node) {
  node.RequireVersion(11);
  node.RequireInputs(4);
  node.TypeOf(0);
  const std::string mode = node.String("mode", "nearest");
  Require(mode == "nearest", node.op(), ": mode '", mode, "', lowbit copies pixels alone");
  const std::string policy = node.String("keep_aspect_ratio_policy", "stretch");
  Require(policy == "stretch", node.op(), ": attribute 'keep_aspect_ratio_policy' is '", policy,
          "', expected stretch");
  Require(!node.Flag("antialias"), node.op(), ": attribute 'antialias' is 1, expected 0");
  for (const char* const other : {"cubic_coeff_a", "exclude_outside", "extrapolation_value"})
    node.Ignore(other);
  if (node.Present(1)) node.Constant(1, "roi");  // it means nothing here, but may not be fed
  NearestOp op;
  op.along.coordinates =
      ResizeCoordinates(node.op(), node.String("coordinate_transformation_mode", "half_pixel"));
  op.along.nearest = ResizeNearest(node.op(), node.String("nearest_mode", "round_prefer_floor"));
  if (node.Present(2)) op.along.scales = node.ConstantFloats(2, "scales");
  if (node.Present(3)) op.along.sizes = node.ConstantInts(3, "sizes");
  op.axes = node.Ints("axes");
  CheckLength(node, "scales", op.along.scales.size());
  CheckLength(node, "sizes", op.along.sizes.size());
  CheckAxes(node, op.axes);
  Require(op.along.scales.empty() || op.along.sizes.empty(), node.op(),
          " has both 'scales' and 'sizes', expected one of them");
  CheckResizing(node.op(), op.along);
  Require(op.axes.empty() || op.axes.size() == op.along.Spatial(), node.op(), ": ", op.along.Spatial(),
          " scales or sizes for ", op.axes.size(), " axes");
  return op;
}

StandardNode DecodeConcat(const StandardReader& node) {
  node.RequireVersion(4);
  Require(node.InputCount() >= 1, node.op(), " has no inputs");
  for (size_t i = 0; i < node.InputCount(); ++i) {
    Require(node.TypeOf(i) == node.TypeOf(0), node.op(), ": inputs of different element types");
  }
  Require(node.Has("axis"), node.op(), ": attribute 'axis' is missing");
  return JoinOp{node.Axis("axis", 0)};
}

// ---- float32, element by element

template <bool kLog>
StandardNode DecodeSoftmax(const StandardReader& node) {
  node.RequireInputs(1);
  node.RequireFloat(0);
  const bool flattened = node.version() < 13;
  return SoftmaxOp{node.Axis("axis", flattened ? 1 : -1), flattened, kLog};
}

template <UnaryKind kKind>
StandardNode DecodeUnary(const StandardReader& node) {
  node.RequireInputs(1);
  node.RequireFloat(0);
  node.Ignore("consumed_inputs");  // op set 1: where the result may be written
  UnaryOp op{kKind, 0, 0};
  if (kKind == UnaryKind::kLeakyRelu) op.a = node.Float("alpha", 0.01f);
  if (kKind == UnaryKind::kHardSigmoid) {
    op.a = node.Float("alpha", 0.2f);
    op.b = node.Float("beta", 0.5f);
  }
  return op;
}

StandardNode DecodeClip(const StandardReader& node) {
  constexpr int kInputsSince = 11;
  node.RequireInputs(node.version() < kInputsSince ? 1 : 3);
  node.RequireFloat(0);
  UnaryOp op{UnaryKind::kClip, std::numeric_limits<float>::lowest(), std::numeric_limits<float>::max()};
  if (node.version() < kInputsSince) {
    node.Ignore("consumed_inputs");
    op.a = node.Float("min", op.a);
    op.b = node.Float("max", op.b);
  } else {
    if (node.Present(1)) op.a = node.ConstantFloat(1, "min");
    if (node.Present(2)) op.b = node.ConstantFloat(2, "max");
  }
  Require(!std::isnan(op.a) && !std::isnan(op.b), node.op(), " between ", op.a, " and ", op.b,
          ", expected numbers");
  return op;
}

template <FloatBinaryKind kKind>
StandardNode DecodeBinary(const StandardReader& node) {
  node.RequireVersion(7);  // numpy's broadcasting
  node.RequireInputs(2);
  node.RequireFloat(0);
  node.RequireFloat(1);
  return FloatBinaryOp{kKind};
}

// ---- float32 products

// Constant B as [n, k], times `factor`.
void ReadFactor(const StandardReader& node, bool transposed, float factor, FloatGemmOp& op) {
  const std::vector<int64_t>& shape = node.Constant(1, "B", ElementType::kFloat).shape;
  Require(shape.size() == 2 && shape[0] >= 1 && shape[1] >= 1, node.op(), ": B has shape ", ShapeText(shape),
          ", expected a matrix");
  const std::vector<float> b = node.ConstantFloats(1, "B");
  op.k = shape[transposed ? 1 : 0];
  op.n = shape[transposed ? 0 : 1];
  const auto k = static_cast<size_t>(op.k), n = static_cast<size_t>(op.n);
  op.weights.resize(b.size());
  for (size_t row = 0; row < n; ++row) {
    for (size_t i = 0; i < k; ++i) {
      op.weights[row * k + i] = factor * (transposed ? b[row * k + i] : b[i * n + row]);
    }
  }
}

StandardNode DecodeGemm(const StandardReader& node) {
  node.RequireVersion(7);
  node.RequireInputs(3);
  node.RequireFloat(0);
  FloatGemmOp op;
  op.transpose_a = node.Flag("transA");
  ReadFactor(node, node.Flag("transB"), node.Float("alpha", 1), op);
  const float beta = node.Float("beta", 1);
  if (!node.Present(2)) return op;
  const std::vector<int64_t>& shape = node.Constant(2, "C", ElementType::kFloat).shape;
  const std::vector<float> c = node.ConstantFloats(2, "C");
  const int64_t columns = shape.empty() ? 1 : shape.back();
  Require(shape.size() <= 2 && (shape.size() < 2 || shape[0] == 1) && (columns == 1 || columns == op.n),
          node.op(), ": C has shape ", ShapeText(shape), ", lowbit adds one number per column: [", op.n, "]");
  op.bias.resize(static_cast<size_t>(op.n));
  for (size_t i = 0; i < op.bias.size(); ++i) op.bias[i] = beta * c[columns == 1 ? 0 : i];
  return op;
}

StandardNode DecodeMatMul(const StandardReader& node) {
  node.RequireInputs(2);
  node.RequireFloat(0);
  node.RequireFloat(1);
  const auto rank = [&](size_t index) { return node.Dims(index) ? node.Dims(index)->size() : 0; };
  if (!node.IsConstant(1) || rank(1) > 2) {
    Require(rank(0) >= 2 && rank(1) >= 2, node.op(),
            ": two tensors of rank 2 or more are multiplied, of A or B that is not known");
    return FloatMatmulOp{};
  }
  FloatGemmOp op;
  op.is_matmul = true;
  ReadFactor(node, false, 1, op);
  return op;
}

// ---- float32 windows

AutoPad ReadAutoPad(const StandardReader& node) {
  const std::string text = node.String("auto_pad", "NOTSET");
  if (text == "NOTSET" || text == "VALID") return AutoPad::kExplicit;
  if (text == "SAME_UPPER") return AutoPad::kSameUpper;
  if (text == "SAME_LOWER") return AutoPad::kSameLower;
  Fail(node.op(), ": attribute 'auto_pad' is '", text, "', expected NOTSET, VALID, SAME_UPPER or SAME_LOWER");
}

SpatialNumbers ReadSpatial(const StandardReader& node, std::string_view name,
                           const std::vector<int64_t>& values, size_t spatial) {
  Require(values.empty() || values.size() == spatial, node.op(), ": attribute '", name, "' has ",
          values.size(), " numbers, expected ", spatial);
  SpatialNumbers numbers{1, 1, 1};
  for (size_t i = 0; i < values.size(); ++i) {
    Require(values[i] >= 1 && values[i] <= kMaxAttribute, node.op(), ": attribute '", name, "' holds ",
            values[i], ", expected 1..", kMaxAttribute);
    numbers[i + kMaxSpatial - spatial] = values[i];
  }
  return numbers;
}

Window ReadWindow(const StandardReader& node, const std::vector<int64_t>& kernel) {
  const size_t spatial = kernel.size();
  Require(spatial == 1 || spatial == 2, node.op(), " with ", spatial, " spatial dims, expected 1 or 2");
  Window window;
  window.spatial = static_cast<int>(spatial);
  window.kernel = ReadSpatial(node, "kernel_shape", kernel, spatial);
  window.stride = ReadSpatial(node, "strides", node.Ints("strides"), spatial);
  window.dilation = ReadSpatial(node, "dilations", node.Ints("dilations"), spatial);
  const std::vector<int64_t> pads = node.Ints("pads");
  if (node.String("auto_pad", "NOTSET") != "NOTSET") return window;  // then pads mean nothing
  Require(pads.empty() || pads.size() == 2 * spatial, node.op(), ": attribute 'pads' has ", pads.size(),
          " numbers, expected ", 2 * spatial);
  for (size_t i = 0; i < pads.size(); ++i) {
    Require(pads[i] >= 0 && pads[i] <= kMaxAttribute, node.op(), ": attribute 'pads' holds ", pads[i],
            ", expected 0..", kMaxAttribute);
    (i < spatial ? window.pad_begin : window.pad_end)[i % spatial + kMaxSpatial - spatial] = pads[i];
  }
  return window;
}

StandardNode DecodeConv(const StandardReader& node) {
  node.RequireInputs(3);
  node.RequireFloat(0);
  const std::vector<int64_t>& shape = node.Constant(1, "W", ElementType::kFloat).shape;
  Require(shape.size() == 3 || shape.size() == 4, node.op(), ": W has shape ", ShapeText(shape),
          ", expected rank 3 or 4");
  for (const int64_t dim : shape) {
    Require(dim >= 1 && dim <= kMaxAttribute, node.op(), ": W has shape ", ShapeText(shape));
  }
  const std::vector<int64_t> kernel(shape.begin() + 2, shape.end()), stated = node.Ints("kernel_shape");
  Require(stated.empty() || stated == kernel, node.op(), ": attribute 'kernel_shape' is ", ShapeText(stated),
          ", W has shape ", ShapeText(shape));
  FloatConvOp op;
  op.group = node.Int("group", 1, 1, kMaxAttribute);
  op.out_channels = shape[0];
  op.in_channels = CheckedProduct(shape[1], op.group, "the number of input channels");
  Require(op.in_channels <= kMaxAttribute && op.out_channels % op.group == 0, node.op(), ": group ", op.group,
          " does not fit W of shape ", ShapeText(shape));
  op.window = ReadWindow(node, kernel);
  op.auto_pad = ReadAutoPad(node);
  op.weights = node.ConstantFloats(1, "W");
  if (node.Present(2)) op.bias = node.ConstantFloats(2, "B");
  Require(op.bias.empty() || static_cast<int64_t>(op.bias.size()) == op.out_channels, node.op(), ": B has ",
          op.bias.size(), " elements, expected ", op.out_channels);
  return op;
}

template <FloatPoolOp::Kind kKind>
StandardNode DecodePool(const StandardReader& node) {
  node.RequireInputs(1);
  node.RequireFloat(0);
  FloatPoolOp op;
  op.kind = kKind;
  op.window = ReadWindow(node, node.Ints("kernel_shape"));
  op.auto_pad = ReadAutoPad(node);
  op.ceil_mode = node.Flag("ceil_mode");
  if (kKind == FloatPoolOp::Kind::kAverage) {
    op.count_include_pad = node.Flag("count_include_pad");
    Require(op.window.dilation == SpatialNumbers{1, 1, 1}, node.op(),
            " with dilations, lowbit averages without them");
  } else {
    node.Ignore("storage_order");  // of the second output, the indices
  }
  // As in ONNX Runtime: an undilated window always meets the image.
  for (size_t d = kMaxSpatial - static_cast<size_t>(op.window.spatial); d < kMaxSpatial; ++d) {
    const int64_t pad = std::max(op.window.pad_begin[d], op.window.pad_end[d]);
    Require(pad < op.window.kernel[d], node.op(), ": attribute 'pads' holds ", pad,
            ", expected less than the kernel's size ", op.window.kernel[d]);
  }
  CheckedProduct(op.window.kernel[1], op.window.kernel[2], "kernel_shape");
  return op;
}

template <FloatPoolOp::Kind kKind>
StandardNode DecodeGlobalPool(const StandardReader& node) {
  node.RequireInputs(1);
  node.RequireFloat(0);
  FloatPoolOp op;
  op.kind = kKind;
  return op;
}

// ---- QuantizeLinear, DequantizeLinear

struct Grids {
  std::vector<float> scales;
  std::vector<int32_t> zero_points;
};

// Inputs 1 and 2: one number for all, or one for each entry of the last dim.
Grids ReadGrids(const StandardReader& node, ElementType codes) {
  Require(node.Int("block_size", 0, 0, kMaxAttribute) == 0, node.op(),
          ": attribute 'block_size' is given, lowbit quantizes per tensor or per channel");
  Grids grids{node.ConstantFloats(1, "scale"), {}};
  const size_t count = grids.scales.size();
  const std::vector<int64_t>& shape = node.Constant(1, "scale").shape;
  Require(count >= 1 && shape.size() <= 1, node.op(), ": the scale has shape ", ShapeText(shape),
          ", expected a scalar or [channels]");
  for (const float scale : grids.scales) {
    Require(std::isfinite(scale) && scale > 0, node.op(), ": a scale of ", scale,
            ", expected finite scales > 0");
  }
  grids.zero_points.assign(count, 0);
  if (node.Present(2)) {
    const ConstTensor& zero_points = node.Constant(2, "zero_point", codes);
    Require(BoundedCount(zero_points.shape) == static_cast<int64_t>(count), node.op(), ": ", count,
            " scales and zero points of shape ", ShapeText(zero_points.shape), ", expected as many of each");
    const auto* bytes = static_cast<const uint8_t*>(zero_points.data);
    for (size_t i = 0; i < count; ++i) {
      grids.zero_points[i] = codes == ElementType::kInt8 ? static_cast<int8_t>(bytes[i]) : int32_t{bytes[i]};
    }
  }
  const int64_t axis = node.Axis("axis", 1);
  if (count == 1) return grids;
  const auto& dims = node.Dims(0);
  Require(axis == -1 || (dims && axis + 1 == static_cast<int64_t>(dims->size())), node.op(),
          ": one scale per channel along axis ", axis, ", lowbit takes the last one alone");
  return grids;
}

StandardNode DecodeQuantizeLinear(const StandardReader& node) {
  constexpr int64_t kOnnxFloat = 1, kOnnxUInt8 = 2, kOnnxInt8 = 3;
  node.RequireInputs(3);
  node.RequireFloat(0);
  node.Ignore("saturate");                                     // for 8-bit floats alone
  static_cast<void>(node.Int("precision", 0, 0, kOnnxFloat));  // of the division; float32 is what it is
  const int64_t stated = node.Int("output_dtype", 0, 0, std::numeric_limits<int32_t>::max());
  Require(stated == 0 || stated == kOnnxUInt8 || stated == kOnnxInt8, node.op(), " to ONNX type ", stated,
          ", expected uint8 or int8");
  ElementType codes = stated == kOnnxInt8 ? ElementType::kInt8 : ElementType::kUInt8;
  if (node.Present(2)) {
    const ElementType given = node.Constant(2, "zero_point").type;
    Require(given == ElementType::kUInt8 || given == ElementType::kInt8, node.op(),
            ": the zero point is neither uint8 nor int8");
    Require(stated == 0 || codes == given, node.op(),
            ": attribute 'output_dtype' and the zero point have different types");
    codes = given;
  }
  const Grids given = ReadGrids(node, codes);
  const bool is_signed = codes == ElementType::kInt8;
  const OperandType range = Storage(is_signed);
  std::vector<Quantizer> grids;
  grids.reserve(given.scales.size());
  for (size_t i = 0; i < given.scales.size(); ++i) {
    grids.push_back(
        {true, given.scales[i], given.zero_points[i], range.MinCode(), range.MaxCode(), is_signed});
  }
  return MakeQuantizeNode(std::move(grids), false);
}

StandardNode DecodeDequantizeLinear(const StandardReader& node) {
  constexpr int64_t kOnnxFloat = 1;
  node.RequireInputs(3);
  const ElementType codes = node.TypeOf(0);
  Require(codes == ElementType::kUInt8 || codes == ElementType::kInt8, node.op(),
          ": x is neither uint8 nor int8");
  const int64_t stated = node.Int("output_dtype", 0, 0, std::numeric_limits<int32_t>::max());
  Require(stated == 0 || stated == kOnnxFloat, node.op(), " to ONNX type ", stated, ", expected float32");
  Grids grids = ReadGrids(node, codes);
  return MakeDequantizeNode(codes == ElementType::kInt8, std::move(grids.scales),
                            std::move(grids.zero_points), false);
}

using Decoder = StandardNode (*)(const StandardReader&);

const std::map<std::string_view, Decoder>& Decoders() {
  using Pool = FloatPoolOp::Kind;
  static const std::map<std::string_view, Decoder> decoders = {
      {"Add", DecodeBinary<FloatBinaryKind::kAdd>},
      {"AveragePool", DecodePool<Pool::kAverage>},
      {"Cast", DecodeCast},
      {"Clip", DecodeClip},
      {"Concat", DecodeConcat},
      {"Conv", DecodeConv},
      {"DequantizeLinear", DecodeDequantizeLinear},
      {"Div", DecodeBinary<FloatBinaryKind::kDiv>},
      {"Dropout", DecodeDropout},
      {"Flatten", DecodeFlatten},
      {"Gemm", DecodeGemm},
      {"GlobalAveragePool", DecodeGlobalPool<Pool::kGlobalAverage>},
      {"GlobalMaxPool", DecodeGlobalPool<Pool::kGlobalMax>},
      {"HardSigmoid", DecodeUnary<UnaryKind::kHardSigmoid>},
      {"HardSwish", DecodeUnary<UnaryKind::kHardSwish>},
      {"Identity", DecodeIdentity},
      {"LeakyRelu", DecodeUnary<UnaryKind::kLeakyRelu>},
      {"LogSoftmax", DecodeSoftmax<true>},
      {"MatMul", DecodeMatMul},
      {"MaxPool", DecodePool<Pool::kMax>},
      {"Mul", DecodeBinary<FloatBinaryKind::kMul>},
      {"Pad", DecodePad},
      {"QuantizeLinear", DecodeQuantizeLinear},
      {"Relu", DecodeUnary<UnaryKind::kRelu>},
      {"Reshape", DecodeReshape},
      {"Resize", DecodeResizing},
      {"Sigmoid", DecodeUnary<UnaryKind::kSigmoid>},
      {"Slice", DecodeSlice},
      {"Softmax", DecodeSoftmax<false>},
      {"Split", DecodeSplit},
      {"Squeeze", DecodeSqueeze<ReshapeOp::Kind::kSqueeze>},
      {"Sub", DecodeBinary<FloatBinaryKind::kSub>},
      {"Tanh", DecodeUnary<UnaryKind::kTanh>},
      {"Transpose", DecodeTranspose},
      {"Unsqueeze", DecodeSqueeze<ReshapeOp::Kind::kUnsqueeze>},
  };
  return decoders;
}

}  // namespace

StandardNode DecodeStandard(std::string_view op, int since_version, const AttributeMap& attributes,
                            std::span<const StandardInput> inputs, StandardOutputs outputs) {
  const auto decoder = Decoders().find(op);
  Require(decoder != Decoders().end(), "lowbit does not run ", op);
  const StandardReader node(op, since_version, attributes, inputs, outputs);
  StandardNode decoded = decoder->second(node);
  node.RequireNothingElse();
  return decoded;
}

}  // namespace lowbit
