// Implicit-precomp GEMM on mma.sync: sm_80 and later with m16n8k32 and cp.async stages, sm_75 with m8n8k16
// and plain copies. A warp sums kTileM / kWarpsM x kTileN / kWarpsN outputs.
#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/conv/tiles.h"
#include "kernels/cuda/device/mma_s8.cuh"

namespace lowbit::cuda {
namespace {

template <int kTileM, int kTileN, int kWarpsM, int kWarpsN, int kStages, bool kSigned, int kVectorBytes,
          Finish kFinish>
__global__ void __launch_bounds__(kWarpsM * kWarpsN * 32)
    ConvMma(const __grid_constant__ GatherParams p, bool cluster) {
  constexpr int kThreads = kWarpsM * kWarpsN * 32;
  constexpr int kWarpM = kTileM / kWarpsM, kWarpN = kTileN / kWarpsN;
  constexpr int kBlocksM = kWarpM / 16, kBlocksN = kWarpN / 8;
  constexpr int kBytesA = kTileM * kRowBytes, kBytesB = kTileN * kRowBytes;
  static_assert(kBlocksN % 2 == 0 && kBytesB % (kThreads * 16) == 0 && kThreads >= kTileN);
  LOWBIT_DYNAMIC_SHARED(shared, 128);
  __shared__ BlockState<kTileN> state;
  __shared__ std::conditional_t<kHasZeroPoints<kFinish>, ZeroPoints<kTileN>, NoZeroPoints> zeros;

  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const TilePosition at = TilePosition::Of<kTileM, kTileN>(p);
  const uint32_t tiles = SharedAddress(shared);
  ActivationLoader<kTileM, kThreads, kVectorBytes> activations(p, thread, at.m0, at.group, at.k_begin);
  if (cluster) state.BeginCluster(kTileM);
  state.template FetchConstants<kThreads>(p, at, thread);
  if constexpr (kHasZeroPoints<kFinish>) zeros.template Fetch<kThreads>(p, at, thread);

  const auto load_weights = [&](int k_tile, int stage) {
    const uint8_t* source = at.Weights(p, k_tile) + thread * 16;
    const uint32_t target = tiles + stage * (kBytesA + kBytesB) + kBytesA + thread * 16;
#pragma unroll
    for (int i = 0; i < kBytesB; i += kThreads * 16) CopyAsync<16>(target + i, source + i);
  };

  // The weights are this kernel's own: they may be fetched before the predecessor is done. They count to the
  // first group of copies.
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (at.k_begin + s < at.k_end) load_weights(at.k_begin + s, s);
  }
  WaitForPredecessors();
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (at.k_begin + s < at.k_end) activations.Load(tiles + s * (kBytesA + kBytesB));
    CommitCopies();
  }

  // They count with the first tile of the loop below.
  FetchResiduals<kTileM, kTileN, kThreads>(p, at, shared, thread, PixelsInOrder{at.m0, p.m});

