#include "ep/ort/stream.h"

#include <memory>

namespace lowbit::ep {
namespace {

// What another stream, or the host, waits for: everything that was enqueued when it was activated.
struct Notification : OrtSyncNotificationImpl {
  Notification(Device& its_device, void* its_stream);
  ~Notification() { device.runtime().DestroyEvent(device.index(), event); }
  Notification(const Notification&) = delete;
  Notification& operator=(const Notification&) = delete;

  Device& device;
  void* stream;
  void* event;
  bool recorded = false;  // ONNX Runtime waits for what could not be, too: then for all of the stream
};

Notification& Self(OrtSyncNotificationImpl* notification) {
  return *static_cast<Notification*>(notification);
}

OrtStatus* ActivateNotification(OrtSyncNotificationImpl* impl) noexcept {
  return Guarded([&] {
    Notification& self = Self(impl);
    self.recorded = false;
    self.device.runtime().RecordEvent(self.device.index(), self.event, self.stream);
    self.recorded = true;
  });
}

OrtStatus* WaitOnStream(OrtSyncNotificationImpl* impl, OrtSyncStream* consumer) noexcept {
  return Guarded([&] {
    Notification& self = Self(impl);
    if (!self.recorded) return self.device.Synchronize(self.stream);
    void* waiting = Api().SyncStream_GetHandle(consumer);
    const Device::Enqueuing enqueuing(self.device, waiting);
    self.device.runtime().WaitEvent(self.device.index(), self.event, waiting);
  });
}

OrtStatus* WaitOnTheHost(OrtSyncNotificationImpl* impl) noexcept {
  return Guarded([&] {
    Notification& self = Self(impl);
    if (!self.recorded) return self.device.Synchronize(self.stream);
    self.device.runtime().SynchronizeEvent(self.device.index(), self.event);
  });
}

Notification::Notification(Device& its_device, void* its_stream)
    : OrtSyncNotificationImpl{},
      device(its_device),
      stream(its_stream),
      event(its_device.runtime().CreateEvent(its_device.index())) {
  ort_version_supported = ort::RuntimeApiVersion();
  Release = [](OrtSyncNotificationImpl* self) noexcept { delete &Self(self); };
  Activate = ActivateNotification;
  WaitOnDevice = WaitOnStream;
  WaitOnHost = WaitOnTheHost;
}

struct DeviceStream : OrtSyncStreamImpl {
  DeviceStream(Device& its_device, const void* owner);
  ~DeviceStream() { device.DestroyStream(handle); }
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  Device& device;
  void* handle;
};

DeviceStream& Self(OrtSyncStreamImpl* stream) { return *static_cast<DeviceStream*>(stream); }

OrtStatus* MakeNotification(OrtSyncStreamImpl* stream, OrtSyncNotificationImpl** out) noexcept {
  return Guarded(
      [&] { *out = std::make_unique<Notification>(Self(stream).device, Self(stream).handle).release(); });
}

OrtStatus* FlushStream(OrtSyncStreamImpl* stream) noexcept {
  return Guarded([&] { Self(stream).device.Synchronize(Self(stream).handle); });
}

DeviceStream::DeviceStream(Device& its_device, const void* owner)
    : OrtSyncStreamImpl{}, device(its_device), handle(its_device.CreateStream(owner)) {
  ort_version_supported = ort::RuntimeApiVersion();
  Release = [](OrtSyncStreamImpl* self) noexcept { delete &Self(self); };
  GetHandle = [](OrtSyncStreamImpl* self) noexcept { return Self(self).handle; };
  CreateNotification = MakeNotification;
  Flush = FlushStream;
  OnSessionRunEnd = [](OrtSyncStreamImpl*) noexcept -> OrtStatus* { return nullptr; };
}

}  // namespace

OrtSyncStreamImpl* CreateDeviceStream(Device& device, const void* owner) {
  return new DeviceStream(device, owner);
}

}  // namespace lowbit::ep
