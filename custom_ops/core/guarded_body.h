// Parallel loops on threads that no exception may leave.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>

namespace lowbit {

// The body of a loop, for a pool that calls it on threads of its own: an exception there would end the
// process or unwind through a C library. The first one is kept for the thread that waits for the loop. (A
// kernel's body takes scratch memory, which may not be there.)
class GuardedBody {
 public:
  explicit GuardedBody(const std::function<void(size_t)>& body) : body_(body) {}

  // After a failure the remaining calls do nothing.
  void operator()(size_t i) noexcept {
    if (failed_.load(std::memory_order_relaxed)) return;
    try {
      body_(i);
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
  }

  // Only after every call has returned.
  void Rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  const std::function<void(size_t)>& body_;
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

}  // namespace lowbit
