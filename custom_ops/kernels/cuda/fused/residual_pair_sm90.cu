// Two convolutions of as many outputs, the codes of the first one the residuals of the second, on wgmma for
// Hopper (sm_90a): a bottleneck's last convolution and that of its shortcut. The tensor between them never
// leaves the block: a thread finishes the same four outputs of both products, and finds the first's codes in
// the shared memory where the second's will stand.
//
//   stages    x1 k0 | x1 k1 | x2 k0 | x2 k1 | x1 k0 of the next tile | ...   fetched by one thread
//   sums      product 1     | product 2     |
//   codes       round into staging area | add there, store
//
// A ring of stages, each a tile of pixels (and of weights, where these do not stay in shared memory), runs
// through the tiles of both products, and of the block's next tile, without a pause. Several blocks share a
// multiprocessor, so that one multiplies while others round.
#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/conv/pixel_boxes.cuh"
#include "kernels/cuda/device/wgmma_s8.cuh"
#include "kernels/cuda/fused/residual_pair.h"

namespace lowbit::cuda {
namespace {

constexpr int kGroup = 128;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A place in the ring of stages.
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Step(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Walks along the tiles of both products: which product, which of its tiles, which tap and channels that is.
struct ProductWalk {
  int product = 0, k = 0;
  TapWalk tap;

  __device__ __forceinline__ void Step(const ConvParams& first, const ConvParams& second) {
    const ConvParams& p = product == 0 ? first : second;
    if (++k == p.k_tiles) {
      *this = {1 - product};
    } else {
      tap.Step(p);
    }
  }
};
#endif

// Consumers first, a warpgroup for every 64 rows; then a warp whose first thread fetches.
template <int kTileM, int kTileN, bool kFirstSigned, bool kSecondSigned>
__global__ void __launch_bounds__(kTileM * 2 + 32)
    ConvPair(const __grid_constant__ ConvParams first, const __grid_constant__ ConvParams second,
             const __grid_constant__ CUtensorMap first_map, const __grid_constant__ CUtensorMap second_map,
             const __grid_constant__ CUtensorMap y_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kConsumers = kTileM * 2, kBytesA = kTileM * kRowBytes, kBytesB = kTileN * kRowBytes;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ BlockState<kTileN> states[2];
  __shared__ __align__(8) uint64_t barriers[2 * kMaxResidualPairStages + 1];

  const int thread = static_cast<int>(threadIdx.x);
  const bool keeps = second.keeps_weights;
  const int stages = second.stages, k_tiles = first.k_tiles + second.k_tiles;
  // Swizzled tiles start at multiples of 1024 bytes (SharedBytes has room for that).
  const uint32_t weights = (SharedAddress(unaligned) + 1023) & ~1023u;
  uint8_t* const shared = unaligned + (weights - SharedAddress(unaligned));
  const uint32_t ring = weights + (keeps ? k_tiles * kBytesB : 0);
  const int stage_bytes = kBytesA + (keeps ? 0 : kBytesB);
  uint32_t barriers_at = SharedAddress(barriers);
  KeepInRegister(barriers_at);
  const uint32_t weights_full = barriers_at + 2 * kMaxResidualPairStages * 8;
  const auto full = [&](int stage) { return barriers_at + stage * 8; };
  const auto empty = [&](int stage) { return barriers_at + (kMaxResidualPairStages + stage) * 8; };
  const TilePosition at = TilePosition::Of<kTileM, kTileN>(second);
  const int step = static_cast<int>(gridDim.x) * kTileM;

  if (thread < stages) {
    InitBarrier(full(thread), 1);
    InitBarrier(empty(thread), kConsumers / 32);
    if (thread == 0) InitBarrier(weights_full, 1);
    FenceBarrierInit();
  }
  __syncthreads();

  if (thread >= kConsumers) {
    if (thread > kConsumers) {
      WaitForPredecessors();
      return;
    }
    const auto load_weights = [&](const ProductWalk& walk, uint32_t target, uint32_t barrier) {
      BulkCopy(target, at.Weights(walk.product == 0 ? first : second, walk.k), kBytesB, barrier);
    };
    // Weights are this kernel's own: they may be fetched before the predecessor is done.
    const int tiles = (second.m - at.m0 + step - 1) / step, count = tiles * k_tiles,
              ahead = keeps ? 0 : min(count, stages);
    ProductWalk walk;
    if (keeps) {
      ArriveExpecting(weights_full, k_tiles * kBytesB);
      for (int i = 0; i < k_tiles; ++i, walk.Step(first, second))
        load_weights(walk, weights + i * kBytesB, weights_full);
    }
    for (int i = 0; i < ahead; ++i, walk.Step(first, second)) {
      ArriveExpecting(full(i), stage_bytes);
      load_weights(walk, ring + i * stage_bytes + kBytesA, full(i));
    }
    WaitForPredecessors();
    walk = {};
    RingPlace place;
    PixelPlace first_pixel = {}, second_pixel = {};
    int m = at.m0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const uint32_t target = ring + place.stage * stage_bytes, barrier = full(place.stage);
      if (walk.product == 0 && walk.k == 0) {
        first_pixel = FirstPixel(first, m);
        second_pixel = FirstPixel(second, m);
        m += step;
      }
      if (i >= ahead) {
        WaitBarrier(empty(place.stage), place.parity ^ 1);
        ArriveExpecting(barrier, stage_bytes);
        if (!keeps) load_weights(walk, target + kBytesA, barrier);
      }
      if (walk.product == 0) {
        PixelCopy(target, first_map, walk.tap.channel, first_pixel, walk.tap.dx, walk.tap.dy, barrier);
      } else {
        PixelCopy(target, second_map, walk.tap.channel, second_pixel, walk.tap.dx, walk.tap.dy, barrier);
      }
      place.Step(stages);
      walk.Step(first, second);
    }
    LetSuccessorsStart();
    return;
  }

  states[0].template FetchConstants<kConsumers>(first, at, thread);
  states[1].template FetchConstants<kConsumers>(second, at, thread);
  CommitCopies();
  WaitForPredecessors();
  WaitForCopies<0>();
  SyncThreads<kConsumers>();
  if (keeps) WaitBarrier(weights_full, 0);

  const int group = thread / kGroup, group_barrier = 2 + group;
  const int row = thread % kGroup / 32 * 16 + thread % 32 / 4, column = thread % 4 * 4;
  const int codes_at = second.staging_offset + group * 64 * kTileN;
  uint8_t* const rows = shared + codes_at + row * kTileN;
  const int swizzle = CodesSwizzle<kTileN>(row);
  const auto word_at = [&](int, int at_column) {
    return reinterpret_cast<unsigned*>(rows + (at_column ^ swizzle));
  };
  const bool stores = thread % kGroup == 0;

  RingPlace place;
  const auto release = [&](int stage) {
    if (thread % 32 == 0) Arrive(empty(stage));
  };
  const auto multiply = [&]<bool kSigned>(Wgmma<kTileN, kSigned>, const ConvParams& p, uint32_t kept,
                                          int (&sums)[kTileN / 2]) {
    using Product = Wgmma<kTileN, kSigned>;
    int previous = 0;
#pragma unroll 1
    for (int k = 0; k < p.k_tiles; ++k) {
      WaitBarrier(full(place.stage), place.parity);
      const uint32_t tile = ring + place.stage * stage_bytes;
      const uint64_t a = MatrixDescriptor(tile + group * 64 * kRowBytes),
                     b = MatrixDescriptor(keeps ? kept + k * kBytesB : tile + kBytesA);
      HoldRegisters(sums);
      WgmmaFence();
      Product::Multiply(sums, a, b);
      Product::Multiply(sums, a + 2, b + 2);
      if (k * kRowBytes + 64 < p.k) {  // channels past the last read 0
        Product::Multiply(sums, a + 4, b + 4);
        Product::Multiply(sums, a + 6, b + 6);
      }
      WgmmaCommit();
      if (k > 0) {
        WgmmaWait<1>();
        release(previous);
      }
      previous = place.stage;
      place.Step(stages);
    }
    WgmmaWait<0>();
    HoldRegisters(sums);
    release(previous);
  };
  const auto round = [&](bool adds, const EpilogueParams& e, const BlockState<kTileN>& state,
                         const int (&sums)[kTileN / 2]) {
    __builtin_assume(e.has_residual == adds);
    RequantizeFragments<Finish::kIntegers, true, 8 * kTileN / 4>(
        e, state, [&](const auto& f) { ForEachFour<kTileN>(sums, row, column, f); }, word_at);
  };

#pragma unroll 1
  for (int m = at.m0; m < second.m; m += step) {
    int sums[kTileN / 2];
    BeginWithBias(states[0], column, sums);
    multiply(Wgmma<kTileN, kFirstSigned>(), first, weights, sums);
    if (stores) WaitForStoresToRead<0>();  // the codes of the tile before
    SyncThreads<kGroup>(group_barrier);
    round(false, first.epilogue, states[0], sums);
    BeginWithBias(states[1], column, sums);
    multiply(Wgmma<kTileN, kSecondSigned>(), second, weights + first.k_tiles * kBytesB, sums);
    round(true, second.epilogue, states[1], sums);
    FenceAsyncProxy();
    SyncThreads<kGroup>(group_barrier);  // all codes are there
    if (stores) StoreCodes(y_map, at.n0, m + group * 64, weights + codes_at);
  }
  if (stores) WaitForStores();
#endif
}

template <int kTileM, int kTileN, bool kFirstSigned, bool kSecondSigned>
cudaError_t LaunchWith(const ConvParams& first, const ConvParams& second, const LaunchOptions& options) {
  constexpr auto kKernel = ConvPair<kTileM, kTileN, kFirstSigned, kSecondSigned>;
  cudaError_t error = PrepareKernel<kKernel>(options.device);
  CUtensorMap first_map, second_map, y_map;
  if (error == cudaSuccess) error = EncodePixels(first, kTileM, &first_map);
  if (error == cudaSuccess) error = EncodePixels(second, kTileM, &second_map);
  if (error == cudaSuccess) error = EncodeCodes<kTileN>(second, second.y, &y_map);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(second.persistent_blocks), static_cast<unsigned>(second.n_tiles));
  return options.queue.LaunchWith({static_cast<size_t>(second.shared_bytes), nullptr, 0}, kKernel, grid,
                                  dim3(kTileM * 2 + 32), first, second, first_map, second_map, y_map);
}

template <int kTileM, int kTileN>
cudaError_t LaunchTile(const ConvParams& first, bool first_signed, const ConvParams& second,
                       const LaunchOptions& options) {
  if (first_signed) {
    return options.x_signed ? LaunchWith<kTileM, kTileN, true, true>(first, second, options)
                            : LaunchWith<kTileM, kTileN, true, false>(first, second, options);
  }
  return options.x_signed ? LaunchWith<kTileM, kTileN, false, true>(first, second, options)
                          : LaunchWith<kTileM, kTileN, false, false>(first, second, options);
}

}  // namespace

cudaError_t LaunchResidualPair(const ConvParams& first, bool first_signed, const ConvParams& second,
                               const ConvConfig& config, const LaunchOptions& options) {
  if (second.stages < 1 || second.stages > kMaxResidualPairStages) return cudaErrorInvalidValue;
  const auto is = [&](int m, int n) { return config.tile_m == m && config.tile_n == n; };
  if (is(64, 32)) return LaunchTile<64, 32>(first, first_signed, second, options);
  if (is(64, 64)) return LaunchTile<64, 64>(first, first_signed, second, options);
  if (is(64, 128)) return LaunchTile<64, 128>(first, first_signed, second, options);
  if (is(128, 128)) return LaunchTile<128, 128>(first, first_signed, second, options);
  if (is(192, 128)) return LaunchTile<192, 128>(first, first_signed, second, options);
  return cudaErrorInvalidValue;
}

}  // namespace lowbit::cuda
