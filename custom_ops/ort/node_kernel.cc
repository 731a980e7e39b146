#include "ort/node_kernel.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <string_view>
#include <utility>
#include <variant>

#include "core/node_reader.h"
#include "core/plan_output.h"
#include "core/status.h"
#include "ort/context_thread_pool.h"
#include "ort/domain.h"

namespace lowbit::ort {
namespace {

// Reads a text of unknown length: `get(nullptr, &size)` asks for the size, terminating zero included.
template <typename Get>
std::string ReadText(Get get) {
  size_t size = 0;
  Check(get(nullptr, &size));
  std::string text(size, '\0');
  Check(get(text.data(), &size));
  text.resize(size == 0 ? 0 : size - 1);
  return text;
}

template <typename T, typename Get>
std::vector<T> ReadList(Get get) {
  size_t size = 0;
  Check(get(nullptr, &size));
  std::vector<T> values(size);
  if (size != 0) Check(get(values.data(), &size));
  return values;
}

std::string OutputName(const OrtKernelInfo* info, size_t i) {
  return ReadText(
      [&](char* out, size_t* size) { return Api().KernelInfo_GetOutputName(info, i, out, size); });
}

std::string NodeName(const OrtKernelInfo* info) {
  return ReadText([&](char* out, size_t* size) { return Api().KernelInfo_GetNodeName(info, out, size); });
}

std::string InputName(const OrtKernelInfo* info, size_t i) {
  return ReadText([&](char* out, size_t* size) { return Api().KernelInfo_GetInputName(info, i, out, size); });
}

// ---- attributes

AttributeValue ReadAttribute(const OrtKernelInfo* info, const AttributeSchema& attribute) {
  const OrtApi& api = Api();
  const char* name = attribute.name;
  switch (attribute.kind) {
    case AttributeKind::kInt: {
      int64_t value = 0;
      Check(api.KernelInfoGetAttribute_int64(info, name, &value));
      return value;
    }
    case AttributeKind::kFloat: {
      float value = 0;
      Check(api.KernelInfoGetAttribute_float(info, name, &value));
      return value;
    }
    case AttributeKind::kString:
      return ReadText(
          [&](char* out, size_t* size) { return api.KernelInfoGetAttribute_string(info, name, out, size); });
    case AttributeKind::kInts:
      return ReadList<int64_t>([&](int64_t* out, size_t* size) {
        return api.KernelInfoGetAttributeArray_int64(info, name, out, size);
      });
    case AttributeKind::kFloats:
      return ReadList<float>([&](float* out, size_t* size) {
        return api.KernelInfoGetAttributeArray_float(info, name, out, size);
      });
  }
  return int64_t{0};
}

// The C API does not list a node's attributes and answers "absent" and "of another kind" with the same error
// code; its message tells the two apart. An attribute of the wrong kind must not silently become its default.
bool SaysAbsent(std::string_view message) {
  return message.find("No attribute with") != std::string_view::npos;
}

// Lists are not even checked: asked for ints, a node that holds one int (or floats) answers with an empty
// list.
bool HoldsAnotherKind(const OrtKernelInfo* info, const char* name) {
  const OrtApi& api = Api();
  const auto succeeds = [](OrtStatus* status) { return Owned<OrtStatus>(status) == nullptr; };
  int64_t i = 0;
  float f = 0;
  size_t size = 0;
  if (succeeds(api.KernelInfoGetAttribute_int64(info, name, &i))) return true;
  if (succeeds(api.KernelInfoGetAttribute_float(info, name, &f))) return true;
  if (succeeds(api.KernelInfoGetAttribute_string(info, name, nullptr, &size))) return true;
  if (succeeds(api.KernelInfoGetAttributeArray_int64(info, name, nullptr, &size)) && size != 0) return true;
  return succeeds(api.KernelInfoGetAttributeArray_float(info, name, nullptr, &size)) && size != 0;
}

bool IsEmptyList(const AttributeValue& value) {
  const auto* ints = std::get_if<std::vector<int64_t>>(&value);
  const auto* floats = std::get_if<std::vector<float>>(&value);
  return (ints != nullptr && ints->empty()) || (floats != nullptr && floats->empty());
}

// ONNX Runtime does not list a node's attributes, so each one that the op has is asked for.
AttributeMap ReadAttributes(const OrtKernelInfo* info, const OpSchema& schema) {
  AttributeMap out;
  const auto read = [&](const AttributeSchema& attribute) {
    try {
      AttributeValue value = ReadAttribute(info, attribute);
      Require(!IsEmptyList(value) || !HoldsAnotherKind(info, attribute.name),
              "it is not a list of the schema's kind");
      out.emplace(attribute.name, std::move(value));
    } catch (const Error& e) {
      if (!SaysAbsent(e.what())) Fail("attribute '", attribute.name, "': ", e.what());
    }
  };
  for (const AttributeSchema& attribute : schema.attributes) read(attribute);
  read({kNeedsVersion, AttributeKind::kInt, false, int64_t{0}, ""});
  return out;
}

// ---- inputs

struct Inputs {
  std::vector<std::optional<ConstTensor>> constants;
  std::vector<bool> present;
  std::vector<size_t> fed;
};

Inputs ReadInputs(const OrtKernelInfo* info, const OpSchema& schema) {
  size_t given = 0;
  Check(Api().KernelInfo_GetInputCount(info, &given));
  Inputs inputs;
  const size_t count = std::max(given, schema.inputs.size());
  inputs.constants.resize(count);
  inputs.present.resize(count);
  for (size_t i = 0; i < given; ++i) {
    if (InputName(info, i).empty()) continue;
    inputs.present[i] = true;
    const InputSchema& input = schema.inputs[std::min(i, schema.inputs.size() - 1)];
    if (!input.constant) {
      inputs.fed.push_back(i);
      continue;
    }
    int is_constant = 0;
    const OrtValue* value = nullptr;
    Check(Api().KernelInfoGetConstantInput_tensor(info, i, &is_constant, &value));
    if (is_constant != 0 && value != nullptr) inputs.constants[i] = TensorFrom(value);
  }
  return inputs;
}

// Element type and, where the model states it, shape (-1: not stated) of a node's input or output.
struct ValueInfo {
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::vector<int64_t> shape;
};

ValueInfo ReadValueInfo(OrtTypeInfo* raw) {
  const Owned<OrtTypeInfo> info(raw);
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  Check(Api().CastTypeInfoToTensorInfo(raw, &tensor));
  ValueInfo out;
  if (tensor == nullptr) return out;
  Check(Api().GetTensorElementType(tensor, &out.type));
  size_t rank = 0;
  Check(Api().GetDimensionsCount(tensor, &rank));
  out.shape.resize(rank);
  Check(Api().GetDimensions(tensor, out.shape.data(), rank));
  return out;
}

ValueInfo InputInfo(const OrtKernelInfo* info, size_t i) {
  OrtTypeInfo* type = nullptr;
  Check(Api().KernelInfo_GetInputTypeInfo(info, i, &type));
  return ReadValueInfo(type);
}

// To ONNX Runtime the output is variadic (custom_op.cc says why), so it lets a node list several, or leave
// out the first. Nothing would ever fill those.
void CheckOneOutput(const OrtKernelInfo* info) {
  size_t outputs = 0;
  Check(Api().KernelInfo_GetOutputCount(info, &outputs));
  Require(outputs == 1 && !OutputName(info, 0).empty(), "the node lists ", outputs,
          " outputs, expected one with a name");
}

ValueInfo OutputInfo(const OrtKernelInfo* info, size_t i) {
  OrtTypeInfo* type = nullptr;
  Check(Api().KernelInfo_GetOutputTypeInfo(info, i, &type));
  return ReadValueInfo(type);
}

// ---- options

// The session's config entry `key`, empty where it is not set.
std::string ConfigEntry(const OrtKernelInfo* info, const char* key) {
  OrtKeyValuePairs* raw = nullptr;
  Check(Api().KernelInfo_GetConfigEntries(info, &raw));
  const Owned<OrtKeyValuePairs> entries(raw);
  const char* value = Api().GetKeyValue(raw, key);
  return value == nullptr ? "" : value;
}

// To the session's log, which the user may have sent elsewhere or silenced.
void LogWarning(const OrtKernelInfo* info, const std::string& warning) {
  const OrtLogger* logger = nullptr;
  Check(Api().KernelInfo_GetLogger(info, &logger));
  Check(Api().Logger_LogMessage(logger, ORT_LOGGING_LEVEL_WARNING, warning.c_str(), ORT_FILE, __LINE__,
                                static_cast<const char*>(__FUNCTION__)));
}

OperatorOptions ReadOptions(const OrtKernelInfo* info) {
  OperatorOptions options;
  options.isa = DefaultIsa();
  options.use_reference = EnvironmentFlag("LOWBIT_REFERENCE") || ConfigEntry(info, "lowbit.reference") == "1";
  options.tuned = ConfigEntry(info, "lowbit.tune") != "off";
  // ONNX Runtime does not tell a node how many threads its session has; lowbit.session() does.
  const std::string threads = ConfigEntry(info, "lowbit.threads");
  std::from_chars(threads.data(), threads.data() + threads.size(), options.threads);
  options.warn = [info](const std::string& warning) { LogWarning(info, warning); };
  return options;
}

std::string PlanText(const std::string& where, const OperatorPlan& plan,
                     const std::vector<int64_t>& x_shape) {
  std::string line;
  AppendText(line, where, plan.kernel, plan.tuned ? " (measured)" : "", ", x ", ShapeText(x_shape),
             ", packed ", plan.packed_bytes, " bytes, workspace ", plan.workspace_bytes, " bytes a thread\n");
  return line;
}

std::string PlanJson(const std::string& name, const char* op, const OperatorPlan& plan,
                     const std::vector<int64_t>& x_shape) {
  std::string line;
  AppendText(line, "{\"lowbit\": \"node\", \"name\": ", JsonString(name), ", \"op\": ", JsonString(op),
             ", \"kernel\": ", JsonString(plan.kernel), ", \"measured\": ", plan.tuned ? "true" : "false",
             ", \"x\": ", ShapeText(x_shape), ", \"packed_bytes\": ", plan.packed_bytes,
             ", \"workspace_bytes\": ", plan.workspace_bytes, "}\n");
  return line;
}

// Tells the nodes behind this one what codes it makes, and the options what those before it said of x.
void ExchangeCodes(const OrtKernelInfo* info, const NodeSpec& node, const std::vector<size_t>& fed,
                   SessionCodes& session, OperatorOptions& options) {
  std::vector<std::optional<MadeCodes>> codes;
  codes.reserve(fed.size());
  for (const size_t i : fed) codes.push_back(session.Find(InputName(info, i)));
  if (const auto* const matmul = std::get_if<MatmulNode>(&node)) {
    options.x_has_stated_bits = HoldsStatedBits(*matmul, codes.at(0));
    if (!codes[0] && matmul->conv.x.bits < 8)
      session.AddReader(InputName(info, fed[0]), NodeName(info), *matmul);
  }
  session.Add(OutputName(info, 0), CodesMadeBy(node, codes));
}

}  // namespace

NodeKernel::NodeKernel(const OpSchema& schema, const OrtKernelInfo* info) {
  where_ = "lowbit: node '" + NodeName(info) + "' (" + schema.name + "): ";
  try {
    CheckOneOutput(info);
    Inputs inputs = ReadInputs(info, schema);
    OperatorOptions options = ReadOptions(info);
    threads_ = static_cast<size_t>(std::max(options.threads, 0));
    Require(inputs.present[0], "input '", schema.inputs[0].name, "' is missing");
    options.x_shape = InputInfo(info, inputs.fed.empty() ? 0 : inputs.fed[0]).shape;
    NodeSpec spec = DecodeNode(schema, ReadAttributes(info, schema), inputs.constants, inputs.present);
    session_codes_ = SessionCodes::Of(info);
    if (session_codes_->IsFirst()) {
      if (const std::string refused = ConfigEntry(info, kProviderRefused); !refused.empty())
        LogWarning(info, refused);
    }
    ExchangeCodes(info, spec, inputs.fed, *session_codes_, options);
    op_ = CreateOperator(std::move(spec), options);
    // ONNX Runtime allocates the output by the type that the graph states, so this must hold before anything
    // runs.
    const ONNXTensorElementDataType declared = OutputInfo(info, 0).type;
    Require(declared == ToOrt(op_->OutputType()), "the graph declares an output of ONNX element type ",
            static_cast<int>(declared), ", the node makes ", static_cast<int>(ToOrt(op_->OutputType())));
    fed_ = std::move(inputs.fed);
    input_count_ = inputs.present.size();
    if (const PlanOutput asked = AskedPlanOutput(); asked != PlanOutput::kNone) {
      const OperatorPlan plan = op_->Plan(std::vector<std::optional<ConstTensor>>(input_count_));
      const std::string line = asked == PlanOutput::kJson
                                   ? PlanJson(NodeName(info), schema.name, plan, options.x_shape)
                                   : PlanText(where_, plan, options.x_shape);
      std::fputs(line.c_str(), stderr);  // at once: sessions may be created in several threads
    }
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& e) {
    throw Error(where_ + e.what());
  }
}

void NodeKernel::Compute(OrtKernelContext* context) const {
  std::vector<std::optional<ConstTensor>> inputs(input_count_);
  for (const size_t i : fed_) {
    const OrtValue* value = nullptr;
    Check(Api().KernelContext_GetInput(context, i, &value));
    Require(value != nullptr, "input ", i, " is missing");
    inputs[i] = TensorFrom(value);
  }
  const std::vector<int64_t> shape = op_->OutputShape(inputs);
  OrtValue* y = nullptr;
  Check(Api().KernelContext_GetOutput(context, 0, shape.data(), shape.size(), &y));
  void* data = nullptr;
  Check(Api().GetTensorMutableData(y, &data));
  ContextThreadPool pool(context, threads_);
  op_->Run(inputs, data, pool);
}

}  // namespace lowbit::ort
