// Tunes kernels where they stand. In a row of equals a kernel is timed without what its neighbours in a
// network do to it: theirs hold shared memory and multiprocessors while its blocks want to start, and wait
// for its slowest block. Among configurations that come close to each other in such a row, the time of the
// whole region decides.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "ep/region/program.h"

namespace lowbit::ep {

// Steps that share a configuration: one node's work at one shape, wherever the region has it.
struct TunedSteps {
  std::vector<size_t> steps;
  size_t choices = 1;  // configurations to try
  size_t chosen = 0;   // the one in use
  // A choice is what PlannedStep::with_next of each step is to be: null where it and the next one are apart.
  bool together = false;
  size_t tried = 0;      // how often another choice was tried: 0 where patience ended before
  size_t estimated = 0;  // by the cost model the fastest choice
};

// The step's plan with a configuration of its group.
using PlanAgain =
    std::function<std::shared_ptr<const StepPlan>(const TunedSteps& group, size_t step, size_t choice)>;
// Any unit.
using RegionTime = std::function<double(const RegionPlan&)>;

// Gives the steps of `plan` the configurations with which the whole of it runs fastest: first the estimated ones of all
// groups at once, as each may gain less than can be told from chance, then coordinate descent, one group after the
// other, at most twice around, until `patience` is over. No step gets more scratch memory than it has. Throws what the functions throw; `plan` is then as it was.
void TuneRegion(RegionPlan& plan, std::span<TunedSteps> groups, const PlanAgain& plan_again,
                const RegionTime& time, std::chrono::seconds patience);

}  // namespace lowbit::ep
