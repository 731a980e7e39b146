// Between float32 and codes: LowBitQuantize and LowBitThreshold, LowBitDequantize; as the tensor lies or with
// its channels moved. Moved ones go through tiles of pixels and channels in shared memory, so that both sides
// are read and written along their innermost dim.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

constexpr int kTileChannels = 64, kTilePixels = 64;
constexpr int kTileBytes = kTilePixels * (kTileChannels + 4);
constexpr int kFewThreads = 128;

template <bool kFast, bool kPerChannel>
struct QuantizeMap {
  QuantizerGrid grid;
  const QuantizerGrid* grids = nullptr;

  __device__ __forceinline__ unsigned operator()(float v, unsigned channel) const {
    return QuantizedCode<kFast>(v, kPerChannel ? grids[channel] : grid);
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

struct DequantizeMap {
  uint32_t flip = 0;
  float2 grid{};                  // bias and scale
  const float2* grids = nullptr;  // per channel, or null
};

template <typename Map>
struct FlatParams : Tensors<float, uint8_t> {
  FastDivisor channels;
  Map map;
};

// kCount 4 or 1 values, kRepeat times.
template <typename Map, int kCount, int kRepeat>
__global__ void __launch_bounds__(kThreads) FlatToCodes(const __grid_constant__ FlatParams<Map> p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const unsigned first = (blockIdx.x * (kRepeat * kThreads) + threadIdx.x) * kCount;
  constexpr unsigned kStep = kThreads * kCount;
  float v[kRepeat][kCount];
#pragma unroll
  for (unsigned r = 0; r < kRepeat; ++r) {
    const unsigned at = first + r * kStep;
    LoadFloats(p.x + at, v[r], static_cast<int>(p.count - at));
  }
#pragma unroll
  for (unsigned r = 0; r < kRepeat; ++r) {
    const unsigned at = first + r * kStep;
    if (at >= p.count) return;
    const unsigned c0 = Divided(at, p.channels).rest;
    const auto code = [&](int i) {
      const unsigned c = c0 + static_cast<unsigned>(i);
      return p.map(v[r][i], c < p.channels.divisor ? c : c - p.channels.divisor);
    };
    StoreCodes(p.y + at, MakeCodes<kCount>(code), static_cast<int>(p.count - at));
  }
}

// How images of [pixels, channels] codes are cut into tiles.
struct PlaneTiles {
  unsigned pixels = 0, channels = 0;
  unsigned pitch = 0;           // bytes from pixel to pixel of a tile: an odd number of words
  int unit = 1, row_shift = 0;  // codes move `unit` bytes at a time, 2^row_shift threads serve a pixel
  FastDivisor by_pixel_tiles, by_channel_tiles;
};

// Codes and floats, either of which is x; `floats` is [images, channels, pixels], codes end with channels.
template <typename Map>
struct PlanesParams {
  float* floats = nullptr;
  uint8_t* codes = nullptr;
  PlaneTiles tiles;
  Map map;
};

struct TileOrigin {
  unsigned image, pixel, channel;
  unsigned pixels, channels;  // of this tile
};

__device__ __forceinline__ TileOrigin OriginOf(const PlaneTiles& t) {
  const auto [rest, channel_tile] = Divided(blockIdx.x, t.by_channel_tiles);
  const auto [image, pixel_tile] = Divided(rest, t.by_pixel_tiles);
  const unsigned pixel = pixel_tile * kTilePixels, channel = channel_tile * kTileChannels;
  return {image, pixel, channel, min(t.pixels - pixel, static_cast<unsigned>(kTilePixels)),
          min(t.channels - channel, static_cast<unsigned>(kTileChannels))};
}

// A tile's codes between shared memory and the tensor. Rows of a tile begin at words, not at 16 bytes.
template <int kBytes, bool kToShared>
__device__ __forceinline__ void MoveRows(const PlaneTiles& t, const TileOrigin& o, uint8_t* shared,
                                         uint8_t* tensor) {
  constexpr int kStep = Codes<kBytes>::kPerWord;
  const unsigned column = (threadIdx.x & ((1u << t.row_shift) - 1)) * kBytes;
  if (column >= o.channels) return;
  uint8_t* global = tensor + (static_cast<int64_t>(o.image) * t.pixels + o.pixel) * t.channels + o.channel;
  for (unsigned row = threadIdx.x >> t.row_shift; row < o.pixels;
       row += static_cast<unsigned>(kThreads) >> t.row_shift) {
    uint8_t* s = shared + row * t.pitch + column;
    uint8_t* g = global + static_cast<int64_t>(row) * t.channels + column;
    Codes<kBytes> codes;
    if constexpr (kToShared) codes = LoadCodes<kBytes>(g);
#pragma unroll
    for (int i = 0; i < Codes<kBytes>::kWords; ++i) {
      if constexpr (kToShared) {
        StoreCodes<kStep>(s + 4 * i, {{codes.w[i]}});
      } else {
        codes.w[i] = LoadCodes<kStep>(s + 4 * i).w[0];
      }
    }
    if constexpr (!kToShared) StoreCodes(g, codes);
  }
}

template <bool kToShared>
__device__ __forceinline__ void MoveTile(const PlaneTiles& t, const TileOrigin& o, uint8_t* shared,
                                         uint8_t* tensor) {
  if (t.unit == 16) return MoveRows<16, kToShared>(t, o, shared, tensor);
  if (t.unit == 4) return MoveRows<4, kToShared>(t, o, shared, tensor);
  MoveRows<1, kToShared>(t, o, shared, tensor);
}

// A thread's part of a tensor: kChannels planes, of which `channels` are there, at kPixels neighbouring
// pixels. Their codes are words of four, `step` bytes apart, in the order of pixels and then channels.
struct Part {
  float* floats;
  int64_t plane;  // floats from plane to plane
  uint8_t* codes;
  unsigned step;
  unsigned channel, channels;  // the first one in the tensor
};

template <int kChannels, int kPixels, typename Map>
__device__ __forceinline__ void MovePart(const Map& map, const Part& part) {
  float v[kChannels][kPixels] = {};
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    if (c < part.channels) LoadFloats(part.floats + c * part.plane, v[c]);
  }
#pragma unroll
  for (int word = 0; word < kPixels * kChannels / 4; ++word) {
    const auto code = [&](int i) {
      const unsigned at = 4 * word + i, c = at % kChannels;
      return map(v[c][at / kChannels], part.channel + min(c, part.channels - 1));
    };
    StoreCodes(part.codes + word * part.step, MakeCodes<4>(code));
  }
}

template <int kChannels, int kPixels>
__device__ __forceinline__ void MovePart(const DequantizeMap& map, const Part& part) {
  constexpr int kWords = kPixels * kChannels / 4;
  Codes<4> words[kWords];
#pragma unroll
  for (int word = 0; word < kWords; ++word) words[word] = LoadCodes<4>(part.codes + word * part.step);
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    if (c >= part.channels) break;
    const float2 grid = map.grids != nullptr ? map.grids[part.channel + c] : map.grid;
    float v[kPixels];
#pragma unroll
    for (int j = 0; j < kPixels; ++j) {
      const int at = j * kChannels + c;
      v[j] = __fmul_rn(CodeValue(words[at / 4], at % 4, {map.flip, grid.x}), grid.y);
    }
    StoreFloats(part.floats + c * part.plane, v);
  }
}

