// LowBitMaxPool, LowBitAveragePool, LowBitGlobalAveragePool, channels last.
#include <algorithm>

#include "kernels/cuda/conv/places.cuh"
#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_support.h"
#include "kernels/cuda/nodes/pool_window.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kPoolThreads = 128;

struct PoolParams : Tensors<uint8_t, void> {
  unsigned channels = 0;
  FastDivisor by_vectors;  // of a pixel; then `count` counts vectors
  Windows windows;
  // MaxPool alone; y is null where places alone get the codes.
  PlaceParams places[kMostPlaces];
  int place_count = 0;
  // AveragePool alone
  bool count_include_pad = false;
  CodeReader reader;
  uint32_t zero = 0;  // four times the zero point
  float x_scale = 1;
  Divider divider;
  CodeRounder rounder;
};

// The largest codes so far. A 16-bit maximum orders by its high byte first, so codes 1 and 3 of a word can
// stay in place, whatever is below them, and codes 0 and 2 are shifted there.
template <int kBytes, bool kSigned>
struct Largest {
  static constexpr int kCodes = kBytes, kWords = Codes<kBytes>::kWords;
  static constexpr bool kDownColumns = false;
  __device__ static __forceinline__ unsigned Outside(const PoolParams&) { return kSigned ? 0x80808080u : 0u; }
  unsigned even[kWords], odd[kWords];

  __device__ __forceinline__ Largest() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) even[i] = odd[i] = kSigned ? 0x80008000u : 0u;
  }
  __device__ __forceinline__ void Add(const PoolParams&, const Codes<kBytes>& codes) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kSigned) {
        even[i] = __vmaxs2(even[i], codes.w[i] << 8);
        odd[i] = __vmaxs2(odd[i], codes.w[i]);
      } else {
        even[i] = __vmaxu2(even[i], codes.w[i] << 8);
        odd[i] = __vmaxu2(odd[i], codes.w[i]);
      }
    }
  }
  __device__ __forceinline__ void EndColumn() {}
  __device__ __forceinline__ void Store(const PoolParams& p, int64_t pixel, unsigned channel, int64_t) const {
    Codes<kBytes> out;
#pragma unroll
    for (int i = 0; i < kWords; ++i) out.w[i] = __byte_perm(even[i], odd[i], 0x7351);
    if constexpr (kBytes > 1) {  // channels of places come in runs
      StoreInPlaces(p, pixel, static_cast<int>(channel), out);
    }
    if (p.y != nullptr) StoreCodes(static_cast<uint8_t*>(p.y) + pixel * p.channels + channel, out);
  }
};

// The sums of a thread's channels. Float32, in the definition's order: down each column, then the columns
// from left to right.
template <int kBytes, bool kFast, bool kFloat>
struct Average {
  static constexpr int kCodes = kBytes;
  static constexpr bool kDownColumns = true;
  // The zero point's value, 0, leaves every sum as it is.
  __device__ static __forceinline__ unsigned Outside(const PoolParams& p) { return p.zero; }
  float sum[kBytes] = {}, column[kBytes] = {};

  __device__ __forceinline__ void Add(const PoolParams& p, const Codes<kBytes>& codes) {
#pragma unroll
    for (int c = 0; c < kBytes; ++c) {
      column[c] = __fadd_rn(column[c], __fmul_rn(CodeValue(codes, c, p.reader), p.x_scale));
    }
  }
  __device__ __forceinline__ void EndColumn() {
#pragma unroll
    for (int c = 0; c < kBytes; ++c) {
      sum[c] = __fadd_rn(sum[c], column[c]);
      column[c] = 0;
    }
  }
  __device__ __forceinline__ void Store(const PoolParams& p, int64_t pixel, unsigned channel,
                                        int64_t taps) const {
    const int64_t at = pixel * p.channels + channel;
    const auto value = [&](int c) { return __fdiv_rn(sum[c], static_cast<float>(taps)); };
    const auto divided = [&](int c) { return Divide<kFast>(value(c), p.divider); };
    if constexpr (!kFloat) {
      StoreCodes(static_cast<uint8_t*>(p.y) + at, RoundCodes<kBytes>(p.rounder, divided));
    } else {
#pragma unroll
      for (int c = 0; c < kBytes; ++c) static_cast<float*>(p.y)[at + c] = value(c);
    }
  }
};

