// One code in, one number out: LowBitAffine, LowBitRequantize, LowBitDequantize as the tensor lies,
// LowBitLookup.
//
// A grid per channel costs ten numbers a code, more than the code's own traffic. A thread therefore keeps the
// grids of its four channels in registers, loaded before the predecessor has ended, and walks along pixels.
#include <algorithm>
#include <cstring>

#include "kernels/cuda/codes.cuh"
#include "kernels/cuda/node_families.h"
#include "kernels/cuda/node_support.h"
#include "kernels/cuda/ptx.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTableSize = 256;
constexpr int kSlab = 64;                 // channels whose tables a block holds
constexpr int kSlabPixels = 256;          // pixels that amortize loading them
constexpr int64_t kOneWave = 132 * 2048;  // threads of an H200

// What happens to one channel's codes, three 16-byte loads long.
struct alignas(16) ChannelGrid {
  float bias = 0, x_scale = 1, scale = 1, shift = 0;
  float y_scale = 1, y_inverse = 1, lo = 0, hi = 0;
  float magic = 0;
  uint32_t odd = 0;
  uint32_t unused[2] = {};
};

struct AffineParams {
  const uint8_t* x = nullptr;
  void* y = nullptr;
  unsigned count = 0;    // elements
  unsigned threads = 0;  // a multiple of `width`
  FastDivisor width;     // vectors of a pixel
  uint32_t flip = 0;
  bool has_affine = false;
  ChannelGrid grid;                    // of all channels
  const ChannelGrid* grids = nullptr;  // [channels]
};

__device__ __forceinline__ float AffineValue(float v, bool has_affine, const ChannelGrid& g) {
  v = __fmul_rn(v, g.x_scale);
  return has_affine ? __fadd_rn(__fmul_rn(v, g.scale), g.shift) : v;
}

template <bool kFast>
__device__ __forceinline__ unsigned AffineCode(float v, const ChannelGrid& g) {
  const float q = Divide<kFast>(v, Divider{g.y_scale, g.y_inverse});
  return RoundedCode(q, CodeRounder{g.lo, g.hi, g.magic, false}) + g.odd;
}

