#include "kernels/common/workspace.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "core/packed_weights.h"
#include "core/processors.h"

namespace lowbit {

namespace {
constexpr uint64_t kNoTicket = 0;
}

size_t FewTasks() {
  static const size_t tasks = std::clamp<size_t>(UsableProcessors(), 4, 16);
  return tasks;
}

size_t FewTasks(const ThreadPool& pool) { return pool.Threads() == 0 ? FewTasks() : pool.Threads(); }

size_t WantedTasks(double cycles) {
  return static_cast<size_t>(std::min(cycles / kTaskCycles, static_cast<double>(FewTasks())));
}

uint8_t* ThreadScratch(size_t bytes) { return ThreadScratch(bytes, kNoTicket).memory; }

KeptScratch ThreadScratch(size_t bytes, uint64_t ticket) {
  thread_local std::unique_ptr<AlignedBytes> buffer;
  thread_local uint64_t last = kNoTicket;
  const bool kept = ticket != kNoTicket && ticket == last;
  last = ticket;
  if (!buffer || buffer->size() < bytes) buffer = std::make_unique<AlignedBytes>(bytes);
  return {buffer->data(), kept};
}

uint64_t NewTickets(size_t count) {
  static std::atomic<uint64_t> next = kNoTicket + 1;
  return next.fetch_add(count, std::memory_order_relaxed);
}

bool IsPointwise(const ConvGeometry& g) {
  return g.Taps() == 1 && g.IsPlanar() && g.stride_h == 1 && g.stride_w == 1 && g.pad_top == 0 &&
         g.pad_left == 0 && g.pad_bottom == 0 && g.pad_right == 0;
}

ConvShape Flatten(const ConvGeometry& g, const ConvShape& s) {
  if (!IsPointwise(g)) return s;
  const int64_t pixels = s.batch * s.in_h * s.in_w;
  return {1, 1, pixels, 1, pixels};
}

}  // namespace lowbit
