// Small pieces of the portable halves of the kernels: rounding, the split into tasks, and the scratch memory
// of a thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "core/conv.h"
#include "core/thread_pool.h"

namespace lowbit {

constexpr size_t RoundUp(size_t value, size_t to) { return (value + to - 1) / to * to; }
constexpr size_t DivideUp(size_t value, size_t by) { return (value + by - 1) / by; }

// Panels are dealt out, or blocks cut finer than their memory requires, only where there would not even be
// this many tasks: every block reads all weights. One for each processor, between 4 and 16: ResNet-50 on 16 threads of a
// Xeon with AMX takes 0.87 of stock's time with 4 and 0.70 with 16, and on one thread 1 % longer; 32 win nothing.
// (3 % of ResNet-50 on one thread where each layer was cut as finely as kTaskCycles allows.)
size_t FewTasks();
// One for each thread of a pool that knows them.
size_t FewTasks(const ThreadPool& pool);
// How many of them a layer of so many cycles is worth.
size_t WantedTasks(double cycles);

// Blocks of pixels and panels of channels, dealt out evenly.
struct TaskSplit {
  size_t blocks, pixel_tasks, panels, panel_tasks;

  struct Part {
    size_t first_block, end_block, first_panel, end_panel;
  };

  size_t tasks() const { return pixel_tasks * panel_tasks; }
  Part operator[](size_t task) const {
    const size_t pixel_task = task / panel_tasks, panel_task = task % panel_tasks;
    return {blocks * pixel_task / pixel_tasks, blocks * (pixel_task + 1) / pixel_tasks,
            panels * panel_task / panel_tasks, panels * (panel_task + 1) / panel_tasks};
  }
};

// What a run of a kernel is planned for.
struct RunKey {
  ConvShape shape;
  size_t threads;      // ThreadPool::Threads, 0 where they are not known
  double task_cycles;  // ThreadPool::TaskCycles
  bool operator==(const RunKey&) const = default;
};

// Cuts the pixels into blocks and deals these and the panels out so that the threads are done soonest, as far as can be
// told: in so many rounds of equal tasks, whose last one takes half a task longer because no two threads are equally fast
// (on an idle Xeon some take twice as long as others for the same). A task costs, beside its blocks, what hands it to its
// thread. `cycles`: of the whole layer, uncut; cut(wanted): about so many blocks, with their number in `blocks`;
// block_cycles(blocks, panels): of one of them and of some panels, with what is done again for each block or part of the
// panels.
template <class Cut, class BlockCycles>
auto DealOut(const RunKey& key, double cycles, size_t panels, const Cut& cut,
             const BlockCycles& block_cycles) {
  constexpr size_t kMostRounds = 4;
  const size_t threads = key.threads == 0 ? FewTasks() : key.threads;
  const size_t worth = threads == 1 ? 1 : static_cast<size_t>(std::max(cycles / key.task_cycles, 1.0));
  std::pair<decltype(cut(size_t{1})), TaskSplit> best;
  double least = std::numeric_limits<double>::infinity();
  for (size_t wide = panels, parts = 1; parts <= std::min(panels, worth); parts = DivideUp(panels, --wide)) {
    wide = DivideUp(panels, parts);  // the fewest panels of a task that make so many parts
    for (size_t rounds = 1; rounds <= (worth == 1 ? 1 : kMostRounds); ++rounds) {
      auto made = cut(std::max<size_t>(std::min(threads * rounds, worth) / parts, 1));
      const TaskSplit split = {made.blocks, std::clamp(worth / parts, size_t{1}, made.blocks), panels, parts};
      const double task =
          key.task_cycles / 4 +
          static_cast<double>(DivideUp(made.blocks, split.pixel_tasks)) * block_cycles(made, wide);
      const double time =
          (static_cast<double>(DivideUp(split.tasks(), threads)) + (threads == 1 ? 0 : 0.5)) * task;
      if (time < least) {
        least = time;
        best = {std::move(made), split};
      }
    }
    if (wide == 1) break;
  }
  return best;
}

// The parts of a thread's scratch memory, laid out one behind the other, each at the start of a cache line.
class ScratchLayout {
 public:
  // The offset of a new part.
  size_t Take(size_t bytes) {
    const size_t offset = bytes_;
    bytes_ += RoundUp(bytes, kAlign);
    return offset;
  }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kAlign = 64;
  size_t bytes_ = 0;
};

// Scratch memory of the calling thread, shared by all kernels; valid until its next call.
uint8_t* ThreadScratch(size_t bytes);

// The same for a task whose thread may have done the one before: `kept` where the thread's last call had the same
// ticket, so that nobody has written there since. Tickets are numbers from NewTickets, or 0: nothing is kept.
struct KeptScratch {
  uint8_t* memory;
  bool kept;
};
KeptScratch ThreadScratch(size_t bytes, uint64_t ticket);
// The first of `count` consecutive numbers that nobody else has.
uint64_t NewTickets(size_t count);

// A 1x1 convolution without padding and stride.
bool IsPointwise(const ConvGeometry& geometry);
// The image as a kernel may see it: of a pointwise convolution one long row.
ConvShape Flatten(const ConvGeometry& geometry, const ConvShape& shape);

}  // namespace lowbit
