#include "ort/ort_api.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string_view>

#include "core/status.h"

namespace lowbit::ort {
namespace {

// Set by the first registration; every later one brings the same pointer or is refused.
std::atomic<const OrtApi*> g_api{nullptr};
std::atomic<uint32_t> g_runtime_version{kApiVersion};

bool SetApi(const OrtApi* api) {
  const OrtApi* held = nullptr;
  return g_api.compare_exchange_strong(held, api, std::memory_order_acq_rel) || held == api;
}

// Release 1.n has API version n. (Asking GetApi for versions that may not exist prints to stderr.)
uint32_t VersionOf(std::string_view release) {
  uint32_t minor = 0;
  const size_t dot = release.find('.');
  if (!release.starts_with("1.") || dot == std::string_view::npos) return kApiVersion;
  std::from_chars(release.data() + dot + 1, release.data() + release.size(), minor);
  return std::clamp<uint32_t>(minor, kApiVersion, ORT_API_VERSION);
}

}  // namespace

const OrtApi& Api() { return *g_api.load(std::memory_order_acquire); }

uint32_t RuntimeApiVersion() { return g_runtime_version.load(std::memory_order_relaxed); }

OrtStatus* Attach(const OrtApiBase* base) noexcept {
  const OrtApi* api = base->GetApi(kApiVersion);
  if (api == nullptr) {
    // The oldest table serves to say so.
    const std::string message = "lowbit needs ONNX Runtime 1." + std::to_string(kApiVersion) +
                                " or newer, this is " + base->GetVersionString() +
                                "; update the onnxruntime package";
    return base->GetApi(1)->CreateStatus(ORT_FAIL, message.c_str());
  }
  if (!SetApi(api)) {
    return api->CreateStatus(ORT_FAIL,
                             "lowbit: another ONNX Runtime of this process uses this library already; load a "
                             "copy of the library file under another name");
  }
  g_runtime_version.store(VersionOf(base->GetVersionString()), std::memory_order_relaxed);
  return nullptr;
}

void Check(OrtStatus* status) {
  if (status == nullptr) return;
  const Owned<OrtStatus> owned(status);
  throw Error(Api().GetErrorMessage(status));
}

OrtStatus* StatusFromException(const std::string& where) noexcept {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return Api().CreateStatus(ORT_FAIL, "lowbit: out of memory");  // no text is put together without any
  } catch (const std::exception& e) {
    return Api().CreateStatus(ORT_INVALID_ARGUMENT, (where + e.what()).c_str());
  } catch (...) {
    return Api().CreateStatus(ORT_FAIL, (where + "unknown error").c_str());
  }
}

std::optional<ElementType> KnownElementType(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
      return ElementType::kUInt8;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
      return ElementType::kInt8;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
      return ElementType::kInt32;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return ElementType::kFloat;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      return ElementType::kFloat16;
    default:
      return std::nullopt;
  }
}

ElementType ElementTypeFrom(ONNXTensorElementDataType type) {
  const std::optional<ElementType> known = KnownElementType(type);
  Require(known.has_value(), "a tensor has ONNX element type ", static_cast<int>(type),
          ", expected uint8, int8, int32, float or float16");
  return *known;
}

ONNXTensorElementDataType ToOrt(ElementType type) {
  switch (type) {
    case ElementType::kUInt8:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
    case ElementType::kInt8:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
    case ElementType::kInt32:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
    case ElementType::kFloat:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    case ElementType::kFloat16:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
  }
  return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
}

bool EnvironmentFlag(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' && std::strcmp(text, "0") != 0;
}

ConstTensor TensorFrom(const OrtValue* value) {
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  const int64_t* dims = nullptr;
  size_t rank = 0;
  Check(Api().GetTensorElementTypeAndShapeDataReference(value, &type, &dims, &rank));
  ConstTensor tensor{ElementTypeFrom(type), {dims, dims + rank}, nullptr};
  Check(Api().GetTensorData(value, &tensor.data));
  return tensor;
}

}  // namespace lowbit::ort
