// Between float32 and codes: LowBitQuantize and LowBitThreshold, LowBitDequantize; as the tensor lies or with
// its channels moved. Moved ones go through tiles of pixels and channels in shared memory, so that both sides
// are read and written along their innermost dim.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_families.h"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTileChannels = 64, kTilePixels = 64;
constexpr int kTileBytes = kTilePixels * (kTileChannels + 4);
constexpr int kFewThreads = 128;

// LowBitQuantize of one channel.
struct QuantizerGrid {
  float scale = 1, inverse = 1;
  float limit = 1024;  // beyond +-limit every value has the same code as there
  float lo = 0, hi = 255, magic = 0;
  uint32_t odd = 0, unused = 0;
};

template <bool kFast>
struct QuantizeMap {
  QuantizerGrid grid;
  const QuantizerGrid* grids = nullptr;  // per channel, or null

  __device__ __forceinline__ unsigned operator()(float v, unsigned channel) const {
    const QuantizerGrid g = grids != nullptr ? grids[channel] : grid;
    // Divisions by Markstein's sequence need bounds; fmaxf takes the number where v is NaN.
    if constexpr (kFast) v = fminf(fmaxf(v, -g.limit), g.limit);
    const float q = Divide<kFast>(v, Divider{g.scale, g.inverse});
    return RoundedCode(q, CodeRounder{g.lo, g.hi, g.magic, false}) + g.odd;
  }
};

struct ThresholdMap {
  const float* rows = nullptr;  // [channels][count], ascending
  const float* dir = nullptr;
  const int32_t* base = nullptr;
  unsigned count = 0;
  bool per_channel = false;

  // How many thresholds the value reaches, by bisection; NaN reaches none.
  __device__ __forceinline__ unsigned operator()(float v, unsigned channel) const {
    const unsigned c = per_channel ? channel : 0;
    const float* row = rows + static_cast<size_t>(c) * count;
    const float directed = __fmul_rn(dir[c], v);
    unsigned reached = 0;
#pragma unroll
    for (unsigned step = 128; step > 0; step /= 2) {
      if (reached + step <= count && row[reached + step - 1] <= directed) reached += step;
    }
    return static_cast<unsigned>(base[c]) + reached;
  }
};

template <typename Map>
struct FlatParams {
  const float* x = nullptr;
  uint8_t* y = nullptr;
  unsigned count = 0;
  FastDivisor channels;
  Map map;
};

// kCount 4 or 1 values, kRepeat times.
template <typename Map, int kCount, int kRepeat>
__global__ void __launch_bounds__(kThreads) FlatToCodes(const __grid_constant__ FlatParams<Map> p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kRepeat * kThreads + threadIdx.x) * kCount;
  float v[kRepeat][kCount];
#pragma unroll
  for (int r = 0; r < kRepeat; ++r) {
    const int64_t at = first + static_cast<int64_t>(r) * kThreads * kCount;
    if constexpr (kCount == 4) {
      if (at + 4 <= p.count) {
        const float4 four = *reinterpret_cast<const float4*>(p.x + at);
        v[r][0] = four.x, v[r][1] = four.y, v[r][2] = four.z, v[r][3] = four.w;
        continue;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[r][i] = at + i < p.count ? p.x[at + i] : 0.0f;
  }
#pragma unroll
  for (int r = 0; r < kRepeat; ++r) {
    const int64_t at = first + static_cast<int64_t>(r) * kThreads * kCount;
    if (at >= p.count) return;
    const auto element = static_cast<unsigned>(at);
    const unsigned c0 = element - Quotient(element, p.channels) * p.channels.divisor;
    Codes<kCount> codes = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      unsigned c = c0 + static_cast<unsigned>(i);
      if (c >= p.channels.divisor) c -= p.channels.divisor;
      codes.w[0] |= (p.map(v[r][i], c) & 255u) << (8 * i);
    }
    StoreCodes<kCount>(p.y + at, codes, static_cast<int>(min(static_cast<int64_t>(kCount), p.count - at)));
  }
}

