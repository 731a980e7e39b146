#include "core/node_reader.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "core/status.h"

namespace lowbit {
namespace {

template <typename T>
std::vector<T> Copy(const ConstTensor& tensor, int64_t count) {
  std::vector<T> out(static_cast<size_t>(count));
  if (count > 0) std::memcpy(out.data(), tensor.data, out.size() * sizeof(T));
  return out;
}

template <typename T>
std::vector<T> Broadcast(std::vector<T> one, int64_t count) {
  return std::vector<T>(static_cast<size_t>(count), one[0]);
}

SpatialNumbers ReadSpatial(const AttributeReader& attributes, std::string_view name, int spatial,
                           int64_t fallback) {
  const std::vector<int64_t>& values = attributes.Ints(name);
  SpatialNumbers out{1, 1, 1};
  Require(values.empty() || static_cast<int>(values.size()) == spatial, attributes.op(), ": attribute '",
          name, "' has ", values.size(), " numbers, expected ", spatial, " as in kernel_shape");
  for (int i = 0; i < spatial; ++i) {
    const int64_t value = values.empty() ? fallback : values[static_cast<size_t>(i)];
    Require(value >= 1 && value <= kMaxAttribute, attributes.op(), ": attribute '", name, "' holds ", value,
            ", expected 1..", kMaxAttribute);
    out[static_cast<size_t>(i + kMaxSpatial - spatial)] = value;
  }
  return out;
}

// Attributes are below 2^30, so with sizes below 2^31 everything computed from them stays inside int64.
void CheckPixels(int64_t size) {
  Require(size >= 0 && size <= kMaxPixels, "a side of ", size, " pixels, expected 0..", kMaxPixels);
}

}  // namespace

template <typename T>
const T& AttributeReader::Get(std::string_view name) const {
  const auto it = attributes_.find(name);
  Require(it != attributes_.end(), op_, ": the schema has no attribute '", name, "'");
  const T* value = std::get_if<T>(&it->second);
  Require(value != nullptr, op_, ": attribute '", name, "' has another kind");
  return *value;
}

int64_t AttributeReader::Int(std::string_view name, int64_t lo, int64_t hi) const {
  const int64_t value = Get<int64_t>(name);
  Require(value >= lo && value <= hi, op_, ": attribute '", name, "' is ", value, ", expected ", lo, "..",
          hi);
  return value;
}

float AttributeReader::Float(std::string_view name) const { return Get<float>(name); }
const std::string& AttributeReader::String(std::string_view name) const { return Get<std::string>(name); }
const std::vector<int64_t>& AttributeReader::Ints(std::string_view name) const {
  return Get<std::vector<int64_t>>(name);
}
const std::vector<float>& AttributeReader::Floats(std::string_view name) const {
  return Get<std::vector<float>>(name);
}

int64_t AttributeReader::OptionalInt(std::string_view name, int64_t fallback, int64_t lo, int64_t hi) const {
  const std::vector<int64_t>& values = Ints(name);
  Require(values.size() <= 1, op_, ": attribute '", name, "' has ", values.size(),
          " numbers, expected at most one");
  if (values.empty()) return fallback;
  Require(values[0] >= lo && values[0] <= hi, op_, ": attribute '", name, "' is ", values[0], ", expected ",
          lo, "..", hi);
  return values[0];
}

Encoding AttributeReader::EncodingOf(std::string_view name, bool allow_bipolar) const {
  const std::string& text = String(name);
  if (text == "unsigned") return Encoding::kUnsigned;
  if (text == "signed") return Encoding::kSigned;
  if (text == "bipolar" && allow_bipolar) return Encoding::kBipolar;
  Fail(op_, ": attribute '", name, "' is '", text, "', expected unsigned",
       allow_bipolar ? ", signed or bipolar" : " or signed");
}

OperandType AttributeReader::Operand(std::string_view bits, std::string_view encoding,
                                     bool allow_bipolar) const {
  const OperandType type{static_cast<int>(Int(bits, 1, 8)), EncodingOf(encoding, allow_bipolar)};
  Require(type.encoding != Encoding::kBipolar || type.bits == 1, op_,
          ": bipolar codes have 1 bit, attribute '", bits, "' is ", type.bits);
  return type;
}

Window ReadWindow(const AttributeReader& attributes, bool dilations) {
  const size_t spatial = attributes.Ints("kernel_shape").size();
  Require(spatial >= 1 && spatial <= kMaxSpatial, attributes.op(), ": attribute 'kernel_shape' has ", spatial,
          " numbers, expected 1..", kMaxSpatial);
  Window window;
  window.spatial = static_cast<int>(spatial);
  window.kernel = ReadSpatial(attributes, "kernel_shape", window.spatial, 1);
  window.stride = ReadSpatial(attributes, "strides", window.spatial, 1);
  if (dilations) window.dilation = ReadSpatial(attributes, "dilations", window.spatial, 1);

  const std::vector<int64_t>& pads = attributes.Ints("pads");
  Require(pads.empty() || pads.size() == 2 * spatial, attributes.op(), ": attribute 'pads' has ", pads.size(),
          " numbers, expected ", 2 * spatial);
  for (size_t i = 0; i < pads.size(); ++i) {
    Require(pads[i] >= 0 && pads[i] <= kMaxAttribute, attributes.op(), ": attribute 'pads' holds ", pads[i],
            ", expected 0..", kMaxAttribute);
    auto& side = i < spatial ? window.pad_begin : window.pad_end;
    side[i % spatial + kMaxSpatial - spatial] = pads[i];
  }
  return window;
}

int64_t WindowOutputSize(const Window& window, int i, int64_t size, bool ceil_mode) {
  CheckPixels(size);
  const size_t d = static_cast<size_t>(i);
  const int64_t padded = size + window.pad_begin[d] + window.pad_end[d], extent = window.Extent(i);
  Require(extent <= padded, "a window of ", extent, " pixels does not fit into ", size, " pixels padded to ",
          padded);
  const int64_t stride = window.stride[d], span = padded - extent;
  if (!ceil_mode) return span / stride + 1;
  const int64_t out = (span + stride - 1) / stride + 1;
  // ONNX: a window that would begin in the padding behind the image is left out.
  return (out - 1) * stride >= size + window.pad_begin[d] ? out - 1 : out;
}

int64_t TransposedOutputSize(const Window& window, int i, int64_t size, int64_t output_padding) {
  CheckPixels(size);
  const size_t d = static_cast<size_t>(i);
  const int64_t out = window.stride[d] * (size - 1) + output_padding + window.Extent(i) -
                      window.pad_begin[d] - window.pad_end[d];
  Require(out >= 1, "the pads (", window.pad_begin[d], ", ", window.pad_end[d],
          ") leave nothing of the output");
  return out;
}

NodeReader::NodeReader(const OpSchema& schema, const AttributeMap& given,
                       std::span<const std::optional<ConstTensor>> constants,
                       const std::vector<bool>& present, std::string_view replaceable)
    : AttributeReader(schema, given), schema_(schema), constants_(constants), present_(present) {
  Require(present.size() == constants.size(), op(), ": ", present.size(), " presence flags for ",
          constants.size(), " inputs");
  const bool variadic = !schema.inputs.empty() && schema.inputs.back().variadic;
  Require(variadic ? present.size() >= schema.inputs.size() : present.size() == schema.inputs.size(), op(),
          ": ", present.size(), " inputs, expected ", variadic ? "at least " : "", schema.inputs.size());
  for (size_t i = 0; i < schema.inputs.size(); ++i) {
    const InputSchema& input = schema.inputs[i];
    if (input.name == replaceable) continue;
    Require(input.optional || present[i], op(), ": input '", input.name, "' is missing");
    Require(!input.constant || !present[i] || constants[i].has_value(), op(), ": input '", input.name,
            "' must be a constant (an initializer); lowbit reads it once, when the node is created");
  }
}

size_t NodeReader::Index(std::string_view input) const {
  for (size_t i = 0; i < schema_.inputs.size(); ++i) {
    if (input == schema_.inputs[i].name) return i;
  }
  Fail(op(), ": the schema has no input '", input, "'");
}

const ConstTensor& NodeReader::Constant(std::string_view input, ElementType type) const {
  const size_t i = Index(input);
  Require(present_[i] && constants_[i].has_value(), op(), ": input '", input, "' is missing");
  const ConstTensor& tensor = *constants_[i];
  Require(tensor.type == type, op(), ": input '", input, "' is ", TypeName(tensor.type), ", expected ",
          TypeName(type));
  Require(ElementCount(tensor.shape) == 0 || tensor.data != nullptr, op(), ": input '", input,
          "' has no data");
  return tensor;
}

// One element counts as a scalar whatever its dims are.
template <typename T>
std::vector<T> NodeReader::ElementsOf(std::string_view input, ElementType type, int64_t count,
                                      size_t rank) const {
  const ConstTensor& tensor = Constant(input, type);
  Require(ElementCount(tensor.shape) == count && (count == 1 || tensor.shape.size() == rank), op(),
          ": input '", input, "' has shape ", ShapeText(tensor.shape), ", expected ", count, " elements",
          rank == 1 ? " along one dim" : "");
  return Copy<T>(tensor, count);
}

template <typename T>
std::vector<T> NodeReader::BroadcastOf(std::string_view input, ElementType type, int64_t count) const {
  const bool one = ElementCount(Constant(input, type).shape) == 1;
  std::vector<T> elements = ElementsOf<T>(input, type, one ? 1 : count, 1);
  return one ? Broadcast(std::move(elements), count) : elements;
}

std::vector<float> NodeReader::FloatsOf(std::string_view input, int64_t count) const {
  return ElementsOf<float>(input, ElementType::kFloat, count, 1);
}
std::vector<int32_t> NodeReader::Int32sOf(std::string_view input, int64_t count) const {
  return ElementsOf<int32_t>(input, ElementType::kInt32, count, 1);
}
std::vector<float> NodeReader::MatrixOfFloats(std::string_view input, int64_t count) const {
  return ElementsOf<float>(input, ElementType::kFloat, count, 2);
}
std::vector<int32_t> NodeReader::MatrixOfInt32s(std::string_view input, int64_t count) const {
  return ElementsOf<int32_t>(input, ElementType::kInt32, count, 2);
}
std::vector<float> NodeReader::BroadcastFloatsOf(std::string_view input, int64_t count) const {
  return BroadcastOf<float>(input, ElementType::kFloat, count);
}
std::vector<int32_t> NodeReader::BroadcastInt32sOf(std::string_view input, int64_t count) const {
  return BroadcastOf<int32_t>(input, ElementType::kInt32, count);
}

float NodeReader::ScaleOf(std::string_view input) const {
  const float scale = FloatOf(input);
  Require(std::isfinite(scale) && scale > 0, op(), ": input '", input, "' is ", scale,
          ", expected a finite scale > 0");
  return scale;
}

std::vector<float> NodeReader::BroadcastScalesOf(std::string_view input, int64_t count) const {
  std::vector<float> scales = BroadcastFloatsOf(input, count);
  for (const float scale : scales) {
    Require(std::isfinite(scale) && scale > 0, op(), ": input '", input, "' holds ", scale,
            ", expected finite scales > 0");
  }
  return scales;
}

int32_t NodeReader::ZeroPointOf(std::string_view input, OperandType type) const {
  if (!Present(input)) return 0;
  const int32_t value = Int32Of(input);
  CheckZeroPoint(input, value, type);
  return value;
}

void NodeReader::CheckZeroPoint(std::string_view input, int32_t value, OperandType type) const {
  const bool bipolar = type.encoding == Encoding::kBipolar;
  const int32_t lo = bipolar ? 0 : type.MinCode(), hi = bipolar ? 0 : type.MaxCode();
  Require(value >= lo && value <= hi, op(), ": input '", input, "' is ", value, ", expected ", lo, "..", hi,
          " for ", type.bits, bipolar ? "-bit bipolar codes" : "-bit codes");
}

int64_t CheckedProduct(int64_t a, int64_t b, std::string_view what) {
  int64_t out = 0;
  Require(!__builtin_mul_overflow(a, b, &out), what, " overflows: ", a, " * ", b);
  return out;
}

int64_t ElementCount(std::span<const int64_t> shape) {
  int64_t count = 1;
  for (const int64_t dim : shape) {
    Require(dim >= 0, "shape ", ShapeText(shape), " has a negative dimension");
    count = CheckedProduct(count, dim, "the number of elements");
  }
  return count;
}

}  // namespace lowbit
