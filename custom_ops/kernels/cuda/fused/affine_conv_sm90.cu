// A line of every channel's codes and the 1x1 convolution behind it, on wgmma for Hopper (sm_90a): threads fetch
// codes into shared memory, put what the lines make of them in their place, and multiply that. Where a Concat makes
// the codes, they are fetched from the tensors that it joins, its own lines come first, and the blocks of the first
// channels store what these make.
//
//   tile of k   weights | gains, offsets     all of them, before the predecessors are done
//   codes       all of them, once those are  | round 0 | round 1 | ...
//   products                                            tile 0 | tile 1 | ...
//
// Codes are rounded in the place to which they were fetched: what a tile waits for is on its way while others are
// rounded. A thread keeps the lines of 16 channels in registers while it walks down the rows. Rounding takes longer
// than the products: for few pixels K is split over a cluster, of whose blocks each rounds a part; wide tiles round
// the codes for all channels once; and a second warpgroup may round half of them.
#include "kernels/cuda/conv/pixel_boxes.cuh"
#include "kernels/cuda/fused/affine_conv.h"
#include "kernels/cuda/nodes/codes.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kTileM = 64;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A warpgroup that rounds and multiplies, whose first thread fetches weights and lines. kHelped: another one rounds
// half of the codes.
template <int kTileN, bool kHelped, bool kSigned, bool kJoins, Finish kFinish>
struct Affined {
  static constexpr int kThreads = (kHelped ? 2 : 1) * kWarpgroup;
  static constexpr int kSums = kTileN / 2, kBytesA = kTileM * kRowBytes, kBytesB = kTileN * kRowBytes,
                       kLineBytes = 2 * kRowBytes * sizeof(float), kBytes = kBytesA + kBytesB + kLineBytes;
  // A thread's chunks of a tile: 16 codes of rows that are kRowStep apart.
  static constexpr int kRowStep = kThreads / 8, kRows = kTileM / kRowStep;
  struct Static {
    BlockState<kTileN> state;
    alignas(8) uint64_t full[kMaxAffineTiles];
  };

  const AffineConvParams& p;
  const bool cluster;
  Static& fixed;
  SharedTiles tiles;

  const int thread = static_cast<int>(threadIdx.x);
  const Barriers full = {SharedAddress(fixed.full)};
  const TilePosition at = TilePosition::Of<kTileM, kTileN>(p);
  const int count = at.k_end - at.k_begin;
  const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 4;
  // The first row of the thread's chunks, and which one of a row of channels they are.
  const int first_row = thread / 8, chunk = thread % 8 ^ thread / 8 % 8;
  uint64_t parts = 0;  // of the tensors that a Concat joins, those of the thread's codes, a byte for a tile
  Codes<16> first[kRows] = {};  // the thread's codes of the first tile

  __device__ __forceinline__ void SetUp() {
    KeepInRegister(tiles.at);
    if (thread < count) {
      InitBarrier(full(thread), thread == 0 ? 1 : 1 + kThreads);
      FenceBarrierInit();
    }
    if (cluster) fixed.state.BeginCluster(kTileM);
  }

  __device__ __forceinline__ void Begin() {
    if (thread == 0) {
      for (int i = 0; i < count; ++i) {
        const uint32_t weights = tiles.at + i * kBytes + kBytesA;
        ArriveExpecting(full(i), kBytesB + kLineBytes);
        BulkCopy(weights, at.Weights(p, at.k_begin + i), kBytesB, full(i));
        BulkCopy(weights + kBytesB, p.lines + (at.k_begin + i) * 2 * kRowBytes, kLineBytes, full(i));
      }
    }
    __syncwarp();
    fixed.state.template FetchConstants<kWarpgroup>(p, at, thread);
    CommitCopies();
    FetchCodes();
  }

  __device__ __forceinline__ int ChannelOf(int i) const { return (at.k_begin + i) * kRowBytes + chunk * 16; }
  // The last part that begins at or before the channel.
  __device__ __forceinline__ int PartOf(int channel) const {
    int part = 0;
    if constexpr (kJoins) {
#pragma unroll 1
      for (int step = p.part_step; step > 0; step /= 2) {
        if (part + step < p.part_count && p.parts[part + step].first <= channel) part += step;
      }
    }
    return part;
  }

