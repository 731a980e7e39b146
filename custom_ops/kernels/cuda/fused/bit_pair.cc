#include "kernels/cuda/fused/bit_pair.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "core/status.h"
#include "kernels/cuda/conv/packed_conv.h"
#include "kernels/cuda/conv/select.h"

namespace lowbit::cuda {
namespace {

constexpr int kWidths[] = {64, 128};

// Of planes alone, of all bits. Where one of the two has a stride, both read rows of images.
ResidualPairProblem ProblemOf(const ResidualPair& pair, const ResidualPairShapes& shapes) {
  const int bits = pair.second->Problem(shapes.second).x.bits;
  ResidualPairProblem problem = {pair.first->Problem(shapes.first, false, {bits, bits}),
                                 pair.second->Problem(shapes.second, false, {bits, bits, bits})};
  problem.first.keeps_rows = problem.second.keeps_rows = !problem.first.IsFlat() || !problem.second.IsFlat();
  return problem;
}

// Of each plane of weights.
int64_t Steps(const ConvProblem& problem) {
  return CeilDiv(BitWordsOfPatch(problem), 2) * problem.w_bits.fit;
}
int64_t Steps(const ResidualPairProblem& problem) { return Steps(problem.first) + Steps(problem.second); }

std::string Refuse(const ResidualPairProblem& problem, const Device& device) {
  const ConvProblem &first = problem.first, &second = problem.second;
  for (const ConvProblem* const each : {&first, &second}) {
    if (each->x.bits != first.x.bits) return "codes of two widths";
    if (each->geometry.Taps() != 1 || each->IsPadded()) return "windows of several taps or with padding";
    if (std::string reason = kBitsRow.refuse(*each, device); !reason.empty()) return reason;
  }
  if (!second.residual || first.residual) return "residuals of another than the second alone";
  const auto size = [](const ConvProblem& of) {
    return std::array{of.n, of.shape.batch, of.shape.out_h, of.shape.out_w};
  };
  if (size(first) != size(second)) return "outputs of two sizes";
  return Steps(problem) <= kMaxBitWeights ? "" : "weights of more than 80 steps along K";
}

ConvConfig OfBits(ConvConfig config) {
  config.kernel = &kBitsRow;
  return config;
}

int64_t PatchBytes(const ResidualPairProblem& problem, const ConvConfig& config) {
  const HaloLine line = LineOf(problem.second);
  return problem.second.x.bits * (BitWordsOfPatch(problem.first) + BitWordsOfPatch(problem.second)) *
         line.Rows(config.tile_m) * line.pitch * kBitWordBytes;
}
// Where words are odd, both halves of the last step's matrix are its word: behind the patch nothing is read, but
// compute-sanitizer, which takes them for neighbours, wants 1 KB to be there.
int64_t SharedBytesOf(const ResidualPairProblem& problem, const ConvConfig& config) {
  return 2048 + Steps(problem) * BitStepBytes(config.tile_n) + config.stages * PatchBytes(problem, config);
}

// Of a grid along m, as patches of one product are spread (PatchFamily).
int64_t BlocksAtOnce(const ResidualPairProblem& problem, const ConvConfig& config, const Device& device) {
  const int64_t by_registers = (MaxBitTiles(config.tile_n, true) * 128 + 32) / (config.tile_m * 2 + 32),
                by_shared = (device.shared_bytes + 5120) / (SharedBytesOf(problem, config) + 3100);
  return std::max<int64_t>(1, std::min(by_registers, by_shared)) * device.multiprocessors;
}
int64_t Blocks(const ResidualPairProblem& problem, const ConvConfig& config, const Device& device) {
  const int64_t patches = CeilDiv(LineOf(problem.second).tiles, config.tile_m / 64);
  if (config.stages == 1) return patches;
  const int64_t most = BlocksAtOnce(problem, config, device) / CeilDiv(problem.second.n, config.tile_n);
  return std::clamp<int64_t>(most, 1, patches);
}

// One patch a block, or two, of which one is fetched while the other is multiplied.
void AddCandidates(const ResidualPairProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  const HaloLine line = LineOf(problem.second);
  for (const int tile_n : kWidths) {
    const int64_t columns = CeilDiv(problem.second.n, tile_n);
    if (columns > kMaxColumns || (tile_n > kWidths[0] && problem.second.n <= tile_n / 2)) continue;
    for (int tiles = 1; tiles <= MaxBitTiles(tile_n, true); ++tiles) {
      const int64_t patches = CeilDiv(line.tiles, tiles);
      for (const int stages : {1, 2}) {
        const ConvConfig config{&kBitPairKernel, 64 * tiles, tile_n, stages};
        const bool fits = line.Rows(config.tile_m) <= kMaxHaloRows && !IsLeftOut(config) &&
                          SharedBytesOf(problem, config) <= device.shared_bytes;
        if (!fits) continue;
        const bool is_spread = stages == 1 ? patches * columns <= BlocksAtOnce(problem, config, device)
                                           : Blocks(problem, config, device) < patches;
        if (is_spread) out.push_back(config);
      }
    }
  }
}

// As each of the two takes alone. On an H100 at batch 16 one launch took 0 to 0.5 us less than two of one bit, and 0.5 to 1.4
// more than two of two bits.
double EstimateOf(const ResidualPairProblem& problem, const ConvConfig& config, const Device& device) {
  const double less = problem.second.x.bits == 1 ? 0.3 : -0.8;
  const ConvConfig of_bits = OfBits(config);
  return kBitsRow.microseconds(problem.first, of_bits, device) +
         kBitsRow.microseconds(problem.second, of_bits, device) - less;
}

double EstimateOfBestPair(const ResidualPairProblem& problem, const Device& device) {
  std::vector<ConvConfig> configs;
  AddCandidates(problem, device, configs);
  double best = HUGE_VAL;
  for (const ConvConfig& config : configs) best = std::min(best, EstimateOf(problem, config, device));
  return best;
}

// Without what depends on how tiles are spread over blocks.
BitPairParams ParamsOf(const ResidualPair& pair, const ResidualPairShapes& shapes, const ConvConfig& config) {
  const ResidualPairProblem problem = ProblemOf(pair, shapes);
  const ConvConfig of_bits = OfBits(config);
  const auto params_of = [&](const PackedConv& conv, const ConvShape& shape, const ConvProblem& of,
                             int first_word) {
    BitsParams bits = BitsParamsOf(of, of_bits, first_word);
    static_cast<ConvParams&>(bits) = conv.Params(shape, of_bits);
    bits.epilogue.plane_count = of.planes.y;
    FindConstants(of, bits);
    return bits;
  };
  BitPairParams p = {params_of(*pair.second, shapes.second, problem.second, 0)};
  p.shortcut = params_of(*pair.first, shapes.first, problem.first, p.words);
  p.k_tiles += p.shortcut.k_tiles;
  p.patch_words += p.shortcut.words;
  // Where a block keeps what lines have besides.
  p.epilogue.start = reinterpret_cast<const float*>(p.shortcut.epilogue.steps);
  return p;
}

// Whether codes of both are told by steps, those of the first as they are added.
bool HaveSteps(const ResidualPair& pair, const ResidualPairShapes& shapes, const ConvConfig& config) {
  const BitPairParams p = ParamsOf(pair, shapes, config);
  return p.has_steps && p.shortcut.has_steps && p.shortcut.copies;
}

// Both with kernels of their own.
struct Separate {
  int planes;  // of what is between
  double microseconds;
};
std::optional<Separate> FindSeparate(const ResidualPair& pair, const ResidualPairShapes& shapes,
                                     const TensorPlanes& planes) {
  std::optional<Separate> best;
  for (int between = 0; between <= kMostPlanes; ++between) {
    const auto first = EstimateMicroseconds(*pair.first, shapes.first, {planes.x, between}),
               second = EstimateMicroseconds(*pair.second, shapes.second, {planes.added, planes.y, between});
    if (!first || !second || (best && best->microseconds <= *first + *second)) continue;
    best = {between, *first + *second};
  }
  return best;
}

// By estimate.
using Ranking = std::vector<std::pair<double, ConvConfig>>;
Ranking Rank(const ResidualPair& pair, const ResidualPairShapes& shapes, const TensorPlanes& planes) {
  const Device& device = pair.second->On();
  const ResidualPairProblem problem = ProblemOf(pair, shapes);
  std::vector<ConvConfig> configs;
  if (planes == problem.second.planes && kBitPairKernel.Applies(problem, device))
    AddCandidates(problem, device, configs);
  if (!configs.empty() && !HaveSteps(pair, shapes, configs.front())) configs.clear();
  Ranking ranking;
  for (const ConvConfig& config : configs) ranking.emplace_back(EstimateOf(problem, config, device), config);
  if (const std::optional<Separate> separate = FindSeparate(pair, shapes, planes))
    ranking.emplace_back(kUnlikeNeighbours * separate->microseconds, ConvConfig{&kSeparateKernels});
  std::stable_sort(ranking.begin(), ranking.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  return ranking;
}

}  // namespace

std::vector<ConvConfig> BitPairConfigs(const ResidualPair& pair, const ResidualPairShapes& shapes,
                                       const TensorPlanes& planes) {
  std::vector<ConvConfig> configs;
  for (auto& [time, config] : Rank(pair, shapes, planes)) configs.push_back(std::move(config));
  return configs;
}

std::optional<double> EstimateMicroseconds(const ResidualPair& pair, const ResidualPairShapes& shapes,
                                           const TensorPlanes& planes) {
  const Ranking ranking = Rank(pair, shapes, planes);
  return ranking.empty() ? std::nullopt : std::optional(ranking.front().first);
}

int PlanesBetween(const ResidualPair& pair, const ResidualPairShapes& shapes, const TensorPlanes& planes) {
  const std::optional<Separate> separate = FindSeparate(pair, shapes, planes);
  Require(separate.has_value(), "two convolutions have no kernels that read ", planes.x, " and ",
          planes.added, " planes and store ", planes.y);
  return separate->planes;
}

const FusedRow<ResidualPairProblem> kBitPairKernel = {
    {"bit_pair", "sm_90a",
     "a block's shortcut and its last convolution, 1x1, of planes: both as `bits`, codes that meet as words "
     "of bits"},
    Refuse,
    EstimateOfBestPair};

class BitPairPlan {
 public:
  BitPairPlan(const ResidualPair& pair, const ResidualPairShapes& shapes, const ConvConfig& config)
      : pair_(pair), config_(config), params_(ParamsOf(pair, shapes, config)) {
    const ResidualPairProblem problem = ProblemOf(pair, shapes);
    const Device& device = pair.second->On();
    params_.shares = ShareTiles(params_.tiles, static_cast<int>(Blocks(problem, config, device)));
    shared_bytes_ = static_cast<int>(SharedBytesOf(problem, config));
  }

