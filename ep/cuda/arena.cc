#include "ep/cuda/arena.h"

#include <bit>
#include <limits>
#include <new>

#include "core/status.h"

namespace lowbit::ep {

size_t Arena::BlockBytes(size_t bytes) {
  constexpr size_t kSmallest = 256;
  if (bytes <= kSmallest) return kSmallest;
  const size_t step = std::max(kSmallest, std::bit_floor(bytes - 1) / 8);
  Require(bytes <= std::numeric_limits<size_t>::max() - step, "CUDA: ", bytes,
          " bytes of device memory were asked for");
  return (bytes + step - 1) / step * step;
}

void* Arena::Allocate(size_t bytes) {
  const size_t block_bytes = BlockBytes(bytes);
  if (void* const block = TakeReserved(block_bytes)) return block;
  return TakeNew(block_bytes, bytes);
}

void* Arena::TakeReserved(size_t block_bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = reserve_.lower_bound(block_bytes);
  // A much larger block waits for a request of its own size: else two alternating sizes would make a third
  // block.
  if (found == reserve_.end() || found->first / 2 > block_bytes) return nullptr;
  const auto [size, block] = *found;
  used_.emplace(block, size);
  reserve_.erase(found);
  reserve_bytes_ -= size;
  used_bytes_ += size;
  return block;
}

void* Arena::TakeNew(size_t block_bytes, size_t asked) {
  void* block = source_.allocate(block_bytes);
  if (block == nullptr) {
    // Tried again even where there was none: another thread may just have given the reserve back.
    static_cast<void>(ReleaseReserve());
    block = source_.allocate(block_bytes);
  }
  if (block == nullptr) {
    Fail("CUDA: out of memory on ", name_, ": ", asked, " bytes were asked for, lowbit uses ", BytesInUse(),
         " and reserves nothing, the device has ", source_.free_memory(),
         "; feed smaller batches, close other sessions, or free what other programs hold there");
  }
  const std::lock_guard lock(mutex_);
  try {
    used_.emplace(block, block_bytes);
  } catch (...) {
    source_.release(block);
    throw;
  }
  used_bytes_ += block_bytes;
  return block;
}

void Arena::Free(void* block) noexcept {
  if (block == nullptr) return;
  {
    const std::lock_guard lock(mutex_);
    const auto found = used_.find(block);
    if (found == used_.end()) return;
    const size_t size = found->second;
    used_.erase(found);
    used_bytes_ -= size;
    if (reserve_bytes_ + size <= reserve_limit_ && Keep(block, size)) return;
  }
  source_.release(block);
}

bool Arena::Keep(void* block, size_t size) noexcept {
  try {
    reserve_.emplace(size, block);
  } catch (const std::bad_alloc&) {
    return false;
  }
  reserve_bytes_ += size;
  return true;
}

size_t Arena::ReleaseReserve() noexcept {
  std::multimap<size_t, void*> released;
  size_t bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    released.swap(reserve_);
    std::swap(bytes, reserve_bytes_);
  }
  for (const auto& [size, block] : released) source_.release(block);
  return bytes;
}

size_t Arena::BytesInUse() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

size_t Arena::BytesReserved() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_ + reserve_bytes_;
}

}  // namespace lowbit::ep
