// A network's first convolution from floats, which are quantized on the way into the image kernel.
#pragma once

#include <memory>

#include "kernels/cuda/conv/image.h"

namespace lowbit::cuda {

// Whether nodes of this geometry have such a kernel.
bool FitsPixels(const ConvSpec& spec);
// Whether this node does, at some shape, on its device: a block's weights and sums may be more than its
// shared memory.
bool FitsPixels(const PackedConv& conv);
// Throws Error where there is none at this shape. Floats are fed to LaunchConv in place of codes.
std::shared_ptr<const ConvPlan> PlanPixels(std::shared_ptr<const PackedConv> conv, const ConvShape& shape,
                                           const PixelQuantizer& quantizer);

}  // namespace lowbit::cuda
