#include "python/std_thread_pool.h"

namespace lowbit {

StdThreadPool::StdThreadPool(size_t threads, double task_cycles) : task_cycles_(task_cycles) {
  for (size_t i = 1; i < threads; ++i) workers_.emplace_back([this] { WorkerLoop(); });
}

StdThreadPool::~StdThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void StdThreadPool::TakeItems() {
  for (size_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) (*body_)(i);
}

void StdThreadPool::WorkerLoop() {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return stop_ || generation_ != seen; });
    if (stop_) return;
    seen = generation_;
    lock.unlock();
    TakeItems();
    lock.lock();
    if (--busy_ == 0) done_.notify_one();
  }
}

void StdThreadPool::ParallelFor(size_t count, const std::function<void(size_t)>& fn) {
  if (workers_.empty() || count <= 1) {
    for (size_t i = 0; i < count; ++i) fn(i);
    return;
  }
  GuardedBody body(fn);
  {
    const std::lock_guard lock(mutex_);
    body_ = &body;
    count_ = count;
    next_ = 0;
    busy_ = workers_.size();
    ++generation_;
  }
  start_.notify_all();
  TakeItems();
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return busy_ == 0; });
  body.Rethrow();
}

}  // namespace lowbit