// How images of [pixels, channels] codes are cut into tiles.
struct PlaneTiles {
  unsigned pixels = 0, channels = 0;
  unsigned pitch = 0;           // bytes from pixel to pixel of a tile: an odd number of words
  int unit = 1, row_shift = 0;  // codes move `unit` bytes at a time, 2^row_shift threads serve a pixel
  FastDivisor by_pixel_tiles, by_channel_tiles;
};

struct TileOrigin {
  unsigned image, pixel, channel;
  unsigned pixels, channels;  // of this tile
};

__device__ __forceinline__ TileOrigin OriginOf(const PlaneTiles& t, unsigned block) {
  TileOrigin o;
  const unsigned rest = Quotient(block, t.by_channel_tiles);
  o.channel = (block - rest * t.by_channel_tiles.divisor) * kTileChannels;
  o.image = Quotient(rest, t.by_pixel_tiles);
  o.pixel = (rest - o.image * t.by_pixel_tiles.divisor) * kTilePixels;
  o.pixels = min(t.pixels - o.pixel, static_cast<unsigned>(kTilePixels));
  o.channels = min(t.channels - o.channel, static_cast<unsigned>(kTileChannels));
  return o;
}

// A tile's codes between shared memory and the tensor.
template <int kBytes, bool kToShared>
__device__ __forceinline__ void MoveRows(const PlaneTiles& t, const TileOrigin& o, uint8_t* shared,
                                         uint8_t* tensor) {
  const unsigned column = (threadIdx.x & ((1u << t.row_shift) - 1)) * kBytes;
  if (column >= o.channels) return;
  uint8_t* global = tensor + (static_cast<int64_t>(o.image) * t.pixels + o.pixel) * t.channels + o.channel;
  for (unsigned row = threadIdx.x >> t.row_shift; row < o.pixels;
       row += static_cast<unsigned>(kThreads) >> t.row_shift) {
    uint8_t* s = shared + row * t.pitch + column;
    uint8_t* g = global + static_cast<int64_t>(row) * t.channels + column;
    // Rows of a tile begin at words, not at 16 bytes.
    constexpr int kStep = kBytes < 4 ? kBytes : 4;
    Codes<kBytes> codes;
    if constexpr (kToShared) codes = LoadCodes<kBytes>(g);
#pragma unroll
    for (int i = 0; i < Codes<kBytes>::kWords; ++i) {
      if constexpr (kToShared) {
        StoreCodes<kStep>(s + 4 * i, Codes<kStep>{{codes.w[i]}});
      } else {
        codes.w[i] = LoadCodes<kStep>(s + 4 * i).w[0];
      }
    }
    if constexpr (!kToShared) StoreCodes<kBytes>(g, codes);
  }
}

template <bool kToShared>
__device__ __forceinline__ void MoveTile(const PlaneTiles& t, const TileOrigin& o, uint8_t* shared,
                                         uint8_t* tensor) {
  if (t.unit == 16) return MoveRows<16, kToShared>(t, o, shared, tensor);
  if (t.unit == 4) return MoveRows<4, kToShared>(t, o, shared, tensor);
  MoveRows<1, kToShared>(t, o, shared, tensor);
}

// kCount 4 or 1 neighbouring floats.
template <int kCount>
__device__ __forceinline__ void LoadFloats(const float* x, float (&v)[kCount]) {
  if constexpr (kCount == 4) {
    const float4 four = *reinterpret_cast<const float4*>(x);
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
  } else {
    v[0] = *x;
  }
}

template <typename Map>
struct PlanesParams {
  const float* x = nullptr;
  uint8_t* y = nullptr;
  PlaneTiles tiles;
  Map map;
};

