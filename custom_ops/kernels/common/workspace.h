// Small pieces of the portable halves of the kernels: rounding, the split into tasks, and the scratch memory
// of a thread.
#pragma once

#include <cstddef>
#include <cstdint>

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
