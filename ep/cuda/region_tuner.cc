#include "ep/cuda/region_tuner.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/node_reader.h"
#include "core/status.h"
#include "ep/cuda/cuda_call.h"
#include "ep/cuda/graph_instance.h"
#include "ep/cuda/stopwatch.h"

namespace lowbit::ep {
namespace {

// Times plans of one region on inputs of its own.
class RegionTimer {
 public:
  RegionTimer(const RegionPlan& plan, std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {
    for (const TensorShape& input : plan.inputs) {
      uint8_t* const data = Allocate(input);
      FillWithNoise(data, input, *device_);
    }
    for (const TensorShape& output : plan.outputs) Allocate(output);
  }

  // The median of some replays.
  double Microseconds(const RegionPlan& plan) {
    constexpr double kLongEnough = 15000;
    constexpr int kFewest = 5, kMost = 21;
    GraphInstance instance(plan, device_, true);
    const auto run = [&] { instance.Run(externals_, {nullptr, stopwatch_.Stream()}); };
    run();  // captures it, warms the caches
    const double first = stopwatch_.Microseconds(run);
    const int replays = std::clamp(static_cast<int>(kLongEnough / first), kFewest, kMost);
    std::vector<double> times;
    for (int i = 0; i < replays; ++i) times.push_back(stopwatch_.Microseconds(run));
    return Median(times);
  }

 private:
  uint8_t* Allocate(const TensorShape& tensor) {
    blocks_.emplace_back(device_, static_cast<size_t>(ElementCount(tensor.dims)) * ElementSize(tensor.type));
    externals_.push_back(blocks_.back().Get());
    return blocks_.back().Get();
  }

  const std::shared_ptr<CudaDevice> device_;
  std::vector<DeviceBlock> blocks_;
  std::vector<void*> externals_;
  Stopwatch stopwatch_;
};

}  // namespace

void TuneRegion(RegionPlan& plan, std::vector<TunedSteps>& groups, const PlanAgain& plan_again,
                const std::shared_ptr<CudaDevice>& device) {
  // A third of a percent is what medians of some replays tell apart; a second look must agree.
  constexpr double kClearly = 0.997;
  constexpr int kPasses = 2;
  constexpr auto kPatience = std::chrono::seconds(20);
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  const DeviceScope scope(device->Ordinal());
  RegionTimer timer(plan, device);
  RegionPlan trial = plan;
  double best = timer.Microseconds(trial);
  const auto use = [&](const TunedSteps& group, const cuda::ConvConfig& config) {
    for (const size_t step : group.steps) {
      std::shared_ptr<const StepPlan> planned = plan_again(step, config);
      // The memory is planned.
      if (planned->WorkspaceBytes() > plan.steps[step].plan->WorkspaceBytes()) return false;
      trial.steps[step].plan = std::move(planned);
    }
    return true;
  };
  const auto improves = [&] {
    double time = timer.Microseconds(trial);
    if (time < best * kClearly) time = std::max(time, timer.Microseconds(trial));
    if (time >= best * kClearly) return false;
    best = time;
    return true;
  };
  for (int pass = 0; pass < kPasses; ++pass) {
    const double before = best;
    for (TunedSteps& group : groups) {
      for (size_t i = 1; i < group.configs.size() && std::chrono::steady_clock::now() < deadline; ++i) {
        if (use(group, group.configs[i]) && improves()) {
          std::swap(group.configs[0], group.configs[i]);
        } else {
          use(group, group.configs[0]);
        }
      }
    }
    if (best >= before * kClearly) break;
  }
  plan.steps = std::move(trial.steps);
}

}  // namespace lowbit::ep
