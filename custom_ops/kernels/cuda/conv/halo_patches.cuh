// What kernels share that keep their channels' weights in shared memory and beside them patches of the input,
// fetched row by row by the tensor memory accelerator: all of a block's work but the products.
#pragma once

#include "kernels/cuda/conv/halo_places.cuh"

namespace lowbit::cuda {

inline constexpr int kMaxSlots = 2;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Warpgroups take tiles in turn, each rounds and stores by itself while others multiply. kSlab: channels that
// lie together, 0 where the parameters say how many. kWeightBytes: of a step along K. Places: which output each
// place of a tile is.
template <int kTileN, int kSlab, int kWeightBytes, Finish kFinish, typename Places = PixelsOfPlaces>
struct HaloPatches {
  static constexpr int kSums = kTileN / 2, kStride = kTileN + 16;
  struct Static {
    BlockState<kTileN> state;
    alignas(8) uint64_t barriers[kMaxHaloWeights + kMaxSlots * (kMaxHaloRows + 1)];
  };

  const HaloParams& p;
  const CUtensorMap& map;
  Static& fixed;
  SharedTiles weights;  // then slots for patches

  ThreadPlace own = {};
  const int warps = static_cast<int>(blockDim.x) / 32, groups = warps / 4;
  const uint32_t slots = weights.at + p.k_tiles * kWeightBytes;
  const int slot_bytes = p.slabs * p.plane_bytes;
  const Barriers weights_full = {SharedAddress(fixed.barriers)}, rows_full = {weights_full(kMaxHaloWeights)},
                 empty = {rows_full(kMaxSlots * kMaxHaloRows)};

  const TilePosition at = TilePosition::Of<64, kTileN>(p);
  const TileRange tiles = {p.shares, static_cast<int>(blockIdx.x)};
  const int patches = (tiles.last - tiles.first + groups - 1) / groups;

  // Where a consumer is.
  const int row = own.thread / 32 * 16 + own.lane / 4, column = own.lane % 4 * 4;
  uint8_t* const area = weights.data + own.group * 64 * kStride;
  int patch = 0, tile = tiles.first + own.group, weights_ready = 0;
  RingPlace place = {};

  __device__ __forceinline__ uint32_t RowFull(int slot, int i) const {
    return rows_full(slot * kMaxHaloRows + i);
  }
  __device__ __forceinline__ int FirstLine(int of_patch) const {
    return Divide((tiles.first + of_patch * groups) * 64, p.by_pitch);
  }

  __device__ __forceinline__ int Slab() const { return kSlab != 0 ? kSlab : p.slab; }

  // Every `step`th row of a patch from `i` on, by one thread.
  __device__ __forceinline__ void FetchRows(int of_patch, int slot, int i, int step) const {
    const int to = min(tiles.first + (of_patch + 1) * groups, tiles.last), line0 = FirstLine(of_patch);
    const int lines = Divide(to * 64 - 1 + p.reach, p.by_pitch) - line0 + 1;
#pragma unroll 1
    for (; i < p.patch_rows; i += step) {
      const uint32_t full = RowFull(slot, i);
      ArriveExpecting(full, i < lines ? p.slabs * p.pitch * Slab() : 0);
      if (i >= lines) continue;
      const auto start = Places::StartOf(p, line0 + i);
      const uint32_t target = slots + slot * slot_bytes + i * p.pitch * Slab();
#pragma unroll 1
      for (int slab = 0; slab < p.slabs; ++slab) {
        RowCopy(target + slab * p.plane_bytes, map, slab * Slab(), start.x, start.y, start.image, full);
      }
    }
  }

