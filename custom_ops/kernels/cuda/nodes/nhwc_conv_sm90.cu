// Float convolutions of images whose channels lie last on wgmma, for Hopper (sm_90a). Pixels come as one box
// that the tensor memory accelerator fetches for a single thread, weights by bulk copies, since they are
// packed in the very order of shared memory. A warpgroup sums 64 pixels x kN outputs: float16 numbers
// straight from shared memory, float32 ones from registers, where they are rounded to TF32, or split.
//
// Of few channels the taps of a row lie side by side in an image that is made with zeros around it
// (FewChannelsImage): they are one tap of so many channels, and outputs' windows begin so many bytes apart.
//
// k runs tap by tap, in each channel by channel, in tiles of 128 bytes, cut into slices as of all float
// products (float_tiles.cuh): the blocks of a tile's slices are a cluster, in which each gets a part of the
// tile from all of them.
#include <algorithm>

#include "kernels/cuda/conv/pixel_boxes.cuh"
#include "kernels/cuda/nodes/float_tiles.cuh"
#include "kernels/cuda/nodes/float_words.cuh"
#include "kernels/cuda/nodes/nhwc_tensors.h"

namespace lowbit::cuda {
namespace {

constexpr int kMostStages = 4;
constexpr int kFetchers = kWarp;
constexpr int kMostRows = 128;                        // outputs of a block
constexpr int kRowsTogether = 4 * kChannelsOfThread;  // outputs among which a thread has eight neighbours

// Numbers of a tile along k.
constexpr int NumbersOfTile(FloatPrecision precision) { return kRowBytes / BytesOfNumber(precision); }
constexpr int PartsOf(FloatPrecision precision) { return precision == FloatPrecision::k3xTf32 ? 2 : 1; }

struct NhwcParams : PixelParams, ColumnParams {
  const void* x = nullptr;
  void* y = nullptr;               // with the channels last where makes_last, or as ONNX has it
  const void* residual = nullptr;  // likewise, where adds_last and limits.adds
  // [k tiles][parts][rows][128 bytes], swizzled, and what a block reads beyond
  const uint8_t* weights = nullptr;
  const float* bias = nullptr;  // [n], or null
  Limits limits;
  bool adds_last = false, makes_last = false;
  unsigned count = 0;
  int m = 0, n = 0;                        // pixels, outputs of a pixel
  int rows = 0, k_tiles = 0;               // of weights
  int stages = 1, slices = 1;              // slice s begins behind s / slices of the tiles
  FastDivisor by_columns;                  // blocks along the outputs
  int64_t row_bytes = 0, image_bytes = 0;  // of x, where channels are few
};

template <FloatPrecision kOf, int kGroupsOf, int kNOf, int kBlocksOf>
struct NhwcTile {
  static constexpr FloatPrecision kPrecision = kOf;
  static constexpr bool kHalves = kOf == FloatPrecision::kFloat16;
  static constexpr int kParts = PartsOf(kOf);
  static constexpr int kGroups = kGroupsOf, kN = kNOf, kM = 64 * kGroups, kOutputs = kM * kN;
  static constexpr int kConsumers = kWarpgroup * kGroups, kThreadsOf = kConsumers + kFetchers;
  static constexpr int kBlocks = kBlocksOf;  // that a multiprocessor has registers for
  static constexpr int kBytesA = kM * kRowBytes, kBytesPart = kN * kRowBytes,
                       kBytes = kBytesA + kParts * kBytesPart;
  static_assert(kN <= kMostRows && kN % kRowsTogether == 0);
};
template <FloatPrecision kOf>
struct NhwcTilesOf {
  using Types = std::tuple<NhwcTile<kOf, 2, 128, 1>, NhwcTile<kOf, 2, 64, 2>, NhwcTile<kOf, 1, 128, 2>,
                           NhwcTile<kOf, 1, 64, 3>>;
};
template <>
struct NhwcTilesOf<FloatPrecision::kFloat16> {
  static constexpr auto kOf = FloatPrecision::kFloat16;
  using Types = std::tuple<NhwcTile<kOf, 2, 128, 2>, NhwcTile<kOf, 2, 64, 3>, NhwcTile<kOf, 1, 128, 3>,
                           NhwcTile<kOf, 1, 64, 5>>;
};
template <FloatPrecision kOf>
using NhwcTiles = typename NhwcTilesOf<kOf>::Types;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The sum of so many slices' sums, load(slice) of each, from `first` on, as AddSlices adds them, with few in
// registers.
template <int kMost, typename Load>
__device__ __forceinline__ Fours AddInTurn(int slices, int first, const Load& load) {
  if constexpr (kMost == 1) {
    return load(first);
  } else {
    Fours sum = AddInTurn<kMost / 2>(slices, first, load);
    if (first + kMost / 2 >= slices) return sum;
    const Fours other = AddInTurn<kMost / 2>(slices, first + kMost / 2, load);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum.v[e] = __fadd_rn(sum.v[e], other.v[e]);
    return sum;
  }
}

// kPlain: what is made, or added to it, lies as ONNX has it.
template <typename T, bool kPlain>
struct NhwcBlock {
  static constexpr int kSums = T::kN / 2;
  using StageRing = Ring<kMostStages>;
  struct Static {
    alignas(8) uint64_t barriers[StageRing::kBarriers];
    uint64_t exchange;  // the sums that the blocks of a cluster send each other
  };