// Sum: Largest or Average. kSide 2 or 3: an undilated window of that many rows and columns, its loads all in
// flight at once; 0: any.
template <typename Sum, int kSide>
__global__ void __launch_bounds__(kPoolThreads) Pool(const __grid_constant__ PoolParams p) {
  constexpr int kBytes = Sum::kCodes;
  const unsigned index = StartThread<kPoolThreads>();
  if (index >= p.count) return;
  const auto [pixel, vector] = Divided(index, p.by_vectors);
  const Windows::Place at = p.windows.PlaceOf(pixel);
  const WindowDim &h = p.windows.h, &w = p.windows.w;
  const unsigned channel = vector * kBytes;
  Sum sum;
  int64_t taps = 0;
  if constexpr (kSide > 0) {
    const int height = static_cast<int>(h.in), width = static_cast<int>(w.in);
    const int top = static_cast<int>(at.row) * static_cast<int>(h.stride) - static_cast<int>(h.pad_begin);
    const int left = static_cast<int>(at.column) * static_cast<int>(w.stride) - static_cast<int>(w.pad_begin);
    const int64_t first = (static_cast<int64_t>(at.plane) * height + top) * width + left;
    Codes<kBytes> codes[kSide * kSide];
#pragma unroll
    for (int t = 0; t < kSide * kSide; ++t) {
      const int i = Sum::kDownColumns ? t % kSide : t / kSide, j = Sum::kDownColumns ? t / kSide : t % kSide;
      const bool inside = top + i >= 0 && top + i < height && left + j >= 0 && left + j < width;
      const uint8_t* x = p.x + (first + i * width + j) * p.channels + channel;
      codes[t] = inside ? LoadCodes<kBytes>(x) : Splat<kBytes>(Sum::Outside(p));
      taps += inside ? 1 : 0;
    }
#pragma unroll
    for (int t = 0; t < kSide * kSide; ++t) {
      sum.Add(p, codes[t]);
      if (t % kSide == kSide - 1) sum.EndColumn();
    }
  } else {
    const WindowDim::Span rows = h.Inside(at.row), columns = w.Inside(at.column);
    const int64_t outer = Sum::kDownColumns ? columns.count : rows.count;
    const int64_t inner = Sum::kDownColumns ? rows.count : columns.count;
    taps = outer * inner;
    for (int64_t o = 0; o < outer; ++o) {
      for (int64_t i = 0; i < inner; ++i) {
        const int64_t row = rows.first + (Sum::kDownColumns ? i : o) * h.dilation;
        const int64_t column = columns.first + (Sum::kDownColumns ? o : i) * w.dilation;
        const int64_t from = (at.plane * h.in + row) * w.in + column;
        sum.Add(p, LoadCodes<kBytes>(p.x + from * p.channels + channel));
      }
      sum.EndColumn();
    }
  }
  if (p.count_include_pad) taps = h.Padded(at.row) * w.Padded(at.column);
  sum.Store(p, pixel, channel, taps);
}

// Of planes of bits (core/bit_planes.h), a thread a word of each.
struct PlanePoolParams : Tensors<uint4, uint4> {  // count: words of a plane of y
  unsigned words = 0, x_pixels = 0;               // of a plane, of a word
  FastDivisor by_pixels;                          // of a word of y
  Windows windows;
};

// The largest codes so far. Of two codes the higher bit is set where either's is; the lower one is that of the code with
// the higher bit, or of either where both or none have it.
template <int kPlanes>
struct LargestOfPlanes {
  static_assert(kPlanes == 1 || kPlanes == 2);
  uint4 planes[kPlanes] = {};

