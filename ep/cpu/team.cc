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
      ~Ending() { team.Offer(kOver); }
    } ending{team};
    body(team);
  });
}

void Team::Offer(uint64_t next) {
  const uint64_t loop = (state_.load(std::memory_order_relaxed) | kItem) + 1;
  state_.store(loop | next, std::memory_order_release);
  if (next != kNone) state_.notify_all();
}

void Team::ParallelFor(size_t count, const std::function<void(size_t)>& fn) {
  if (count <= 1 || count >= kOver) {
    for (size_t i = 0; i < count; ++i) fn(i);
    return;
  }
  GuardedBody body(fn);
  // No item can be taken while the fields change: who has read one of the new values sees this first (they are released
  // and acquired for that), and who has read old ones takes an item only where `state_` still is as it was.
  Offer(kNone);
  loop_.store(&body, std::memory_order_release);
  count_.store(count, std::memory_order_release);
  done_.store(0, std::memory_order_relaxed);
  Offer(0);
  TakeItems();
  for (size_t done = 0; (done = done_.load(std::memory_order_acquire)) != count;) WaitForChange(done_, done);
  body.Rethrow();
}

uint64_t Team::TakeItems() {
  uint64_t state = state_.load(std::memory_order_acquire);
  while (true) {
    const size_t item = static_cast<size_t>(state & kItem);
    GuardedBody* const loop = loop_.load(std::memory_order_acquire);
    const size_t count = count_.load(std::memory_order_acquire);
    if (item >= kOver || item >= count) return state;
    // Neighbours, which often share what they read: fewer towards the end, so that all members end together.
    const size_t items = std::max<size_t>((count - item) / (2 * members_), 1);
    if (!state_.compare_exchange_weak(state, state + items, std::memory_order_acq_rel,
                                      std::memory_order_acquire))
      continue;
    for (size_t i = item; i < item + items; ++i) (*loop)(i);
    if (done_.fetch_add(items, std::memory_order_acq_rel) + items == count) done_.notify_one();
    state = state_.load(std::memory_order_acquire);
  }
}

void Team::Help() {
  for (uint64_t state = TakeItems(); (state & kItem) != kOver; state = TakeItems())
    WaitForChange(state_, state);
}

}  // namespace lowbit::ep
