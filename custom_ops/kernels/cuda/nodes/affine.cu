// One code in, one number out: LowBitAffine, LowBitRequantize, LowBitDequantize as the tensor lies,
// LowBitLookup.
//
// Numbers per channel cost more than the codes' own traffic. A thread therefore keeps those of its four
// channels in registers, loaded before the predecessor has ended, and walks along pixels.
#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_families.h"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTableSize = 256;
constexpr int kSlab = 64;         // channels whose tables a block holds
constexpr int kSlabPixels = 256;  // pixels that amortize loading them

// How a value becomes a code. kLine: the chain of float operations from code to code is a staircase that one
// fma climbs as well, where LineOf found the two numbers; tried for every code, so the result is exact.
enum class AffineKind : uint8_t { kExact, kFast, kLine };

// What happens to one channel's codes. For kLine, scale and shift are the line's and bias knows no zero
// point.
struct ChannelGrid {
  float bias = 0, x_scale = 1, scale = 1, shift = 0;
  float y_scale = 1, y_inverse = 1, lo = 0, hi = 0, magic = 0;
  uint32_t odd = 0;
};

// The same, an array per number, [channels].
struct ChannelGrids {
  const float *bias = nullptr, *x_scale = nullptr, *scale = nullptr, *shift = nullptr;
  const float *y_scale = nullptr, *y_inverse = nullptr, *lo = nullptr, *hi = nullptr, *magic = nullptr;
  const uint32_t* odd = nullptr;
};

struct AffineParams {
  const uint8_t* x = nullptr;
  void* y = nullptr;
  unsigned count = 0;    // elements
  unsigned threads = 0;  // a multiple of `width`
  FastDivisor width;     // vectors of a pixel
  uint32_t flip = 0;
  bool has_affine = false;
  ChannelGrid grid;  // of all channels
  ChannelGrids grids;
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
  if constexpr (kKind != AffineKind::kLine) {
    v = Divide<kKind == AffineKind::kFast>(v, Divider{g.y_scale, g.y_inverse});
  }
  return RoundedCode(v, CodeRounder{g.lo, g.hi, g.magic, false}) + g.odd;
}

// One vector at element `at`; grids[i] is that of its i-th code, or grids[0] that of all.
template <int kBytes, AffineKind kKind, bool kFloat, int kGrids>
__device__ __forceinline__ void AffineVector(const AffineParams& p, const Codes<kBytes>& codes,
                                             const ChannelGrid (&grids)[kGrids], unsigned at, int valid) {
  float values[kBytes];
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    const ChannelGrid& g = grids[kGrids == 1 ? 0 : i];
    values[i] =
        AffineValue<kKind>(CodeValue(codes.w[i / 4] ^ p.flip, i % 4, {p.flip, g.bias}), p.has_affine, g);
  }
  if constexpr (!kFloat) {
    constexpr int kPerWord = Codes<kBytes>::kPerWord;
    Codes<kBytes> out;
#pragma unroll
    for (int w = 0; w < Codes<kBytes>::kWords; ++w) {
      unsigned code[kPerWord];
#pragma unroll
      for (int i = 0; i < kPerWord; ++i) {
        code[i] = AffineCode<kKind>(values[4 * w + i], grids[kGrids == 1 ? 0 : 4 * w + i]);
      }
      out.w[w] = PackBytes(code);
    }
    StoreCodes<kBytes>(static_cast<uint8_t*>(p.y) + at, out, valid);
  } else {
    float* y = static_cast<float*>(p.y) + at;
    if constexpr (kBytes == 4) {
      if (valid >= 4) {
        *reinterpret_cast<float4*>(y) = make_float4(values[0], values[1], values[2], values[3]);
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
      if (i < valid) y[i] = values[i];
    }
  }
}

template <int kBytes, AffineKind kKind, bool kFloat>
__global__ void __launch_bounds__(kThreads) AffineFlat(const __grid_constant__ AffineParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kBytes;
  if (at >= p.count) return;
  const int valid = static_cast<int>(min(static_cast<int64_t>(kBytes), p.count - at));
  const ChannelGrid grid[1] = {p.grid};
  AffineVector<kBytes, kKind, kFloat>(p, LoadCodes<kBytes>(p.x + at, valid), grid, static_cast<unsigned>(at),
                                      valid);
}

