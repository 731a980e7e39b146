#include "ep/ort/graph_reader.h"

#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/status.h"
#include "ep/ort/context_model.h"

namespace lowbit::ep {
namespace {

// Reads a list of which the API first tells the length.
template <typename T, typename Size, typename Get>
std::vector<T> ReadList(Size size, Get get) {
  size_t count = 0;
  Check(size(&count));
  std::vector<T> list(count);
  if (count != 0) Check(get(list.data(), count));
  return list;
}

std::vector<const OrtValueInfo*> Inputs(const OrtNode* node) {
  return ReadList<const OrtValueInfo*>(
      [&](size_t* count) { return Api().Node_GetNumInputs(node, count); },
      [&](const OrtValueInfo** list, size_t count) { return Api().Node_GetInputs(node, list, count); });
}

// Values of the surrounding graph that a node's subgraphs capture.
std::vector<const OrtValueInfo*> CapturedInputs(const OrtNode* node) {
  return ReadList<const OrtValueInfo*>(
      [&](size_t* count) { return Api().Node_GetNumImplicitInputs(node, count); },
      [&](const OrtValueInfo** list, size_t count) {
        return Api().Node_GetImplicitInputs(node, list, count);
      });
}

std::vector<const OrtValueInfo*> Outputs(const OrtNode* node) {
  return ReadList<const OrtValueInfo*>(
      [&](size_t* count) { return Api().Node_GetNumOutputs(node, count); },
      [&](const OrtValueInfo** list, size_t count) { return Api().Node_GetOutputs(node, list, count); });
}

std::vector<const OrtValueInfo*> Inputs(const OrtGraph* graph) {
  return ReadList<const OrtValueInfo*>(
      [&](size_t* count) { return Api().Graph_GetNumInputs(graph, count); },
      [&](const OrtValueInfo** list, size_t count) { return Api().Graph_GetInputs(graph, list, count); });
}

std::vector<const OrtValueInfo*> Outputs(const OrtGraph* graph) {
  return ReadList<const OrtValueInfo*>(
      [&](size_t* count) { return Api().Graph_GetNumOutputs(graph, count); },
      [&](const OrtValueInfo** list, size_t count) { return Api().Graph_GetOutputs(graph, list, count); });
}

std::string NameOf(const OrtValueInfo* value) {
  if (value == nullptr) return "";
  const char* name = nullptr;
  Check(Api().GetValueInfoName(value, &name));
  return name == nullptr ? "" : name;
}

std::vector<std::string> NamesOf(const std::vector<const OrtValueInfo*>& values) {
  std::vector<std::string> names;
  names.reserve(values.size());
  for (const OrtValueInfo* value : values) names.push_back(NameOf(value));
  return names;
}

// ---- attributes

size_t AttributeBytes(const OrtOpAttr* attribute, OrtOpAttrType type) {
  size_t bytes = 0;
  // Asked with too small a buffer, ReadOpAttr answers with an error and the size.
  const Owned<OrtStatus> too_small(Api().ReadOpAttr(attribute, type, nullptr, 0, &bytes));
  return bytes;
}

void ReadAttributeInto(void* data, size_t bytes, const OrtOpAttr* attribute, OrtOpAttrType type) {
  size_t read = 0;
  if (bytes != 0) Check(Api().ReadOpAttr(attribute, type, data, bytes, &read));
}

template <typename T>
std::vector<T> AttributeList(const OrtOpAttr* attribute, OrtOpAttrType type) {
  const size_t bytes = AttributeBytes(attribute, type);
  std::vector<T> list(bytes / sizeof(T));
  ReadAttributeInto(list.data(), bytes, attribute, type);
  return list;
}

AttributeValue ReadAttribute(const OrtOpAttr* attribute) {
  OrtOpAttrType type = ORT_OP_ATTR_UNDEFINED;
  Check(Api().OpAttr_GetType(attribute, &type));
  switch (type) {
    case ORT_OP_ATTR_INT:
      return AttributeList<int64_t>(attribute, type).at(0);
    case ORT_OP_ATTR_FLOAT:
      return AttributeList<float>(attribute, type).at(0);
    case ORT_OP_ATTR_STRING: {
      const std::vector<char> text = AttributeList<char>(attribute, type);
      return std::string(text.begin(), text.end());
    }
    case ORT_OP_ATTR_INTS:
      return AttributeList<int64_t>(attribute, type);
    case ORT_OP_ATTR_FLOATS:
      return AttributeList<float>(attribute, type);
    default:
      Fail("it is of kind ", static_cast<int>(type),
           " (a tensor, a graph or a list of strings), expected a number, a string or a list of numbers");
  }
}

// ---- values

TensorType TypeOf(const OrtValueInfo* value) {
  const OrtTypeInfo* info = nullptr;
  Check(Api().GetValueInfoTypeInfo(value, &info));
  return TypeFrom(info);
}

// The initializer behind a value that no caller can override; null for every other value.
const OrtValue* ConstantOf(const OrtValueInfo* value) {
  bool is_constant = false;
  Check(Api().ValueInfo_IsConstantInitializer(value, &is_constant));
  const OrtValue* constant = nullptr;
  if (is_constant) Check(Api().ValueInfo_GetInitializerValue(value, &constant));
  return constant;
}

template <typename T>
std::vector<int64_t> Widened(const void* data, size_t count) {
  const T* elements = static_cast<const T*>(data);
  return {elements, elements + count};
}

bool IsAligned(const void* data, size_t alignment) {
  return reinterpret_cast<uintptr_t>(data) % alignment == 0;
}

void ReadConstant(const OrtValue* constant, Value& value,
                  std::vector<std::unique_ptr<std::byte[]>>& aligned) {
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  const int64_t* dims = nullptr;
  size_t rank = 0, bytes = 0;
  Check(Api().GetTensorElementTypeAndShapeDataReference(constant, &type, &dims, &rank));
  value.dims.emplace(dims, dims + rank);
  const void* data = nullptr;
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING) return;
  Check(Api().GetTensorData(constant, &data));
  Check(Api().GetTensorSizeInBytes(constant, &bytes));
  if (bytes != 0 && !IsAligned(data, value.type ? ElementSize(*value.type) : sizeof(int64_t))) {
    auto copy = std::make_unique<std::byte[]>(bytes);
    std::memcpy(copy.get(), data, bytes);
    data = aligned.emplace_back(std::move(copy)).get();
  }
  if (value.type) value.constant = ConstTensor{*value.type, *value.dims, data};
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64)
    value.constant_ints = Widened<int64_t>(data, bytes / sizeof(int64_t));
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32)
    value.constant_ints = Widened<int32_t>(data, bytes / sizeof(int32_t));
}

