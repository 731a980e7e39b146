#include "kernels/cuda/heuristic.h"

#include <algorithm>
#include <utility>

namespace lowbit::cuda {
namespace {

constexpr int kMmaStages = 3, kMaxStages = 8;

struct Tile {
  int m, n;
};
constexpr Tile kMmaTiles[] = {{32, 64}, {64, 32}, {64, 64}, {128, 64}, {128, 128}};
constexpr Tile kWgmmaTiles[] = {{64, 32}, {64, 64}, {64, 128}, {128, 64}, {128, 128}, {128, 256}};

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t KTiles(const GemmProblem& problem) { return CeilDiv(problem.k, kTileK); }

bool Fits(const GemmProblem& problem, const ConvConfig& config, const Device& device) {
  if (SharedBytes(problem, config) > device.shared_bytes) return false;
  if (CeilDiv(problem.n, config.tile_n) * problem.groups > 65535) return false;
  if (config.algorithm == Algorithm::kMma && !problem.vector16)
    return config.tile_m == 64 && config.tile_n == 64;
  return config.algorithm != Algorithm::kWgmma || (device.capability == 90 && problem.vector16);
}

// Adds `config` with every useful number of splits.
void AddSplits(const GemmProblem& problem, const Device& device, ConvConfig config,
               std::vector<ConvConfig>& out) {
  const int64_t blocks =
      CeilDiv(problem.m, config.tile_m) * CeilDiv(problem.n, config.tile_n) * problem.groups;
  for (int splits = 1; splits <= 16 && splits <= KTiles(problem); splits *= 2) {
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
      for (const bool producers : {false, true}) {
        // Without producers all tiles are in flight at once; with them two tiles are too few to gain.
        if (producers ? !wgmma || per_split < 3 : wgmma && s < per_split) continue;
        config.producers = producers;
        for (config.multicast = 1; config.multicast <= 2; ++config.multicast) {
          const bool pairs = wgmma && splits == 1 && problem.m > config.tile_m;
          if (config.multicast == 1 || pairs) {
            if (Fits(problem, config, device)) out.push_back(config);
          }
        }
      }
      config.multicast = 1;
    }
  }
}

}  // namespace

int TileBytes(const ConvConfig& config) { return (config.tile_m + config.tile_n) * kTileK * config.stages; }

// As FinishTile has it.
int SharedBytes(const GemmProblem& problem, const ConvConfig& config) {
  if (config.algorithm == Algorithm::kPlain) return 0;
  const int alignment = config.algorithm == Algorithm::kWgmma ? 1024 : 0;
  const int sums = config.tile_m * (config.tile_n + 8) * 4;
  if (config.splits > 1) {
    return alignment + TileBytes(config) + (config.split == Split::kCluster ? sums : 0);
  }
  const int finish = problem.requantizes ? config.tile_m * (config.tile_n + 16) : sums;
  return alignment + std::max(TileBytes(config), finish);
}

double EstimateMicroseconds(const GemmProblem& problem, const ConvConfig& config, const Device& device) {
  const double gigahertz = 1.7;
  const double sms = device.multiprocessors;
  if (config.algorithm == Algorithm::kPlain) {
    const double products = static_cast<double>(problem.m * problem.n * problem.groups) * problem.k;
    return 3.0 + products / (sms * 64 * gigahertz * 1e3);
  }
  const bool wgmma = config.algorithm == Algorithm::kWgmma;
  const double blocks = static_cast<double>(CeilDiv(problem.m, config.tile_m) *
                                            CeilDiv(problem.n, config.tile_n) * problem.groups) *
                        config.splits;
  const double k_tiles = static_cast<double>(CeilDiv(KTiles(problem), config.splits));
  const int threads = wgmma ? config.tile_m * 2 : (config.tile_m * config.tile_n >= 8192 ? 256 : 128);
  const double resident = std::clamp(
      std::min(device.shared_bytes / std::max(1, SharedBytes(problem, config)), 1024 / threads), 1, 16);
  const double per_sm = static_cast<double>(CeilDiv(static_cast<int64_t>(blocks), device.multiprocessors));
  // Clocks. Rates of the units, and of the L2 cache as one multiprocessor sees it when all are reading.
  const double multiply =
      config.tile_m * config.tile_n * 256.0 / (wgmma ? (config.tile_n < 64 ? 5460 : 8190) : 4500);
  const double load = (config.tile_m + config.tile_n / config.multicast) * 128.0 / 32;
  const double finish = config.tile_m * config.tile_n / 24.0;
  const double start = 1000;
  const double one_tile = std::max(multiply, 160.0);
  const double waves =
      static_cast<double>(CeilDiv(static_cast<int64_t>(per_sm), static_cast<int64_t>(resident)));
  const double latency = waves * (start + k_tiles * one_tile + 300);
  const double throughput = start + per_sm * (k_tiles * std::max(multiply, load) + finish);
  double clocks = std::max(latency, throughput);
  if (config.multicast > 1) clocks += 300;
  if (config.splits > 1) clocks += config.split == Split::kCluster ? 500 + 60 * config.splits : 2500;
  return 0.9 + clocks / (gigahertz * 1e3);
}

std::vector<ConvConfig> RankConfigs(const GemmProblem& problem, const Device& device) {
  std::vector<ConvConfig> out;
  if (problem.tiled) {
    for (const Tile& t : kWgmmaTiles) AddSplits(problem, device, {Algorithm::kWgmma, t.m, t.n}, out);
    for (const Tile& t : kMmaTiles) AddSplits(problem, device, {Algorithm::kMma, t.m, t.n}, out);
  }
  std::vector<std::pair<double, ConvConfig>> ranked;
  for (const ConvConfig& c : out) ranked.emplace_back(EstimateMicroseconds(problem, c, device), c);
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (size_t i = 0; i < ranked.size(); ++i) out[i] = ranked[i].second;
  out.push_back({});
  return out;
}

}  // namespace lowbit::cuda