// One vector at element `at`; grids[i] is that of its i-th code, or grids[0] that of all.
template <int kBytes, bool kFast, bool kFloat, int kGrids>
__device__ __forceinline__ void AffineVector(const AffineParams& p, const Codes<kBytes>& codes,
                                             const ChannelGrid (&grids)[kGrids], unsigned at, int valid) {
  Codes<kBytes> out = {};
  float values[kBytes];
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    const ChannelGrid& g = grids[kGrids == 1 ? 0 : i];
    const float v = AffineValue(CodeValue(codes.w[i / 4] ^ p.flip, i % 4, {p.flip, g.bias}), p.has_affine, g);
    if constexpr (kFloat) {
      values[i] = v;
    } else {
      out.w[i / 4] |= (AffineCode<kFast>(v, g) & 255u) << (8 * (i % 4));
    }
  }
  if constexpr (!kFloat) {
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

template <int kBytes, bool kFast, bool kFloat>
__global__ void __launch_bounds__(kThreads) AffineFlat(const __grid_constant__ AffineParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kBytes;
  if (at >= p.count) return;
  const int valid = static_cast<int>(min(static_cast<int64_t>(kBytes), p.count - at));
  const ChannelGrid grid[1] = {p.grid};
  AffineVector<kBytes, kFast, kFloat>(p, LoadCodes<kBytes>(p.x + at, valid), grid, static_cast<unsigned>(at),
                                      valid);
}

template <int kBytes, bool kFast, bool kFloat, int kRepeat>
__global__ void __launch_bounds__(kThreads) AffineChannels(const __grid_constant__ AffineParams p) {
  LetSuccessorsStart();
  const unsigned thread = blockIdx.x * kThreads + threadIdx.x;
  const unsigned first = (thread - Quotient(thread, p.width) * p.width.divisor) * kBytes;
  ChannelGrid grids[kBytes];
#pragma unroll
  for (int i = 0; i < kBytes; ++i) grids[i] = p.grids[first + static_cast<unsigned>(i)];
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
    AffineVector<kBytes, kFast, kFloat>(p, codes[r], grids, static_cast<unsigned>(at), kBytes);
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

// What of a node its plans need.
struct PackedAffine {
  AffineParams params;
  int64_t channels = 1;
  bool fast = false, to_float = false;
  std::shared_ptr<const DeviceMemory> memory;
};

template <int kBytes, bool kFast, bool kFloat>
cudaError_t LaunchAffine(const AffineParams& p, bool per_channel, Queue& queue) {
  if (!per_channel) {
    const dim3 grid = GridFor((p.count + int64_t{kBytes} - 1) / kBytes, kThreads);
    return queue.Launch(AffineFlat<kBytes, kFast, kFloat>, grid, dim3(kThreads), p);
  }
  constexpr int kChannelBytes = kBytes == 16 ? 4 : kBytes;
  constexpr int kRepeat = 4;
  AffineParams q = p;
  q.width = MakeDivisor(static_cast<int64_t>(p.width.divisor) / kChannelBytes);
  const int64_t vectors = p.count / kChannelBytes, width = q.width.divisor, pixels = vectors / width;
  if (vectors <= kOneWave) {
    q.threads = static_cast<unsigned>(vectors);
    return queue.Launch(AffineChannels<kChannelBytes, kFast, kFloat, 1>, GridFor(vectors, kThreads),
                        dim3(kThreads), q);
  }
  q.threads = static_cast<unsigned>((pixels + kRepeat - 1) / kRepeat * width);
  return queue.Launch(AffineChannels<kChannelBytes, kFast, kFloat, kRepeat>, GridFor(q.threads, kThreads),
                      dim3(kThreads), q);
}

void LaunchAffine(const PackedAffine& node, const AffineParams& p, Queue& queue) {
  int unit = node.to_float ? std::min(4, CommonUnit({p.x})) : CommonUnit({p.x, p.y});
  if (node.to_float && CommonUnit({p.y}) < 16) unit = 1;
  if (node.channels > 1) unit = std::min({unit, CommonUnit(node.channels), 4});
  cudaError_t error = cudaSuccess;
  const bool per_channel = node.channels > 1;
  if (node.to_float) {
    WithUnit<4, 1>(unit, [&](auto bytes) {
      error = LaunchAffine<decltype(bytes)::value, true, true>(p, per_channel, queue);
    });
  } else {
    WithBool(node.fast, [&](auto fast) {
      WithUnit<16, 4, 1>(unit, [&](auto bytes) {
        error = LaunchAffine<decltype(bytes)::value, decltype(fast)::value, false>(p, per_channel, queue);
      });
    });
  }
  CheckLaunch(error, "affine");
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
    WithUnit<16, 4, 1>(CommonUnit({p.x, p.y}), [&](auto bytes) {
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
  WithUnit<4, 1>(unit, [&](auto bytes) {
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
  node->fast = FastDivisionIsExact(spec);
  node->params.flip = MakeReader(spec.x_signed, 0).flip;
  node->params.has_affine = spec.has_affine;
  node->params.grid = GridOf(spec, 0);
  if (spec.channels > 1) {
    std::vector<ChannelGrid> grids;
    for (size_t c = 0; c < static_cast<size_t>(spec.channels); ++c) grids.push_back(GridOf(spec, c));
    NodeConstants constants;
    constants.Add(grids);
    node->memory = UploadConstants(constants, device);
    node->params.grids = reinterpret_cast<const ChannelGrid*>(node->memory->At(0));
    node->params.width.divisor = static_cast<uint32_t>(spec.channels);
  }
  return MakeNode([node](Shapes, const TensorShape& y) {
    const int64_t count = CountOf(y.dims);
    return MakePlan(node->channels > 1 ? "affine_channels" : "affine_flat",
                    [node, count](Fed fed, void* to, void*, Queue& queue) {
                      if (count == 0) return;
                      AffineParams p = node->params;
                      p.x = static_cast<const uint8_t*>(fed[0]);
                      p.y = to;
                      p.count = static_cast<unsigned>(count);
                      LaunchAffine(*node, p, queue);
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
