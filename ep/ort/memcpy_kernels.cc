#include "ep/ort/memcpy_kernels.h"

#include <vector>

namespace lowbit::ep {
namespace {

using Place = DeviceRuntime::Place;

struct MemcpyKernel : OrtKernelImpl {
  MemcpyKernel(Device& its_device, bool copies_to_host);

  void Copy(OrtKernelContext* context) const;

  Device& device;
  bool to_host;
};

void MemcpyKernel::Copy(OrtKernelContext* context) const {
  const OrtValue* x = nullptr;
  Check(Api().KernelContext_GetInput(context, 0, &x));
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  const int64_t* dims = nullptr;
  size_t rank = 0, bytes = 0;
  Check(Api().GetTensorElementTypeAndShapeDataReference(x, &type, &dims, &rank));
  Check(Api().GetTensorSizeInBytes(x, &bytes));
  OrtValue* y = nullptr;
  Check(Api().KernelContext_GetOutput(context, 0, dims, rank, &y));
  const void* from = nullptr;
  void *to = nullptr, *stream = nullptr;
  Check(Api().GetTensorData(x, &from));
  Check(Api().GetTensorMutableData(y, &to));
  Check(Api().KernelContext_GetGPUComputeStream(context, &stream));
  device.Copy(to, to_host ? Place::kHost : Place::kDevice, from, to_host ? Place::kDevice : Place::kHost,
              bytes, stream);
}

MemcpyKernel::MemcpyKernel(Device& its_device, bool copies_to_host)
    : OrtKernelImpl{}, device(its_device), to_host(copies_to_host) {
  ort_version_supported = ort::RuntimeApiVersion();
  Compute = [](OrtKernelImpl* self, OrtKernelContext* context) noexcept {
    return Guarded([&] { static_cast<MemcpyKernel*>(self)->Copy(context); });
  };
  Release = [](OrtKernelImpl* self) noexcept { delete static_cast<MemcpyKernel*>(self); };
}

template <bool kToHost>
OrtStatus* CreateMemcpy(void* device, const OrtKernelInfo*, OrtKernelImpl** out) noexcept {
  return Guarded(
      [&] { *out = std::make_unique<MemcpyKernel>(*static_cast<Device*>(device), kToHost).release(); });
}

// Every type that has a size; ONNX Runtime moves whatever lies between two nodes.
constexpr ONNXTensorElementDataType kTypes[] = {
    ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,   ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,    ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16,   ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,   ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32,  ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64,
    ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16};

struct ReleaseBuilder {
  void operator()(OrtKernelDefBuilder* p) const { EpApi().ReleaseKernelDefBuilder(p); }
  void operator()(OrtKernelDef* p) const { EpApi().ReleaseKernelDef(p); }
};

void AddKernel(OrtKernelRegistry* registry, const char* op, bool to_host, Device& device) {
  const OrtEpApi& api = EpApi();
  OrtKernelDefBuilder* raw = nullptr;
  Check(api.CreateKernelDefBuilder(&raw));
  const std::unique_ptr<OrtKernelDefBuilder, ReleaseBuilder> builder(raw);
  Check(api.KernelDefBuilder_SetOperatorType(raw, op));
  Check(api.KernelDefBuilder_SetDomain(raw, ""));
  Check(api.KernelDefBuilder_SetSinceVersion(raw, 1, 1));
  Check(api.KernelDefBuilder_SetExecutionProvider(raw, kProviderName));
  if (to_host) {
    Check(api.KernelDefBuilder_SetOutputMemType(raw, 0, OrtMemTypeCPUOutput));
  } else {
    Check(api.KernelDefBuilder_SetInputMemType(raw, 0, OrtMemTypeCPUInput));
  }
  std::vector<const OrtDataType*> types;
  for (const ONNXTensorElementDataType type : kTypes)
    Check(api.GetTensorDataType(type, &types.emplace_back()));
  Check(api.KernelDefBuilder_AddTypeConstraint(raw, "T", types.data(), types.size()));
  OrtKernelDef* made = nullptr;
  Check(api.KernelDefBuilder_Build(raw, &made));
  const std::unique_ptr<OrtKernelDef, ReleaseBuilder> definition(made);
  Check(api.KernelRegistry_AddKernel(registry, made, to_host ? CreateMemcpy<true> : CreateMemcpy<false>,
                                     &device));
}

}  // namespace

KernelRegistry CreateMemcpyRegistry(Device& device) {
  OrtKernelRegistry* raw = nullptr;
  Check(EpApi().CreateKernelRegistry(&raw));
  KernelRegistry registry(raw);
  AddKernel(raw, "MemcpyFromHost", false, device);
  AddKernel(raw, "MemcpyToHost", true, device);
  return registry;
}

}  // namespace lowbit::ep
