// Checked access to a node of ONNX's own domain. As in core/node_reader.h nothing is trusted: every getter
// states what it accepts and throws Error for anything else.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/nodes/standard_nodes.h"

namespace lowbit {

// More dims than any real tensor has.
inline constexpr int64_t kMaxRank = 64;

class StandardReader {
 public:
  StandardReader(std::string_view op, int since_version, const AttributeMap& attributes,
                 std::span<const StandardInput> inputs, StandardOutputs outputs)
      : op_(op), since_version_(since_version), attributes_(attributes), inputs_(inputs), outputs_(outputs) {}

  std::string_view op() const { return op_; }
  // The op set in which this form of the op came up.
  int version() const { return since_version_; }
  void RequireVersion(int least) const;

  // Attributes: absent ones have the fallback, or are an error where there is none.
  bool Has(std::string_view name) const;
  int64_t Int(std::string_view name, int64_t fallback, int64_t lo, int64_t hi) const;
  bool Flag(std::string_view name) const { return Int(name, 0, 0, 1) != 0; }
  int64_t Axis(std::string_view name, int64_t fallback) const;
  float Float(std::string_view name, float fallback) const;
  std::string String(std::string_view name, std::string_view fallback) const;
  std::vector<int64_t> Ints(std::string_view name) const;  // absent: empty
  // An attribute that changes nothing here.
  void Ignore(std::string_view name) const { known_.insert(name); }
  // Call when all is read: an attribute nobody asked for may change the meaning.
  void RequireNothingElse() const;

  StandardOutputs Outputs() const { return outputs_; }
  size_t InputCount() const { return inputs_.size(); }
  bool Present(size_t index) const { return index < inputs_.size() && inputs_[index].present; }
  // At most that many inputs.
  void RequireInputs(size_t most) const;
  // A fed input: its element type, which must be one that lowbit knows; float16 is one for Cast alone.
  ElementType AnyTypeOf(size_t index) const;
  ElementType TypeOf(size_t index) const;
  void RequireFloat(size_t index) const;
  const std::optional<std::vector<int64_t>>& Dims(size_t index) const { return inputs_[index].dims; }
  // Constant inputs.
  bool IsConstant(size_t index) const { return Present(index) && inputs_[index].constant.has_value(); }
  std::vector<int64_t> ConstantInts(size_t index, std::string_view name) const;
  const ConstTensor& Constant(size_t index, std::string_view name) const;
  const ConstTensor& Constant(size_t index, std::string_view name, ElementType type) const;
  std::vector<float> ConstantFloats(size_t index, std::string_view name) const;
  float ConstantFloat(size_t index, std::string_view name) const;
  // Integers that older op sets have as an attribute, newer ones as a constant input. Absent: empty.
  std::vector<int64_t> AttributeOrInput(std::string_view name, size_t index, int input_since) const;

 private:
  const AttributeValue* Find(std::string_view name) const;
  template <typename T>
  const T* Get(std::string_view name) const;

  std::string_view op_;
  int since_version_;
  const AttributeMap& attributes_;
  std::span<const StandardInput> inputs_;
  StandardOutputs outputs_;
  mutable std::set<std::string_view> known_;
};

}  // namespace lowbit
