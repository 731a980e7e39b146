// A library in the place of liblowbit_cuda (LOWBIT_CUDA_LIBRARY names it), whose devices are fake: everything
// between ONNX Runtime and a GPU is tested without one.
#include <memory>

#include "ep/ort/factory.h"
#include "ep/tests/fake_device/fake_backend.h"
#include "ep/tests/fake_device/fake_runtime.h"

namespace lowbit::ep::fake {
namespace {

// The one that was created last, for the functions that tests call.
std::shared_ptr<FakeRuntime>& Runtime() {
  static std::shared_ptr<FakeRuntime> runtime;
  return runtime;
}

}  // namespace
}  // namespace lowbit::ep::fake

using lowbit::ep::fake::Runtime;

extern "C" {

__attribute__((visibility("default"))) OrtStatus* LowBitCreateCudaEpFactory(const char*,
                                                                            const OrtApiBase* base,
                                                                            const OrtLogger* logger,
                                                                            OrtCustomOpDomain* domain,
                                                                            OrtEpFactory** out) {
  OrtStatus* refused = lowbit::ep::Guarded([] {
    Runtime() = std::make_shared<lowbit::ep::fake::FakeRuntime>(lowbit::ep::fake::CreateFakeBackend);
  });
  if (refused != nullptr) return refused;
  return lowbit::ep::CreateDeviceFactory(base, logger, domain, Runtime(), out);
}

__attribute__((visibility("default"))) void LowBitReleaseCudaEpFactory(OrtEpFactory* factory) {
  lowbit::ep::ReleaseFactory(factory);
}

// For tests: what the devices saw.
__attribute__((visibility("default"))) size_t LowBitFakeBytesInUse(int device) {
  return Runtime()->memory(device).in_use();
}
__attribute__((visibility("default"))) size_t LowBitFakeBlocks(int device) {
  return Runtime()->memory(device).blocks();
}
__attribute__((visibility("default"))) size_t LowBitFakeFaults(int device) {
  return Runtime()->memory(device).faults();
}
__attribute__((visibility("default"))) void LowBitFakeLose(int lost) { Runtime()->Lose(lost != 0); }

}  // extern "C"