  const NhwcParams& p;
  const CUtensorMap& map;
  Static& fixed;
  SharedTiles tiles;  // stages: pixels, weights

  const int thread = static_cast<int>(threadIdx.x), slice = static_cast<int>(blockIdx.z);
  const int down = Divide(static_cast<int>(blockIdx.x), p.by_columns);
  const int m0 = down * T::kM,
            n0 = (static_cast<int>(blockIdx.x) - down * static_cast<int>(p.by_columns.divisor)) * T::kN;
  const int k_begin = slice * p.k_tiles / p.slices, count = (slice + 1) * p.k_tiles / p.slices - k_begin;
  StageRing ring = {SharedAddress(fixed.barriers), p.stages};
  // Of the eight outputs that a thread has side by side, of every kRowsTogether; the others are eight pixels
  // below.
  const int row = thread / kWarp * 16 + thread % kWarp / 4, column = thread % 4 * kChannelsOfThread;

  __device__ __forceinline__ void SetUp() {
    KeepInRegister(tiles.at);
    if (thread < ring.stages) {
      ring.MakeBarriers(thread, 1, T::kConsumers / kWarp);
      FenceBarrierInit();
    }
    if (p.slices > 1 && thread == 0) {
      InitBarrier(SharedAddress(&fixed.exchange), 1);
      FenceBarrierInit();
      ArriveExpecting(SharedAddress(&fixed.exchange), T::kOutputs * 4);
    }
  }

  __device__ __forceinline__ bool Loads() const { return thread >= T::kConsumers; }
  __device__ __forceinline__ void Load() const {
    if (thread == T::kConsumers) FetchAll();
    __syncwarp();
    WaitForPredecessors();
    if (p.slices > 1) ClusterArrive();
    LetSuccessorsStart();
  }
  // The weights of a tile; announces a box of pixels, too.
  __device__ __forceinline__ void FetchWeights(int i, int stage) const {
    ArriveExpecting(ring.full(stage), T::kBytes);
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) {
      const int64_t first = (int64_t{k_begin + i} * T::kParts + part) * p.rows + n0;
      BulkCopy(tiles.at + stage * T::kBytes + T::kBytesA + part * T::kBytesPart,
               p.weights + first * kRowBytes, T::kBytesPart, ring.full(stage));
    }
  }
  __device__ __forceinline__ void FetchAll() const {
    for (int i = 0; i < min(count, ring.stages); ++i) FetchWeights(i, i);
    const PixelPlace place = FirstPixel(p, m0);
    TapWalk walk(p, k_begin);
    WaitForPredecessors();
    ring.Fill(count, [&](int i, int stage) {
      if (i >= ring.stages) FetchWeights(i, stage);
      PixelCopy(tiles.at + stage * T::kBytes, map, walk.channel, place, walk.dx, walk.dy, ring.full(stage));
      walk.Step(p);
    });
  }

