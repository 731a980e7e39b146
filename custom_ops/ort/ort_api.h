// The function table of the ONNX Runtime that loaded this library, and errors across its C boundary.
#pragma once

#define ORT_API_MANUAL_INIT
#include <onnxruntime_c_api.h>

#include <memory>
#include <string>

#include "core/types.h"

namespace lowbit::ort {

// Compiled against the newest headers, asks for the functions of this version only: ONNX Runtime 1.24.
inline constexpr uint32_t kApiVersion = 24;

const OrtApi& Api();
// False where another ONNX Runtime of this process has loaded the library before: its tensors and statuses
// are not those of `api`.
bool SetApi(const OrtApi* api);

// Throws Error with the status' message and releases it.
void Check(OrtStatus* status);

// Calls fn and turns what it throws into a status, prefixed by where it happened. No exception may cross the
// C boundary.
OrtStatus* StatusFromException(const std::string& where) noexcept;

struct Release {
  void operator()(OrtTensorTypeAndShapeInfo* p) const { Api().ReleaseTensorTypeAndShapeInfo(p); }
  void operator()(OrtTypeInfo* p) const { Api().ReleaseTypeInfo(p); }
  void operator()(OrtStatus* p) const { Api().ReleaseStatus(p); }
  void operator()(OrtKeyValuePairs* p) const { Api().ReleaseKeyValuePairs(p); }
};
template <typename T>
using Owned = std::unique_ptr<T, Release>;

// Throws Error for element types that no lowbit op knows.
ElementType ElementTypeFrom(ONNXTensorElementDataType type);
ONNXTensorElementDataType ToOrt(ElementType type);

}  // namespace lowbit::ort
