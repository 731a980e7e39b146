// LowBitResize: where every output index reads the image, and with which weights.
#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>

#include "core/nodes/node_kinds.h"
#include "core/status.h"

namespace lowbit {
namespace {

// Where output index `o` lies in the image: ONNX's formulas in float32, each operation rounded once. No
// scale: the node gives sizes, and their ratio is the scale. Asymmetric coordinates do without it, as in ONNX
// Runtime: a rounded ratio would move positions that lie halfway between two pixels.
float SourcePosition(ResizeNode::Coordinates mode, float o, std::optional<float> given_scale, int64_t in,
                     int64_t out) {
  const float scale = given_scale.value_or(static_cast<float>(out) / static_cast<float>(in));
  switch (mode) {
    case ResizeNode::Coordinates::kAsymmetric:
      return given_scale ? o / scale : o * static_cast<float>(in) / static_cast<float>(out);
    case ResizeNode::Coordinates::kAlignCorners:
      return out > 1 ? o * static_cast<float>(in - 1) / static_cast<float>(out - 1) : 0.0f;
    case ResizeNode::Coordinates::kPytorchHalfPixel:
      if (out <= 1) return 0.0f;
      break;
    case ResizeNode::Coordinates::kHalfPixelSymmetric: {
      const float length = static_cast<float>(in);
      const double begin = length / 2.0f * (1.0f - static_cast<float>(out) / (scale * length));
      return static_cast<float>(begin + (o + 0.5) / static_cast<double>(scale) - 0.5);
    }
    case ResizeNode::Coordinates::kHalfPixel:
      break;
  }
  return (o + 0.5f) / scale - 0.5f;
}

// Only ties distinguish the two round modes.
int64_t SourceIndex(ResizeNode::Nearest mode, float position, int64_t in) {
  // Clipping first keeps the conversion to int defined; it cannot change the clipped result.
  const float limit = static_cast<float>(in);
  const float x = position > -1.0f ? std::min(position, limit) : -1.0f;
  const float below = std::floor(x), fraction = x - below;
  float chosen = below;
  switch (mode) {
    case ResizeNode::Nearest::kRoundPreferFloor:
      chosen = fraction > 0.5f ? below + 1 : below;
      break;
    case ResizeNode::Nearest::kRoundPreferCeil:
      chosen = fraction >= 0.5f ? below + 1 : below;
      break;
    case ResizeNode::Nearest::kFloor:
      break;
    case ResizeNode::Nearest::kCeil:
      chosen = std::ceil(x);
      break;
  }
  return std::clamp<int64_t>(static_cast<int64_t>(chosen), 0, in - 1);
}

// Indices from far outside the image would not fit an int64.
float Bounded(float position, int64_t in) {
  const float limit = static_cast<float>(in) + 4.0f;
  return position > -4.0f ? std::min(position, limit) : -4.0f;
}

using Weights4 = std::array<float, 4>;

Weights4 CubicWeights(float a, float f) {
  const float g = 1.0f - f, t = f + 1.0f, u = g + 1.0f;
  const auto outer = [a](float d) { return ((a * d - 5.0f * a) * d + 8.0f * a) * d - 4.0f * a; };
  const auto inner = [a](float d) { return ((a + 2.0f) * d - (a + 3.0f)) * d * d + 1.0f; };
  return {outer(t), inner(f), inner(g), outer(u)};
}

// Taps outside the image lose their weight to the others.
void Exclude(int64_t first, int64_t in, Weights4& weights) {
  for (int64_t k = 0; k < 4; ++k) {
    if (first + k < 0 || first + k >= in) weights[static_cast<size_t>(k)] = 0.0f;
  }
  const float sum = ((weights[0] + weights[1]) + weights[2]) + weights[3];
  for (float& weight : weights) weight = weight / sum;
}

template <size_t kCount>
size_t Choice(std::string_view op, const char* attribute, std::string_view value,
              const char* const (&names)[kCount]) {
  for (size_t i = 0; i < kCount; ++i) {
    if (value == names[i]) return i;
  }
  std::string expected;
  for (const char* name : names) expected += (expected.empty() ? "" : ", ") + std::string(name);
  Fail(op, ": attribute '", attribute, "' is '", value, "', expected one of ", expected);
}

}  // namespace

ResizeNode::Coordinates ResizeCoordinates(std::string_view op, std::string_view name) {
  constexpr const char* kNames[] = {"half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric",
                                    "half_pixel_symmetric"};
  return static_cast<ResizeNode::Coordinates>(Choice(op, "coordinate_transformation_mode", name, kNames));
}

ResizeNode::Nearest ResizeNearest(std::string_view op, std::string_view name) {
  constexpr const char* kNames[] = {"round_prefer_floor", "round_prefer_ceil", "floor", "ceil"};
  return static_cast<ResizeNode::Nearest>(Choice(op, "nearest_mode", name, kNames));
}

void CheckResizing(std::string_view op, const ResizeNode& node) {
  Require(!node.scales.empty() || !node.sizes.empty(), op, ": one of 'scales' and 'sizes' is needed");
  for (const float scale : node.scales) {
    Require(std::isfinite(scale) && scale > 0, op, ": 'scales' holds ", scale,
            ", expected finite scales > 0");
  }
  for (const int64_t size : node.sizes) {
    Require(size >= 1 && size <= kMaxAttribute, op, ": 'sizes' holds ", size, ", expected 1..",
            kMaxAttribute);
  }
}

int64_t ResizeNode::OutputSize(size_t i, int64_t in) const {
  if (scales.empty()) return sizes[i];
  const float out = std::floor(static_cast<float>(in) * scales[i]);
  Require(out >= 1 && out <= static_cast<float>(kMaxAttribute), "scale ", scales[i], " makes ", out, " of ",
          in, " pixels");
  return static_cast<int64_t>(out);
}

ResizeNode DecodeResize(const NodeReader& node) {
  constexpr const char* kModes[] = {"nearest", "linear", "cubic"};
  ResizeNode out;
  const OperandType x = ReadCodes(node, "x_encoding");
  out.mode = static_cast<ResizeNode::Mode>(Choice(node.op(), "mode", node.String("mode"), kModes));
  out.is_signed = x.encoding == Encoding::kSigned;
  out.scales = node.Floats("scales");
  out.sizes = node.Ints("sizes");
  out.coordinates = ResizeCoordinates(node.op(), node.String("coordinate_transformation_mode"));
  out.nearest = ResizeNearest(node.op(), node.String("nearest_mode"));
  CheckResizing(node.op(), out);
  out.cubic_coeff_a = node.Float("cubic_coeff_a");
  out.exclude_outside = node.Flag("exclude_outside");
  if (out.mode == ResizeNode::Mode::kNearest) {
    for (const char* input : {"x_scale", "x_zero_point", "y_scale", "y_zero_point"}) {
      Require(!node.Present(input), node.op(), ": input '", input,
              "' is given in mode nearest, which copies");
    }
    return out;
  }
  constexpr float kMaxCoefficient = 16.0f;  // keeps weights and their sums finite
  Require(std::fabs(out.cubic_coeff_a) <= kMaxCoefficient, node.op(), ": attribute 'cubic_coeff_a' is ",
          out.cubic_coeff_a, ", expected -", kMaxCoefficient, "..", kMaxCoefficient);
  Require(!out.exclude_outside || out.mode == ResizeNode::Mode::kCubic, node.op(),
          ": attribute 'exclude_outside' is 1, which mode cubic alone can do");
  Require(out.Spatial() <= 3, node.op(), ": ", out.Spatial(), " spatial dims, expected at most 3 in mode ",
          kModes[static_cast<size_t>(out.mode)]);
  Require(node.Present("x_scale") && node.Present("y_scale"), node.op(),
          ": x_scale and y_scale are needed in mode ", kModes[static_cast<size_t>(out.mode)]);
  out.x_zero_point = node.ZeroPointOf("x_zero_point", x);
  out.quantizer = ReadQuantizer(node);
  out.multiplier = node.ScaleOf("x_scale") / out.quantizer.scale;
  return out;
}

std::vector<int64_t> ResizeNode::SourceIndices(size_t i, int64_t in, int64_t out) const {
  std::optional<float> scale;
  if (!scales.empty()) scale = scales[i];
  std::vector<int64_t> indices(static_cast<size_t>(out));
  for (int64_t o = 0; o < out; ++o) {
    const float position = SourcePosition(coordinates, static_cast<float>(o), scale, in, out);
    indices[static_cast<size_t>(o)] = SourceIndex(nearest, position, in);
  }
  return indices;
}

ResizeNode::Taps ResizeNode::TapsOf(size_t i, int64_t in, int64_t out) const {
  std::optional<float> scale;
  if (!scales.empty()) scale = scales[i];
  Taps taps;
  taps.count = mode == Mode::kCubic ? 4 : 2;
  taps.indices.reserve(static_cast<size_t>(out * taps.count));
  taps.weights.reserve(taps.indices.capacity());
  const auto add = [&](int64_t index, float weight) {
    taps.indices.push_back(std::clamp<int64_t>(index, 0, in - 1));
    taps.weights.push_back(weight);
  };
  for (int64_t o = 0; o < out; ++o) {
    const float exact = SourcePosition(coordinates, static_cast<float>(o), scale, in, out);
    if (mode == Mode::kLinear) {
      const float p = exact > 0.0f ? std::min(exact, static_cast<float>(in - 1)) : 0.0f;
      const float below = std::floor(p), f = p - below;
      add(static_cast<int64_t>(below), 1.0f - f);
      add(static_cast<int64_t>(below) + 1, f);
      continue;
    }
    const float p = Bounded(exact, in), below = std::floor(p);
    const int64_t first = static_cast<int64_t>(below) - 1;
    Weights4 weights = CubicWeights(cubic_coeff_a, p - below);
    if (exclude_outside) Exclude(first, in, weights);
    for (int64_t k = 0; k < 4; ++k) add(first + k, weights[static_cast<size_t>(k)]);
  }
  return taps;
}

std::vector<int64_t> OutputDims(const ResizeNode& node, const FedShape& x) {
  CheckFed(x, CodeType(node.is_signed), "x");
  const size_t spatial = node.Spatial();
  Require(x.dims.size() == spatial + 2, "x has shape ", ShapeText(x.dims), ", expected rank ", spatial + 2);
  std::vector<int64_t> y = ToVector(x.dims);
  for (size_t i = 0; i < spatial; ++i) {
    const int64_t in = x.dims[i + 1];
    Require(in >= 1, "x has shape ", ShapeText(x.dims), ", expected at least one pixel");
    y[i + 1] = node.OutputSize(i, in);
  }
  BoundedCount(y);
  return y;
}

}  // namespace lowbit