  // The last warp fetches weights, this kernel's own, before the predecessor is done; the others the first
  // patches. The two go side by side where there is nothing to wait for. fetch(i, target, barrier): the
  // weights of the i-th step.
  template <typename Fetch>
  __device__ __forceinline__ void SetUp(const Fetch& fetch) const {
    if (own.group == groups - 1) fixed.state.template FetchConstants<kWarpgroup>(p, at, own.thread);
    CommitCopies();
    if (own.group == groups) {
      if (own.lane == 0) {
        for (int k = 0; k < p.k_tiles; ++k) InitBarrier(weights_full(k), 1);
        // Every warp is done with every tile of a patch.
        for (int slot = 0; slot < p.stages; ++slot) InitBarrier(empty(slot), 4 * groups);
        FenceBarrierInit();
        for (int k = 0; k < p.k_tiles; ++k) {
          ArriveExpecting(weights_full(k), kWeightBytes);
          fetch(k, weights.at + k * kWeightBytes, weights_full(k));
        }
      }
    } else if (own.lane == 0) {
      for (int slot = 0; slot < p.stages; ++slot) {
        for (int i = own.warp; i < p.patch_rows; i += warps - 1) InitBarrier(RowFull(slot, i), 1);
      }
      FenceBarrierInit();
      if (own.warp == 0) PrefetchMap(map);
      WaitForPredecessors();
      for (int slot = 0; slot < min(p.stages, patches); ++slot) FetchRows(slot, slot, own.warp, warps - 1);
    }
    __syncwarp();
    WaitForCopies<0>();
    WaitForPredecessors();
  }

  // The last warp fetches further patches.
  __device__ __forceinline__ bool Loads() const { return own.group == groups; }
  __device__ __forceinline__ void Load() const {
    RingPlace to;
    for (int i = p.stages; i < patches; ++i, to.Step(p.stages)) {
      WaitBarrier(empty(to.stage), to.parity);
      FetchRows(i, to.stage, own.lane, 32);
      __syncwarp();
    }
  }

  __device__ __forceinline__ void Begin() const {}
  __device__ __forceinline__ bool HasTile() const { return tile < tiles.last; }
  __device__ __forceinline__ void Step() {
    ++patch;
    tile += groups;
    place.Step(p.stages);
  }
  __device__ __forceinline__ void End() const {}

  // A tile's part of the patch: its first line; the last of the rows that the windows read.
  struct Rows {
    int first_line, last;
  };
  // Waits for them.
  __device__ __forceinline__ Rows WaitForRows() const {
    const int line0 = FirstLine(patch), end = Divide(tile * 64 + 63 + p.reach, p.by_pitch) - line0;
#pragma unroll 1
    for (int i = 0; i <= end; ++i) WaitBarrier(RowFull(place.stage, i), place.parity);
    return {line0, end};
  }
  // From the slots on, where the first place of the tile lies.
  __device__ __forceinline__ int FirstPlace(const Rows& rows) const {
    return place.stage * slot_bytes + (tile * 64 - rows.first_line * p.pitch) * Slab();
  }
  // The weights of the i-th step.
  __device__ __forceinline__ void WaitForWeights(int i) {
    if (i != weights_ready) return;
    WaitBarrier(weights_full(i), 0);
    ++weights_ready;
  }
  // What may come in while the last products are under way.
  __device__ __forceinline__ void FetchAddends() const {
    if (patch + 1 >= patches) LetSuccessorsStart();
    SyncThreads<kWarpgroup>(own.group + 1);  // the last tile's codes are out of the way
    FetchResiduals<64, kTileN, kWarpgroup>(p, at, area, own.thread, Places{p, tile * 64});
    CommitCopies();
  }
  // Ends the sums of a tile, of whose patch everything is read.
  __device__ __forceinline__ void LeavePatch(const Rows& rows, int (&sums)[kSums]) const {
    if constexpr (kMayHaveBorders<kFinish>)
      AddBorders<kTileN>(p.epilogue, at.n0 + column, row, Places{p, tile * 64}, sums);
    if (patch + p.stages < patches) {
      // No phase of a barrier passes unseen.
#pragma unroll 1
      for (int i = rows.last + 1; i < p.patch_rows; ++i) WaitBarrier(RowFull(place.stage, i), place.parity);
      __syncwarp();
      if (own.lane == 0) Arrive(empty(place.stage));
    }
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
