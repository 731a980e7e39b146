#include "ort/context_thread_pool.h"

#include "core/guarded_body.h"

namespace lowbit::ort {

void ContextThreadPool::ParallelFor(size_t count, const std::function<void(size_t)>& fn) {
  if (count == 0) return;
  if (count == 1) {
    fn(0);
    return;
  }
  GuardedBody body(fn);
  const auto call = [](void* user, size_t i) { (*static_cast<GuardedBody*>(user))(i); };
  Check(Api().KernelContext_ParallelFor(context_, call, count, 0, &body));
  body.Rethrow();
}

}  // namespace lowbit::ort
