#include "core/cpu/operators/elementwise_common.h"

#include <algorithm>

#include "core/status.h"

namespace lowbit {
namespace {

// Of kTaskCycles, about 2 us of the fastest kernels (4 bytes a nanosecond on one Zen 5 core, in cache).
constexpr double kBytesPerTask = 8 * 1024;

}  // namespace

FedShape Fed(FedTensors inputs, size_t index, std::string_view what) {
  Require(index < inputs.size() && inputs[index].has_value(), "input '", what, "' is missing");
  return {inputs[index]->type, inputs[index]->shape};
}

const ElementwiseKernels& SelectElementwise(const OperatorOptions& options, bool fast_is_exact) {
  if (options.use_reference || !fast_is_exact) return ElementwiseReference();
  return ElementwiseFor(options.isa);
}

void ParallelRanges(ThreadPool& pool, int64_t total, int64_t cost,
                    const std::function<void(int64_t, int64_t)>& fn, int64_t alignment) {
  if (total <= 0) return;
  const auto bytes = static_cast<int64_t>(kBytesPerTask * pool.TaskCycles() / kTaskCycles);
  const int64_t wanted = std::max<int64_t>(1, bytes / std::max<int64_t>(1, cost));
  const int64_t grain = (wanted + alignment - 1) / alignment * alignment;
  const int64_t tasks = (total + grain - 1) / grain;
  if (tasks == 1) {
    fn(0, total);
    return;
  }
  pool.ParallelFor(static_cast<size_t>(tasks), [&](size_t task) {
    const int64_t begin = static_cast<int64_t>(task) * grain;
    fn(begin, std::min(begin + grain, total));
  });
}

OperatorPlan ElementwisePlan(const char* op, const ElementwiseKernels& kernels) {
  OperatorPlan plan;
  plan.kernel = std::string(op) + "_" + kernels.name;
  return plan;
}

}  // namespace lowbit
