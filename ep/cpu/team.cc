#include "ep/cpu/team.h"

#include <algorithm>

namespace lowbit::ep {
namespace {

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// About 100 us: longer than a step that one thread does alone, shorter than what the system gives a thread at a time.
constexpr int kSpins = 4000;

// Waits until `value` is no longer `old`: in a loop, later asleep.
template <class T>
void WaitForChange(const std::atomic<T>& value, T old) {
  for (int i = 0; i < kSpins; ++i, Pause()) {
    if (value.load(std::memory_order_acquire) != old) return;
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

void Team::Run(ThreadPool& pool, size_t members, const std::function<void(ThreadPool&)>& body) {
  Team team(members);
  pool.ParallelFor(members, [&](size_t) {
    if (team.is_led_.exchange(true)) return team.Help();
    const struct Ending {
      Team& team;
      ~Ending() { team.Offer((team.state_.load(std::memory_order_relaxed) & ~kPart) + kLoop + kOver); }
    } ending{team};
    body(team);
  });
}

void Team::Offer(uint64_t state) {
  state_.store(state, std::memory_order_release);
  state_.notify_all();
}

void Team::ParallelFor(size_t count, const std::function<void(size_t)>& fn) {
  if (count <= 1) {
    for (size_t i = 0; i < count; ++i) fn(i);
    return;
  }
  GuardedBody body(fn);
  // Of more parts than members the last ones go to those that are done first.
  const size_t parts = std::min(count, 2 * members_);
  const uint64_t loop = (state_.load(std::memory_order_relaxed) & ~kPart) + kLoop;
  loop_.store(&body, std::memory_order_relaxed);
  count_.store(count, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  parts_.store(loop + parts, std::memory_order_release);
  Offer(loop);
  TakeParts();
  for (size_t done = 0; (done = done_.load(std::memory_order_acquire)) != parts;) WaitForChange(done_, done);
  body.Rethrow();
}

// Who has a part of a loop finds the fields as they are for it: they change when all its parts are done. Who comes too
// late has the number of an earlier loop than the fields, or a part that this one does not have.
uint64_t Team::TakeParts() {
  while (true) {
    uint64_t state = state_.load(std::memory_order_acquire), parts = parts_.load(std::memory_order_acquire);
    const auto is_one = [&] {
      return (state & ~kPart) == (parts & ~kPart) && (state & kPart) < (parts & kPart);
    };
    if (!is_one()) return state;
    state = state_.fetch_add(1, std::memory_order_acq_rel);
    parts = parts_.load(std::memory_order_acquire);
    if (!is_one()) return state + 1;
    const size_t part = static_cast<size_t>(state & kPart), all = static_cast<size_t>(parts & kPart),
                 count = count_.load(std::memory_order_relaxed);
    GuardedBody* const loop = loop_.load(std::memory_order_relaxed);
    for (size_t i = count * part / all; i < count * (part + 1) / all; ++i) (*loop)(i);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == all) done_.notify_one();
  }
}

void Team::Help() {
  for (uint64_t state = TakeParts(); (state & kOver) == 0; state = TakeParts()) WaitForChange(state_, state);
}

}  // namespace lowbit::ep
