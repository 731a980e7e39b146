// All parallel loops of a region in one parallel section of ONNX Runtime's pool.
//
// A section costs what it takes to wake, or to be noticed by, every thread of the pool and to wait for the last of them
// to say that it has nothing left: 55 us with 16 threads of a Xeon, where a layer takes as long on all of them. A region
// of 50 layers therefore opens one section and stays in it. The thread that enters first leads: it runs the steps, one
// after the other, and every loop that a step asks for is offered to the others, who have nothing else to do.
//
// Every member that is thought to come has a share of each loop, neighbouring items, and the same thread has the same
// share in all loops, and in all runs that the same thread leads: rows that it made, weights that it read in the run
// before, are in its own cache. No two threads write one cache line while all do what is theirs. What a member leaves,
// because it is late or never came, the others take.
//
// Nobody waits for a thread that may never come. The leader does itself what no other thread takes, a thread that finds
// the region over leaves at once, and a pool of one thread (or one whose threads are all elsewhere) runs everything as if
// there were no team.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "core/guarded_body.h"
#include "core/thread_pool.h"

namespace lowbit::ep {

class Team final : public ThreadPool {
 public:
  // Runs `body` once, on one of up to `members` threads of `pool` that share the loops that it runs on the pool it is
  // given, of which `threads` are thought to come (0: not known). Throws what `body` throws, returns how many came.
  static size_t Run(ThreadPool& pool, size_t members, size_t threads,
                    const std::function<void(ThreadPool&)>& body);

  void ParallelFor(size_t count, const std::function<void(size_t)>& fn) override;
  double TaskCycles() const override {
    return std::max(kLoopCycles / static_cast<double>(sharers_), kTeamTaskCycles);
  }
  size_t Threads() const override { return threads_; }

 private:
  // The least work of a task, about half a microsecond: a loop costs 1.4 us with 16 members on a Xeon, however little they
  // do in it, and MobileNetV2 takes 0.90 of the time that it takes with tasks of 2.5e3 cycles, 0.75 of that with 5e3.
  static constexpr double kTeamTaskCycles = 1.2e3;
  // What members share before they do less than they might: the fewer they are, the less a finer cut wins.
  static constexpr double kLoopCycles = 2e4;

  Team(size_t members, size_t threads)
      : threads_(threads), sharers_(threads == 0 ? members : std::min(threads, members)), places_(members) {}

  // A loop is its number in the upper half and the number of its items in the lower one, which is kOver where there
  // will be no more.
  static constexpr uint64_t kLoop = uint64_t{1} << 32, kCount = kLoop - 1, kOver = kCount;

  // A member's place, in a cache line that others rarely look at.
  struct alignas(64) Place {
    std::atomic<bool> is_taken{false};
    // The last loop of whose share items were taken, in the upper half; in the lower one the next of them.
    std::atomic<uint64_t> next{0};
    std::atomic<uint64_t> done{0};  // items, of any share, that the member did, in all loops
  };

  // A free place, the one that the thread had last if it can be had.
  size_t Enter();
  void Help();
  void Offer(uint64_t count);
  // Does items of the share of `whose` in `loop`, all that are left or one, as member `self`; whether there were any.
  bool Do(size_t self, size_t whose, uint64_t loop, bool one);
  // The same of everyone else's.
  bool DoOthers(size_t self, uint64_t loop, bool one);
  bool AllDone() const;
  void WaitUntilAllDone(uint64_t loop);

  const size_t threads_;
  const size_t sharers_;  // the first places, which have a share: as many as threads are thought to come
  std::vector<Place> places_;
  size_t leader_ = 0;
  uint64_t items_ = 0;  // of all loops
  std::atomic<bool> is_led_{false};
  alignas(64) std::atomic<uint64_t> loop_{0};
  std::atomic<GuardedBody*> body_{nullptr};
  alignas(64) std::atomic<size_t> entered_{0};
  std::atomic<bool> leader_sleeps_{false};
  std::atomic<uint32_t> wakings_{0};
};

}  // namespace lowbit::ep
