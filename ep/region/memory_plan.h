// Where the tensors of a region lie in its one workspace. Tensors whose lives do not overlap share memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lowbit::ep {

// Alive from step `first` (which writes it) to step `last` (the last that reads it), both included, counted
// from 0.
struct Lifetime {
  size_t bytes = 0;
  int first = 0, last = 0;
};

struct MemoryPlan {
  std::vector<size_t> offsets;  // one per lifetime
  size_t total = 0;
};

// Greedy by size (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", section 5):
// the largest tensor first, each into the smallest gap that fits between those alive at the same time. Throws
// Error where the sum leaves size_t.
MemoryPlan PlanMemory(std::span<const Lifetime> lifetimes, size_t alignment);

}  // namespace lowbit::ep
