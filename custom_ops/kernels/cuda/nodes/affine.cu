// One code in, one number out: LowBitAffine, LowBitRequantize, LowBitDequantize as the tensor lies,
// LowBitLookup.
//
// Numbers per channel cost more than the codes' own traffic. A thread therefore keeps those of its four
// channels in registers, loaded before the predecessor has ended, and walks along pixels.
#include <algorithm>
#include <cmath>
#include <optional>

#include "kernels/cuda/nodes/affine_lines.h"
#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

constexpr int kCodes = 256;       // values of a code
constexpr int kSlab = 64;         // channels whose tables a block holds
constexpr int kSlabPixels = 256;  // pixels that amortize loading them

// How a value becomes a code. kLine: the chain of float operations from code to code is a staircase that one
// fma climbs as well, where LineOf found the two numbers; tried for every code, so the result is exact.
enum class AffineKind : uint8_t { kExact, kFast, kLine };

// What happens to one channel's codes. For kLine, scale and shift are the line's and bias knows no zero
// point.
struct ChannelGrid {
  float scale = 1, shift = 0;
  float bias = 0, x_scale = 1;
  Divider divider;
  CodeRounder rounder;
};
// The same as words, scale and shift first.
constexpr int kNumbers = sizeof(ChannelGrid) / 4, kAffineNumbers = 2;
struct GridNumbers {
  uint32_t of[kNumbers];
};

// Which of these numbers differ between channels: none, scale and shift, any.
enum class Differ : uint8_t { kNone, kAffine, kAll };

struct AffineParams : Tensors<uint8_t, void> {
  unsigned threads = 0;  // a multiple of `width`
  FastDivisor width;     // vectors of a pixel
  uint32_t flip = 0;
  bool has_affine = false;
  ChannelGrid grid;                   // of the first channel
  const uint32_t* numbers = nullptr;  // [kNumbers][channels]
  unsigned channels = 1;
};

template <AffineKind kKind>
__device__ __forceinline__ float AffineValue(float v, bool has_affine, const ChannelGrid& g) {
  if constexpr (kKind == AffineKind::kLine) return __fmaf_rn(g.scale, v, g.shift);
  v = __fmul_rn(v, g.x_scale);
  return has_affine ? __fadd_rn(__fmul_rn(v, g.scale), g.shift) : v;
}

// The code in the low byte.
template <AffineKind kKind>
__device__ __forceinline__ unsigned AffineCode(float v, const ChannelGrid& g) {
  if constexpr (kKind != AffineKind::kLine) v = Divide<kKind == AffineKind::kFast>(v, g.divider);
  return RoundedCode(v, g.rounder) + g.rounder.odd;
}

// The grids of kCount channels from `first` on, each number of all of them at a time.
template <Differ kDiffer, int kCount>
__device__ __forceinline__ void LoadGrids(const AffineParams& p, unsigned first,
                                          ChannelGrid (&grids)[kCount]) {
  GridNumbers numbers[kCount];
#pragma unroll
  for (GridNumbers& n : numbers) n = __builtin_bit_cast(GridNumbers, p.grid);
#pragma unroll
  for (unsigned k = 0; k < (kDiffer == Differ::kAll ? kNumbers : kAffineNumbers); ++k) {
    if (k < kAffineNumbers && !p.has_affine) continue;
    const uint32_t* row = p.numbers + static_cast<size_t>(k) * p.channels + first;
    const auto words = LoadCodes<4 * kCount>(reinterpret_cast<const uint8_t*>(row));
#pragma unroll
    for (int i = 0; i < kCount; ++i) numbers[i].of[k] = words.w[i];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) grids[i] = __builtin_bit_cast(ChannelGrid, numbers[i]);
}

