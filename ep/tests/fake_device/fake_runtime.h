#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ep/ort/device_runtime.h"
#include "ep/tests/fake_device/fake_memory.h"

namespace lowbit::ep::fake {

// Devices of host memory, whose streams run behind the host's back. Environment: LOWBIT_FAKE_DEVICES (2),
// LOWBIT_FAKE_BYTES per device (1 GiB), LOWBIT_FAKE_DELAY_US before every task of a stream (200).
class FakeRuntime : public DeviceRuntime {
 public:
  using MakeBackend = std::function<std::shared_ptr<Backend>(std::shared_ptr<Memory>, const EpOptions&)>;
  explicit FakeRuntime(MakeBackend make_backend);

  Memory& memory(int device) const { return *memories_.at(static_cast<size_t>(device)); }
  // From now on every call fails, as on a device that fell off the bus.
  void Lose(bool lost) { lost_ = lost; }

  const char* Kind() const override { return "fake"; }
  uint32_t VendorId() const override { return 0xfa4e; }
  int Count() const override { return static_cast<int>(memories_.size()); }
  std::string WhyNone() const override { return memories_.empty() ? "LOWBIT_FAKE_DEVICES is 0" : ""; }
  std::string Describe(int device) const override { return "fake device " + std::to_string(device); }
  std::string PciBusId(int) const override { return ""; }

  void* Allocate(int device, size_t bytes) override;
  void Free(int device, void* block) noexcept override { memory(device).Free(block); }
  size_t BytesInUse(int device) const override { return memory(device).in_use(); }
  size_t BytesReserved(int device) const override { return memory(device).reserved(); }
  size_t BytesFree(int device) const override { return memory(device).reserved() - memory(device).in_use(); }
  void Copy(void* to, Place to_place, const void* from, Place from_place, size_t bytes, int device,
            void* stream) override;
  void CopyAcross(void* to, int to_device, const void* from, int from_device, size_t bytes) override;

  void* CreateStream(int device) override;
  void DestroyStream(int device, void* stream) noexcept override;
  void Synchronize(int device, void* stream) override;
  void* CreateEvent(int device) override;
  void DestroyEvent(int device, void* event) noexcept override;
  void RecordEvent(int device, void* event, void* stream) override;
  void WaitEvent(int device, void* event, void* stream) override;
  void SynchronizeEvent(int device, void* event) override;

  ImportedMemory ImportMemory(int device, int descriptor, size_t bytes) override;
  void ReleaseMemory(int device, const ImportedMemory& memory) noexcept override;
  void* ImportSemaphore(int device, int descriptor) override;
  void ReleaseSemaphore(int device, void* semaphore) noexcept override;
  void WaitSemaphore(int device, void* semaphore, uint64_t value, void* stream) override;
  void SignalSemaphore(int device, void* semaphore, uint64_t value, void* stream) override;

  std::shared_ptr<Backend> CreateBackend(int device, const EpOptions& options) override;

 private:
  void CheckAlive() const;

  const MakeBackend make_backend_;
  const std::chrono::microseconds delay_;
  std::vector<std::shared_ptr<Memory>> memories_;
  std::atomic<bool> lost_{false};
};

}  // namespace lowbit::ep::fake