// grids[i].*member = from[i], 16 bytes at a time.
template <int kCount, typename T>
__device__ __forceinline__ void LoadNumbers(const T* from, ChannelGrid (&grids)[kCount],
                                            T ChannelGrid::* member) {
  if constexpr (kCount == 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    const T values[4] = {__builtin_bit_cast(T, four.x), __builtin_bit_cast(T, four.y),
                         __builtin_bit_cast(T, four.z), __builtin_bit_cast(T, four.w)};
#pragma unroll
    for (int i = 0; i < 4; ++i) grids[i].*member = values[i];
  } else {
    grids[0].*member = *from;
  }
}

// kPerGrid: all numbers differ between channels, else scale and shift alone.
template <bool kPerGrid, int kCount>
__device__ __forceinline__ void LoadGrids(const AffineParams& p, unsigned first,
                                          ChannelGrid (&grids)[kCount]) {
#pragma unroll
  for (ChannelGrid& g : grids) g = p.grid;
  if (p.has_affine) {
    LoadNumbers(p.grids.scale + first, grids, &ChannelGrid::scale);
    LoadNumbers(p.grids.shift + first, grids, &ChannelGrid::shift);
  }
  if constexpr (kPerGrid) {
    LoadNumbers(p.grids.bias + first, grids, &ChannelGrid::bias);
    LoadNumbers(p.grids.x_scale + first, grids, &ChannelGrid::x_scale);
    LoadNumbers(p.grids.y_scale + first, grids, &ChannelGrid::y_scale);
    LoadNumbers(p.grids.y_inverse + first, grids, &ChannelGrid::y_inverse);
    LoadNumbers(p.grids.lo + first, grids, &ChannelGrid::lo);
    LoadNumbers(p.grids.hi + first, grids, &ChannelGrid::hi);
    LoadNumbers(p.grids.magic + first, grids, &ChannelGrid::magic);
    LoadNumbers(p.grids.odd + first, grids, &ChannelGrid::odd);
  }
}

template <int kBytes, AffineKind kKind, bool kFloat, bool kPerGrid, int kRepeat>
__global__ void __launch_bounds__(kThreads) AffineChannels(const __grid_constant__ AffineParams p) {
  LetSuccessorsStart();
  const unsigned thread = blockIdx.x * kThreads + threadIdx.x;
  ChannelGrid grids[kBytes];
  LoadGrids<kPerGrid>(p, (thread - Quotient(thread, p.width) * p.width.divisor) * kBytes, grids);
  WaitForPredecessors();
  if (thread >= p.threads) return;
  Codes<kBytes> codes[kRepeat];
#pragma unroll
  for (int r = 0; r < kRepeat; ++r) {
    const int64_t at = (static_cast<int64_t>(r) * p.threads + thread) * kBytes;
    if (at < p.count) codes[r] = LoadCodes<kBytes>(p.x + at);
  }
#pragma unroll
  for (int r = 0; r < kRepeat; ++r) {
    const int64_t at = (static_cast<int64_t>(r) * p.threads + thread) * kBytes;
    if (at >= p.count) return;
    AffineVector<kBytes, kKind, kFloat>(p, codes[r], grids, static_cast<unsigned>(at), kBytes);
  }
}

struct LookupParams {
  const uint8_t* x = nullptr;
  uint8_t* y = nullptr;
  const uint8_t* table = nullptr;  // [channels, 256]
  unsigned count = 0, channels = 1, pixels = 0;
  unsigned slabs = 1;
  int lane_shift = 0;  // 2^lane_shift threads serve a pixel's part of a slab
};

__device__ __forceinline__ void LoadTables(const uint8_t* table, int tables, uint8_t* shared) {
  for (int i = static_cast<int>(threadIdx.x); i < tables * (kTableSize / 16); i += kThreads) {
    reinterpret_cast<uint4*>(shared)[i] = reinterpret_cast<const uint4*>(table)[i];
  }
  __syncthreads();
}

