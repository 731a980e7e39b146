// All parallel loops of a region in one parallel section of ONNX Runtime's pool.
//
// A section costs what it takes to wake, or to be noticed by, every thread of the pool and to wait for the last of them
// to say that it has nothing left: 55 us with 16 threads of a Xeon, where a layer takes as long on all of them. A region
// of 50 layers therefore opens one section and stays in it. The thread that enters first leads: it runs the steps, one
// after the other, and every loop that a step asks for is offered to the others, who have nothing else to do.
//
// Nobody waits for a thread that may never come. The leader does itself what no other thread takes, a thread that finds
// the region over leaves at once, and a pool of one thread (or one whose threads are all elsewhere) runs everything as if
// there were no team.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "core/guarded_body.h"
#include "core/thread_pool.h"

namespace lowbit::ep {

class Team final : public ThreadPool {
 public:
  // Runs `body` once, on one of up to `members` threads of `pool` that share the loops that it runs on the pool it is
  // given. Throws what `body` throws.
  static void Run(ThreadPool& pool, size_t members, const std::function<void(ThreadPool&)>& body);

  void ParallelFor(size_t count, const std::function<void(size_t)>& fn) override;

 private:
  explicit Team(size_t members) : members_(members) {}

  // The number of the loop in the upper half; in the lower one the next item that nobody has taken, or kNone while no
  // loop is offered, or kOver.
  static constexpr uint64_t kLoop = uint64_t{1} << 32, kItem = kLoop - 1, kNone = kItem, kOver = kItem - 1;

  void Help();
  // Takes items of the loop until none is left; the state then.
  uint64_t TakeItems();
  void Offer(uint64_t next);

  const size_t members_;
  std::atomic<bool> is_led_{false};
  // What a member writes and what all of them wait for lie apart.
  alignas(64) std::atomic<uint64_t> state_{kNone};
  alignas(64) std::atomic<size_t> done_{0};  // items of the loop
  alignas(64) std::atomic<size_t> count_{0};
  std::atomic<GuardedBody*> loop_{nullptr};
};

}  // namespace lowbit::ep
