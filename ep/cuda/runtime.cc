#include "ep/cuda/runtime.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>

#include "core/status.h"
#include "ep/cuda/cuda_backend.h"
#include "ep/cuda/cuda_call.h"

namespace lowbit::ep {
namespace {

// Memory that waits to be handed out again: what a network at batch 128 frees between two runs, but no large
// part of a small GPU.
constexpr size_t kMaxReserve = size_t{4} << 30;

size_t TotalMemory(int ordinal) {
  cudaDeviceProp properties;
  return cudaGetDeviceProperties(&properties, ordinal) == cudaSuccess ? properties.totalGlobalMem : 0;
}

Arena::Source MemoryOf(int ordinal) {
  Arena::Source source;
  source.allocate = [ordinal](size_t bytes) -> void* {
    const DeviceScope scope(ordinal);
    void* block = nullptr;
    const cudaError_t error = cudaMalloc(&block, bytes);
    if (error == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      return nullptr;
    }
    CheckCuda(error, "allocating memory");
    return block;
  };
  source.release = [ordinal](void* block) {
    try {
      const DeviceScope scope(ordinal);
      static_cast<void>(cudaFree(block));
    } catch (const Error&) {
      // The device is lost, or the process is ending: its memory is gone already.
      static_cast<void>(cudaGetLastError());
    }
  };
  source.free_memory = [ordinal]() -> std::string {
    const DeviceScope scope(ordinal);
    size_t free = 0, total = 0;
    if (cudaMemGetInfo(&free, &total) != cudaSuccess) return "an unknown number of bytes free";
    return std::to_string(free) + " of " + std::to_string(total) + " bytes free";
  };
  return source;
}

std::string DriverVersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string WhyNoDevices(cudaError_t error) {
  int driver = 0;
  static_cast<void>(cudaDriverGetVersion(&driver));
  static_cast<void>(cudaGetLastError());
  switch (error) {
    case cudaSuccess:
    case cudaErrorNoDevice:
      return "the NVIDIA driver is there but shows no GPU; CUDA_VISIBLE_DEVICES, or the options of the "
             "container, may "
             "hide it";
    case cudaErrorInsufficientDriver:
      if (driver == 0) {
        return "no NVIDIA driver was found (libcuda.so.1 cannot be loaded); install one, in a container "
               "start it with "
               "the NVIDIA container toolkit (docker run --gpus all)";
      }
      return "the NVIDIA driver is too old: it supports CUDA " + DriverVersionText(driver) +
             ", this build of lowbit needs " + DriverVersionText(CUDART_VERSION) + "; update the driver";
    case cudaErrorInitializationError:
      return "CUDA cannot be initialized; a process that was forked from one that used CUDA cannot use it "
             "(with "
             "multiprocessing, choose the start method 'spawn')";
    default:
      return "CUDA cannot be used: " + ErrorText(error);
  }
}

cudaStream_t StreamOf(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t EventOf(void* event) { return static_cast<cudaEvent_t>(event); }
cudaExternalSemaphore_t SemaphoreOf(void* semaphore) {
  return static_cast<cudaExternalSemaphore_t>(semaphore);
}

}  // namespace

CudaDevice::CudaDevice(const cuda::Device& properties)
    : properties_(properties),
      memory_(MemoryOf(properties.ordinal),
              properties.IsAbsent() ? 0 : std::min(TotalMemory(properties.ordinal) / 8, kMaxReserve),
              "GPU " + std::to_string(properties.ordinal) + " (" + properties.name + ")") {}

CudaDevice::~CudaDevice() {
  if (copy_stream_ != nullptr) static_cast<void>(cudaStreamDestroy(copy_stream_));
}

cudaStream_t CudaDevice::CopyStream() {
  std::call_once(copy_stream_made_, [&] {
    const DeviceScope scope(Ordinal());
    CheckCuda(cudaStreamCreateWithFlags(&copy_stream_, cudaStreamNonBlocking), "making a stream");
  });
  return copy_stream_;
}

CudaRuntime::CudaRuntime() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    why_none_ = WhyNoDevices(error);
    return;
  }
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    try {
      devices_.push_back(std::make_shared<CudaDevice>(cuda::Device::Query(ordinal)));
    } catch (const Error& e) {
      why_none_ +=
          (why_none_.empty() ? "GPU " : "; GPU ") + std::to_string(ordinal) + " is left out: " + e.what();
    }
  }
}