template <int kBytes>
__global__ void __launch_bounds__(kThreads) LookupFlat(const __grid_constant__ LookupParams p) {
  __shared__ __align__(16) uint8_t table[kTableSize];
  LetSuccessorsStart();
  LoadTables(p.table, 1, table);
  WaitForPredecessors();
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kBytes;
  if (at >= p.count) return;
  const int valid = static_cast<int>(min(static_cast<int64_t>(kBytes), p.count - at));
  Codes<kBytes> codes = LoadCodes<kBytes>(p.x + at, valid);
#pragma unroll
  for (int i = 0; i < kBytes; i += 4) {
    unsigned word = 0;
#pragma unroll
    for (int j = 0; j < Codes<kBytes>::kPerWord; ++j) {
      word |= static_cast<unsigned>(table[codes.w[i / 4] >> (8 * j) & 255u]) << (8 * j);
    }
    codes.w[i / 4] = word;
  }
  StoreCodes<kBytes>(p.y + at, codes, valid);
}

template <int kBytes>
__global__ void __launch_bounds__(kThreads) LookupChannels(const __grid_constant__ LookupParams p) {
  __shared__ __align__(16) uint8_t tables[kSlab * kTableSize];
  LetSuccessorsStart();
  const unsigned slab = blockIdx.x % p.slabs, first_channel = slab * kSlab;
  const unsigned width = min(static_cast<unsigned>(kSlab), p.channels - first_channel);
  LoadTables(p.table + static_cast<size_t>(first_channel) * kTableSize, static_cast<int>(width), tables);
  WaitForPredecessors();
  const unsigned lane = threadIdx.x & ((1u << p.lane_shift) - 1), c = lane * kBytes;
  if (c >= width) return;
  const uint8_t* table = tables + c * kTableSize;
  const unsigned step = static_cast<unsigned>(kThreads) >> p.lane_shift;
  const unsigned begin = blockIdx.x / p.slabs * kSlabPixels + (threadIdx.x >> p.lane_shift);
  const unsigned end = min(p.pixels, blockIdx.x / p.slabs * kSlabPixels + kSlabPixels);
#pragma unroll 4
  for (unsigned pixel = begin; pixel < end; pixel += step) {
    const int64_t at = static_cast<int64_t>(pixel) * p.channels + first_channel + c;
    const Codes<kBytes> codes = LoadCodes<kBytes>(p.x + at);
    Codes<kBytes> out = {};
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
      out.w[0] |=
          static_cast<unsigned>(table[i * kTableSize + static_cast<int>(codes.w[0] >> (8 * i) & 255u)])
          << (8 * i);
    }
    StoreCodes<kBytes>(p.y + at, out);
  }
}

ChannelGrid GridOf(const AffineSpec& spec, size_t c) {
  const CodeReader reader = MakeReader(spec.x_signed, spec.x_zero_point[c]);
  const Divider divider = MakeDivider(spec.y_scale[c]);
  const CodeRounder rounder = MakeRounder(spec.y_zero_point[c], spec.quantizer.lo, spec.quantizer.hi);
  ChannelGrid g;
  g.bias = reader.bias;
  g.x_scale = spec.x_scale[c];
  if (spec.has_affine) g.scale = spec.scale[c], g.shift = spec.shift[c];
  g.y_scale = divider.scale;
  g.y_inverse = divider.inverse;
  g.lo = rounder.lo;
  g.hi = rounder.hi;
  g.magic = rounder.magic;
  g.odd = rounder.odd ? 1 : 0;
  return g;
}

bool FastDivisionIsExact(const AffineSpec& spec) {
  for (size_t c = 0; c < static_cast<size_t>(spec.channels); ++c) {
    double max_abs = 256.0 * static_cast<double>(spec.x_scale[c]);
    if (spec.has_affine) {
      max_abs = max_abs * std::fabs(static_cast<double>(spec.scale[c])) +
                std::fabs(static_cast<double>(spec.shift[c]));
    }
    if (!cuda::FastDivisionIsExact(spec.y_scale[c], max_abs)) return false;
  }
  return true;
}

constexpr int kCodes = 256;

