#include "kernels/cuda/conv/team.h"

#include <algorithm>

#include "kernels/cuda/conv/conv_row.h"

namespace lowbit::cuda {
namespace {

constexpr int64_t kMaxTiles = int64_t{1} << 30;

std::string Refuse(const ConvProblem& problem, const Device& device) {
  if (device.capability != 90) return "needs sm_90a";
  if (!problem.streams) return "not a 1x1 convolution whose codes are rounded in registers";
  return problem.KTiles() > 8 ? "weights of more than 8 tiles along K" : "";
}

// Lines of tiles (TeamParams), the tiles of each, the blocks that share it.
struct Lines {
  int64_t count, tiles, blocks;
};
Lines LinesOf(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  const int64_t columns = CeilDiv(problem.n, config.tile_n),
                count = config.keeps_weights ? columns / kTeamColumns : 1,
                tiles = CeilDiv(problem.m, 64) * columns / count;
  return {count, tiles, std::min(tiles, device.multiprocessors / count)};
}

// The weights of the columns that tiles of one block may lie in.
int64_t WeightBytes(const ConvProblem& problem, const ConvConfig& config) {
  return (problem.n > config.tile_n ? kTeamColumns : 1) * problem.KTiles() * config.tile_n * kTileK;
}

int SharedBytesOf(const ConvProblem& problem, const ConvConfig& config) {
  const int64_t slots = config.stages * 64 * (problem.KTiles() * kTileK + config.tile_n);
  return static_cast<int>(1024 + WeightBytes(problem, config) + slots);
}

// Two tiles a block at least, or there is nothing to share; in two columns at most. Each warpgroup has slots
// of its own. Pixel by pixel is for tensors that exceed L2: of ResNet-50 at batch 128, on an H100, 128 to 512 channels
// and residuals at 28x28 take 46.8 us for 53.0, 512 to 256 channels 35.3 for 43.1; at batch 16 all take 1 to 5 % more.
void AddCandidates(const ConvProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  for (const int tile_n : {64, 128}) {
    if (tile_n > 64 && problem.n <= 64) continue;
    const int64_t columns = CeilDiv(problem.n, tile_n), pairs = columns / kTeamColumns;
    for (const bool keeps : {false, true}) {
      if (keeps && (columns % kTeamColumns != 0 || pairs > device.multiprocessors)) continue;
      for (int groups = 2; groups <= MaxTeamGroups(tile_n); ++groups) {
        ConvConfig config{&kTeamRow, 64 * groups, tile_n};
        config.keeps_weights = keeps;
        const auto [count, tiles, blocks] = LinesOf(problem, config, device);
        if (tiles == 0 || count * tiles > kMaxTiles) continue;
        const int64_t each = CeilDiv(tiles, blocks);
        if (each < groups || (!keeps && columns > 1 && each > CeilDiv(problem.m, 64))) continue;
        for (config.stages = groups; config.stages <= std::min<int64_t>(each, kMaxTeamSlots);
             config.stages += groups) {
          if (SharedBytesOf(problem, config) <= device.shared_bytes) out.push_back(config);
        }
      }
    }
  }
}

double Microseconds(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  const auto [lines, tiles, blocks] = LinesOf(problem, config, device);
  const int64_t groups = config.tile_m / 64, each = CeilDiv(tiles, blocks);
  const double k_tiles = static_cast<double>(problem.KTiles()), tile_n = config.tile_n;
  // The weights and the first tiles; then every round of latencies, or what all tiles together take, the less
  // the more warpgroups and tiles ahead hide each other's latencies.
  const double start = 86.6 + 3.92 * k_tiles * tile_n * (config.keeps_weights ? kTeamColumns : 1);
  double round = 1870 + 38.9 * k_tiles + (problem.residual ? 20.7 : 6.7) * tile_n;
  if (config.stages == groups) round += 382;  // nothing is fetched ahead
  const double hiding =
      1 + 1 / static_cast<double>(groups) + 0.423 * static_cast<double>(groups) / config.stages;
  const double work =
      static_cast<double>(each) * (92.9 * k_tiles + (problem.residual ? 6.09 : 4.45) * tile_n) * hiding;
  const double busy = EstimateBusy(lines * blocks, device) + start +
                      std::max(static_cast<double>(CeilDiv(each, groups)) * round, work);
  // What comes from memory in pieces of pixels (2.2 TB/s on an H100) takes longer than whole pixels (2.45).
  constexpr double kL2Bytes = 5e7, kOfPiece = 1 / 2.2e6 - 1 / 2.45e6;
  const double bytes = static_cast<double>(problem.m) *
                       (k_tiles * kTileK + static_cast<double>(problem.n * (problem.residual ? 2 : 1)));
  const bool has_pieces = !config.keeps_weights && problem.n > config.tile_n && bytes > kL2Bytes;
  return busy / kClocksPerMicrosecond + (has_pieces ? bytes * kOfPiece : 0);
}

ConvLauncher Launcher(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  TeamParams team = {TilesOf(problem, config), PixelsOf(problem)};
  team.staging_offset = SharedBytesOf(problem, config) - 1024 - config.stages * 64 * config.tile_n;
  const auto [lines, tiles, blocks] = LinesOf(problem, config, device);
  team.shares = ShareTiles(static_cast<int>(tiles), static_cast<int>(blocks));
  team.lines = static_cast<int>(lines);
  team.pixels_offset = static_cast<int>(WeightBytes(problem, config));
  team.by_pixel = config.keeps_weights;
  team.by_row =
      MakeDivisor(config.keeps_weights ? kTeamColumns : std::max<int64_t>(1, CeilDiv(problem.m, 64)));
  return LauncherOf(team, config, LaunchTeam);
}

}  // namespace

const ConvRow kTeamRow = {
    {"team", "sm_90a", "1x1 layers: wgmma, the warpgroups of a block share its weights"},
    {.refuse = Refuse,
     .add_candidates = AddCandidates,
     .shared_bytes = SharedBytesOf,
     .microseconds = Microseconds,
     .launcher = Launcher,
     .traits = {.takes_floats = true}}};

}  // namespace lowbit::cuda
