// Consecutive steps of a region, each of which reads what the one before makes and nothing else, band by band of rows:
// those of a tensor that exceeds a core's cache are read while they are still there, and never written to memory.
//
//   conv 3x3    rows  0 .. 16      17 .. 32       a thread keeps the rows that the next band reads again
//   conv 3x3          0 .. 15        16 .. 31
//   max-pool 2x2      0 ..  7         8 .. 15
//
// Every thread has neighbouring bands of its own, and waits for nobody between their steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/cpu/operator.h"
#include "core/packed_weights.h"

namespace lowbit::ep {

struct BandStep {
  const Operator* op = nullptr;
  std::vector<std::optional<ConstTensor>>
      inputs;      // as Operator::Run takes them; what the first is fed comes with a run
  size_t fed = 0;  // which of them is
  RowWindow window;
};

class Bands {
 public:
  // The rows between the steps take `bytes` at most, but for bands of one row.
  Bands(std::vector<BandStep> steps, size_t threads, size_t bytes);

  // Not by two threads at once. `pool` has the threads.
  void Run(const void* x, void* y, ThreadPool& pool);

 private:
  void RunTask(size_t task, const void* x, void* y);

  std::vector<BandStep> steps_;
  size_t tasks_;
  int64_t rows_;                 // of y in a band, at most
  std::vector<size_t> buffers_;  // where the rows of each step but the last lie in a task's memory
  size_t task_bytes_ = 0;
  AlignedBytes memory_;
};

}  // namespace lowbit::ep
