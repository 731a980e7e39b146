// A line of every channel's codes and the 1x1 convolution behind it, on wgmma for Hopper (sm_90a): codes are
// replaced in shared memory, where the tensor memory accelerator has put them, by what the line makes of them,
// and multiplied from there.
//
//   tile of k   pixels | weights | gains, offsets   fetched all at once
//   codes       tile 0 | tile 1 | tile 2 | ...      rounded by a warpgroup for its 64 pixels
//   products             tile 0 | tile 1 | ...
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
// A warpgroup for every 64 rows; the first thread fetches.
template <int kTileM, int kTileN, bool kSigned, Finish kFinish>
struct Affined {
  static constexpr int kSums = kTileN / 2, kConsumers = kTileM * 2, kBytesA = kTileM * kRowBytes,
                       kBytesB = kTileN * kRowBytes, kLineBytes = 2 * kRowBytes * sizeof(float),
                       kBytes = kBytesA + kBytesB + kLineBytes;
  struct Static {
    BlockState<kTileN> state;
    alignas(8) uint64_t full[kMaxAffineTiles];
  };

  const AffineConvParams& p;
  const bool cluster;
  const CUtensorMap& map;
  const CodeReader& reader;
  Static& fixed;
  SharedTiles tiles;

  const int thread = static_cast<int>(threadIdx.x), group = thread / kWarpgroup;
  const Barriers full = {SharedAddress(fixed.full)};
  const TilePosition at = TilePosition::Of<kTileM, kTileN>(p);
  const int count = at.k_end - at.k_begin;
  const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 4;

  __device__ __forceinline__ void SetUp() {
    KeepInRegister(tiles.at);
    if (thread < count) {
      InitBarrier(full(thread), 1);
      FenceBarrierInit();
    }
    if (thread == 0) PrefetchMap(map);
    if (cluster) fixed.state.BeginCluster(kTileM);
  }

  __device__ __forceinline__ void Begin() {
    if (thread == 0) {
      for (int i = 0; i < count; ++i) {
        const uint32_t weights = tiles.at + i * kBytes + kBytesA;
        ArriveExpecting(full(i), kBytes);
        BulkCopy(weights, at.Weights(p, at.k_begin + i), kBytesB, full(i));
        BulkCopy(weights + kBytesB, p.lines + (at.k_begin + i) * 2 * kRowBytes, kLineBytes, full(i));
      }
    }
    __syncwarp();
    fixed.state.template FetchConstants<kConsumers>(p, at, thread);
    CommitCopies();
    WaitForPredecessors();
    if (thread == 0) {
      const PixelPlace first = FirstPixel(p, at.m0);
      for (int i = 0; i < count; ++i)
        PixelCopy(tiles.at + i * kBytes, map, (at.k_begin + i) * kRowBytes, first, 0, 0, full(i));
    }
    __syncwarp();
  }

  // Replaces the codes of the warpgroup's rows of a tile.
  __device__ __forceinline__ void RoundCodesOf(uint8_t* tile) const {
    constexpr int kRowStep = kWarpgroup / 8;
    const int own = thread % kWarpgroup, first_row = own / 8, chunk = own % 8 ^ first_row % 8;
    const float4* const lines = reinterpret_cast<const float4*>(tile + kBytesA + kBytesB) + chunk;
    float gain[16], offset[16];
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const float4 g = lines[four * 8], o = lines[(4 + four) * 8];
      gain[4 * four] = g.x, gain[4 * four + 1] = g.y, gain[4 * four + 2] = g.z, gain[4 * four + 3] = g.w;
      offset[4 * four] = o.x, offset[4 * four + 1] = o.y, offset[4 * four + 2] = o.z,
                    offset[4 * four + 3] = o.w;
    }
    uint8_t* const rows = tile + (group * 64 + first_row) * kRowBytes + own % 8 * 16;
#pragma unroll
    for (int i = 0; i < 64 / kRowStep; ++i) {
      uint8_t* const codes_at = rows + i * kRowStep * kRowBytes;
      Codes<16> codes = LoadCodes<16>(codes_at);
      const auto value = [&](int c) {
        return __fmaf_rn(gain[c], CodeValue(codes, c, reader), offset[c]);
      };
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float4 values = {value(4 * w), value(4 * w + 1), value(4 * w + 2), value(4 * w + 3)};
        codes.w[w] = UnsignedBytes(values) ^ SignFlip(kSigned);
      }
      StoreCodes(codes_at, codes);
    }
  }

  __device__ __forceinline__ void Multiply(int (&sums)[kSums]) const {
    BeginSums<kConsumers, kFinish>(fixed.state, column, sums);
    const uint32_t a = MatrixPart(tiles.at + group * 64 * kRowBytes), b = MatrixPart(tiles.at + kBytesA);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      WaitBarrier(full(i), 0);
      RoundCodesOf(tiles.data + i * kBytes);
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

template <int kTileM, int kTileN, bool kSigned, Finish kFinish>
__global__ void __launch_bounds__(kTileM * 2)
    ConvAffined(const __grid_constant__ AffineConvParams p, bool cluster,
                const __grid_constant__ CUtensorMap map, const __grid_constant__ CodeReader reader) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = Affined<kTileM, kTileN, kSigned, kFinish>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{p, cluster, map, reader, fixed, SharedTiles(unaligned)});
#endif
}

template <int kTileM, int kTileN>
cudaError_t LaunchTile(const AffineConvParams& p, const ConvConfig& config, const LaunchOptions& options) {
  CUtensorMap map;
  const cudaError_t error = EncodePixels(p.x, p.m, p, kTileM, &map);
  if (error != cudaSuccess) return error;
  const CodeReader reader = MakeReader(p.lines_signed, 0);
  const auto launch = [&]<bool kSigned, Finish kFinish>() {
    if constexpr (HasInstance(kFinish == Finish::kFloatsFromZero || kTileM * kTileN == 64 * 64)) {
      return LaunchTiled<ConvAffined<kTileM, kTileN, kSigned, kFinish>>(p, config, options, kTileM * 2, map,
                                                                        reader);
    } else {
      return cudaErrorInvalidValue;
    }
  };
  const auto of_any_input = [&]<Finish kFinish>() {
    return options.x_signed ? launch.template operator()<true, kFinish>()
                            : launch.template operator()<false, kFinish>();
  };
  switch (FinishOf(p.epilogue, p)) {
    case Finish::kThroughMemory:
      return of_any_input.template operator()<Finish::kThroughMemory>();
    case Finish::kIntegers:
      return of_any_input.template operator()<Finish::kIntegers>();
    case Finish::kFloatsFromZero:
      return options.x_signed ? cudaErrorInvalidValue
                              : launch.template operator()<false, Finish::kFloatsFromZero>();
    case Finish::kFloats:
      return options.x_signed ? cudaErrorInvalidValue
                              : launch.template operator()<false, Finish::kFloats>();
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t LaunchAffineConv(const AffineConvParams& p, const ConvConfig& config,
                             const LaunchOptions& options) {
  const auto is = [&](int m, int n) { return config.tile_m == m && config.tile_n == n; };
  if (p.stages < 1 || p.stages > kMaxAffineTiles) return cudaErrorInvalidValue;
  if (is(64, 32)) return LaunchTile<64, 32>(p, config, options);
  if (is(64, 64)) return LaunchTile<64, 64>(p, config, options);
  if (is(64, 128)) return LaunchTile<64, 128>(p, config, options);
  if (is(128, 128)) return LaunchTile<128, 128>(p, config, options);
  return cudaErrorInvalidValue;
}

}  // namespace lowbit::cuda
