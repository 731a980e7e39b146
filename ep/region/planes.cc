#include "ep/region/planes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>

namespace lowbit::ep {
namespace {

class PlaneChooser {
 public:
  PlaneChooser(const Backend& backend, std::span<const StepTensors> steps, std::vector<bool> may)
      : backend_(backend), steps_(steps), may_(std::move(may)), set_of_(may_.size()), most_(may_.size()) {
    std::iota(set_of_.begin(), set_of_.end(), size_t{0});
    for (const StepTensors& step : steps_) {
      // Steps read planes as the first tensor that they are fed, and add, or read besides, those of the second.
      for (size_t i = 2; i < step.reads.size(); ++i) may_[step.reads[i]] = false;
      if (backend_.KeepsPlanes(*step.step)) Join(step.reads[0], step.makes);
    }
    for (const StepTensors& step : steps_) {
      const size_t set = set_of_[step.makes];
      if (most_[set] == 0) most_[set] = PlanesOf(set);
      if (most_[set] > 0 && std::find(sets_.begin(), sets_.end(), set) == sets_.end()) sets_.push_back(set);
    }
    // What cannot be compared stays bytes.
    const std::vector<int> none(may_.size());
    std::erase_if(sets_, [&](size_t set) {
      if (!std::isinf(TimeOf(none, set))) return false;
      most_[set] = 0;
      return true;
    });
  }

  std::vector<int> Choose(PlaneUse use) {
    const std::vector<int> none(may_.size());
    std::vector<int> planes = none;
    if (use != PlaneUse::kNone) planes = Settled(most_, use);
    if (use == PlaneUse::kWhereFaster) {
      std::vector<int> others = Settled(none, use);
      if (Time(others) <= Time(planes)) planes = std::move(others);
    }
    std::vector<int> out(set_of_.size());
    for (size_t i = 0; i < out.size(); ++i) out[i] = planes[set_of_[i]];
    return out;
  }

 private:
  void Join(size_t a, size_t b) {
    const size_t from = set_of_[a], to = set_of_[b];
    may_[to] = may_[to] && may_[from];
    std::replace(set_of_.begin(), set_of_.end(), from, to);
  }

  // Whether the step is fed a tensor of the set, as number i.
  bool Reads(const StepTensors& step, size_t i, size_t set) const {
    return step.reads.size() > i && set_of_[step.reads[i]] == set;
  }

  // The planes that all readers read; 0 where there are no such.
  int PlanesOf(size_t set) const {
    for (size_t i = 0; i < may_.size(); ++i) {
      if (set_of_[i] == set && !may_[i]) return 0;
    }
    int planes = 0;
    for (const StepTensors& step : steps_) {
      if (!Reads(step, 0, set) || backend_.KeepsPlanes(*step.step)) continue;
      const int read = backend_.PlanesRead(*step.step);
      if (read == 0 || (planes > 0 && read != planes)) return 0;
      planes = read;
    }
    const bool is_added = std::all_of(steps_.begin(), steps_.end(), [&](const StepTensors& step) {
      return !Reads(step, 1, set) || backend_.AddsPlanes(*step.step, planes);
    });
    return is_added ? planes : 0;
  }

  // With each set in what takes less time beside the others, bytes where there is no such; or in planes where it can be.
  std::vector<int> Settled(std::vector<int> planes, PlaneUse use) {
    constexpr int kMostRounds = 4;
    bool has_changed = true;
    for (int round = 0; round < kMostRounds && has_changed; ++round) {
      has_changed = false;
      for (const size_t set : sets_) {
        const int before = planes[set];
        planes[set] = 0;
        const double of_bytes = TimeOf(planes, set);
        planes[set] = most_[set];
        const double of_planes = TimeOf(planes, set);
        const bool is_slower = use == PlaneUse::kWhereFaster && of_planes > of_bytes;
        if (is_slower || std::isinf(of_planes)) planes[set] = 0;
        has_changed = has_changed || planes[set] != before;
      }
    }
    return planes;
  }

  // Of the steps that read or make the set.
  double TimeOf(const std::vector<int>& planes, size_t set) {
    return SumWhere(planes, [&](const StepTensors& step) {
      return Reads(step, 0, set) || Reads(step, 1, set) || set_of_[step.makes] == set;
    });
  }
  // Of all steps that planes may concern.
  double Time(const std::vector<int>& planes) {
    return SumWhere(planes, [&](const StepTensors& step) {
      const auto may_be = [&](size_t tensor) { return most_[set_of_[tensor]] > 0; };
      return may_be(step.makes) || std::any_of(step.reads.begin(), step.reads.end(), may_be);
    });
  }

  // Infinite where one of them has no kernel for it, or its time is not known.
  template <typename Concerns>
  double SumWhere(const std::vector<int>& planes, const Concerns& concerns) {
    double sum = 0;
    for (size_t i = 0; i < steps_.size(); ++i) {
      if (concerns(steps_[i])) sum += TimeOfStep(planes, i);
    }
    return sum;
  }
  double TimeOfStep(const std::vector<int>& planes, size_t i) {
    const StepTensors& step = steps_[i];
    const auto of_fed = [&](size_t which) {
      return step.reads.size() > which ? planes[set_of_[step.reads[which]]] : 0;
    };
    const TensorPlanes own{of_fed(0), planes[set_of_[step.makes]], of_fed(1)};
    const auto [known, is_new] = times_.try_emplace(
        {i, static_cast<size_t>(own.x), static_cast<size_t>(own.y), static_cast<size_t>(own.added)});
    if (is_new) known->second = backend_.Microseconds(*step.step, step.fed, own).value_or(HUGE_VAL);
    return known->second;
  }

  const Backend& backend_;
  std::span<const StepTensors> steps_;
  std::vector<bool> may_;
  std::vector<size_t> set_of_;                     // by tensor, a tensor of it
  std::vector<int> most_;                          // by set, in how many planes it may lie
  std::vector<size_t> sets_;                       // that may
  std::map<std::array<size_t, 4>, double> times_;  // by step and its planes
};

}  // namespace

std::vector<int> ChoosePlanes(const Backend& backend, std::span<const StepTensors> steps,
                              std::vector<bool> may, PlaneUse use) {
  return PlaneChooser(backend, steps, std::move(may)).Choose(use);
}

}  // namespace lowbit::ep
