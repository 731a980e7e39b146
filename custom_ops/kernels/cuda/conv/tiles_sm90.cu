// Implicit-precomp GEMM on wgmma, for Hopper (sm_90a): both operands from shared memory. Activations come by
// cp.async (a gather) from a warpgroup of producers, or as one box that the tensor memory accelerator fetches
// for a single thread, where it can; a weight tile by one bulk copy, since it is packed in the very order of
// shared memory. A consuming warpgroup sums 64 x kTileN outputs. Each stage has an mbarrier that counts what
// arrives in it and one that counts the warps that are done with it.
#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/conv/pixel_boxes.cuh"
#include "kernels/cuda/conv/tiles.h"
#include "kernels/cuda/device/wgmma_s8.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kMaxStages = 8;

template <Padding kPadding>
struct PaddingTag {
  static constexpr Padding kValue = kPadding;
};

// How many threads fetch: a warpgroup gathers, or one thread of a warp fetches boxes.
constexpr int kGatherers = 128, kBoxFetchers = 32;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Consumers first: kTileM * 2 threads, a warpgroup for every 64 rows. Then the producers; without any, all
// tiles fit into the stages and the consumers fetch them before they start. `map`: for kBoxFetchers.
template <int kTileM, int kTileN, bool kSigned, int kProducers, Finish kFinish>
__device__ __forceinline__ void SumTiles(const ConvParams& p, bool cluster, const CUtensorMap* map) {
  constexpr bool kBoxes = kProducers == kBoxFetchers;
  constexpr int kConsumers = kTileM * 2, kLoaders = kProducers == kGatherers ? kGatherers : kConsumers;
  constexpr int kBytesA = kTileM * kRowBytes, kBytesB = kTileN * kRowBytes, kBytes = kBytesA + kBytesB;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ BlockState<kTileN> state;
  __shared__ __align__(8) uint64_t barriers[2 * kMaxStages];

  const int thread = static_cast<int>(threadIdx.x);
  // Swizzled tiles start at multiples of 1024 bytes (SharedBytes has room for that).
  uint32_t tiles = (SharedAddress(unaligned) + 1023) & ~1023u;
  uint8_t* const shared = unaligned + (tiles - SharedAddress(unaligned));
  KeepInRegister(tiles);
  uint32_t barriers_at = SharedAddress(barriers);
  KeepInRegister(barriers_at);
  const auto full = [&](int stage) { return barriers_at + stage * 8; };
  const auto empty = [&](int stage) { return barriers_at + (kMaxStages + stage) * 8; };

  const int stages = p.stages;
  if (thread < stages) {
    // A gatherer's copies arrive by themselves, its stores (of fill) with an arrival of their own; the
    // weights bring one more, which is that of a box too. A stage is free when every consuming warp of every
    // block it is filled for says so.
    const int arrivals = kBoxes ? 1 : (PaddingOf(p) == Padding::kFill ? 2 : 1) * kLoaders + 1;
    InitBarrier(full(thread), arrivals);
    InitBarrier(empty(thread), kConsumers / 32 * p.multicast);
    FenceBarrierInit();
  }
  if (cluster) state.BeginCluster(kTileM);
  __syncthreads();
  if (p.multicast > 1) {  // nobody copies into a block whose barriers are not there
    ClusterArrive();
    ClusterWait();
  }
  const TilePosition at = TilePosition::Of<kTileM, kTileN>(p);
  const int count = at.k_end - at.k_begin;

  // The weights of a tile, by one thread, which announces a box of pixels too. Blocks of a cluster with
  // multicast have the same: each fetches its share for all. A block that is sent a copy or told of a free
  // stage waits for it, hence may leave on its own.
  const auto load_weights = [&](int i, int stage) {
    const uint32_t target = tiles + stage * kBytes + kBytesA;
    const uint8_t* const source = at.Weights(p, at.k_begin + i);
    ArriveExpecting(full(stage), kBoxes ? kBytes : kBytesB);
    if (kBoxes || p.multicast == 1) {
      BulkCopy(target, source, kBytesB, full(stage));
    } else {
      const int share = kBytesB / p.multicast, rank = static_cast<int>(blockIdx.x) % p.multicast;
      BulkCopyToBlocks(target + rank * share, source + rank * share, share, full(stage),
                       (1u << p.multicast) - 1);
    }
  };
  const auto load = [&](int loader) {
    // The first weights are this kernel's own: they may be fetched before the predecessor is done.
    const int first = min(count, stages);
    if (loader == 0) {
      for (int i = 0; i < first; ++i) load_weights(i, i);
    }
    ActivationLoader<kTileM, kLoaders, 16> activations(p, loader, at.m0, at.group, at.k_begin);
    WaitForPredecessors();
    const auto load_all = [&](auto padding) {
      int stage = 0;
      uint32_t parity = 0;
      for (int i = 0; i < count; ++i) {
        if (i >= first) {
          WaitBarrier(empty(stage), parity);
          if (loader == 0) load_weights(i, stage);
        }
        activations.template Load<decltype(padding)::kValue>(tiles + stage * kBytes);
        if constexpr (decltype(padding)::kValue == Padding::kFill) {
          FenceAsyncProxy();
          Arrive(full(stage));
        }
        ArriveAfterCopies(full(stage));
        if (++stage == stages) {
          stage = 0;
          parity ^= i >= first ? 1 : 0;
        }
      }
    };
    switch (PaddingOf(p)) {
      case Padding::kNone:
        return load_all(PaddingTag<Padding::kNone>());
      case Padding::kZero:
        return load_all(PaddingTag<Padding::kZero>());
      case Padding::kFill:
        return load_all(PaddingTag<Padding::kFill>());
    }
  };
  const auto fetch_constants = [&] {
    state.template FetchConstants<kConsumers>(p, at, thread);
    CommitCopies();
  };
  if constexpr (kBoxes) {
    const auto load_boxes = [&] {
      const int first = min(count, stages);
      for (int i = 0; i < first; ++i) load_weights(i, i);
      const PixelPlace place = FirstPixel(p, at.m0);
      TapWalk walk(p, at.k_begin);
      WaitForPredecessors();
      int stage = 0;
      uint32_t parity = 0;
      for (int i = 0; i < count; ++i) {
        if (i >= first) {
          WaitBarrier(empty(stage), parity);
          load_weights(i, stage);
        }
        PixelCopy(tiles + stage * kBytes, *map, walk.channel, place, walk.dx, walk.dy, full(stage));
        walk.Step(p);
        if (++stage == stages) {
          stage = 0;
          parity ^= i >= first ? 1 : 0;
        }
      }
    };
    if (thread >= kConsumers) {
      if (thread == kConsumers) load_boxes();
      WaitForPredecessors();
      LetSuccessorsStart();
      return;
    }
    fetch_constants();
  } else if constexpr (kProducers > 0) {
    if (thread >= kConsumers) {
      load(thread - kConsumers);
      LetSuccessorsStart();
      return;
    }
    fetch_constants();
  } else {
    fetch_constants();
    load(thread);
  }

  WaitForPredecessors();
  FetchResiduals<kTileM, kTileN, kConsumers>(p, at, shared, thread, PixelsInOrder{at.m0, p.m});

  const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 4;
  int sums[kTileN / 2];
  BeginSums<kConsumers, kFinish>(p, state, column, sums);
  HoldRegisters(sums);
  int stage = 0, previous = 0;
  uint32_t parity = 0;
  // This warp is done with the stage.
  const auto release = [&](int freed) {
    if (p.multicast == 1) {
      if (thread % 32 == 0) Arrive(empty(freed));
    } else if (thread % 32 < p.multicast) {
      ArriveRemotely(ClusterAddress(empty(freed), thread % 32));
    }
  };
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    WaitBarrier(full(stage), parity);
    if (!kBoxes) FenceAsyncProxy();  // cp.async wrote through the generic proxy, wgmma reads the async one
    const uint32_t tile = tiles + stage * kBytes;
    const uint64_t a = MatrixDescriptor(tile + thread / 128 * 64 * kRowBytes);
    const uint64_t b = MatrixDescriptor(tile + kBytesA);
    HoldRegisters(sums);
    WgmmaFence();
    // Columns past k hold whatever lay in shared memory: their weights are 0.
#pragma unroll
    for (int step = 0; step < 4; ++step) Wgmma<kTileN, kSigned>::Multiply(sums, a + 2 * step, b + 2 * step);
    WgmmaCommit();
    WgmmaWait<1>();
    // Only a stage that will be filled again: nobody waits for the others.
    if (i > 0 && i - 1 + stages < count) release(previous);
    previous = stage;
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  LetSuccessorsStart();
  WgmmaWait<0>();
  HoldRegisters(sums);
  CommitCopies();
  WaitForCopies<0>();  // the constants, the residuals
  SyncThreads<kConsumers>();

  FinishTile<kTileM, kTileN, kConsumers, true, kFinish>(
      p, at, shared, state, cluster, [&](const auto& f) { ForEachFour<kTileN>(sums, row, column, f); });
}
#endif

