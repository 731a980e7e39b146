// What kernels share that keep their channels' weights in shared memory and beside them patches of the input,
// fetched row by row by the tensor memory accelerator.
#pragma once

#include "kernels/cuda/conv/halo_places.cuh"

namespace lowbit::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Warpgroups take tiles in turn, as many as they are in each patch; each rounds and stores by itself while others
// multiply. kSlab: channels that lie together, 0 where the parameters say how many. kWeightBytes: of a step along K.
// kPatchBarriers: those of patches. Places: which output each place of a tile is. kMostWeights: steps, at most.
template <int kTileN, int kSlab, int kWeightBytes, int kPatchBarriers, Finish kFinish,
          typename Places = PixelsOfPlaces, int kMostWeights = kMaxHaloWeights>
struct PatchTiles {
  static constexpr int kSums = kTileN / 2, kStride = kTileN + 16;
  struct Static {
    BlockState<kTileN> state;
    alignas(8) uint64_t barriers[kMostWeights + kPatchBarriers];
  };

  const HaloParams& p;
  const CUtensorMap& map;
  Static& fixed;
  SharedTiles weights;  // then patches

  ThreadPlace own = {};
  const int warps = static_cast<int>(blockDim.x) / 32, groups = warps / 4;
  const uint32_t behind_weights = weights.at + p.k_tiles * kWeightBytes;
  const Barriers weights_full = {SharedAddress(fixed.barriers)},
                 patch_barriers = {weights_full(kMostWeights)};

  const TilePosition at = TilePosition::Of<64, kTileN>(p);
  const TileRange tiles = {p.shares, static_cast<int>(blockIdx.x)};
  const int patches = (tiles.last - tiles.first + groups - 1) / groups;

  // Where a consumer is.
  const int row = own.thread / 32 * 16 + own.lane / 4, column = own.lane % 4 * 4;
  uint8_t* const area = weights.data + own.group * 64 * kStride;
  int patch = 0, tile = tiles.first + own.group, weights_ready = 0;

  __device__ __forceinline__ int Slab() const { return kSlab != 0 ? kSlab : p.slab; }
  __device__ __forceinline__ int FirstLine(int of_patch) const {
    return Divide((tiles.first + of_patch * groups) * 64, p.by_pitch);
  }
  // How many lines a patch has.
  __device__ __forceinline__ int LinesOf(int of_patch) const {
    const int to = min(tiles.first + (of_patch + 1) * groups, tiles.last);
    return Divide(to * 64 - 1 + p.reach, p.by_pitch) - FirstLine(of_patch) + 1;
  }
  // A line of a slab of a patch.
  __device__ __forceinline__ void FetchLine(int line, int slab, uint32_t target, uint32_t barrier) const {
    const auto start = Places::StartOf(p, line);
    RowCopy(target, map, slab * Slab(), start.x, start.y, start.image, barrier);
  }

  // The last warp fetches weights, this kernel's own, before the predecessor is done; the others the first
  // patches, by fetch_first(), which waits for it. The two go side by side where there is nothing to wait for.
  // make_barriers(): those of patches that the last warp makes. fetch(i, target, barrier): the weights of the i-th
  // step.
  template <typename MakeBarriers, typename Fetch, typename FetchFirst>
  __device__ __forceinline__ void SetUp(const MakeBarriers& make_barriers, const Fetch& fetch,
                                        const FetchFirst& fetch_first) const {
    if (own.group == groups - 1) fixed.state.template FetchConstants<kWarpgroup>(p, at, own.thread);
    CommitCopies();
    if (own.group == groups) {
      if (own.lane == 0) {
        for (int k = 0; k < p.k_tiles; ++k) InitBarrier(weights_full(k), 1);
        make_barriers();
        FenceBarrierInit();
        for (int k = 0; k < p.k_tiles; ++k) {
          ArriveExpecting(weights_full(k), kWeightBytes);
          fetch(k, weights.at + k * kWeightBytes, weights_full(k));
        }
      }
    } else {
      fetch_first();
    }
    __syncwarp();
    WaitForCopies<0>();
    WaitForPredecessors();
  }

  // The last warp fetches further patches.
  __device__ __forceinline__ bool Loads() const { return own.group == groups; }

  __device__ __forceinline__ void Begin() const {}
  __device__ __forceinline__ bool HasTile() const { return tile < tiles.last; }
  __device__ __forceinline__ void Step() {
    ++patch;
    tile += groups;
  }
  __device__ __forceinline__ void End() const {}

  // The weights of the i-th step.
  __device__ __forceinline__ void WaitForWeights(int i) {
    if (i != weights_ready) return;
    WaitBarrier(weights_full(i), 0);
    ++weights_ready;
  }
  // Those of all steps up to the i-th.
  __device__ __forceinline__ void WaitForWeightsTo(int i) {
#pragma unroll 1
    for (; weights_ready <= i; ++weights_ready) WaitBarrier(weights_full(weights_ready), 0);
  }
  // What may come in while the last products are under way.
  __device__ __forceinline__ void FetchAddends() const {
    if (patch + 1 >= patches) LetSuccessorsStart();
    SyncThreads<kWarpgroup>(own.group + 1);  // the last tile's codes are out of the way
    FetchResiduals<64, kTileN, kWarpgroup>(p, at, area, own.thread, Places{p, tile * 64});
    CommitCopies();
  }
  // What padding adds to the sums of a tile.
  __device__ __forceinline__ void AddPadding(int (&sums)[kSums]) const {
    if constexpr (kMayHaveBorders<kFinish>)
      AddBorders<kTileN>(p.epilogue, at.n0 + column, row, Places{p, tile * 64}, sums);
  }

  __device__ __forceinline__ void Finish(const int (&sums)[kSums]) const {
    if (p.epilogue.has_residual) {
      WaitForCopies<0>();
      SyncThreads<kWarpgroup>(own.group + 1);
    }
    FinishInRegisters<64, kTileN, kWarpgroup, true, kFinish>(
        p, at, area, fixed.state, own.thread, own.group + 1,
        [&](const auto& f) { ForEachFour<kTileN>(sums, row, column, f); }, Places{p, tile * 64});
  }
};
#endif

}  // namespace lowbit::cuda
