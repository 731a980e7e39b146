// The nodes that sum products of codes: LowBitConv, LowBitConvTranspose, LowBitGemm and their AP names.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string_view>
#include <utility>

#include "core/nodes/node_kinds.h"
#include "core/packing.h"
#include "core/status.h"

namespace lowbit {
namespace {

// A zero point that belongs to a tensor of codes whose bit width the node does not state: any code of the
// storage type.
OperandType StorageType(Encoding encoding) { return {8, encoding}; }

void ParseWeights(const NodeReader& node, ConvSpec& spec) {
  const int64_t rows = spec.geometry.out_channels;
  const ConvGeometry& g = spec.geometry;
  const int64_t taps = ElementCount(std::array{g.kernel_d, g.kernel_h, g.kernel_w});
  const int64_t k = CheckedProduct(taps, spec.geometry.GroupIn(), "the length of a weight row");
  // Before anything of that size is allocated, the initializer must really be that long.
  const int64_t bits = CheckedProduct(k, spec.w.bits, "the bits of a weight row");
  const int64_t row_bytes = bits / 8 + (bits % 8 != 0 ? 1 : 0);
  const int64_t expected = CheckedProduct(rows, row_bytes, "the size of the weights");
  if (!node.HasConstant("w")) {
    // Arrays per channel then have nothing real to be measured against.
    constexpr int64_t kMaxRows = int64_t{1} << 20;
    Require(rows <= kMaxRows, node.op(), ": ", rows, " output channels without weights, expected at most ",
            kMaxRows);
    return;
  }
  const ConstTensor& w = node.Constant("w", ElementType::kUInt8);
  const int64_t found = ElementCount(w.shape);
  Require(found == expected, node.op(), ": input 'w' has ", found, " bytes, expected ", expected, " (", rows,
          " rows of ", k, " codes of ", spec.w.bits, " bits)");
  const uint8_t* packed = static_cast<const uint8_t*>(w.data);
  if (spec.w.bits == 8) {  // the stored byte is the code: one copy, into memory that is not zeroed before
    spec.weights.assign(packed, packed + found);
    return;
  }
  spec.weights.resize(static_cast<size_t>(CheckedProduct(rows, k, "the number of weights")));
  UnpackRows({packed, static_cast<size_t>(found)}, rows, k, spec.w.bits, spec.w.encoding == Encoding::kSigned,
             spec.weights);
}

void ParseOperands(const NodeReader& node, ConvSpec& spec) {
  const int64_t channels = spec.geometry.out_channels;
  spec.x = node.Operand("x_bits", "x_encoding", true);
  spec.w = node.Operand("w_bits", "w_encoding", true);
  ParseWeights(node, spec);
  // Everything below is at most as long as the weights, whose length was checked against real memory.
  spec.x_zero_point = node.ZeroPointOf("x_zero_point", spec.x);
  spec.w_zero_point = node.BroadcastInt32sOf("w_zero_point", channels);
  for (const int32_t zero_point : spec.w_zero_point) node.CheckZeroPoint("w_zero_point", zero_point, spec.w);
  spec.bias = node.Present("bias") ? node.Int32sOf("bias", channels)
                                   : std::vector<int32_t>(static_cast<size_t>(channels), 0);
}

// Largest |v(q)| over the codes of the operand.
int64_t LargestValue(OperandType type, int32_t zero_point) {
  if (type.encoding == Encoding::kBipolar) return 1;
  return std::max(std::abs(int64_t{type.MinCode()} - zero_point),
                  std::abs(int64_t{type.MaxCode()} - zero_point));
}

// Kernels accumulate in int32. Whatever codes arrive, |acc| <= max|v(x)| * sum of |v(w)| + |bias|; the node
// is refused when that leaves int32 in any channel. (A kernel may wrap on the way, its sum of raw codes and
// its correction for the zero points are congruent modulo 2^32 to the true value, which fits.)
void ProveAccumulatorFits(const NodeReader& node, const ConvSpec& spec) {
  const int64_t largest = LargestValue(spec.x, spec.x_zero_point);
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  for (size_t c = 0; c < spec.channel_values.size(); ++c) {
    const int64_t magnitude = spec.channel_values[c].magnitude, bias = std::abs(int64_t{spec.bias[c]});
    const int64_t bound = CheckedProduct(magnitude, largest, "the accumulator's bound") + bias;
    Require(bound <= kLimit, node.op(), ": the accumulator of output channel ", c, " may reach ", bound,
            " (sum of |weights| ", magnitude, " * largest activation ", largest, " + |bias| ", bias,
            "), int32 holds ", kLimit, ". Fewer bits or a smaller K are needed; leave this node in float");
  }
}

struct CodeRange {
  int32_t lo, hi;
};

CodeRange ReadRange(const NodeReader& node, std::string_view min, std::string_view max, OperandType type) {
  const int32_t lo =
      static_cast<int32_t>(node.OptionalInt(min, type.MinCode(), type.MinCode(), type.MaxCode()));
  const int32_t hi =
      static_cast<int32_t>(node.OptionalInt(max, type.MaxCode(), type.MinCode(), type.MaxCode()));
  Require(lo <= hi, node.op(), ": attribute '", min, "' is ", lo, ", above '", max, "' ", hi);
  return {lo, hi};
}

EpilogueKind ReadKind(const NodeReader& node) {
  const std::string& text = node.String("epilogue");
  if (text == "requantize") return EpilogueKind::kRequantize;
  if (text == "float") return EpilogueKind::kFloat;
  if (text == "thresholds") return EpilogueKind::kThresholds;
  if (text == "tail") return EpilogueKind::kTail;
  Fail(node.op(), ": attribute 'epilogue' is '", text, "', expected requantize, float, thresholds or tail");
}

// f32(x_scale * w_scale[c]), one rounding.
std::vector<float> AccumulatorScales(const NodeReader& node, int64_t channels) {
  const float x_scale = node.ScaleOf("x_scale");
  std::vector<float> out = node.BroadcastScalesOf("w_scale", channels);
  for (float& scale : out) {
    const float product = x_scale * scale;
    Require(std::isfinite(product), node.op(), ": x_scale * w_scale is ", x_scale, " * ", scale,
            ", which overflows float32");
    scale = product;
  }
  return out;
}

std::vector<float> Multipliers(const NodeReader& node, std::vector<float> acc_scales, float y_scale) {
  for (float& m : acc_scales) {
    const float quotient = m / y_scale;
    Require(std::isfinite(quotient), node.op(), ": the multiplier ", m, " / ", y_scale, " overflows float32");
    m = quotient;
  }
  return acc_scales;
}

void ParseOutputQuantizer(const NodeReader& node, Epilogue& e) {
  const OperandType y = node.Operand("y_bits", "y_encoding");
  const CodeRange range = ReadRange(node, "y_min", "y_max", y);
  e.y_lo = range.lo, e.y_hi = range.hi;
  e.y_signed = y.encoding == Encoding::kSigned;
  e.y_zero_point = node.ZeroPointOf("y_zero_point", StorageType(y.encoding));
  if (node.Present("y_scale")) e.y_scale = node.ScaleOf("y_scale");
}

void ParseResidual(const NodeReader& node, Epilogue& e) {
  e.has_residual = node.Present("residual");
  if (!e.has_residual) return;
  const Encoding encoding = node.EncodingOf("residual_encoding");
  e.residual_signed = encoding == Encoding::kSigned;
  e.residual_scale = node.ScaleOf("residual_scale");
  e.residual_zero_point = node.ZeroPointOf("residual_zero_point", StorageType(encoding));
}

void ParseRequantize(const NodeReader& node, Epilogue& e, std::vector<float> acc_scales) {
  Require(node.Present("y_scale"), node.op(), ": the requantize epilogue needs input 'y_scale'");
  if (e.has_residual) {
    const OperandType inner = StorageType(node.EncodingOf("inner_encoding"));
    const CodeRange range = ReadRange(node, "inner_min", "inner_max", inner);
    e.inner_scale = node.ScaleOf("inner_scale");
    e.zero_point = node.ZeroPointOf("inner_zero_point", inner);
    e.lo = range.lo, e.hi = range.hi;
  } else {
    e.zero_point = e.y_zero_point;
    e.lo = e.y_lo, e.hi = e.y_hi;
  }
  e.multiplier = Multipliers(node, std::move(acc_scales), e.has_residual ? e.inner_scale : e.y_scale);
}

void CheckThresholdRow(const NodeReader& node, const Epilogue& e, size_t c, OperandType y) {
  const int64_t dir = e.dir[c], last = e.base[c] + e.threshold_count;
  Require(dir == 1 || dir == -1, node.op(), ": threshold_dir[", c, "] is ", dir, ", expected +1 or -1");
  Require(e.base[c] >= y.MinCode() && e.base[c] <= y.MaxCode() && last >= y.MinCode() && last <= y.MaxCode(),
          node.op(), ": the codes ", e.base[c], "..", last, " of channel ", c, " leave the range ",
          y.MinCode(), "..", y.MaxCode(), " of y_bits");
  const int32_t* row = e.thresholds.data() + c * static_cast<size_t>(e.threshold_count);
  for (int64_t k = 1; k < e.threshold_count; ++k) {
    Require(dir * row[k - 1] <= dir * row[k], node.op(), ": the thresholds of channel ", c,
            " are not sorted: ", row[k - 1], ", ", row[k], " in direction ", dir);
  }
}

void ParseThresholds(const NodeReader& node, Epilogue& e, int64_t channels) {
  const std::vector<int64_t>& shape = node.Constant("thresholds", ElementType::kInt32).shape;
  Require(shape.size() == 2 && shape[0] == channels && shape[1] >= 1 && shape[1] <= 255, node.op(),
          ": input 'thresholds' has shape ", ShapeText(shape), ", expected [", channels, ", 1..255]");
  e.threshold_count = shape[1];
  e.thresholds =
      node.MatrixOfInt32s("thresholds", CheckedProduct(channels, shape[1], "the number of thresholds"));
  e.base = node.Int32sOf("threshold_base", channels);
  e.dir = node.Int32sOf("threshold_dir", channels);
  const OperandType y = node.Operand("y_bits", "y_encoding");
  for (size_t c = 0; c < static_cast<size_t>(channels); ++c) CheckThresholdRow(node, e, c, y);
}

TailStep ReadTailStep(const NodeReader& node, std::string_view text) {
  if (text == "bias") return TailStep::kBias;
  if (text == "affine") return TailStep::kAffine;
  if (text == "residual") return TailStep::kResidual;
  if (text == "relu") return TailStep::kRelu;
  if (text == "clip") return TailStep::kClip;
  if (text == "silu") return TailStep::kSilu;
  if (text == "hardswish") return TailStep::kHardSwish;
  Fail(node.op(), ": attribute 'tail' holds step '", text,
       "', expected bias, affine, residual, relu, clip, silu or hardswish");
}

std::vector<TailStep> ReadTailSteps(const NodeReader& node) {
  std::vector<TailStep> steps;
  std::string_view text = node.String("tail");
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const TailStep step = ReadTailStep(node, text.substr(0, comma));
    Require(std::find(steps.begin(), steps.end(), step) == steps.end(), node.op(), ": attribute 'tail' is '",
            node.String("tail"), "', a step stands twice");
    steps.push_back(step);
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
  }
  return steps;
}

std::vector<float> FiniteFloatsOf(const NodeReader& node, std::string_view input, int64_t count) {
  std::vector<float> out = node.FloatsOf(input, count);
  for (const float value : out)
    Require(std::isfinite(value), node.op(), ": input '", input, "' holds ", value);
  return out;
}

void ParseTail(const NodeReader& node, Epilogue& e, int64_t channels) {
  e.tail = ReadTailSteps(node);
  const auto has = [&](TailStep step) {
    return std::find(e.tail.begin(), e.tail.end(), step) != e.tail.end();
  };
  if (has(TailStep::kBias)) e.tail_bias = FiniteFloatsOf(node, "tail_bias", channels);
  if (has(TailStep::kAffine)) {
    e.tail_scale = FiniteFloatsOf(node, "tail_scale", channels);
    e.tail_shift = FiniteFloatsOf(node, "tail_shift", channels);
  }
  if (has(TailStep::kClip)) {
    e.clip_min = node.Float("clip_min");
    e.clip_max = node.Float("clip_max");
    Require(e.clip_min <= e.clip_max, node.op(), ": attribute 'clip_min' is ", e.clip_min, ", 'clip_max' ",
            e.clip_max);
  }
  Require(has(TailStep::kResidual) == e.has_residual, node.op(),
          ": the step 'residual' and the input 'residual' come together, only one is given");
}

Epilogue ParseEpilogue(const NodeReader& node, int64_t channels) {
  Epilogue e;
  e.kind = ReadKind(node);
  ParseResidual(node, e);
  ParseOutputQuantizer(node, e);
  std::vector<float> acc_scales = AccumulatorScales(node, channels);
  switch (e.kind) {
    case EpilogueKind::kRequantize:
      ParseRequantize(node, e, std::move(acc_scales));
      break;
    case EpilogueKind::kThresholds:
      ParseThresholds(node, e, channels);
      break;
    case EpilogueKind::kFloat:
      Require(!node.Present("y_scale"), node.op(),
              ": the float epilogue has no quantizer, input 'y_scale' is given");
      e.quantized_output = false;
      e.acc_scale = std::move(acc_scales);
      break;
    case EpilogueKind::kTail:
      ParseTail(node, e, channels);
      e.quantized_output = node.Present("y_scale");
      e.acc_scale = std::move(acc_scales);
      break;
  }
  Require(!e.has_residual || e.kind == EpilogueKind::kRequantize || e.kind == EpilogueKind::kTail, node.op(),
          ": a residual needs the requantize or the tail epilogue, got ", node.String("epilogue"));
  return e;
}

// Decodes and validates the operands, the constants and the epilogue of a node of the given geometry, and
// proves that no accumulator leaves int32.
ConvSpec ParseMatmul(const NodeReader& node, const ConvGeometry& geometry) {
  ConvSpec spec;
  spec.geometry = geometry;
  ParseOperands(node, spec);
  if (node.HasConstant("w")) {
    ReadWeightValues(spec);
    ProveAccumulatorFits(node, spec);
  }
  spec.epilogue = ParseEpilogue(node, geometry.out_channels);
  return spec;
}

ConvGeometry ParseConvGeometry(const AttributeReader& attributes, bool transposed) {
  ConvGeometry g;
  const Window window = ReadWindow(attributes, true);
  Require(!transposed || window.spatial < 3, attributes.op(), ": attribute 'kernel_shape' has ",
          window.spatial, " numbers, expected 1 or 2");
  g.kernel_d = window.kernel[0], g.kernel_h = window.kernel[1], g.kernel_w = window.kernel[2];
  g.stride_d = window.stride[0], g.stride_h = window.stride[1], g.stride_w = window.stride[2];
  g.dilation_d = window.dilation[0], g.dilation_h = window.dilation[1], g.dilation_w = window.dilation[2];
  g.pad_front = window.pad_begin[0], g.pad_top = window.pad_begin[1], g.pad_left = window.pad_begin[2];
  g.pad_back = window.pad_end[0], g.pad_bottom = window.pad_end[1], g.pad_right = window.pad_end[2];

  g.in_channels = attributes.Int("in_channels", 1, kMaxAttribute);
  g.out_channels = attributes.Int("out_channels", 1, kMaxAttribute);
  g.group = attributes.Int("group", 1, kMaxAttribute);
  Require(g.in_channels % g.group == 0 && g.out_channels % g.group == 0, attributes.op(), ": group ", g.group,
          " does not divide ", g.in_channels, " input and ", g.out_channels, " output channels");
  g.transposed = transposed;
  return g;
}

// ONNX: the extra pixels at the end of a dimension stay below its stride or its dilation.
int64_t OutputPadding(const AttributeReader& attributes, size_t i, int64_t stride, int64_t dilation) {
  const int64_t value = attributes.Ints("output_padding")[i];
  Require(value >= 0 && (value < stride || value < dilation), attributes.op(),
          ": attribute 'output_padding' holds ", value, ", expected 0.. below the stride ", stride,
          " or the dilation ", dilation);
  return value;
}

int SpatialDims(const AttributeReader& attributes) {
  return static_cast<int>(attributes.Ints("kernel_shape").size());
}

// Turns the geometry of columns into that of images.
VolumeLayout FlattenVolume(ConvGeometry& g) {
  if (g.IsPlanar()) return VolumeLayout::kPlanes;
  if (!g.IsColumnar()) return VolumeLayout::kWhole;
  g.kernel_h = std::exchange(g.kernel_d, 1);
  g.stride_h = std::exchange(g.stride_d, 1);
  g.dilation_h = std::exchange(g.dilation_d, 1);
  g.dilation_w = 1;
  g.pad_top = std::exchange(g.pad_front, 0);
  g.pad_bottom = std::exchange(g.pad_back, 0);
  return VolumeLayout::kColumns;
}

}  // namespace

