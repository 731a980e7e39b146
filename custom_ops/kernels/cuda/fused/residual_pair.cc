#include "kernels/cuda/fused/residual_pair.h"

#include <algorithm>
#include <utility>

#include "core/status.h"
#include "kernels/cuda/conv/packed_conv.h"
#include "kernels/cuda/conv/select.h"
#include "kernels/cuda/conv/tiles.h"

namespace lowbit::cuda {

const KernelInfo kSeparateKernels = {"separate", "sm_75", "the same as a kernel each"};

namespace {

constexpr Tile kTiles[] = {{64, 32}, {64, 64}, {64, 128}, {128, 128}, {192, 128}};

ResidualPairProblem ProblemOf(const ResidualPair& pair, const ResidualPairShapes& shapes) {
  return {pair.first->Problem(shapes.first), pair.second->Problem(shapes.second)};
}

ConvConfig WithBoxes(ConvConfig config) {
  config.boxes = true;
  return config;
}

// Those of a kernel of the same tiles.
BoxParams ParamsOf(const PackedConv& conv, const ConvShape& shape, const ConvConfig& config,
                   bool may_be_floats) {
  BoxParams p = BoxesOf(conv.Problem(shape), config);
  static_cast<ConvParams&>(p) =
      conv.Params(shape, WithBoxes({&kWgmmaRow, config.tile_m, config.tile_n, config.stages}), may_be_floats);
  return p;
}

// The sums of both are floats where the kernel has an instance for them, which it has for no inputs with
// signs, else integers, but where the tail adds residuals.
ResidualPairParams ParamsOf(const ResidualPair& pair, const ResidualPairShapes& shapes,
                            const ConvConfig& config) {
  ResidualPairParams p = {ParamsOf(*pair.first, shapes.first, config, true),
                          ParamsOf(*pair.second, shapes.second, config, true), config.keeps_weights};
  if (FinishOf(p) == Finish::kIntegers || pair.first->XSigned() || pair.second->XSigned()) {
    p.first = ParamsOf(*pair.first, shapes.first, config, false);
    p.second = ParamsOf(*pair.second, shapes.second, config, pair.second->Problem(shapes.second).in_tail);
  }
  return p;
}

int64_t KTiles(const ResidualPairProblem& problem) {
  return problem.first.KTiles() + problem.second.KTiles();
}

// How many blocks share a multiprocessor.
int64_t BlocksAtOnce(const ResidualPairProblem& problem, const ConvConfig& config, const Device& device) {
  const int registers = config.tile_n > 64 ? 128 : config.tile_n > 32 ? 80 : 64;
  return std::clamp((device.shared_bytes + 5120) / (SharedBytes(problem, config) + 3100), 1,
                    65536 / (registers * (config.tile_m * 2 + 32)));
}

std::string Refuse(const ResidualPairProblem& problem, const Device& device) {
  const auto loads_and_rounds = [](const ConvProblem& each) {
    return each.boxes && each.requantizes && !each.borders && !each.has_w_zero;
  };
  if (device.capability != 90) return "needs sm_90a";
  if (!loads_and_rounds(problem.first) || !loads_and_rounds(problem.second))
    return "pixels that are no boxes, or codes that are not rounded in registers";
  if (!problem.second.residual || problem.first.residual) return "residuals of another than the second alone";
  if (problem.first.is_mapped || problem.second.is_mapped) return "a table behind one of the two";
  if (problem.first.in_tail) return "a function behind the first";
  if (problem.first.is_tail != problem.second.is_tail) return "a tail behind one of the two alone";
  if (problem.first.is_tail && !(problem.first.is_capped && problem.second.is_capped))
    return "tails of other than 128 or 256 codes, or residuals that no line has";
  if (problem.first.is_tail && problem.first.x.encoding != problem.second.x.encoding)
    return "tails, and codes of which one tensor's have a sign";
  if (problem.second.m == 0) return "no pixels";
  const bool fits = problem.first.m == problem.second.m && problem.first.n == problem.second.n;
  return fits ? "" : "outputs of two sizes";
}

void AddCandidates(const ResidualPairProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  if (!kResidualPairKernel.Applies(problem, device)) return;
  for (const Tile& tile : kTiles) {
    if (CeilDiv(problem.second.n, tile.n) > kMaxColumns) continue;
    for (const bool keeps : {false, true}) {
      for (const int stages : {3, 4, kMaxResidualPairStages}) {
        ConvConfig config{&kResidualPairKernel, tile.m, tile.n, stages};
        config.keeps_weights = keeps;
        if (IsLeftOut(config) || SharedBytes(problem, config) > device.shared_bytes) continue;
        const int64_t each =
            CeilDiv(CeilDiv(problem.second.m, tile.m), PersistentBlocks(problem, config, device));
        // Weights are kept for the next tile; a ring is no longer than what goes through it.
        if ((keeps && each == 1) || (stages > 4 && stages > each * KTiles(problem))) continue;
        out.push_back(config);
      }
    }
  }
}

}  // namespace

int SharedBytes(const ResidualPairProblem& problem, const ConvConfig& config) {
  const int64_t kept = config.keeps_weights ? KTiles(problem) * config.tile_n : 0,
                stage = config.tile_m + (config.keeps_weights ? 0 : config.tile_n);
  return static_cast<int>(1024 + (kept + config.stages * stage) * kTileK + config.tile_m * config.tile_n);
}

int PersistentBlocks(const ResidualPairProblem& problem, const ConvConfig& config, const Device& device) {
  const int64_t tiles = CeilDiv(problem.second.m, config.tile_m),
                columns = CeilDiv(problem.second.n, config.tile_n);
  const int64_t most =
      std::max<int64_t>(1, BlocksAtOnce(problem, config, device) * device.multiprocessors / columns);
  return static_cast<int>(CeilDiv(tiles, CeilDiv(tiles, most)));
}

// Fitted as those of single convolutions, to the pairs of ResNet-50 and ResNet-18.
double EstimateMicroseconds(const ResidualPairProblem& problem, const ConvConfig& config,
                            const Device& device) {
  if (config.kernel == &kSeparateKernels) {
    return kUnlikeNeighbours *
           (EstimateOfBest(problem.first, device) + EstimateOfBest(problem.second, device));
  }
  const int64_t blocks = PersistentBlocks(problem, config, device),
                columns = CeilDiv(problem.second.n, config.tile_n);
  const double tiles = static_cast<double>(CeilDiv(CeilDiv(problem.second.m, config.tile_m), blocks));
  const double at_once = static_cast<double>(CeilDiv(blocks * columns, device.multiprocessors));
  const double k_tiles = static_cast<double>(KTiles(problem)), tile_m = config.tile_m, tile_n = config.tile_n,
               outputs = tile_m * tile_n;
  const double bytes = (tile_m + (config.keeps_weights ? 0 : tile_n)) * kTileK * k_tiles;
  // All blocks' tiles at once: their bytes, the rounding of their codes, their products; or one after the
  // other a block's latencies, in which its warpgroups round 64 rows each at the same time.
  const double work = at_once * (bytes / 150 + 0.2 * outputs + 46.3 * k_tiles),
               latency = (433 + 622.0 / config.stages) * k_tiles + 0.322 * 64 * tile_n;
  // Tiles of 128 channels cost ResNet-50 2 to 6 us a pair more at batch 1 to 16 than rows of equals say.
  const double wide = config.tile_n > 64 ? 3500 : 0;
  const double start = 2170 + wide +
                       328 * std::min(1.0, at_once * SharedBytes(problem, config) / device.shared_bytes) +
                       (config.keeps_weights ? 2.31 * k_tiles * tile_n : 0);
  return (start + tiles * std::max(work, latency)) / kClocksPerMicrosecond;
}

namespace {

double EstimateOfPair(const ResidualPairProblem& problem, const Device& device) {
  std::vector<ConvConfig> configs;
  AddCandidates(problem, device, configs);
  return SortByEstimate(
             [&](const ConvConfig& config) { return EstimateMicroseconds(problem, config, device); }, configs)
      .front();
}

}  // namespace

std::vector<ConvConfig> RankConfigs(const ResidualPairProblem& problem, const Device& device) {
  std::vector<ConvConfig> out;
  AddCandidates(problem, device, out);
  out.push_back({&kSeparateKernels});
  SortByEstimate([&](const ConvConfig& config) { return EstimateMicroseconds(problem, config, device); },
                 out);
  return out;
}

const FusedRow<ResidualPairProblem> kResidualPairKernel = {
    {"pair", "sm_90a",
     "a block's shortcut and its last convolution: both products on wgmma, their tiles one ring of stages"},
    Refuse,
    EstimateOfPair};

double EstimateOfBest(const ResidualPairProblem& problem, const Device& device) {
  return EstimateMicroseconds(problem, RankConfigs(problem, device).front(), device);
}

class ResidualPairPlan {
 public:
  ResidualPairPlan(const ResidualPair& pair, const ResidualPairShapes& shapes, const ConvConfig& config)
      : pair_(pair),
        config_(config),
        params_(ParamsOf(pair, shapes, config)),
        shared_bytes_(SharedBytes(ProblemOf(pair, shapes), config)) {
    params_.blocks = PersistentBlocks(ProblemOf(pair, shapes), config, pair.second->On());
    params_.staging_offset = shared_bytes_ - 1024 - config.tile_m * config.tile_n;
  }

