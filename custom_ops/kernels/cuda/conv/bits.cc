#include "kernels/cuda/conv/bits.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/epilogue.h"
#include "kernels/cuda/conv/conv_row.h"
#include "kernels/cuda/conv/weight_rows.h"

namespace lowbit::cuda {
namespace {

constexpr int64_t kRows = 128;              // there is a multiple of these: whole tiles
constexpr int64_t kBlockBytes = 223 << 10;  // of dynamic shared memory, on sm_90 (Device::shared_bytes)

int64_t Words(const ConvGeometry& g) { return CeilDiv(g.in_channels, kBitWord); }
int64_t Steps(const ConvGeometry& g) { return CeilDiv(g.Taps() * Words(g), 2); }
// Of planes, of each step.
int Products(const ConvProblem& problem) { return problem.x.bits * problem.w_bits.fit; }
int64_t Rows(const ConvGeometry& g) { return RoundUp(g.out_channels, kRows); }
int64_t OnesOffset(const ConvGeometry& g, const WeightBits& bits) {
  return Steps(g) * bits.fit * Rows(g) * kBitRowBytes;
}

// Products of bits take an eighth of the time of those of bytes; there are four of 2 by 2 bits, which pay on planes alone.
bool Fits(const ConvGeometry& g, const OperandType& x, const WeightBits& bits) {
  return x.encoding == Encoding::kUnsigned && x.bits <= 2 && bits.fit >= 1 && bits.fit <= x.bits &&
         g.group == 1 && !g.transposed && g.in_channels % 64 == 0 && g.stride_h * g.stride_w <= kMaxPhases;
}
bool HasStride(const ConvGeometry& g) { return g.stride_h != 1 || g.stride_w != 1; }
// Those of all taps, in order.
std::vector<TapPhase> Phases(const ConvGeometry& g) {
  std::vector<TapPhase> phases;
  for (int64_t tap = 0; tap < g.Taps(); ++tap) phases.push_back(PhaseOfTap(g, tap));
  std::sort(phases.begin(), phases.end());
  phases.erase(std::unique(phases.begin(), phases.end()), phases.end());
  return phases;
}
// Taps as they follow each other along K, those of a phase in a row: the second word of a step lies behind the first.
std::vector<int64_t> TapsInOrder(const ConvGeometry& g) {
  std::vector<int64_t> taps(static_cast<size_t>(g.Taps()));
  std::iota(taps.begin(), taps.end(), int64_t{0});
  std::stable_sort(taps.begin(), taps.end(),
                   [&](int64_t a, int64_t b) { return PhaseOfTap(g, a) < PhaseOfTap(g, b); });
  return taps;
}

bool Applies(const ConvGeometry& g, const OperandType& x, const WeightBits& bits, const Device& device) {
  return device.capability == 90 && Fits(g, x, bits) && Steps(g) <= kMaxHaloWeights;
}

// [step][plane][rows in eights][word][8][16], then the rows of ones of each step and plane, then what lies above and below
// an image.
int64_t WeightBytes(const ConvGeometry& g, const WeightBits& bits) {
  return OnesOffset(g, bits) + Steps(g) * bits.fit * kOnesRows * kBitRowBytes + kMaxPitch * kBitWordBytes;
}

// Where the bits of the first row of B lie: byte and mask of each along K, steps being so far apart. The words of
// channels come one after the other, each with all taps (TapsInOrder).
struct BitPlace {
  int64_t at;
  uint8_t mask;
};
std::vector<BitPlace> BitPlaces(const ConvGeometry& g, int64_t step_bytes) {
  const std::vector<int64_t> taps = TapsInOrder(g);
  std::vector<BitPlace> places;
  for (int64_t tap = 0; tap < g.Taps(); ++tap) {
    const int64_t in_order = std::find(taps.begin(), taps.end(), tap) - taps.begin();
    for (int64_t channel = 0; channel < g.in_channels; ++channel) {
      const int64_t word = channel / kBitWord * g.Taps() + in_order;
      const int bit = BitOfChannel(static_cast<int>(channel % kBitWord));
      places.push_back({word / 2 * step_bytes + word % 2 * 8 * kBitWordBytes + bit / 8,
                        static_cast<uint8_t>(1 << bit % 8)});
    }
  }
  return places;
}
// From the first row of B to another.
int64_t RowOffset(int64_t row) { return row / 8 * 8 * kBitRowBytes + row % 8 * kBitWordBytes; }

void PackBits(const ConvGeometry& g, const Int8Weights& w, const WeightBits& bits, uint8_t* out) {
  const int64_t k = g.K(), plane_bytes = Rows(g) * kBitRowBytes;
  const std::vector<BitPlace> places = BitPlaces(g, bits.fit * plane_bytes);
  for (int64_t c = 0; c < g.out_channels; ++c) {
    const int8_t* const values = w.values.data() + c * k;
    uint8_t* const row = out + RowOffset(InterleavedRow(static_cast<int>(c)));
    for (int64_t i = 0; i < k; ++i) {
      const auto& [at, mask] = places[static_cast<size_t>(i)];
      const int value = (values[i] - bits.lowest) >> bits.shift;
      for (int plane = 0; plane < bits.fit; ++plane) {
        if ((value >> plane & 1) != 0) row[at + plane * plane_bytes] |= mask;
      }
    }
  }
  // Of the first plane, which counts each bit of codes once.
  uint8_t* const ones = out + OnesOffset(g, bits);
  const std::vector<BitPlace> of_ones = BitPlaces(g, bits.fit * kOnesRows * kBitRowBytes);
  for (int64_t row = 0; row < 8; ++row) {  // all that a thread may have in its first two columns
    for (const auto& [at, mask] : of_ones) ones[at + RowOffset(row)] |= mask;
  }
}

constexpr const char* kNoFewBits =
    "signed codes, weights or codes of more bits, large strides, or channels that are no multiple of 64";

// Of one tap bytes are read once, and are no less to read than by kernels of bytes: cut by every block they were 1.1 to
// 1.5 times as slow. A kernel of its own makes planes of them, which all blocks read.
bool Packs(const ConvProblem& problem) { return problem.planes.x == 0 && problem.geometry.Taps() == 1; }
// The problem as a kernel of bits reads it.
ConvProblem AsRead(ConvProblem problem, bool packs) {
  if (packs) problem.planes.x = problem.x.bits;
  return problem;
}

std::string Refuse(const ConvProblem& problem, const Device& device) {
  if (problem.planes.x == 0 && problem.w_bits.fit > 1) return "2 bits of weights by codes that come as bytes";
  if (Packs(problem) && !problem.IsFlat()) return "a padded window of one tap or a stride, of bytes";
  if (Packs(problem) && problem.has_places) return "codes that other tensors get, too";
  if (Packs(problem)) return Refuse(AsRead(problem, true), device);
  if (!Fits(problem.geometry, problem.x, problem.w_bits)) return kNoFewBits;
  // Of patches of planes no instance has them.
  if (problem.planes.x > 0 && problem.residual && problem.is_mapped)
    return "residuals that are added to what a table has, and planes";
  if (std::string reason = RefuseLine(problem, device); !reason.empty()) return reason;
  if (!problem.floats) return "sums that are rounded as integers";
  const HaloLine line = LineOf(problem);
  return Steps(problem.geometry) > kMaxHaloWeights ||
                 problem.geometry.Taps() * line.slabs > 2 * kMaxHaloWeights
             ? "weights of more than 40 steps along K"
             : "";
}

int64_t Places(const HaloLine& line, const ConvConfig& config) {
  return int64_t{line.Rows(config.tile_m)} * line.pitch;
}

// Of a plane of a patch.
int64_t PatchWords(const ConvGeometry& g) { return Words(g) * static_cast<int64_t>(Phases(g).size()); }

// Whether pixels come one by one.
bool Gathers(const ConvProblem& problem) {
  return HasStride(problem.geometry) || (!problem.IsLine() && problem.shape.in_w <= kGatheredPixels);
}

// Behind weights, slots of bytes, and the planes of as many patches as there are stages.
int64_t StagingOffset(const ConvProblem& problem, const ConvConfig& config, int slots) {
  const HaloLine line = LineOf(problem);
  return Steps(problem.geometry) * problem.w_bits.fit * BitStepBytes(config.tile_n) +
         int64_t{slots} * line.PlaneBytes(config.tile_m) +
         config.stages * problem.x.bits * PatchWords(problem.geometry) * Places(line, config) * kBitWordBytes;
}
int64_t BytesWith(const ConvProblem& problem, const ConvConfig& config, int slots) {
  return 1024 + StagingOffset(problem, config, slots) + config.tile_m * (config.tile_n + 16);
}

// As many as are of use, or two where shared memory has no room for them.
int Slots(const ConvProblem& problem, const ConvConfig& config) {
  if (problem.planes.x > 0) return 0;
  const int slots = std::min(kMaxBitSlots, LineOf(problem).slabs * config.stages);
  return BytesWith(problem, config, slots) <= kBlockBytes ? slots : std::min(slots, 2);
}

int SharedBytesOf(const ConvProblem& given, const ConvConfig& config) {
  const ConvProblem problem = AsRead(given, config.packs);
  return static_cast<int>(std::min(BytesWith(problem, config, Slots(problem, config)), kMaxBytes));
}

// MakesBits.
bool MakesBits(const ConvProblem& problem) {
  const TensorPlanes& planes = problem.planes;
  return !problem.is_mapped && !problem.has_places && problem.codes_on_lines > 0 &&
         problem.codes_on_lines <= 1 << problem.x.bits && planes.x > 0 && planes.y > 0 &&
         planes.y <= problem.x.bits &&
         (!problem.residual || (planes.added > 0 && planes.added <= problem.x.bits));
}
int MostTiles(const ConvProblem& problem, int tile_n) { return MaxBitTiles(tile_n, MakesBits(problem)); }
// Of as many threads as an instance may have.
int ByRegisters(const ConvProblem& problem, const ConvConfig& config) {
  return (MostTiles(problem, config.tile_n) * 128 + 32) / (config.tile_m * 2 + 32);
}

constexpr int kWidths[] = {64, 128};
constexpr PatchFamily kPatches = {&kBitsRow, kWidths, MostTiles, ByRegisters};

void AddCandidates(const ConvProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  const size_t first = out.size();
  kPatches.AddCandidates(AsRead(problem, Packs(problem)), device, out);
  for (size_t i = first; i < out.size(); ++i) out[i].packs = Packs(problem);
}

// By one warp.
double GatherClocks(const ConvProblem& problem, const ConvConfig& config) {
  constexpr double kTurn =
      120;  // derived from rows of 7 to 28 pixels on an H100, which then took twice as many instructions
  const HaloLine line = LineOf(problem);
  const int64_t lines = problem.x.bits * PatchWords(problem.geometry) * line.Rows(config.tile_m),
                in_turn = lines * CeilDiv(line.w.size, kGatheredPixels);
  return kTurn * static_cast<double>(CeilDiv(in_turn, 32 / kGatheredPixels));
}

// Fitted to 139 times on an H100, 7 % off in the mean; of planes, to 200 of ResNet-50's layers at batch 16, where codes are
// made as bits to 490 at batch 16 and 128, 8 to 10 % off.
double Microseconds(const ConvProblem& given, const ConvConfig& config, const Device& device) {
  const ConvProblem problem = AsRead(given, config.packs);
  const HaloLine line = LineOf(problem);
  const int64_t blocks = kPatches.Blocks(problem, config, device), patch_tiles = config.tile_m / 64,
                each = CeilDiv(line.tiles, blocks), columns = CeilDiv(problem.n, config.tile_n);
  const double at_once = static_cast<double>(CeilDiv(blocks * columns, device.multiprocessors));
  const double steps = static_cast<double>(Steps(problem.geometry)), tile_n = config.tile_n,
               tiles = static_cast<double>(patch_tiles);
  const double products = 0.49 * steps * Products(problem) * (tile_n + kOnesRows) / 2;
  const bool of_planes = problem.planes.x > 0;
  // To layers whose codes are made as bits; what else is like them was not measured since.
  const bool is_refitted = of_planes || problem.x.bits > 1;
  const double slabs = of_planes ? 1 : line.slabs,
               patch = of_planes ? static_cast<double>(problem.x.bits * PatchWords(problem.geometry) *
                                                       Places(line, config) * kBitWordBytes)
                                 : slabs * line.PlaneBytes(config.tile_m),
               cut = of_planes ? 0 : 0.012 * patch / tiles;
  // The weights and the first patch; then every patch's round of latencies, or what all tiles together take.
  const double of_weights = steps * problem.w_bits.fit * BitStepBytes(config.tile_n);
  const double start = 1190 + at_once * ((is_refitted ? 0.04 : 0.02) * of_weights + 0.022 * patch);
  // By a warpgroup's 64 x 64 outputs, which others of the multiprocessor delay. Planes are added to planes at once, bytes
  // pass through shared memory.
  const double units = tiles * tile_n / 64, x_bits = problem.x.bits;
  const double unit = problem.planes.added > 0 ? 200 * (x_bits - 1)
                      : problem.planes.y > 0   ? 940 * x_bits
                                               : 340 * x_bits;
  const double of_residuals = problem.residual ? units * unit : 0;
  // Each step of a round has other waits than those of its products.
  const double of_steps = is_refitted ? 0.84 * products * tiles : 0, of_second = x_bits - 1;
  const double of_bits =
      1200 + 1500 * of_second + (problem.w_bits.fit == 1 ? 60 : 240) * at_once * units + of_steps;
  const double latency = !of_planes ? 2400 + 700 * of_second + 550.0 * slabs + cut + of_steps
                         : MakesBits(problem)
                             ? of_bits
                             : 1200 + 1500 * of_second + 230 * at_once * units + of_residuals + of_steps;
  // The first patch is gathered by all warps, others by one.
  const double gathers = of_planes && Gathers(problem) ? GatherClocks(problem, config) : 0;
  const double rounds =
      static_cast<double>(CeilDiv(each, patch_tiles)) * std::max(latency + products * tiles, gathers);
  const double work =
      at_once * static_cast<double>(each) * (cut + products + (problem.residual ? 1.72 * tile_n : 0));
  const double estimate =
      (EstimateBusy(blocks * columns, device) + start + gathers / (4 * tiles) + std::max(rounds, work)) /
      kClocksPerMicrosecond;
  if (!config.packs) return estimate;
  // Of large products neither Tensor Cores nor what L2 delivers were a limit to those that the model was fitted to. Not
  // measured: both at their peaks, and what packing is by its bytes.
  constexpr double kBytesOfClock = 3100, kPackedBytes = 2.5e6;  // of L2, of a microsecond
  const double fetched = static_cast<double>(columns * line.tiles) * patch / tiles;
  const double floor =
      std::max(0.5 * steps * Products(problem) * (tile_n + kOnesRows) * at_once * static_cast<double>(each),
               fetched / kBytesOfClock) /
      kClocksPerMicrosecond;
  const double packing = 2 + static_cast<double>(problem.m * problem.channels) / kPackedBytes;
  return std::max(estimate, floor) + packing;
}

// Whether sums become codes whose planes are found from bits (BitsParams::combines), and how: for each code and residual
// what the contract has for them, then each product's part from what those of fewer bits leave.
void FindProducts(BitsParams& p, bool makes_bits) {
  EpilogueParams& e = p.epilogue;
  p.combines = makes_bits;
  p.has_steps = makes_bits && e.steps != nullptr;
  if (!makes_bits) return;
  constexpr float kMagic = 12582912;  // in what lines are added to where there are residuals
  const float in_base = e.has_residual ? kMagic : 0;
  const int lowest = static_cast<int>(e.line_base - in_base),
            count = static_cast<int>(e.line_top - e.line_base) + 1;
  e.line_base += kMagic - in_base;
  if (p.has_steps) {
    e.bias = e.steps;
    e.scale = reinterpret_cast<const float*>(e.last_steps);
  }
  // Steps count codes from the lowest one on; a line has a code's own lowest bits.
  const int first = p.has_steps ? 0 : lowest;
  p.copies = !e.has_residual && lowest % (1 << p.x_bits) == first;
  Epilogue adding;
  adding.inner_scale = e.inner_scale;
  adding.residual_scale = e.residual_scale;
  adding.residual_zero_point = e.residual_zero_point;
  adding.y_scale = e.y_scale;
  adding.y_zero_point = e.y_zero_point;
  adding.y_lo = e.y_lo;
  adding.y_hi = e.y_hi;
  for (int plane = 0; plane < e.plane_count; ++plane) {
    bool has[kBitProducts] = {};
    for (int code = 0; code < count; ++code) {
      for (int residual = 0; residual < (e.has_residual ? 1 << p.added_planes : 1); ++residual) {
        const int sum = e.has_residual ? AddResidualCode(adding, lowest + code, residual) : lowest + code;
        has[((first + code) & ((1 << p.x_bits) - 1)) + 4 * residual] = (sum >> plane & 1) != 0;
      }
    }
    for (int bit = 1; bit < kBitProducts; bit *= 2) {
      for (int i = 0; i < kBitProducts; ++i) {
        if ((i & bit) != 0) has[i] = has[i] != has[i - bit];
      }
    }
    for (int i = 0; i < kBitProducts; ++i) p.products[plane][i] = has[i] ? ~0u : 0u;
  }
}

ConvLauncher Launcher(const ConvProblem& given, const ConvConfig& config, const Device& device) {
  const ConvProblem problem = AsRead(given, config.packs);
  BitsParams bits = BitsParamsOf(problem, config);
  bits.slots = Slots(problem, config);
  bits.staging_offset = static_cast<int>(StagingOffset(problem, config, bits.slots));
  bits.shares = ShareTiles(bits.tiles, kPatches.Blocks(problem, config, device));
  return LauncherOf(bits, config,
                    [problem](BitsParams p, const ConvConfig& of, const LaunchOptions& options) {
                      FindConstants(problem, p);
                      return LaunchBits(p, of, options);
                    });
}

}  // namespace

BitsParams BitsParamsOf(const ConvProblem& problem, const ConvConfig& config, int first_word) {
  const ConvGeometry& g = problem.geometry;
  const HaloLine line = LineOf(problem);
  const std::vector<TapPhase> phases = Phases(g);
  BitsParams bits = {HaloParamsOf(problem, config, true)};
  bits.x_bits = problem.x.bits;
  bits.rows = static_cast<int>(Rows(g));
  bits.w_shift = problem.w_bits.shift;
  bits.w_lowest = problem.w_bits.lowest;
  bits.sum_offset = BitStepsOf(g, problem.x.bits, problem.w_bits).offset();
  bits.w_planes = problem.w_bits.fit;
  bits.own_steps = static_cast<int>(Steps(g));
  bits.k_tiles = bits.own_steps * bits.w_planes;
  bits.words = bits.patch_words = static_cast<int>(PatchWords(g));
  bits.first_word = first_word;
  bits.places = static_cast<int>(Places(line, config));
  bits.added_planes = problem.planes.added;
  const ConvShape& s = problem.shape;
  bits.pixels = static_cast<int>(s.batch * s.in_h * s.in_w);
  bits.columns = static_cast<int>(line.w.size);
  if (Gathers(problem)) {
    bits.phases = static_cast<int>(phases.size());
    for (size_t i = 0; i < phases.size(); ++i) {
      bits.phase_y[i] = static_cast<uint8_t>(phases[i].h);
      bits.phase_x[i] = static_cast<uint8_t>(phases[i].w);
    }
    bits.pad_top = static_cast<int>(line.h.before);
    bits.pad_left = static_cast<int>(line.w.before);
  }
  bits.is_line = problem.IsLine();
  if (bits.is_line) {  // an image of rows of `pitch` pixels
    bits.images = 1;
    bits.in_w = bits.out_w = bits.columns = bits.pitch;
    bits.in_h = bits.out_h = bits.image_rows;
  }
  // The place of each word along K from that of the tile.
  std::vector<int> from;
  for (int64_t word = 0; word < Words(g); ++word) {
    for (const int64_t tap : TapsInOrder(g)) {
      const int64_t phase = std::find(phases.begin(), phases.end(), PhaseOfTap(g, tap)) - phases.begin(),
                    of_patch = first_word + word * static_cast<int64_t>(phases.size()) + phase;
      from.push_back(static_cast<int>(PlaceOfTap(g, line, tap) + of_patch * bits.places));
    }
  }
  if (from.size() % 2 == 1) from.push_back(from.back());  // times weights that are 0
  for (int step = 0; step < bits.own_steps; ++step) {
    const int first = from[static_cast<size_t>(step) * 2], second = from[static_cast<size_t>(step) * 2 + 1];
    bits.step[step] = first | (second - first) << 16;
  }
  return bits;
}

void FindConstants(const ConvProblem& problem, BitsParams& p) {
  p.ones = p.weights + OnesOffset(problem.geometry, problem.w_bits);
  FindProducts(p, MakesBits(problem));
}

BitSteps BitStepsOf(const ConvGeometry& g, int x_bits, const WeightBits& bits) {
  const int64_t most_codes = g.K() * ((1 << x_bits) - 1),
                highest = bits.lowest + ((1 << bits.fit) - 1) * (1 << bits.shift);
  BitSteps steps;
  steps.least = most_codes * std::min<int64_t>(0, bits.lowest);
  steps.most = most_codes * std::max<int64_t>(0, highest);
  if (steps.most - steps.least < 1 << 15) steps.count = (1 << x_bits) - 1;
  return steps;
}

int64_t BitWordsOfPatch(const ConvProblem& problem) { return PatchWords(problem.geometry); }

const WeightLayout kBitWeights = {Applies, WeightBytes, PackBits};

const ConvRow kBitsRow = {
    {"bits", "sm_90a",
     "1 or 2 bits of weights by as many of codes, strides on planes: population counts on wgmma"},
    {.refuse = Refuse,
     .add_candidates = AddCandidates,
     .shared_bytes = SharedBytesOf,
     .microseconds = Microseconds,
     .launcher = Launcher,
     .weights = &kBitWeights,
     .traits = {.takes_floats = true, .reads_planes = true, .adds_planes = true, .stores_planes = true}}};

}  // namespace lowbit::cuda
