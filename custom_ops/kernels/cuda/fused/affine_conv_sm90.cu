// A line of every channel's codes and the 1x1 convolution behind it, on wgmma for Hopper (sm_90a): threads fetch
// codes, put what the lines make of them into shared memory, and multiply that. Where a Concat makes the codes, they
// are fetched from the tensors that it joins, its own lines come first, and the blocks of the first channels store
// what these make.
//
//   tile of k   weights | gains, offsets            fetched all at once, before the predecessors are done
//   codes       fetch 0 | fetch 1, round 0 | fetch 2, round 1 | ...   by a warpgroup for its 64 pixels
//   products                        tile 0 |           tile 1 | ...
//
// A thread keeps the lines of 16 channels in registers while it walks down the rows. Rounding takes longer than
// the products: for few pixels K is split over a cluster, of whose blocks each rounds a part; wide tiles round
// the codes for all channels once.
#include "kernels/cuda/conv/pixel_boxes.cuh"
#include "kernels/cuda/fused/affine_conv.h"
#include "kernels/cuda/nodes/codes.cuh"

namespace lowbit::cuda {
namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A warpgroup for every 64 rows; the first thread fetches weights and lines.
template <int kTileM, int kTileN, bool kSigned, bool kJoins, Finish kFinish>
struct Affined {
  static constexpr int kSums = kTileN / 2, kConsumers = kTileM * 2, kBytesA = kTileM * kRowBytes,
                       kBytesB = kTileN * kRowBytes, kLineBytes = 2 * kRowBytes * sizeof(float),
                       kBytes = kBytesA + kBytesB + kLineBytes;
  // A thread's chunks of a tile: 16 codes of rows that are kRowStep apart.
  static constexpr int kRowStep = kWarpgroup / 8, kRows = 64 / kRowStep;
  using Chunks16 = Codes<16>[kRows];
  struct Static {
    BlockState<kTileN> state;
    alignas(8) uint64_t full[kMaxAffineTiles];
  };

  const AffineConvParams& p;
  const bool cluster;
  Static& fixed;
  SharedTiles tiles;

  const int thread = static_cast<int>(threadIdx.x), group = thread / kWarpgroup, own = thread % kWarpgroup;
  const Barriers full = {SharedAddress(fixed.full)};
  const TilePosition at = TilePosition::Of<kTileM, kTileN>(p);
  const int count = at.k_end - at.k_begin;
  const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 4;
  // The first row of the thread's chunks, and which one of a row of channels they are.
  const int first_row = group * 64 + own / 8, chunk = own % 8 ^ own / 8 % 8;

