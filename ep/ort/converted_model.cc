#include "ep/ort/converted_model.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/status.h"
#include "ep/ort/sha256.h"

namespace lowbit::ep {
namespace {

// The session entry of a session inside.
constexpr const char* kInside = "lowbit.inside";
// Of the metadata that `lowbit convert` writes.
constexpr const char* kSourceHash = "lowbit.source_sha256";

constexpr const char* kAgain = "convert the model again: `lowbit convert MODEL -o OUT`";

// Text that ONNX Runtime's allocator holds.
std::string Taken(char* text) {
  if (text == nullptr) return "";
  std::string copy = text;
  OrtAllocator* allocator = nullptr;
  Check(Api().GetAllocatorWithDefaultOptions(&allocator));
  Check(Api().AllocatorFree(allocator, text));
  return copy;
}

std::vector<NamedType> TensorsOf(const OrtSession* session, decltype(OrtApi::SessionGetInputCount) get_count,
                                 decltype(OrtApi::SessionGetInputName) get_name,
                                 decltype(OrtApi::SessionGetInputTypeInfo) get_type) {
  OrtAllocator* allocator = nullptr;
  Check(Api().GetAllocatorWithDefaultOptions(&allocator));
  size_t count = 0;
  Check(get_count(session, &count));
  std::vector<NamedType> tensors;
  for (size_t i = 0; i < count; ++i) {
    char* name = nullptr;
    Check(get_name(session, i, allocator, &name));
    std::string taken = Taken(name);
    OrtTypeInfo* type = nullptr;
    Check(get_type(session, i, &type));
    const Owned<OrtTypeInfo> owned(type);
    tensors.push_back({std::move(taken), TypeFrom(type)});
  }
  return tensors;
}

std::string Text(const NamedType& tensor) {
  std::string text;
  AppendText(text, "'", tensor.name, "' of ONNX element type ", static_cast<int>(tensor.type.type));
  if (tensor.type.dims) AppendText(text, " and shape ", ShapeText(*tensor.type.dims));
  return text;
}

// Whether the two differ in nothing that both state. ONNX Runtime completes what a model leaves open.
bool Agree(const NamedType& a, const NamedType& b) {
  if (a.name != b.name || a.type.type != b.type.type) return false;
  if (!a.type.dims || !b.type.dims) return true;
  return std::equal(a.type.dims->begin(), a.type.dims->end(), b.type.dims->begin(), b.type.dims->end(),
                    [](int64_t x, int64_t y) { return x == y || x < 0 || y < 0; });
}

void CheckSame(const std::vector<NamedType>& source, const std::vector<NamedType>& converted,
               const char* what) {
  Require(source.size() == converted.size(), "it has ", converted.size(), " ", what, "s, the model has ",
          source.size(), "; ", kAgain);
  for (size_t i = 0; i < source.size(); ++i) {
    Require(Agree(source[i], converted[i]), "its ", what, " ", i, " is ", Text(converted[i]),
            ", the model's is ", Text(source[i]), "; ", kAgain);
  }
}

void CheckHash(const OrtSession* session, const std::filesystem::path& source) {
  OrtModelMetadata* metadata = nullptr;
  Check(Api().SessionGetModelMetadata(session, &metadata));
  const Owned<OrtModelMetadata> owned(metadata);
  OrtAllocator* allocator = nullptr;
  Check(Api().GetAllocatorWithDefaultOptions(&allocator));
  char* recorded = nullptr;
  Check(Api().ModelMetadataLookupCustomMetadataMap(metadata, allocator, kSourceHash, &recorded));
  const std::string expected = Taken(recorded);
  Require(!expected.empty(), "its metadata hold no '", kSourceHash,
          "', so it is no file that `lowbit convert` wrote");
  Require(!source.empty(),
          "the session was given its model from memory, so that it cannot be told whether "
          "this file was made of it; open the model by its path");
  const std::string found = Sha256OfFile(source);
  Require(found == expected, "it was made of a model whose SHA-256 is ", expected, ", that of ",
          source.string(), " is ", found, "; ", kAgain);
}

}  // namespace

SourceModel ReadSourceModel(const OrtGraph* graph) {
  return {ModelFile(graph), GraphInputs(graph), GraphOutputs(graph)};
}

Owned<OrtSessionOptions> OptionsInside(const OrtSessionOptions* around) {
  OrtSessionOptions* made = nullptr;
  Check(Api().CloneSessionOptions(around, &made));
  Owned<OrtSessionOptions> options(made);
  Check(Api().AddSessionConfigEntry(made, kInside, "1"));
  Check(Api().DisableProfiling(made));  // it would write into the file of the session around it
  return options;
}

bool IsInside(const std::map<std::string, std::string>& session_entries) {
  return session_entries.contains(kInside);
}

ConvertedCompute::ConvertedCompute(const std::filesystem::path& converted, const SourceModel& source,
                                   const OrtSessionOptions* options, std::shared_ptr<Device> device,
                                   std::vector<std::string> inputs, std::vector<std::string> outputs)
    : NodeCompute("lowbit: " + converted.string() + ": "),
      device_(std::move(device)),
      inputs_(std::move(inputs)),
      outputs_(std::move(outputs)) {
  try {
    OrtSession* session = nullptr;
    Check(Api().CreateSession(environment_.get(), converted.c_str(), options, &session));
    session_.reset(session);
    const auto its_inputs = TensorsOf(session, Api().SessionGetInputCount, Api().SessionGetInputName,
                                      Api().SessionGetInputTypeInfo);
    CheckSame(source.inputs, its_inputs, "input");
    CheckSame(source.outputs,
              TensorsOf(session, Api().SessionGetOutputCount, Api().SessionGetOutputName,
                        Api().SessionGetOutputTypeInfo),
              "output");
    CheckHash(session, source.file);
    for (const NamedType& input : its_inputs) {
      Require(std::find(inputs_.begin(), inputs_.end(), input.name) != inputs_.end(), "its input '",
              input.name,
              "' is not handed on by ONNX Runtime: no node of the model reads it, or (with the older "
              "releases) only "
              "nodes of a "
              "subgraph do; open the converted file instead");
    }
    OrtMemoryInfo* memory = nullptr;
    Check(Api().CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &memory));
    host_memory_.reset(memory);
  } catch (const Error& e) {
    Fail("option 'converted_model' is ", converted.string(), ": ", e.what());
  }
}