  __device__ __forceinline__ void Add(const uint4 (&codes)[kPlanes]) {
    if constexpr (kPlanes == 2) {
      const auto lower = [](unsigned a1, unsigned a0, unsigned b1, unsigned b0) {
        const unsigned of_higher = (a1 & a0) | (~a1 & b0), differs = a1 ^ b1;
        return (differs & of_higher) | (~differs & (a0 | b0));
      };
      const uint4 &a1 = planes[1], &b1 = codes[1], &a0 = planes[0], &b0 = codes[0];
      planes[0] = make_uint4(lower(a1.x, a0.x, b1.x, b0.x), lower(a1.y, a0.y, b1.y, b0.y),
                             lower(a1.z, a0.z, b1.z, b0.z), lower(a1.w, a0.w, b1.w, b0.w));
    }
    uint4& highest = planes[kPlanes - 1];
    const uint4& other = codes[kPlanes - 1];
    highest = make_uint4(highest.x | other.x, highest.y | other.y, highest.z | other.z, highest.w | other.w);
  }
};

// kSide as of Pool.
template <int kPlanes, int kSide>
__global__ void __launch_bounds__(kPoolThreads) PoolPlanes(const __grid_constant__ PlanePoolParams p) {
  const unsigned index = StartThread<kPoolThreads>();
  if (index >= p.count) return;
  const auto [word, pixel] = Divided(index, p.by_pixels);
  const Windows::Place at = p.windows.PlaceOf(pixel);
  const WindowDim &h = p.windows.h, &w = p.windows.w;
  const uint4* const x = p.x + static_cast<int64_t>(word) * p.x_pixels;
  const int64_t plane_step = static_cast<int64_t>(p.words) * p.x_pixels;
  LargestOfPlanes<kPlanes> largest;
  const WindowDim::Span rows = h.Inside(at.row), columns = w.Inside(at.column);
  const auto load = [&](int64_t i, int64_t j, uint4(&codes)[kPlanes]) {
    const int64_t row = rows.first + i * h.dilation, column = columns.first + j * w.dilation;
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      codes[plane] = x[plane * plane_step + (at.plane * h.in + row) * w.in + column];
  };
  if constexpr (kSide > 0) {
    uint4 codes[kSide * kSide][kPlanes] = {};
#pragma unroll
    for (int t = 0; t < kSide * kSide; ++t) {
      if (t / kSide < rows.count && t % kSide < columns.count) load(t / kSide, t % kSide, codes[t]);
    }
#pragma unroll
    for (int t = 0; t < kSide * kSide; ++t) largest.Add(codes[t]);
  } else {
    for (int64_t i = 0; i < rows.count; ++i) {
      for (int64_t j = 0; j < columns.count; ++j) {
        uint4 codes[kPlanes];
        load(i, j, codes);
        largest.Add(codes);
      }
    }
  }
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane)
    p.y[static_cast<int64_t>(plane) * p.count + index] = largest.planes[plane];
}

// A block sums a slab of 8 vectors of channels: 8 threads side by side, 32 of those groups taking turns with the pixels.
// Integer sums are exact in any order. Many pixels and few channels are split over several blocks, whose sums the first
// one of their cluster adds, or a second kernel where there are no clusters.
constexpr int kColumns = 8, kLanes = kThreads / kColumns, kWarps = kThreads / kWarp, kMostParts = 8;

struct GlobalParams : Tensors<uint8_t, void> {  // count: images * channels
  int32_t* partial = nullptr;                   // [splits][count]
  unsigned pixels = 0, channels = 0, images = 0;
  unsigned slabs = 0, splits = 1, pixels_per_split = 0;
  bool in_cluster = false;  // the blocks of a slab
  bool is_signed = false, quantized = true;
  int32_t zero_sum = 0;  // pixels * x_zero_point
  float multiplier = 1;
  CodeRounder rounder;
};