// Through a tile of codes, in parts of four channels and kPixels pixels.
template <typename Map, int kPixels>
__global__ void __launch_bounds__(kThreads) MoveTiles(const __grid_constant__ PlanesParams<Map> p) {
  __shared__ __align__(16) uint8_t tile[kTileBytes];
  LetSuccessorsStart();
  WaitForPredecessors();
  constexpr bool kToFloats = std::is_same_v<Map, DequantizeMap>;
  const PlaneTiles& t = p.tiles;
  const TileOrigin o = OriginOf(t);
  float* floats = p.floats + (static_cast<int64_t>(o.image) * t.channels + o.channel) * t.pixels + o.pixel;
  if constexpr (kToFloats) {
    MoveTile<true>(t, o, tile, p.codes);
    __syncthreads();
  }
  constexpr unsigned kPerChannel = kTilePixels / kPixels;
#pragma unroll
  for (unsigned i = threadIdx.x; i < kPerChannel * kTileChannels / 4; i += kThreads) {
    const unsigned c = i / kPerChannel * 4, pixel = i % kPerChannel * kPixels;
    if (c >= o.channels || pixel >= o.pixels) continue;
    MovePart<4, kPixels>(p.map, {floats + static_cast<int64_t>(c) * t.pixels + pixel, t.pixels,
                                 tile + pixel * t.pitch + c, t.pitch, o.channel + c, o.channels - c});
  }
  if constexpr (!kToFloats) {
    __syncthreads();
    MoveTile<false>(t, o, tile, p.codes);
  }
}

