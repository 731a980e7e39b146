#include "ort/ort_api.h"

#include <atomic>
#include <exception>
#include <new>

#include "core/status.h"

namespace lowbit::ort {
namespace {

// Set by the first registration; every later one brings the same pointer or is refused.
std::atomic<const OrtApi*> g_api{nullptr};

}  // namespace

const OrtApi& Api() { return *g_api.load(std::memory_order_acquire); }

bool SetApi(const OrtApi* api) {
  const OrtApi* held = nullptr;
  return g_api.compare_exchange_strong(held, api, std::memory_order_acq_rel) || held == api;
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

ElementType ElementTypeFrom(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
      return ElementType::kUInt8;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
      return ElementType::kInt8;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
      return ElementType::kInt32;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return ElementType::kFloat;
    default:
      Fail("a tensor has ONNX element type ", static_cast<int>(type),
           ", expected uint8, int8, int32 or float");
  }
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
  }
  return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
}

}  // namespace lowbit::ort
