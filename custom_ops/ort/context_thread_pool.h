// ONNX Runtime's intra-op pool, for the duration of one call.
#pragma once

#include "core/thread_pool.h"
#include "ort/ort_api.h"

namespace lowbit::ort {

class ContextThreadPool final : public ThreadPool {
 public:
  // Of so many threads; 0: not known, ONNX Runtime does not tell.
  explicit ContextThreadPool(const OrtKernelContext* context, size_t threads = 0)
      : context_(context), threads_(threads) {}

  void ParallelFor(size_t count, const std::function<void(size_t)>& fn) override;
  size_t Threads() const override { return threads_; }

 private:
  const OrtKernelContext* context_;
  const size_t threads_;
};

}  // namespace lowbit::ort