void ConvertedCompute::Run(OrtKernelContext* context) const {
  void* stream = nullptr;
  if (device_ != nullptr) {
    // The session inside has streams of its own, and its inputs are copied on this one.
    Check(Api().KernelContext_GetGPUComputeStream(context, &stream));
    if (stream != nullptr) device_->Synchronize(stream);
  }
  OrtIoBinding* made = nullptr;
  Check(Api().CreateIoBinding(session_.get(), &made));
  const Owned<OrtIoBinding> binding(made);
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const OrtValue* value = nullptr;
    Check(Api().KernelContext_GetInput(context, i, &value));
    Check(Api().BindInput(made, inputs_[i].c_str(), value));
  }
  const OrtMemoryInfo* memory = device_ == nullptr ? host_memory_.get() : device_->memory_info();
  for (const std::string& output : outputs_) Check(Api().BindOutputToDevice(made, output.c_str(), memory));
  Check(Api().RunWithBinding(session_.get(), nullptr, made));

  OrtAllocator* allocator = nullptr;
  Check(Api().GetAllocatorWithDefaultOptions(&allocator));
  OrtValue** values = nullptr;
  size_t count = 0;
  Check(Api().GetBoundOutputValues(made, allocator, &values, &count));
  std::vector<Owned<OrtValue>> results(values, values + count);
  Check(Api().AllocatorFree(allocator, static_cast<void*>(values)));
  for (size_t i = 0; i < count; ++i) {
    ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    const int64_t* dims = nullptr;
    size_t rank = 0, bytes = 0;
    Check(Api().GetTensorElementTypeAndShapeDataReference(results[i].get(), &type, &dims, &rank));
    Check(Api().GetTensorSizeInBytes(results[i].get(), &bytes));
    const void* from = nullptr;
    Check(Api().GetTensorData(results[i].get(), &from));
    OrtValue* output = nullptr;
    Check(Api().KernelContext_GetOutput(context, i, dims, rank, &output));
    void* to = nullptr;
    Check(Api().GetTensorMutableData(output, &to));
    if (device_ == nullptr) {
      if (bytes != 0) std::memcpy(to, from, bytes);
    } else {
      device_->Copy(to, DeviceRuntime::Place::kDevice, from, DeviceRuntime::Place::kDevice, bytes, stream);
    }
  }
}

}  // namespace lowbit::ep