// Few channels, a multiple of 4 pixels: a thread has all codes of four pixels.
template <typename Map, int kChannels>
__global__ void __launch_bounds__(kFewThreads) MoveFew(const __grid_constant__ PlanesParams<Map> p) {
  const unsigned four = StartThread<kFewThreads>();
  const auto [image, inside] = Divided(four, p.tiles.by_pixel_tiles);
  if (image >= p.tiles.by_channel_tiles.divisor) return;
  float* floats = p.floats + static_cast<int64_t>(image) * kChannels * p.tiles.pixels + inside * 4;
  uint8_t* codes = p.codes + static_cast<int64_t>(four) * (4 * kChannels);
  MovePart<kChannels, 4>(p.map, {floats, p.tiles.pixels, codes, 4, 0, kChannels});
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
void LaunchFlat(const Run& run, const FloatCodes& g, const Map& map, bool per_channel) {
  FlatParams<Map> p;
  p.x = static_cast<const float*>(run.fed[0]);
  p.y = static_cast<uint8_t*>(run.y);
  p.count = static_cast<unsigned>(g.count);
  p.map = map;
  p.channels = MakeDivisor(g.channels);
  // With one or two channels, four values may reach a channel twice.
  const bool fours = CommonUnit({p.x}) == 16 && CommonUnit({p.y}) >= 4 && (!per_channel || g.channels > 2);
  if (!fours) return run.LaunchFor(g.count, FlatToCodes<Map, 1, 1>, kThreads, p);
  if (!per_channel) p.channels = MakeDivisor(4);
  const int64_t vectors = BlocksFor(g.count, 4);
  if (g.count <= 4 * kOneWave) return run.LaunchFor(vectors, FlatToCodes<Map, 4, 1>, kThreads, p);
  run.Launch(FlatToCodes<Map, 4, 4>, dim3(BlocksFor(vectors, 4 * kThreads)), kThreads, p);
}

template <typename Map>
void LaunchPlanes(const Run& run, const FloatCodes& g, const Map& map, const void* floats,
                  const void* codes) {
  PlanesParams<Map> p;
  p.floats = static_cast<float*>(const_cast<void*>(floats));
  p.codes = static_cast<uint8_t*>(const_cast<void*>(codes));
  p.map = map;
  PlaneTiles& t = p.tiles;
  t.pixels = static_cast<unsigned>(g.pixels);
  t.channels = static_cast<unsigned>(g.channels);
  const bool fours = CommonUnit({p.floats}) == 16 && g.pixels % 4 == 0;
  if (fours && g.channels <= 4 && CommonUnit({p.codes}) >= 4) {
    // Tiles of four pixels, and the images in place of channel tiles.
    t.by_pixel_tiles = MakeDivisor(g.pixels / 4);
    t.by_channel_tiles.divisor = static_cast<uint32_t>(g.images);
    const int64_t threads = g.images * (g.pixels / 4);
    return std::visit([&](auto channels) { run.LaunchFor(threads, MoveFew<Map, channels>, kFewThreads, p); },
                      OneOf<2, 3, 4>(static_cast<int>(g.channels)));
  }
  const unsigned width = std::min(t.channels, static_cast<unsigned>(kTileChannels));
  t.pitch = (BlocksFor(width, 4) | 1u) * 4;
  t.unit = std::min(CommonUnit({p.codes}), CommonUnit(g.channels));
  while ((1u << t.row_shift) < width / static_cast<unsigned>(t.unit)) ++t.row_shift;
  t.by_pixel_tiles = MakeDivisor(BlocksFor(g.pixels, kTilePixels));
  t.by_channel_tiles = MakeDivisor(BlocksFor(g.channels, kTileChannels));
  const int64_t blocks = g.images * t.by_pixel_tiles.divisor * t.by_channel_tiles.divisor;
  run.Launch(fours ? MoveTiles<Map, 4> : MoveTiles<Map, 1>, dim3(static_cast<unsigned>(blocks)), kThreads, p);
}

// A node from its map and the constants that the map reads. `text` names the kernel.
template <typename Map>
PackedNodePtr MakeToCodes(const char* text, const Map& map, bool per_channel, bool moves,
                          std::shared_ptr<const DeviceMemory> memory) {
  const auto plan = [=](Shapes, const TensorShape& y) {
    const FloatCodes g = GeometryOf(y, moves);
    return MakePlan(std::string(text) + (g.moves ? "_planes" : "_flat"), [=](const Run& run) {
      if (g.count == 0) return;
      if (!g.moves) return LaunchFlat(run, g, map, per_channel);
      LaunchPlanes(run, g, map, run.fed[0], run.y);
    });
  };
  return MakeNode(plan, std::move(memory));
}

}  // namespace