std::string CudaRuntime::Describe(int device) const {
  const cuda::Device& properties = At(device)->Properties();
  return properties.name + ", sm_" + std::to_string(properties.hardware) + ", " +
         std::to_string(properties.multiprocessors) + " multiprocessors";
}

std::string CudaRuntime::PciBusId(int device) const {
  std::array<char, 32> text = {};
  if (cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()), At(device)->Ordinal()) !=
      cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return {};
  }
  std::string id = text.data();
  std::transform(id.begin(), id.end(), id.begin(), [](unsigned char c) { return std::tolower(c); });
  return id;
}

void* CudaRuntime::Allocate(int device, size_t bytes) { return At(device)->Memory().Allocate(bytes); }

void CudaRuntime::Free(int device, void* block) noexcept { At(device)->Memory().Free(block); }

void CudaRuntime::Copy(void* to, Place to_place, const void* from, Place from_place, size_t bytes, int device,
                       void* stream) {
  if (bytes == 0) return;
  if (to_place == Place::kHost && from_place == Place::kHost) {
    std::memcpy(to, from, bytes);
    return;
  }
  const DeviceScope scope(At(device)->Ordinal());
  const cudaStream_t on = stream != nullptr ? StreamOf(stream) : At(device)->CopyStream();
  CheckCuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, on), "copying a tensor");
  // cudaMemcpyDefault takes memory of unknown origin for pageable host memory, whose copies to the device may
  // still be under way, and pinned memory's are in both directions.
  if (stream == nullptr || to_place == Place::kHost || from_place == Place::kHost) {
    CheckCuda(cudaStreamSynchronize(on), "waiting for a copy");
  }
}

void CudaRuntime::CopyAcross(void* to, int to_device, const void* from, int from_device, size_t bytes) {
  const DeviceScope scope(At(to_device)->Ordinal());
  const cudaStream_t on = At(to_device)->CopyStream();
  // Through the host where the GPUs cannot read each other's memory: the driver sees to it.
  CheckCuda(cudaMemcpyPeerAsync(to, At(to_device)->Ordinal(), from, At(from_device)->Ordinal(), bytes, on),
            "copying a tensor from another GPU");
  CheckCuda(cudaStreamSynchronize(on), "waiting for a copy from another GPU");
}

void* CudaRuntime::CreateStream(int device) {
  const DeviceScope scope(At(device)->Ordinal());
  cudaStream_t stream = nullptr;
  // Not ordered behind the default stream, which belongs to the host program.
  CheckCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  return stream;
}

void CudaRuntime::DestroyStream(int, void* stream) noexcept {
  static_cast<void>(cudaStreamDestroy(StreamOf(stream)));
}

void CudaRuntime::Synchronize(int device, void* stream) {
  const DeviceScope scope(At(device)->Ordinal());  // whose default stream null is
  CheckCuda(cudaStreamSynchronize(StreamOf(stream)), "waiting for a stream");
}

void* CudaRuntime::CreateEvent(int device) {
  const DeviceScope scope(At(device)->Ordinal());
  cudaEvent_t event = nullptr;
  CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  return event;
}

void CudaRuntime::DestroyEvent(int, void* event) noexcept {
  static_cast<void>(cudaEventDestroy(EventOf(event)));
}

void CudaRuntime::RecordEvent(int device, void* event, void* stream) {
  const DeviceScope scope(At(device)->Ordinal());
  CheckCuda(cudaEventRecord(EventOf(event), StreamOf(stream)), "recording an event");
}