  __device__ __forceinline__ void Begin() const { WaitForPredecessors(); }
  __device__ __forceinline__ void MakeTile() const {
    float sums[kSums];
    if constexpr (T::kHalves) {
      MultiplyHalvesOf(sums);
    } else {
      MultiplyFloats(sums);
    }
    if (p.slices > 1) return Exchange(sums);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Places at(p, m0 + row + 8 * half);
      constexpr int kRuns = T::kN / kRowsTogether;
      // Behind a store the compiler would load nothing: y may lie where the residuals do.
      Residuals residuals[kRuns];
#pragma unroll
      for (int run = 0; run < kRuns; ++run)
        residuals[run] = at.LoadResiduals(p, n0 + column + run * kRowsTogether);
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        float of_run[kChannelsOfThread];
#pragma unroll
        for (int e = 0; e < kChannelsOfThread; ++e) of_run[e] = sums[OfEight(run, half, e)];
        at.Store(p, n0 + column + run * kRowsTogether, of_run, residuals[run]);
      }
    }
  }

 private:
  // Which of a thread's sums is number e of the eight of a run.
  __device__ static __forceinline__ constexpr int OfEight(int run, int half, int e) {
    return (run * 4 + e / 2) * 4 + half * 2 + e % 2;
  }

  __device__ __forceinline__ void Release(int i, int stage) const {
    if (i + ring.stages < count && thread % kWarp == 0) Arrive(ring.empty(stage));
  }
  __device__ __forceinline__ void MultiplyHalvesOf(float (&sums)[kSums]) const {
#pragma unroll
    for (float& sum : sums) sum = 0;
    HoldRegisters(sums);
    const uint32_t a = MatrixPart(tiles.at + thread / kWarpgroup * 64 * kRowBytes),
                   b = MatrixPart(tiles.at + T::kBytesA);
    RingPlace place;
    ring.template Drain<WgmmaHalves<T::kN>>(
        place, count, sums,
        [&](int, int stage) -> Operands {
          const uint32_t tile = stage * (T::kBytes / 16);
          return {SlabDescriptor<kRowBytes>(a + tile), SlabDescriptor<kRowBytes>(b + tile)};
        },
        [&](int i, int stage) { Release(i, stage); });
    LetSuccessorsStart();
    WgmmaWait<0>();
    HoldRegisters(sums);
  }

  // A step of 8 numbers of k, of which a thread has two neighbours in either row: they are elements q and q +
  // 4 of an instruction, as weights are packed.
  __device__ __forceinline__ void LoadColumns(const uint8_t* pixels, int step,
                                              unsigned (&a)[T::kParts][4]) const {
    const int q = thread % 4, chunk = (2 * step + q / 2) ^ row % 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 two =
          *reinterpret_cast<const float2*>(pixels + (row + 8 * half) * kRowBytes + chunk * 16 + q % 2 * 8);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        unsigned parts[T::kParts];
        const float number = e == 0 ? two.x : two.y;
        Split<T::kPrecision>(number, number, parts);
#pragma unroll
        for (int part = 0; part < T::kParts; ++part) a[part][2 * e + half] = parts[part];
      }
    }
  }
  __device__ __forceinline__ void MultiplyFloats(float (&sums)[kSums]) const {
    constexpr int kSteps = kRowBytes / 4 / kStepWords;
    // Of two parts each, the sums of a tile of k by themselves: the units cut what they add, so that errors
    // grow with the length of a sum that they make.
    float of_tile[kSums];
    auto& c = T::kParts == 2 ? of_tile : sums;
#pragma unroll
    for (float& sum : sums) sum = 0;
    const uint32_t b = MatrixPart(tiles.at + T::kBytesA);
    RingPlace place;
#pragma unroll 1
    for (int i = 0; i < count; ++i, place.Step(ring.stages)) {
      WaitBarrier(ring.full(place.stage), place.parity);
      const uint8_t* const pixels = tiles.data + place.stage * T::kBytes;
      const uint32_t weights = b + place.stage * (T::kBytes / 16);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step >= 2) WgmmaWait<1>();  // who used the registers before
        unsigned a[T::kParts][4];
        LoadColumns(pixels, step, a);
        HoldRegisters(c);
        WgmmaFence();
        const auto descriptor = [&](int part) {
          return SlabDescriptor<kRowBytes>(weights + part * (T::kBytesPart / 16) + 2 * step);
        };
        if constexpr (T::kParts == 2) {
          // Without the product of the lower ones, and what is small first.
          if (step == 0) {
            MultiplyFloatRows<false, false>(c, a[1], descriptor(0));
          } else {
            MultiplyFloatRows<false>(c, a[1], descriptor(0));
          }
          MultiplyFloatRows<false>(c, a[0], descriptor(1));
        }
        MultiplyFloatRows<false>(c, a[0], descriptor(0));
        WgmmaCommit();
      }
      if (i == count - 1) LetSuccessorsStart();
      WgmmaWait<0>();
      HoldRegisters(c);
      Release(i, place.stage);
      if constexpr (T::kParts == 2) {
#pragma unroll
        for (int at = 0; at < kSums; ++at) sums[at] = __fadd_rn(sums[at], of_tile[at]);
      }
    }
  }

  // What is added to eight outputs, as it lies.
  struct Floats {
    float4 low, high;
  };
  using Residuals = std::conditional_t<T::kHalves, uint4, Floats>;
  using Number = std::conditional_t<T::kHalves, uint16_t, float>;

  // Where the outputs of a pixel lie.
  struct Places {
    int pixel;
    int64_t last, plain,
        step;  // of the first output, with the channels last or not; then from one to the next

    __device__ __forceinline__ Places(const NhwcParams& params, int at) : pixel(at) {
      const int pixels = static_cast<int>(params.by_image.divisor), image = Divide(pixel, params.by_image);
      last = static_cast<int64_t>(pixel) * params.n;
      plain = static_cast<int64_t>(image) * params.n * pixels + (pixel - image * pixels);
      step = pixels;
    }
    __device__ __forceinline__ Residuals LoadResiduals(const NhwcParams& p, int output) const {
      if (!p.limits.adds || (kPlain && !p.adds_last) || output >= p.n || pixel >= p.m) return {};
      return *reinterpret_cast<const Residuals*>(static_cast<const Number*>(p.residual) + last + output);
    }
    __device__ __forceinline__ void Store(const NhwcParams& p, int output, float (&sums)[kChannelsOfThread],
                                          const Residuals& residuals) const {
      if (output >= p.n || pixel >= p.m) return;
      float added[kChannelsOfThread];
      if (kPlain && !p.adds_last) {
#pragma unroll
        for (int e = 0; e < kChannelsOfThread; ++e) added[e] = p.limits.adds ? PlainAt(p, output + e) : 0.0f;
      } else {
        Unpack(residuals, added);
      }
#pragma unroll
      for (int e = 0; e < kChannelsOfThread; ++e) {
        if (p.bias != nullptr && output + e < p.n) sums[e] = __fadd_rn(sums[e], p.bias[output + e]);
        if (p.limits.adds) sums[e] = __fadd_rn(sums[e], added[e]);
        sums[e] = Limited(p.limits, sums[e]);
      }
      if (!kPlain || p.makes_last) {
        *reinterpret_cast<Residuals*>(static_cast<Number*>(p.y) + last + output) = Packed(sums);
        return;
      }
#pragma unroll
      for (int e = 0; e < kChannelsOfThread; ++e) {
        if (output + e < p.n) static_cast<float*>(p.y)[plain + (output + e) * step] = sums[e];
      }
    }
    __device__ __forceinline__ float PlainAt(const NhwcParams& p, int output) const {
      return output < p.n ? static_cast<const float*>(p.residual)[plain + output * step] : 0.0f;
    }
    __device__ static __forceinline__ void Unpack(const uint4& words, float (&v)[kChannelsOfThread]) {
      const unsigned of[] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = UnpackHalves(of[i]);
        v[2 * i] = two.x, v[2 * i + 1] = two.y;
      }
    }
    __device__ static __forceinline__ void Unpack(const Floats& of, float (&v)[kChannelsOfThread]) {
      v[0] = of.low.x, v[1] = of.low.y, v[2] = of.low.z, v[3] = of.low.w;
      v[4] = of.high.x, v[5] = of.high.y, v[6] = of.high.z, v[7] = of.high.w;
    }
    __device__ static __forceinline__ Residuals Packed(const float (&v)[kChannelsOfThread]) {
      if constexpr (T::kHalves) {
        return make_uint4(PackHalves(v[0], v[1]), PackHalves(v[2], v[3]), PackHalves(v[4], v[5]),
                          PackHalves(v[6], v[7]));
      } else {
        return {make_float4(v[0], v[1], v[2], v[3]), make_float4(v[4], v[5], v[6], v[7])};
      }
    }
  };

  // Each block gets its part of the tile from all of them, in the place of the stages.
  __device__ __forceinline__ void Exchange(const float (&sums)[kSums]) const {
    ClusterArrive();
    float* const received = reinterpret_cast<float*>(tiles.data);  // [slices][a part of the tile]
    const int part = T::kOutputs / p.slices, part_bits = 31 - __clz(part);
    ClusterWait();
#pragma unroll
    for (int run = 0; run < T::kN / kRowsTogether; ++run) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int place = (row + 8 * half) * T::kN + column + run * kRowsTogether;
        const int owner = place >> part_bits, in_part = place - owner * part;
        const uint32_t to = ClusterAddress(SharedAddress(received + slice * part + in_part), owner);
        const uint32_t barrier = ClusterAddress(SharedAddress(&fixed.exchange), owner);
#pragma unroll
        for (int e = 0; e < kChannelsOfThread; e += 4) {
          const auto bits = [&](int i) { return __float_as_int(sums[OfEight(run, half, e + i)]); };
          StoreToCluster(to + e * 4, int4{bits(0), bits(1), bits(2), bits(3)}, barrier);
        }
      }
    }
    const auto places_at = [&](int at) { return Places(p, m0 + (slice * part + at) / T::kN); };
    const auto output_at = [&](int at) { return n0 + (slice * part + at) % T::kN; };
    const auto residuals_at = [&](int at) {
      return at < part ? places_at(at).LoadResiduals(p, output_at(at)) : Residuals{};
    };
    Residuals residuals = residuals_at(kChannelsOfThread * thread);
    WaitBarrier(SharedAddress(&fixed.exchange), 0);
    for (int at = kChannelsOfThread * thread; at < part; at += kChannelsOfThread * T::kConsumers) {
      const Residuals next = residuals_at(at + kChannelsOfThread * T::kConsumers);
      float all[kChannelsOfThread];
#pragma unroll
      for (int first = 0; first < kChannelsOfThread; first += 4) {
        const Fours four = AddInTurn<kMostBlocks>(p.slices, 0, [&](int s) {
          const float4 v = *reinterpret_cast<const float4*>(received + s * part + at + first);
          return Fours{{v.x, v.y, v.z, v.w}};
        });
#pragma unroll
        for (int e = 0; e < 4; ++e) all[first + e] = four.v[e];
      }
      places_at(at).Store(p, output_at(at), all, residuals);
      residuals = next;
    }
  }
};
#endif

