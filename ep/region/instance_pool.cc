#include "ep/region/instance_pool.h"

#include <exception>
#include <utility>

namespace lowbit::ep {

InstancePool::Slot* InstancePool::FindIdle(std::span<void* const> externals,
                                           const RunContext& context) const {
  Slot* latest = nullptr;
  for (const std::unique_ptr<Slot>& slot : slots_) {
    if (slot->leased || slot->instance->Busy(context)) continue;
    if (slot->instance->Holds(externals)) return slot.get();
    if (latest == nullptr || slot->last_use > latest->last_use) latest = slot.get();
  }
  return latest;
}

InstancePool::Slot* InstancePool::FindLeastRecentlyUsed() const {
  Slot* oldest = nullptr;
  for (const std::unique_ptr<Slot>& slot : slots_) {
    if (!slot->leased && (oldest == nullptr || slot->last_use < oldest->last_use)) oldest = slot.get();
  }
  return oldest;
}

InstancePool::Slot* InstancePool::Create(std::unique_lock<std::mutex>& lock) {
  ++creating_;
  lock.unlock();
  std::unique_ptr<Slot> slot;
  std::exception_ptr error;
  try {
    slot = std::make_unique<Slot>();
    slot->instance = backend_.CreateInstance(plan_);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  --creating_;
  if (error == nullptr) return slots_.emplace_back(std::move(slot)).get();
  changed_.notify_all();
  if (slots_.empty() && creating_ == 0) std::rethrow_exception(error);
  return nullptr;
}

InstancePool::Lease InstancePool::Take(Slot& slot) {
  slot.leased = true;
  slot.last_use = ++uses_;
  return {*this, slot};
}

InstancePool::Lease InstancePool::Acquire(std::span<void* const> externals, const RunContext& context) {
  std::unique_lock lock(mutex_);
  for (bool may_create = true;;) {
    if (Slot* slot = FindIdle(externals, context)) return Take(*slot);
    if (may_create && slots_.size() + creating_ < most_) {
      if (Slot* slot = Create(lock)) return Take(*slot);
      may_create = false;  // the memory does not suffice: wait for the others
      continue;
    }
    if (Slot* slot = FindLeastRecentlyUsed()) return Take(*slot);
    if (slots_.empty() && creating_ == 0) {
      may_create = true;
      continue;
    }
    changed_.wait(lock);
  }
}

void InstancePool::Return(Slot& slot) {
  {
    const std::lock_guard lock(mutex_);
    slot.leased = false;
  }
  changed_.notify_one();
}

}  // namespace lowbit::ep
