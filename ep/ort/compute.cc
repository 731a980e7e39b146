#include "ep/ort/compute.h"

#include <algorithm>
#include <utility>

#include "core/node_reader.h"
#include "core/status.h"
#include "ep/ort/profiler.h"
#include "ort/context_thread_pool.h"

namespace lowbit::ep {
namespace {

bool HasElements(const TensorShape& shape) {
  return std::find(shape.dims.begin(), shape.dims.end(), 0) == shape.dims.end();
}

// The memory of an output, allocated for this run.
void* Output(OrtKernelContext* context, size_t index, const TensorShape& shape) {
  OrtValue* value = nullptr;
  Check(Api().KernelContext_GetOutput(context, index, shape.dims.data(), shape.dims.size(), &value));
  Require(value != nullptr, "ONNX Runtime gave no output ", index);
  // Made by the type that the model declares, which for a compiled region nothing else compares with what it
  // makes.
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  const int64_t* dims = nullptr;
  size_t rank = 0;
  Check(Api().GetTensorElementTypeAndShapeDataReference(value, &type, &dims, &rank));
  Require(type == ort::ToOrt(shape.type), "the graph declares output ", index, " with ONNX element type ",
          static_cast<int>(type), ", the region makes ", static_cast<int>(ort::ToOrt(shape.type)));
  void* data = nullptr;
  Check(Api().GetTensorMutableData(value, &data));
  return data;
}

}  // namespace

NodeCompute::NodeCompute(std::string where) : OrtNodeComputeInfo{}, where_(std::move(where)) {
  ort_version_supported = ort::RuntimeApiVersion();
  CreateState = [](OrtNodeComputeInfo*, OrtNodeComputeContext*, void** state) noexcept -> OrtStatus* {
    *state = nullptr;  // a program serves all threads as it is
    return nullptr;
  };
  Compute = [](OrtNodeComputeInfo* info, void*, OrtKernelContext* context) noexcept -> OrtStatus* {
    const NodeCompute* self = static_cast<NodeCompute*>(info);
    try {
      self->Run(context);
      return nullptr;
    } catch (...) {
      return ort::StatusFromException(self->where_);
    }
  };
  ReleaseState = [](OrtNodeComputeInfo*, void*) noexcept {};
}

RegionCompute::RegionCompute(std::shared_ptr<Program> program, Binding binding,
                             std::shared_ptr<Device> device, std::string name)
    : NodeCompute("lowbit: region '" + std::move(name) + "': "),
      program_(std::move(program)),
      binding_(std::move(binding)),
      device_(std::move(device)) {}

void RegionCompute::Run(OrtKernelContext* context) const {
  const size_t input_count = binding_.inputs.size();
  std::vector<TensorShape> shapes(input_count);
  std::vector<void*> externals(input_count + binding_.outputs.size());
  for (size_t i = 0; i < input_count; ++i) {
    const OrtValue* value = nullptr;
    Check(Api().KernelContext_GetInput(context, binding_.inputs[i], &value));
    Require(value != nullptr, "input ", i, " is missing");
    ConstTensor tensor = ort::TensorFrom(value);
    shapes[i] = {tensor.type, std::move(tensor.shape)};
    externals[i] = const_cast<void*>(tensor.data);  // programs do not write their inputs
  }
  const std::shared_ptr<const RegionPlan> plan = program_->PlanFor(shapes);
  Require(plan->outputs.size() == binding_.outputs.size(), "the model lists ", binding_.outputs.size(),
          " outputs of a region that makes ", plan->outputs.size());
  for (size_t i = 0; i < plan->outputs.size(); ++i)
    externals[input_count + i] = Output(context, binding_.outputs[i], plan->outputs[i]);
  RunOn(device_.get(), plan, externals, context);
}

void RegionCompute::RunOn(Device* device, const std::shared_ptr<const RegionPlan>& plan,
                          std::span<void* const> externals, OrtKernelContext* context) const {
  if (device == nullptr) {
    ort::ContextThreadPool pool(context);
    program_->Run(plan, externals, {&pool, nullptr, Profiler::Listening()});
    return;
  }
  for (size_t i = 0; i < externals.size(); ++i) {
    const bool is_input = i < plan->inputs.size();
    const TensorShape& shape = is_input ? plan->inputs[i] : plan->outputs[i - plan->inputs.size()];
    Require(externals[i] != nullptr || !HasElements(shape), is_input ? "an input" : "an output", " of shape ",
            ShapeText(shape.dims), " has no memory: the device has none left (",
            device->runtime().BytesInUse(device->index()), " bytes of it are in use by this process)");
  }
  void* stream = nullptr;
  Check(Api().KernelContext_GetGPUComputeStream(context, &stream));
  {
    const Device::Enqueuing enqueuing(*device, stream);
    program_->Run(plan, externals, {nullptr, stream, Profiler::Listening()});
  }
  if (stream == nullptr) device->runtime().Synchronize(device->index(), nullptr);
}

}  // namespace lowbit::ep
