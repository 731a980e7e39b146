#include "kernels/cuda/conv/select.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kernels/cuda/conv/conv_params.h"

namespace lowbit::cuda {
namespace {

constexpr int kMmaStages = 3, kMaxStages = 8;
constexpr double kClocksPerMicrosecond = 1.7e3;
constexpr int64_t kMaxTeamTiles = int64_t{1} << 30;

struct Tile {
  int m, n;
};
constexpr Tile kMmaTiles[] = {{32, 64}, {64, 32}, {64, 64}, {128, 64}, {128, 128}};
constexpr Tile kWindowTiles[] = {{64, 64}, {64, 128}, {128, 64}, {128, 128}};
constexpr Tile kWgmmaTiles[] = {{64, 32}, {64, 64}, {64, 128}, {128, 64}, {128, 128}, {128, 256}};

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t KTiles(const GemmProblem& problem) { return CeilDiv(problem.k, kTileK); }

bool Fits(const GemmProblem& problem, const ConvConfig& config, const Device& device) {
  if (SharedBytes(problem, config) > device.shared_bytes) return false;
  if (CeilDiv(problem.n, config.tile_n) * problem.groups > 65535) return false;
  if (config.algorithm == Algorithm::kMma && !problem.vector16)
    return config.tile_m == 64 && config.tile_n == 64;
  return config.algorithm == Algorithm::kMma || (device.capability == 90 && problem.vector16);
}

const char* AlgorithmName(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kPlain:
      return "plain";
    case Algorithm::kMma:
      return "mma";
    case Algorithm::kWgmma:
      return "wgmma";
    case Algorithm::kResident:
      return "resident";
    case Algorithm::kTeam:
      return "team";
    case Algorithm::kHalo:
      return "halo";
    case Algorithm::kWindows:
      return "windows";
    case Algorithm::kImage:
      return "image";
    case Algorithm::kDepthwise:
      return "depthwise";
    case Algorithm::kVector:
      return "vector";
    case Algorithm::kResidualPair:
      return "pair";
    case Algorithm::kSeparate:
      return "separate";
  }
  return "";
}

// Adds `config` with every useful number of splits.
void AddSplits(const GemmProblem& problem, const Device& device, ConvConfig config,
               std::vector<ConvConfig>& out) {
  const int64_t blocks =
      CeilDiv(problem.m, config.tile_m) * CeilDiv(problem.n, config.tile_n) * problem.groups;
  // Clusters of more than 8 blocks are not portable.
  const int most = device.capability <= 90 ? 16 : 8;
  for (int splits = 1; splits <= most && splits <= KTiles(problem); splits *= 2) {
    // Splitting pays while blocks are fewer than multiprocessors, a little beyond at most.
    if (splits > 1 && blocks * splits > 2 * int64_t{device.multiprocessors}) break;
    config.splits = splits;
    const int per_split = static_cast<int>(CeilDiv(KTiles(problem), splits));
    const bool wgmma = config.algorithm == Algorithm::kWgmma;
    std::vector<int> stages = {std::min(per_split, wgmma ? 4 : kMmaStages)};
    if (wgmma && per_split > 4) stages.push_back(std::min(per_split, kMaxStages));
    for (const int s : stages) {
      config.stages = s;
      config.split = splits == 1 || device.capability >= 90 ? Split::kCluster : Split::kWorkspace;
      // Where boxes can be fetched, they are: no other way was faster by more than some percent (ResNet-50).
      config.boxes = wgmma && problem.boxes && config.tile_n <= kMostBoxColumns;
      for (const bool producers : {false, true}) {
        // Without producers all tiles are in flight at once; with them two tiles are too few to gain.
        if (producers ? !wgmma || per_split < 3 || config.boxes : wgmma && s < per_split && !config.boxes)
          continue;
        config.producers = producers;
        for (config.multicast = 1; config.multicast <= 2; ++config.multicast) {
          const bool may_share = wgmma && splits == 1 && problem.m > config.tile_m && !config.boxes;
          if (config.multicast == 1 || may_share) {
            if (Fits(problem, config, device)) out.push_back(config);
          }
        }
      }
      config.multicast = 1;
    }
  }
}

}  // namespace

