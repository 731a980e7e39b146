#include "ep/cpu/team.h"

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
// About a microsecond, in which a member that has entered begins its share.
constexpr int kPatience = 30;

// Whether `value` is no longer `old`, after so many looks at it at most.
template <class T>
bool Changes(const std::atomic<T>& value, T old, int looks) {
  for (int i = 0; i < looks; ++i, Pause()) {
    if (value.load(std::memory_order_acquire) != old) return true;
  }
  return false;
}

}  // namespace

size_t Team::Run(ThreadPool& pool, size_t members, size_t threads,
                 const std::function<void(ThreadPool&)>& body) {
  Team team(members, threads);
  pool.ParallelFor(members, [&](size_t) {
    if (team.is_led_.exchange(true)) return team.Help();
    team.leader_ = team.Enter();
    const struct Ending {
      Team& team;
      ~Ending() { team.Offer(kOver); }
    } ending{team};
    body(team);
  });
  return team.entered_;
}

size_t Team::Enter() {
  thread_local size_t last = 0;
  entered_.fetch_add(1, std::memory_order_relaxed);
  // Those with a share first.
  for (size_t i = 0;; i = (i + 1) % places_.size()) {
    const size_t place = i < sharers_ ? (last + i) % sharers_ : i;
    std::atomic<bool>& is_taken = places_[place].is_taken;
    if (!is_taken.load(std::memory_order_relaxed) && !is_taken.exchange(true)) return last = place;
  }
}

void Team::Offer(uint64_t count) {
  const uint64_t number = (loop_.load(std::memory_order_relaxed) | kCount) + 1;
  loop_.store(number | count, std::memory_order_release);
  loop_.notify_all();
}

void Team::ParallelFor(size_t count, const std::function<void(size_t)>& fn) {
  if (count <= 1 || count >= kOver) {
    for (size_t i = 0; i < count; ++i) fn(i);
    return;
  }
  GuardedBody body(fn);
  items_ += count;
  body_.store(&body, std::memory_order_relaxed);
  Offer(count);
  const uint64_t loop = loop_.load(std::memory_order_relaxed);
  Do(leader_, leader_, loop, false);
  WaitUntilAllDone(loop);
  body.Rethrow();
}

// Who reads a loop's number late may find another body, but no item: until all of them are taken the body is the loop's
// own, and that a share has none left does not depend on it.
bool Team::Do(size_t self, size_t whose, uint64_t loop, bool one) {
  const uint64_t number = loop & ~kCount, count = loop & kCount;
  if (count == 0) return false;  // no loop has been offered, and perhaps nobody leads
  if (whose >= sharers_) return false;
  // The first share is the leader's: where there are fewer items than members it has one of them.
  const uint64_t share = (whose + sharers_ - leader_ % sharers_) % sharers_;
  const uint64_t begin = (count * share + sharers_ - 1) / sharers_;
  const uint64_t end = (count * (share + 1) + sharers_ - 1) / sharers_;
  if (begin == end) return false;
  Place& place = places_[whose];
  uint64_t next = place.next.load(std::memory_order_acquire), done = 0;
  while (next < (number | end)) {
    const uint64_t item = next < number ? begin : next & kCount;
    if (!place.next.compare_exchange_weak(next, number | (item + 1), std::memory_order_acq_rel,
                                          std::memory_order_acquire))
      continue;
    (*body_.load(std::memory_order_relaxed))(item);
    ++done;
    if (one) break;
    next = number | (item + 1);
  }
  if (done == 0) return false;
  std::atomic<uint64_t>& all = places_[self].done;
  all.store(all.load(std::memory_order_relaxed) + done, std::memory_order_seq_cst);
  if (leader_sleeps_.load(std::memory_order_seq_cst)) {
    wakings_.fetch_add(1, std::memory_order_release);
    wakings_.notify_one();
  }
  return true;
}

bool Team::DoOthers(size_t self, uint64_t loop, bool one) {
  bool did_any = false;
  for (size_t i = 1; i <= sharers_; ++i) did_any = Do(self, (self + i) % sharers_, loop, one) || did_any;
  return did_any;
}

bool Team::AllDone() const {
  uint64_t done = 0;
  for (const Place& place : places_) done += place.done.load(std::memory_order_seq_cst);
  return done == items_;
}

void Team::WaitUntilAllDone(uint64_t loop) {
  bool is_patient = entered_.load(std::memory_order_relaxed) >= sharers_;
  for (int spins = 0; !AllDone(); ++spins, Pause()) {
    if (is_patient && spins < kPatience) continue;
    is_patient = false;
    if (DoOthers(leader_, loop, true)) spins = 0;
    if (spins < kSpins) continue;
    // Everything is taken. Whoever has done something after this sees that it has to wake the leader.
    leader_sleeps_.store(true, std::memory_order_seq_cst);
    for (uint32_t wakings = 0; wakings = wakings_.load(std::memory_order_acquire), !AllDone();)
      wakings_.wait(wakings, std::memory_order_acquire);
    leader_sleeps_.store(false, std::memory_order_relaxed);
    return;
  }
}

void Team::Help() {
  uint64_t loop = loop_.load(std::memory_order_acquire);
  if ((loop & kCount) == kOver) return;
  const size_t self = Enter();
  for (;; loop = loop_.load(std::memory_order_acquire)) {
    if ((loop & kCount) == kOver) return;
    Do(self, self, loop, false);
    const bool is_patient = entered_.load(std::memory_order_relaxed) >= sharers_;
    if (is_patient && Changes(loop_, loop, kPatience)) continue;
    DoOthers(self, loop, false);
    if (!Changes(loop_, loop, kSpins)) loop_.wait(loop, std::memory_order_acquire);
  }
}

}  // namespace lowbit::ep
