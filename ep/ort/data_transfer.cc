#include "ep/ort/data_transfer.h"

#include <utility>

#include "core/status.h"

namespace lowbit::ep {
namespace {

using Place = DeviceRuntime::Place;

struct DeviceTransfer : OrtDataTransferImpl {
  explicit DeviceTransfer(std::vector<std::shared_ptr<Device>> its_devices);

  // Null for memory that is none of the devices'.
  Device* Owner(const OrtMemoryDevice* memory) const {
    for (const std::shared_ptr<Device>& device : devices)
      if (device->Owns(memory)) return device.get();
    return nullptr;
  }

  // The device that copies, null where none can; the target's between two devices.
  Device* Copier(const OrtMemoryDevice* from, const OrtMemoryDevice* to) const {
    Device *source = Owner(from), *target = Owner(to);
    const auto on_host = [](const OrtMemoryDevice* memory) {
      return EpApi().MemoryDevice_GetDeviceType(memory) == OrtMemoryInfoDeviceType_CPU;
    };
    if (source != nullptr && (source == target || on_host(to))) return source;
    if (target == nullptr) return nullptr;
    return on_host(from) || (source != nullptr && target->IsNeighbour(*source)) ? target : nullptr;
  }

  void CopyOne(const OrtValue* from, OrtValue* to, void* stream) const;

  std::vector<std::shared_ptr<Device>> devices;
};

DeviceTransfer& Self(OrtDataTransferImpl* transfer) { return *static_cast<DeviceTransfer*>(transfer); }

void DeviceTransfer::CopyOne(const OrtValue* from, OrtValue* to, void* stream) const {
  const OrtMemoryDevice* from_memory = EpApi().Value_GetMemoryDevice(from);
  const OrtMemoryDevice* to_memory = EpApi().Value_GetMemoryDevice(to);
  Device* device = Copier(from_memory, to_memory);
  Require(device != nullptr, "a tensor lies neither on the host nor on a device of ", kProviderName);
  size_t bytes = 0, room = 0;
  const void* source = nullptr;
  void* target = nullptr;
  Check(Api().GetTensorSizeInBytes(from, &bytes));
  Check(Api().GetTensorSizeInBytes(to, &room));
  Require(bytes == room, "cannot copy a tensor of ", bytes, " bytes into one of ", room);
  Check(Api().GetTensorData(from, &source));
  Check(Api().GetTensorMutableData(to, &target));
  Device* neighbour = Owner(from_memory);
  if (neighbour != nullptr && neighbour != device) {  // so `device` owns the target
    device->CopyFrom(*neighbour, target, source, bytes);
    return;
  }
  const auto place = [&](const OrtMemoryDevice* memory) {
    return device->Owns(memory) ? Place::kDevice : Place::kHost;
  };
  // Runs may be queued (disable_synchronize_execution_providers). Before 1.25 ONNX Runtime has no call that
  // waits for them, so whoever looks at a tensor does.
  if (stream == nullptr && ort::RuntimeApiVersion() < 25) device->Reclaim();
  device->Copy(target, place(to_memory), source, place(from_memory), bytes, stream);
}

OrtStatus* CopyAll(OrtDataTransferImpl* self, const OrtValue** from, OrtValue** to, OrtSyncStream** streams,
                   size_t count) noexcept {
  return Guarded([&] {
    for (size_t i = 0; i < count; ++i) {
      OrtSyncStream* stream = streams == nullptr ? nullptr : streams[i];
      Self(self).CopyOne(from[i], to[i], stream == nullptr ? nullptr : Api().SyncStream_GetHandle(stream));
    }
  });
}

DeviceTransfer::DeviceTransfer(std::vector<std::shared_ptr<Device>> its_devices)
    : OrtDataTransferImpl{}, devices(std::move(its_devices)) {
  ort_version_supported = ort::RuntimeApiVersion();
  Release = [](OrtDataTransferImpl* self) noexcept { delete &Self(self); };
  CanCopy = [](const OrtDataTransferImpl* self, const OrtMemoryDevice* from,
               const OrtMemoryDevice* to) noexcept {
    return static_cast<const DeviceTransfer*>(self)->Copier(from, to) != nullptr;
  };
  CopyTensors = CopyAll;
}

}  // namespace

OrtDataTransferImpl* CreateDeviceTransfer(std::vector<std::shared_ptr<Device>> devices) {
  return new DeviceTransfer(std::move(devices));
}

}  // namespace lowbit::ep