std::string ConvConfig::Text() const {
  std::string text = AlgorithmName(algorithm);
  if (tile_m > 0) text.append("_").append(std::to_string(tile_m)).append("x").append(std::to_string(tile_n));
  if (stages > 0) text += "_stages" + std::to_string(stages);
  if (producers) text += "_producers";
  if (boxes) text += "_boxes";
  if (splits > 1) text += (split == Split::kCluster ? "_cluster" : "_split") + std::to_string(splits);
  if (multicast > 1) text += "_multicast" + std::to_string(multicast);
  if (apart) text += "_apart";
  if (keeps_weights) text += "_kept";
  return text;
}

int ApartBytes(const Device& device) {
  const int all = device.shared_bytes + 5 * 1024;  // of a multiprocessor; each block reserves 1024
  return all / 2 - 1024;
}

int TileBytes(const ConvConfig& config) { return (config.tile_m + config.tile_n) * kTileK * config.stages; }

namespace {

// Two slots of tiles at least, so that one is fetched while another is multiplied.
void AddResident(const GemmProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  for (const int tile_n : {64, 128}) {
    if (CeilDiv(problem.n, tile_n) > 65535) continue;
    for (const int slots : {2, 3}) {
      const ConvConfig config{Algorithm::kResident, 64, tile_n, slots};
      if (KTiles(problem) > 8 || SharedBytes(problem, config) > device.shared_bytes) continue;
      const int64_t tiles = CeilDiv(problem.m, 64);
      if (tiles * CeilDiv(problem.n, tile_n) > device.multiprocessors &&
          PersistentBlocks(problem, config, device) < tiles) {
        out.push_back(config);
      }
    }
  }
}

}  // namespace

int TeamColumns(const GemmProblem& problem, const ConvConfig& config) {
  return problem.n > config.tile_n ? 2 : 1;
}

namespace {

int64_t TeamTiles(const GemmProblem& problem, const ConvConfig& config) {
  return CeilDiv(problem.m, 64) * CeilDiv(problem.n, config.tile_n);
}

// Two tiles a block at least, or there is nothing to share; in two columns at most. Each warpgroup has slots
// of its own.
void AddTeam(const GemmProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  if (KTiles(problem) > 8) return;
  for (const int tile_n : {64, 128}) {
    if (tile_n > 64 && problem.n <= 64) continue;
    for (int groups = 2; groups <= MaxTeamGroups(tile_n); ++groups) {
      ConvConfig config{Algorithm::kTeam, 64 * groups, tile_n};
      const int64_t tiles = TeamTiles(problem, config);
      if (tiles == 0 || tiles > kMaxTeamTiles) continue;
      const int64_t each = CeilDiv(tiles, PersistentBlocks(problem, config, device));
      if (each < groups || (problem.n > tile_n && each > CeilDiv(problem.m, 64))) continue;
      for (config.stages = groups; config.stages <= std::min<int64_t>(each, kMaxTeamSlots);
           config.stages += groups) {
        if (SharedBytes(problem, config) <= device.shared_bytes) out.push_back(config);
      }
    }
  }
}

}  // namespace

int HaloRows(const GemmProblem& problem, const ConvConfig& config) {
  const int pitch = problem.halo.pitch;
  return (pitch - 1 + config.tile_m - 1 + problem.halo.reach) / pitch + 1;
}

int HaloPlaneBytes(const GemmProblem& problem, const ConvConfig& config) {
  return (HaloRows(problem, config) * problem.halo.pitch * problem.halo.slab + 1023) / 1024 * 1024;
}

int WindowSlabs(const GemmProblem& problem, const ConvConfig& config) {
  const int64_t k_tiles = KTiles(problem), taps = k_tiles * kTileK / problem.halo.channels;
  int64_t most = 0;
  for (int split = 0; split < config.splits; ++split) {
    const int64_t begin = k_tiles * split / config.splits, end = k_tiles * (split + 1) / config.splits;
    most = std::max(most, (end - 1) / taps - begin / taps + 1);
  }
  return static_cast<int>(most);
}