  void Launch(const void* first_x, const void* second_x, void* y, Queue& queue) const {
    if (params_.second.m == 0 || params_.second.n == 0) return;
    const Device& device = pair_.second->On();
    DeviceGuard guard(device.ordinal);
    LaunchOptions options{queue, device};
    options.x_signed = pair_.second->XSigned();
    options.shared_bytes = shared_bytes_;
    RequireAligned({first_x, second_x, y});
    ResidualPairParams p = params_;
    p.first.x = static_cast<const uint8_t*>(first_x);
    p.second.x = static_cast<const uint8_t*>(second_x);
    p.second.y = y;
    Check(LaunchResidualPair(p, pair_.first->XSigned(), config_, options), "launching two convolutions");
  }

 private:
  ResidualPair pair_;
  ConvConfig config_;
  ResidualPairParams params_;
  int shared_bytes_;
};

std::vector<ConvConfig> ResidualPairConfigs(const ResidualPair& pair, const ResidualPairShapes& shapes) {
  return RankConfigs(ProblemOf(pair, shapes), pair.second->On());
}

double EstimateMicroseconds(const ResidualPair& pair, const ResidualPairShapes& shapes) {
  return EstimateOfBest(ProblemOf(pair, shapes), pair.second->On());
}

std::shared_ptr<const ResidualPairPlan> PlanResidualPair(const ResidualPair& pair,
                                                         const ResidualPairShapes& shapes,
                                                         const ConvConfig& config) {
  const std::vector<ConvConfig> configs = ResidualPairConfigs(pair, shapes);
  const std::string reason = kResidualPairKernel.refuse(ProblemOf(pair, shapes), pair.second->On());
  Require(config.kernel == &kResidualPairKernel &&
              std::find(configs.begin(), configs.end(), config) != configs.end(),
          "configuration ", config.Text(), " does not apply to these two nodes", reason.empty() ? "" : ": ",
          reason);
  return std::make_shared<const ResidualPairPlan>(pair, shapes, config);
}

void LaunchResidualPair(const ResidualPairPlan& plan, const void* first_x, const void* second_x, void* y,
                        Queue& queue) {
  plan.Launch(first_x, second_x, y, queue);
}

}  // namespace lowbit::cuda