  void Launch(const void* first_x, const void* second_x, void* y, Queue& queue) const {
    const Device& device = pair_.second->On();
    DeviceGuard guard(device.ordinal);
    LaunchOptions options{queue, device};
    options.shared_bytes = shared_bytes_;
    RequireAligned({first_x, second_x, y});
    BitPairParams p = params_;
    p.shortcut.x = static_cast<const uint8_t*>(first_x);
    p.x = static_cast<const uint8_t*>(second_x);
    p.y = y;
    Check(LaunchBitPair(p, config_, options), "launching two convolutions of bits");
  }

 private:
  ResidualPair pair_;
  ConvConfig config_;
  BitPairParams params_;
  int shared_bytes_ = 0;
};

std::shared_ptr<const BitPairPlan> PlanBitPair(const ResidualPair& pair, const ResidualPairShapes& shapes,
                                               const ConvConfig& config) {
  const std::vector<ConvConfig> configs = BitPairConfigs(pair, shapes, ProblemOf(pair, shapes).second.planes);
  Require(
      config.kernel == &kBitPairKernel && std::find(configs.begin(), configs.end(), config) != configs.end(),
      "configuration ", config.Text(), " does not apply to these two nodes");
  return std::make_shared<const BitPairPlan>(pair, shapes, config);
}

void LaunchBitPair(const BitPairPlan& plan, const void* first_x, const void* second_x, void* y,
                   Queue& queue) {
  plan.Launch(first_x, second_x, y, queue);
}

}  // namespace lowbit::cuda
