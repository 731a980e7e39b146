// LowBitResize: nearest neighbour, codes are copied.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>

#include "core/operators/elementwise_common.h"
#include "core/operators/factories.h"
#include "core/status.h"

namespace lowbit {
namespace {

enum class Coordinates : uint8_t { kHalfPixel, kPytorchHalfPixel, kAlignCorners, kAsymmetric };
enum class Nearest : uint8_t { kRoundPreferFloor, kRoundPreferCeil, kFloor, kCeil };

struct ResizeSpec {
  bool is_signed = false;
  std::vector<float> scales;
  std::vector<int64_t> sizes;  // used when scales is empty
  Coordinates coordinates = Coordinates::kHalfPixel;
  Nearest nearest = Nearest::kRoundPreferFloor;
};

// Where output index `o` lies in the image: ONNX's formulas in float32, each operation rounded once. No
// scale: the node gives sizes, and their ratio is the scale. Asymmetric coordinates do without it, as in ONNX
// Runtime: a rounded ratio would move positions that lie halfway between two pixels.
float SourcePosition(Coordinates mode, float o, std::optional<float> given_scale, int64_t in, int64_t out) {
  const float scale = given_scale.value_or(static_cast<float>(out) / static_cast<float>(in));
  switch (mode) {
    case Coordinates::kAsymmetric:
      return given_scale ? o / scale : o * static_cast<float>(in) / static_cast<float>(out);
    case Coordinates::kAlignCorners:
      return out > 1 ? o * static_cast<float>(in - 1) / static_cast<float>(out - 1) : 0.0f;
    case Coordinates::kPytorchHalfPixel:
      if (out <= 1) return 0.0f;
      break;
    case Coordinates::kHalfPixel:
      break;
  }
  return (o + 0.5f) / scale - 0.5f;
}

// Only ties distinguish the two round modes.
int64_t SourceIndex(Nearest mode, float position, int64_t in) {
  // Clipping first keeps the conversion to int defined; it cannot change the clipped result.
  const float limit = static_cast<float>(in);
  const float x = position > -1.0f ? std::min(position, limit) : -1.0f;
  const float below = std::floor(x), fraction = x - below;
  float chosen = below;
  switch (mode) {
    case Nearest::kRoundPreferFloor:
      chosen = fraction > 0.5f ? below + 1 : below;
      break;
    case Nearest::kRoundPreferCeil:
      chosen = fraction >= 0.5f ? below + 1 : below;
      break;
    case Nearest::kFloor:
      break;
    case Nearest::kCeil:
      chosen = std::ceil(x);
      break;
  }
  return std::clamp<int64_t>(static_cast<int64_t>(chosen), 0, in - 1);
}

class ResizeOperator final : public Operator {
 public:
  explicit ResizeOperator(ResizeSpec spec) : spec_(std::move(spec)) {}

  std::vector<int64_t> OutputShape(FedTensors inputs) const override {
    const ConstTensor& x = Fed(inputs, 0, OutputType(), "x");
    const size_t spatial = Spatial();
    Require(x.shape.size() == spatial + 2, "x has shape ", ShapeText(x.shape), ", expected rank ",
            spatial + 2);
    std::vector<int64_t> y = x.shape;
    for (size_t i = 0; i < spatial; ++i) {
      const int64_t in = x.shape[i + 1];
      Require(in >= 1, "x has shape ", ShapeText(x.shape), ", expected at least one pixel");
      if (spec_.scales.empty()) {
        y[i + 1] = spec_.sizes[i];
        continue;
      }
      const float out = std::floor(static_cast<float>(in) * spec_.scales[i]);
      Require(out >= 1 && out <= static_cast<float>(kMaxAttribute), "scale ", spec_.scales[i], " makes ", out,
              " of ", in, " pixels");
      y[i + 1] = static_cast<int64_t>(out);
    }
    BoundedCount(y);
    return y;
  }
  ElementType OutputType() const override { return StorageOf(Storage(spec_.is_signed).encoding); }

  void Run(FedTensors inputs, void* y, ThreadPool& pool) const override {
    const std::vector<int64_t>& in = inputs[0]->shape;
    const std::vector<int64_t> shape = OutputShape(inputs);
    const int64_t channels = shape.back();
    if (BoundedCount(shape) == 0) return;

    // Byte offset of the source per output index, one list per spatial dim.
    std::vector<std::vector<int64_t>> offsets(Spatial());
    int64_t stride = channels;
    for (size_t i = Spatial(); i-- > 0;) {
      const int64_t in_size = in[i + 1], out_size = shape[i + 1];
      std::optional<float> scale;
      if (!spec_.scales.empty()) scale = spec_.scales[i];
      for (int64_t o = 0; o < out_size; ++o) {
        const float position =
            SourcePosition(spec_.coordinates, static_cast<float>(o), scale, in_size, out_size);
        offsets[i].push_back(SourceIndex(spec_.nearest, position, in_size) * stride);
      }
      stride *= in_size;
    }

    // A row is one run of output pixels along the last spatial dim.
    const std::vector<int64_t>& columns = offsets.back();
    const int64_t width = static_cast<int64_t>(columns.size());
    const int64_t rows = BoundedCount(std::span(shape).first(Spatial()));
    ParallelRanges(pool, rows, 2 * width * channels, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        int64_t rest = row, offset = 0;
        for (size_t i = Spatial() - 1; i-- > 0;) {
          const int64_t size = static_cast<int64_t>(offsets[i].size());
          offset += offsets[i][static_cast<size_t>(rest % size)];
          rest /= size;
        }
        const uint8_t* x = FedBytes(inputs, 0) + rest * stride + offset;
        uint8_t* out = static_cast<uint8_t*>(y) + row * width * channels;
        for (int64_t column = 0; column < width; ++column) {
          std::memcpy(out + column * channels, x + columns[static_cast<size_t>(column)],
                      static_cast<size_t>(channels));
        }
      }
    });
  }
  OperatorPlan Plan(FedTensors) const override { return ElementwisePlan("resize", ElementwiseReference()); }

 private:
  size_t Spatial() const { return spec_.scales.empty() ? spec_.sizes.size() : spec_.scales.size(); }

  ResizeSpec spec_;
};

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

LOWBIT_OPERATOR_FACTORY(CreateResize) {
  (void)options;  // one kernel serves every level
  constexpr const char* kCoordinates[] = {"half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"};
  constexpr const char* kNearest[] = {"round_prefer_floor", "round_prefer_ceil", "floor", "ceil"};
  const NodeReader node(schema, attributes, constants, present);
  ResizeSpec spec;
  spec.is_signed = node.EncodingOf("x_encoding") == Encoding::kSigned;
  spec.scales = node.Floats("scales");
  spec.sizes = node.Ints("sizes");
  spec.coordinates = static_cast<Coordinates>(Choice(node, "coordinate_transformation_mode", kCoordinates));
  spec.nearest = static_cast<Nearest>(Choice(node, "nearest_mode", kNearest));
  Require(!spec.scales.empty() || !spec.sizes.empty(), node.op(), ": one of 'scales' and 'sizes' is needed");
  for (const float scale : spec.scales) {
    Require(std::isfinite(scale) && scale > 0, node.op(), ": attribute 'scales' holds ", scale,
            ", expected finite scales > 0");
  }
  for (const int64_t size : spec.sizes) {
    Require(size >= 1 && size <= kMaxAttribute, node.op(), ": attribute 'sizes' holds ", size,
            ", expected 1..", kMaxAttribute);
  }
  return std::make_unique<ResizeOperator>(std::move(spec));
}

}  // namespace lowbit
