// Two convolutions in one kernel (Algorithm::kResidualPair): plans and launches.
#include <algorithm>
#include <utility>

#include "core/status.h"
#include "kernels/cuda/conv/cuda_conv.h"
#include "kernels/cuda/conv/kernels.h"
#include "kernels/cuda/conv/packed_conv.h"

namespace lowbit::cuda {
namespace {

ResidualPairProblem ProblemOf(const ResidualPair& pair, const ResidualPairShapes& shapes) {
  return {pair.first->Problem(shapes.first), pair.second->Problem(shapes.second)};
}

}  // namespace

class ResidualPairPlan {
 public:
  ResidualPairPlan(const ResidualPair& pair, const ResidualPairShapes& shapes, const ConvConfig& config)
      : pair_(pair),
        config_(config),
        first_(pair.first->Params(shapes.first, config)),
        second_(pair.second->Params(shapes.second, config)) {
    const ResidualPairProblem problem = ProblemOf(pair, shapes);
    second_.keeps_weights = config.keeps_weights;
    second_.persistent_blocks = PersistentBlocks(problem, config, pair.second->On());
    second_.shared_bytes = SharedBytes(problem, config);
    second_.staging_offset = second_.shared_bytes - 1024 - config.tile_m * config.tile_n;
  }

  void Launch(const void* first_x, const void* second_x, void* y, Queue& queue) const {
    if (second_.m == 0 || second_.n == 0) return;
    const Device& device = pair_.second->On();
    DeviceGuard guard(device.ordinal);
    LaunchOptions options{queue, device};
    options.x_signed = pair_.second->XSigned();
    RequireAligned({first_x, second_x, y});
    ConvParams first = first_, second = second_;
    first.x = static_cast<const uint8_t*>(first_x);
    second.x = static_cast<const uint8_t*>(second_x);
    second.y = y;
    Check(LaunchResidualPair(first, pair_.first->XSigned(), second, config_, options),
          "launching two convolutions");
  }

 private:
  ResidualPair pair_;
  ConvConfig config_;
  ConvParams first_, second_;
};

std::vector<ConvConfig> ResidualPairConfigs(const ResidualPair& pair, const ResidualPairShapes& shapes) {
  return RankConfigs(ProblemOf(pair, shapes), pair.second->On());
}

std::shared_ptr<const ResidualPairPlan> PlanResidualPair(const ResidualPair& pair,
                                                         const ResidualPairShapes& shapes,
                                                         const ConvConfig& config) {
  const std::vector<ConvConfig> configs = ResidualPairConfigs(pair, shapes);
  Require(config.algorithm == Algorithm::kResidualPair &&
              std::find(configs.begin(), configs.end(), config) != configs.end(),
          "configuration ", config.Text(), " does not apply to these two nodes");
  return std::make_shared<const ResidualPairPlan>(pair, shapes, config);
}

void LaunchResidualPair(const ResidualPairPlan& plan, const void* first_x, const void* second_x, void* y,
                        Queue& queue) {
  plan.Launch(first_x, second_x, y, queue);
}

}  // namespace lowbit::cuda
