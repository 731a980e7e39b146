// Two convolutions in one kernel, the codes of the first one the residuals of the second and read by nobody
// else: where a residual network's block adds its shortcut.
#pragma once

#include <memory>
#include <vector>

#include "kernels/cuda/conv/conv_row.h"
#include "kernels/cuda/fused/fused_row.h"

namespace lowbit::cuda {

extern const KernelInfo kSeparateKernels;  // in place of the row

inline constexpr int kMaxResidualPairStages = 6;

struct ResidualPair {
  std::shared_ptr<const PackedConv> first, second;
};
struct ResidualPairShapes {
  ConvShape first, second;
};
// Every configuration that computes both in one kernel exactly on this device, and kSeparateKernels; the
// cost model's choice first.
std::vector<ConvConfig> ResidualPairConfigs(const ResidualPair& pair, const ResidualPairShapes& shapes);
// Of the first of these.
double EstimateMicroseconds(const ResidualPair& pair, const ResidualPairShapes& shapes);

class ResidualPairPlan;
// Throws Error where `config` is none of the first kind.
std::shared_ptr<const ResidualPairPlan> PlanResidualPair(const ResidualPair& pair,
                                                         const ResidualPairShapes& shapes,
                                                         const ConvConfig& config);
// As LaunchConv, without a workspace.
void LaunchResidualPair(const ResidualPairPlan& plan, const void* first_x, const void* second_x, void* y,
                        Queue& queue);

// What the cost model knows.
struct ResidualPairProblem {
  ConvProblem first, second;
};
extern const FusedRow<ResidualPairProblem> kResidualPairKernel;
double EstimateMicroseconds(const ResidualPairProblem& problem, const ConvConfig& config,
                            const Device& device);
// Those of kResidualPairKernel that fit the device and kSeparateKernels, the cheapest estimate first.
std::vector<ConvConfig> RankConfigs(const ResidualPairProblem& problem, const Device& device);
double EstimateOfBest(const ResidualPairProblem& problem, const Device& device);
int SharedBytes(const ResidualPairProblem& problem, const ConvConfig& config);
int PersistentBlocks(const ResidualPairProblem& problem, const ConvConfig& config, const Device& device);

struct ResidualPairParams {
  BoxParams first, second;
  bool keeps_weights = false;
  int blocks = 1;          // along m
  int staging_offset = 0;  // where finished codes wait in dynamic shared memory
};

// How the sums of both are finished, which are floats of both: as the second asks for where they are multiplied
// alone; kIntegers: no float form fits, tails (EpilogueParams::on_lines, in_tail) are told by their own fields.
inline Finish FinishOf(const ResidualPairParams& p) {
  const Finish second = FinishOf(p.second.epilogue);
  const bool is_multiplied = second == Finish::kFloatsOnLine || second == Finish::kCappedOnLine;
  return is_multiplied && AreWordsMultiplied(p.first.epilogue) ? second : Finish::kIntegers;
}

// `x_signed` of the options is that of the second.
cudaError_t LaunchResidualPair(const ResidualPairParams& params, bool first_signed, const ConvConfig& config,
                               const LaunchOptions& options);

}  // namespace lowbit::cuda
