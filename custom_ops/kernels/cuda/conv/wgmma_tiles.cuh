// What the tiles on wgmma share (tiles_sm90.cu): fetching, multiplying and finishing one. The kernels that gather and those
// that fetch boxes are a file each, as their instances take minutes to compile.
#pragma once

#include "kernels/cuda/conv/pixel_boxes.cuh"
#include "kernels/cuda/conv/tiles.h"

namespace lowbit::cuda {

// How many threads fetch: a warpgroup gathers, or one thread of a warp fetches boxes.
inline constexpr int kGatherers = 128, kBoxFetchers = 32;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Consumers first: kTileM * 2 threads, a warpgroup for every 64 rows. Then the producers; without any, all
// tiles fit into the stages and the consumers fetch them before they start. `map`: for kBoxFetchers.
template <int kTileM, int kTileN, bool kSigned, int kProducers, Finish kFinish>
struct Tiles {
  static constexpr bool kBoxes = kProducers == kBoxFetchers;
  static constexpr int kSums = kTileN / 2, kConsumers = kTileM * 2,
                       kLoaders = kProducers == kGatherers ? kGatherers : kConsumers;
  static constexpr int kBytesA = kTileM * kRowBytes, kBytesB = kTileN * kRowBytes, kBytes = kBytesA + kBytesB;
  using Params = std::conditional_t<kBoxes, BoxTileParams, GatherParams>;
  using StageRing = Ring<kMaxTileStages>;
  struct CodeSums : ZeroPoints<kTileN> {
    int of_row[kTileM];
  };
  struct Static {
    BlockState<kTileN> state;
    std::conditional_t<kHasZeroPoints<kFinish>, CodeSums, NoZeroPoints> codes;
    alignas(8) uint64_t barriers[StageRing::kBarriers];
  };

  const Params& p;
  const bool cluster;
  const CUtensorMap* map;
  Static& fixed;
  SharedTiles tiles;  // stages: pixels, weights

  const int thread = static_cast<int>(threadIdx.x);
  StageRing ring = {SharedAddress(fixed.barriers), p.stages};
  const TilePosition at = TilePosition::Of<kTileM, kTileN>(p);
  const int count = at.k_end - at.k_begin;
  const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 4;

  __device__ __forceinline__ void SetUp() {
    KeepInRegister(tiles.at);
    KeepInRegister(ring.barriers);
    if (thread < ring.stages) {
      // A gatherer's copies arrive by themselves, its stores (of fill) with an arrival of their own; the
      // weights bring one more, which is that of a box too. A stage is free when every consuming warp says
      // so.
      int arrivals = 1;
      if constexpr (!kBoxes) arrivals += (PaddingOf(p) == Padding::kFill ? 2 : 1) * kLoaders;
      ring.MakeBarriers(thread, arrivals, kConsumers / 32 * Sharing());
      FenceBarrierInit();
    }
    if (Sharing() > 1) {  // nobody copies into a block whose barriers are not there
      __syncthreads();
      ClusterArrive();
      ClusterWait();
    }
    if (cluster) fixed.state.BeginCluster(kTileM);
  }

  // How many blocks of a cluster have the same pixels, of which each fetches its share for all of them. A block that is
  // sent a copy, or told of a free stage, waits for it: each may leave on its own.
  __device__ __forceinline__ int Sharing() const {
    if constexpr (kBoxes) {
      return p.sharing;
    } else {
      return 1;
    }
  }

  // The weights of a tile, by one thread, which announces a box of pixels too.
  __device__ __forceinline__ void FetchWeights(int i, int stage) const {
    ArriveExpecting(ring.full(stage), kBoxes ? kBytes : kBytesB);
    BulkCopy(tiles.at + stage * kBytes + kBytesA, at.Weights(p, at.k_begin + i), kBytesB, ring.full(stage));
  }
  // The first weights may be fetched before the predecessor is done.
  __device__ __forceinline__ void FetchFirstWeights() const {
    for (int i = 0; i < min(count, ring.stages); ++i) FetchWeights(i, i);
  }

  __device__ __forceinline__ void FetchBoxes() const {
    FetchFirstWeights();
    const int share = p.sharing == 1 ? kTileM : kTileM / 2,
              rank = static_cast<int>(blockIdx.y) & (p.sharing - 1);  // no division before the first copy
    // A box begins inside; what lies past the last pixel is never stored.
    const PixelPlace place = FirstPixel(p, min(at.m0 + rank * share, p.m - 1));
    const uint32_t boxes = tiles.at + rank * share * kRowBytes;
    TapWalk walk(p, at.k_begin);
    WaitForPredecessors();
    ring.Fill(count, [&](int i, int stage) {
      if (i >= ring.stages) FetchWeights(i, stage);
      const uint32_t target = boxes + stage * kBytes, full = ring.full(stage);
      if (p.sharing == 1) {
        PixelCopy(target, *map, walk.channel, place, walk.dx, walk.dy, full);
      } else {
        WindowCopyToBlocks(target, *map, walk.channel, place.w, place.h, place.n, walk.dx, walk.dy, full,
                           (1u << p.sharing) - 1);
      }
      walk.Step(p);
    });
  }

