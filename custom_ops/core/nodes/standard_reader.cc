#include "core/nodes/standard_reader.h"

#include <cstring>

#include "core/nodes/node_common.h"
#include "core/status.h"

namespace lowbit {

void StandardReader::RequireVersion(int least) const {
  Require(since_version_ >= least, op_, " of op set ", since_version_, ", expected ", least,
          " or newer; convert the model with onnx.version_converter");
}

const AttributeValue* StandardReader::Find(std::string_view name) const {
  known_.insert(name);
  const auto it = attributes_.find(name);
  return it == attributes_.end() ? nullptr : &it->second;
}

template <typename T>
const T* StandardReader::Get(std::string_view name) const {
  const AttributeValue* value = Find(name);
  if (value == nullptr) return nullptr;
  const T* typed = std::get_if<T>(value);
  Require(typed != nullptr, op_, ": attribute '", name, "' has another kind than ONNX says");
  return typed;
}

bool StandardReader::Has(std::string_view name) const { return Find(name) != nullptr; }

int64_t StandardReader::Int(std::string_view name, int64_t fallback, int64_t lo, int64_t hi) const {
  const int64_t* given = Get<int64_t>(name);
  const int64_t value = given == nullptr ? fallback : *given;
  Require(value >= lo && value <= hi, op_, ": attribute '", name, "' is ", value, ", expected ", lo, "..",
          hi);
  return value;
}

int64_t StandardReader::Axis(std::string_view name, int64_t fallback) const {
  return Int(name, fallback, -kMaxRank, kMaxRank);
}

float StandardReader::Float(std::string_view name, float fallback) const {
  const float* given = Get<float>(name);
  return given == nullptr ? fallback : *given;
}

std::string StandardReader::String(std::string_view name, std::string_view fallback) const {
  const std::string* given = Get<std::string>(name);
  return given == nullptr ? std::string(fallback) : *given;
}

std::vector<int64_t> StandardReader::Ints(std::string_view name) const {
  const auto* given = Get<std::vector<int64_t>>(name);
  return given == nullptr ? std::vector<int64_t>() : *given;
}

void StandardReader::RequireNothingElse() const {
  for (const auto& [name, value] : attributes_) {
    Require(known_.contains(name), op_, ": attribute '", name, "' is not known to lowbit");
  }
}

void StandardReader::RequireInputs(size_t most) const {
  Require(inputs_.size() <= most, op_, " has ", inputs_.size(), " inputs, expected at most ", most);
}

ElementType StandardReader::AnyTypeOf(size_t index) const {
  Require(Present(index), op_, ": input ", index, " is missing");
  Require(inputs_[index].type.has_value(), op_, ": input ", index,
          " has an element type that lowbit does not compute with, expected float32, uint8, int8 or int32");
  return *inputs_[index].type;
}

ElementType StandardReader::TypeOf(size_t index) const {
  const ElementType type = AnyTypeOf(index);
  Require(type != ElementType::kFloat16, op_, ": input ", index,
          " is float16, which lowbit only casts; convert the model without keep_float16");
  return type;
}

void StandardReader::RequireFloat(size_t index) const {
  Require(TypeOf(index) == ElementType::kFloat, op_, ": input ", index, " holds integers, expected float32");
}

std::vector<int64_t> StandardReader::ConstantInts(size_t index, std::string_view name) const {
  Require(Present(index), op_, ": input '", name, "' is missing");
  Require(inputs_[index].constant_ints.has_value(), op_, ": input '", name,
          "' is computed by the model, expected constant integers; simplify the model with its input shapes "
          "fixed");
  // As ONNX Runtime's own kernels, which refuse most others when they run.
  const auto& dims = inputs_[index].dims;
  Require(!dims || dims->size() == 1, op_, ": input '", name, "' has rank ", dims ? dims->size() : 0,
          ", expected a vector");
  return *inputs_[index].constant_ints;
}

const ConstTensor& StandardReader::Constant(size_t index, std::string_view name) const {
  Require(Present(index), op_, ": input '", name, "' is missing");
  Require(inputs_[index].constant.has_value(), op_, ": input '", name,
          "' is computed by the model or has a type that lowbit does not know, expected a constant");
  const ConstTensor& tensor = *inputs_[index].constant;
  Require(BoundedCount(tensor.shape) == 0 || tensor.data != nullptr, op_, ": input '", name, "' has no data");
  return tensor;
}

const ConstTensor& StandardReader::Constant(size_t index, std::string_view name, ElementType type) const {
  const ConstTensor& tensor = Constant(index, name);
  CheckFed({tensor.type, tensor.shape}, type, name);
  return tensor;
}

std::vector<float> StandardReader::ConstantFloats(size_t index, std::string_view name) const {
  const ConstTensor& tensor = Constant(index, name, ElementType::kFloat);
  std::vector<float> values(static_cast<size_t>(BoundedCount(tensor.shape)));
  if (!values.empty()) std::memcpy(values.data(), tensor.data, values.size() * sizeof(float));
  return values;
}

float StandardReader::ConstantFloat(size_t index, std::string_view name) const {
  const std::vector<float> values = ConstantFloats(index, name);
  Require(values.size() == 1, op_, ": input '", name, "' has ", values.size(), " elements, expected one");
  return values[0];
}

std::vector<int64_t> StandardReader::AttributeOrInput(std::string_view name, size_t index,
                                                      int input_since) const {
  if (since_version_ < input_since) return Ints(name);
  return Present(index) ? ConstantInts(index, name) : std::vector<int64_t>();
}

}  // namespace lowbit
