// The threads of the Python module, where no ONNX Runtime lends its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "core/guarded_body.h"
#include "core/thread_pool.h"

namespace lowbit {

class StdThreadPool final : public ThreadPool {
 public:
  // `threads` includes the caller's. Tests cut loops finely with few cycles.
  explicit StdThreadPool(size_t threads, double task_cycles = kTaskCycles);
  ~StdThreadPool() override;
  StdThreadPool(const StdThreadPool&) = delete;
  StdThreadPool& operator=(const StdThreadPool&) = delete;

  // Throws what `fn` threw first, after every thread has left the loop.
  void ParallelFor(size_t count, const std::function<void(size_t)>& fn) override;
  double TaskCycles() const override { return task_cycles_; }
  size_t Threads() const override { return workers_.size() + 1; }

 private:
  void WorkerLoop();
  void TakeItems();

  const double task_cycles_;
  std::mutex mutex_;
  std::condition_variable start_, done_;
  uint64_t generation_ = 0;  // counts loops, so that a worker joins each of them once
  size_t busy_ = 0;          // workers that have not finished the current loop
  bool stop_ = false;
  GuardedBody* body_ = nullptr;
  size_t count_ = 0;
  std::atomic<size_t> next_{0};
  std::vector<std::thread> workers_;
};

}  // namespace lowbit