void CudaRuntime::WaitEvent(int device, void* event, void* stream) {
  const DeviceScope scope(At(device)->Ordinal());
  CheckCuda(cudaStreamWaitEvent(StreamOf(stream), EventOf(event), 0), "waiting for an event");
}

void CudaRuntime::SynchronizeEvent(int device, void* event) {
  const DeviceScope scope(At(device)->Ordinal());
  CheckCuda(cudaEventSynchronize(EventOf(event)), "waiting for an event");
}

size_t CudaRuntime::BytesFree(int device) const {
  const DeviceScope scope(At(device)->Ordinal());
  size_t free = 0, total = 0;
  CheckCuda(cudaMemGetInfo(&free, &total), "asking for the free memory");
  return free + BytesReserved(device) - BytesInUse(device);
}

DeviceRuntime::ImportedMemory CudaRuntime::ImportMemory(int device, int descriptor, size_t bytes) {
  const DeviceScope scope(At(device)->Ordinal());
  cudaExternalMemoryHandleDesc from = {.type = cudaExternalMemoryHandleTypeOpaqueFd};
  from.handle.fd = descriptor;
  from.size = bytes;
  cudaExternalMemory_t memory = nullptr;
  CheckCuda(cudaImportExternalMemory(&memory, &from), "importing memory");
  cudaExternalMemoryBufferDesc whole = {};
  whole.size = bytes;
  void* data = nullptr;
  const cudaError_t error = cudaExternalMemoryGetMappedBuffer(&data, memory, &whole);
  if (error != cudaSuccess) static_cast<void>(cudaDestroyExternalMemory(memory));
  CheckCuda(error, "mapping imported memory");
  return {memory, data, bytes};
}

void CudaRuntime::ReleaseMemory(int device, const ImportedMemory& memory) noexcept {
  try {
    const DeviceScope scope(At(device)->Ordinal());
    static_cast<void>(cudaFree(memory.data));
    static_cast<void>(cudaDestroyExternalMemory(static_cast<cudaExternalMemory_t>(memory.handle)));
  } catch (const Error&) {
    // The device is lost, or the process is ending: its memory is gone already.
    static_cast<void>(cudaGetLastError());
  }
}

void* CudaRuntime::ImportSemaphore(int device, int descriptor) {
  const DeviceScope scope(At(device)->Ordinal());
  cudaExternalSemaphoreHandleDesc from = {.type = cudaExternalSemaphoreHandleTypeTimelineSemaphoreFd};
  from.handle.fd = descriptor;
  cudaExternalSemaphore_t semaphore = nullptr;
  CheckCuda(cudaImportExternalSemaphore(&semaphore, &from), "importing a semaphore");
  return semaphore;
}

void CudaRuntime::ReleaseSemaphore(int, void* semaphore) noexcept {
  static_cast<void>(cudaDestroyExternalSemaphore(SemaphoreOf(semaphore)));
}

void CudaRuntime::WaitSemaphore(int device, void* semaphore, uint64_t value, void* stream) {
  const DeviceScope scope(At(device)->Ordinal());
  const cudaExternalSemaphore_t waited = SemaphoreOf(semaphore);
  cudaExternalSemaphoreWaitParams how = {};
  how.params.fence.value = value;
  CheckCuda(cudaWaitExternalSemaphoresAsync(&waited, &how, 1, StreamOf(stream)), "waiting for a semaphore");
}

void CudaRuntime::SignalSemaphore(int device, void* semaphore, uint64_t value, void* stream) {
  const DeviceScope scope(At(device)->Ordinal());
  const cudaExternalSemaphore_t signalled = SemaphoreOf(semaphore);
  cudaExternalSemaphoreSignalParams how = {};
  how.params.fence.value = value;
  CheckCuda(cudaSignalExternalSemaphoresAsync(&signalled, &how, 1, StreamOf(stream)),
            "signalling a semaphore");
}

std::shared_ptr<Backend> CudaRuntime::CreateBackend(int device, const EpOptions& options) {
  return CreateCudaBackend(At(device), options);
}

}  // namespace lowbit::ep
