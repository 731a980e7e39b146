#include "ep/region/planes.h"

#include <algorithm>
#include <numeric>
#include <optional>

namespace lowbit::ep {
namespace {

class PlaneChooser {
 public:
  PlaneChooser(const Backend& backend, std::span<const StepTensors> steps, std::vector<bool> may)
      : backend_(backend), steps_(steps), may_(std::move(may)), set_of_(may_.size()), planes_(may_.size()) {
    std::iota(set_of_.begin(), set_of_.end(), size_t{0});
    for (const StepTensors& step : steps_) {
      // Steps read planes as the first tensor that they are fed, and once.
      for (size_t i = 1; i < step.reads.size(); ++i) may_[step.reads[i]] = false;
      if (backend_.KeepsPlanes(*step.step)) Join(step.reads[0], step.makes);
    }
  }

  std::vector<int> Choose() {
    for (const StepTensors& step : steps_) {
      const size_t set = set_of_[step.makes];
      if (planes_[set] == 0) planes_[set] = PlanesOf(set);
    }
    std::vector<int> out(set_of_.size());
    for (size_t i = 0; i < out.size(); ++i) out[i] = planes_[set_of_[i]];
    return out;
  }

 private:
  void Join(size_t a, size_t b) {
    const size_t from = set_of_[a], to = set_of_[b];
    may_[to] = may_[to] && may_[from];
    std::replace(set_of_.begin(), set_of_.end(), from, to);
  }

  bool Reads(const StepTensors& step, size_t set) const {
    return !step.reads.empty() && set_of_[step.reads[0]] == set;
  }

  // The planes that all readers read, where the set is better off in them; else 0.
  int PlanesOf(size_t set) {
    for (size_t i = 0; i < may_.size(); ++i) {
      if (set_of_[i] == set && !may_[i]) return 0;
    }
    std::optional<int> planes;
    for (const StepTensors& step : steps_) {
      if (!Reads(step, set) || backend_.KeepsPlanes(*step.step)) continue;
      const int read = backend_.PlanesRead(*step.step);
      if (read == 0 || read != planes.value_or(read)) return 0;
      planes = read;
    }
    if (!planes) return 0;
    const std::optional<double> of_bytes = TimeWith(set, 0), of_planes = TimeWith(set, *planes);
    return of_bytes && of_planes && *of_planes <= *of_bytes ? *planes : 0;
  }

  // Of the steps that read or make the set, in so many planes.
  std::optional<double> TimeWith(size_t set, int planes) const {
    const auto planes_of = [&](size_t tensor) {
      return set_of_[tensor] == set ? planes : planes_[set_of_[tensor]];
    };
    double sum = 0;
    for (const StepTensors& step : steps_) {
      if (!Reads(step, set) && set_of_[step.makes] != set) continue;
      const TensorPlanes of_step{step.reads.empty() ? 0 : planes_of(step.reads[0]), planes_of(step.makes)};
      const std::optional<double> time = backend_.Microseconds(*step.step, step.fed, of_step);
      if (!time) return std::nullopt;
      sum += *time;
    }
    return sum;
  }

  const Backend& backend_;
  std::span<const StepTensors> steps_;
  std::vector<bool> may_;
  std::vector<size_t> set_of_;  // by tensor, a tensor of it
  std::vector<int> planes_;     // by set
};

}  // namespace

std::vector<int> ChoosePlanes(const Backend& backend, std::span<const StepTensors> steps,
                              std::vector<bool> may) {
  return PlaneChooser(backend, steps, std::move(may)).Choose();
}

}  // namespace lowbit::ep
