// The one place where a convolution's kernel is chosen.
#include "kernels/cuda/conv/select.h"

#include <algorithm>

#include "kernels/cuda/left_out.h"

namespace lowbit::cuda {
namespace {

// The same configurations, blocks apart, at the end: in a row of equals, where the tuner begins, they are as
// fast. First only where that has clearly the best estimate of all.
void AddApart(const ConvProblem& problem, const Device& device, const std::vector<double>& estimates,
              std::vector<ConvConfig>& out) {
  if (device.capability < 90 || IsLeftOut("apart")) return;
  double best = estimates.empty() ? 0 : estimates.front();
  const std::vector<ConvConfig> ranked = out;
  for (const ConvConfig& config : ranked) {
    if (!RowOf(config).traits.may_stand_apart) continue;
    const int64_t blocks = CeilDiv(problem.m, config.tile_m) * CeilDiv(problem.n, config.tile_n) *
                           problem.groups * config.splits;
    if (blocks > device.multiprocessors || SharedBytes(problem, config) >= ApartBytes(device)) continue;
    ConvConfig apart = config;
    apart.apart = true;
    const double with_room = EstimateMicroseconds(problem, apart, device);
    const bool first = with_room < 0.95 * best;
    if (first) best = with_room;
    out.insert(first ? out.begin() : out.end(), apart);
  }
}

}  // namespace

std::string ConvConfig::Text() const {
  std::string text = kernel->name;
  if (tile_m > 0) text.append("_").append(std::to_string(tile_m)).append("x").append(std::to_string(tile_n));
  if (stages > 0) text += "_stages" + std::to_string(stages);
  if (producers) text += "_producers";
  if (boxes) text += "_boxes";
  if (splits > 1) text += (split == Split::kCluster ? "_cluster" : "_split") + std::to_string(splits);
  if (multicast) text += "_multicast";
  if (apart) text += "_apart";
  if (packs) text += "_packed";
  if (keeps_weights) text += "_kept";
  return text;
}

int ApartBytes(const Device& device) {
  const int all = device.shared_bytes + 5 * 1024;  // of a multiprocessor; each block reserves 1024
  return all / 2 - 1024;
}

int SharedBytes(const ConvProblem& problem, const ConvConfig& config) {
  return RowOf(config).shared_bytes(problem, config);
}

// The constants of all rows but `vector` were fitted to what the tuner measured on one H200
// (LOWBIT_TUNE_LOG) in ResNet-18, ResNet-50, DenseNet-121 and MobileNetV2 at batch 1, 4, 16 and 128: the
// times of configurations in rows of equals and of the networks that have them. What was minimized is what a
// choice costs its network, and how far estimates are off. Elsewhere, and on other GPUs, the tuner is the
// judge.
double EstimateMicroseconds(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  return RowOf(config).microseconds(problem, config, device);
}

std::span<const ConvOption> ConvOptions() {
  static constexpr ConvOption kOptions[] = {
      {"apart", [](const ConvConfig& config) { return config.apart; }},
      {"boxes", [](const ConvConfig& config) { return config.boxes; }},
      {"cluster",
       [](const ConvConfig& config) { return config.splits > 1 && config.split == Split::kCluster; }},
      {"kept", [](const ConvConfig& config) { return config.keeps_weights; }},
      {"multicast", [](const ConvConfig& config) { return config.multicast; }},
      {"packed", [](const ConvConfig& config) { return config.packs; }},
      {"producers", [](const ConvConfig& config) { return config.producers; }},
      {"split",
       [](const ConvConfig& config) { return config.splits > 1 && config.split == Split::kWorkspace; }}};
  return kOptions;
}

bool IsLeftOut(const ConvConfig& config) {
  return IsLeftOut(config.kernel->name) ||
         std::any_of(ConvOptions().begin(), ConvOptions().end(), [&](const ConvOption& option) {
           return option.is_in(config) && IsLeftOut(option.name);
         });
}

std::vector<ConvConfig> RankConfigs(const ConvProblem& problem, const Device& device) {
  const TensorPlanes& planes = problem.planes;
  std::vector<ConvConfig> out;
  for (const ConvRow* const row : ConvTable()) {
    const ConvTraits& traits = row->traits;
    const bool takes_planes = (planes.x == 0 || traits.reads_planes) &&
                              (planes.y == 0 || traits.stores_planes) &&
                              (planes.added == 0 || traits.adds_planes);
    if (!traits.is_reference && takes_planes && row->refuse(problem, device).empty())
      row->add_candidates(problem, device, out);
  }
  std::erase_if(out, [&](const ConvConfig& config) {
    // Of inputs with signs kernels have no instance that makes planes of floats (WithFinish).
    const bool has_form = (problem.floats && problem.x.encoding != Encoding::kSigned) ||
                          RowOf(config).traits.stores_planes_of_integers;
    const bool may_store =
        has_form && SumsOf(problem, config).in_registers && config.tile_n % (kPlaneChannels / 2) == 0;
    return IsLeftOut(config) || (planes.y > 0 && !may_store);
  });
  const std::vector<double> estimates = SortByEstimate(
      [&](const ConvConfig& config) { return EstimateMicroseconds(problem, config, device); }, out);
  AddApart(problem, device, estimates, out);
  if (planes == TensorPlanes{}) out.push_back({});
  return out;
}

double EstimateOfBest(const ConvProblem& problem, const Device& device) {
  return EstimateMicroseconds(problem, RankConfigs(problem, device).front(), device);
}

}  // namespace lowbit::cuda