// The averages of neighbouring channels from sums.
template <int kCount>
__device__ __forceinline__ void FinishGlobal(const GlobalParams& p, int64_t at, const int (&sums)[kCount]) {
  const auto value = [&](int i) { return __fmul_rn(static_cast<float>(sums[i] - p.zero_sum), p.multiplier); };
  if (p.quantized) {
    StoreCodes(static_cast<uint8_t*>(p.y) + at, RoundCodes<kCount>(p.rounder, value));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) static_cast<float*>(p.y)[at + i] = value(i);
  }
}

// sums[i] += byte i of the word.
template <bool kSigned, int kCount>
__device__ __forceinline__ void AddBytes(int word, int (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = DotFour<kSigned>(word, 1 << (8 * i), sums[i]);
}

// kBytes: 4 or 1.
template <int kBytes, bool kSigned>
__global__ void __launch_bounds__(kThreads) GlobalSum(const __grid_constant__ GlobalParams p) {
  __shared__ int sums_of[kWarps][kColumns * kBytes];
  __shared__ int4 parts[kMostParts][kColumns];  // of the cluster's blocks
  __shared__ uint64_t all_parts;                // mbarrier: they are there
  const unsigned slab = blockIdx.x % p.slabs, image = blockIdx.x / p.slabs, split = blockIdx.y;
  const unsigned column = threadIdx.x % kColumns, lane = threadIdx.x / kColumns;
  const unsigned channel = (slab * kColumns + column) * kBytes;
  const unsigned begin = split * p.pixels_per_split, end = min(p.pixels, begin + p.pixels_per_split);
  if (p.in_cluster) {
    if (threadIdx.x == 0) {
      InitBarrier(SharedAddress(&all_parts), 1);
      FenceBarrierInit();
      ArriveExpecting(SharedAddress(&all_parts), static_cast<int>(p.splits * sizeof(parts[0])));
    }
    ClusterArrive();
  }
  WaitForPredecessors();
  LetSuccessorsStart();

  int sums[kBytes] = {};
  if (channel < p.channels) {
    const uint8_t* x = p.x + static_cast<int64_t>(image) * p.pixels * p.channels + channel;
    // Few pixels are usual: loads past the end are left out, not left to a loop that waits for each.
    constexpr unsigned kAtOnce = 8;
    for (unsigned first = begin + lane; first < end; first += kAtOnce * kLanes) {
      unsigned words[kAtOnce];
#pragma unroll
      for (unsigned i = 0; i < kAtOnce; ++i) {
        const unsigned pixel = first + i * kLanes;
        words[i] = pixel < end ? LoadCodes<kBytes>(x + static_cast<int64_t>(pixel) * p.channels).w[0] : 0;
      }
#pragma unroll
      for (const unsigned word : words) AddBytes<kSigned>(static_cast<int>(word), sums);
    }
  }
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
#pragma unroll
    for (int step = kColumns; step < kWarp; step *= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], step);
    if (threadIdx.x % kWarp < kColumns) sums_of[threadIdx.x / kWarp][column * kBytes + i] = sums[i];
  }
  if (p.in_cluster) ClusterWait();  // every block has started
  __syncthreads();
  if (threadIdx.x >= kColumns) return;
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    sums[i] = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sums[i] += sums_of[warp][column * kBytes + i];
  }
  const int64_t at = static_cast<int64_t>(image) * p.channels + channel;
  if constexpr (kBytes == 4) {
    if (p.in_cluster) {
      StoreToCluster(ClusterAddress(SharedAddress(&parts[split][column]), 0),
                     make_int4(sums[0], sums[1], sums[2], sums[3]),
                     ClusterAddress(SharedAddress(&all_parts), 0));
      if (split > 0 || channel >= p.channels) return;
      WaitBarrier(SharedAddress(&all_parts), 0);
      int4 total = {};
      for (unsigned i = 0; i < p.splits; ++i) {
        const int4 part = parts[i][column];
        total = make_int4(total.x + part.x, total.y + part.y, total.z + part.z, total.w + part.w);
      }
      FinishGlobal<4>(p, at, {total.x, total.y, total.z, total.w});
      return;
    }
  }
  if (channel >= p.channels) return;
  if (p.splits > 1) {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) p.partial[static_cast<int64_t>(split) * p.count + at + i] = sums[i];
  } else {
    FinishGlobal<kBytes>(p, at, sums);
  }
}