  int c[kBlocksM][kBlocksN][4] = {};
  int codes[kBlocksM][2] = {};  // summed, of the columns that this thread has of two rows of a fragment
  const int row_a = warp / kWarpsN * kWarpM + lane % 16,
            row_b = warp % kWarpsN * kWarpN + lane / 16 * 8 + lane % 8;
  const int half_a = lane / 16, half_b = lane / 8 % 2;  // which 16 of the 32 bytes of k this lane addresses
  int stage = 0;
  for (int k_tile = at.k_begin; k_tile < at.k_end; ++k_tile) {
    WaitForCopies<kStages - 2>();
    __syncthreads();
    const int next = k_tile + kStages - 1;
    if (next < at.k_end) {
      const int target =
          stage == 0 ? kStages - 1 : stage - 1;  // read in the last iteration, free since the barrier
      load_weights(next, target);
      activations.Load(tiles + target * (kBytesA + kBytesB));
    }
    CommitCopies();
    const uint32_t tile_a = tiles + stage * (kBytesA + kBytesB), tile_b = tile_a + kBytesA;
    const int steps = min(4, (p.k - k_tile * kRowBytes + 31) / 32);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (step >= steps) break;
      unsigned a[kBlocksM][4], b[kBlocksN / 2][4];
#pragma unroll
      for (int i = 0; i < kBlocksM; ++i) {
        const int row = row_a + i * 16;
        LoadMatrices(tile_a + row * kRowBytes + (((step * 2 + half_a) ^ (row % 8)) << 4), a[i]);
      }
#pragma unroll
      for (int j = 0; j < kBlocksN / 2; ++j) {
        const int row = row_b + j * 16;
        LoadMatrices(tile_b + row * kRowBytes + (((step * 2 + half_b) ^ (row % 8)) << 4), b[j]);
      }
      if constexpr (kHasZeroPoints<kFinish>) {
        const int left = p.k - k_tile * kRowBytes - step * 32 - lane % 4 * 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // past all of k lies whatever lay there
          if (half * 16 >= left) continue;
#pragma unroll
          for (int i = 0; i < kBlocksM; ++i) {
            codes[i][0] = AddCodes<kSigned>(a[i][half * 2], codes[i][0]);
            codes[i][1] = AddCodes<kSigned>(a[i][half * 2 + 1], codes[i][1]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) {
          Multiply<kSigned>(c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  LetSuccessorsStart();
  WaitForCopies<0>();
  __syncthreads();

  const int out_row = warp / kWarpsN * kWarpM + lane / 4, out_column = warp % kWarpsN * kWarpN + lane % 4 * 4;
  if constexpr (kHasZeroPoints<kFinish>) {
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int& sum : codes[i]) {
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
      }
      zeros.template TakeAway<kWarpN>(out_column, codes[i][0], codes[i][1], c[i][0]);
    }
  }
  if (kMayHaveBorders<kFinish> && at.split == 0) {
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i)
      AddBorders<kWarpN>(p.epilogue, at.n0 + out_column, out_row + i * 16, BorderPixels{p, at.m0}, c[i][0]);
  }
  FinishTile<kTileM, kTileN, kThreads, false, kFinish>(p, at, shared, state, cluster, [&](const auto& f) {
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < kBlocksN; j += 2) {
        const auto &left = c[i][j], &right = c[i][j + 1];
        f(out_row + i * 16, out_column + j * 8, make_int4(left[0], left[1], right[0], right[1]),
          make_int4(left[2], left[3], right[2], right[3]));
      }
    }
  });
}

template <int kTileM, int kTileN, int kWarpsM, int kWarpsN>
cudaError_t LaunchTile(const GatherParams& p, const ConvConfig& config, bool vector16,
                       const LaunchOptions& options) {
  constexpr int kStages = 3, kThreads = kWarpsM * kWarpsN * 32;
  const auto launch = [&](auto vector) {
    return WithGatheredFinish<false>(p, options.x_signed, [&]<bool kSigned, Finish kFinish>() {
      if constexpr (HasInstance(IsSampled<kSigned, kFinish>(vector == 16 && kTileM == 64 && kTileN == 64))) {
        return LaunchTiled<ConvMma<kTileM, kTileN, kWarpsM, kWarpsN, kStages, kSigned, vector, kFinish>>(
            p, config, options, kThreads);
      } else {
        return cudaErrorInvalidValue;
      }
    });
  };
  if constexpr (kTileM == 64 && kTileN == 64) {
    return std::visit(launch, OneOf<16, 4>(vector16 ? 16 : 4));
  } else {  // of few channels the gather dominates, one tile is enough
    return vector16 ? launch(std::integral_constant<int, 16>()) : cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t LaunchMma(const GatherParams& p, const ConvConfig& config, bool vector16,
                      const LaunchOptions& options) {
  const auto is = [&](int m, int n) { return config.tile_m == m && config.tile_n == n; };
  if (is(32, 64)) return LaunchTile<32, 64, 2, 2>(p, config, vector16, options);
  if (is(64, 32)) return LaunchTile<64, 32, 4, 1>(p, config, vector16, options);
  if (is(64, 64)) return LaunchTile<64, 64, 2, 2>(p, config, vector16, options);
  if (is(128, 64)) return LaunchTile<128, 64, 4, 2>(p, config, vector16, options);
  if (is(128, 128)) return LaunchTile<128, 128, 2, 4>(p, config, vector16, options);
  return cudaErrorInvalidValue;
}

}  // namespace lowbit::cuda
