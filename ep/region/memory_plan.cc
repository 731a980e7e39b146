#include "ep/region/memory_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/status.h"

namespace lowbit::ep {
namespace {

size_t AlignedSize(size_t bytes, size_t alignment) {
  Require(bytes <= std::numeric_limits<size_t>::max() - (alignment - 1), "a tensor of ", bytes,
          " bytes is beyond any memory");
  return (bytes + alignment - 1) / alignment * alignment;
}

bool Meet(const Lifetime& a, const Lifetime& b) { return a.first <= b.last && b.first <= a.last; }

struct Placed {
  size_t begin = 0, end = 0;
  size_t index = 0;  // of its lifetime
};

// The smallest gap of at least `size` bytes between those of `placed` (ordered by `begin`) that are alive at
// the same time; behind all of them where none fits.
size_t FindGap(const std::vector<Placed>& placed, std::span<const Lifetime> lifetimes, const Lifetime& life,
               size_t size) {
  constexpr size_t kNone = std::numeric_limits<size_t>::max();
  size_t best = kNone, best_gap = kNone, free_from = 0;
  for (const Placed& other : placed) {
    if (!Meet(lifetimes[other.index], life)) continue;
    if (other.begin > free_from && other.begin - free_from >= size && other.begin - free_from < best_gap) {
      best = free_from;
      best_gap = other.begin - free_from;
    }
    free_from = std::max(free_from, other.end);
  }
  return best == kNone ? free_from : best;
}

}  // namespace

MemoryPlan PlanMemory(std::span<const Lifetime> lifetimes, size_t alignment) {
  std::vector<size_t> sizes(lifetimes.size()), order(lifetimes.size());
  size_t sum = 0;
  for (size_t i = 0; i < lifetimes.size(); ++i) {
    sizes[i] = AlignedSize(lifetimes[i].bytes, alignment);
    Require(sizes[i] <= std::numeric_limits<size_t>::max() - sum,
            "the tensors of the region are beyond any memory together");
    sum += sizes[i];
  }
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });

  MemoryPlan plan{std::vector<size_t>(lifetimes.size()), 0};
  std::vector<Placed> placed;
  for (const size_t i : order) {
    if (sizes[i] == 0) break;
    const size_t at = FindGap(placed, lifetimes, lifetimes[i], sizes[i]);
    plan.offsets[i] = at;
    plan.total = std::max(plan.total, at + sizes[i]);
    const auto after =
        std::upper_bound(placed.begin(), placed.end(), at,
                         [](size_t begin, const Placed& other) { return begin < other.begin; });
    placed.insert(after, {at, at + sizes[i], i});
  }
  return plan;
}

}  // namespace lowbit::ep