// x [images, channels, pixels]. A thread turns kCount pixels of four channels into words of a tile.
template <typename Map, int kCount>
__global__ void __launch_bounds__(kThreads) PlanesToCodes(const __grid_constant__ PlanesParams<Map> p) {
  __shared__ __align__(16) uint8_t tile[kTileBytes];
  LetSuccessorsStart();
  WaitForPredecessors();
  const PlaneTiles& t = p.tiles;
  const TileOrigin o = OriginOf(t, blockIdx.x);
  const float* x = p.x + (static_cast<int64_t>(o.image) * t.channels + o.channel) * t.pixels + o.pixel;
  constexpr unsigned kPerChannel = kTilePixels / kCount;
#pragma unroll
  for (unsigned item = threadIdx.x; item < kPerChannel * kTileChannels / 4; item += kThreads) {
    const unsigned c = item / kPerChannel * 4, pixel = item % kPerChannel * kCount;
    if (c >= o.channels || pixel >= o.pixels) continue;
    float v[4][kCount] = {};
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      if (c + i < o.channels) LoadFloats<kCount>(x + static_cast<int64_t>(c + i) * t.pixels + pixel, v[i]);
    }
#pragma unroll
    for (unsigned j = 0; j < kCount; ++j) {
      unsigned code[4];
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) code[i] = p.map(v[i][j], min(o.channel + c + i, t.channels - 1));
      *reinterpret_cast<unsigned*>(tile + (pixel + j) * t.pitch + c) = PackBytes(code);
    }
  }
  __syncthreads();
  MoveTile<false>(t, o, tile, p.y);
}

// kChannels planes of few channels, a multiple of 4 pixels: a thread has all codes of four pixels.
template <typename Map, int kChannels>
__global__ void __launch_bounds__(kFewThreads) FewPlanesToCodes(const __grid_constant__ PlanesParams<Map> p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const unsigned four = blockIdx.x * kFewThreads + threadIdx.x;
  const unsigned image = Quotient(four, p.tiles.by_pixel_tiles);
  if (image >= p.tiles.by_channel_tiles.divisor) return;
  const unsigned pixel = (four - image * p.tiles.by_pixel_tiles.divisor) * 4;
  const float* x = p.x + static_cast<int64_t>(image) * kChannels * p.tiles.pixels + pixel;
  float v[kChannels][4];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) LoadFloats<4>(x + static_cast<int64_t>(c) * p.tiles.pixels, v[c]);
  unsigned* y = reinterpret_cast<unsigned*>(p.y) + static_cast<int64_t>(four) * kChannels;
#pragma unroll
  for (int word = 0; word < kChannels; ++word) {
    unsigned code[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int byte = 4 * word + i;
      code[i] = p.map(v[byte % kChannels][byte / kChannels], byte % kChannels);
    }
    y[word] = PackBytes(code);
  }
}

struct DequantizeGrid {
  float bias = 0, scale = 1;
};

struct CodesToPlanesParams {
  const uint8_t* x = nullptr;
  float* y = nullptr;
  PlaneTiles tiles;
  uint32_t flip = 0;
  DequantizeGrid grid;
  const DequantizeGrid* grids = nullptr;  // per channel, or null
};

__device__ __forceinline__ DequantizeGrid GridOf(const CodesToPlanesParams& p, unsigned channel) {
  return p.grids != nullptr ? p.grids[channel] : p.grid;
}

template <int kCount>
__device__ __forceinline__ void StoreFloats(float* y, const float (&v)[kCount]) {
  if constexpr (kCount == 4) {
    *reinterpret_cast<float4*>(y) = make_float4(v[0], v[1], v[2], v[3]);
  } else {
    *y = v[0];
  }
}

template <int kCount>
__global__ void __launch_bounds__(kThreads) CodesToPlanes(const __grid_constant__ CodesToPlanesParams p) {
  __shared__ __align__(16) uint8_t tile[kTileBytes];
  LetSuccessorsStart();
  WaitForPredecessors();
  const PlaneTiles& t = p.tiles;
  const TileOrigin o = OriginOf(t, blockIdx.x);
  MoveTile<true>(t, o, tile, const_cast<uint8_t*>(p.x));
  __syncthreads();
  float* y = p.y + (static_cast<int64_t>(o.image) * t.channels + o.channel) * t.pixels + o.pixel;
  constexpr unsigned kPerChannel = kTilePixels / kCount;
#pragma unroll
  for (unsigned item = threadIdx.x; item < kPerChannel * kTileChannels / 4; item += kThreads) {
    const unsigned c = item / kPerChannel * 4, pixel = item % kPerChannel * kCount;
    if (c >= o.channels || pixel >= o.pixels) continue;
    unsigned words[kCount];
#pragma unroll
    for (unsigned j = 0; j < kCount; ++j) {
      words[j] = *reinterpret_cast<const unsigned*>(tile + (pixel + j) * t.pitch + c) ^ p.flip;
    }
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      if (c + i >= o.channels) break;
      const DequantizeGrid g = GridOf(p, o.channel + c + i);
      float v[kCount];
#pragma unroll
      for (unsigned j = 0; j < kCount; ++j) {
        v[j] = __fmul_rn(CodeValue(words[j], static_cast<int>(i), {p.flip, g.bias}), g.scale);
      }
      StoreFloats<kCount>(y + static_cast<int64_t>(c + i) * t.pixels + pixel, v);
    }
  }
}