template <typename T, bool kPlain>
__global__ void __launch_bounds__(T::kThreadsOf, T::kBlocks)
    NhwcConv(const __grid_constant__ NhwcParams p, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (threadIdx.x == T::kConsumers) PrefetchMap(map);
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  using Block = NhwcBlock<T, kPlain>;
  __shared__ typename Block::Static fixed;
  RunPipeline(Block{p, map, fixed, SharedTiles(unaligned)});
#endif
}

// ---- which tile, how many slices

constexpr int kAlignment = 1024;  // of swizzled tiles

template <typename T>
int StagesOf(const NhwcParams& p, int slices) {
  return std::min(kMostStages, static_cast<int>(BlocksFor(p.k_tiles, slices)));
}
template <typename T>
int SharedBytesOf(const NhwcParams& p, int slices) {
  return kAlignment + std::max(StagesOf<T>(p, slices) * T::kBytes, slices > 1 ? T::kOutputs * 4 : 0);
}

// About how many clocks of a multiprocessor.
template <typename T>
double CostOf(const NhwcParams& p, int slices, const Device& device) {
  using Rates = ProductRates;
  const double tiles = static_cast<double>(BlocksFor(p.m, T::kM)) * BlocksFor(p.n, T::kN);
  const double blocks = std::ceil(tiles * slices / device.multiprocessors);
  constexpr double kProducts = T::kHalves       ? Rates::kBoxedHalves
                               : T::kParts == 1 ? Rates::kBoxedTf32
                                                : Rates::kBoxed3xTf32;
  const double at_once =
      std::clamp<double>(std::min(T::kBlocks, device.shared_bytes / SharedBytesOf<T>(p, slices)), 1, blocks);
  const int steps = static_cast<int>(BlocksFor(p.k_tiles, slices));
  double rate = kProducts;
  if (!T::kHalves && T::kN < kMostRows) rate *= Rates::kBoxedNarrow;
  if (!T::kHalves && at_once * T::kGroups < 2) rate *= Rates::kBoxedAlone;
  const double products = static_cast<double>(T::kOutputs) * NumbersOfTile(T::kPrecision);
  double step = at_once * std::max(products / rate, T::kBytes / Rates::kBoxBytes);
  if (steps > kMostStages) step = std::max(step, Rates::kBoxLatency / kMostStages);
  const double stored = Rates::kBoxStored * BytesOfNumber(T::kPrecision) / 2;
  const double finish = T::kOutputs * (slices > 1 ? Rates::kBoxSent + stored : stored);
  const double joined = slices > 1 ? Rates::kBoxJoinOfSlice * slices : 0;
  return Rates::kStart + joined +
         std::ceil(blocks / at_once) * (Rates::kBoxWave + steps * step + at_once * finish);
}

