#include "kernels/cuda/conv/resident.h"

#include <algorithm>

#include "kernels/cuda/conv/conv_row.h"

namespace lowbit::cuda {
namespace {

std::string Refuse(const ConvProblem& problem, const Device& device) {
  if (device.capability != 90) return "needs sm_90a";
  if (!problem.streams) return "not a 1x1 convolution whose codes are rounded in registers";
  return problem.KTiles() > 8 ? "weights of more than 8 tiles along K" : "";
}

int SharedBytesOf(const ConvProblem& problem, const ConvConfig& config) {
  const int64_t tiles = problem.KTiles() * (config.tile_n + config.stages * config.tile_m) * kTileK;
  return static_cast<int>(1024 + tiles + 2 * config.tile_m * config.tile_n);
}

// Along m: as many as run at once, each with as many tiles or one less.
int Blocks(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  const int64_t at_once = std::min(config.tile_n > 64 ? 4 : 6,
                                   (device.shared_bytes + 5120) / (SharedBytesOf(problem, config) + 2500));
  const int64_t tiles = CeilDiv(problem.m, config.tile_m), columns = CeilDiv(problem.n, config.tile_n);
  const int64_t most = std::max<int64_t>(1, at_once * device.multiprocessors / columns);
  return static_cast<int>(CeilDiv(tiles, CeilDiv(tiles, most)));
}

// Two slots of tiles at least, so that one is fetched while another is multiplied.
void AddCandidates(const ConvProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  for (const int tile_n : {64, 128}) {
    if (CeilDiv(problem.n, tile_n) > kMaxColumns) continue;
    for (const int slots : {2, 3}) {
      const ConvConfig config{&kResidentRow, 64, tile_n, slots};
      if (SharedBytesOf(problem, config) > device.shared_bytes) continue;
      const int64_t tiles = CeilDiv(problem.m, 64);
      if (tiles * CeilDiv(problem.n, tile_n) > device.multiprocessors &&
          Blocks(problem, config, device) < tiles) {
        out.push_back(config);
      }
    }
  }
}

double Microseconds(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  const int64_t blocks = Blocks(problem, config, device), columns = CeilDiv(problem.n, config.tile_n);
  const double tiles = static_cast<double>(CeilDiv(CeilDiv(problem.m, config.tile_m), blocks));
  const double at_once = static_cast<double>(CeilDiv(blocks * columns, device.multiprocessors));
  const double k_tiles = static_cast<double>(problem.KTiles()), tile_n = config.tile_n;
  // Its weights, and for every tile a round of latencies, the rounding of all blocks' codes, the products.
  const double start = 3300 + 1.77 * k_tiles * tile_n;
  const double tile = 1090 + at_once * (problem.residual ? 9.03 : 3.22) * tile_n + 284 * k_tiles;
  return (EstimateBusy(blocks * columns, device) + start + tiles * tile) / kClocksPerMicrosecond;
}

void Complete(const ConvProblem& problem, const ConvConfig& config, const Device& device, ConvParams& p) {
  p.staging_offset = p.k_tiles * (config.tile_n + config.stages * config.tile_m) * kTileK;
  p.persistent_blocks = Blocks(problem, config, device);
}

ConvLauncher Launcher(const ConvProblem&, const ConvConfig& config, const Device&) {
  return [config](const ConvParams& p, const LaunchOptions& options) {
    return LaunchResident(p, config, options);
  };
}

}  // namespace

const ConvRow kResidentRow = {
    {"resident", "sm_90a", "1x1 layers of many pixels: wgmma, blocks keep their weights"},
    Refuse,
    AddCandidates,
    SharedBytesOf,
    Microseconds,
    Complete,
    Launcher,
    nullptr,
    {.takes_floats = true}};

}  // namespace lowbit::cuda
