// Threads come from the host (ONNX Runtime's intra-op pool); the core only asks for a parallel loop.
#pragma once

#include <cstddef>
#include <functional>

namespace lowbit {

class ThreadPool {
 public:
  virtual ~ThreadPool() = default;
  // Calls fn(i) for every i in [0, count), in any order, on any threads including the caller's; returns when
  // all are done. fn must not throw. count 1 (and a pool of one thread) runs inline.
  virtual void ParallelFor(size_t count, const std::function<void(size_t)>& fn) = 0;
};

class InlineThreadPool final : public ThreadPool {
 public:
  void ParallelFor(size_t count, const std::function<void(size_t)>& fn) override {
    for (size_t i = 0; i < count; ++i) fn(i);
  }
};

}  // namespace lowbit
