// What liblowbit_cuda exports. liblowbit (ep/entry.cc) opens the library and hands these factories to ONNX
// Runtime beside its own; only ONNX Runtime's C structs pass between the two.
#include <memory>

#include "ep/cuda/runtime.h"
#include "ep/ort/factory.h"

extern "C" {

#if defined(_WIN32)
#define LOWBIT_EXPORT __declspec(dllexport)
#else
#define LOWBIT_EXPORT __attribute__((visibility("default")))
#endif

LOWBIT_EXPORT OrtStatus* LowBitCreateCudaEpFactory(const char* /*registration_name*/, const OrtApiBase* base,
                                                   const OrtLogger* logger, OrtCustomOpDomain* domain,
                                                   OrtEpFactory** out) noexcept {
  return lowbit::ep::CreateDeviceFactory(base, logger, domain, std::make_shared<lowbit::ep::CudaRuntime>(),
                                         out);
}

LOWBIT_EXPORT void LowBitReleaseCudaEpFactory(OrtEpFactory* factory) noexcept {
  lowbit::ep::ReleaseFactory(factory);
}

}  // extern "C"
