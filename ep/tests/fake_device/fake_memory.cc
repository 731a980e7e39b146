#include "ep/tests/fake_device/fake_memory.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "core/status.h"

namespace lowbit::ep::fake {
namespace {

constexpr size_t kAlignment = 256;
constexpr int kPoison = 0xA5;

size_t Pages(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

}  // namespace

Memory::Memory(size_t limit) : limit_(limit) {
  file_ = memfd_create("lowbit_fake_device", MFD_CLOEXEC);
  Require(file_ >= 0 && ftruncate(file_, static_cast<off_t>(limit)) == 0, "no memory for the fake device");
  void* device = mmap(nullptr, limit, PROT_NONE, MAP_SHARED, file_, 0);
  void* shadow = mmap(nullptr, limit, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  Require(device != MAP_FAILED && shadow != MAP_FAILED, "no addresses for the fake device");
  device_ = static_cast<uint8_t*>(device);
  shadow_ = static_cast<uint8_t*>(shadow);
}

Memory::~Memory() {
  munmap(device_, limit_);
  munmap(shadow_, limit_);
  close(file_);
}

void Memory::Fault(const std::string& what) {
  ++faults_;
  std::fprintf(stderr, "fake device: %s\n", what.c_str());
  throw Error("fake device: " + what);
}

void* Memory::Allocate(size_t bytes) {
  const size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const std::lock_guard lock(mutex_);
  size_t offset = 0;  // the first gap that is large enough
  for (const auto& [at, block] : live_) {
    if (at - offset >= size) break;
    offset = at + block.bytes;
  }
  Require(size <= limit_ && offset <= limit_ - size, "the fake device has no room for ", bytes,
          " bytes: ", in_use_, " of ", limit_, " are in use");
  live_[offset] = {size, ++generations_};
  in_use_ += size;
  std::memset(shadow_ + offset, kPoison, size);
  return device_ + offset;
}

void Memory::Free(void* block) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(static_cast<size_t>(static_cast<uint8_t*>(block) - device_));
  if (found == live_.end()) {
    ++faults_;
    std::fprintf(stderr, "fake device: %p was freed, but is no block\n", block);
    return;
  }
  std::memset(shadow_ + found->first, kPoison, found->second.bytes);
  in_use_ -= found->second.bytes;
  live_.erase(found);
}

void* Memory::Map(int file, size_t bytes, void** data) {
  struct stat status = {};
  Require(fstat(file, &status) == 0 && static_cast<size_t>(status.st_size) >= bytes, "descriptor ", file,
          " is no memory of ", bytes, " bytes");
  void* block = Allocate(2 * Pages(bytes));
  const size_t offset = Pages(static_cast<size_t>(static_cast<uint8_t*>(block) - device_));
  const void* mapped =
      mmap(shadow_ + offset, Pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
  if (mapped == MAP_FAILED) Free(block);
  Require(mapped != MAP_FAILED, "descriptor ", file, " cannot be mapped");
  *data = device_ + offset;
  return block;
}

void Memory::Unmap(void* block, void* data, size_t bytes) noexcept {
  const auto offset = static_cast<size_t>(static_cast<uint8_t*>(data) - device_);
  (void)mmap(shadow_ + offset, Pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_,
             static_cast<off_t>(offset));
  Free(block);
}

bool Memory::Contains(const void* address) const {
  const auto* byte = static_cast<const uint8_t*>(address);
  return byte >= device_ && byte < device_ + limit_;
}

std::map<size_t, Memory::Block>::const_iterator Memory::Find(size_t offset) const {
  auto after = live_.upper_bound(offset);
  return after == live_.begin() ? live_.end() : --after;
}

Memory::Use Memory::Check(const void* address, size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (!Contains(address)) Fault("a host pointer was handed to the device");
  const size_t offset = static_cast<size_t>(static_cast<const uint8_t*>(address) - device_);
  const auto block = Find(offset);
  if (block == live_.end() || offset + bytes > block->first + block->second.bytes)
    Fault("work for " + std::to_string(bytes) + " bytes outside of every block");
  return {const_cast<void*>(address), bytes, block->second.generation};
}

void* Memory::Touch(const Use& use) {
  const std::lock_guard lock(mutex_);
  const size_t offset = static_cast<size_t>(static_cast<uint8_t*>(use.address) - device_);
  const auto block = Find(offset);
  if (block == live_.end() || block->second.generation != use.generation)
    Fault("memory was freed before the work that uses it was done");
  return shadow_ + offset;
}

void Memory::CheckHost(const void* address) {
  const std::lock_guard lock(mutex_);
  if (Contains(address)) Fault("a device pointer was handed over as the host's");
}

size_t Memory::in_use() const {
  const std::lock_guard lock(mutex_);
  return in_use_;
}

size_t Memory::blocks() const {
  const std::lock_guard lock(mutex_);
  return live_.size();
}

size_t Memory::faults() const {
  const std::lock_guard lock(mutex_);
  return faults_;
}

}  // namespace lowbit::ep::fake