template <FloatPrecision kOf>
TileChoice CheapestTile(const NhwcParams& p, int slices, const Device& device) {
  TileChoice best;
  for (int i = 0; i < FloatTiling::kTensorTiles; ++i) {
    WithTile<NhwcTiles<kOf>>(i, [&](auto tile) {
      using T = decltype(tile);
      if (SharedBytesOf<T>(p, slices) > device.shared_bytes) return;
      const double cost = CostOf<T>(p, slices, device);
      if (cost < best.cost) best = {i, cost};
    });
  }
  return best;
}

// ---- what is packed

// How FewChannelsImage has an image of few channels, so that windows begin at multiples of 16 bytes;
// `channels` is 0 where they are not few, or where taps of a row do not fit into a tile of k.
struct FewChannels {
  int channels = 0, fold = 1;

  // Numbers from one square to the next.
  int Step() const { return fold * fold * channels; }
};
FewChannels FewChannelsOf(const FloatConvOp& op, FloatPrecision precision) {
  constexpr int64_t kMostFew = 4;
  constexpr size_t kH = kMaxSpatial - 2, kW = kMaxSpatial - 1;
  const Window& w = op.window;
  if (op.in_channels > kMostFew) return {};
  const auto fits = [&](const FewChannels& few) {
    return BlocksFor(w.Extent(kW), few.fold) * few.Step() <= NumbersOfTile(precision);
  };
  // Squares halve the rows of a window, and with them what is fetched.
  const bool folds = precision == FloatPrecision::kFloat16 && w.stride[kH] == 2 && w.stride[kW] == 2 &&
                     w.dilation[kH] == 1 && w.dilation[kW] == 1;
  if (folds && fits({4, 2})) return {4, 2};
  const FewChannels few = {w.stride[kW] * BytesOfNumber(precision) % 4 == 0 ? 4 : 8};
  return fits(few) ? few : FewChannels();
}

// Which element of 8 of k the words of a step of wgmma are, as a thread has them (LoadColumns).
constexpr int ElementOfWord(int word) { return word % 4 * 2 + word / 4; }

