// The op set of domain ai.lowbit, version 1, as data. This table is the only source of the ops' signatures:
// the ONNX Runtime wrappers, shape inference, the Python module (onnx.defs registration, node builders) and
// the generated pages in docs/ops read it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/types.h"

namespace lowbit {

inline constexpr const char* kDomain = "ai.lowbit";
inline constexpr int kDomainVersion = 1;
// An attribute that an op does not have is ignored, however a node is run: ONNX Runtime does not tell custom
// ops about it. So a newer lowbit whose node means something else without its new attributes adds this int,
// the version of the op set that knows them.
inline constexpr const char* kNeedsVersion = "needs_version";

enum class AttributeKind : uint8_t { kInt, kFloat, kString, kInts, kFloats };

// Copies of the variant itself crash when they find no memory: libstdc++ takes one of such types for never empty, and
// destroys what was not made. Assigning does not.
struct AttributeValue : std::variant<int64_t, float, std::string, std::vector<int64_t>, std::vector<float>> {
  using variant::variant;
  AttributeValue(const AttributeValue& other) : variant(int64_t{0}) { variant::operator=(other); }
  AttributeValue(AttributeValue&&) noexcept = default;
  AttributeValue& operator=(const AttributeValue&) = default;
  AttributeValue& operator=(AttributeValue&&) noexcept = default;
  ~AttributeValue() = default;
};
using AttributeMap = std::map<std::string, AttributeValue, std::less<>>;

struct AttributeSchema {
  const char* name;
  AttributeKind kind;
  bool required;
  AttributeValue default_value;  // ignored when required; an empty list means "see doc"
  const char* doc;
};

// The element types an input accepts or an output has.
enum class TypeRule : uint8_t {
  kCodes,         // uint8, or int8 where the operand's encoding attribute says signed
  kCodesOrFloat,  // output only: codes, or float32 when the node has no y_scale
  kUInt8,
  kInt32,
  kFloat,
};

struct InputSchema {
  const char* name;
  TypeRule type;
  bool constant = false;  // must be an initializer (or a Constant node): read once at kernel creation
  bool optional = false;
  bool variadic = false;  // last input only
  const char* doc = "";
};

struct OpSchema {
  const char* name;
  const char* summary;     // one line
  const char* definition;  // Markdown: the exact meaning, formulas included
  std::vector<InputSchema> inputs;
  const char* output_doc;
  TypeRule output_type;
  std::vector<AttributeSchema> attributes;
};

std::span<const OpSchema> OpSchemas();
const OpSchema* FindOpSchema(std::string_view name);

// Null for an attribute that the op does not have.
const AttributeSchema* FindAttribute(const OpSchema& schema, std::string_view name);

// The attributes that the op has, kinds and required ones checked, defaults filled in. Throws Error, also for
// a node that needs a newer version of the op set.
AttributeMap CompleteAttributes(const OpSchema& schema, const AttributeMap& given);

// A dimension during shape inference: a number, a symbol, or unknown (neither).
struct Dim {
  std::optional<int64_t> value;
  std::string symbol;
};
using Shape = std::optional<std::vector<Dim>>;  // nullopt: unknown rank

struct InferredOutput {
  Shape shape;
  ElementType type;
};

// Shape inference of one node. Symbols survive where the dimension is passed through (batch, channels of
// elementwise ops, spatial dims that a stride-1 "same" window keeps); anything else that depends on an
// unknown dim is unknown. `present[i]` says whether optional input i is given. Throws Error for shapes that
// can never work.
InferredOutput InferOutput(const OpSchema& schema, const AttributeMap& attributes,
                           const std::vector<Shape>& inputs, const std::vector<bool>& present);

}  // namespace lowbit
