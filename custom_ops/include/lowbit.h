// lowbit's static library: the one function that an app calls.
//
//   Ort::SessionOptions options;
//   Ort::ThrowOnError(RegisterCustomOps(options, OrtGetApiBase()));
//   Ort::Session session(env, "model.ort", options);
#pragma once

#include <onnxruntime_c_api.h>

#ifdef __cplusplus
extern "C" {
#define LOWBIT_NOEXCEPT noexcept
#else
#define LOWBIT_NOEXCEPT
#endif

// Adds the ops of domain ai.lowbit to the options of a session. Returns null, or a status that the caller
// releases: where ONNX Runtime is older than 1.24, or another one of the process uses this library already.
// Adding them twice to the same options does nothing.
OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* api) LOWBIT_NOEXCEPT;

#ifdef __cplusplus
}
#endif
#undef LOWBIT_NOEXCEPT
