#include "ep/cuda/region_timer.h"

#include <algorithm>
#include <utility>

#include "core/node_reader.h"
#include "ep/cuda/cuda_call.h"
#include "ep/cuda/graph_instance.h"

namespace lowbit::ep {

RegionTimer::RegionTimer(const RegionPlan& plan, std::shared_ptr<CudaDevice> device, bool use_graph)
    : device_(std::move(device)), use_graph_(use_graph) {
  for (const TensorShape& input : plan.inputs) FillWithNoise(Allocate(input), input, *device_);
  for (const TensorShape& output : plan.outputs) Allocate(output);
}

double RegionTimer::Microseconds(const RegionPlan& plan) const {
  constexpr double kLongEnough = 15000;  // of all replays together
  constexpr int kFewest = 5, kMost = 21;
  GraphInstance instance(plan, device_, use_graph_);
  const auto run = [&] { instance.Run(externals_, {nullptr, stopwatch_.Stream()}); };
  run();  // captures it, warms the caches
  const double first = stopwatch_.Microseconds(run);
  const int replays = std::clamp(static_cast<int>(kLongEnough / first), kFewest, kMost);
  std::vector<double> times;
  for (int i = 0; i < replays; ++i) times.push_back(stopwatch_.Microseconds(run));
  return Median(times);
}

uint8_t* RegionTimer::Allocate(const TensorShape& tensor) {
  blocks_.emplace_back(device_, static_cast<size_t>(ElementCount(tensor.dims)) * ElementSize(tensor.type));
  externals_.push_back(blocks_.back().Get());
  return blocks_.back().Get();
}

}  // namespace lowbit::ep
