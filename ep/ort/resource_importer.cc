#include "ep/ort/resource_importer.h"

#include <cstdint>
#include <exception>
#include <limits>
#include <utility>

#include "core/status.h"

namespace lowbit::ep {
namespace {

int FileDescriptor(const void* native_handle) {
  const auto value = reinterpret_cast<intptr_t>(native_handle);
  Require(value >= 0 && value <= std::numeric_limits<int>::max(), "the handle is ", value,
          ", expected a file descriptor");
  return static_cast<int>(value);
}

// What is enqueued may still use what is to be released.
void WaitForAll(Device& device) noexcept {
  try {
    device.Reclaim();
  } catch (const std::exception&) {
    return;  // a device that is lost runs nothing any more
  }
}

struct ImportedMemory : OrtExternalMemoryHandle {
  ImportedMemory(std::shared_ptr<Device> its_device, const OrtEpDevice* its_ep_device,
                 const OrtExternalMemoryDescriptor& from);
  ~ImportedMemory();
  ImportedMemory(const ImportedMemory&) = delete;
  ImportedMemory& operator=(const ImportedMemory&) = delete;

  const std::shared_ptr<Device> device;
  DeviceRuntime::ImportedMemory memory;
};

ImportedMemory::ImportedMemory(std::shared_ptr<Device> its_device, const OrtEpDevice* its_ep_device,
                               const OrtExternalMemoryDescriptor& from)
    : OrtExternalMemoryHandle{}, device(std::move(its_device)) {
  Require(from.handle_type == ORT_EXTERNAL_MEMORY_HANDLE_TYPE_VK_MEMORY_OPAQUE_FD, "memory of handle type ",
          static_cast<int>(from.handle_type), " cannot be imported, expected ",
          static_cast<int>(ORT_EXTERNAL_MEMORY_HANDLE_TYPE_VK_MEMORY_OPAQUE_FD), " (VK_MEMORY_OPAQUE_FD)");
  Require(from.offset_bytes < from.size_bytes, "the memory has ", from.size_bytes, " bytes, and begins at ",
          from.offset_bytes);
  memory =
      device->runtime().ImportMemory(device->index(), FileDescriptor(from.native_handle), from.size_bytes);
  version = ort::RuntimeApiVersion();
  ep_device = its_ep_device;
  descriptor = from;
  Release = [](OrtExternalMemoryHandle* self) noexcept { delete static_cast<ImportedMemory*>(self); };
}

ImportedMemory::~ImportedMemory() {
  WaitForAll(*device);
  device->runtime().ReleaseMemory(device->index(), memory);
}

struct ImportedSemaphore : OrtExternalSemaphoreHandle {
  ImportedSemaphore(std::shared_ptr<Device> its_device, const OrtEpDevice* its_ep_device,
                    const OrtExternalSemaphoreDescriptor& from);
  ~ImportedSemaphore() {
    WaitForAll(*device);
    device->runtime().ReleaseSemaphore(device->index(), semaphore);
  }
  ImportedSemaphore(const ImportedSemaphore&) = delete;
  ImportedSemaphore& operator=(const ImportedSemaphore&) = delete;

  const std::shared_ptr<Device> device;
  void* semaphore = nullptr;
};

ImportedSemaphore::ImportedSemaphore(std::shared_ptr<Device> its_device, const OrtEpDevice* its_ep_device,
                                     const OrtExternalSemaphoreDescriptor& from)
    : OrtExternalSemaphoreHandle{}, device(std::move(its_device)) {
  Require(from.type == ORT_EXTERNAL_SEMAPHORE_VK_TIMELINE_SEMAPHORE_OPAQUE_FD, "a semaphore of type ",
          static_cast<int>(from.type), " cannot be imported, expected ",
          static_cast<int>(ORT_EXTERNAL_SEMAPHORE_VK_TIMELINE_SEMAPHORE_OPAQUE_FD),
          " (VK_TIMELINE_SEMAPHORE_OPAQUE_FD)");
  semaphore = device->runtime().ImportSemaphore(device->index(), FileDescriptor(from.native_handle));
  version = ort::RuntimeApiVersion();
  ep_device = its_ep_device;
  descriptor = from;
  Release = [](OrtExternalSemaphoreHandle* self) noexcept { delete static_cast<ImportedSemaphore*>(self); };
}

class Importer final : public OrtExternalResourceImporterImpl {
 public:
  Importer(std::shared_ptr<Device> device, const OrtEpDevice* ep_device);

