// ONNX Runtime's intra-op pool, for the duration of one call.
#pragma once

#include "core/thread_pool.h"
#include "ort/ort_api.h"

namespace lowbit::ort {

class ContextThreadPool final : public ThreadPool {
 public:
  explicit ContextThreadPool(const OrtKernelContext* context) : context_(context) {}

  void ParallelFor(size_t count, const std::function<void(size_t)>& fn) override;

 private:
  const OrtKernelContext* context_;
};

}  // namespace lowbit::ort
