// Two 1x1 convolutions of planes of bits in one kernel, the codes of the first one the residuals of the second: a block's
// shortcut, maybe with a stride, and its last convolution. Weights and codes have 1 or 2 bits.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "kernels/cuda/conv/bits.h"
#include "kernels/cuda/conv/cuda_conv.h"
#include "kernels/cuda/fused/residual_pair.h"

namespace lowbit::cuda {

extern const FusedRow<ResidualPairProblem> kBitPairKernel;

// `planes`: what the first is fed (x), the second (added), and what is made. Every configuration that computes both in
// one kernel, and kSeparateKernels where both have kernels of their own; the cost model's choice first.
std::vector<ConvConfig> BitPairConfigs(const ResidualPair& pair, const ResidualPairShapes& shapes,
                                       const TensorPlanes& planes);
// Of the best of these; nullopt where there are none.
std::optional<double> EstimateMicroseconds(const ResidualPair& pair, const ResidualPairShapes& shapes,
                                           const TensorPlanes& planes);
// In how many planes what is between the two lies where they are separate; 0: in bytes.
int PlanesBetween(const ResidualPair& pair, const ResidualPairShapes& shapes, const TensorPlanes& planes);

class BitPairPlan;
// Throws Error where `config` is none of the first kind.
std::shared_ptr<const BitPairPlan> PlanBitPair(const ResidualPair& pair, const ResidualPairShapes& shapes,
                                               const ConvConfig& config);
// As LaunchConv, without a workspace.
void LaunchBitPair(const BitPairPlan& plan, const void* first_x, const void* second_x, void* y, Queue& queue);

// The second's, and the first's.
struct BitPairParams : BitsParams {
  BitsParams shortcut;
};
cudaError_t LaunchBitPair(const BitPairParams& params, const ConvConfig& config,
                          const LaunchOptions& options);

}  // namespace lowbit::cuda
