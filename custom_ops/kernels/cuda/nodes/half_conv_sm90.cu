// Float convolutions of float16 numbers on wgmma, for Hopper (sm_90a): both operands from shared memory. Pixels, whose
// channels lie last, come as one box that the tensor memory accelerator fetches for a single thread, weights by one bulk
// copy, since they are packed in the very order of shared memory. A warpgroup sums 64 pixels x kN outputs.
//
// Of few channels the taps of a row lie side by side in an image that is made with zeros around it (FewHalves): they are
// one tap of so many channels, and outputs' windows begin so many bytes apart.
//
// k runs tap by tap, in each channel by channel, in tiles of 64, cut into slices as of all float products
// (float_tiles.cuh): the blocks of a tile's slices are a cluster, in which each gets a part of the tile from all of them.
#include <algorithm>

#include "kernels/cuda/conv/pixel_boxes.cuh"
#include "kernels/cuda/device/mma_float.cuh"
#include "kernels/cuda/nodes/float_tiles.cuh"
#include "kernels/cuda/nodes/half_tensors.h"

namespace lowbit::cuda {
namespace {

constexpr int kHalvesOfTile = kRowBytes / 2;  // along k
constexpr int kMostStages = 4;
constexpr int kFetchers = kWarp;
constexpr int kMostRows = 256;  // outputs of a block
constexpr int kRowsTogether = 4 * kHalvesOfThread;  // outputs among which a thread has eight neighbours

struct HalfConvParams : PixelParams, ColumnParams {
  const void* x = nullptr;           // float16
  void* y = nullptr;                 // float16 where makes_halves, or float32 as ONNX has it
  const void* residual = nullptr;    // likewise, where adds_halves and limits.adds
  const uint8_t* weights = nullptr;  // [k tiles][rows][128 bytes], swizzled, and what a block reads beyond
  const float* bias = nullptr;       // [n], or null
  Limits limits;
  bool adds_halves = false, makes_halves = false;
  unsigned count = 0;
  int m = 0, n = 0;              // pixels, outputs of a pixel
  int rows = 0, k_tiles = 0;     // of weights
  int stages = 1, slices = 1;    // slice s begins behind s / slices of the tiles
  FastDivisor by_columns;        // blocks along the outputs
  int64_t row_bytes = 0, image_bytes = 0;  // of x, where channels are few
};

template <int kGroupsOf, int kNOf, int kBlocksOf>
struct HalfTile {
  static constexpr int kGroups = kGroupsOf, kN = kNOf, kM = 64 * kGroups, kOutputs = kM * kN;
  static constexpr int kConsumers = kWarpgroup * kGroups, kThreadsOf = kConsumers + kFetchers;
  static constexpr int kBlocks = kBlocksOf;  // that a multiprocessor has registers for
  static constexpr int kBytesA = kM * kRowBytes, kBytesB = kN * kRowBytes, kBytes = kBytesA + kBytesB;
  static_assert(kN <= kMostRows && kN % kRowsTogether == 0);
};
using HalfTiles = std::tuple<HalfTile<2, 256, 1>, HalfTile<2, 128, 2>, HalfTile<2, 64, 3>, HalfTile<1, 128, 3>,
                             HalfTile<1, 64, 4>>;
static_assert(FloatTiling::kHalfTiles == std::tuple_size_v<HalfTiles>);

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The sum of so many slices' sums, load(slice) of each, from `first` on, as AddSlices adds them, with few in registers.
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

// kFloats: what is made, or added to it, is float32.
template <typename T, bool kFloats>
struct HalfBlock {
  static constexpr int kSums = T::kN / 2;
  using StageRing = Ring<kMostStages>;
  struct Static {
    alignas(8) uint64_t barriers[StageRing::kBarriers];
    uint64_t exchange;  // the sums that the blocks of a cluster send each other
  };

  const HalfConvParams& p;
  const CUtensorMap& map;
  Static& fixed;
  SharedTiles tiles;  // stages: pixels, weights