  // All codes of the thread, into the places in which they are rounded; the first tile's into registers, which is
  // sooner. Rows past the last pixel repeat it: they are never stored.
  __device__ __forceinline__ void FetchCodes() {
    if constexpr (kJoins) {
#pragma unroll 1
      for (int i = 0; i < count; ++i) parts |= static_cast<uint64_t>(PartOf(ChannelOf(i))) << (8 * i);
    }
    WaitForPredecessors();
    ForEachRow(0, [&](int r, const uint8_t* x) {
      if (x != nullptr) first[r] = LoadCodes<16>(x);
    });
#pragma unroll 1
    for (int i = 1; i < count; ++i) {
      ForEachRow(i, [&](int r, const uint8_t* x) {
        if (x != nullptr) {
          CopyAsync<16>(SharedAddress(Chunk(i, r)), x);
        } else {
          StoreCodes(Chunk(i, r), Codes<16>{});
        }
      });
      ArriveAfterCopies(full(i));
    }
    LetSuccessorsStart();
  }
  // f(row, its codes of tile i in memory, null past the last channel).
  template <typename F>
  __device__ __forceinline__ void ForEachRow(int i, const F& f) const {
    const int channel = ChannelOf(i);
    const AffinePart& part = p.parts[PartAt(i)];
    const uint8_t* const x = part.x + channel - part.first;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int m = min(at.m0 + first_row + r * kRowStep, p.m - 1);
      f(r, channel < p.k ? x + m * part.channels : nullptr);
    }
  }
  __device__ __forceinline__ int PartAt(int i) const { return static_cast<int>(parts >> (8 * i)) & 255; }
  __device__ __forceinline__ uint8_t* Chunk(int i, int r) const {
    return tiles.data + i * kBytes + (first_row + r * kRowStep) * kRowBytes + thread % 8 * 16;
  }

  // Codes as a Concat has them, less the lowest one.
  __device__ __forceinline__ void Join(const AffinePart& of, Codes<16>& codes) const {
    const CodeReader reader = {of.flip, of.bias};
    const auto value = [&](int c) { return __fmaf_rn(of.gain, CodeValue(codes, c, reader), of.offset); };
#pragma unroll
    for (int w = 0; w < 4; ++w)
      codes.w[w] = UnsignedBytes({value(4 * w), value(4 * w + 1), value(4 * w + 2), value(4 * w + 3)});
  }

  // Puts what the lines make of the thread's codes of a tile in their place.
  __device__ __forceinline__ void Round(int i, Codes<16> (&codes)[kRows]) const {
    const float4* const lines =
        reinterpret_cast<const float4*>(tiles.data + i * kBytes + kBytesA + kBytesB) + chunk;
    float gain[16], offset[16];
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const float4 g = lines[four * 8], o = lines[(4 + four) * 8];
      gain[4 * four] = g.x, gain[4 * four + 1] = g.y, gain[4 * four + 2] = g.z, gain[4 * four + 3] = g.w;
      offset[4 * four] = o.x, offset[4 * four + 1] = o.y;
      offset[4 * four + 2] = o.z, offset[4 * four + 3] = o.w;
    }
    const int channel = ChannelOf(i);
    const CodeReader reader = {0, p.made_bias};
    if constexpr (kJoins) {
      const AffinePart& of = p.parts[PartAt(i)];
      if (of.is_copied) {
#pragma unroll
        for (Codes<16>& of_row : codes) {
#pragma unroll
          for (unsigned& word : of_row.w) word ^= of.flip;
        }
      } else {
#pragma unroll
        for (Codes<16>& of_row : codes) Join(of, of_row);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Codes<16>& of_row = codes[r];
      if constexpr (kJoins) {
        const int m = at.m0 + first_row + r * kRowStep;
        if (at.n0 == 0 && m < p.m && channel < p.k) {
          Codes<16> made = of_row;
#pragma unroll
          for (unsigned& word : made.w) word ^= p.made_flip;
          StoreCodes(p.made + m * p.k + channel, made);
        }
      } else {
#pragma unroll
        for (unsigned& word : of_row.w) word ^= p.made_flip;
      }
      const auto value = [&](int c) { return __fmaf_rn(gain[c], CodeValue(of_row, c, reader), offset[c]); };
      Codes<16> rounded;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const unsigned bytes =
            UnsignedBytes({value(4 * w), value(4 * w + 1), value(4 * w + 2), value(4 * w + 3)});
        rounded.w[w] = ((bytes | PermuteBytes(bytes, 0, p.cap_select)) & p.cap_mask) ^ p.cap_flip;
      }
      StoreCodes(Chunk(i, r), rounded);
    }
  }

  // multiply(i) where the block has rounded all codes of tile i.
  template <typename Multiply>
  __device__ __forceinline__ void RoundAll(const Multiply& multiply) const {
    Codes<16> codes[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) codes[r] = first[r];
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      WaitBarrier(full(i), 0);
      if (i > 0) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) codes[r] = LoadCodes<16>(Chunk(i, r));
      }
      Round(i, codes);
      FenceAsyncProxy();
      SyncThreads<kThreads>(2);
      multiply(i);
    }
  }

  __device__ __forceinline__ bool Loads() const { return kHelped && thread >= kWarpgroup; }
  __device__ __forceinline__ void Load() {
    FetchCodes();
    RoundAll([](int) {});
  }

  __device__ __forceinline__ void Multiply(int (&sums)[kSums]) const {
    const uint32_t a = MatrixPart(tiles.at), b = MatrixPart(tiles.at + kBytesA);
    BeginSums<kWarpgroup, kFinish>(fixed.state, column, sums);
    HoldRegisters(sums);
    RoundAll([&](int i) {
      const uint32_t tile = i * (kBytes / 16);
      HoldRegisters(sums);
      WgmmaFence();
      MultiplyTile<Wgmma<kTileN, kSigned>>(
          {SlabDescriptor<kRowBytes>(a + tile), SlabDescriptor<kRowBytes>(b + tile),
           (at.k_begin + i) * kRowBytes + 64 < p.k},
          sums);
      WgmmaCommit();
    });
    WgmmaWait<0>();
    HoldRegisters(sums);
  }

  __device__ __forceinline__ void Finish(const int (&sums)[kSums]) const {
    SyncThreads<kWarpgroup>();
    FinishTile<kTileM, kTileN, kWarpgroup, true, kFinish>(
        p, at, tiles.data, fixed.state, cluster,
        [&](const auto& f) { ForEachFour<kTileN>(sums, row, column, f); });
  }
};
#endif