// Rows of 128 bytes in the order of shared memory.
template <FloatPrecision kOf>
std::vector<uint32_t> PackWeights(const NhwcParams& p, const FloatConvOp& op) {
  constexpr int kNumbers = NumbersOfTile(kOf), kParts = PartsOf(kOf), kWords = kRowBytes / 4,
                kWordsOfChunk = 4;
  constexpr int kPerWord = Words<kOf>::kPerWord;
  const int64_t taps = TapsOf(op), channels = op.in_channels, tiles_of_tap = p.k_tiles / taps;
  const FewChannels few = FewChannelsOf(op, kOf);
  const int64_t kernel_w = op.window.kernel[kMaxSpatial - 1], dilation = op.window.dilation[kMaxSpatial - 1];
  const auto place_of = [&](int64_t channel, int64_t tap) {
    if (few.channels == 0) return tap * tiles_of_tap * kNumbers + channel;
    const int64_t y = tap / kernel_w, x = tap % kernel_w * dilation;
    const int64_t in_square = y % few.fold * few.fold + x % few.fold;
    return y / few.fold * kNumbers + x / few.fold * few.Step() + in_square * few.channels + channel;
  };
  // The weights of an output in tiles of k.
  std::vector<float> in_order(static_cast<size_t>(p.k_tiles) * kNumbers);
  std::vector<uint32_t> out(static_cast<size_t>((int64_t{p.k_tiles} * kParts * p.rows + kMostRows) * kWords));
  for (int64_t output = 0; output < op.out_channels; ++output) {
    for (int64_t channel = 0; channel < channels; ++channel) {
      for (int64_t tap = 0; tap < taps; ++tap) {
        in_order[static_cast<size_t>(place_of(channel, tap))] =
            op.weights[static_cast<size_t>((output * channels + channel) * taps + tap)];
      }
    }
    const auto of_run = static_cast<int>(output % kRowsTogether);
    const int64_t row = output - of_run + RowOfNeighbours<kRowsTogether>(of_run);
    for (int64_t tile = 0; tile < p.k_tiles; ++tile) {
      const float* const numbers = in_order.data() + tile * kNumbers;
      for (int part = 0; part < kParts; ++part) {
        uint32_t* const words = out.data() + ((tile * kParts + part) * p.rows + row) * kWords;
        for (int word = 0; word < kWords; ++word) {
          const int first = kPerWord == 2 ? 2 * word : word / 8 * 8 + ElementOfWord(word % 8);
          const auto chunk = static_cast<int>(word / kWordsOfChunk ^ row % 8);
          words[chunk * kWordsOfChunk + word % kWordsOfChunk] =
              WordOf<kOf>(part, numbers[first], numbers[first + kPerWord - 1]);
        }
      }
    }
  }
  return out;
}

NhwcParams Described(const FloatConvOp& op, FloatPrecision precision, const Limits& limits) {
  NhwcParams p;
  p.limits = limits;
  p.n = CheckedSize(op.out_channels, "outputs");
  p.rows = static_cast<int>(BlocksFor(p.n, kRowsTogether)) * kRowsTogether;
  const int64_t tiles_of_tap = BlocksFor(op.in_channels, NumbersOfTile(precision));
  const FewChannels few = FewChannelsOf(op, precision);
  const bool is_few = few.channels > 0;
  p.k_tiles = is_few ? static_cast<int>(BlocksFor(op.window.kernel[kMaxSpatial - 2], few.fold))
                     : CheckedSize(tiles_of_tap * TapsOf(op), "tiles");
  CheckedSize(int64_t{p.k_tiles} * kRowBytes, "sums of bytes");
  p.channels = static_cast<int>(tiles_of_tap * kRowBytes);
  p.pixel_bytes = CheckedSize(op.in_channels * BytesOfNumber(precision), "bytes of a pixel");
  p.kernel_h = is_few ? p.k_tiles : static_cast<int>(op.window.kernel[kMaxSpatial - 2]);
  p.kernel_w = is_few ? 1 : static_cast<int>(op.window.kernel[kMaxSpatial - 1]);
  p.dilation_h = static_cast<int>(op.window.dilation[kMaxSpatial - 2]);
  p.dilation_w = is_few ? 1 : static_cast<int>(op.window.dilation[kMaxSpatial - 1]);
  p.by_channels = MakeDivisor(p.channels);
  p.by_kernel_w = MakeDivisor(p.kernel_w);
  return p;
}

void SetShapes(const FloatConvOp& op, bool is_few, const TensorShape& x, const TensorShape& y,
               NhwcParams& p) {
  const Windows windows = WindowsOf(WindowOf(op, x.dims), x.dims.data() + 2, y.dims.data() + 2);
  const WindowDim &h = windows.h, &w = windows.w;
  p.in_h = static_cast<int>(h.in), p.in_w = static_cast<int>(w.in);
  p.out_h = static_cast<int>(h.out), p.out_w = static_cast<int>(w.out);
  p.stride_h = static_cast<int>(h.stride), p.stride_w = static_cast<int>(w.stride);
  p.pad_top = static_cast<int>(h.pad_begin), p.pad_left = static_cast<int>(w.pad_begin);
  p.flat = !is_few && p.kernel_h * p.kernel_w == 1 && h.out == h.in && w.out == w.in && p.pad_top == 0 &&
           p.pad_left == 0;
  p.m = CheckedSize(x.dims[0] * h.out * w.out, "pixels");
  p.by_image = MakeDivisor(std::max<int64_t>(1, h.out * w.out));
  p.by_row = MakeDivisor(std::max<int64_t>(1, w.out));
  p.count = static_cast<unsigned>(CountOf(y.dims));
}