  const int thread = static_cast<int>(threadIdx.x), slice = static_cast<int>(blockIdx.z);
  const int down = Divide(static_cast<int>(blockIdx.x), p.by_columns);
  const int m0 = down * T::kM,
            n0 = (static_cast<int>(blockIdx.x) - down * static_cast<int>(p.by_columns.divisor)) * T::kN;
  const int k_begin = slice * p.k_tiles / p.slices, count = (slice + 1) * p.k_tiles / p.slices - k_begin;
  StageRing ring = {SharedAddress(fixed.barriers), p.stages};
  // Of the eight outputs that a thread has side by side, of every kRowsTogether; the others are eight pixels below.
  const int row = thread / kWarp * 16 + thread % kWarp / 4, column = thread % 4 * kHalvesOfThread;

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
    const int64_t first = int64_t{k_begin + i} * p.rows + n0;
    BulkCopy(tiles.at + stage * T::kBytes + T::kBytesA, p.weights + first * kRowBytes, T::kBytesB,
             ring.full(stage));
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
    Multiply(sums);
    if (p.slices > 1) return Exchange(sums);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Places at(p, m0 + row + 8 * half);
      constexpr int kRuns = T::kN / kRowsTogether;
      // Behind a store the compiler would load nothing: y may lie where the residuals do.
      uint4 residuals[kRuns];
#pragma unroll
      for (int run = 0; run < kRuns; ++run) residuals[run] = at.Residuals(p, n0 + column + run * kRowsTogether);
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        float of_run[kHalvesOfThread];
#pragma unroll
        for (int e = 0; e < kHalvesOfThread; ++e) of_run[e] = sums[OfEight(run, half, e)];
        at.Store(p, n0 + column + run * kRowsTogether, of_run, residuals[run]);
      }
    }
  }

 private:
  // Which of a thread's sums is number e of the eight of a run.
  __device__ static __forceinline__ constexpr int OfEight(int run, int half, int e) {
    return (run * 4 + e / 2) * 4 + half * 2 + e % 2;
  }

  __device__ __forceinline__ void Multiply(float (&sums)[kSums]) const {
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
        [&](int i, int stage) {
          if (i + ring.stages < count && thread % kWarp == 0) Arrive(ring.empty(stage));
        });
    LetSuccessorsStart();
    WgmmaWait<0>();
    HoldRegisters(sums);
  }

  // Where the outputs of a pixel lie.
  struct Places {
    int pixel;
    int64_t in_halves, in_floats, step;  // of the first output; of float32 from one to the next

    __device__ __forceinline__ Places(const HalfConvParams& params, int at) : pixel(at) {
      const int pixels = static_cast<int>(params.by_image.divisor), image = Divide(pixel, params.by_image);
      in_halves = static_cast<int64_t>(pixel) * params.n;
      in_floats = static_cast<int64_t>(image) * params.n * pixels + (pixel - image * pixels);
      step = pixels;
    }
    // What is added to eight outputs, where that is float16.
    __device__ __forceinline__ uint4 Residuals(const HalfConvParams& p, int output) const {
      if (!p.limits.adds || (kFloats && !p.adds_halves) || output >= p.n || pixel >= p.m) return {};
      return *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.residual) + in_halves + output);
    }
    __device__ __forceinline__ void Store(const HalfConvParams& p, int output, float (&sums)[kHalvesOfThread],
                                          const uint4& residuals) const {
      if (output >= p.n || pixel >= p.m) return;
      const unsigned words[] = {residuals.x, residuals.y, residuals.z, residuals.w};
#pragma unroll
      for (int e = 0; e < kHalvesOfThread; e += 2) {
        float2 added = UnpackHalves(words[e / 2]);
        if (kFloats && p.limits.adds && !p.adds_halves) added = {FloatAt(p, output + e), FloatAt(p, output + e + 1)};
        sums[e] = Finish(p, output + e, sums[e], added.x);
        sums[e + 1] = Finish(p, output + e + 1, sums[e + 1], added.y);
      }
      if (!kFloats || p.makes_halves) {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.y) + in_halves + output) =
            make_uint4(PackHalves(sums[0], sums[1]), PackHalves(sums[2], sums[3]), PackHalves(sums[4], sums[5]),
                       PackHalves(sums[6], sums[7]));
        return;
      }
