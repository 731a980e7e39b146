#include "kernels/cuda/conv/windows.h"

#include <algorithm>

#include "kernels/cuda/conv/conv_row.h"

namespace lowbit::cuda {
namespace {

constexpr Tile kTiles[] = {{64, 64}, {64, 128}, {128, 64}, {128, 128}};

std::string Refuse(const ConvProblem& problem, const Device& device) {
  if (problem.geometry.Taps() == 1) return "a window of one tap";
  if (std::string reason = RefuseLine(problem, device); !reason.empty()) return reason;
  if (problem.channels % kTileK != 0) return "channels are no multiple of 128";
  return problem.KTiles() > kMaxWindowWeights ? "weights of more than 80 tiles along K" : "";
}

// The slabs that a block sums over, at most.
int Slabs(const ConvProblem& problem, const ConvConfig& config) {
  const int64_t k_tiles = problem.KTiles(), taps = k_tiles * kTileK / problem.channels;
  int64_t most = 0;
  for (int split = 0; split < config.splits; ++split) {
    const int64_t begin = k_tiles * split / config.splits, end = k_tiles * (split + 1) / config.splits;
    most = std::max(most, (end - 1) / taps - begin / taps + 1);
  }
  return static_cast<int>(most);
}

int64_t SlabBytes(const ConvProblem& problem, const ConvConfig& config) {
  return int64_t{Slabs(problem, config)} * LineOf(problem).PlaneBytes(config.tile_m);
}

int SharedBytesOf(const ConvProblem& problem, const ConvConfig& config) {
  const int row = config.splits > 1 ? config.tile_n * 4 : config.tile_n + 16;
  const int64_t bytes =
      1024 + config.stages * config.tile_n * kTileK + SlabBytes(problem, config) + config.tile_m * row;
  return static_cast<int>(std::min(bytes, kMaxBytes));
}

// Splits while there are multiprocessors for them, few stages: two blocks of a multiprocessor overlap with
// their neighbours in a network.
void AddCandidates(const ConvProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  const int64_t k_tiles = problem.KTiles(), tiles = LineOf(problem).tiles;
  for (const Tile& t : kTiles) {
    const int64_t blocks = CeilDiv(tiles, t.m / 64) * CeilDiv(problem.n, t.n);
    if (CeilDiv(problem.n, t.n) > kMaxColumns || (t.n > 64 && problem.n <= 64)) continue;
    for (int splits = 1; splits <= 8 && splits * 2 <= k_tiles; splits *= 2) {
      if (splits > 1 && blocks * splits > device.multiprocessors) break;
      const int count = static_cast<int>(CeilDiv(k_tiles, splits));
      ConvConfig config{&kWindowsRow, t.m, t.n, 0, splits};
      for (const int stages : {4, 6, kMaxWindowStages}) {
        if (config.stages == count) break;
        config.stages = std::min(stages, count);
        if (Slabs(problem, config) <= kMaxWindowSlabs &&
            SharedBytesOf(problem, config) <= device.shared_bytes) {
          out.push_back(config);
        }
      }
    }
  }
}

// Operands are read in shared memory, and weights written there, at 128 bytes a clock; or a warpgroup's own
// products and barriers take longer, or the latency of the weights that are on their way. The rounding
// of its codes does not grow with K: layers of 9 to 36 steps tell it from what a step takes.
double Microseconds(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  const int64_t blocks =
      CeilDiv(LineOf(problem).tiles, config.tile_m / 64) * CeilDiv(problem.n, config.tile_n) * config.splits;
  const int64_t fit = std::max(1, (device.shared_bytes + 5120) / (SharedBytesOf(problem, config) + 2500));
  // Clusters of more than two blocks leave multiprocessors over.
  const int64_t each =
      CeilDiv(blocks, config.splits > 2 ? device.multiprocessors * 7 / 8 : device.multiprocessors);
  const double at_once = static_cast<double>(std::min(fit, each)),
               waves = static_cast<double>(CeilDiv(each, fit));
  const double tiles = config.tile_m / 64, tile_n = config.tile_n;
  const double count = static_cast<double>(CeilDiv(problem.KTiles(), config.splits));
  const double alone = 86 + 300.0 / config.stages + tiles * tile_n;
  const double work = count * std::max(at_once * (tiles * (64 + tile_n) + tile_n), alone);
  const double outputs = tiles * 64 * tile_n;
  double clocks = EstimateBusy(blocks, device) + waves * (880 + 0.4 * outputs + work);
  if (config.splits > 1) clocks += 304 + at_once * outputs * 0.313;
  return clocks / kClocksPerMicrosecond;
}

ConvLauncher Launcher(const ConvProblem& problem, const ConvConfig& config, const Device&) {
  WindowsParams windows = {HaloParamsOf(problem, config, true), SumsOf(problem, config)};
  windows.taps = static_cast<int>(problem.geometry.Taps());
  // Codes or sums lie behind weights and pixels.
  windows.staging_offset = windows.exchange_offset =
      config.stages * config.tile_n * kTileK + static_cast<int>(SlabBytes(problem, config));
  return LauncherOf(windows, config, LaunchWindows);
}

}  // namespace

const ConvRow kWindowsRow = {
    {"windows", "sm_90a", "stride 1, many weights: wgmma, patches of the input stay, weights pass through"},
    {.refuse = Refuse,
     .add_candidates = AddCandidates,
     .shared_bytes = SharedBytesOf,
     .microseconds = Microseconds,
     .launcher = Launcher,
     .traits = {.takes_floats = true, .stores_planes = true}}};

}  // namespace lowbit::cuda