template <int kTileM, int kTileN, bool kSigned, int kProducers>
__global__ void __launch_bounds__(kTileM * 2 + kProducers)
    ConvWgmma(const __grid_constant__ ConvParams p, bool cluster) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  SumTiles<kTileM, kTileN, kSigned, kProducers, Finish::kAny>(p, cluster, nullptr);
#endif
}

template <int kTileM, int kTileN, bool kSigned, Finish kFinish>
__global__ void __launch_bounds__(kTileM * 2 + kBoxFetchers)
    ConvBoxes(const __grid_constant__ ConvParams p, bool cluster, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (threadIdx.x == 0) PrefetchMap(map);
  SumTiles<kTileM, kTileN, kSigned, kBoxFetchers, kFinish>(p, cluster, &map);
#endif
}

template <int kTileM, int kTileN>
cudaError_t LaunchBoxes(const ConvParams& p, const ConvConfig& config, const LaunchOptions& options) {
  constexpr int kThreads = kTileM * 2 + kBoxFetchers;
  CUtensorMap map;
  const cudaError_t error = EncodePixels(p, kTileM, &map);
  if (error != cudaSuccess) return error;
  return WithFinish<true>(FinishOf(p), options.x_signed, [&]<bool kSigned, Finish kFinish>() {
    return LaunchTiled<ConvBoxes<kTileM, kTileN, kSigned, kFinish>>(p, config, options, kThreads, map);
  });
}

