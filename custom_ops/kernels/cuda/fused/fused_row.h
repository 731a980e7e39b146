// One row per kernel that computes several nodes, as ConvRow is one of a convolution: all that ranking,
// plans, tests and the documentation know of it. Which nodes those are in a graph, ep/cuda/fusions.cc says.
#pragma once

#include <span>
#include <string>

#include "kernels/cuda/conv/cuda_conv.h"
#include "kernels/cuda/left_out.h"

namespace lowbit::cuda {

// `Problem`: the nodes as packed, at one shape.
template <typename Problem>
struct FusedRow : KernelInfo {
  // Empty: the kernel computes these nodes exactly on this device, in some configuration. Otherwise the
  // reason why it does not apply.
  std::string (*refuse)(const Problem& problem, const Device& device);
  // Of its best configuration, where it applies; 0 for kernels that are never worth less than several.
  double (*microseconds)(const Problem& problem, const Device& device);

  // Whether it is among the choices.
  bool Applies(const Problem& problem, const Device& device) const {
    return !IsLeftOut(name) && refuse(problem, device).empty();
  }
};

std::span<const KernelInfo* const> FusedTable();

}  // namespace lowbit::cuda