// A vector of kBytes codes, kRepeat times; whole vectors where channels differ.
template <int kBytes, AffineKind kKind, bool kFloat, Differ kDiffer, int kRepeat>
__global__ void __launch_bounds__(kThreads) Affine(const __grid_constant__ AffineParams p) {
  LetSuccessorsStart();
  constexpr bool kOneGrid = kDiffer == Differ::kNone;
  const unsigned thread = blockIdx.x * kThreads + threadIdx.x;
  ChannelGrid grids[kOneGrid ? 1 : kBytes];
  if constexpr (kOneGrid) {
    grids[0] = p.grid;
  } else {
    LoadGrids<kDiffer>(p, Divided(thread, p.width).rest * kBytes, grids);
  }
  WaitForPredecessors();
  if (thread >= p.threads) return;
  const auto at_of = [&](int r) { return (static_cast<int64_t>(r) * p.threads + thread) * kBytes; };
  const auto valid_of = [&](int64_t at) { return kOneGrid ? static_cast<int>(p.count - at) : kBytes; };
  Codes<kBytes> codes[kRepeat];
#pragma unroll
  for (int r = 0; r < kRepeat; ++r) {
    const int64_t at = at_of(r);
    if (at < p.count) codes[r] = LoadCodes<kBytes>(p.x + at, valid_of(at));
  }
#pragma unroll
  for (int r = 0; r < kRepeat; ++r) {
    const int64_t at = at_of(r);
    if (at >= p.count) return;
    const auto grid = [&](int i) -> const ChannelGrid& { return grids[kOneGrid ? 0 : i]; };
    const auto value = [&](int i) {
      return AffineValue<kKind>(CodeValue(codes[r], i, {p.flip, grid(i).bias}), p.has_affine, grid(i));
    };
    if constexpr (kFloat) {
      float v[kBytes];
#pragma unroll
      for (int i = 0; i < kBytes; ++i) v[i] = value(i);
      StoreFloats(static_cast<float*>(p.y) + at, v, valid_of(at));
    } else {
      const auto made = MakeCodes<kBytes>([&](int i) { return AffineCode<kKind>(value(i), grid(i)); });
      StoreCodes(static_cast<uint8_t*>(p.y) + at, made, valid_of(at));
    }
  }
}

struct LookupParams : Tensors<uint8_t, uint8_t> {
  const uint8_t* table = nullptr;  // [channels, kCodes]
  unsigned channels = 1, pixels = 0;
  unsigned slabs = 1;
  int lane_shift = 0;  // 2^lane_shift threads serve a pixel's part of a slab
};

__device__ __forceinline__ void LoadTables(const uint8_t* table, unsigned tables, uint8_t* shared) {
  for (unsigned i = threadIdx.x; i < tables * (kCodes / 16); i += kThreads) {
    reinterpret_cast<uint4*>(shared)[i] = reinterpret_cast<const uint4*>(table)[i];
  }
  __syncthreads();
}

template <int kBytes>
__global__ void __launch_bounds__(kThreads) LookupFlat(const __grid_constant__ LookupParams p) {
  __shared__ __align__(16) uint8_t table[kCodes];
  LetSuccessorsStart();
  LoadTables(p.table, 1, table);
  WaitForPredecessors();
  const unsigned at = (blockIdx.x * kThreads + threadIdx.x) * kBytes;
  if (at >= p.count) return;
  const int valid = static_cast<int>(p.count - at);
  const Codes<kBytes> codes = LoadCodes<kBytes>(p.x + at, valid);
  StoreCodes(p.y + at, MakeCodes<kBytes>([&](int i) -> unsigned { return table[codes[i]]; }), valid);
}

template <int kBytes>
__global__ void __launch_bounds__(kThreads) LookupChannels(const __grid_constant__ LookupParams p) {
  __shared__ __align__(16) uint8_t tables[kSlab * kCodes];
  LetSuccessorsStart();
  const unsigned slab = blockIdx.x % p.slabs, first_channel = slab * kSlab;
  const unsigned width = min(static_cast<unsigned>(kSlab), p.channels - first_channel);
  LoadTables(p.table + static_cast<size_t>(first_channel) * kCodes, width, tables);
  WaitForPredecessors();
  const unsigned lane = threadIdx.x & ((1u << p.lane_shift) - 1), c = lane * kBytes;
  if (c >= width) return;
  const unsigned step = static_cast<unsigned>(kThreads) >> p.lane_shift;
  const unsigned begin = blockIdx.x / p.slabs * kSlabPixels + (threadIdx.x >> p.lane_shift);
  const unsigned end = min(p.pixels, blockIdx.x / p.slabs * kSlabPixels + kSlabPixels);
#pragma unroll 4
  for (unsigned pixel = begin; pixel < end; pixel += step) {
    const int64_t at = static_cast<int64_t>(pixel) * p.channels + first_channel + c;
    const Codes<kBytes> codes = LoadCodes<kBytes>(p.x + at);
    const auto entry = [&](int i) -> unsigned { return tables[(c + i) * kCodes + codes[i]]; };
    StoreCodes(p.y + at, MakeCodes<kBytes>(entry));
  }
}

ChannelGrid GridOf(const AffineSpec& spec, size_t c) {
  ChannelGrid g;
  if (spec.has_affine) g.scale = spec.scale[c], g.shift = spec.shift[c];
  g.bias = MakeReader(spec.x_signed, spec.x_zero_point[c]).bias;
  g.x_scale = spec.x_scale[c];
  g.divider = MakeDivider(spec.y_scale[c]);
  g.rounder = MakeRounder(spec.y_zero_point[c], spec.quantizer.lo, spec.quantizer.hi);
  return g;
}

// What a channel makes of a code before it rounds to the output's.
float StairOf(const AffineSpec& spec, size_t c, int code) {
  float v = static_cast<float>(code - spec.x_zero_point[c]) * spec.x_scale[c];
  if (spec.has_affine) {
    v = v * spec.scale[c];
    v = v + spec.shift[c];
  }
  return v / spec.y_scale[c];
}