__global__ void __launch_bounds__(kThreads) GlobalFinish(const __grid_constant__ GlobalParams p) {
  const unsigned at = StartThread();
  if (at >= p.count) return;
  const int32_t* partial = p.partial + at;
  int sum = 0;
  constexpr unsigned kAtOnce = 16;
  for (unsigned first = 0; first < p.splits; first += kAtOnce) {
#pragma unroll
    for (unsigned i = 0; i < kAtOnce; ++i) {
      if (first + i < p.splits) sum += partial[(first + i) * p.count];
    }
  }
  FinishGlobal<1>(p, at, {sum});
}

PoolParams PoolGeometry(const Window& window, const TensorShape& x, const TensorShape& y) {
  PoolParams p;
  p.windows = WindowsOf(window, x.dims.data() + 1, y.dims.data() + 1);
  p.channels = static_cast<unsigned>(x.dims.back());
  p.count = static_cast<unsigned>(CountOf(y.dims));
  return p;
}

// `p` as PoolGeometry made it, in vectors of `unit` channels.
PoolParams InVectors(PoolParams p, int unit) {
  p.count /= static_cast<unsigned>(unit);
  p.by_vectors = MakeDivisor(p.channels / static_cast<unsigned>(unit));
  return p;
}

// The side of a square window that the kernels have unrolled, or 0.
int UnrolledSide(const Windows& windows) {
  constexpr int64_t kSmall = 1 << 14;
  const int64_t side = windows.h.kernel;
  for (const WindowDim* d : {&windows.h, &windows.w}) {
    if (d->dilation != 1 || d->in > kSmall || d->out > kSmall || d->stride > kSmall) return 0;
  }
  return side == windows.w.kernel && (side == 2 || side == 3) ? static_cast<int>(side) : 0;
}

GlobalParams GlobalGeometry(const GlobalAveragePoolNode& node, const TensorShape& x, const TensorShape& y,
                            const Device& device) {
  GlobalParams p;
  p.count = static_cast<unsigned>(CountOf(y.dims));
  p.images = static_cast<unsigned>(x.dims.front());
  p.channels = static_cast<unsigned>(x.dims.back());
  p.pixels = static_cast<unsigned>(CountOf(x.dims) / std::max<int64_t>(1, p.count));
  const Quantizer& quantizer = node.spec.quantizer;
  p.is_signed = node.spec.x_signed;
  p.quantized = quantizer.quantized;
  p.rounder = MakeRounder(quantizer);
  p.zero_sum = static_cast<int32_t>(p.pixels) * node.x_zero_point;
  const float pixels = static_cast<float>(p.pixels);
  p.multiplier = node.x_scale / (p.quantized ? quantizer.scale * pixels : pixels);
  // Split so that every multiprocessor has work, but a thread as many pixels as it fetches at once.
  const int64_t blocks = std::max<int64_t>(1, int64_t{p.images} * BlocksFor(p.channels, 4 * kColumns));
  const int64_t wanted = std::max<int64_t>(1, 2 * device.multiprocessors / blocks);
  p.splits = static_cast<unsigned>(std::min<int64_t>(wanted, std::max(1u, BlocksFor(p.pixels, 8 * kLanes))));
  p.in_cluster = device.capability >= 90 && p.splits > 1 && p.channels % 4 == 0;
  if (p.in_cluster) p.splits = std::min<unsigned>(p.splits, kMostParts);
  p.pixels_per_split = BlocksFor(p.pixels, p.splits);
  return p;
}

