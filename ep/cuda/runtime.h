// NVIDIA GPUs as the glue to ONNX Runtime sees them (ep/ort/device_runtime.h).
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ep/cuda/arena.h"
#include "ep/ort/device_runtime.h"
#include "kernels/cuda/conv/cuda_conv.h"

namespace lowbit::ep {

// One GPU, shared by everything of this process that uses it. No context is made before memory is asked for.
class CudaDevice {
 public:
  explicit CudaDevice(const cuda::Device& properties);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  const cuda::Device& Properties() const { return properties_; }
  int Ordinal() const { return properties_.ordinal; }
  Arena& Memory() { return memory_; }
  // Runs the copies that no other stream orders.
  cudaStream_t CopyStream();

 private:
  const cuda::Device properties_;
  std::once_flag copy_stream_made_;
  cudaStream_t copy_stream_ = nullptr;
  Arena memory_;
};

// Memory of a device's arena, given back with the object.
class DeviceBlock {
 public:
  DeviceBlock() = default;
  DeviceBlock(std::shared_ptr<CudaDevice> device, size_t bytes)
      : device_(std::move(device)), data_(device_->Memory().Allocate(bytes)) {}
  ~DeviceBlock() {
    if (data_ != nullptr) device_->Memory().Free(data_);
  }
  DeviceBlock(DeviceBlock&& other) noexcept { *this = std::move(other); }
  DeviceBlock& operator=(DeviceBlock&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    return *this;
  }
  uint8_t* Get() const { return static_cast<uint8_t*>(data_); }

 private:
  std::shared_ptr<CudaDevice> device_;
  void* data_ = nullptr;
};

class CudaRuntime final : public DeviceRuntime {
 public:
  CudaRuntime();

  const char* Kind() const override { return "cuda"; }
  uint32_t VendorId() const override { return 0x10de; }
  int Count() const override { return static_cast<int>(devices_.size()); }
  std::string WhyNone() const override { return why_none_; }
  std::string Describe(int device) const override;
  std::string PciBusId(int device) const override;

  void* Allocate(int device, size_t bytes) override;
  void Free(int device, void* block) noexcept override;
  size_t BytesInUse(int device) const override { return At(device)->Memory().BytesInUse(); }
  size_t BytesReserved(int device) const override { return At(device)->Memory().BytesReserved(); }
  size_t BytesFree(int device) const override;

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
  // Devices are numbered as they are offered: those that cannot be used have no number.
  const std::shared_ptr<CudaDevice>& At(int device) const { return devices_.at(static_cast<size_t>(device)); }

  std::vector<std::shared_ptr<CudaDevice>> devices_;
  std::string why_none_;
};

}  // namespace lowbit::ep
