// The memory and the streams of one kind of device as the glue to ONNX Runtime (ep/ort) needs them. ep/cuda
// implements it for NVIDIA GPUs, tests/ep with host memory that poses as a device's. All functions throw
// Error unless they say otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/provider_options.h"
#include "ep/region/backend.h"

namespace lowbit::ep {

class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;
  virtual const char* Kind() const = 0;   // "cuda"
  virtual uint32_t VendorId() const = 0;  // PCI: 0x10de for NVIDIA, so that torch's and CuPy's pointers match
  virtual int Count() const = 0;          // devices that can be used; 0 without a driver. noexcept in spirit
  virtual std::string WhyNone() const = 0;  // where Count() is 0, or a device was left out: the reason
  virtual std::string Describe(int device) const = 0;  // "NVIDIA H200, sm_90, 132 multiprocessors"
  virtual std::string PciBusId(int device) const = 0;  // "0000:0a:00.0", lower case; empty: not known

  // An arena: freed blocks are kept and handed out again, so that a run costs no allocation by the driver.
  // Blocks are aligned to 256. Freeing is ordered by the caller: nothing that is enqueued may still use the
  // block.
  virtual void* Allocate(int device, size_t bytes) = 0;
  virtual void Free(int device, void* block) noexcept = 0;
  virtual size_t BytesInUse(int device) const = 0;
  virtual size_t BytesReserved(int device) const = 0;
  // What could still be allocated, other programs permitting.
  virtual size_t BytesFree(int device) const = 0;

  enum class Place : uint8_t { kHost, kDevice };
  // Copies on `stream` (null: the device's own copy stream, and complete on return). Host memory is pageable:
  // a copy from or to it is complete on return.
  virtual void Copy(void* to, Place to_place, const void* from, Place from_place, size_t bytes, int device,
                    void* stream) = 0;
  // From one device's memory to another's, complete on return.
  virtual void CopyAcross(void* to, int to_device, const void* from, int from_device, size_t bytes) = 0;

  virtual void* CreateStream(int device) = 0;
  virtual void DestroyStream(int device, void* stream) noexcept = 0;
  virtual void Synchronize(int device, void* stream) = 0;
  virtual void* CreateEvent(int device) = 0;
  virtual void DestroyEvent(int device, void* event) noexcept = 0;
  virtual void RecordEvent(int device, void* event, void* stream) = 0;
  virtual void WaitEvent(int device, void* event, void* stream) = 0;  // the stream waits
  virtual void SynchronizeEvent(int device, void* event) = 0;         // the host waits

  // Memory of another API (Vulkan) of `bytes` bytes on this device, behind a file descriptor. An import that
  // succeeds takes the descriptor over. Nothing that is enqueued may still use memory that is released.
  struct ImportedMemory {
    void* handle = nullptr;
    void* data = nullptr;
    size_t bytes = 0;
  };
  virtual ImportedMemory ImportMemory(int device, int descriptor, size_t bytes) = 0;
  virtual void ReleaseMemory(int device, const ImportedMemory& memory) noexcept = 0;
  // The same for a timeline semaphore: the stream waits until it has `value`, or gives it that.
  virtual void* ImportSemaphore(int device, int descriptor) = 0;
  virtual void ReleaseSemaphore(int device, void* semaphore) noexcept = 0;
  virtual void WaitSemaphore(int device, void* semaphore, uint64_t value, void* stream) = 0;
  virtual void SignalSemaphore(int device, void* semaphore, uint64_t value, void* stream) = 0;

  virtual std::shared_ptr<Backend> CreateBackend(int device, const EpOptions& options) = 0;
};

}  // namespace lowbit::ep