void LaunchGlobal(const Run& run, GlobalParams p, const Device& device) {
  const int unit = std::min({4, CommonUnit({p.x, p.y}), CommonUnit(p.channels)});
  p.slabs = BlocksFor(p.channels, kColumns * unit);
  p.partial = static_cast<int32_t*>(run.workspace);
  p.in_cluster = p.in_cluster && unit == 4;
  const int64_t blocks = int64_t{p.slabs} * p.images;
  Require(blocks < int64_t{1} << 31, "a global average of ", p.images, " images is too large");
  std::visit(
      [&](auto bytes, auto is_signed) {
        const dim3 grid(static_cast<unsigned>(blocks), p.splits), cluster(1, p.in_cluster ? p.splits : 1);
        run.Check(
            LaunchKernel<GlobalSum<bytes, is_signed>>(run.queue, device, {grid, kThreads, 0, cluster}, p));
      },
      OneOf<4, 1>(unit), OneOf(p.is_signed));
  if (p.splits > 1 && !p.in_cluster) run.LaunchFor(p.count, GlobalFinish, kThreads, p);
}

NodePlanPtr PlanPlanePool(const Window& window, int planes, const TensorShape& x, const TensorShape& y) {
  PlanePoolParams p;
  p.windows = WindowsOf(window, x.dims.data() + 1, y.dims.data() + 1);
  const int64_t channels = x.dims.back(), words = (channels + kPlaneChannels - 1) / kPlaneChannels;
  const int64_t pixels = CountOf(y.dims) / std::max<int64_t>(1, channels);
  p.words = static_cast<unsigned>(words);
  p.x_pixels = static_cast<unsigned>(CountOf(x.dims) / std::max<int64_t>(1, channels));
  p.by_pixels = MakeDivisor(std::max<int64_t>(1, pixels));
  p.count = static_cast<unsigned>(words * pixels);
  const int side = UnrolledSide(p.windows);
  const auto launch = [=](const Run& run, const PlanePoolParams& of_run) {
    std::visit(
        [&](auto planes_, auto side_) {
          run.LaunchFor(of_run.count, PoolPlanes<planes_, side_>, kPoolThreads, of_run);
        },
        OneOf<1, 2>(planes), OneOf<3, 2, 0>(side));
  };
  return MakeKernelPlan("max_pool_planes" + std::to_string(planes), p, launch);
}

// Of bytes, and of planes of codes whose lowest is 0.
class PackedMaxPool final : public PackedNode {
 public:
  PackedMaxPool(const MaxPoolNode& node, PackedNodePtr of_bytes)
      : node_(node), of_bytes_(std::move(of_bytes)) {}

  NodePlanPtr Plan(Shapes fed, const TensorShape& y) const override { return of_bytes_->Plan(fed, y); }
  bool MayStore(Shapes fed, std::span<const ChannelMove> moves) const override {
    return of_bytes_->MayStore(fed, moves);
  }
  PackedNodePtr Storing(std::span<const ChannelMove> moves, bool keeps_output) const override {
    return of_bytes_->Storing(moves, keeps_output);
  }
  bool KeepsPlanes() const override { return !node_.is_signed; }
  // What it takes is what it reads, roughly.
  std::optional<double> Microseconds(Shapes fed, const TensorPlanes& planes) const override {
    constexpr double kLaunch = 2, kBytesOfMicrosecond = 1.5e6;
    if (planes.x != planes.y || planes.x > kMostPlanes) return std::nullopt;
    const int64_t bytes = planes.x > 0 ? PlaneBytes(fed[0].dims, planes.x) : CountOf(fed[0].dims);
    return kLaunch + static_cast<double>(bytes) / kBytesOfMicrosecond;
  }
  PackedNodePtr InPlanes(const TensorPlanes& planes) const override {
    return MakeNode([window = node_.window, planes](Shapes fed, const TensorShape& y) {
      return PlanPlanePool(window, planes.x, fed[0], y);
    });
  }