namespace {

// How many blocks of Algorithm::kHalo share a multiprocessor.
int HaloBlocksAtOnce(const GemmProblem& problem, const ConvConfig& config, const Device& device) {
  const int registers = config.tile_n > 64 ? 96 : config.tile_n > 32 ? 64 : 48;
  const int by_registers = 65536 / (registers * (config.tile_m * 2 + 32));
  const int by_shared = (device.shared_bytes + 5120) / (SharedBytes(problem, config) + 3100);
  return std::max(1, std::min({by_registers, by_shared, 4}));
}

// One slot where every block has one patch, else two: the next patch is fetched while one is multiplied.
void AddHalo(const GemmProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  if (problem.halo.tiles == 0 || KTiles(problem) > kMaxHaloWeights) return;
  for (const int tile_n : {32, 64, 128}) {
    const int64_t columns = CeilDiv(problem.n, tile_n);
    if (columns > 65535 || (tile_n > 32 && problem.n <= tile_n / 2)) continue;
    for (int tiles = 1; tiles <= MaxHaloTiles(tile_n); ++tiles) {
      for (const int slots : {1, 2}) {
        const ConvConfig config{Algorithm::kHalo, 64 * tiles, tile_n, slots};
        if (HaloRows(problem, config) > kMaxHaloRows || SharedBytes(problem, config) > device.shared_bytes)
          continue;
        const int64_t patches = CeilDiv(problem.halo.tiles, tiles),
                      at_once = int64_t{HaloBlocksAtOnce(problem, config, device)} * device.multiprocessors;
        if (slots == 1 ? patches * columns <= at_once : PersistentBlocks(problem, config, device) < patches)
          out.push_back(config);
      }
    }
  }
}

}  // namespace

namespace {

// Splits while there are multiprocessors for them, few stages: two blocks of a multiprocessor overlap with
// their neighbours in a network.
void AddWindows(const GemmProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  const int64_t k_tiles = KTiles(problem);
  if (problem.halo.tiles == 0 || problem.halo.slab != kTileK || k_tiles > kMaxWindowWeights) return;
  for (const Tile& t : kWindowTiles) {
    const int64_t blocks = CeilDiv(problem.halo.tiles, t.m / 64) * CeilDiv(problem.n, t.n);
    if (CeilDiv(problem.n, t.n) > 65535 || (t.n > 64 && problem.n <= 64)) continue;
    for (int splits = 1; splits <= 8 && splits * 2 <= k_tiles; splits *= 2) {
      if (splits > 1 && blocks * splits > device.multiprocessors) break;
      const int count = static_cast<int>(CeilDiv(k_tiles, splits));
      ConvConfig config{Algorithm::kWindows, t.m, t.n, 0, splits};
      for (const int stages : {4, 6, kMaxWindowStages}) {
        if (config.stages == count) break;
        config.stages = std::min(stages, count);
        if (WindowSlabs(problem, config) <= kMaxWindowSlabs &&
            SharedBytes(problem, config) <= device.shared_bytes) {
          out.push_back(config);
        }
      }
    }
  }
}

}  // namespace

int PersistentBlocks(const GemmProblem& problem, const ConvConfig& config, const Device& device) {
  if (config.algorithm == Algorithm::kTeam)
    return static_cast<int>(std::min<int64_t>(TeamTiles(problem, config), device.multiprocessors));
  if (config.algorithm == Algorithm::kHalo) {
    const int64_t patches = CeilDiv(problem.halo.tiles, config.tile_m / 64);
    const int64_t most = int64_t{HaloBlocksAtOnce(problem, config, device)} * device.multiprocessors /
                         CeilDiv(problem.n, config.tile_n);
    return static_cast<int>(config.stages == 1 ? patches : std::clamp<int64_t>(most, 1, patches));
  }
  const int64_t at_once = std::min(config.tile_n > 64 ? 4 : 6,
                                   (device.shared_bytes + 5120) / (SharedBytes(problem, config) + 2500));
  const int64_t tiles = CeilDiv(problem.m, config.tile_m), columns = CeilDiv(problem.n, config.tile_n);
  const int64_t most = std::max<int64_t>(1, at_once * device.multiprocessors / columns);
  return static_cast<int>(CeilDiv(tiles, CeilDiv(tiles, most)));
}