// What the node makes of every code of a channel, the lowest code first, less the zero point.
std::array<float, kCodes> StairsOf(const AffineSpec& spec, size_t c, const ChannelGrid& g) {
  std::array<float, kCodes> out;
  const int lowest = spec.x_signed ? -128 : 0;
  for (int i = 0; i < kCodes; ++i) {
    float v = static_cast<float>(lowest + i - spec.x_zero_point[c]) * spec.x_scale[c];
    if (spec.has_affine) {
      const float scaled = v * spec.scale[c];
      v = scaled + spec.shift[c];
    }
    out[static_cast<size_t>(i)] = std::min(std::max(std::nearbyint(v / spec.y_scale[c]), g.lo), g.hi);
  }
  return out;
}

// Finds gain and offset (scale and shift of the result) that give the same codes for all inputs. Where the
// float chain and the exact line fall on different sides of a rounding boundary, moving the line by a few
// units in the last place puts it on the right side; more than one boundary is seldom that close.
std::optional<ChannelGrid> LineOf(const AffineSpec& spec, size_t c) {
  ChannelGrid g = GridOf(spec, c);
  const std::array<float, kCodes> stairs = StairsOf(spec, c, g);
  const double slope = static_cast<double>(spec.x_scale[c]) * (spec.has_affine ? spec.scale[c] : 1.0f);
  const double gain = slope / spec.y_scale[c];
  const double offset =
      ((spec.has_affine ? spec.shift[c] : 0.0f) - slope * spec.x_zero_point[c]) / spec.y_scale[c];
  const double unit = 0x1p-25 * std::max(256.0 * std::fabs(gain), std::fabs(offset));
  const int lowest = spec.x_signed ? -128 : 0;
  g.bias = MakeReader(spec.x_signed, 0).bias;
  g.scale = static_cast<float>(gain);
  for (const int nudge : {0, 1, -1, 2, -2, 4, -4, 8, -8, 16, -16, 32, -32}) {
    g.shift = static_cast<float>(offset + nudge * unit);
    bool equal = true;
    for (int i = 0; equal && i < kCodes; ++i) {
      const float v = std::fma(g.scale, static_cast<float>(lowest + i), g.shift);
      equal = std::nearbyint(std::min(std::max(v, g.lo), g.hi)) == stairs[static_cast<size_t>(i)];
    }
    if (equal) return g;
  }
  return std::nullopt;
}

// The lines of all channels, or nothing.
std::vector<ChannelGrid> LinesOf(const AffineSpec& spec) {
  const auto channels = static_cast<size_t>(spec.channels);
  std::vector<ChannelGrid> out;
  const auto zero_points = spec.y_zero_point.begin();
  if (!spec.quantizer.quantized || !FastDivisionIsExact(spec)) return out;
  if (std::any_of(zero_points, zero_points + spec.channels, [&](int32_t z) { return z != *zero_points; })) {
    return out;
  }
  for (size_t c = 0; c < channels; ++c) {
    const std::optional<ChannelGrid> line = LineOf(spec, c);
    if (!line) return {};
    out.push_back(*line);
  }
  return out;
}

// What of a node its plans need.
struct PackedAffine {
  AffineParams params;
  int64_t channels = 1;
  AffineKind kind = AffineKind::kExact;
  bool to_float = false;
  bool per_grid = false;  // more than scale and shift differs between channels
  std::shared_ptr<const DeviceMemory> memory;
};

void UploadGrids(PackedAffine& node, const std::vector<ChannelGrid>& grids, const Device& device) {
  NodeConstants constants;
  std::vector<std::function<void(const DeviceMemory&)>> resolve;
  const auto add = [&]<typename T>(T ChannelGrid::* member, const T* ChannelGrids::* array, bool of_grid) {
    std::vector<T> values;
    for (const ChannelGrid& g : grids) values.push_back(g.*member);
    const bool differs = std::any_of(values.begin(), values.end(), [&](T v) { return v != values[0]; });
    node.per_grid = node.per_grid || (differs && of_grid);
    const size_t offset = constants.Add(values);
    resolve.push_back([&node, array, offset](const DeviceMemory& memory) {
      node.params.grids.*array = reinterpret_cast<const T*>(memory.At(offset));
    });
  };
  add(&ChannelGrid::bias, &ChannelGrids::bias, true);
  add(&ChannelGrid::x_scale, &ChannelGrids::x_scale, true);
  add(&ChannelGrid::scale, &ChannelGrids::scale, false);
  add(&ChannelGrid::shift, &ChannelGrids::shift, false);
  add(&ChannelGrid::y_scale, &ChannelGrids::y_scale, true);
  add(&ChannelGrid::y_inverse, &ChannelGrids::y_inverse, true);
  add(&ChannelGrid::lo, &ChannelGrids::lo, true);
  add(&ChannelGrid::hi, &ChannelGrids::hi, true);
  add(&ChannelGrid::magic, &ChannelGrids::magic, true);
  add(&ChannelGrid::odd, &ChannelGrids::odd, true);
  node.memory = UploadConstants(constants, device);
  for (const auto& set : resolve) set(*node.memory);
}

