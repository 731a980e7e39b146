// What tests of ONNX Runtime's C interface share.
#pragma once

#include <onnxruntime_c_api.h>

#include <stdexcept>
#include <string>

inline const OrtApi* g_api = nullptr;  // of the library that the test has opened

inline void Check(OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = g_api->GetErrorMessage(status);
  g_api->ReleaseStatus(status);
  throw std::runtime_error(message);
}
