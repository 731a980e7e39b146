#include "ep/ort/device.h"

#include <algorithm>
#include <new>
#include <utility>

#include "core/status.h"

namespace lowbit::ep {
namespace {

Owned<OrtMemoryInfo> CreateMemoryInfo(const DeviceRuntime& runtime, int index) {
  OrtMemoryInfo* info = nullptr;
  // Alignment 0: ONNX Runtime compares it, and tensors that users bind come with none stated.
  Check(Api().CreateMemoryInfo_V2(kVendorName, OrtMemoryInfoDeviceType_GPU, runtime.VendorId(), index,
                                  OrtDeviceMemoryType_DEFAULT, 0, OrtDeviceAllocator, &info));
  return Owned<OrtMemoryInfo>(info);
}

struct RunStream {
  const void* owner = nullptr;
  void* stream = nullptr;
};
thread_local RunStream t_run;  // see SynchronizeRun

}  // namespace

Device::Device(std::shared_ptr<DeviceRuntime> runtime, int index)
    : runtime_(std::move(runtime)), index_(index), memory_info_(CreateMemoryInfo(*runtime_, index)) {}

Device::~Device() {
  for (const Waiting& waiting : waiting_) runtime_->Free(index_, waiting.block);
}

bool Device::Owns(const OrtMemoryDevice* memory) const {
  return EpApi().MemoryDevice_GetDeviceType(memory) == OrtMemoryInfoDeviceType_GPU &&
         EpApi().MemoryDevice_GetVendorId(memory) == runtime_->VendorId() &&
         EpApi().MemoryDevice_GetDeviceId(memory) == static_cast<uint32_t>(index_);
}

void* Device::TakeFreed(size_t bytes, void* stream) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return nullptr;
  std::multimap<size_t, void*>& freed = found->second.freed;
  const auto fitting = freed.lower_bound(bytes);
  if (fitting == freed.end() || fitting->first / 2 > bytes) return nullptr;  // half empty at most
  void* block = fitting->second;
  freed.erase(fitting);
  return block;
}

void* Device::Allocate(size_t bytes, void* stream) {
  if (stream != nullptr) {
    if (void* block = TakeFreed(bytes, stream)) return block;
  }
  void* block = nullptr;
  try {
    block = runtime_->Allocate(index_, bytes);
  } catch (const Error&) {
    Reclaim();
    block = runtime_->Allocate(index_, bytes);
  }
  if (stream != nullptr) {
    const std::lock_guard lock(mutex_);
    try {
      if (streams_.contains(stream)) blocks_[block] = {stream, bytes};
    } catch (...) {
      runtime_->Free(index_, block);
      throw;
    }
  }
  return block;
}

void Device::Free(void* block) noexcept {
  if (block == nullptr) return;
  const std::lock_guard lock(mutex_);
  try {
    KeepOrGiveBack(block);
  } catch (const std::bad_alloc&) {
    WaitForAll();  // there is no memory to remember for whom the block has to be kept
    GiveBack(block);
  }
}

void Device::KeepOrGiveBack(void* block) {
  if (const auto found = blocks_.find(block); found != blocks_.end()) {
    Stream& stream = streams_.at(found->second.stream);
    if (stream.Busy()) {
      stream.freed.emplace(found->second.bytes, block);
      return;
    }
    blocks_.erase(found);
  }
  std::vector<void*> busy = BusyStreams();
  if (busy.empty()) {
    GiveBack(block);
  } else {
    waiting_.push_back({block, std::move(busy)});
  }
}

void Device::WaitForAll() noexcept {
  for (const auto& [handle, stream] : streams_) {
    try {
      if (stream.Busy()) runtime_->Synchronize(index_, handle);
    } catch (const std::exception&) {
      continue;  // a device that is lost runs nothing any more
    }
  }
}

std::vector<void*> Device::BusyStreams() const {
  std::vector<void*> busy;
  for (const auto& [handle, stream] : streams_)
    if (stream.Busy()) busy.push_back(handle);
  return busy;
}

void Device::GiveBack(void* block) {
  blocks_.erase(block);
  runtime_->Free(index_, block);
}

void* Device::CreateStream(const void* owner) {
  void* handle = runtime_->CreateStream(index_);
  const std::lock_guard lock(mutex_);
  try {
    streams_[handle].owner = owner;
  } catch (...) {
    runtime_->DestroyStream(index_, handle);
    throw;
  }
  return handle;
}

void Device::DestroyStream(void* stream) noexcept {
  try {
    Synchronize(stream);
  } catch (const std::exception&) {
    // A device that is lost runs nothing any more: its blocks are free.
    const std::lock_guard lock(mutex_);
    Finished(stream);
  }
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(blocks_, [&](const auto& entry) { return entry.second.stream == stream; });
    streams_.erase(stream);
  }
  runtime_->DestroyStream(index_, stream);
}

void Device::Begin(void* stream) {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return;
  ++found->second.begun;
  t_run = {found->second.owner, stream};
}

void Device::SynchronizeRun(const void* owner) {
  if (t_run.owner == owner) Synchronize(std::exchange(t_run, {}).stream);
}

void Device::Synchronize(void* stream) {
  uint64_t begun = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(stream);
    if (found == streams_.end() || !found->second.Busy()) return;
    begun = found->second.begun;
  }
  runtime_->Synchronize(index_, stream);
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  // Where another thread has enqueued more meanwhile, its own synchronization will clean up.
  if (found != streams_.end() && found->second.begun == begun) Finished(stream);
}

void Device::SynchronizeAll(const void* owner) {
  std::vector<void*> handles;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [handle, stream] : streams_)
      if (stream.owner == owner) handles.push_back(handle);
  }
  for (void* handle : handles) Synchronize(handle);
}

void Device::Reclaim() {
  const std::lock_guard lock(mutex_);  // held meanwhile, so that no stream is destroyed under our hands
  for (void* handle : BusyStreams()) {
    runtime_->Synchronize(index_, handle);
    Finished(handle);
  }
}

void Device::Finished(void* handle) {
  Stream& stream = streams_.at(handle);
  stream.finished = stream.begun;
  for (const auto& [bytes, block] : stream.freed) GiveBack(block);
  stream.freed.clear();
  std::erase_if(waiting_, [&](Waiting& waiting) {
    std::erase(waiting.streams, handle);
    if (!waiting.streams.empty()) return false;
    GiveBack(waiting.block);
    return true;
  });
}

void Device::RequireMemory(bool has_memory, size_t bytes) const {
  Require(has_memory, "a tensor of ", bytes, " bytes has no memory: the device has none left (",
          runtime_->BytesInUse(index_), " bytes of it are in use by this process)");
}

void Device::Copy(void* to, DeviceRuntime::Place to_place, const void* from, DeviceRuntime::Place from_place,
                  size_t bytes, void* stream) {
  if (bytes == 0) return;
  RequireMemory(to != nullptr && from != nullptr, bytes);
  const Enqueuing enqueuing(*this, stream);
  runtime_->Copy(to, to_place, from, from_place, bytes, index_, stream);
}

void Device::CopyFrom(Device& other, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  RequireMemory(to != nullptr && from != nullptr, bytes);
  other.Reclaim();
  Reclaim();
  runtime_->CopyAcross(to, index_, from, other.index_, bytes);
}

}  // namespace lowbit::ep
