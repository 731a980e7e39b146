#include "ep/region/memory_plan.h"

#include <algorithm>
#include <bit>
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

struct Placed {
  size_t begin = 0, end = 0;
};

// Tensors that have their place, found by when they are alive: a segment tree over the steps, whose nodes
// hold the tensors that are alive during all of their steps, and a list of those that begin at each step.
class PlacedTensors {
 public:
  explicit PlacedTensors(int steps)
      : leaves_(std::bit_ceil(static_cast<size_t>(steps))), during_(2 * leaves_), begins_(leaves_) {}

  void Add(const Lifetime& life, const Placed& placed) {
    begins_[static_cast<size_t>(life.first)].push_back(placed);
    size_t low = leaves_ + static_cast<size_t>(life.first),
           high = leaves_ + static_cast<size_t>(life.last) + 1;
    for (; low < high; low /= 2, high /= 2) {
      if (low % 2 == 1) during_[low++].push_back(placed);
      if (high % 2 == 1) during_[--high].push_back(placed);
    }
  }

  // Those alive at any time of `life`, by their places.
  std::vector<Placed> AliveDuring(const Lifetime& life) const {
    std::vector<Placed> alive;
    const auto append = [&](const std::vector<Placed>& more) {
      alive.insert(alive.end(), more.begin(), more.end());
    };
    for (size_t node = leaves_ + static_cast<size_t>(life.first); node > 0; node /= 2) append(during_[node]);
    for (int step = life.first + 1; step <= life.last; ++step) append(begins_[static_cast<size_t>(step)]);
    std::sort(alive.begin(), alive.end(), [](const Placed& a, const Placed& b) { return a.begin < b.begin; });
    return alive;
  }

 private:
  size_t leaves_;
  std::vector<std::vector<Placed>> during_, begins_;
};

// The smallest gap of at least `size` bytes between `others`, which are ordered; behind them all where none
// fits.
size_t FindGap(const std::vector<Placed>& others, size_t size) {
  constexpr size_t kNone = std::numeric_limits<size_t>::max();
  size_t best = kNone, best_gap = kNone, free_from = 0;
  for (const Placed& other : others) {
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

  int steps = 1;
  for (const Lifetime& life : lifetimes) steps = std::max(steps, life.last + 1);
  PlacedTensors placed(steps);
  MemoryPlan plan{std::vector<size_t>(lifetimes.size()), 0};
  for (const size_t i : order) {
    if (sizes[i] == 0) break;
    const size_t at = FindGap(placed.AliveDuring(lifetimes[i]), sizes[i]);
    plan.offsets[i] = at;
    plan.total = std::max(plan.total, at + sizes[i]);
    placed.Add(lifetimes[i], {at, at + sizes[i]});
  }
  return plan;
}

}  // namespace lowbit::ep
