// Tunes convolutions where they stand. In a row of equals a kernel is timed without what its neighbours in a
// network do to it: theirs hold shared memory and multiprocessors while its blocks want to start, and wait
// for its slowest block. Among configurations that come close to each other in such a row, the time of the
// whole region decides.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "ep/cuda/runtime.h"
#include "ep/region/program.h"
#include "kernels/cuda/cuda_conv.h"

namespace lowbit::ep {

// Steps of a plan that are one convolution at one shape, and share its configuration.
struct TunedSteps {
  std::vector<size_t> steps;
  std::vector<cuda::ConvConfig> configs;  // to be tried; the first is the one in use
};

using PlanAgain = std::function<std::shared_ptr<const StepPlan>(size_t step, const cuda::ConvConfig&)>;

// Gives the steps of `plan` the configurations with which the whole of it runs fastest: coordinate descent,
// one group of steps after the other. In the end each group's first configuration is the chosen one. Throws
// Error; `plan` is then as it was.
void TuneRegion(RegionPlan& plan, std::vector<TunedSteps>& groups, const PlanAgain& plan_again,
                const std::shared_ptr<CudaDevice>& device);

}  // namespace lowbit::ep