template <int kTileN, bool kHelped, bool kSigned, bool kJoins, Finish kFinish>
__global__ void __launch_bounds__((kHelped ? 2 : 1) * kWarpgroup)
    ConvAffined(const __grid_constant__ AffineConvParams p, bool cluster) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = Affined<kTileN, kHelped, kSigned, kJoins, kFinish>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{p, cluster, fixed, SharedTiles(unaligned)});
#endif
}

template <int kTileN, bool kHelped, bool kJoins>
cudaError_t LaunchTile(const AffineConvParams& p, const ConvConfig& config, const LaunchOptions& options) {
  return WithFinish<true>(AffineFinishOf(p), options.x_signed, [&]<bool kSigned, Finish kFinish>() {
    if constexpr (HasAffineInstance(kFinish) && kHelped <= MayHelp(kFinish, kSigned) &&
                  HasInstance(!kSigned && (kFinish == Finish::kFloatsFromZero || (kTileN == 64 && kJoins)))) {
      return LaunchTiled<ConvAffined<kTileN, kHelped, kSigned, kJoins, kFinish>>(
          p, config, options, (kHelped ? 2 : 1) * kWarpgroup);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace

cudaError_t LaunchAffineConv(const AffineConvParams& p, const ConvConfig& config,
                             const LaunchOptions& options) {
  if (p.stages < 1 || p.stages > kMaxAffineTiles || config.tile_m != kTileM) return cudaErrorInvalidValue;
  return std::visit([&](auto tile_n, auto helped,
                        auto joins) { return LaunchTile<tile_n, helped, joins>(p, config, options); },
                    OneOf<32, 64, 128>(config.tile_n), OneOf(config.producers), OneOf(p.joins));
}

}  // namespace lowbit::cuda
