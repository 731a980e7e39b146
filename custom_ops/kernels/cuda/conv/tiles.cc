#include "kernels/cuda/conv/tiles.h"

#include <algorithm>
#include <cmath>

#include "kernels/cuda/conv/select.h"
#include "kernels/cuda/left_out.h"

namespace lowbit::cuda {
namespace {

constexpr int kMmaStages = 3;
constexpr Tile kMmaTiles[] = {{32, 64}, {64, 32}, {64, 64}, {128, 64}, {128, 128}};
constexpr Tile kWgmmaTiles[] = {{64, 32}, {64, 64}, {64, 128}, {128, 64}, {128, 128}, {128, 256}, {192, 128}};

constexpr ConvTraits kTraits{.takes_floats = true,
                             .has_passes = true,
                             .may_stand_apart = true,
                             .gathers = true,
                             .stores_planes = true};

bool IsWgmma(const ConvConfig& config) { return config.kernel == &kWgmmaRow; }

std::string RefuseMma(const ConvProblem& problem, const Device&) {
  return problem.tiled ? "" : "transposed, fewer than 16 channels a group, or sizes beyond 31 bits";
}

std::string RefuseWgmma(const ConvProblem& problem, const Device& device) {
  if (device.capability != 90) return "needs sm_90a";
  return problem.vector16 ? RefuseMma(problem, device) : "channels in no runs of 16";
}

int TileBytes(const ConvConfig& config) { return (config.tile_m + config.tile_n) * kTileK * config.stages; }

// As FinishTile has it.
int SharedBytesOf(const ConvProblem& problem, const ConvConfig& config) {
  const int alignment = IsWgmma(config) ? 1024 : 0;
  const int sums = config.tile_m * config.tile_n * 4, tiles = TileBytes(config);
  if (config.splits > 1) return alignment + tiles + (config.split == Split::kCluster ? sums : 0);
  const bool in_registers = problem.requantizes && !problem.has_w_zero;
  const int finish = in_registers ? config.tile_m * (config.tile_n + 16) : sums;
  // Residuals arrive where codes are staged, while tiles are in use.
  return alignment + (in_registers && problem.residual ? tiles + finish : std::max(tiles, finish));
}

// The largest tiles are for many pixels: boxes, whose sums stay in registers, and few channels past the last one.
bool FitsLargest(const ConvProblem& problem, const ConvConfig& config) {
  return config.boxes && SumsOf(problem, config).in_registers &&
         4 * problem.n > 3 * CeilDiv(problem.n, config.tile_n) * config.tile_n;
}

bool Fits(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  if (SharedBytesOf(problem, config) > device.shared_bytes) return false;
  if (CeilDiv(problem.n, config.tile_n) * problem.groups > kMaxColumns) return false;
  if (problem.has_w_zero && config.tile_n > kMostZeroColumns) return false;
  return IsWgmma(config) || problem.vector16 || (config.tile_m == 64 && config.tile_n == 64);
}

// Whether two blocks may fetch pixels for each other. Smaller tiles have less to share than they wait.
bool MayMulticast(const ConvProblem& problem, const ConvConfig& config) {
  return config.boxes && config.splits == 1 && config.tile_m * config.tile_n >= 64 * 128 &&
         CeilDiv(problem.n, config.tile_n) % 2 == 0 && !IsLeftOut("multicast");
}

// Adds `config` with every useful number of splits.
void AddSplits(const ConvProblem& problem, const Device& device, ConvConfig config,
               std::vector<ConvConfig>& out) {
  const int64_t blocks =
      CeilDiv(problem.m, config.tile_m) * CeilDiv(problem.n, config.tile_n) * problem.groups;
  // Clusters of more than 8 blocks are not portable.
  const int most = device.capability <= 90 ? 16 : 8;
  for (int splits = 1; splits <= most && splits <= problem.KTiles(); splits *= 2) {
    // Splitting pays while blocks are fewer than multiprocessors, a little beyond at most.
    if (splits > 1 && blocks * splits > 2 * int64_t{device.multiprocessors}) break;
    config.splits = splits;
    const int per_split = static_cast<int>(CeilDiv(problem.KTiles(), splits));
    const bool wgmma = IsWgmma(config);
    // Where boxes can be fetched, they are: no other way was faster by more than some percent (ResNet-50).
    config.boxes = wgmma && problem.boxes && config.tile_n <= kMostBoxColumns && !IsLeftOut("boxes");
    std::vector<int> stages = {std::min(per_split, wgmma ? 4 : kMmaStages)};
    if (wgmma && per_split > 4) stages.push_back(std::min(per_split, kMaxTileStages));
    // A block more may fit a multiprocessor then, or one of the next kernel start: layers of ResNet-50 at batch 16 took from
    // .87 to 1.13 of their time with four.
    if (config.boxes && per_split > 3) stages.push_back(3);
    for (const int s : stages) {
      config.stages = s;
      config.split = splits == 1 || device.capability >= 90 ? Split::kCluster : Split::kWorkspace;
      // What gathers for wgmma adds nothing to sums at borders.
      if (wgmma && !config.boxes && problem.zero == ConvProblem::kNoCode) continue;
      if (config.tile_m > kMostSplitRows && !FitsLargest(problem, config)) continue;
      for (const bool producers : {false, true}) {
        // Without producers all tiles are in flight at once; with them two tiles are too few to gain.
        if (producers ? !wgmma || per_split < 3 || config.boxes : wgmma && s < per_split && !config.boxes)
          continue;
        config.producers = producers;
        if (!Fits(problem, config, device)) continue;
        out.push_back(config);
        if (!MayMulticast(problem, config)) continue;
        config.multicast = true;
        out.push_back(config);
        config.multicast = false;
      }
    }
  }
}

void AddMma(const ConvProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  for (const Tile& t : kMmaTiles) AddSplits(problem, device, {&kMmaRow, t.m, t.n}, out);
}

void AddWgmma(const ConvProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  for (const Tile& t : kWgmmaTiles) AddSplits(problem, device, {&kWgmmaRow, t.m, t.n}, out);
}

// What the tile kernels cost, in clocks: of mma, and of wgmma by how it fetches pixels. Those of boxes were
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
constexpr TileCosts kMmaCosts{.issue = 7.76,
                              .narrow_rate = 4980,
                              .rate = 4980,
                              .bytes = 105,
                              .latency = 2040,
                              .step = 0,
                              .start = 2230,
                              .first_bytes = 219,
                              .wave = 1.36,
                              .part_of_wave = 0.847,
                              .crowding = 0.579,
                              .round = 0.12,
                              .round_and_add = 0.226,
                              .exchange = 372,
                              .exchanged_output = 0.257,
                              .held = 2030};
constexpr TileCosts kGatherCosts{.issue = 2.3,
                                 .narrow_rate = 2170,
                                 .rate = 17500,
                                 .bytes = 105,
                                 .latency = 1380,
                                 .step = 117,
                                 .start = 1480,
                                 .first_bytes = 219,
                                 .wave = 1.36,
                                 .part_of_wave = 0.847,
                                 .crowding = 0.579,
                                 .round = 0.12,
                                 .round_and_add = 0.226,
                                 .exchange = 372,
                                 .exchanged_output = 0.257,
                                 .held = 2030};
constexpr TileCosts kBoxCosts{.issue = 0,
                              .narrow_rate = 8000,
                              .rate = 17500,
                              .bytes = 111,
                              .latency = 522,
                              .step = 99,
                              .start = 1580,
                              .first_bytes = 539,
                              .wave = 1.22,
                              .part_of_wave = 0.753,
                              .crowding = 0.115,
                              .round = 0.108,
                              .round_and_add = 0.188,
                              .exchange = 177,
                              .exchanged_output = 0.413,
                              .held = 840};

// In clocks.
double Microseconds(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  const bool wgmma = IsWgmma(config);
  const TileCosts& cost = !wgmma ? kMmaCosts : config.boxes ? kBoxCosts : kGatherCosts;
  const double tile_m = config.tile_m, tile_n = config.tile_n, outputs = tile_m * tile_n;
  const int64_t blocks =
      CeilDiv(problem.m, config.tile_m) * CeilDiv(problem.n, config.tile_n) * problem.groups * config.splits;
  // Clusters of more than two blocks that share no multiprocessor leave some over.
  const bool leaves_over = config.apart && config.splits > 2;
  const int64_t per_multiprocessor =
      CeilDiv(blocks, leaves_over ? device.multiprocessors * 7 / 8 : device.multiprocessors);
  const int64_t k_tiles = CeilDiv(problem.KTiles(), config.splits);

  // How many blocks of a multiprocessor run at once, and in how many waves.
  const int producers = config.producers ? 128 : config.boxes ? 32 : 0;
  const int threads = wgmma ? config.tile_m * 2 + producers : (outputs >= 8192 ? 256 : 128);
  const int by_registers = config.tile_n >= 256 ? 1 : outputs >= 16384 ? 2 : 16;
  const int by_shared = (device.shared_bytes + 5120) / (SharedBytesOf(problem, config) + 1500);
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
  const double bytes = (tile_m / (config.multicast ? 2 : 1) + tile_n) * kTileK;
  const double multiply = outputs * 256 / (tile_n < 64 ? cost.narrow_rate : cost.rate);
  double tile = std::max({cost.issue * tile_m, at_once * multiply, at_once * bytes / cost.bytes});
  if (k_tiles > config.stages) tile = std::max(tile, cost.latency / config.stages);
  tile += cost.step;
  if (config.producers) tile += 23;
  // Against its neighbours in ResNet-50 at batch 128 on an H100, where the second-level cache is what limits.
  if (config.tile_m > kMostSplitRows) tile += config.multicast ? 97 : 185;
  // Small blocks that wait for each other are for the tuner to try.
  if (config.multicast && outputs < 128 * 128) tile += 200;
  // Between what three stages gain and what they lose in ResNet-50 at batch 16.
  if (config.boxes && k_tiles > config.stages && config.stages < 4) tile += 60;
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
  if (config.tile_n >= 256) clocks += 184;
  // What it keeps from starting early, or from being started early: its place on the multiprocessors that it
  // has, and those; a warpgroup more to get going.
  const int held = std::max(SharedBytesOf(problem, config), config.apart ? ApartBytes(device) : 0);
  clocks += EstimateBusy(blocks, device) + cost.held * std::min(1.0, at_once * held / device.shared_bytes);
  if (config.producers) clocks += 256;
  return clocks / kClocksPerMicrosecond;
}

}  // namespace

GatherParams GatherParamsOf(const ConvProblem& problem, const ConvConfig& config) {
  const ConvGeometry& g = problem.geometry;
  const ConvShape& s = problem.shape;
  GatherParams p = {{BoxesOf(problem, config), SumsOf(problem, config)}};
  // Unsplit sums may overwrite the tiles.
  p.exchange_offset = config.splits > 1 ? TileBytes(config) : 0;
  p.staging_offset = problem.residual ? TileBytes(config) : 0;
  p.sharing = config.multicast ? 2 : 1;
  // Taps that are never inside may overflow; their offsets are never used.
  p.tap_step = static_cast<int>(g.dilation_w * p.pixel_bytes - problem.channels);
  p.tap_row_step = static_cast<int>((g.dilation_h * s.in_w - g.kernel_w * g.dilation_w) * p.pixel_bytes);
  p.tap_row_position = static_cast<int>(g.dilation_h * 65536 - g.kernel_w * g.dilation_w);
  p.fill = problem.Fill();
  p.last_position = (p.in_h - 1) * 65536 + p.in_w - 1;
  p.all_inside = g.pad_top == 0 && g.pad_left == 0 &&
                 (s.out_h - 1) * g.stride_h + (g.kernel_h - 1) * g.dilation_h < s.in_h &&
                 (s.out_w - 1) * g.stride_w + (g.kernel_w - 1) * g.dilation_w < s.in_w;
  return p;
}

namespace {

ConvLauncher MmaLauncher(const ConvProblem& problem, const ConvConfig& config, const Device&) {
  return LauncherOf(GatherParamsOf(problem, config), config,
                    [vector16 = problem.vector16](const GatherParams& p, const ConvConfig& of,
                                                  const LaunchOptions& options) {
                      return LaunchMma(p, of, vector16, options);
                    });
}

ConvLauncher WgmmaLauncher(const ConvProblem& problem, const ConvConfig& config, const Device&) {
  return LauncherOf(GatherParamsOf(problem, config), config, LaunchWgmma);
}

}  // namespace

const ConvRow kMmaRow = {{"mma", "sm_75", "any layer but transposed ones: implicit GEMM on mma.sync"},
                         {.refuse = RefuseMma,
                          .add_candidates = AddMma,
                          .shared_bytes = SharedBytesOf,
                          .microseconds = Microseconds,
                          .launcher = MmaLauncher,
                          .traits = kTraits}};
const ConvRow kWgmmaRow = {
    {"wgmma", "sm_90a", "any layer of 16 channels and more: implicit GEMM on wgmma from shared memory"},
    {.refuse = RefuseWgmma,
     .add_candidates = AddWgmma,
     .shared_bytes = SharedBytesOf,
     .microseconds = Microseconds,
     .launcher = WgmmaLauncher,
     .traits = kTraits}};

}  // namespace lowbit::cuda
