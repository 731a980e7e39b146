// Threads come from the host (ONNX Runtime's intra-op pool); the core only asks for a parallel loop.
#pragma once

#include <cstddef>
#include <functional>

namespace lowbit {

// Work of one task, about 2 us at 4 GHz: handing a task to a spinning thread of ONNX Runtime's pool costs
// well below 1 us, and the layers of a small network take 10 to 20 us.
inline constexpr double kTaskCycles = 8e3;

class ThreadPool {
 public:
  virtual ~ThreadPool() = default;
  // Calls fn(i) for every i in [0, count), in any order, on any threads including the caller's; returns when
  // all are done. fn must not throw. count 1 (and a pool of one thread) runs inline.
  virtual void ParallelFor(size_t count, const std::function<void(size_t)>& fn) = 0;
  // The work that is worth a task of its own here.
  virtual double TaskCycles() const { return kTaskCycles; }
  // How many threads run a loop; 0: not known.
  virtual size_t Threads() const { return 0; }
};

class InlineThreadPool final : public ThreadPool {
 public:
  void ParallelFor(size_t count, const std::function<void(size_t)>& fn) override {
    for (size_t i = 0; i < count; ++i) fn(i);
  }
  size_t Threads() const override { return 1; }
};

}  // namespace lowbit
