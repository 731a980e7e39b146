#include "kernels/cuda/conv/bits.h"

#include <algorithm>
#include <vector>

#include "kernels/cuda/conv/conv_row.h"
#include "kernels/cuda/conv/tiles.h"
#include "kernels/cuda/conv/weight_rows.h"

namespace lowbit::cuda {
namespace {

constexpr int64_t kRows = 128;  // of a plane are a multiple of these: whole tiles

int64_t Steps(const ConvGeometry& g) { return CeilDiv(g.K(), kBitStep); }
int64_t PlaneRows(const ConvGeometry& g) { return RoundUp(g.out_channels, kRows); }
int64_t OnesOffset(const ConvGeometry& g, const WeightBits& bits) {
  return Steps(g) * bits.planes * PlaneRows(g) * kBitRowBytes;
}

// Products of bits take an eighth of the time of those of bytes. A unit of K is wholly codes.
bool Fits(const ConvGeometry& g, const OperandType& x, const WeightBits& bits) {
  return x.encoding == Encoding::kUnsigned && x.bits <= 4 && bits.planes > 0 && g.group == 1 &&
         !g.transposed && bits.planes * BitsOfInstance(bits.planes, x.bits) < 8 && g.in_channels % 16 == 0 &&
         g.K() % kBitUnit == 0;
}

// GPUs behind sm_90 count no bits, those before sm_80 bits that differ.
bool CountsBits(const Device& device) { return device.capability >= 80 && device.capability <= 90; }

bool Applies(const ConvGeometry& g, const OperandType& x, const WeightBits& bits, const Device& device) {
  return CountsBits(device) && Fits(g, x, bits);
}

// [step][plane][rows in eights][half of k][8][16], then the rows of ones of each step.
int64_t WeightBytes(const ConvGeometry& g, const WeightBits& bits) {
  return OnesOffset(g, bits) + Steps(g) * kOnesRows * kBitRowBytes;
}

// Where the bits of the first row of B lie: byte and mask of each of `k` along K, steps being so far apart.
struct BitPlace {
  int64_t at;
  uint8_t mask;
};
std::vector<BitPlace> BitPlaces(int64_t k, int64_t step_bytes) {
  std::vector<BitPlace> places;
  for (int64_t i = 0; i < k; ++i) {
    const int64_t unit = i % kBitStep / kBitUnit;
    const int bit = BitOfChannel(static_cast<int>(i % kBitUnit));
    places.push_back({i / kBitStep * step_bytes + unit / 4 * 128 + unit % 4 * 4 + bit / 8,
                      static_cast<uint8_t>(1 << bit % 8)});
  }
  return places;
}
// From the first row of B to another.
int64_t RowOffset(int64_t row) { return row / 8 * 256 + row % 8 * 16; }

void PackBits(const ConvGeometry& g, const Int8Weights& w, const WeightBits& bits, uint8_t* out) {
  const int64_t k = g.K(), plane_bytes = PlaneRows(g) * kBitRowBytes;
  const std::vector<BitPlace> places = BitPlaces(k, bits.planes * plane_bytes);
  for (int64_t c = 0; c < g.out_channels; ++c) {
    const int8_t* const values = w.values.data() + c * k;
    uint8_t* const row = out + RowOffset(InterleavedRow(static_cast<int>(c)));
    for (int64_t i = 0; i < k; ++i) {
      const int value = (values[i] - bits.lowest) >> bits.shift;
      const auto& [at, mask] = places[static_cast<size_t>(i)];
      if ((value & 1) != 0) row[at] |= mask;
      if ((value & 2) != 0) row[at + plane_bytes] |= mask;
    }
  }
  static_assert(kMostPlanes == 2);
  uint8_t* const ones = out + OnesOffset(g, bits);
  const std::vector<BitPlace> of_ones = BitPlaces(k, kOnesRows * kBitRowBytes);
  for (int64_t row = 0; row < 8; ++row) {  // all that a thread may have in its first two columns
    for (const auto& [at, mask] : of_ones) ones[at + RowOffset(row)] |= mask;
  }
}

constexpr const char* kNoFewBits =
    "signed codes, as many products of bits as of bytes, or codes along K that are no multiple of 32";

std::string Refuse(const ConvProblem& problem, const Device& device) {
  if (!Fits(problem.geometry, problem.x, problem.w_bits)) return kNoFewBits;
  if (std::string reason = RefuseLine(problem, device); !reason.empty()) return reason;
  if (!problem.floats) return "sums that are rounded as integers";
  const HaloLine line = LineOf(problem);
  return Steps(problem.geometry) > kMaxHaloWeights ||
                 problem.geometry.Taps() * line.slabs > 2 * kMaxHaloWeights
             ? "weights of more than 40 steps along K"
             : "";
}

int Bits(const ConvProblem& problem) { return BitsOfInstance(problem.w_bits.planes, problem.x.bits); }

BitOperands BitsOf(const ConvProblem& problem) {
  return {problem.w_bits.planes, Bits(problem), static_cast<int>(PlaneRows(problem.geometry)),
          problem.w_bits.shift, problem.w_bits.lowest};
}

int64_t SlotBytes(const ConvProblem& problem, const ConvConfig& config) {
  const HaloLine line = LineOf(problem);
  return int64_t{line.slabs} * line.PlaneBytes(config.tile_m);
}

int SharedBytesOf(const ConvProblem& problem, const ConvConfig& config) {
  const int64_t bytes = 1024 + Steps(problem.geometry) * BitStepBytes(config.tile_n, problem.w_bits.planes) +
                        config.stages * SlotBytes(problem, config) + config.tile_m * (config.tile_n + 16);
  return static_cast<int>(std::min(bytes, kMaxBytes));
}

// How many blocks share a multiprocessor.
int BlocksAtOnce(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  const int threads = config.tile_m * 2 + 32;
  const int most_threads = MaxBitTiles(config.tile_n, problem.w_bits.planes, Bits(problem)) * 128 + 32;
  const int by_registers = most_threads / threads;
  const int by_shared = (device.shared_bytes + 5120) / (SharedBytesOf(problem, config) + 3100);
  return std::max(1, std::min(by_registers, by_shared));
}

int Blocks(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  return PatchBlocks(problem, config, BlocksAtOnce(problem, config, device), device);
}

void AddCandidates(const ConvProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  constexpr int kWidths[] = {64, 128};
  AddPatchConfigs(
      problem,
      {.row = &kBitsRow,
       .widths = kWidths,
       .most_tiles = [&](int n) { return MaxBitTiles(n, problem.w_bits.planes, Bits(problem)); },
       .shared_bytes = [&](const ConvConfig& config) { return SharedBytesOf(problem, config); },
       .at_once = [&](const ConvConfig& config) { return BlocksAtOnce(problem, config, device); }},
      device, out);
}

// That of halo, but for the products: a warpgroup reads 16 KB of pixels a step, 128 bytes a clock, while the
// products of a plane take half a clock for each column. Not fitted to measurements yet.
double Microseconds(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  const HaloLine line = LineOf(problem);
  const int planes = problem.w_bits.planes, bits = Bits(problem);
  const int64_t blocks = Blocks(problem, config, device), patch_tiles = config.tile_m / 64,
                each = CeilDiv(line.tiles, blocks), columns = CeilDiv(problem.n, config.tile_n);
  const double at_once = static_cast<double>(CeilDiv(blocks * columns, device.multiprocessors));
  const double steps = static_cast<double>(Steps(problem.geometry)), tile_n = config.tile_n;
  const double products = bits * (planes * tile_n + kOnesRows) / 2;
  const double start = 1860 + at_once * (0.00177 * steps * BitStepBytes(config.tile_n, planes) +
                                         static_cast<double>(SlotBytes(problem, config)) / 88.9);
  const double rounds =
      static_cast<double>(CeilDiv(each, patch_tiles)) * (1590 + 2.4 * steps * (96 + products));
  const double tile =
      165 + 5 * tile_n + 1.2 * steps * std::max(128.0, products) + (problem.residual ? 1.72 * tile_n : 0);
  const double work = at_once * static_cast<double>(each) * tile;
  return (EstimateBusy(blocks * columns, device) + start + std::max(rounds, work)) / kClocksPerMicrosecond;
}

ConvLauncher Launcher(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  const ConvGeometry& g = problem.geometry;
  BitsParams bits = {HaloParamsOf(problem, config, false), BitsOf(problem)};
  bits.k_tiles = static_cast<int>(Steps(g));
  bits.staging_offset = SharedBytesOf(problem, config) - 1024 - config.tile_m * (config.tile_n + 16);
  bits.shares = ShareTiles(bits.tiles, Blocks(problem, config, device));
  return LauncherOf(bits, config,
                    [ones = OnesOffset(g, problem.w_bits)](BitsParams p, const ConvConfig& of,
                                                           const LaunchOptions& options) {
                      p.ones = p.weights + ones;
                      return LaunchBits(p, of, options);
                    });
}

std::string RefuseMma(const ConvProblem& problem, const Device& device) {
  if (!CountsBits(device)) return "needs sm_80 to sm_90";
  if (!problem.tiled || problem.repacks) return "transposed, bipolar under padding, or sizes beyond 31 bits";
  if (!Fits(problem.geometry, problem.x, problem.w_bits)) return kNoFewBits;
  return problem.zero >= 0 && problem.zero < 1 << problem.x.bits ? "" : "a zero point that is no code";
}

// Fewer tiles along K than stages take no more.
int MmaTileBytes(const ConvProblem& problem, const ConvConfig& config) {
  return config.stages * (config.tile_m * kTileK + problem.w_bits.planes * config.tile_n * kBitRowBytes / 2);
}

// As FinishTile has it; see tiles.cc.
int MmaSharedBytes(const ConvProblem& problem, const ConvConfig& config) {
  const int sums = config.tile_m * (config.tile_n + 8) * 4, tiles = MmaTileBytes(problem, config);
  if (config.splits > 1) return tiles + (config.split == Split::kCluster ? sums : 0);
  const int finish = problem.requantizes ? config.tile_m * (config.tile_n + 16) : sums;
  return problem.requantizes && problem.residual ? tiles + finish : std::max(tiles, finish);
}

// The tiles of mma that there are for bits, in all its splits.
void AddMmaCandidates(const ConvProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  std::vector<ConvConfig> of_bytes;
  kMmaRow.add_candidates(problem, device, of_bytes);
  for (ConvConfig config : of_bytes) {
    config.kernel = &kBitsMmaRow;
    const bool is_tile = config.tile_m >= 64 && config.tile_n == kBitMmaColumns;
    if (is_tile && MmaSharedBytes(problem, config) <= device.shared_bytes) out.push_back(config);
  }
}

// No GPU that it is made for was at hand. Of what mma takes for bytes, fetching codes and rounding stay, some two
// fifths; products of bits take an eighth.
double MmaMicroseconds(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  ConvConfig of_bytes = config;
  of_bytes.kernel = &kMmaRow;
  const double products = problem.w_bits.planes * Bits(problem) / 8.0;
  return kMmaRow.microseconds(problem, of_bytes, device) * (0.4 + 0.6 * products);
}

ConvLauncher MmaLauncher(const ConvProblem& problem, const ConvConfig& config, const Device&) {
  BitTileParams p = {GatherParamsOf(problem, config), BitsOf(problem)};
  p.exchange_offset = config.splits > 1 ? MmaTileBytes(problem, config) : 0;
  p.staging_offset = problem.residual ? MmaTileBytes(problem, config) : 0;
  return LauncherOf(p, config, LaunchBitsMma);
}

}  // namespace

const WeightLayout kBitWeights = {Applies, WeightBytes, PackBits};

const ConvRow kBitsRow = {
    {"bits", "sm_90a", "stride 1, 1 to 2 bits of weights by 1 to 4 of codes: population counts on wgmma"},
    {.refuse = Refuse,
     .add_candidates = AddCandidates,
     .shared_bytes = SharedBytesOf,
     .microseconds = Microseconds,
     .launcher = Launcher,
     .weights = &kBitWeights,
     .traits = {.takes_floats = true}}};

const ConvRow kBitsMmaRow = {
    {"mma_bits", "sm_80",
     "1 to 2 bits of weights by 1 to 4 of codes, any stride: population counts on mma.sync"},
    {.refuse = RefuseMma,
     .add_candidates = AddMmaCandidates,
     .shared_bytes = MmaSharedBytes,
     .microseconds = MmaMicroseconds,
     .launcher = MmaLauncher,
     .weights = &kBitWeights,
     .traits = {.takes_floats = true, .has_passes = true}}};

}  // namespace lowbit::cuda