template <int kChannels>
__global__ void __launch_bounds__(kFewThreads)
    FewCodesToPlanes(const __grid_constant__ CodesToPlanesParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const unsigned four = blockIdx.x * kFewThreads + threadIdx.x;
  const unsigned image = Quotient(four, p.tiles.by_pixel_tiles);
  if (image >= p.tiles.by_channel_tiles.divisor) return;
  const unsigned pixel = (four - image * p.tiles.by_pixel_tiles.divisor) * 4;
  const unsigned* x = reinterpret_cast<const unsigned*>(p.x) + static_cast<int64_t>(four) * kChannels;
  unsigned words[kChannels];
#pragma unroll
  for (int i = 0; i < kChannels; ++i) words[i] = x[i] ^ p.flip;
  float* y = p.y + static_cast<int64_t>(image) * kChannels * p.tiles.pixels + pixel;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    const DequantizeGrid g = GridOf(p, c);
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int byte = j * kChannels + c;
      v[j] = __fmul_rn(CodeValue(words[byte / 4], byte % 4, {p.flip, g.bias}), g.scale);
    }
    StoreFloats<4>(y + static_cast<int64_t>(c) * p.tiles.pixels, v);
  }
}

struct Tiling {
  PlaneTiles tiles;
  int64_t blocks = 0;
};

// [images, pixels, channels] with the codes at `codes`.
Tiling TilingOf(int64_t images, int64_t pixels, int64_t channels, const void* codes) {
  Tiling out;
  PlaneTiles& t = out.tiles;
  t.pixels = static_cast<unsigned>(pixels);
  t.channels = static_cast<unsigned>(channels);
  const unsigned width = std::min(t.channels, static_cast<unsigned>(kTileChannels));
  t.pitch = ((width + 3) / 4 | 1u) * 4;
  t.unit = std::min(CommonUnit({codes}), CommonUnit(channels));
  while ((1u << t.row_shift) < width / static_cast<unsigned>(t.unit)) ++t.row_shift;
  t.by_pixel_tiles = MakeDivisor((pixels + kTilePixels - 1) / kTilePixels);
  t.by_channel_tiles = MakeDivisor((channels + kTileChannels - 1) / kTileChannels);
  out.blocks = images * t.by_pixel_tiles.divisor * t.by_channel_tiles.divisor;
  return out;
}

// The same for the kernels of few channels: tiles of four pixels, and the images in place of channel tiles.
Tiling FewTilingOf(int64_t images, int64_t pixels) {
  Tiling out;
  out.tiles.pixels = static_cast<unsigned>(pixels);
  out.tiles.by_pixel_tiles = MakeDivisor(pixels / 4);
  out.tiles.by_channel_tiles.divisor = static_cast<uint32_t>(images);
  out.blocks = GridFor(images * (pixels / 4), kFewThreads).x;
  return out;
}

// What stands between the shapes and the kernels: [images, channels, pixels] floats against
// [images, pixels, channels] codes. Flat where nothing moves.
struct FloatCodes {
  int64_t images = 0, pixels = 1, channels = 1;
  int64_t count = 0;
  bool moves = false;
};

// `codes`: the shape with the channels last.
FloatCodes GeometryOf(const TensorShape& codes, bool moves) {
  FloatCodes g;
  g.count = CountOf(codes.dims);
  if (g.count == 0 || codes.dims.empty()) return g;
  g.channels = codes.dims.back();
  if (!moves) return g;
  g.images = codes.dims.front();
  g.pixels = g.count / g.channels / g.images;
  g.moves = g.pixels > 1 && g.channels > 1;
  return g;
}

