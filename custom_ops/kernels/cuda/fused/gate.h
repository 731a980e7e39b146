// A squeeze-and-excitation block in one kernel: the mean of every channel of an image, two 1x1 convolutions
// of these means, a table, and the product of the image and what that has.
#pragma once

#include <memory>

#include "core/nodes.h"
#include "kernels/cuda/conv/packed_conv.h"
#include "kernels/cuda/nodes/cuda_node.h"

namespace lowbit::cuda {

// The second convolution stores what the table has.
struct Gate {
  GlobalAveragePoolNode pool;
  std::shared_ptr<const PackedConv> first, second;
  BinarySpec mul;
  bool gate_first = false;  // among the operands of `mul`
};

// Whether there is a kernel, but for constants and shapes.
bool FitsGate(const GlobalAveragePoolNode& pool, const ConvSpec& first, const ConvSpec& second,
              const BinarySpec& mul, const Device& device);
// Fed: what is averaged and what is multiplied, of one shape. nullptr where launches in turn are the better
// way, or the only one.
std::shared_ptr<const NodePlan> PlanGate(const Gate& gate, std::span<const TensorShape> fed);

}  // namespace lowbit::cuda
