// Host memory that poses as a device's. It is mapped twice: at the addresses that ONNX Runtime gets, where
// nobody may read or write (a host path that touches them dies on the spot), and at others where the "device"
// works.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace lowbit::ep::fake {

class Memory {
 public:
  explicit Memory(size_t limit);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* Allocate(size_t bytes);  // throws Error when there is no room
  void Free(void* block) noexcept;

  // A block whose first bytes, from the page that `data` is set to, are those of a file.
  void* Map(int file, size_t bytes, void** data);
  void Unmap(void* block, void* data, size_t bytes) noexcept;

  // A block at the time of the call, so that work which runs later can tell whether it is still the same one.
  struct Use {
    void* address = nullptr;
    size_t bytes = 0;
    uint64_t generation = 0;
  };
  // Throws Error, and counts a fault, unless [address, address + bytes) lies in one live block.
  Use Check(const void* address, size_t bytes);
  // Where the device reads and writes it. Throws Error, and counts a fault, where the block was freed since.
  void* Touch(const Use& use);
  // Throws Error, and counts a fault, for addresses of this memory.
  void CheckHost(const void* address);

  size_t in_use() const;
  size_t reserved() const { return limit_; }
  size_t blocks() const;
  size_t faults() const;

 private:
  struct Block {
    size_t bytes;
    uint64_t generation;
  };
  bool Contains(const void* address) const;
  std::map<size_t, Block>::const_iterator Find(size_t offset) const;
  [[noreturn]] void Fault(const std::string& what);

  const size_t limit_;
  int file_ = -1;
  uint8_t* device_ = nullptr;
  uint8_t* shadow_ = nullptr;
  mutable std::mutex mutex_;
  std::map<size_t, Block> live_;  // by offset
  uint64_t generations_ = 0;
  size_t in_use_ = 0, faults_ = 0;
};

}  // namespace lowbit::ep::fake
