#include "ep/ort/allocator.h"

#include <new>
#include <string>

namespace lowbit::ep {
namespace {

struct DeviceAllocator : OrtAllocator {
  DeviceAllocator(Device& its_device, Logger its_logger);

  // ONNX Runtime takes null for "no memory left" and tells nobody why; the log does.
  void* Allocate(size_t bytes, OrtSyncStream* stream) noexcept {
    if (bytes == 0) return nullptr;
    try {
      return device.Allocate(bytes, stream == nullptr ? nullptr : Api().SyncStream_GetHandle(stream));
    } catch (const std::exception& e) {
      Tell(e);
      return nullptr;
    }
  }
  void Tell(const std::exception& error) const noexcept {
    try {
      logger.Warning(std::string("lowbit: ") + error.what());
    } catch (const std::bad_alloc&) {
      return;  // there is no memory for the text either
    }
  }

  Device& device;
  Logger logger;
};

DeviceAllocator& Self(OrtAllocator* allocator) { return *static_cast<DeviceAllocator*>(allocator); }
const DeviceAllocator& Self(const OrtAllocator* allocator) {
  return *static_cast<const DeviceAllocator*>(allocator);
}

OrtStatus* GetStats(const OrtAllocator* allocator, OrtKeyValuePairs** out) noexcept {
  return Guarded([&] {
    const Device& device = Self(allocator).device;
    OrtKeyValuePairs* made = nullptr;
    Api().CreateKeyValuePairs(&made);
    Owned<OrtKeyValuePairs> stats(made);
    const auto add = [&](const char* key, size_t value) {
      Api().AddKeyValuePair(made, key, std::to_string(value).c_str());
    };
    add("InUse", device.runtime().BytesInUse(device.index()));
    add("TotalAllocated", device.runtime().BytesReserved(device.index()));
    *out = stats.release();
  });
}

DeviceAllocator::DeviceAllocator(Device& its_device, Logger its_logger)
    : OrtAllocator{}, device(its_device), logger(its_logger) {
  version = ort::RuntimeApiVersion();
  OrtAllocator::Alloc = [](OrtAllocator* self, size_t bytes) { return Self(self).Allocate(bytes, nullptr); };
  OrtAllocator::Reserve = OrtAllocator::Alloc;
  OrtAllocator::AllocOnStream = [](OrtAllocator* self, size_t bytes, OrtSyncStream* stream) {
    return Self(self).Allocate(bytes, stream);
  };
  OrtAllocator::Free = [](OrtAllocator* self, void* block) { Self(self).device.Free(block); };
  OrtAllocator::Info = [](const OrtAllocator* self) { return Self(self).device.memory_info(); };
  OrtAllocator::GetStats = lowbit::ep::GetStats;
}

}  // namespace

OrtAllocator* CreateDeviceAllocator(Device& device, Logger logger) {
  return new DeviceAllocator(device, logger);
}

void ReleaseDeviceAllocator(OrtAllocator* allocator) noexcept {
  delete static_cast<DeviceAllocator*>(allocator);
}

}  // namespace lowbit::ep