// Finds gain and offset, scale and shift of the result, that give the same codes for all inputs. Where the
// float chain and the exact line fall on different sides of a rounding boundary, moving the line by a few
// units in the last place puts it on the right side; more than one boundary is seldom that close. The line is of
// codes less the zero point, or, from_lowest, less the lowest one.
std::optional<ChannelGrid> LineOf(const AffineSpec& spec, size_t c, bool from_lowest = false) {
  const double slope = static_cast<double>(spec.x_scale[c]) * (spec.has_affine ? spec.scale[c] : 1.0f);
  const double gain = slope / spec.y_scale[c];
  const CodeRounder rounder = GridOf(spec, c).rounder;
  const float first = from_lowest ? rounder.lo : 0;
  const double offset =
      ((spec.has_affine ? spec.shift[c] : 0.0f) - slope * spec.x_zero_point[c]) / spec.y_scale[c] - first;
  const double unit = 0x1p-25 * std::max(256.0 * std::fabs(gain), std::fabs(offset));
  // The other numbers of a line's grid are not read, and equal in all channels, so that none is loaded.
  ChannelGrid g;
  g.scale = static_cast<float>(gain);
  g.bias = MakeReader(spec.x_signed, 0).bias;
  g.rounder = rounder;
  const auto rounded = [&](float v, float from) {
    return std::min(std::max(std::nearbyint(v), rounder.lo - from), rounder.hi - from);
  };
  const int lowest = spec.x_signed ? -128 : 0, end = lowest + kCodes;
  for (const int nudge : {0, 1, -1, 2, -2, 4, -4, 8, -8, 16, -16, 32, -32}) {
    g.shift = static_cast<float>(offset + nudge * unit);
    const auto line = [&](int code) { return std::fma(g.scale, static_cast<float>(code), g.shift); };
    int code = lowest;
    while (code < end && rounded(line(code), first) == rounded(StairOf(spec, c, code), 0) - first) ++code;
    if (code == end) return g;
  }
  return std::nullopt;
}

// The lines of all channels, or nothing.
std::vector<ChannelGrid> LinesOf(const AffineSpec& spec, bool from_lowest = false) {
  std::vector<ChannelGrid> out;
  if (!spec.quantizer.quantized || !FastIsExact(spec)) return out;
  for (size_t c = 0; c < static_cast<size_t>(spec.channels); ++c) {
    const std::optional<ChannelGrid> line = LineOf(spec, c, from_lowest);
    if (!line) return {};
    out.push_back(*line);
  }
  return out;
}

// [kNumbers][channels]
std::vector<uint32_t> NumbersOf(const std::vector<ChannelGrid>& grids) {
  std::vector<uint32_t> out(kNumbers * grids.size());
  for (size_t c = 0; c < grids.size(); ++c) {
    const auto numbers = __builtin_bit_cast(GridNumbers, grids[c]);
    for (size_t k = 0; k < kNumbers; ++k) out[k * grids.size() + c] = numbers.of[k];
  }
  return out;
}

Differ DifferenceOf(const std::vector<uint32_t>& numbers, size_t channels) {
  if (channels == 1) return Differ::kNone;
  for (size_t i = kAffineNumbers * channels; i < numbers.size(); ++i) {
    if (numbers[i] != numbers[i / channels * channels]) return Differ::kAll;
  }
  return Differ::kAffine;
}

template <AffineKind kKind, bool kFloat, Differ kDiffer>
void LaunchAffine(const Run& run, AffineParams p) {
  constexpr bool kOneGrid = kDiffer == Differ::kNone;
  constexpr int kMost = kOneGrid && !kFloat ? 16 : 4, kRepeat = kOneGrid ? 1 : 4;
  int unit = std::min(CommonUnit({p.x}), kFloat ? CommonUnit({p.y}) / 4 : CommonUnit({p.y}));
  unit = kOneGrid ? SpreadUnit(unit, p.count) : std::min(unit, CommonUnit(p.channels));
  std::visit(
      [&](auto bytes) {
        constexpr int kBytes = std::min<int>(bytes, kMost);
        const int64_t vectors = BlocksFor(p.count, kBytes), width = kOneGrid ? 1 : p.channels / kBytes;
        const bool repeats = !kOneGrid && vectors > kOneWave;
        p.width = MakeDivisor(width);
        p.threads = static_cast<unsigned>(repeats ? BlocksFor(vectors / width, kRepeat) * width : vectors);
        run.LaunchFor(p.threads,
                      repeats ? Affine<kBytes, kKind, kFloat, kDiffer, kRepeat>
                              : Affine<kBytes, kKind, kFloat, kDiffer, 1>,
                      kThreads, p);
      },
      OneOf<16, 4, 1>(std::min(unit, kMost)));
}

