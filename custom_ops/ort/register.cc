#include <onnxruntime_c_api.h>
extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions*, const OrtApiBase*) noexcept { return nullptr; }