 private:
  static Importer& Self(OrtExternalResourceImporterImpl* importer) {
    return *static_cast<Importer*>(importer);
  }
  // What a semaphore does on a stream.
  template <void (DeviceRuntime::*kDo)(int device, void* semaphore, uint64_t value, void* stream)>
  static OrtStatus* Enqueue(OrtExternalResourceImporterImpl* self, OrtExternalSemaphoreHandle* handle,
                            OrtSyncStream* stream, uint64_t value) noexcept {
    return Guarded([&] {
      Device& device = *Self(self).device_;
      void* const on = Api().SyncStream_GetHandle(stream);
      const Device::Enqueuing enqueuing(device, on);
      (device.runtime().*kDo)(device.index(), static_cast<ImportedSemaphore*>(handle)->semaphore, value, on);
    });
  }
  OrtValue* TensorIn(const ImportedMemory& memory, const OrtExternalTensorDescriptor& tensor) const;

  const std::shared_ptr<Device> device_;
  const OrtEpDevice* const ep_device_;
};

OrtValue* Importer::TensorIn(const ImportedMemory& memory, const OrtExternalTensorDescriptor& tensor) const {
  const size_t room = memory.descriptor.size_bytes - memory.descriptor.offset_bytes;
  Require(tensor.offset_bytes <= room, "a tensor begins at ", tensor.offset_bytes, " in memory of ", room,
          " bytes");
  const size_t begin = memory.descriptor.offset_bytes + tensor.offset_bytes;
  OrtValue* value = nullptr;
  // ONNX Runtime compares the shape with the room that is left.
  Check(Api().CreateTensorWithDataAsOrtValue(
      device_->memory_info(), static_cast<uint8_t*>(memory.memory.data) + begin, room - tensor.offset_bytes,
      tensor.shape, tensor.rank, tensor.element_type, &value));
  return value;
}

Importer::Importer(std::shared_ptr<Device> device, const OrtEpDevice* ep_device)
    : OrtExternalResourceImporterImpl{}, device_(std::move(device)), ep_device_(ep_device) {
  ort_version_supported = ort::RuntimeApiVersion();
  CanImportMemory = [](const OrtExternalResourceImporterImpl*, OrtExternalMemoryHandleType type) noexcept {
    return type == ORT_EXTERNAL_MEMORY_HANDLE_TYPE_VK_MEMORY_OPAQUE_FD;
  };
  ImportMemory = [](OrtExternalResourceImporterImpl* self, const OrtExternalMemoryDescriptor* descriptor,
                    OrtExternalMemoryHandle** handle) noexcept {
    *handle = nullptr;
    return Guarded([&] {
      *handle =
          std::make_unique<ImportedMemory>(Self(self).device_, Self(self).ep_device_, *descriptor).release();
    });
  };
  ReleaseMemory = [](OrtExternalResourceImporterImpl*, OrtExternalMemoryHandle* handle) noexcept {
    delete static_cast<ImportedMemory*>(handle);
  };
  CreateTensorFromMemory = [](OrtExternalResourceImporterImpl* self, const OrtExternalMemoryHandle* handle,
                              const OrtExternalTensorDescriptor* descriptor, OrtValue** tensor) noexcept {
    *tensor = nullptr;
    return Guarded(
        [&] { *tensor = Self(self).TensorIn(*static_cast<const ImportedMemory*>(handle), *descriptor); });
  };
  CanImportSemaphore = [](const OrtExternalResourceImporterImpl*, OrtExternalSemaphoreType type) noexcept {
    return type == ORT_EXTERNAL_SEMAPHORE_VK_TIMELINE_SEMAPHORE_OPAQUE_FD;
  };
  ImportSemaphore = [](OrtExternalResourceImporterImpl* self,
                       const OrtExternalSemaphoreDescriptor* descriptor,
                       OrtExternalSemaphoreHandle** handle) noexcept {
    *handle = nullptr;
    return Guarded([&] {
      *handle = std::make_unique<ImportedSemaphore>(Self(self).device_, Self(self).ep_device_, *descriptor)
                    .release();
    });
  };
  ReleaseSemaphore = [](OrtExternalResourceImporterImpl*, OrtExternalSemaphoreHandle* handle) noexcept {
    delete static_cast<ImportedSemaphore*>(handle);
  };
  WaitSemaphore = Enqueue<&DeviceRuntime::WaitSemaphore>;
  SignalSemaphore = Enqueue<&DeviceRuntime::SignalSemaphore>;
  Release = [](OrtExternalResourceImporterImpl* self) noexcept { delete &Self(self); };
}

}  // namespace

OrtExternalResourceImporterImpl* CreateResourceImporter(std::shared_ptr<Device> device,
                                                        const OrtEpDevice* ep_device) {
  return new Importer(std::move(device), ep_device);
}

}  // namespace lowbit::ep