// As FinishTile has it.
int SharedBytes(const GemmProblem& problem, const ConvConfig& config) {
  if (config.algorithm == Algorithm::kPlain || config.algorithm == Algorithm::kDepthwise ||
      config.algorithm == Algorithm::kVector)
    return 0;
  if (config.algorithm == Algorithm::kImage) {
    const int finish = config.tile_m * (problem.requantizes ? config.tile_n + 16 : (config.tile_n + 8) * 4);
    return problem.image_weight_bytes + std::max(problem.image_patch_bytes, finish);
  }
  if (config.algorithm == Algorithm::kResident) {
    const int64_t tiles = KTiles(problem) * (config.tile_n + config.stages * config.tile_m) * kTileK;
    return static_cast<int>(1024 + tiles + 2 * config.tile_m * config.tile_n);
  }
  if (config.algorithm == Algorithm::kTeam) {
    const int64_t weights = TeamColumns(problem, config) * KTiles(problem) * config.tile_n * kTileK;
    return static_cast<int>(1024 + weights + config.stages * 64 * (KTiles(problem) * kTileK + config.tile_n));
  }
  if (config.algorithm == Algorithm::kHalo) {
    const int64_t slot = int64_t{problem.halo.channels / problem.halo.slab} * HaloPlaneBytes(problem, config);
    return static_cast<int>(1024 + KTiles(problem) * config.tile_n * kTileK + config.stages * slot +
                            config.tile_m * (config.tile_n + 16));
  }
  if (config.algorithm == Algorithm::kWindows) {
    const int64_t slabs = int64_t{WindowSlabs(problem, config)} * HaloPlaneBytes(problem, config);
    const int row = config.splits > 1 ? (config.tile_n + 8) * 4 : config.tile_n + 16;
    const int64_t bytes = 1024 + config.stages * config.tile_n * kTileK + slabs + config.tile_m * row;
    return static_cast<int>(std::min<int64_t>(bytes, std::numeric_limits<int32_t>::max()));
  }
  const int alignment = config.algorithm == Algorithm::kMma ? 0 : 1024;
  const int sums = config.tile_m * (config.tile_n + 8) * 4, tiles = TileBytes(config);
  if (config.splits > 1) return alignment + tiles + (config.split == Split::kCluster ? sums : 0);
  const int finish = problem.requantizes ? config.tile_m * (config.tile_n + 16) : sums;
  // Residuals arrive where codes are staged, while tiles are in use.
  return alignment + (problem.requantizes && problem.residual ? tiles + finish : std::max(tiles, finish));
}

