// CreateEpFactories and ReleaseEpFactory of liblowbit: the CPU's factory, and that of the GPUs where
// liblowbit_cuda is there and finds one. Between the two libraries stand ONNX Runtime's C structs alone.
#include <dlfcn.h>

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "core/cpu/isa.h"
#include "core/status.h"
#include "ep/cpu/cpu_backend.h"
#include "ep/ort/factory.h"
#include "ort/append_provider.h"
#include "ort/domain.h"

namespace lowbit::ep {
namespace {

namespace fs = std::filesystem;

constexpr const char* kCudaLibrary = "liblowbit_cuda.so";
constexpr const char* kPathVariable = "LOWBIT_CUDA_LIBRARY";

// A registration whose name ends so offers the CPU alone. Looking for GPUs starts CUDA, which takes time and memory
// and leaves the process one that must not fork: nobody pays that who wants the CPU. As ONNX Runtime's own ".virtual",
// the name carries it, because nothing else reaches CreateEpFactories.
constexpr std::string_view kCpuSuffix = ".cpu";

// What liblowbit_cuda exports.
using CreateCudaFactory = OrtStatus* (*)(const char*, const OrtApiBase*, const OrtLogger*, OrtCustomOpDomain*,
                                         OrtEpFactory**);
using ReleaseCudaFactory = void (*)(OrtEpFactory*);

struct CudaLibrary {
  CreateCudaFactory create = nullptr;
  ReleaseCudaFactory release = nullptr;
};

// Opens liblowbit_cuda once and for the rest of the process; `why_not` says why it is not there.
CudaLibrary OpenCuda(const Logger& logger, NoGpu& why_not) {
  why_not.reason = OrtDeviceEpIncompatibility_MISSING_DEPENDENCY;
  const char* named = std::getenv(kPathVariable);
  const bool is_named = named != nullptr && *named != '\0';
  const fs::path path = is_named ? fs::path(named) : ort::OwnLibrary().parent_path() / kCudaLibrary;
  std::error_code error;
  if (!is_named && !fs::exists(path, error)) {
    why_not.text = path.string() + " is not installed; the package onnxruntime-ep-lowbit-cuda brings it";
    return {};
  }
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    why_not.text = std::string("cannot load it: ") + dlerror();
    logger.Warning("lowbit: GPUs are not offered: " + why_not.text);
    return {};
  }
  CudaLibrary cuda{reinterpret_cast<CreateCudaFactory>(dlsym(library, "LowBitCreateCudaEpFactory")),
                   reinterpret_cast<ReleaseCudaFactory>(dlsym(library, "LowBitReleaseCudaEpFactory"))};
  if (cuda.create != nullptr && cuda.release != nullptr) return cuda;
  why_not.text =
      path.string() + " is not lowbit's library for GPUs; reinstall it in the version of " LOWBIT_VERSION;
  logger.Warning("lowbit: GPUs are not offered: " + why_not.text);
  return {};
}

// The factories that liblowbit_cuda made, which only it can release.
class CudaFactories {
 public:
  void Add(OrtEpFactory* factory, ReleaseCudaFactory release) {
    const std::lock_guard lock(mutex_);
    made_[factory] = release;
  }
  bool Release(OrtEpFactory* factory) {
    ReleaseCudaFactory release = nullptr;
    {
      const std::lock_guard lock(mutex_);
      const auto found = made_.find(factory);
      if (found == made_.end()) return false;
      release = found->second;
      made_.erase(found);
    }
    release(factory);
    return true;
  }

 private:
  std::mutex mutex_;
  std::map<OrtEpFactory*, ReleaseCudaFactory> made_;
};

// Never destroyed: an application may release ONNX Runtime's environment, and with it the factories, in a
// static destructor. Made in place: to release a factory takes no memory.
CudaFactories& MadeByCuda() {
  alignas(CudaFactories) static std::byte place[sizeof(CudaFactories)];
  static auto& factories = *new (place) CudaFactories;
  return factories;
}

struct ReleaseAnyFactory {
  void operator()(OrtEpFactory* factory) const noexcept {
    if (!MadeByCuda().Release(factory)) ReleaseFactory(factory);
  }
};
using AnyFactory = std::unique_ptr<OrtEpFactory, ReleaseAnyFactory>;

// The GPUs' factory, or null and the reason.
AnyFactory CreateGpuFactory(const char* registration_name, const OrtApiBase* base, const OrtLogger* logger,
                            NoGpu& why_not) {
  const Logger log(logger);
  const CudaLibrary cuda = OpenCuda(log, why_not);
  if (cuda.create == nullptr) return nullptr;
  OrtEpFactory* factory = nullptr;
  const Owned<OrtStatus> refused(cuda.create(registration_name, base, logger, ort::Domain(), &factory));
  if (refused != nullptr) {
    why_not = {Api().GetErrorMessage(refused.get()), OrtDeviceEpIncompatibility_UNKNOWN};
    log.Info("lowbit: GPUs are not offered: " +
             why_not.text);  // a machine without a GPU is nothing to warn of
    return nullptr;
  }
  try {
    MadeByCuda().Add(factory, cuda.release);
  } catch (...) {
    cuda.release(factory);
    throw;
  }
  return AnyFactory(factory);
}

HostDevice Host() {
  return {"cpu",
          [](const EpOptions& options) {
            return CreateCpuBackend(
                {options.reference, options.tuning != Tuning::kOff, options.threads, options.warn});
          },
          CpuModel() + ", " + IsaName(DefaultIsa())};
}

}  // namespace
}  // namespace lowbit::ep

extern "C" {

// The CPU comes first: ONNX Runtime lists the devices in this order.
__attribute__((visibility("default"))) OrtStatus* CreateEpFactories(const char* registration_name,
                                                                    const OrtApiBase* base,
                                                                    const OrtLogger* logger,
                                                                    OrtEpFactory** factories, size_t room,
                                                                    size_t* count) noexcept {
  using namespace lowbit::ep;
  *count = 0;
  if (OrtStatus* refused = lowbit::ort::Attach(base)) return refused;
  return Guarded([&] {
    lowbit::Require(room >= 1, "ONNX Runtime takes no factory");
    const std::string name = registration_name == nullptr ? "" : registration_name;
    const bool is_alone = name.ends_with(kCpuSuffix);
    NoGpu why_not;
    AnyFactory gpu;
    if (name.ends_with(kTargetsSuffix)) {
      gpu = CreateGpuFactory(registration_name, base, logger, why_not);
      lowbit::Require(gpu != nullptr, "no GPU can be compiled for: ", why_not.text);
      factories[0] = gpu.release();
      *count = 1;
      return;
    }
    if (is_alone) {
      why_not.text = "the library was registered as '" + name + "', which offers the CPU alone";
    } else if (room >= 2) {
      gpu = CreateGpuFactory(registration_name, base, logger, why_not);
    }
    Check(CreateHostFactory(logger, lowbit::ort::Domain(), {Host()}, is_alone, std::move(why_not), gpu.get(),
                            &factories[0]));
    *count = gpu != nullptr ? 2 : 1;
    if (gpu != nullptr) factories[1] = gpu.release();
  });
}

__attribute__((visibility("default"))) OrtStatus* ReleaseEpFactory(OrtEpFactory* factory) noexcept {
  lowbit::ep::ReleaseAnyFactory()(factory);
  return nullptr;
}

}  // extern "C"