void LaunchLookup(const Run& run, LookupParams p) {
  const int unit = CommonUnit({p.x, p.y}), channels_unit = std::min({unit, CommonUnit(p.channels), 4});
  if (p.channels == 1) {
    return std::visit(
        [&](auto bytes) { run.LaunchFor(BlocksFor(p.count, bytes), LookupFlat<bytes>, kThreads, p); },
        OneOf<16, 4, 1>(unit));
  }
  const int width = std::min<int>(kSlab, static_cast<int>(p.channels)) / channels_unit;
  while ((1 << p.lane_shift) < width) ++p.lane_shift;
  const int64_t blocks = int64_t{BlocksFor(p.pixels, kSlabPixels)} * p.slabs;
  Require(blocks < int64_t{1} << 31, "a table look-up of ", p.channels, " channels is too large");
  const dim3 grid(static_cast<unsigned>(blocks));
  run.Launch(channels_unit == 4 ? LookupChannels<4> : LookupChannels<1>, grid, kThreads, p);
}

}  // namespace

bool MayHaveLines(const AffineSpec& spec) {
  const int32_t lo = spec.quantizer.lo, count = spec.quantizer.hi - lo + 1;
  return spec.quantizer.quantized && (count == kCodes || (count == kCodes / 2 && lo % count == 0)) &&
         FastIsExact(spec);
}

std::optional<AffineLines> AffineLinesOf(const AffineSpec& spec) {
  if (!MayHaveLines(spec)) return std::nullopt;
  AffineLines lines{{}, {}, spec.x_signed, spec.quantizer.is_signed, spec.quantizer.lo, spec.quantizer.hi};
  for (const ChannelGrid& grid : LinesOf(spec, true)) {
    lines.gain.push_back(grid.scale);
    lines.offset.push_back(grid.shift);
  }
  return lines.gain.empty() ? std::nullopt : std::optional(lines);
}

PackedNodePtr Pack(const AffineNode& node, const Device& device) {
  const AffineSpec& spec = node.spec;
  std::vector<ChannelGrid> grids = LinesOf(spec);
  const AffineKind kind = !grids.empty()      ? AffineKind::kLine
                          : FastIsExact(spec) ? AffineKind::kFast
                                              : AffineKind::kExact;
  for (size_t c = grids.size(); c < static_cast<size_t>(spec.channels); ++c) grids.push_back(GridOf(spec, c));
  const std::vector<uint32_t> numbers = NumbersOf(grids);
  const Differ differ = DifferenceOf(numbers, grids.size());
  AffineParams shared;
  shared.flip = MakeReader(spec.x_signed, 0).flip;
  shared.has_affine = spec.has_affine || kind == AffineKind::kLine;
  shared.grid = grids.front();
  shared.channels = static_cast<unsigned>(spec.channels);
  NodeConstants constants;
  if (differ != Differ::kNone) constants.Add(numbers, shared.numbers);
  const auto memory = constants.Upload(device);
  const auto launch = [kind, differ, to_float = !spec.quantizer.quantized](const Run& run,
                                                                           const AffineParams& p) {
    std::visit(
        [&](auto kind_, auto float_, auto differ_) {
          // Floats are not divided.
          LaunchAffine<float_ ? AffineKind::kExact : kind_, float_, differ_>(run, p);
        },
        OneOf<AffineKind::kExact, AffineKind::kFast, AffineKind::kLine>(kind), OneOf(to_float),
        OneOf<Differ::kNone, Differ::kAffine, Differ::kAll>(differ));
  };
  const std::string text = std::string(spec.channels > 1 ? "affine_channels" : "affine_flat") +
                           (kind == AffineKind::kLine ? "_line" : "");
  const auto plan = [=](Shapes, const TensorShape& y) {
    AffineParams geometry = shared;
    geometry.count = static_cast<unsigned>(CountOf(y.dims));
    return MakeKernelPlan(text, geometry, launch);
  };
  return MakeNode(plan, memory);
}

PackedNodePtr Pack(const LookupNode& node, const Device& device) {
  LookupParams shared;
  shared.channels = static_cast<unsigned>(node.channels);
  shared.slabs = BlocksFor(shared.channels, kSlab);
  NodeConstants constants;
  constants.Add(node.table, shared.table);
  const auto memory = constants.Upload(device);
  return MakeNode(
      [=](Shapes, const TensorShape& y) {
        LookupParams geometry = shared;
        geometry.count = static_cast<unsigned>(CountOf(y.dims));
        geometry.pixels = geometry.count / geometry.channels;
        return MakeKernelPlan(geometry.channels > 1 ? "lookup_channels" : "lookup_flat", geometry,
                              LaunchLookup);
      },
      memory);
}

}  // namespace lowbit::cuda