template <int kTileM, int kTileN, int kProducers>
cudaError_t LaunchWith(const ConvParams& p, const ConvConfig& config, const LaunchOptions& options) {
  constexpr int kThreads = kTileM * 2 + kProducers;
  return options.x_signed
             ? LaunchTiled<ConvWgmma<kTileM, kTileN, true, kProducers>>(p, config, options, kThreads)
             : LaunchTiled<ConvWgmma<kTileM, kTileN, false, kProducers>>(p, config, options, kThreads);
}

template <int kTileM, int kTileN>
cudaError_t LaunchTile(const ConvParams& p, const ConvConfig& config, const LaunchOptions& options) {
  if constexpr (kTileN <= kMostBoxColumns) {
    if (config.boxes) return LaunchBoxes<kTileM, kTileN>(p, config, options);
  }
  return config.producers ? LaunchWith<kTileM, kTileN, kGatherers>(p, config, options)
                          : LaunchWith<kTileM, kTileN, 0>(p, config, options);
}

}  // namespace

cudaError_t LaunchWgmma(const ConvParams& p, const ConvConfig& config, const LaunchOptions& options) {
  const auto is = [&](int m, int n) { return config.tile_m == m && config.tile_n == n; };
  if (p.stages < 1 || p.stages > kMaxStages) return cudaErrorInvalidValue;
  if (is(64, 32)) return LaunchTile<64, 32>(p, config, options);
  if (is(64, 64)) return LaunchTile<64, 64>(p, config, options);
  if (is(64, 128)) return LaunchTile<64, 128>(p, config, options);
  if (is(128, 64)) return LaunchTile<128, 64>(p, config, options);
  if (is(128, 128)) return LaunchTile<128, 128>(p, config, options);
  if (is(128, 256)) return LaunchTile<128, 256>(p, config, options);
  return cudaErrorInvalidValue;
}

}  // namespace lowbit::cuda