#pragma unroll
      for (int e = 0; e < kHalvesOfThread; ++e) {
        if (output + e < p.n) static_cast<float*>(p.y)[in_floats + (output + e) * step] = sums[e];
      }
    }
    __device__ __forceinline__ float FloatAt(const HalfConvParams& p, int output) const {
      return output < p.n ? static_cast<const float*>(p.residual)[in_floats + output * step] : 0.0f;
    }
    __device__ static __forceinline__ float Finish(const HalfConvParams& p, int output, float sum,
                                                   float residual) {
      if (p.bias != nullptr && output < p.n) sum = __fadd_rn(sum, p.bias[output]);
      if (p.limits.adds) sum = __fadd_rn(sum, residual);
      return Limited(p.limits, sum);
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
        for (int e = 0; e < kHalvesOfThread; e += 4) {
          const auto bits = [&](int i) { return __float_as_int(sums[OfEight(run, half, e + i)]); };
          StoreToCluster(to + e * 4, int4{bits(0), bits(1), bits(2), bits(3)}, barrier);
        }
      }
    }
    const auto places_at = [&](int at) { return Places(p, m0 + (slice * part + at) / T::kN); };
    const auto output_at = [&](int at) { return n0 + (slice * part + at) % T::kN; };
    const auto residuals_at = [&](int at) {
      return at < part ? places_at(at).Residuals(p, output_at(at)) : uint4{};
    };
    uint4 residuals = residuals_at(kHalvesOfThread * thread);
    WaitBarrier(SharedAddress(&fixed.exchange), 0);
    for (int at = kHalvesOfThread * thread; at < part; at += kHalvesOfThread * T::kConsumers) {
      const uint4 next = residuals_at(at + kHalvesOfThread * T::kConsumers);
      float all[kHalvesOfThread];
#pragma unroll
      for (int first = 0; first < kHalvesOfThread; first += 4) {
        const Fours four = AddInTurn<kMostSlices>(p.slices, 0, [&](int s) {
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

template <typename T, bool kFloats>
__global__ void __launch_bounds__(T::kThreadsOf, T::kBlocks)
    HalfConv(const __grid_constant__ HalfConvParams p, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (threadIdx.x == T::kConsumers) PrefetchMap(map);
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  using Block = HalfBlock<T, kFloats>;
  __shared__ typename Block::Static fixed;
  RunPipeline(Block{p, map, fixed, SharedTiles(unaligned)});
#endif
}

// ---- which tile, how many slices

constexpr int kAlignment = 1024;  // of swizzled tiles

template <typename T>
int StagesOf(const HalfConvParams& p, int slices) {
  return std::min(kMostStages, static_cast<int>(BlocksFor(p.k_tiles, slices)));
}
template <typename T>
int SharedBytesOf(const HalfConvParams& p, int slices) {
  return kAlignment + std::max(StagesOf<T>(p, slices) * T::kBytes, slices > 1 ? T::kOutputs * 4 : 0);
}

// About how many clocks of a multiprocessor.
template <typename T>
double CostOf(const HalfConvParams& p, int slices, const Device& device) {
  using Rates = ProductRates;
  const double tiles = static_cast<double>(BlocksFor(p.m, T::kM)) * BlocksFor(p.n, T::kN);
  const double blocks = std::ceil(tiles * slices / device.multiprocessors);
  const double at_once = std::clamp<double>(
      std::min(T::kBlocks, device.shared_bytes / SharedBytesOf<T>(p, slices)), 1, blocks);
  const int steps = static_cast<int>(BlocksFor(p.k_tiles, slices));
  double step = at_once * std::max(static_cast<double>(T::kOutputs) * kHalvesOfTile / Rates::kBoxedHalves,
                                   T::kBytes / Rates::kBoxBytes);
  if (steps > kMostStages) step = std::max(step, Rates::kBoxLatency / kMostStages);
  const double finish = T::kOutputs * (slices > 1 ? Rates::kBoxSent : Rates::kBoxStored);
  const double joined = slices > 1 ? Rates::kBoxJoin + Rates::kBoxJoinOfSlice * slices : 0;
  return Rates::kStart + joined + std::ceil(blocks / at_once) * (Rates::kBoxStart + steps * (step + Rates::kBoxStep) + at_once * finish);
}

TileChoice CheapestTile(const HalfConvParams& p, int slices, const Device& device) {
  TileChoice best;
  for (int i = 0; i < FloatTiling::kHalfTiles; ++i) {
    WithTile<HalfTiles>(i, [&](auto tile) {
      using T = decltype(tile);
      if (SharedBytesOf<T>(p, slices) > device.shared_bytes) return;
      const double cost = CostOf<T>(p, slices, device);
      if (cost < best.cost) best = {i, cost};
    });
  }
  return best;
}

// ---- what is packed

// The channels of FewHalves, so that windows begin at multiples of 16 bytes; 0: channels are not few, or taps of a row
// do not fit into a tile.
int FewChannels(const FloatConvOp& op) {
  constexpr int64_t kMostFew = 4;
  const int64_t stride = op.window.stride[kMaxSpatial - 1], extent = op.window.Extent(kMaxSpatial - 1);
  if (op.in_channels > kMostFew) return 0;
  const int channels = stride % 2 == 0 ? 4 : 8;
  return extent * channels <= kHalvesOfTile ? channels : 0;
}

// Rows of 128 bytes in the order of shared memory, each 64 elements of k.
std::vector<uint16_t> PackWeights(const HalfConvParams& p, const FloatConvOp& op) {
  const int64_t taps = TapsOf(op), channels = op.in_channels, tiles_of_tap = p.k_tiles / taps;
  const int64_t few = FewChannels(op), kernel_w = op.window.kernel[kMaxSpatial - 1];
  const int64_t tap_step = few * op.window.dilation[kMaxSpatial - 1];
  std::vector<uint16_t> out(static_cast<size_t>((int64_t{p.k_tiles} * p.rows + kMostRows) * kHalvesOfTile));
  for (int64_t output = 0; output < op.out_channels; ++output) {
    const auto of_run = static_cast<int>(output % kRowsTogether);
    const int64_t row = output - of_run + RowOfNeighbours<kRowsTogether>(of_run);
    for (int64_t channel = 0; channel < channels; ++channel) {
      for (int64_t tap = 0; tap < taps; ++tap) {
        const int64_t tile = few > 0 ? tap / kernel_w : tap * tiles_of_tap + channel / kHalvesOfTile;
        const int64_t in_row = few > 0 ? tap % kernel_w * tap_step + channel : channel % kHalvesOfTile;
        const int64_t chunk = in_row / kHalvesOfThread ^ row % 8;
        const int64_t at = (tile * p.rows + row) * kHalvesOfTile + chunk * kHalvesOfThread + in_row % kHalvesOfThread;
        out[static_cast<size_t>(at)] =
            ToHalf(op.weights[static_cast<size_t>((output * channels + channel) * taps + tap)]);
      }
    }
  }
  return out;
}

HalfConvParams Described(const FloatConvOp& op, const Limits& limits) {
  constexpr int kOfRows = kRowsTogether;
  HalfConvParams p;
  p.limits = limits;
  p.n = CheckedSize(op.out_channels, "outputs");
  p.rows = static_cast<int>(BlocksFor(p.n, kOfRows)) * kOfRows;
  const int64_t tiles_of_tap = BlocksFor(op.in_channels, kHalvesOfTile);
  const bool is_few = FewChannels(op) > 0;
  p.k_tiles = is_few ? static_cast<int>(op.window.kernel[kMaxSpatial - 2])
                     : CheckedSize(tiles_of_tap * TapsOf(op), "tiles");
  CheckedSize(int64_t{p.k_tiles} * kRowBytes, "sums of bytes");
  p.channels = static_cast<int>(tiles_of_tap * kRowBytes);
  p.pixel_bytes = CheckedSize(op.in_channels * 2, "bytes of a pixel");
  p.kernel_h = static_cast<int>(op.window.kernel[kMaxSpatial - 2]);
  p.kernel_w = is_few ? 1 : static_cast<int>(op.window.kernel[kMaxSpatial - 1]);
  p.dilation_h = static_cast<int>(op.window.dilation[kMaxSpatial - 2]);
  p.dilation_w = is_few ? 1 : static_cast<int>(op.window.dilation[kMaxSpatial - 1]);
  p.by_channels = MakeDivisor(p.channels);
  p.by_kernel_w = MakeDivisor(p.kernel_w);
  return p;
}

void SetShapes(const FloatConvOp& op, const TensorShape& x, const TensorShape& y, HalfConvParams& p) {
  const Windows windows = WindowsOf(WindowOf(op, x.dims), x.dims.data() + 2, y.dims.data() + 2);
  const WindowDim &h = windows.h, &w = windows.w;
  p.in_h = static_cast<int>(h.in), p.in_w = static_cast<int>(w.in);
  p.out_h = static_cast<int>(h.out), p.out_w = static_cast<int>(w.out);
  p.stride_h = static_cast<int>(h.stride), p.stride_w = static_cast<int>(w.stride);
  p.pad_top = static_cast<int>(h.pad_begin), p.pad_left = static_cast<int>(w.pad_begin);
  p.flat = FewChannels(op) == 0 && p.kernel_h * p.kernel_w == 1 && h.out == h.in && w.out == w.in && p.pad_top == 0 && p.pad_left == 0;
  p.m = CheckedSize(x.dims[0] * h.out * w.out, "pixels");
  p.by_image = MakeDivisor(std::max<int64_t>(1, h.out * w.out));
  p.by_row = MakeDivisor(std::max<int64_t>(1, w.out));
  p.count = static_cast<unsigned>(CountOf(y.dims));
}

// The image that is made of few channels, which `p` is then about.
FewHalves MakeFew(const FloatConvOp& op, const TensorShape& x, HalfConvParams& p) {
  FewHalves few;
  few.channels = FewChannels(op);
  few.images = static_cast<int>(x.dims[0]);
  few.top = p.pad_top, few.left = p.pad_left;
  few.rows = (p.out_h - 1) * p.stride_h + static_cast<int>(op.window.Extent(kMaxSpatial - 2));
  few.columns = (p.out_w - 1) * p.stride_w + static_cast<int>(op.window.Extent(kMaxSpatial - 1));
  few.columns += few.columns % 2;  // rows begin at multiples of 16 bytes
  p.pixel_bytes = p.stride_w * few.channels * 2;
  p.row_bytes = few.RowBytes();
  p.image_bytes = few.rows * p.row_bytes;
  p.in_h = few.rows, p.in_w = p.out_w;
  p.stride_w = 1, p.pad_top = p.pad_left = 0;
  return few;
}

// Windows of the rows of few channels in boxes of `pixels`.
cudaError_t EncodeFew(const HalfConvParams& p, int pixels, CUtensorMap* map) {
  const auto wide = [](int64_t v) { return static_cast<cuuint64_t>(v); };
  const int images = p.m / (p.out_h * p.out_w);
  const cuuint64_t sizes[] = {kRowBytes, wide(p.in_w), wide(p.in_h), wide(images)};
  const cuuint64_t strides[] = {wide(p.pixel_bytes), wide(p.row_bytes), wide(p.image_bytes)};
  const int lower[] = {0, 0}, upper[] = {0, (p.out_h - 1) * p.stride_h - p.in_h + 1};
  const cuuint32_t steps[] = {1, 1, static_cast<cuuint32_t>(p.stride_h), 1};
  return EncodeWindows(map, p.x, sizes, strides, lower, upper, kRowBytes, static_cast<cuuint32_t>(pixels), steps);
}

template <typename T>
void LaunchTile(const Run& run, HalfConvParams p, const Device& device) {
  const unsigned columns = BlocksFor(p.n, T::kN);
  p.by_columns = MakeDivisor(columns);
  p.stages = StagesOf<T>(p, p.slices);
  CUtensorMap map;
  run.Check(p.row_bytes > 0 ? EncodeFew(p, T::kM, &map)
                            : EncodePixels(static_cast<const uint8_t*>(p.x), p.m, p, T::kM, &map));
  const LaunchShape shape{dim3(columns * BlocksFor(p.m, T::kM), 1, static_cast<unsigned>(p.slices)),
                          T::kThreadsOf, SharedBytesOf<T>(p, p.slices), Dim(1, 1, p.slices)};
  const bool has_floats = !p.makes_halves || (p.limits.adds && !p.adds_halves);
  run.Check(has_floats ? LaunchKernel<HalfConv<T, true>>(run.queue, device, shape, p, map)
                       : LaunchKernel<HalfConv<T, false>>(run.queue, device, shape, p, map));
}

class PackedHalfConv final : public PackedNode {
 public:
  PackedHalfConv(FloatConvOp op, const HalfConvParams& shared, std::shared_ptr<const DeviceMemory> memory,
                 Device device, const FloatTiling& tiling, const HalfTensors& halves = {})
      : op_(std::move(op)),
        shared_(shared),
        memory_(std::move(memory)),
        device_(std::move(device)),
        tiling_(tiling),
        halves_(halves) {}

  NodePlanPtr Plan(Shapes fed, const TensorShape& y) const override {
    HalfConvParams geometry = shared_;
    SetShapes(op_, fed[0], y, geometry);
    geometry.limits = LimitsOf(fed, shared_.limits);
    const int most = std::min(geometry.k_tiles, kMostSlices);
    geometry.slices = CheapestSlices(most, tiling_.slices, [&, device = DeviceOfEstimates()](int slices) {
      return CheapestTile(geometry, slices, device).cost;
    });
    const int tile =
        tiling_.tile >= 0 ? tiling_.tile : CheapestTile(geometry, geometry.slices, device_).tile;
    std::string text = "float_conv_float16 halves";
    WithTile<HalfTiles>(tile, [&](auto known) {
      text += " " + std::to_string(known.kM) + "x" + std::to_string(known.kN);
    });
    if (geometry.slices > 1) text += " slices " + std::to_string(geometry.slices);
    if (!halves_.Has(0)) text += " of float32";
    if (!halves_.y) text += " to float32";
    geometry.adds_halves = halves_.Has(1), geometry.makes_halves = halves_.y;
    FewHalves few;
    if (FewChannels(op_) > 0) few = MakeFew(op_, fed[0], geometry);
    const auto launch = [=, device = device_, x = fed[0], reads_halves = halves_.Has(0)](const Run& run, const HalfConvParams& of_run) {
      HalfConvParams p = of_run;
      if (!reads_halves) {
        const auto* const floats = static_cast<const float*>(p.x);
        if (few.channels > 0) {
          LaunchToFewHalves(run, floats, run.workspace, x, few);
        } else {
          LaunchToHalves(run, floats, run.workspace, x);
        }
        p.x = run.workspace;
      }
      WithTile<HalfTiles>(tile, [&](auto known) { LaunchTile<decltype(known)>(run, p, device); });
    };
    const auto scratch = static_cast<size_t>(few.channels > 0    ? few.Bytes()
                                             : halves_.Has(0) ? 0
                                                              : BytesOfHalves(fed[0]));
    return Hold(MakeKernelPlan(text, geometry, launch, (scratch + 255) / 256 * 256), memory_);
  }
  bool MayReadHalves(Shapes fed, size_t i) const override {
    return FitsHalves(fed[i]) && (i == 0 || op_.out_channels % kHalvesOfThread == 0);
  }
  bool MayMakeHalves(Shapes) const override { return op_.out_channels % kHalvesOfThread == 0; }
  PackedNodePtr InHalves(const HalfTensors& halves) const override {
    return std::make_unique<PackedHalfConv>(op_, shared_, memory_, device_, tiling_, halves);
  }

 private:
  FloatConvOp op_;  // without its constants
  HalfConvParams shared_;
  std::shared_ptr<const DeviceMemory> memory_;
  Device device_;
  FloatTiling tiling_;
  HalfTensors halves_;
};

}  // namespace

bool HasHalfConv(const FloatConvOp& op, const Device& device, FloatPrecision precision) {
  constexpr int64_t kMostReach = 64, kMostStride = 8;  // of tensor maps
  if (device.capability != 90 || precision != FloatPrecision::kFloat16 || op.group != 1 ||
      op.in_channels == 0 || (op.in_channels % kHalvesOfThread != 0 && FewChannels(op) == 0)) {
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

PackedNodePtr PackHalfConv(const FloatConvOp& op, const Device& device, const Limits& limits,
                           const FloatTiling& tiling) {
  HalfConvParams shared = Described(op, limits);
  const std::vector<uint16_t> weights = PackWeights(shared, op);
  const uint16_t* packed = nullptr;
  NodeConstants constants;
  constants.Add(weights, packed);
  constants.Add(op.bias, shared.bias);
  const auto memory = constants.Upload(device);
  shared.weights = reinterpret_cast<const uint8_t*>(packed);
  return std::make_unique<PackedHalfConv>(WithoutConstants(op), shared, memory, device, tiling);
}

}  // namespace lowbit::cuda
