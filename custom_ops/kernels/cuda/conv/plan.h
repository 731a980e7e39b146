// Plans of convolutions that are launched otherwise than their row says (fused/quantized_conv.h).
#pragma once

#include <memory>

#include "kernels/cuda/conv/conv_row.h"

namespace lowbit::cuda {

// Throws Error where the output is too large for the kernels.
void RequireSize(const PackedConv& conv, const ConvShape& shape);
// `config`: one of the node's candidates.
std::shared_ptr<const ConvPlan> MakePlan(std::shared_ptr<const PackedConv> conv, const ConvShape& shape,
                                         const ConvConfig& config, ConvLauncher launcher,
                                         const ConvPlaces& places = {}, const TensorPlanes& planes = {});

}  // namespace lowbit::cuda
