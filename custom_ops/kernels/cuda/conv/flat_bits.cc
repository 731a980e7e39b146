#include "kernels/cuda/conv/flat_bits.h"

#include <algorithm>

#include "kernels/cuda/conv/conv_row.h"
#include "kernels/cuda/conv/weight_rows.h"

namespace lowbit::cuda {
namespace {

constexpr int kWidths[] = {16, 32, 64};
constexpr int64_t kRows = 64;       // there is a multiple of these: whole tiles
constexpr int64_t kMostRows = 512;  // of codes: each of their tiles reads all weights

int64_t Words(const ConvGeometry& g) { return CeilDiv(g.in_channels, kPlaneChannels); }
int64_t Steps(const ConvGeometry& g) { return CeilDiv(Words(g), kFlatStepWords); }
int64_t Eights(const ConvGeometry& g) { return RoundUp(g.out_channels, kRows) / 8; }

// Codes, weights and ones, all of K at once, and the sums that wait behind them.
int64_t StagingOffset(const ConvGeometry& g, int x_bits, int w_bits, int tile_n) {
  const int64_t codes = FlatCodePlanes(x_bits) * kFlatStepWords * kFlatWordBytes,
                columns = FlatColumns(tile_n, w_bits) / 8 * kFlatEightBytes;
  return Steps(g) * (codes + columns);
}
int64_t BlockBytes(const ConvGeometry& g, int x_bits, int w_bits, int tile_n) {
  return 1024 + StagingOffset(g, x_bits, w_bits, tile_n) + kFlatRows * FlatStagedInts(tile_n) * 4;
}

// As many products of bits as take the time of one of bytes are no gain.
constexpr int kMostProducts = 7;
constexpr int64_t kMostBlockBytes = 223 << 10;  // of dynamic shared memory, on sm_90 (Device::shared_bytes)

bool Fits(const ConvGeometry& g, const OperandType& x, const WeightBits& bits) {
  return x.encoding != Encoding::kBipolar && x.bits <= 4 && bits.fit > 0 &&
         x.bits * bits.fit <= kMostProducts &&
         BlockBytes(g, x.bits, bits.fit, kWidths[0]) <= kMostBlockBytes && g.group == 1 && !g.transposed &&
         g.Taps() == 1 && g.stride_h == 1 && g.stride_w == 1 &&
         std::max({g.pad_top, g.pad_left, g.pad_bottom, g.pad_right}) == 0;
}

bool Applies(const ConvGeometry& g, const OperandType& x, const WeightBits& bits, const Device& device) {
  return device.capability == 90 && Fits(g, x, bits);
}

// [plane][rows in eights][step][word][8][16]
int64_t WeightBytes(const ConvGeometry& g, const WeightBits& bits) {
  return bits.fit * Eights(g) * Steps(g) * kFlatEightBytes;
}

void PackBits(const ConvGeometry& g, const Int8Weights& w, const WeightBits& bits, uint8_t* out) {
  for (int64_t c = 0; c < g.out_channels; ++c) {
    const int64_t row = InterleavedRow(static_cast<int>(c));
    for (int64_t k = 0; k < g.in_channels; ++k) {
      const int value = w.values[static_cast<size_t>(c * g.in_channels + k)] - bits.lowest;
      const int64_t word = k / kPlaneChannels;
      const int bit = BitOfChannel(static_cast<int>(k % kPlaneChannels));
      for (int plane = 0; plane < bits.fit; ++plane) {
        if ((value >> bits.shift >> plane & 1) == 0) continue;
        const int64_t eight = (plane * Eights(g) + row / 8) * Steps(g) + word / kFlatStepWords;
        const int64_t chunk = word % kFlatStepWords * 8 + row % 8;
        out[eight * kFlatEightBytes + chunk * kPlaneWordBytes + bit / 8] |=
            static_cast<uint8_t>(1 << bit % 8);
      }
    }
  }
}

std::string Refuse(const ConvProblem& problem, const Device& device) {
  if (device.capability != 90) return "needs sm_90a";
  if (!Fits(problem.geometry, problem.x, problem.w_bits))
    return "windows, groups, strides or too long rows; codes of more than 4 bits, weights of more than 2, "
           "as many products of bits as of bytes";
  if (problem.m > kMostRows) return "more than 512 rows";
  if (problem.planes.x > kMostPlanes) return "more than two planes";
  return problem.m == 0 ? "no rows" : "";
}

int64_t BytesOf(const ConvProblem& problem, const ConvConfig& config) {
  return BlockBytes(problem.geometry, problem.x.bits, problem.w_bits.fit, config.tile_n);
}

int SharedBytesOf(const ConvProblem& problem, const ConvConfig& config) {
  return static_cast<int>(std::min(BytesOf(problem, config), kMaxBytes));
}

int64_t Tiles(const ConvProblem& problem, const ConvConfig& config) {
  return CeilDiv(problem.m, kFlatRows) * CeilDiv(problem.n, config.tile_n);
}

void AddCandidates(const ConvProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  for (const int tile_n : kWidths) {
    if (!HasFlatInstance(tile_n, problem.w_bits.fit, FlatCodePlanes(problem.x.bits))) continue;
    if (tile_n > 16 && problem.n <= tile_n / 2) continue;
    const ConvConfig config{&kFlatBitsRow, kFlatRows, tile_n};
    if (CeilDiv(problem.n, tile_n) <= kMaxColumns && BytesOf(problem, config) <= device.shared_bytes)
      out.push_back(config);
  }
}

// Fitted to times of 64 rows by 128 to 4096 channels on an H100, float results, in rows of equals.
double Microseconds(const ConvProblem& problem, const ConvConfig& config, const Device& device) {
  const int64_t blocks = Tiles(problem, config);
  const double at_once = static_cast<double>(CeilDiv(blocks, device.multiprocessors));
  const double steps = static_cast<double>(Steps(problem.geometry)), planes = problem.x.bits,
               columns = FlatColumns(config.tile_n, problem.w_bits.fit);
  // Codes that come as bytes are up to eight times as many to fetch, and cut.
  const double step = problem.planes.x > 0 ? 15 + 35 * planes : 450 + 70 * planes;
  const double clocks =
      1800 + 100 * planes + 8 * columns + EstimateBusy(blocks, device) + at_once * steps * step;
  return clocks / kClocksPerMicrosecond;
}

ConvLauncher Launcher(const ConvProblem& problem, const ConvConfig& config, const Device&) {
  const ConvGeometry& g = problem.geometry;
  FlatBitsParams bits = {TilesOf(problem, config), SumsOf(problem, config)};
  bits.k_tiles = static_cast<int>(Steps(g));
  bits.exchange_offset =
      static_cast<int>(StagingOffset(g, problem.x.bits, problem.w_bits.fit, config.tile_n));
  bits.w_planes = problem.w_bits.fit;
  bits.code_planes = FlatCodePlanes(problem.x.bits);
  bits.w_shift = problem.w_bits.shift;
  bits.w_lowest = problem.w_bits.lowest;
  bits.eights = static_cast<int>(Eights(g));
  bits.words = static_cast<int>(Words(g));
  bits.row_bytes = static_cast<int>(g.in_channels);
  bits.of_planes = problem.planes.x > 0;
  const int top = 1 << (bits.code_planes - 1);
  bits.x_top = problem.x.encoding == Encoding::kSigned ? -top : top;
  bits.x_mask = static_cast<uint32_t>((1 << bits.code_planes) - 1) * 0x01010101u;
  return LauncherOf(bits, config, LaunchFlatBits);
}

}  // namespace

const WeightLayout kFlatBitWeights = {Applies, WeightBytes, PackBits};

const ConvRow kFlatBitsRow = {
    {"flat_bits", "sm_90a",
     "products of up to 512 rows, 1 or 2 bits of weights by up to 4 of codes: population counts on wgmma"},
    {.refuse = Refuse,
     .add_candidates = AddCandidates,
     .shared_bytes = SharedBytesOf,
     .microseconds = Microseconds,
     .launcher = Launcher,
     .weights = &kFlatBitWeights,
     .traits = {.reads_planes = true, .stores_planes = true, .stores_planes_of_integers = true}}};

}  // namespace lowbit::cuda
