// One device as ONNX Runtime sees it through this provider: its memory, its streams, and which of its memory
// may still be in use by work that was enqueued.
//
// ONNX Runtime frees a tensor as soon as the kernel that reads it last has been *launched*. The block may
// serve the same stream again at once, since that stream runs in order; for everybody else it is free only
// after the streams that were busy at that time have been synchronized (the host does that at the end of
// every run, unless the user said otherwise).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "ep/ort/device_runtime.h"
#include "ep/ort/ep_api.h"

namespace lowbit::ep {

class Device {
 public:
  Device(std::shared_ptr<DeviceRuntime> runtime, int index);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  DeviceRuntime& runtime() const { return *runtime_; }
  int index() const { return index_; }
  const OrtMemoryInfo* memory_info() const { return memory_info_.get(); }
  // Whether `memory` is this device's.
  bool Owns(const OrtMemoryDevice* memory) const;

  // `stream`: the one whose work will use the block, null where that is not known. Throws Error when there is
  // no memory left even after all streams were synchronized.
  void* Allocate(size_t bytes, void* stream);
  void Free(void* block) noexcept;

  // `owner`: the session's provider, null for streams outside of sessions.
  void* CreateStream(const void* owner);
  void DestroyStream(void* stream) noexcept;
  // This thread enqueues work on the stream as long as this lives.
  class Enqueuing {
   public:
    Enqueuing(Device& device, void* stream) : device_(device), stream_(stream) { device_.Begin(stream_); }
    // Once more: whoever synchronized the stream meanwhile has not waited for what was enqueued after that.
    ~Enqueuing() { device_.Begin(stream_); }
    Enqueuing(const Enqueuing&) = delete;
    Enqueuing& operator=(const Enqueuing&) = delete;

   private:
    Device& device_;
    void* stream_;
  };
  void Synchronize(void* stream);  // does nothing where nothing was begun since the last time
  // The stream of `owner` that this thread enqueued work on last: a run stays on its thread.
  void SynchronizeRun(const void* owner);
  void SynchronizeAll(const void* owner);  // the owner's streams
  // Waits for every stream, so that what is kept for them is free for all.
  void Reclaim();

  // Whether both are devices of one runtime, so that either may copy from the other.
  bool IsNeighbour(const Device& other) const { return runtime_ == other.runtime_; }
  // Copies from a neighbour's memory. The host waits for whatever either device was given to do: the stream
  // that writes the source, and the one that will read the target, are not known here.
  void CopyFrom(Device& other, void* to, const void* from, size_t bytes);
  // Copies on `stream`, or at once where it is null.
  void Copy(void* to, DeviceRuntime::Place to_place, const void* from, DeviceRuntime::Place from_place,
            size_t bytes, void* stream);

 private:
  struct Block {
    void* stream;
    size_t bytes;
  };
  struct Stream {
    const void* owner = nullptr;
    uint64_t begun = 0, finished = 0;
    std::multimap<size_t, void*> freed;  // by size: free for this stream only
    bool Busy() const { return begun != finished; }
  };
  // A freed block that other streams may still use.
  struct Waiting {
    void* block;
    std::vector<void*> streams;
  };

  void RequireMemory(bool has_memory, size_t bytes) const;
  void* TakeFreed(size_t bytes, void* stream);
  void Begin(void* stream);
  // The following are called with the lock held.
  void KeepOrGiveBack(void* block);
  void WaitForAll() noexcept;
  std::vector<void*> BusyStreams() const;
  void GiveBack(void* block);
  void Finished(void* stream);

  const std::shared_ptr<DeviceRuntime> runtime_;
  const int index_;
  Owned<OrtMemoryInfo> memory_info_;
  std::mutex mutex_;
  std::unordered_map<void*, Stream> streams_;
  std::unordered_map<void*, Block> blocks_;  // those allocated for a stream
  std::vector<Waiting> waiting_;
};

}  // namespace lowbit::ep