MatmulNode DecodeConv(const NodeReader& node) {
  ConvGeometry g = ParseConvGeometry(node, false);
  MatmulLayout layout{.spatial = SpatialDims(node)};
  if (layout.spatial == 3) layout.volume = FlattenVolume(g);
  return {node.op(), ParseMatmul(node, g), layout};
}

MatmulNode DecodeConvTranspose(const NodeReader& node) {
  ConvGeometry g = ParseConvGeometry(node, true);
  const size_t spatial = node.Ints("kernel_shape").size(), given = node.Ints("output_padding").size();
  Require(given == 0 || given == spatial, node.op(), ": attribute 'output_padding' has ", given,
          " numbers, expected ", spatial);
  if (given == 2) g.output_pad_h = OutputPadding(node, 0, g.stride_h, g.dilation_h);
  if (given != 0) g.output_pad_w = OutputPadding(node, given - 1, g.stride_w, g.dilation_w);
  return {node.op(), ParseMatmul(node, g), {.spatial = SpatialDims(node)}};
}

MatmulNode DecodeGemm(const NodeReader& node) {
  ConvGeometry g;  // a 1x1 convolution over images of one pixel
  g.in_channels = node.Int("in_features", 1, kMaxAttribute);
  g.out_channels = node.Int("out_features", 1, kMaxAttribute);
  const int64_t axis = node.Int("axis", -kMaxAttribute, kMaxAttribute);
  return {node.op(), ParseMatmul(node, g), {.spatial = 0, .is_gemm = true, .axis = axis}};
}

}  // namespace lowbit