 private:
  MaxPoolNode node_;
  PackedNodePtr of_bytes_;
};

// What a plan's text says of a number that is not always there.
std::string Suffix(const char* name, int64_t number, bool present) {
  return present ? name + std::to_string(number) : std::string();
}

}  // namespace

PackedNodePtr Pack(const MaxPoolNode& node, const Device& device) {
  const auto plan = [window = node.window, is_signed = node.is_signed](Shapes fed, const TensorShape& y,
                                                                       const StoredChannels& stored) {
    const PoolParams geometry = PoolGeometry(window, fed[0], y);
    const int side = UnrolledSide(geometry.windows);
    const auto launch = [=](const Run& run, const PoolParams& p) {
      const int unit = std::min(CommonUnit({p.x, p.y}), CommonUnit(p.channels));
      PoolParams vectors = InVectors(p, unit);
      SetPlaces(stored, run, unit, vectors);
      std::visit(
          [&](auto bytes, auto signed_, auto side_) {
            run.LaunchFor(vectors.count, Pool<Largest<bytes, signed_>, side_>, kPoolThreads, vectors);
          },
          OneOf<16, 4, 1>(unit), OneOf(is_signed), OneOf<3, 2, 0>(side));
    };
    return MakeKernelPlan("max_pool" + Suffix("_side", side, side > 0), geometry, launch);
  };
  return std::make_unique<PackedMaxPool>(node, MakeStoringNode(plan, device));
}

PackedNodePtr Pack(const AveragePoolNode& node, const Device&) {
  return MakeNode([node](Shapes fed, const TensorShape& y) {
    const AverageSpec& spec = node.spec;
    PoolParams geometry = PoolGeometry(node.window, fed[0], y);
    geometry.count_include_pad = node.count_include_pad;
    geometry.reader = MakeReader(spec.x_signed, spec.x_zero_point);
    geometry.zero = static_cast<uint8_t>(spec.x_zero_point) * 0x01010101u;
    geometry.x_scale = spec.x_scale;
    geometry.divider = MakeDivider(spec.quantizer.scale);
    geometry.rounder = MakeRounder(spec.quantizer);
    // An average is at most as large as the largest value, but for the roundings of its sum.
    const bool fast = FastIsExact(spec.quantizer, 512.0 * static_cast<double>(spec.x_scale), 1.0);
    const auto launch = [=, quantized = spec.quantizer.quantized](const Run& run, const PoolParams& p) {
      int unit = std::min({4, CommonUnit({p.x}), CommonUnit(p.channels)});
      if (quantized) unit = std::min(unit, CommonUnit({p.y}));
      const PoolParams vectors = InVectors(p, unit);
      std::visit(
          [&](auto bytes, auto fast_, auto float_, auto side) {
            constexpr bool kFast = fast_ || float_;  // floats are not divided once more
            run.LaunchFor(vectors.count, Pool<Average<bytes, kFast, float_>, side>, kPoolThreads, vectors);
          },
          OneOf<4, 1>(unit), OneOf(fast), OneOf(!quantized), OneOf<3, 2, 0>(UnrolledSide(p.windows)));
    };
    return MakeKernelPlan("average_pool", geometry, launch);
  });
}

PackedNodePtr Pack(const GlobalAveragePoolNode& node, const Device& device) {
  return MakeNode([node, device](Shapes fed, const TensorShape& y) {
    const GlobalParams geometry = GlobalGeometry(node, fed[0], y, device);
    const size_t partial = geometry.splits == 1 ? 0 : size_t{geometry.splits} * geometry.count * 4;
    const auto launch = [device](const Run& run, const GlobalParams& p) { LaunchGlobal(run, p, device); };
    return MakeKernelPlan("global_average_pool" + Suffix("_splits", geometry.splits, geometry.splits > 1),
                          geometry, launch, (partial + 255) / 256 * 256);
  });
}

}  // namespace lowbit::cuda