class Reader {
 public:
  ReadGraphResult Read(const OrtGraph* graph) {
    for (const OrtNode* node : GraphNodes(graph)) {
      result_.graph.nodes.push_back(ReadNode(node));
      result_.nodes.push_back(node);
    }
    result_.graph.inputs = Ids(Inputs(graph));
    result_.graph.outputs = Ids(Outputs(graph));
    MarkOuterValues();
    return std::move(result_);
  }

 private:
  void MarkOuterValues() {
    Graph& graph = result_.graph;
    std::vector<bool> is_made(graph.values.size());
    const auto mark = [&](const std::vector<ValueId>& ids) {
      for (const ValueId id : ids)
        if (id != kAbsent) is_made[static_cast<size_t>(id)] = true;
    };
    mark(graph.inputs);
    for (const Node& node : graph.nodes) mark(node.outputs);
    for (size_t i = 0; i < graph.values.size(); ++i) {
      Value& value = graph.values[i];
      value.is_outer = !is_made[i] && !value.constant && !value.constant_ints;
    }
  }

  Node ReadNode(const OrtNode* from) {
    Node node;
    const char *name = nullptr, *op = nullptr, *domain = nullptr, *provider = nullptr;
    Check(Api().Node_GetName(from, &name));
    Check(Api().Node_GetOperatorType(from, &op));
    Check(Api().Node_GetDomain(from, &domain));
    Check(Api().Node_GetSinceVersion(from, &node.since_version));
    Check(Api().Node_GetEpName(from, &provider));
    node.name = name;
    node.op = op;
    node.domain = std::string_view(domain) == "ai.onnx" ? "" : domain;
    node.inputs = Ids(Inputs(from));
    node.outputs = Ids(Outputs(from));
    size_t subgraphs = 0;
    Check(Api().Node_GetNumSubgraphs(from, &subgraphs));
    if (provider != nullptr && *provider != '\0') node.barred = std::string(kRunsOn) + provider;
    if (subgraphs != 0) {
      node.barred = "it holds subgraphs";
      // Part of what the node reads, though no op's schema lists them.
      for (const ValueId id : Ids(CapturedInputs(from))) node.inputs.push_back(id);
      return node;
    }
    try {
      const OpSchema* schema = node.domain == kDomain ? FindOpSchema(node.op) : nullptr;
      node.attributes = ReadAttributes(from, [&](std::string_view attribute) {
        if (schema == nullptr) return attribute != kContextAttribute;  // large, and read when it is compiled
        return attribute == kNeedsVersion || FindAttribute(*schema, attribute) != nullptr;
      });
    } catch (const Error& e) {
      if (!node.barred) node.barred = e.what();
    }
    return node;
  }