template <typename Fn>
void WithKind(AffineKind kind, const Fn& fn) {
  switch (kind) {
    case AffineKind::kExact:
      return fn(std::integral_constant<AffineKind, AffineKind::kExact>{});
    case AffineKind::kFast:
      return fn(std::integral_constant<AffineKind, AffineKind::kFast>{});
    case AffineKind::kLine:
      return fn(std::integral_constant<AffineKind, AffineKind::kLine>{});
  }
}

template <int kBytes, AffineKind kKind, bool kFloat>
cudaError_t LaunchFlat(const AffineParams& p, Queue& queue) {
  const dim3 grid = GridFor((p.count + int64_t{kBytes} - 1) / kBytes, kThreads);
  return queue.Launch(AffineFlat<kBytes, kKind, kFloat>, grid, dim3(kThreads), p);
}

template <int kBytes, AffineKind kKind, bool kFloat, bool kPerGrid>
cudaError_t LaunchChannels(AffineParams p, int64_t channels, Queue& queue) {
  constexpr int kRepeat = 4;
  const int64_t vectors = p.count / kBytes, width = channels / kBytes, pixels = vectors / width;
  p.width = MakeDivisor(width);
  const bool repeats = vectors > kOneWave;
  p.threads = static_cast<unsigned>(repeats ? (pixels + kRepeat - 1) / kRepeat * width : vectors);
  const dim3 grid = GridFor(p.threads, kThreads);
  return repeats
             ? queue.Launch(AffineChannels<kBytes, kKind, kFloat, kPerGrid, kRepeat>, grid, dim3(kThreads), p)
             : queue.Launch(AffineChannels<kBytes, kKind, kFloat, kPerGrid, 1>, grid, dim3(kThreads), p);
}

cudaError_t LaunchFlat(const PackedAffine& node, const AffineParams& p, Queue& queue) {
  cudaError_t error = cudaSuccess;
  if (node.to_float) {
    const int unit = CommonUnit({p.y}) < 16 ? 1 : std::min(4, CommonUnit({p.x}));
    WithInt<4, 1>(unit, [&](auto bytes) {
      error = LaunchFlat<decltype(bytes)::value, AffineKind::kExact, true>(p, queue);
    });
    return error;
  }
  WithKind(node.kind, [&](auto kind) {
    WithInt<16, 4, 1>(SpreadUnit(CommonUnit({p.x, p.y}), p.count), [&](auto bytes) {
      error = LaunchFlat<decltype(bytes)::value, decltype(kind)::value, false>(p, queue);
    });
  });
  return error;
}

cudaError_t LaunchChannels(const PackedAffine& node, const AffineParams& p, Queue& queue) {
  cudaError_t error = cudaSuccess;
  const int y_unit = node.to_float ? CommonUnit({p.y}) / 4 : CommonUnit({p.y});
  const int unit = std::min({CommonUnit({p.x}), y_unit, CommonUnit(node.channels), 4});
  WithInt<4, 1>(unit, [&](auto bytes) {
    constexpr int kBytes = decltype(bytes)::value;
    if (node.to_float) {
      error = LaunchChannels<kBytes, AffineKind::kExact, true, true>(p, node.channels, queue);
      return;
    }
    WithKind(node.kind, [&](auto kind) {
      constexpr AffineKind kKind = decltype(kind)::value;
      error = kKind == AffineKind::kLine || !node.per_grid
                  ? LaunchChannels<kBytes, kKind, false, false>(p, node.channels, queue)
                  : LaunchChannels<kBytes, kKind, false, true>(p, node.channels, queue);
    });
  });
  return error;
}