template <typename Map>
cudaError_t LaunchFlat(const FloatCodes& g, const Map& map, bool per_channel, const float* x, uint8_t* y,
                       Queue& queue) {
  FlatParams<Map> p;
  p.x = x;
  p.y = y;
  p.count = static_cast<unsigned>(g.count);
  p.map = map;
  p.channels = MakeDivisor(g.channels);
  // With one or two channels, four values may reach a channel twice.
  const bool fours = CommonUnit({x}) == 16 && CommonUnit({y}) >= 4 && (!per_channel || g.channels > 2);
  if (!fours) {
    return queue.Launch(FlatToCodes<Map, 1, 1>, GridFor(g.count, kThreads), dim3(kThreads), p);
  }
  if (!per_channel) p.channels = MakeDivisor(4);
  const int64_t vectors = (g.count + 3) / 4;
  return g.count <= 4 * kOneWave
             ? queue.Launch(FlatToCodes<Map, 4, 1>, GridFor(vectors, kThreads), dim3(kThreads), p)
             : queue.Launch(FlatToCodes<Map, 4, 4>, GridFor(vectors, 4 * kThreads), dim3(kThreads), p);
}

// Whether the kernels of few channels serve; floats and codes aligned as they need it.
bool IsFew(const FloatCodes& g, const void* floats, const void* codes) {
  return g.channels <= 4 && g.pixels % 4 == 0 && CommonUnit({floats}) == 16 && CommonUnit({codes}) >= 4;
}

template <typename Map>
cudaError_t LaunchToCodes(const FloatCodes& g, const Map& map, bool per_channel, const float* x, uint8_t* y,
                          Queue& queue) {
  if (!g.moves) return LaunchFlat(g, map, per_channel, x, y, queue);
  const bool few = IsFew(g, x, y);
  const Tiling tiling = few ? FewTilingOf(g.images, g.pixels) : TilingOf(g.images, g.pixels, g.channels, y);
  const PlanesParams<Map> p{x, y, tiling.tiles, map};
  const dim3 grid(static_cast<unsigned>(tiling.blocks));
  if (!few) {
    return CommonUnit({x}) == 16 && g.pixels % 4 == 0
               ? queue.Launch(PlanesToCodes<Map, 4>, grid, dim3(kThreads), p)
               : queue.Launch(PlanesToCodes<Map, 1>, grid, dim3(kThreads), p);
  }
  cudaError_t error = cudaSuccess;
  WithInt<2, 3, 4>(static_cast<int>(g.channels), [&](auto channels) {
    error = queue.Launch(FewPlanesToCodes<Map, decltype(channels)::value>, grid, dim3(kFewThreads), p);
  });
  return error;
}

cudaError_t LaunchToPlanes(const FloatCodes& g, CodesToPlanesParams p, Queue& queue) {
  const bool few = IsFew(g, p.y, p.x);
  const Tiling tiling = few ? FewTilingOf(g.images, g.pixels) : TilingOf(g.images, g.pixels, g.channels, p.x);
  p.tiles = tiling.tiles;
  const dim3 grid(static_cast<unsigned>(tiling.blocks));
  if (!few) {
    return CommonUnit({p.y}) == 16 && g.pixels % 4 == 0
               ? queue.Launch(CodesToPlanes<4>, grid, dim3(kThreads), p)
               : queue.Launch(CodesToPlanes<1>, grid, dim3(kThreads), p);
  }
  cudaError_t error = cudaSuccess;
  WithInt<2, 3, 4>(static_cast<int>(g.channels), [&](auto channels) {
    error = queue.Launch(FewCodesToPlanes<decltype(channels)::value>, grid, dim3(kFewThreads), p);
  });
  return error;
}

QuantizerGrid GridOf(const Quantizer& q) {
  const CodeRounder rounder = MakeRounder(q);
  const Divider divider = MakeDivider(q.scale);
  return {divider.scale, divider.inverse, 1024 * q.scale,       rounder.lo,
          rounder.hi,    rounder.magic,   rounder.odd ? 1u : 0u};
}

