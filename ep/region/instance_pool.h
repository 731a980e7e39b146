// The instances of one plan: how many there are is bounded, and no two runs use one at the same time.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "ep/region/backend.h"

namespace lowbit::ep {

class InstancePool {
  struct Slot {
    std::unique_ptr<Instance> instance;
    bool leased = false;
    uint64_t last_use = 0;
  };

 public:
  // Both outlive the pool.
  InstancePool(Backend& backend, const RegionPlan& plan)
      : backend_(backend), plan_(plan), most_(std::max(backend.MaxInstances(), size_t{1})) {}

  // An instance for the one thread that holds the lease.
  class Lease {
   public:
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() { pool_.Return(slot_); }
    Instance* operator->() const { return slot_.instance.get(); }

   private:
    friend InstancePool;
    Lease(InstancePool& pool, Slot& slot) : pool_(pool), slot_(slot) {}
    InstancePool& pool_;
    Slot& slot_;
  };

  // In this order: an idle instance that holds these externals already, an idle one, a new one while there
  // may be more, the one used longest ago (the run then queues behind what runs there), the next that a
  // thread gives back. Throws what creating an instance throws if there is no other.
  Lease Acquire(std::span<void* const> externals, const RunContext& context);

 private:
  Slot* FindIdle(std::span<void* const> externals, const RunContext& context) const;
  Slot* FindLeastRecentlyUsed() const;
  Slot* Create(std::unique_lock<std::mutex>& lock);
  Lease Take(Slot& slot);
  void Return(Slot& slot);

  Backend& backend_;
  const RegionPlan& plan_;
  const size_t most_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Slot>> slots_;
  size_t creating_ = 0;  // instances that threads create now
  uint64_t uses_ = 0;
};

}  // namespace lowbit::ep