LookupParams LookupGeometry(int64_t count, int64_t channels) {
  LookupParams p;
  p.count = static_cast<unsigned>(count);
  p.channels = static_cast<unsigned>(channels);
  p.pixels = static_cast<unsigned>(count / channels);
  p.slabs = static_cast<unsigned>((channels + kSlab - 1) / kSlab);
  return p;
}

cudaError_t LaunchLookup(LookupParams p, Queue& queue) {
  cudaError_t error = cudaSuccess;
  if (p.channels == 1) {
    WithInt<16, 4, 1>(CommonUnit({p.x, p.y}), [&](auto bytes) {
      constexpr int kBytes = decltype(bytes)::value;
      error = queue.Launch(LookupFlat<kBytes>, GridFor((p.count + int64_t{kBytes} - 1) / kBytes, kThreads),
                           dim3(kThreads), p);
    });
    return error;
  }
  const int unit = std::min({CommonUnit({p.x, p.y}), CommonUnit(p.channels), 4});
  const int width = std::min<int>(kSlab, static_cast<int>(p.channels)) / unit;
  while ((1 << p.lane_shift) < width) ++p.lane_shift;
  const int64_t blocks = (p.pixels + int64_t{kSlabPixels} - 1) / kSlabPixels * p.slabs;
  Require(blocks < int64_t{1} << 31, "a table look-up of ", p.channels, " channels is too large");
  WithInt<4, 1>(unit, [&](auto bytes) {
    error = queue.Launch(LookupChannels<decltype(bytes)::value>, dim3(static_cast<unsigned>(blocks)),
                         dim3(kThreads), p);
  });
  return error;
}

}  // namespace

std::unique_ptr<PackedNode> PackAffine(const AffineSpec& spec, const Device& device) {
  auto node = std::make_shared<PackedAffine>();
  node->channels = spec.channels;
  node->to_float = !spec.quantizer.quantized;
  node->params.flip = MakeReader(spec.x_signed, 0).flip;
  std::vector<ChannelGrid> grids = LinesOf(spec);
  node->kind = !grids.empty()              ? AffineKind::kLine
               : FastDivisionIsExact(spec) ? AffineKind::kFast
                                           : AffineKind::kExact;
  node->params.has_affine = spec.has_affine || node->kind == AffineKind::kLine;
  for (size_t c = grids.size(); c < static_cast<size_t>(spec.channels); ++c) grids.push_back(GridOf(spec, c));
  node->params.grid = grids.front();
  if (spec.channels > 1) UploadGrids(*node, grids, device);
  return MakeNode([node](Shapes, const TensorShape& y) {
    const int64_t count = CountOf(y.dims);
    return MakePlan(std::string(node->channels > 1 ? "affine_channels" : "affine_flat") +
                        (node->kind == AffineKind::kLine ? "_line" : ""),
                    [node, count](Fed fed, void* to, void*, Queue& queue) {
                      if (count == 0) return;
                      AffineParams p = node->params;
                      p.x = static_cast<const uint8_t*>(fed[0]);
                      p.y = to;
                      p.count = static_cast<unsigned>(count);
                      CheckLaunch(
                          node->channels > 1 ? LaunchChannels(*node, p, queue) : LaunchFlat(*node, p, queue),
                          "affine");
                    });
  });
}

std::unique_ptr<PackedNode> PackLookup(const LookupNode& node, const Device& device) {
  NodeConstants constants;
  constants.Add(node.table);
  return MakeNode(
      [memory = UploadConstants(constants, device), channels = node.channels](Shapes, const TensorShape& y) {
        const LookupParams geometry = LookupGeometry(CountOf(y.dims), channels);
        return MakePlan(channels > 1 ? "lookup_channels" : "lookup_flat",
                        [memory, geometry](Fed fed, void* to, void*, Queue& queue) {
                          if (geometry.count == 0) return;
                          LookupParams p = geometry;
                          p.x = static_cast<const uint8_t*>(fed[0]);
                          p.y = static_cast<uint8_t*>(to);
                          p.table = memory->At(0);
                          CheckLaunch(LaunchLookup(p, queue), "lookup");
                        });
      });
}

}  // namespace lowbit::cuda
