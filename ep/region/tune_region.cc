#include "ep/region/tune_region.h"

#include <algorithm>
#include <utility>

namespace lowbit::ep {
namespace {

// A third of a percent is what medians of 5 to 21 replays told apart on an H200; a second look must agree.
constexpr double kClearly = 0.997;
constexpr int kPasses = 2;

class Descent {
 public:
  Descent(const RegionPlan& plan, const PlanAgain& plan_again, const RegionTime& time)
      : plan_again_(plan_again), time_(time), trial_(plan), best_(time(plan)) {
    for (const PlannedStep& step : plan.steps) scratch_.push_back(step.plan->WorkspaceBytes());
  }

  double Best() const { return best_; }
  std::vector<PlannedStep> Steps() && { return std::move(trial_.steps); }

  void Try(TunedSteps& group, size_t choice) {
    ++group.tried;
    Plans plans = PlansOf(group, choice);
    if (plans.empty()) return;
    Exchange(group, plans);
    if (Improves()) {
      group.chosen = choice;
    } else {
      Exchange(group, plans);
    }
  }

  void TryEstimated(std::span<TunedSteps> groups) {
    std::vector<Plans> plans(groups.size());
    const auto exchange = [&] {
      for (size_t i = 0; i < groups.size(); ++i)
        if (!plans[i].empty()) Exchange(groups[i], plans[i]);
    };
    bool differs = false;
    for (size_t i = 0; i < groups.size(); ++i) {
      if (groups[i].estimated != groups[i].chosen) plans[i] = PlansOf(groups[i], groups[i].estimated);
      differs = differs || !plans[i].empty();
    }
    if (!differs) return;
    exchange();
    if (!Improves()) return exchange();
    for (size_t i = 0; i < groups.size(); ++i) {
      if (plans[i].empty()) continue;
      groups[i].chosen = groups[i].estimated;
      ++groups[i].tried;
    }
  }

 private:
  using Plans = std::vector<std::shared_ptr<const StepPlan>>;

  // None where a step would need more memory than is planned.
  Plans PlansOf(const TunedSteps& group, size_t choice) const {
    Plans plans;
    for (const size_t step : group.steps) {
      plans.push_back(plan_again_(group, step, choice));
      if (!group.together && plans.back()->WorkspaceBytes() > scratch_[step]) return {};
    }
    return plans;
  }

  void Exchange(const TunedSteps& group, Plans& plans) {
    for (size_t i = 0; i < plans.size(); ++i) {
      PlannedStep& step = trial_.steps[group.steps[i]];
      std::swap(group.together ? step.with_next : step.plan, plans[i]);
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

}  // namespace

void TuneRegion(RegionPlan& plan, std::span<TunedSteps> groups, const PlanAgain& plan_again,
                const RegionTime& time, std::chrono::seconds patience) {
  using Clock = std::chrono::steady_clock;
  if (groups.empty()) return;
  const auto deadline = Clock::now() + patience;
  Descent descent(plan, plan_again, time);
  if (Clock::now() < deadline) descent.TryEstimated(groups);
  for (int pass = 0; pass < kPasses; ++pass) {
    const double before = descent.Best();
    for (TunedSteps& group : groups) {
      for (size_t choice = 0; choice < group.choices && Clock::now() < deadline; ++choice) {
        if (choice != group.chosen) descent.Try(group, choice);
      }
    }
    if (descent.Best() >= before * kClearly) break;
  }
  plan.steps = std::move(descent).Steps();
}

}  // namespace lowbit::ep