  std::vector<ValueId> Ids(const std::vector<const OrtValueInfo*>& values) {
    std::vector<ValueId> ids;
    ids.reserve(values.size());
    for (const OrtValueInfo* value : values) ids.push_back(IdOf(value));
    return ids;
  }

  ValueId IdOf(const OrtValueInfo* from) {
    const std::string name = NameOf(from);
    if (name.empty()) return kAbsent;
    const auto [place, is_new] = ids_.try_emplace(name, static_cast<ValueId>(result_.graph.values.size()));
    if (is_new) result_.graph.values.push_back(ReadValue(name, from));
    return place->second;
  }

  Value ReadValue(const std::string& name, const OrtValueInfo* from) {
    const TensorType type = TypeOf(from);
    Value value;
    value.name = name;
    value.type = ort::KnownElementType(type.type);
    value.dims = type.dims;
    if (const OrtValue* constant = ConstantOf(from)) ReadConstant(constant, value, result_.aligned);
    return value;
  }

  ReadGraphResult result_;
  std::unordered_map<std::string, ValueId> ids_;
};

}  // namespace

std::vector<const OrtNode*> GraphNodes(const OrtGraph* graph) {
  return ReadList<const OrtNode*>(
      [&](size_t* count) { return Api().Graph_GetNumNodes(graph, count); },
      [&](const OrtNode** list, size_t count) { return Api().Graph_GetNodes(graph, list, count); });
}

ReadGraphResult ReadGraph(const OrtGraph* graph) { return Reader().Read(graph); }

AttributeMap ReadAttributes(const OrtNode* node, const std::function<bool(std::string_view)>& wanted) {
  const std::vector<const OrtOpAttr*> attributes = ReadList<const OrtOpAttr*>(
      [&](size_t* count) { return Api().Node_GetNumAttributes(node, count); },
      [&](const OrtOpAttr** list, size_t count) { return Api().Node_GetAttributes(node, list, count); });
  AttributeMap out;
  for (const OrtOpAttr* attribute : attributes) {
    const char* name = nullptr;
    Check(Api().OpAttr_GetName(attribute, &name));
    if (!wanted(name)) continue;
    try {
      out.emplace(name, ReadAttribute(attribute));
    } catch (const Error& e) {
      Fail("attribute '", name, "' cannot be read: ", e.what());
    }
  }
  return out;
}

AlignedBytes ReadBytes(const OrtNode* node, const char* attribute) {
  const OrtOpAttr* found = nullptr;
  const Owned<OrtStatus> absent(Api().Node_GetAttributeByName(node, attribute, &found));
  Require(absent == nullptr && found != nullptr, "it holds no attribute '", attribute, "'");
  OrtOpAttrType type = ORT_OP_ATTR_UNDEFINED;
  Check(Api().OpAttr_GetType(found, &type));
  Require(type == ORT_OP_ATTR_STRING, "attribute '", attribute, "' is no string");
  AlignedBytes bytes(AttributeBytes(found, type));
  ReadAttributeInto(bytes.data(), bytes.size(), found, type);
  return bytes;
}

TensorType TypeFrom(const OrtTypeInfo* info) {
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  if (info != nullptr) Check(Api().CastTypeInfoToTensorInfo(info, &tensor));
  TensorType out;
  if (tensor == nullptr) return out;
  Check(Api().GetTensorElementType(tensor, &out.type));
  if (!Api().TensorTypeAndShape_HasShape(tensor)) return out;
  size_t rank = 0;
  Check(Api().GetDimensionsCount(tensor, &rank));
  out.dims.emplace(rank);
  if (rank != 0) Check(Api().GetDimensions(tensor, out.dims->data(), rank));
  return out;
}

std::filesystem::path ModelFile(const OrtGraph* graph) {
  const ORTCHAR_T* path = nullptr;
  Check(Api().Graph_GetModelPath(graph, &path));
  return path == nullptr ? std::filesystem::path() : std::filesystem::path(path);
}

std::vector<NamedType> GraphInputs(const OrtGraph* graph) {
  std::vector<NamedType> inputs;
  for (const OrtValueInfo* input : Inputs(graph)) {
    bool is_required = false;
    Check(Api().ValueInfo_IsRequiredGraphInput(input, &is_required));
    if (is_required) inputs.push_back({NameOf(input), TypeOf(input)});
  }
  return inputs;
}

std::vector<NamedType> GraphOutputs(const OrtGraph* graph) {
  std::vector<NamedType> outputs;
  for (const OrtValueInfo* output : Outputs(graph)) outputs.push_back({NameOf(output), TypeOf(output)});
  return outputs;
}

std::vector<std::string> InputNames(const OrtNode* node) { return NamesOf(Inputs(node)); }
std::vector<std::string> OutputNames(const OrtNode* node) { return NamesOf(Outputs(node)); }

}  // namespace lowbit::ep