// The image that is made of few channels, which `p` is then about.
FewChannelsImage MakeFew(const FloatConvOp& op, FloatPrecision precision, const TensorShape& x,
                         NhwcParams& p) {
  const FewChannels few = FewChannelsOf(op, precision);
  FewChannelsImage image;
  image.halves = BytesOfNumber(precision) == 2;
  image.fold = few.fold, image.channels = few.channels;
  image.images = static_cast<int>(x.dims[0]);
  image.top = p.pad_top, image.left = p.pad_left;
  const auto squares = [&](int out, int stride, int dim) {
    return static_cast<int>(BlocksFor(int64_t{out - 1} * stride + op.window.Extent(dim), few.fold));
  };
  image.rows = squares(p.out_h, p.stride_h, kMaxSpatial - 2);
  image.columns = squares(p.out_w, p.stride_w, kMaxSpatial - 1);
  image.columns += image.columns % 2;  // rows begin at multiples of 16 bytes
  p.pixel_bytes = p.stride_w / few.fold * image.SquareBytes();
  p.row_bytes = image.RowBytes();
  p.image_bytes = image.rows * p.row_bytes;
  p.in_h = image.rows, p.in_w = p.out_w;
  p.stride_h /= few.fold, p.stride_w = 1;
  p.pad_top = p.pad_left = 0;
  return image;
}

// Windows of the rows of few channels in boxes of `pixels`.
cudaError_t EncodeFew(const NhwcParams& p, int pixels, CUtensorMap* map) {
  const auto wide = [](int64_t v) { return static_cast<cuuint64_t>(v); };
  const int images = p.m / (p.out_h * p.out_w);
  const cuuint64_t sizes[] = {kRowBytes, wide(p.in_w), wide(p.in_h), wide(images)};
  const cuuint64_t strides[] = {wide(p.pixel_bytes), wide(p.row_bytes), wide(p.image_bytes)};
  const int lower[] = {0, 0}, upper[] = {0, (p.out_h - 1) * p.stride_h - p.in_h + 1};
  const cuuint32_t steps[] = {1, 1, static_cast<cuuint32_t>(p.stride_h), 1};
  return EncodeWindows(map, p.x, sizes, strides, lower, upper, kRowBytes, static_cast<cuuint32_t>(pixels),
                       steps);
}

template <typename T>
void LaunchTile(const Run& run, NhwcParams p, const Device& device) {
  const unsigned columns = BlocksFor(p.n, T::kN);
  p.by_columns = MakeDivisor(columns);
  p.stages = StagesOf<T>(p, p.slices);
  CUtensorMap map;
  run.Check(p.row_bytes > 0 ? EncodeFew(p, T::kM, &map)
                            : EncodePixels(static_cast<const uint8_t*>(p.x), p.m, p, T::kM, &map));
  const dim3 grid(columns * BlocksFor(p.m, T::kM), 1, static_cast<unsigned>(p.slices));
  const int bytes = SpreadBytes(SharedBytesOf<T>(p, p.slices), int64_t{grid.x} * grid.z, p.slices, device);
  const LaunchShape shape{grid, T::kThreadsOf, bytes, Dim(1, 1, p.slices)};
  const bool has_plain = !p.makes_last || (p.limits.adds && !p.adds_last);
  if constexpr (HasInstance(T::kN == 128)) {
    run.Check(has_plain ? LaunchKernel<NhwcConv<T, true>>(run.queue, device, shape, p, map)
                        : LaunchKernel<NhwcConv<T, false>>(run.queue, device, shape, p, map));
  } else {
    run.Check(cudaErrorInvalidValue);
  }
}

template <FloatPrecision kOf>
class PackedNhwcConv final : public PackedNode {
 public:
  PackedNhwcConv(FloatConvOp op, const NhwcParams& shared, std::shared_ptr<const DeviceMemory> memory,
                 Device device, const FloatTiling& tiling, const ChannelsLast& last = {})
      : op_(std::move(op)),
        shared_(shared),
        memory_(std::move(memory)),
        device_(std::move(device)),
        tiling_(tiling),
        last_(last) {}

