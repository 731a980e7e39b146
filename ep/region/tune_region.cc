#include "ep/region/tune_region.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

namespace lowbit::ep {
namespace {

// A third of a percent is what medians of 5 to 21 replays told apart on an H200; a second look must agree.
constexpr double kClearly = 0.997;
constexpr int kPasses = 2;

// A group and the choice to try.
struct Move {
  TunedSteps* group;
  size_t choice;
};

class Descent {
 public:
  Descent(const RegionPlan& plan, const PlanAgain& plan_again, const RegionTime& time)
      : plan_again_(plan_again), time_(time), trial_(plan), best_(time(plan)) {
    for (const PlannedStep& step : plan.steps) scratch_.push_back(step.plan->WorkspaceBytes());
  }

  double Best() const { return best_; }
  std::vector<PlannedStep> Steps() && { return std::move(trial_.steps); }

  // All of the moves at once.
  void Try(std::span<const Move> moves) {
    Plans plans;
    for (const auto& [group, choice] : moves) {
      ++group->tried;
      for (const size_t step : group->steps) {
        plans.push_back(plan_again_(*group, step, choice));
        // The memory is planned.
        if (!group->together && plans.back()->WorkspaceBytes() > scratch_[step]) return;
      }
    }
    Exchange(moves, plans);
    if (Improves()) {
      for (const auto& [group, choice] : moves) group->chosen = choice;
    } else {
      Exchange(moves, plans);
    }
  }

 private:
  using Plans = std::vector<std::shared_ptr<const StepPlan>>;

  void Exchange(std::span<const Move> moves, Plans& plans) {
    auto plan = plans.begin();
    for (const auto& [group, choice] : moves) {
      for (const size_t at : group->steps) {
        PlannedStep& step = trial_.steps[at];
        std::swap(group->together ? step.with_next : step.plan, *plan++);
      }
    }
  }

  bool Improves() {
    double time = time_(trial_);
    if (time < best_ * kClearly) time = std::max(time, time_(trial_));
    if (time >= best_ * kClearly) return false;
    best_ = time;
    return true;
  }

  const PlanAgain& plan_again_;
  const RegionTime& time_;
  RegionPlan trial_;
  double best_;
  std::vector<size_t> scratch_;  // by step
};

// Of each kernel that both groups can run, the choices that do: those in use, else the first ones. Not what
// both run already.
std::vector<std::array<Move, 2>> SameKernel(TunedSteps& a, TunedSteps& b, const KernelOf& kernel_of) {
  const auto choices = [&](const TunedSteps& group) {
    std::map<std::string, size_t> by_kernel = {{kernel_of(group, group.chosen), group.chosen}};
    for (size_t choice = 0; choice < group.choices; ++choice)
      by_kernel.emplace(kernel_of(group, choice), choice);
    return by_kernel;
  };
  const auto of_b = choices(b);
  std::vector<std::array<Move, 2>> moves;
  for (const auto& [kernel, choice] : choices(a)) {
    const auto other = of_b.find(kernel);
    if (other != of_b.end() && (choice != a.chosen || other->second != b.chosen))
      moves.push_back({Move{&a, choice}, Move{&b, other->second}});
  }
  return moves;
}

}  // namespace

void TuneRegion(RegionPlan& plan, std::span<TunedSteps> groups, const PlanAgain& plan_again,
                const RegionTime& time, std::chrono::seconds patience) {
  using Clock = std::chrono::steady_clock;
  if (groups.empty()) return;
  const auto deadline = Clock::now() + patience;
  Descent descent(plan, plan_again, time);
  for (int pass = 0; pass < kPasses; ++pass) {
    const double before = descent.Best();
    for (TunedSteps& group : groups) {
      for (size_t choice = 0; choice < group.choices && Clock::now() < deadline; ++choice) {
        if (choice != group.chosen) descent.Try(std::array{Move{&group, choice}});
      }
    }
    if (descent.Best() >= before * kClearly) break;
  }
  plan.steps = std::move(descent).Steps();
}

void TuneNeighbours(RegionPlan& plan, std::span<TunedSteps> groups, const KernelOf& kernel_of,
                    const PlanAgain& plan_again, const RegionTime& time, std::chrono::seconds patience) {
  using Clock = std::chrono::steady_clock;
  std::map<size_t, TunedSteps*> group_of;  // by step
  for (TunedSteps& group : groups) {
    for (const size_t step : group.steps) group_of[step] = &group;
  }
  std::vector<std::pair<TunedSteps*, TunedSteps*>> neighbours;  // in their order in the region, each once
  for (const auto& [step, group] : group_of) {
    const auto next = group_of.find(step + 1);
    if (next == group_of.end() || next->second == group) continue;
    const auto [a, b] = std::minmax(group, next->second);
    if (std::find(neighbours.begin(), neighbours.end(), std::pair{a, b}) == neighbours.end())
      neighbours.emplace_back(a, b);
  }
  if (neighbours.empty()) return;
  const auto deadline = Clock::now() + patience;
  Descent descent(plan, plan_again, time);
  for (const auto& [a, b] : neighbours) {
    for (const auto& moves : SameKernel(*a, *b, kernel_of)) {
      if (Clock::now() < deadline) descent.Try(moves);
    }
  }
  plan.steps = std::move(descent).Steps();
}

}  // namespace lowbit::ep
