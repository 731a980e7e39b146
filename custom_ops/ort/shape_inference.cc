#include "ort/shape_inference.h"

#include <atomic>
#include <string>
#include <vector>

#include "core/status.h"

namespace lowbit::ort {
namespace {

size_t ReadSize(const OrtOpAttr* attribute, OrtOpAttrType type) {
  size_t bytes = 0;
  // Asked with too small a buffer, ReadOpAttr answers with an error and the size.
  const Owned<OrtStatus> too_small(Api().ReadOpAttr(attribute, type, nullptr, 0, &bytes));
  return bytes;
}

template <typename T>
std::vector<T> ReadList(const OrtOpAttr* attribute, OrtOpAttrType type) {
  const size_t bytes = ReadSize(attribute, type);
  std::vector<T> values(bytes / sizeof(T));
  size_t read = 0;
  if (bytes != 0) Check(Api().ReadOpAttr(attribute, type, values.data(), bytes, &read));
  return values;
}

AttributeValue ReadAttribute(const OrtOpAttr* attribute, AttributeKind kind) {
  switch (kind) {
    case AttributeKind::kInt:
      return ReadList<int64_t>(attribute, ORT_OP_ATTR_INT).at(0);
    case AttributeKind::kFloat:
      return ReadList<float>(attribute, ORT_OP_ATTR_FLOAT).at(0);
    case AttributeKind::kString: {
      const std::vector<char> text = ReadList<char>(attribute, ORT_OP_ATTR_STRING);
      return std::string(text.begin(), text.end());
    }
    case AttributeKind::kInts:
      return ReadList<int64_t>(attribute, ORT_OP_ATTR_INTS);
    case AttributeKind::kFloats:
      return ReadList<float>(attribute, ORT_OP_ATTR_FLOATS);
  }
  return int64_t{0};
}

AttributeMap ReadAttributes(const OpSchema& schema, const OrtShapeInferContext* context) {
  AttributeMap out;
  for (const AttributeSchema& attribute : schema.attributes) {
    const OrtOpAttr* value = nullptr;
    const Owned<OrtStatus> absent(Api().ShapeInferContext_GetAttribute(context, attribute.name, &value));
    if (absent == nullptr) out.emplace(attribute.name, ReadAttribute(value, attribute.kind));
  }
  return out;
}

// The context shows an input of unknown rank as a scalar. No op reads scalars of codes, so a rank of 0 means
// unknown.
Shape ReadShape(const OrtTensorTypeAndShapeInfo* info) {
  size_t rank = 0;
  Check(Api().GetDimensionsCount(info, &rank));
  if (rank == 0) return std::nullopt;
  std::vector<int64_t> values(rank);
  std::vector<const char*> symbols(rank, "");
  Check(Api().GetDimensions(info, values.data(), rank));
  Check(Api().GetSymbolicDimensions(info, symbols.data(), rank));
  std::vector<Dim> dims(rank);
  for (size_t i = 0; i < rank; ++i) {
    if (values[i] >= 0) {
      dims[i].value = values[i];
    } else if (symbols[i] != nullptr) {
      dims[i].symbol = symbols[i];
    }
  }
  return dims;
}

// ONNX Runtime takes a dim of -1 only together with a symbol. Two unknown dims must not share one: equal
// symbols mean equal sizes.
std::string FreshSymbol() {
  static std::atomic<uint64_t> next{0};
  return "lowbit_unknown_" + std::to_string(next.fetch_add(1));
}

void WriteShape(OrtShapeInferContext* context, const InferredOutput& y) {
  const size_t rank = y.shape->size();
  std::vector<int64_t> values(rank, -1);
  std::vector<std::string> symbols(rank);
  std::vector<const char*> symbol_texts(rank);
  for (size_t i = 0; i < rank; ++i) {
    const Dim& dim = (*y.shape)[i];
    if (dim.value) {
      values[i] = *dim.value;
    } else {
      symbols[i] = dim.symbol.empty() ? FreshSymbol() : dim.symbol;
    }
    symbol_texts[i] = symbols[i].c_str();
  }
  OrtTensorTypeAndShapeInfo* raw = nullptr;
  Check(Api().CreateTensorTypeAndShapeInfo(&raw));
  const Owned<OrtTensorTypeAndShapeInfo> info(raw);
  Check(Api().SetTensorElementType(raw, ToOrt(y.type)));
  Check(Api().SetDimensions(raw, values.data(), rank));
  Check(Api().SetSymbolicDimensions(raw, symbol_texts.data(), rank));
  Check(Api().ShapeInferContext_SetOutputTypeShape(context, 0, raw));
}

}  // namespace

void InferShape(const OpSchema& schema, OrtShapeInferContext* context) {
  size_t given = 0;
  Check(Api().ShapeInferContext_GetInputCount(context, &given));
  const size_t count = std::max(given, schema.inputs.size());
  std::vector<Shape> shapes(count);
  std::vector<bool> present(count);
  for (size_t i = 0; i < given; ++i) {
    OrtTensorTypeAndShapeInfo* info = nullptr;  // owned by the context
    const Owned<OrtStatus> absent(Api().ShapeInferContext_GetInputTypeShape(context, i, &info));
    if (absent != nullptr || info == nullptr) continue;
    // An input left out in the middle of the list shows as a tensor of undefined type.
    ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    Check(Api().GetTensorElementType(info, &type));
    if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED) continue;
    present[i] = true;
    shapes[i] = ReadShape(info);
  }
  const InferredOutput y = InferOutput(schema, ReadAttributes(schema, context), shapes, present);
  // The API sets type and shape together and takes "no shape" for a scalar. Where not even the rank is known,
  // the type comes from the graph's value_info, which the converter writes for every tensor.
  if (y.shape) WriteShape(context, y);
}

}  // namespace lowbit::ort