  __device__ __forceinline__ void Gather(int loader) const {
    if (loader == 0) FetchFirstWeights();
    ActivationLoader<kTileM, kLoaders, 16> activations(p, loader, at.m0, at.group, at.k_begin);
    WaitForPredecessors();
    WithPadding(p, [&]<Padding kPadding>() {
      ring.Fill(count, [&](int i, int stage) {
        if (i >= ring.stages && loader == 0) FetchWeights(i, stage);
        activations.template Load<kPadding>(tiles.at + stage * kBytes);
        if constexpr (kPadding == Padding::kFill) {
          FenceAsyncProxy();
          Arrive(ring.full(stage));
        }
        ArriveAfterCopies(ring.full(stage));
      });
    });
  }

  __device__ __forceinline__ bool Loads() const { return kProducers > 0 && thread >= kConsumers; }
  __device__ __forceinline__ void Load() const {
    if constexpr (kBoxes) {
      if (thread == kConsumers) FetchBoxes();
      WaitForPredecessors();
    } else {
      Gather(thread - kConsumers);
    }
    LetSuccessorsStart();
  }

  __device__ __forceinline__ void Begin() {
    fixed.state.template FetchConstants<kConsumers>(p, at, thread);
    if constexpr (kHasZeroPoints<kFinish>) fixed.codes.template Fetch<kConsumers>(p, at, thread);
    CommitCopies();
    if constexpr (kProducers == 0) Gather(thread);
    WaitForPredecessors();
    if constexpr (!kLeavesRegisters<kFinish>)
      FetchResiduals<kTileM, kTileN, kConsumers>(p, at, tiles.data, thread, PixelsInOrder{at.m0, p.m});
  }

  // The sum of half of the codes of a row of a tile of pixels, each half of which is a thread's. Neighbouring
  // rows begin with another chunk each, so that no two of the threads that read together meet in a bank.
  // `left`: bytes along K from the tile on.
  __device__ __forceinline__ int HalfOfRow(const uint8_t* tile, int left) const {
    constexpr int kChunks = kRowBytes / 16 / 2;
    const int own = thread / 2, half = thread % 2 * kChunks;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = half + (i + own) % kChunks;  // as it lies; the swizzle tells which one it is
      if ((chunk ^ own % 8) * 16 >= left) continue;
      const uint4 codes = *reinterpret_cast<const uint4*>(tile + own * kRowBytes + chunk * 16);
      sum = AddCodes<kSigned>(codes.y, AddCodes<kSigned>(codes.x, sum));
      sum = AddCodes<kSigned>(codes.w, AddCodes<kSigned>(codes.z, sum));
    }
    return sum;
  }

  __device__ __forceinline__ void Multiply(int (&sums)[kSums]) const {
    BeginSums<kConsumers, kFinish>(fixed.state, column, sums);
    HoldRegisters(sums);
    const uint32_t a = MatrixPart(tiles.at + thread / 128 * 64 * kRowBytes),
                   b = MatrixPart(tiles.at + kBytesA);
    RingPlace place;
    int codes = 0;
    ring.template Drain<Wgmma<kTileN, kSigned>, !kBoxes>(
        place, count, sums,
        [&](int i, int stage) -> Operands {
          if constexpr (kHasZeroPoints<kFinish>) {
            WaitBarrier(ring.full(stage), place.parity);
            codes += HalfOfRow(tiles.data + stage * kBytes, p.k - (at.k_begin + i) * kRowBytes);
          }
          // Columns past k hold whatever lay in shared memory: their weights are 0.
          const uint32_t tile = stage * (kBytes / 16);
          return {SlabDescriptor<kRowBytes>(a + tile), SlabDescriptor<kRowBytes>(b + tile)};
        },
        [&](int i, int stage) {
          // Only a stage that will be filled again: nobody waits for the others.
          if (i + ring.stages >= count) return;
          if (Sharing() == 1) {
            if (thread % 32 == 0) Arrive(ring.empty(stage));
          } else if (thread % 32 < Sharing()) {
            ArriveRemotely(ClusterAddress(ring.empty(stage), thread % 32));
          }
        });
    LetSuccessorsStart();
    WgmmaWait<0>();
    HoldRegisters(sums);
    if constexpr (kHasZeroPoints<kFinish>) {
      codes += __shfl_xor_sync(~0u, codes, 1);
      if (thread % 2 == 0) fixed.codes.of_row[thread / 2] = codes;
      SyncThreads<kConsumers>();
      const int* const of_row = fixed.codes.of_row + row;
      fixed.codes.template TakeAway<kTileN>(column, of_row[0], of_row[8], sums);
    }
    if constexpr (kBoxes && kMayHaveBorders<kFinish>) {
      if (at.split == 0) AddBorders<kTileN>(p.epilogue, at.n0 + column, row, BorderPixels{p, at.m0}, sums);
    }
  }

  __device__ __forceinline__ void Finish(const int (&sums)[kSums]) const {
    CommitCopies();
    WaitForCopies<0>();  // the constants, the residuals
    SyncThreads<kConsumers>();
    FinishTile<kTileM, kTileN, kConsumers, true, kFinish>(
        p, at, tiles.data, fixed.state, cluster,
        [&](const auto& f) { ForEachFour<kTileN>(sums, row, column, f); });
  }
};
#endif

}  // namespace lowbit::cuda
