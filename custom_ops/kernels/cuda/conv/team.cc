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

// Columns of channels that tiles of one block may lie in.
int Columns(const ConvProblem& problem, const ConvConfig& config) {
  return problem.n > config.tile_n ? 2 : 1;
}

int64_t Tiles(const ConvProblem& problem, const ConvConfig& config) {
  return CeilDiv(problem.m, 64) * CeilDiv(problem.n, config.tile_n);
}

int Blocks(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  return static_cast<int>(std::min<int64_t>(Tiles(problem, config), device.multiprocessors));
}

int SharedBytesOf(const ConvProblem& problem, const ConvConfig& config) {
  const int64_t weights = Columns(problem, config) * problem.KTiles() * config.tile_n * kTileK;
  return static_cast<int>(1024 + weights + config.stages * 64 * (problem.KTiles() * kTileK + config.tile_n));
}

// Two tiles a block at least, or there is nothing to share; in two columns at most. Each warpgroup has slots
// of its own.
void AddCandidates(const ConvProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  for (const int tile_n : {64, 128}) {
    if (tile_n > 64 && problem.n <= 64) continue;
    for (int groups = 2; groups <= MaxTeamGroups(tile_n); ++groups) {
      ConvConfig config{&kTeamRow, 64 * groups, tile_n};
      const int64_t tiles = Tiles(problem, config);
      if (tiles == 0 || tiles > kMaxTiles) continue;
      const int64_t each = CeilDiv(tiles, Blocks(problem, config, device));
      if (each < groups || (problem.n > tile_n && each > CeilDiv(problem.m, 64))) continue;
      for (config.stages = groups; config.stages <= std::min<int64_t>(each, kMaxTeamSlots);
           config.stages += groups) {
        if (SharedBytesOf(problem, config) <= device.shared_bytes) out.push_back(config);
      }
    }
  }
}

double Microseconds(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  const int64_t groups = config.tile_m / 64, blocks = Blocks(problem, config, device),
                each = CeilDiv(Tiles(problem, config), blocks);
  const double k_tiles = static_cast<double>(problem.KTiles()), tile_n = config.tile_n;
  // The weights and the first tiles; then every round of latencies, or what all tiles together take, the less
  // the more warpgroups and tiles ahead hide each other's latencies.
  const double start = 86.6 + 3.92 * k_tiles * tile_n;
  double round = 1870 + 38.9 * k_tiles + (problem.residual ? 20.7 : 6.7) * tile_n;
  if (config.stages == groups) round += 382;  // nothing is fetched ahead
  const double hiding =
      1 + 1 / static_cast<double>(groups) + 0.423 * static_cast<double>(groups) / config.stages;
  const double work =
      static_cast<double>(each) * (92.9 * k_tiles + (problem.residual ? 6.09 : 4.45) * tile_n) * hiding;
  return (EstimateBusy(blocks, device) + start +
          std::max(static_cast<double>(CeilDiv(each, groups)) * round, work)) /
         kClocksPerMicrosecond;
}

ConvLauncher Launcher(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  TeamParams team = {TilesOf(problem, config), PixelsOf(problem)};
  team.staging_offset = SharedBytesOf(problem, config) - 1024 - config.stages * 64 * config.tile_n;
  team.shares = ShareTiles(static_cast<int>(Tiles(problem, config)), Blocks(problem, config, device));
  team.weight_columns = Columns(problem, config);
  team.by_column = MakeDivisor(std::max<int64_t>(1, CeilDiv(problem.m, 64)));
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