PackedNodePtr Pack(const QuantizeNode& node, const Device& device) {
  std::vector<QuantizerGrid> grids;
  bool fast = true;
  for (const Quantizer& q : node.grids) {
    grids.push_back(MakeGrid(q));
    fast = fast && QuantizesFast(q);
  }
  const bool per_channel = grids.size() > 1;
  const QuantizerGrid* uploaded = nullptr;
  NodeConstants constants;
  if (per_channel) constants.Add(grids, uploaded);
  const auto memory = constants.Upload(device);
  return std::visit(
      [&](auto fast_, auto per_channel_) {
        const QuantizeMap<fast_, per_channel_> map{grids.front(), uploaded};
        return MakeToCodes("quantize", map, per_channel, node.to_channels_last, memory);
      },
      OneOf(fast), OneOf(per_channel));
}

PackedNodePtr Pack(const ThresholdNode& node, const Device& device) {
  const ThresholdSpec& spec = node.spec;
  const auto channels = static_cast<std::ptrdiff_t>(spec.channels);
  ThresholdMap map;
  NodeConstants constants;
  constants.Add(spec.thresholds, map.rows);
  constants.Add(std::vector<float>(spec.dir.begin(), spec.dir.begin() + channels), map.dir);
  constants.Add(std::vector<int32_t>(spec.base.begin(), spec.base.begin() + channels), map.base);
  const auto memory = constants.Upload(device);
  map.count = static_cast<unsigned>(spec.count);
  map.per_channel = spec.channels > 1;
  return MakeToCodes("threshold", map, map.per_channel, node.to_channels_last, memory);
}

PackedNodePtr Pack(const DequantizeNode& node, const Device& device) {
  const AffineSpec& spec = node.spec;
  std::shared_ptr<PackedNode> flat = Pack(AffineNode{spec}, device);
  std::vector<float2> grids;
  for (size_t c = 0; c < static_cast<size_t>(spec.channels); ++c) {
    grids.push_back({MakeReader(spec.x_signed, spec.x_zero_point[c]).bias, spec.x_scale[c]});
  }
  DequantizeMap map{MakeReader(spec.x_signed, 0).flip, grids.front()};
  NodeConstants constants;
  if (grids.size() > 1 && node.to_channels_first) constants.Add(grids, map.grids);
  const auto memory = constants.Upload(device);
  const auto plan = [=, moves = node.to_channels_first](Shapes fed, const TensorShape& y) {
    const FloatCodes g = GeometryOf(fed[0], moves);
    if (!g.moves) return flat->Plan(fed, y);
    return MakePlan("dequantize_planes",
                    [=](const Run& run) { LaunchPlanes(run, g, map, run.y, run.fed[0]); });
  };
  return MakeNode(plan, memory);
}

}  // namespace lowbit::cuda
