// LowBitResize: nearest neighbour, codes are copied.
#include <algorithm>
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

template <size_t kCount>
size_t Choice(const NodeReader& node, const char* attribute, const char* const (&names)[kCount]) {
  const std::string& value = node.String(attribute);
  for (size_t i = 0; i < kCount; ++i) {
    if (value == names[i]) return i;
  }
  std::string expected;
  for (const char* name : names) expected += (expected.empty() ? "" : ", ") + std::string(name);
  Fail(node.op(), ": attribute '", attribute, "' is '", value, "', expected one of ", expected);
}

}  // namespace

ResizeNode DecodeResize(const NodeReader& node) {
  constexpr const char* kCoordinates[] = {"half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"};
  constexpr const char* kNearest[] = {"round_prefer_floor", "round_prefer_ceil", "floor", "ceil"};
  ResizeNode out;
  out.is_signed = node.EncodingOf("x_encoding") == Encoding::kSigned;
  out.scales = node.Floats("scales");
  out.sizes = node.Ints("sizes");
  out.coordinates =
      static_cast<ResizeNode::Coordinates>(Choice(node, "coordinate_transformation_mode", kCoordinates));
  out.nearest = static_cast<ResizeNode::Nearest>(Choice(node, "nearest_mode", kNearest));
  Require(!out.scales.empty() || !out.sizes.empty(), node.op(), ": one of 'scales' and 'sizes' is needed");
  for (const float scale : out.scales) {
    Require(std::isfinite(scale) && scale > 0, node.op(), ": attribute 'scales' holds ", scale,
            ", expected finite scales > 0");
  }
  for (const int64_t size : out.sizes) {
    Require(size >= 1 && size <= kMaxAttribute, node.op(), ": attribute 'sizes' holds ", size,
            ", expected 1..", kMaxAttribute);
  }
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

std::vector<int64_t> OutputDims(const ResizeNode& node, const FedShape& x) {
  CheckFed(x, CodeType(node.is_signed), "x");
  const size_t spatial = node.Spatial();
  Require(x.dims.size() == spatial + 2, "x has shape ", ShapeText(x.dims), ", expected rank ", spatial + 2);
  std::vector<int64_t> y = ToVector(x.dims);
  for (size_t i = 0; i < spatial; ++i) {
    const int64_t in = x.dims[i + 1];
    Require(in >= 1, "x has shape ", ShapeText(x.dims), ", expected at least one pixel");
    if (node.scales.empty()) {
      y[i + 1] = node.sizes[i];
      continue;
    }
    const float out = std::floor(static_cast<float>(in) * node.scales[i]);
    Require(out >= 1 && out <= static_cast<float>(kMaxAttribute), "scale ", node.scales[i], " makes ", out,
            " of ", in, " pixels");
    y[i + 1] = static_cast<int64_t>(out);
  }
  BoundedCount(y);
  return y;
}

}  // namespace lowbit