  NodePlanPtr Plan(Shapes fed, const TensorShape& y) const override {
    constexpr bool kHalves = BytesOfNumber(kOf) == 2;
    const bool is_few = FewChannelsOf(op_, kOf).channels > 0;
    NhwcParams geometry = shared_;
    SetShapes(op_, is_few, fed[0], y, geometry);
    geometry.limits = LimitsOf(fed, shared_.limits);
    geometry.adds_last = last_.Has(1), geometry.makes_last = last_.y;
    const int most = std::min(geometry.k_tiles, kMostBlocks);
    geometry.slices = CheapestSlices(most, tiling_.slices, [&, device = DeviceOfEstimates()](int slices) {
      return CheapestTile<kOf>(geometry, slices, device).cost;
    });
    const int tile =
        tiling_.tile >= 0 ? tiling_.tile : CheapestTile<kOf>(geometry, geometry.slices, device_).tile;
    std::string text = std::string("float_conv_") + NameOf(kOf) + " nhwc";
    WithTile<NhwcTiles<kOf>>(
        tile, [&](auto known) { text += " " + std::to_string(known.kM) + "x" + std::to_string(known.kN); });
    if (geometry.slices > 1) text += " slices " + std::to_string(geometry.slices);
    if (!last_.Has(0)) text += " from nchw";
    if (!last_.y) text += " to nchw";
    FewChannelsImage few;
    if (is_few) few = MakeFew(op_, kOf, fed[0], geometry);
    const auto launch = [=, device = device_, x = fed[0], reads_last = last_.Has(0)](
                            const Run& run, const NhwcParams& of_run) {
      NhwcParams p = of_run;
      if (!reads_last) {
        const auto* const plain = static_cast<const float*>(p.x);
        if (few.channels > 0) {
          LaunchToFewChannels(run, plain, run.workspace, x, few);
        } else {
          LaunchToNhwc(run, kHalves, plain, run.workspace, x);
        }
        p.x = run.workspace;
      }
      WithTile<NhwcTiles<kOf>>(tile, [&](auto known) { LaunchTile<decltype(known)>(run, p, device); });
    };
    const int64_t scratch = is_few         ? few.Bytes()
                            : last_.Has(0) ? 0
                                           : CountOf(fed[0].dims) * BytesOfNumber(kOf);
    return Hold(MakeKernelPlan(text, geometry, launch, static_cast<size_t>(scratch + 255) / 256 * 256),
                memory_);
  }
  bool MayReadChannelsLast(Shapes fed, size_t i) const override {
    return FitsChannelsLast(fed[i]) && (i == 0 || op_.out_channels % kChannelsOfThread == 0);
  }
  bool MayMakeChannelsLast(Shapes) const override { return op_.out_channels % kChannelsOfThread == 0; }
  bool TurnsChannelsLast(Shapes fed, size_t i) const override {
    return i == 0 && MayReadChannelsLast(fed, i);
  }
  PackedNodePtr InChannelsLast(const ChannelsLast& last) const override {
    return std::make_unique<PackedNhwcConv>(op_, shared_, memory_, device_, tiling_, last);
  }

 private:
  FloatConvOp op_;  // without its constants
  NhwcParams shared_;
  std::shared_ptr<const DeviceMemory> memory_;
  Device device_;
  FloatTiling tiling_;
  ChannelsLast last_;
};

template <FloatPrecision kOf>
PackedNodePtr PackOf(const FloatConvOp& op, const Device& device, const Limits& limits,
                     const FloatTiling& tiling) {
  static_assert(FloatTiling::kTensorTiles == std::tuple_size_v<NhwcTiles<kOf>>);
  NhwcParams shared = Described(op, kOf, limits);
  const std::vector<uint32_t> weights = PackWeights<kOf>(shared, op);
  const uint32_t* packed = nullptr;
  NodeConstants constants;
  constants.Add(weights, packed);
  constants.Add(op.bias, shared.bias);
  const auto memory = constants.Upload(device);
  shared.weights = reinterpret_cast<const uint8_t*>(packed);
  return std::make_unique<PackedNhwcConv<kOf>>(WithoutConstants(op), shared, memory, device, tiling);
}

}  // namespace

bool HasNhwcConv(const FloatConvOp& op, const Device& device, FloatPrecision precision) {
  constexpr int64_t kMostReach = 64, kMostStride = 8;  // of tensor maps
  if (device.capability != 90 || !UsesTensorCores(precision) || op.group != 1 || op.in_channels == 0 ||
      (op.in_channels % kChannelsOfThread != 0 && FewChannelsOf(op, precision).channels == 0)) {
    return false;
  }
  const Window& w = op.window;
  for (const size_t i : {size_t{kMaxSpatial - 2}, size_t{kMaxSpatial - 1}}) {
    if (w.stride[i] > kMostStride || w.Extent(static_cast<int>(i)) > kMostReach ||
        std::max(w.pad_begin[i], w.pad_end[i]) > kMostReach) {
      return false;
    }
  }
  return true;
}

PackedNodePtr PackNhwcConv(const FloatConvOp& op, const Device& device, FloatPrecision precision,
                           const Limits& limits, const FloatTiling& tiling) {
  return std::visit(
      [&](auto of) { return PackOf<decltype(of)::value>(op, device, limits, tiling); },
      OneOf<FloatPrecision::kFloat16, FloatPrecision::kTf32, FloatPrecision::k3xTf32>(precision));
}

}  // namespace lowbit::cuda