// A node from its map and the constants that the map reads. `text` names the kernel.
template <typename Map>
std::unique_ptr<PackedNode> MakeToCodes(const char* text, const Map& map, bool per_channel, bool moves,
                                        std::shared_ptr<const DeviceMemory> memory) {
  return MakeNode([=](Shapes, const TensorShape& y) {
    const FloatCodes g = GeometryOf(y, moves);
    return MakePlan(std::string(text) + (g.moves ? "_planes" : "_flat"),
                    [=](Fed from, void* to, void*, Queue& queue) {
                      (void)memory;  // lives as long as its plans
                      if (g.count == 0) return;
                      CheckLaunch(LaunchToCodes(g, map, per_channel, static_cast<const float*>(from[0]),
                                                static_cast<uint8_t*>(to), queue),
                                  text);
                    });
  });
}

}  // namespace

std::unique_ptr<PackedNode> PackQuantize(const QuantizeNode& node, const Device& device) {
  std::vector<QuantizerGrid> grids;
  bool fast = true;
  for (const Quantizer& q : node.grids) {
    grids.push_back(GridOf(q));
    fast = fast && FastDivisionIsExact(q.scale, 1024 * static_cast<double>(q.scale));
  }
  const bool per_channel = grids.size() > 1;
  std::shared_ptr<const DeviceMemory> memory;
  const QuantizerGrid* uploaded = nullptr;
  if (per_channel) {
    NodeConstants constants;
    constants.Add(grids);
    memory = UploadConstants(constants, device);
    uploaded = reinterpret_cast<const QuantizerGrid*>(memory->At(0));
  }
  return WithBool(fast, [&](auto fast_) {
    const QuantizeMap<decltype(fast_)::value> map{grids.front(), uploaded};
    return MakeToCodes("quantize", map, per_channel, node.to_channels_last, memory);
  });
}

std::unique_ptr<PackedNode> PackThreshold(const ThresholdNode& node, const Device& device) {
  const ThresholdSpec& spec = node.spec;
  const auto channels = static_cast<std::ptrdiff_t>(spec.channels);
  NodeConstants constants;
  const size_t rows = constants.Add(spec.thresholds);
  const size_t dir = constants.Add(std::vector<float>(spec.dir.begin(), spec.dir.begin() + channels));
  const size_t base = constants.Add(std::vector<int32_t>(spec.base.begin(), spec.base.begin() + channels));
  const auto memory = UploadConstants(constants, device);
  ThresholdMap map;
  map.rows = reinterpret_cast<const float*>(memory->At(rows));
  map.dir = reinterpret_cast<const float*>(memory->At(dir));
  map.base = reinterpret_cast<const int32_t*>(memory->At(base));
  map.count = static_cast<unsigned>(spec.count);
  map.per_channel = spec.channels > 1;
  return MakeToCodes("threshold", map, map.per_channel, node.to_channels_last, memory);
}

std::unique_ptr<PackedNode> PackDequantize(const DequantizeNode& node, const Device& device) {
  const AffineSpec& spec = node.spec;
  if (!node.to_channels_first) return PackAffine(spec, device);
  const std::shared_ptr<PackedNode> flat = PackAffine(spec, device);
  std::vector<DequantizeGrid> grids;
  for (size_t c = 0; c < static_cast<size_t>(spec.channels); ++c) {
    grids.push_back({MakeReader(spec.x_signed, spec.x_zero_point[c]).bias, spec.x_scale[c]});
  }
  CodesToPlanesParams params;
  params.flip = MakeReader(spec.x_signed, 0).flip;
  params.grid = grids.front();
  std::shared_ptr<const DeviceMemory> memory;
  if (grids.size() > 1) {
    NodeConstants constants;
    constants.Add(grids);
    memory = UploadConstants(constants, device);
    params.grids = reinterpret_cast<const DequantizeGrid*>(memory->At(0));
  }
  return MakeNode([=](Shapes fed, const TensorShape& y) {
    const FloatCodes g = GeometryOf(fed[0], true);
    if (!g.moves) return flat->Plan(fed, y);
    return MakePlan("dequantize_planes", [=](Fed from, void* to, void*, Queue& queue) {
      (void)memory;  // lives as long as its plans
      CodesToPlanesParams p = params;
      p.x = static_cast<const uint8_t*>(from[0]);
      p.y = static_cast<float*>(to);
      CheckLaunch(LaunchToPlanes(g, p, queue), "dequantize");
    });
  });
}

}  // namespace lowbit::cuda
