// Checked access to what a model says about one node. Nothing that a model holds is trusted: every getter
// states the range or the length that it accepts and throws Error, naming the attribute or input, for
// anything else.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/schema.h"
#include "core/text.h"
#include "core/types.h"

namespace lowbit {

// Attributes that count or measure something (kernel, stride, pad, channels) stay below this. It keeps every
// product of two of them, and sums of such products, inside int64.
inline constexpr int64_t kMaxAttribute = int64_t{1} << 30;

class AttributeReader {
 public:
  AttributeReader(const OpSchema& schema, const AttributeMap& given)
      : op_(schema.name), attributes_(CompleteAttributes(schema, given)) {}

  const char* op() const { return op_; }
  int64_t Int(std::string_view name, int64_t lo, int64_t hi) const;
  bool Flag(std::string_view name) const { return Int(name, 0, 1) != 0; }
  float Float(std::string_view name) const;
  const std::string& String(std::string_view name) const;
  const std::vector<int64_t>& Ints(std::string_view name) const;
  const std::vector<float>& Floats(std::string_view name) const;
  // The one integer of a list attribute that may be empty.
  int64_t OptionalInt(std::string_view name, int64_t fallback, int64_t lo, int64_t hi) const;
  Encoding EncodingOf(std::string_view name, bool allow_bipolar = false) const;
  OperandType Operand(std::string_view bits, std::string_view encoding, bool allow_bipolar = false) const;

 private:
  template <typename T>
  const T& Get(std::string_view name) const;

  const char* op_;
  AttributeMap attributes_;
};

// Kernel, strides, dilations and pads of a sliding window: depth, height, width. Fewer spatial dims leave the
// first ones at 1.
inline constexpr int kMaxSpatial = 3;
using SpatialNumbers = std::array<int64_t, kMaxSpatial>;
struct Window {
  int spatial = 2;
  SpatialNumbers kernel{1, 1, 1}, stride{1, 1, 1}, dilation{1, 1, 1}, pad_begin{}, pad_end{};

  int64_t Extent(int i) const {
    return dilation[i] * (kernel[i] - 1) + 1;
  }  // pixels that a dilated kernel spans
};
Window ReadWindow(const AttributeReader& attributes, bool dilations);

// Output size of one spatial dim, at least 1. Throws where the window does not fit into the padded image, and
// for sizes beyond kMaxPixels (a graph may declare any).
inline constexpr int64_t kMaxPixels = (int64_t{1} << 31) - 1;
int64_t WindowOutputSize(const Window& window, int i, int64_t size, bool ceil_mode);
// The same for a transposed convolution.
int64_t TransposedOutputSize(const Window& window, int i, int64_t size, int64_t output_padding);

class NodeReader : public AttributeReader {
 public:
  // `replaceable`: a constant input that may be missing although the schema needs it.
  NodeReader(const OpSchema& schema, const AttributeMap& given,
             std::span<const std::optional<ConstTensor>> constants, const std::vector<bool>& present,
             std::string_view replaceable = {});

  size_t InputCount() const { return present_.size(); }  // variadic ones expanded
  size_t Index(std::string_view input) const;
  bool Present(std::string_view input) const { return present_[Index(input)]; }
  bool HasConstant(std::string_view input) const {
    return Present(input) && constants_[Index(input)].has_value();
  }
  // The tensor of a present constant input, its data checked to be there.
  const ConstTensor& Constant(std::string_view input, ElementType type) const;
  // All elements; exactly `count` of them, along one dim where there are several.
  std::vector<float> FloatsOf(std::string_view input, int64_t count) const;
  std::vector<int32_t> Int32sOf(std::string_view input, int64_t count) const;
  // All elements of a matrix; exactly `count` of them.
  std::vector<float> MatrixOfFloats(std::string_view input, int64_t count) const;
  std::vector<int32_t> MatrixOfInt32s(std::string_view input, int64_t count) const;
  // As above, one element standing for all.
  std::vector<float> BroadcastFloatsOf(std::string_view input, int64_t count) const;
  std::vector<int32_t> BroadcastInt32sOf(std::string_view input, int64_t count) const;
  float FloatOf(std::string_view input) const { return FloatsOf(input, 1)[0]; }
  int32_t Int32Of(std::string_view input) const { return Int32sOf(input, 1)[0]; }
  float ScaleOf(std::string_view input) const;  // finite and > 0
  std::vector<float> BroadcastScalesOf(std::string_view input, int64_t count) const;
  // A zero point inside the range of `type`; 0 for bipolar codes. Absent: 0.
  int32_t ZeroPointOf(std::string_view input, OperandType type) const;
  void CheckZeroPoint(std::string_view input, int32_t value, OperandType type) const;

 private:
  template <typename T>
  std::vector<T> ElementsOf(std::string_view input, ElementType type, int64_t count, size_t rank) const;
  template <typename T>
  std::vector<T> BroadcastOf(std::string_view input, ElementType type, int64_t count) const;

  const OpSchema& schema_;
  std::span<const std::optional<ConstTensor>> constants_;
  const std::vector<bool>& present_;
};

// Product of the dims; throws when a dim is negative or the product leaves [0, 2^62].
int64_t ElementCount(std::span<const int64_t> shape);
// a * b, throwing `what` where int64 overflows.
int64_t CheckedProduct(int64_t a, int64_t b, std::string_view what);

}  // namespace lowbit
