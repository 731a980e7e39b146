// The function table of the ONNX Runtime that loaded this library, and errors across its C boundary.
#pragma once

#define ORT_API_MANUAL_INIT
#include <onnxruntime_c_api.h>

#include <memory>
#include <optional>
#include <string>

#include "core/cpu/operator.h"
#include "core/types.h"
#include "include/lowbit.h"

namespace lowbit::ort {

// Compiled against the newest headers, asks for the functions of this version only: that of the oldest ONNX
// Runtime.
inline constexpr uint32_t kApiVersion = LOWBIT_ORT_API;

const OrtApi& Api();
// The version of the running ONNX Runtime's API as far as the headers know it: structs that the library fills
// in say that they are of this version, entries added after kApiVersion are used only where it covers them.
uint32_t RuntimeApiVersion();
// What every function that the library exports does first: takes the function table. Gives the status to
// return where this ONNX Runtime is too old, or where another one of this process has loaded the library
// before (its tensors and statuses are not those of `base`); null otherwise.
OrtStatus* Attach(const OrtApiBase* base) noexcept;

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
  void operator()(OrtMemoryInfo* p) const { Api().ReleaseMemoryInfo(p); }
  void operator()(OrtOpAttr* p) const { Api().ReleaseOpAttr(p); }
  void operator()(OrtSessionOptions* p) const { Api().ReleaseSessionOptions(p); }
  void operator()(OrtSession* p) const { Api().ReleaseSession(p); }
  void operator()(OrtModelMetadata* p) const { Api().ReleaseModelMetadata(p); }
  void operator()(OrtIoBinding* p) const { Api().ReleaseIoBinding(p); }
  void operator()(OrtValue* p) const { Api().ReleaseValue(p); }
  void operator()(OrtNode* p) const { Api().ReleaseNode(p); }
  void operator()(OrtCustomOpDomain* p) const { Api().ReleaseCustomOpDomain(p); }
};
template <typename T>
using Owned = std::unique_ptr<T, Release>;

// nullopt for element types that no lowbit op knows.
std::optional<ElementType> KnownElementType(ONNXTensorElementDataType type);
// Throws Error for those.
ElementType ElementTypeFrom(ONNXTensorElementDataType type);
ONNXTensorElementDataType ToOrt(ElementType type);

// Whether an environment variable is set to something else than nothing or "0".
bool EnvironmentFlag(const char* name);

// The tensor in `value`, which must outlive the result. Throws Error for element types that no lowbit op
// knows.
ConstTensor TensorFrom(const OrtValue* value);

}  // namespace lowbit::ort
