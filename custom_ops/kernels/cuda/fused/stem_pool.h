// A network's first convolution, from float planes that are quantized on the way, and the max pooling that
// alone reads it, as one kernel. Requantizing with a positive multiplier never exchanges two sums, so that
// the largest sum of a window gives its largest code: one of four outputs is rounded, and the image of codes
// between the two nodes never lies in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/nodes.h"
#include "kernels/cuda/conv/image.h"
#include "kernels/cuda/fused/fused_row.h"

namespace lowbit::cuda {

struct PooledConv {
  std::shared_ptr<const PackedConv> conv;
  PixelQuantizer quantizer;
  ConvShape shape;
  Window window;  // of the pooling
  int64_t pooled_h = 0, pooled_w = 0;
  int y_planes = 0;  // in which the codes leave (core/bit_planes.h); 0: as bytes
};
extern const FusedRow<PooledConv> kStemPoolKernel;

// Whether the kernel computes these nodes at some shape.
bool FitsPooling(const ConvSpec& conv, const MaxPoolNode& pool, const Device& device);
// Whether it does at this one.
bool Pools(const PooledConv& pooled);

// How the rows of an image are spread over blocks, each of which walks down a strip of them.
struct PoolStrips {
  int strips = 1;
  int rows = 0, longer = 0;  // each one's rows of pooled pixels; the first ones have one more
};
// The cost model's choice.
PoolStrips ChooseStrips(const PooledConv& pooled);
PoolStrips SplitRows(int rows, int strips);

class PooledPlan;
// Throws Error where Pools says no.
std::shared_ptr<const PooledPlan> PlanPooled(const PooledConv& pooled);
std::shared_ptr<const PooledPlan> PlanPooled(const PooledConv& pooled, const PoolStrips& strips);
std::string PlanText(const PooledPlan& plan);
// As LaunchConv, without residuals and workspace; `x` is aligned to its elements at least.
void LaunchPooled(const PooledPlan& plan, const void* x, void* y, Queue& queue);

}  // namespace lowbit::cuda
