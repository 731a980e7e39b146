// What the elementwise operators share: access to fed tensors, choosing kernels, cutting work into tasks.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/cpu/elementwise_kernels.h"
#include "core/cpu/operator.h"
#include "core/nodes/node_kinds.h"

namespace lowbit {

using FedTensors = std::span<const std::optional<ConstTensor>>;

// Input `index` as fed, checked for presence alone.
FedShape Fed(FedTensors inputs, size_t index, std::string_view what);
inline const uint8_t* FedBytes(FedTensors inputs, size_t index) {
  return static_cast<const uint8_t*>(inputs[index]->data);
}

const ElementwiseKernels& SelectElementwise(const OperatorOptions& options, bool fast_is_exact);

// Calls fn(begin, end) on ranges that cover [0, total), in parallel. `cost` is the work of one index, in
// bytes moved. A range holds about 2 us of work: handing one to a spinning thread costs well below 1 us.
// Ranges begin at multiples of `alignment`.
void ParallelRanges(ThreadPool& pool, int64_t total, int64_t cost,
                    const std::function<void(int64_t, int64_t)>& fn, int64_t alignment = 1);

// "affine" + "avx2" -> "affine_avx2".
OperatorPlan ElementwisePlan(const char* op, const ElementwiseKernels& kernels);

}  // namespace lowbit
