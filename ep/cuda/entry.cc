// What liblowbit_cuda exports. liblowbit (ep/entry.cc) opens the library and hands these factories to ONNX
// Runtime beside its own; only ONNX Runtime's C structs pass between the two.
#include <memory>
#include <string_view>

#include "ep/cuda/cuda_backend.h"
#include "ep/cuda/runtime.h"
#include "ep/cuda/tuner.h"
#include "ep/ort/factory.h"

namespace lowbit::ep {
namespace {

// GPUs that are not there, for which models are compiled alone; "target:sm_90".
std::vector<HostDevice> Targets() {
  std::vector<HostDevice> targets;
  for (const int architecture : cuda::Device::Architectures()) {
    const std::string name = "sm_" + std::to_string(architecture);
    const std::string build = CudaTuneOrigin(cuda::Device::Absent(architecture, 0)).build;
    targets.push_back({"target:" + name,
                       [architecture](const EpOptions& options) {
                         const int multiprocessors = MultiprocessorsOf(options.tuned_on);
                         const cuda::Device device = cuda::Device::Absent(architecture, multiprocessors);
                         return CreateCudaBackend(std::make_shared<CudaDevice>(device), options);
                       },
                       "NVIDIA GPU, " + name + ", compiled for only; " + build});
  }
  return targets;
}

}  // namespace
}  // namespace lowbit::ep

extern "C" {

#if defined(_WIN32)
#define LOWBIT_EXPORT __declspec(dllexport)
#else
#define LOWBIT_EXPORT __attribute__((visibility("default")))
#endif

LOWBIT_EXPORT OrtStatus* LowBitCreateCudaEpFactory(const char* registration_name, const OrtApiBase* base,
                                                   const OrtLogger* logger, OrtCustomOpDomain* domain,
                                                   OrtEpFactory** out) noexcept {
  if (registration_name != nullptr &&
      std::string_view(registration_name).ends_with(lowbit::ep::kTargetsSuffix)) {
    if (OrtStatus* refused = lowbit::ort::Attach(base)) return refused;
    return lowbit::ep::Guarded([&] {
      lowbit::ep::Check(
          lowbit::ep::CreateHostFactory(logger, domain, lowbit::ep::Targets(), false, {}, nullptr, out));
    });
  }
  return lowbit::ep::CreateDeviceFactory(base, logger, domain, std::make_shared<lowbit::ep::CudaRuntime>(),
                                         out);
}

LOWBIT_EXPORT void LowBitReleaseCudaEpFactory(OrtEpFactory* factory) noexcept {
  lowbit::ep::ReleaseFactory(factory);
}

}  // extern "C"
