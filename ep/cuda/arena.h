// Device memory that is handed out again instead of going back to the driver: an allocation by the driver
// takes some microseconds to milliseconds, and giving memory back waits for the whole device. Knows no CUDA.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace lowbit::ep {

class Arena {
 public:
  // Where the memory comes from. Both are called from any thread.
  struct Source {
    std::function<void*(size_t bytes)> allocate;  // nullptr: out of memory. May throw Error
    std::function<void(void* block)> release;     // never throws
    std::function<std::string()> free_memory;     // what the device has left, for messages
  };
  // `reserve_limit`: bytes that may wait here to be handed out again. `name`: the device, for messages.
  Arena(Source source, size_t reserve_limit, std::string name)
      : source_(std::move(source)), reserve_limit_(reserve_limit), name_(std::move(name)) {}
  ~Arena() { ReleaseReserve(); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Never nullptr, aligned to 256. Throws Error.
  void* Allocate(size_t bytes);
  void Free(void* block) noexcept;
  // Gives the reserve back to the driver; the bytes that were in it.
  size_t ReleaseReserve() noexcept;

  size_t BytesInUse() const;
  size_t BytesReserved() const;  // in use or waiting here

  // The size of the block that serves a request: at most an eighth more (and at least 256 bytes), so that the
  // few shapes that a session meets share blocks.
  static size_t BlockBytes(size_t bytes);

 private:
  void* TakeReserved(size_t block_bytes);
  void* TakeNew(size_t block_bytes, size_t asked);
  // With the lock held. False where there is no memory to remember the block by.
  bool Keep(void* block, size_t size) noexcept;

  const Source source_;
  const size_t reserve_limit_;
  const std::string name_;
  mutable std::mutex mutex_;
  std::unordered_map<void*, size_t> used_;
  std::multimap<size_t, void*> reserve_;  // by size
  size_t used_bytes_ = 0, reserve_bytes_ = 0;
};

}  // namespace lowbit::ep
