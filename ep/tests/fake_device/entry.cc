// A library in the place of liblowbit_cuda (LOWBIT_CUDA_LIBRARY names it), whose devices are fake: everything
// between ONNX Runtime and a GPU is tested without one. Environment: LOWBIT_FAKE_DEVICES (2),
// LOWBIT_FAKE_BYTES per device (1 GiB), LOWBIT_FAKE_DELAY_US before every task of a stream (200).
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "ep/ort/factory.h"
#include "ep/tests/fake_device/fake_backend.h"
#include "ep/tests/fake_device/fake_memory.h"
#include "ep/tests/fake_device/fake_stream.h"

namespace lowbit::ep::fake {
namespace {

size_t Setting(const char* name, size_t fallback) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? fallback : std::strtoull(text, nullptr, 10);
}

std::atomic<bool> g_lost{false};  // every call fails, as on a device that fell off the bus

class FakeRuntime final : public DeviceRuntime {
 public:
  FakeRuntime() : delay_(Setting("LOWBIT_FAKE_DELAY_US", 200)) {
    const size_t count = Setting("LOWBIT_FAKE_DEVICES", 2);
    for (size_t i = 0; i < count; ++i)
      memories_.push_back(std::make_shared<Memory>(Setting("LOWBIT_FAKE_BYTES", size_t{1} << 30)));
  }

  const char* Kind() const override { return "fake"; }
  uint32_t VendorId() const override { return 0xfa4e; }
  int Count() const override { return static_cast<int>(memories_.size()); }
  std::string WhyNone() const override { return memories_.empty() ? "LOWBIT_FAKE_DEVICES is 0" : ""; }
  std::string Describe(int device) const override { return "fake device " + std::to_string(device); }
  std::string PciBusId(int) const override { return ""; }

  void* Allocate(int device, size_t bytes) override {
    CheckAlive();
    return memory(device).Allocate(bytes);
  }
  void Free(int device, void* block) noexcept override { memory(device).Free(block); }
  size_t BytesInUse(int device) const override { return memory(device).in_use(); }
  size_t BytesReserved(int device) const override { return memory(device).reserved(); }

  void Copy(void* to, Place to_place, const void* from, Place from_place, size_t bytes, int device,
            void* stream) override {
    CheckAlive();
    Memory& its_memory = memory(device);
    const auto use = [&](const void* address, Place place) {
      if (place == Place::kDevice) return its_memory.Check(address, bytes);
      its_memory.CheckHost(address);
      return Memory::Use{const_cast<void*>(address), 0, 0};
    };
    const Memory::Use target = use(to, to_place), source = use(from, from_place);
    const auto task = [&its_memory, target, source, bytes] {
      const auto touch = [&](const Memory::Use& side) {
        return side.bytes == 0 ? side.address : its_memory.Touch(side);
      };
      std::memcpy(touch(target), touch(source), bytes);
    };
    if (stream == nullptr) return task();
    auto* queue = static_cast<Stream*>(stream);
    queue->Enqueue(task);
    if (to_place == Place::kHost || from_place == Place::kHost) queue->Synchronize();
  }

  void* CreateStream(int) override {
    CheckAlive();
    return new Stream(delay_);
  }
  void DestroyStream(int, void* stream) noexcept override { delete static_cast<Stream*>(stream); }
  void Synchronize(int, void* stream) override {
    CheckAlive();
    if (stream != nullptr) static_cast<Stream*>(stream)->Synchronize();
  }
  void* CreateEvent(int) override { return new std::shared_ptr<Event>(std::make_shared<Event>()); }
  void DestroyEvent(int, void* event) noexcept override {
    delete static_cast<std::shared_ptr<Event>*>(event);
  }
  void RecordEvent(int, void* event, void* stream) override {
    const std::shared_ptr<Event> recorded = *static_cast<std::shared_ptr<Event>*>(event);
    recorded->Reset();
    static_cast<Stream*>(stream)->Enqueue([recorded] { recorded->Set(); });
  }
  void WaitEvent(int, void* event, void* stream) override {
    static_cast<Stream*>(stream)->Enqueue(
        [waited = *static_cast<std::shared_ptr<Event>*>(event)] { waited->Wait(); });
  }
  void SynchronizeEvent(int, void* event) override { (*static_cast<std::shared_ptr<Event>*>(event))->Wait(); }

  std::shared_ptr<Backend> CreateBackend(int device, const EpOptions& options) override {
    CheckAlive();
    return CreateFakeBackend(memories_.at(static_cast<size_t>(device)), options);
  }

  Memory& memory(int device) const { return *memories_.at(static_cast<size_t>(device)); }

 private:
  static void CheckAlive() { Require(!g_lost, "the device was lost; restart the process"); }

  const std::chrono::microseconds delay_;
  std::vector<std::shared_ptr<Memory>> memories_;
};

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
  Runtime() = std::make_shared<lowbit::ep::fake::FakeRuntime>();
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
__attribute__((visibility("default"))) void LowBitFakeLose(int lost) { lowbit::ep::fake::g_lost = lost != 0; }

}  // extern "C"
