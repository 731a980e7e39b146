// lowbit's library for C and C++ programs that link it, shared or static: the one function that they call.
//
//   Ort::SessionOptions options;
//   Ort::ThrowOnError(RegisterCustomOps(options, OrtGetApiBase()));
//   Ort::Session session(env, "model.ort", options);
#pragma once

#include <onnxruntime_c_api.h>

// The oldest API of ONNX Runtime with which the library works: release 1.N offers API N.
#define LOWBIT_ORT_API 24

// The execution provider in the shared library, which ONNX Runtime opens by its path
// (RegisterExecutionProviderLibrary): the name under which its devices are listed.
#define LOWBIT_EP_NAME "LowBitExecutionProvider"

#ifdef __cplusplus
extern "C" {
#define LOWBIT_NOEXCEPT noexcept
#else
#define LOWBIT_NOEXCEPT
#endif

// Adds the ops of domain ai.lowbit to the options of a session. Returns null, or a status that the caller
// releases: where ONNX Runtime is too old, or another one of the process uses this library already.
// Adding them twice to the same options does nothing.
OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* api) LOWBIT_NOEXCEPT;

#ifdef __cplusplus
}
#endif
#undef LOWBIT_NOEXCEPT