namespace {

// What follows a kernel starts early on multiprocessors that this one leaves alone. In clocks.
double EstimateBusy(int64_t blocks, const Device& device) {
  return 970 * std::min(1.0, static_cast<double>(blocks) / device.multiprocessors);
}

double EstimateResident(const GemmProblem& problem, const ConvConfig& config, const Device& device) {
  const int64_t blocks = PersistentBlocks(problem, config, device),
                columns = CeilDiv(problem.n, config.tile_n);
  const double tiles = static_cast<double>(CeilDiv(CeilDiv(problem.m, config.tile_m), blocks));
  const double at_once = static_cast<double>(CeilDiv(blocks * columns, device.multiprocessors));
  const double k_tiles = static_cast<double>(KTiles(problem)), tile_n = config.tile_n;
  // Its weights, and for every tile a round of latencies, the rounding of all blocks' codes, the products.
  const double start = 3300 + 1.77 * k_tiles * tile_n;
  const double tile = 1090 + at_once * (problem.residual ? 9.03 : 3.22) * tile_n + 284 * k_tiles;
  return (EstimateBusy(blocks * columns, device) + start + tiles * tile) / kClocksPerMicrosecond;
}

double EstimateTeam(const GemmProblem& problem, const ConvConfig& config, const Device& device) {
  const int64_t groups = config.tile_m / 64, blocks = PersistentBlocks(problem, config, device),
                each = CeilDiv(TeamTiles(problem, config), blocks);
  const double k_tiles = static_cast<double>(KTiles(problem)), tile_n = config.tile_n;
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

double EstimateHalo(const GemmProblem& problem, const ConvConfig& config, const Device& device) {
  const int64_t blocks = PersistentBlocks(problem, config, device), patch_tiles = config.tile_m / 64,
                each = CeilDiv(problem.halo.tiles, blocks), columns = CeilDiv(problem.n, config.tile_n);
  const double at_once = static_cast<double>(CeilDiv(blocks * columns, device.multiprocessors));
  const double k_tiles = static_cast<double>(KTiles(problem)), tile_n = config.tile_n;
  const double slot =
      static_cast<double>(problem.halo.channels / problem.halo.slab * HaloPlaneBytes(problem, config));
  // The weights and the first patch; then every patch's round of latencies, or what all tiles together take.
  const double start = 1860 + at_once * (0.227 * k_tiles * tile_n + slot / 88.9);
  const double rounds = static_cast<double>(CeilDiv(each, patch_tiles)) * (1590 + 3.16 * k_tiles * tile_n);
  const double tile =
      165 + 3.79 * tile_n + 1.67 * k_tiles * std::max(tile_n, 48.0) + (problem.residual ? 1.72 * tile_n : 0);
  const double work = at_once * static_cast<double>(each) * tile;
  return (EstimateBusy(blocks * columns, device) + start + std::max(rounds, work)) / kClocksPerMicrosecond;
}

// Operands are read in shared memory, and weights written there, at 128 bytes a clock; or a warpgroup's own
// products and barriers take longer, or the latency of the weights that are on their way. The rounding
// of its codes does not grow with K: layers of 9 to 36 steps tell it from what a step takes.
double EstimateWindows(const GemmProblem& problem, const ConvConfig& config, const Device& device) {
  const int64_t blocks =
      CeilDiv(problem.halo.tiles, config.tile_m / 64) * CeilDiv(problem.n, config.tile_n) * config.splits;
  const int64_t fit = std::max(1, (device.shared_bytes + 5120) / (SharedBytes(problem, config) + 2500));
  // Clusters of more than two blocks leave multiprocessors over.
  const int64_t each =
      CeilDiv(blocks, config.splits > 2 ? device.multiprocessors * 7 / 8 : device.multiprocessors);
  const double at_once = static_cast<double>(std::min(fit, each)),
               waves = static_cast<double>(CeilDiv(each, fit));
  const double tiles = config.tile_m / 64, tile_n = config.tile_n;
  const double count = static_cast<double>(CeilDiv(KTiles(problem), config.splits));
  const double alone = 86 + 300.0 / config.stages + tiles * tile_n;
  const double work = count * std::max(at_once * (tiles * (64 + tile_n) + tile_n), alone);
  const double outputs = tiles * 64 * tile_n;
  double clocks = EstimateBusy(blocks, device) + waves * (880 + 0.4 * outputs + work);
  if (config.splits > 1) clocks += 304 + at_once * outputs * 0.313;
  return clocks / kClocksPerMicrosecond;
}

// Round trips for x and, past the first 2 KB of a row, for the weights, of all blocks that share a
// multiprocessor at once; the weights' bytes; products. Without kAsTiles within an eighth of what an H200
// takes for 64..4096 channels of 512..9216 bytes and 1..16 rows. Most of the tile kernels' estimates
// there are lower than their times; with it the faster of the two is chosen for every one of them.
double EstimateVector(const GemmProblem& problem, const Device& device) {
  constexpr int kChannels = 8;  // of a block
  constexpr double kAsTiles = 0.75;
  const int64_t at_once = (problem.m > 8 ? 3 : 4) * int64_t{device.multiprocessors};
  const double waves = static_cast<double>(CeilDiv(CeilDiv(problem.n, kChannels), at_once));
  const double rounds = static_cast<double>(CeilDiv(problem.k, 2048)), rows = static_cast<double>(problem.m);
  const double bytes = static_cast<double>(problem.n * problem.k) / device.multiprocessors;
  const double clocks = waves * (1400 + 1400 * rounds) + bytes / 36 + rows * (25 + 22 * rounds);
  return kAsTiles * clocks / kClocksPerMicrosecond;
}

// What the tile kernels cost, in clocks: of kMma, and of kWgmma by how it fetches pixels. Those of boxes were
// fitted to ResNet-50 in rows of equals at batch 1 and 16 alone; what a step takes, the latency of a round
// and what held shared memory costs, to all networks and batch sizes: 8 stages seldom pay where 4 do.
struct TileCosts {
  double issue;              // of a row of a tile's copies
  double narrow_rate, rate;  // products a clock, for tile_n below 64 and from there on
  double bytes, latency;     // bytes a clock on the way; a round of all stages
  double step, start, first_bytes;
  double wave, part_of_wave, crowding;
  double round, round_and_add;  // of an output
  double exchange, exchanged_output;
  double held;
};
constexpr TileCosts kMmaCosts{7.76, 4980,  4980,  105,  2040,  0,   2230,  219,
                              1.36, 0.847, 0.579, 0.12, 0.226, 372, 0.257, 2030};
constexpr TileCosts kGatherCosts{2.3,  2170,  17500, 105,  1380,  117, 1480,  219,
                                 1.36, 0.847, 0.579, 0.12, 0.226, 372, 0.257, 2030};
constexpr TileCosts kBoxCosts{0,    8000,  17500, 111,   522,   99,  1580,  539,
                              1.22, 0.753, 0.115, 0.108, 0.188, 177, 0.413, 840};

}  // namespace

// In clocks. The constants of all kernels but kVector's were fitted to what the tuner measured on one H200
// (LOWBIT_TUNE_LOG) in ResNet-18, ResNet-50, DenseNet-121 and MobileNetV2 at batch 1, 4, 16 and 128: the
// times of configurations in rows of equals and of the networks that have them. What was minimized is what a
// choice costs its network, and how far estimates are off. Elsewhere, and on other GPUs, the tuner is the
// judge.
double EstimateMicroseconds(const GemmProblem& problem, const ConvConfig& config, const Device& device) {
  if (config.algorithm == Algorithm::kPlain) {
    const double products = static_cast<double>(problem.m * problem.n * problem.groups) * problem.k;
    return 3.0 + products / (device.multiprocessors * 64 * kClocksPerMicrosecond);
  }
  if (config.algorithm == Algorithm::kImage || config.algorithm == Algorithm::kDepthwise) return 0;
  if (config.algorithm == Algorithm::kHalo) return EstimateHalo(problem, config, device);
  if (config.algorithm == Algorithm::kWindows) return EstimateWindows(problem, config, device);
  if (config.algorithm == Algorithm::kResident) return EstimateResident(problem, config, device);
  if (config.algorithm == Algorithm::kTeam) return EstimateTeam(problem, config, device);
  if (config.algorithm == Algorithm::kVector) return EstimateVector(problem, device);
  const bool wgmma = config.algorithm == Algorithm::kWgmma, multicast = config.multicast > 1;
  const TileCosts& cost = !wgmma ? kMmaCosts : config.boxes ? kBoxCosts : kGatherCosts;
  const double tile_m = config.tile_m, tile_n = config.tile_n, outputs = tile_m * tile_n;
  const int64_t m_tiles = CeilDiv(CeilDiv(problem.m, config.tile_m), config.multicast) * config.multicast;
  const int64_t blocks = m_tiles * CeilDiv(problem.n, config.tile_n) * problem.groups * config.splits;
  // Clusters of more than two blocks that share no multiprocessor leave some over.
  const bool leaves_over = config.apart && config.splits > 2;
  const int64_t per_multiprocessor =
      CeilDiv(blocks, leaves_over ? device.multiprocessors * 7 / 8 : device.multiprocessors);
  const int64_t k_tiles = CeilDiv(KTiles(problem), config.splits);

  // How many blocks of a multiprocessor run at once, and in how many waves.
  const int producers = config.producers ? 128 : config.boxes ? 32 : 0;
  const int threads = wgmma ? config.tile_m * 2 + producers : (outputs >= 8192 ? 256 : 128);
  const int by_registers = config.tile_n >= 256 ? 1 : outputs >= 16384 ? 2 : 16;
  const int by_shared = (device.shared_bytes + 5120) / (SharedBytes(problem, config) + 1500);
  const int64_t fit = config.apart ? 1 : std::max(1, std::min({by_shared, 2048 / threads, by_registers}));
  const double at_once = static_cast<double>(std::clamp<int64_t>(per_multiprocessor, 1, fit));
  const double exact_waves = static_cast<double>(per_multiprocessor) / at_once;
  const double waves =
      1 + cost.wave * (exact_waves - 1) + cost.part_of_wave * (std::ceil(exact_waves) - exact_waves);
  // Blocks that have a multiprocessor each may still crowd on those that the kernel before leaves first.
  double crowding = 1;
  if (fit > 1 && per_multiprocessor == 1) {
    const double share = static_cast<double>(blocks) / device.multiprocessors;
    crowding += cost.crowding * share * share;
  }

  // One tile of k: issuing its copies, multiplying, its bytes, or the latency of a round of all stages.
  const double bytes = (tile_m + tile_n / config.multicast) * kTileK;
  const double multiply = outputs * 256 / (tile_n < 64 ? cost.narrow_rate : cost.rate);
  double tile = std::max({cost.issue * tile_m, at_once * multiply, at_once * bytes / cost.bytes});
  if (k_tiles > config.stages) tile = std::max(tile, cost.latency / config.stages);
  tile += cost.step;
  if (config.producers) tile += 23;
  if (multicast) tile += 128;
  const double start = cost.start + at_once * bytes / cost.first_bytes;
  const double round = !problem.requantizes ? 1.35 : problem.residual ? cost.round_and_add : cost.round;
  const double finish = outputs / config.splits * round;
  double clocks = waves * (start + crowding * static_cast<double>(k_tiles) * tile + at_once * finish);
  if (config.splits > 1) {
    // The exchange, or a second kernel and the way through memory.
    clocks += cost.exchange + at_once * outputs * cost.exchanged_output;
    if (config.splits > 8) clocks += 978;
    if (config.split == Split::kWorkspace) clocks += 1500;
  }
  if (multicast) clocks += 159;
  if (config.tile_n >= 256) clocks += 184;
  // What it keeps from starting early, or from being started early: its place on the multiprocessors that it
  // has, and those; a warpgroup more to get going.
  const int held = std::max(SharedBytes(problem, config), config.apart ? ApartBytes(device) : 0);
  clocks += EstimateBusy(blocks, device) + cost.held * std::min(1.0, at_once * held / device.shared_bytes);
  if (config.producers) clocks += 256;
  return clocks / kClocksPerMicrosecond;
}

namespace {

// The same configurations, blocks apart, at the end: in a row of equals, where the tuner begins, they are as
// fast. First only where that has clearly the best estimate of all.
void AddApart(const GemmProblem& problem, const Device& device,
              const std::vector<std::pair<double, ConvConfig>>& ranked, std::vector<ConvConfig>& out) {
  if (device.capability < 90) return;
  double best = ranked.empty() ? 0 : ranked.front().first;
  for (const auto& [ignored, config] : ranked) {
    if (config.algorithm != Algorithm::kMma && config.algorithm != Algorithm::kWgmma) continue;
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

namespace {

// Sorts configurations by their estimates, which it returns with them.
template <typename Problem>
std::vector<std::pair<double, ConvConfig>> Rank(const Problem& problem, const Device& device,
                                                std::vector<ConvConfig>& configs) {
  std::vector<std::pair<double, ConvConfig>> ranked;
  for (const ConvConfig& c : configs) ranked.emplace_back(EstimateMicroseconds(problem, c, device), c);
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (size_t i = 0; i < ranked.size(); ++i) configs[i] = ranked[i].second;
  return ranked;
}

}  // namespace

std::vector<ConvConfig> RankConfigs(const GemmProblem& problem, const Device& device) {
  std::vector<ConvConfig> out;
  if (problem.depthwise) out.push_back({Algorithm::kDepthwise});
  if (problem.image) {
    const ConvConfig image{Algorithm::kImage, 128, problem.n <= 32 ? 32 : 64};
    if (SharedBytes(problem, image) <= device.shared_bytes && CeilDiv(problem.n, image.tile_n) <= 65535)
      out.push_back(image);
  }
  if (problem.vector) out.push_back({Algorithm::kVector});
  if (problem.streams && device.capability == 90) {
    AddResident(problem, device, out);
    AddTeam(problem, device, out);
  }
  if (device.capability == 90) {
    AddHalo(problem, device, out);
    AddWindows(problem, device, out);
  }
  if (problem.tiled) {
    for (const Tile& t : kWgmmaTiles) AddSplits(problem, device, {Algorithm::kWgmma, t.m, t.n}, out);
    for (const Tile& t : kMmaTiles) AddSplits(problem, device, {Algorithm::kMma, t.m, t.n}, out);
  }
  const std::vector<std::pair<double, ConvConfig>> ranked = Rank(problem, device, out);
  AddApart(problem, device, ranked, out);
  out.push_back({});
  return out;
}

namespace {

constexpr Tile kResidualPairTiles[] = {{64, 32}, {64, 64}, {64, 128}, {128, 128}, {192, 128}};

int64_t KTiles(const ResidualPairProblem& problem) { return KTiles(problem.first) + KTiles(problem.second); }

// How many blocks of Algorithm::kResidualPair share a multiprocessor.
int64_t ResidualPairBlocksAtOnce(const ResidualPairProblem& problem, const ConvConfig& config,
                                 const Device& device) {
  const int registers = config.tile_n > 64 ? 128 : config.tile_n > 32 ? 80 : 64;
  return std::clamp((device.shared_bytes + 5120) / (SharedBytes(problem, config) + 3100), 1,
                    65536 / (registers * (config.tile_m * 2 + 32)));
}

void AddResidualPairs(const ResidualPairProblem& problem, const Device& device,
                      std::vector<ConvConfig>& out) {
  const auto loads_and_rounds = [](const GemmProblem& each) { return each.boxes && each.requantizes; };
  const bool fits = loads_and_rounds(problem.first) && loads_and_rounds(problem.second) &&
                    problem.second.residual && !problem.first.residual && problem.second.m > 0 &&
                    problem.first.m == problem.second.m && problem.first.n == problem.second.n;
  if (!fits || device.capability != 90) return;
  for (const Tile& tile : kResidualPairTiles) {
    if (CeilDiv(problem.second.n, tile.n) > 65535) continue;
    for (const bool keeps : {false, true}) {
      for (const int stages : {3, 4, kMaxResidualPairStages}) {
        ConvConfig config{Algorithm::kResidualPair, tile.m, tile.n, stages};
        config.keeps_weights = keeps;
        if (SharedBytes(problem, config) > device.shared_bytes) continue;
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
  const int64_t most = std::max<int64_t>(
      1, ResidualPairBlocksAtOnce(problem, config, device) * device.multiprocessors / columns);
  return static_cast<int>(CeilDiv(tiles, CeilDiv(tiles, most)));
}

// Fitted as those of single convolutions, to the pairs of ResNet-50 and ResNet-18.
double EstimateMicroseconds(const ResidualPairProblem& problem, const ConvConfig& config,
                            const Device& device) {
  if (config.algorithm == Algorithm::kSeparate) {
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

std::vector<ConvConfig> RankConfigs(const ResidualPairProblem& problem, const Device& device) {
  std::vector<ConvConfig> out;
  AddResidualPairs(problem, device, out);
  out.push_back({Algorithm::kSeparate});
  static_cast<void>(Rank(problem, device, out));
  return out;
}

}  // namespace lowbit::cuda