  __device__ __forceinline__ void SetUp() {
    KeepInRegister(tiles.at);
    if (thread < count) {
      InitBarrier(full(thread), 1);
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
    fixed.state.template FetchConstants<kConsumers>(p, at, thread);
    CommitCopies();
    WaitForPredecessors();
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

  // The thread's codes of a tile. Rows past the last pixel repeat it: they are never stored.
  __device__ __forceinline__ void Fetch(int i, Chunks16& codes) const {
    const int channel = ChannelOf(i), part = PartOf(channel), pitch = p.parts[part].channels;
    const uint8_t* const x = p.parts[part].x + channel - p.parts[part].first;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int m = min(at.m0 + first_row + r * kRowStep, p.m - 1);
      codes[r] = channel < p.k ? LoadCodes<16>(x + m * pitch) : Codes<16>{};
    }
  }

  // Codes as a Concat has them, less the lowest one.
  __device__ __forceinline__ void Join(int part, Codes<16>& codes) const {
    const AffinePart& of = p.parts[part];
    const CodeReader reader = {of.flip, of.bias};
    const auto value = [&](int c) { return __fmaf_rn(of.gain, CodeValue(codes, c, reader), of.offset); };
#pragma unroll
    for (int w = 0; w < 4; ++w)
      codes.w[w] = UnsignedBytes({value(4 * w), value(4 * w + 1), value(4 * w + 2), value(4 * w + 3)});
  }

  // Puts what the lines make of the codes into the warpgroup's rows of a tile.
  __device__ __forceinline__ void Round(int i, Chunks16& codes) const {
    uint8_t* const tile = tiles.data + i * kBytes;
    const float4* const lines = reinterpret_cast<const float4*>(tile + kBytesA + kBytesB) + chunk;
    float gain[16], offset[16];
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const float4 g = lines[four * 8], o = lines[(4 + four) * 8];
      gain[4 * four] = g.x, gain[4 * four + 1] = g.y, gain[4 * four + 2] = g.z, gain[4 * four + 3] = g.w;
      offset[4 * four] = o.x, offset[4 * four + 1] = o.y;
      offset[4 * four + 2] = o.z, offset[4 * four + 3] = o.w;
    }
    const int channel = ChannelOf(i), part = PartOf(channel);
    const CodeReader reader = {0, p.made_bias};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Codes<16>& of_row = codes[r];
      const int in_tile = first_row + r * kRowStep;
      if constexpr (kJoins) {
        Join(part, of_row);
        if (at.n0 == 0 && at.m0 + in_tile < p.m && channel < p.k) {
          Codes<16> made = of_row;
#pragma unroll
          for (unsigned& word : made.w) word ^= p.made_flip;
          StoreCodes(p.made + (at.m0 + in_tile) * p.k + channel, made);
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
      StoreCodes(tile + in_tile * kRowBytes + own % 8 * 16, rounded);
    }
  }

  __device__ __forceinline__ void Multiply(int (&sums)[kSums]) const {
    Chunks16 codes;
    Fetch(0, codes);
    BeginSums<kConsumers, kFinish>(fixed.state, column, sums);
    const uint32_t a = MatrixPart(tiles.at + group * 64 * kRowBytes), b = MatrixPart(tiles.at + kBytesA);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      Chunks16 next;
      if (i + 1 < count) Fetch(i + 1, next);
      WaitBarrier(full(i), 0);
      Round(i, codes);
      FenceAsyncProxy();
      SyncThreads<kWarpgroup>(2 + group);  // all of its codes are there
      const uint32_t tile = i * (kBytes / 16);
      HoldRegisters(sums);
      WgmmaFence();
      MultiplyTile<Wgmma<kTileN, kSigned>>(
          {SlabDescriptor<kRowBytes>(a + tile), SlabDescriptor<kRowBytes>(b + tile),
           (at.k_begin + i) * kRowBytes + 64 < p.k},
          sums);
      WgmmaCommit();
#pragma unroll
      for (int r = 0; r < kRows; ++r) codes[r] = next[r];
    }
    LetSuccessorsStart();
    WgmmaWait<0>();
    HoldRegisters(sums);
  }

  __device__ __forceinline__ void Finish(const int (&sums)[kSums]) const {
    SyncThreads<kConsumers>();
    FinishTile<kTileM, kTileN, kConsumers, true, kFinish>(
        p, at, tiles.data, fixed.state, cluster,
        [&](const auto& f) { ForEachFour<kTileN>(sums, row, column, f); });
  }
};
#endif

template <int kTileM, int kTileN, bool kSigned, bool kJoins, Finish kFinish>
__global__ void __launch_bounds__(kTileM * 2)
    ConvAffined(const __grid_constant__ AffineConvParams p, bool cluster) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = Affined<kTileM, kTileN, kSigned, kJoins, kFinish>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{p, cluster, fixed, SharedTiles(unaligned)});
#endif
}

template <int kTileM, int kTileN, bool kJoins>
cudaError_t LaunchTile(const AffineConvParams& p, const ConvConfig& config, const LaunchOptions& options) {
  return WithFinish<true>(FinishOf(p.epilogue, p), options.x_signed, [&]<bool kSigned, Finish kFinish>() {
    if constexpr (HasAffineInstance(kFinish) &&
                  HasInstance(kFinish == Finish::kFloatsFromZero || kTileM * kTileN == 64 * 64)) {
      return LaunchTiled<ConvAffined<kTileM, kTileN, kSigned, kJoins, kFinish>>(p, config, options,
                                                                                kTileM * 2);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace

cudaError_t LaunchAffineConv(const AffineConvParams& p, const ConvConfig& config,
                             const LaunchOptions& options) {
  if (p.stages < 1 || p.stages > kMaxAffineTiles) return cudaErrorInvalidValue;
  return std::visit(
      [&](auto joins) {
        const auto is = [&](int m, int n) { return config.tile_m == m && config.tile_n == n; };
        if (is(64, 32)) return LaunchTile<64, 32, joins>(p, config, options);
        if (is(64, 64)) return LaunchTile<64, 64, joins>(p, config, options);
        if (is(64, 128)) return LaunchTile<64, 128, joins>(p, config, options);
        return cudaErrorInvalidValue;
      },
      OneOf(p.joins));
}

}  // namespace lowbit::cuda
