// Convolutions of stride 1 on wgmma, for Hopper (sm_90a), that read every pixel once: a block keeps its
// channels' weights in shared memory, and beside them patches of the input, fetched row by row by the tensor
// memory accelerator.
//
// In a patch the rows of the image lie one behind the other with the padding between them: the columns right
// of a row's last pixel are also those left of the next row's first one, the rows below an image those above
// the next image. So pixels have places along one line (HaloParams: `pitch` in a row, `image_rows` rows an
// image), a tile is 64 places in a row, some of them without an output, and the operand that a tap sees is
// the same 64 rows of shared memory shifted by a constant: nothing is copied for it. wgmma takes any row as
// the first, as the swizzle follows from the address.
#include "kernels/cuda/conv/halo_places.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kMaxSlots = 2;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Warpgroups take tiles in turn, each rounds and stores by itself while others multiply.
template <int kTileN, int kSlab, bool kSigned, Finish kFinish>
struct Halo {
  static constexpr int kSums = kTileN / 2, kBytesB = kTileN * kRowBytes, kSteps = kRowBytes / kSlab,
                       kStride = kTileN + 16;
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
  const uint32_t slots = weights.at + p.k_tiles * kBytesB;
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

  // Every `step`th row of a patch from `i` on, by one thread.
  __device__ __forceinline__ void FetchRows(int of_patch, int slot, int i, int step) const {
    const int to = min(tiles.first + (of_patch + 1) * groups, tiles.last), line0 = FirstLine(of_patch);
    const int lines = Divide(to * 64 - 1 + p.reach, p.by_pitch) - line0 + 1;
#pragma unroll 1
    for (; i < p.patch_rows; i += step) {
      const uint32_t full = RowFull(slot, i);
      ArriveExpecting(full, i < lines ? p.slabs * p.pitch * kSlab : 0);
      if (i >= lines) continue;
      const int line = line0 + i, image = Divide(line, p.by_rows), y = line - image * p.image_rows;
      const uint32_t target = slots + slot * slot_bytes + i * p.pitch * kSlab;
#pragma unroll 1
      for (int slab = 0; slab < p.slabs; ++slab) {
        RowCopy(target + slab * p.plane_bytes, map, slab * kSlab, -p.pad_left, y - p.pad_top, image, full);
      }
    }
  }

  // The last warp fetches weights, this kernel's own, before the predecessor is done; the others the first
  // patches. The two go side by side where there is nothing to wait for.
  __device__ __forceinline__ void SetUp() const {
    if (own.group == groups - 1) fixed.state.template FetchConstants<kWarpgroup>(p, at, own.thread);
    CommitCopies();
    if (own.group == groups) {
      if (own.lane == 0) {
        for (int k = 0; k < p.k_tiles; ++k) InitBarrier(weights_full(k), 1);
        // Every warp is done with every tile of a patch.
        for (int slot = 0; slot < p.stages; ++slot) InitBarrier(empty(slot), 4 * groups);
        FenceBarrierInit();
        for (int k = 0; k < p.k_tiles; ++k) {
          ArriveExpecting(weights_full(k), kBytesB);
          BulkCopy(weights.at + k * kBytesB, at.Weights(p, k), kBytesB, weights_full(k));
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

  __device__ __forceinline__ void Multiply(int (&sums)[kSums]) {
    const int line0 = FirstLine(patch), end = Divide(tile * 64 + 63 + p.reach, p.by_pitch) - line0;
#pragma unroll 1
    for (int i = 0; i <= end; ++i) WaitBarrier(RowFull(place.stage, i), place.parity);
    BeginWithBias(fixed.state, column, sums);
    AddTaps(MatrixPart(slots + place.stage * slot_bytes + (tile * 64 - line0 * p.pitch) * kSlab), sums);
    if (patch + 1 >= patches) LetSuccessorsStart();
    SyncThreads<kWarpgroup>(own.group + 1);  // the last tile's codes are out of the way
    FetchResiduals<64, kTileN, kWarpgroup>(p, at, area, own.thread, PixelsOfPlaces{p, tile * 64});
    CommitCopies();
    WgmmaWait<0>();
    HoldRegisters(sums);
    if constexpr (kMayHaveBorders<kFinish>)
      AddBorders<kTileN>(p.epilogue, at.n0 + column, row, PixelsOfPlaces{p, tile * 64}, sums);
    if (patch + p.stages < patches) {
      // No phase of a barrier passes unseen.
#pragma unroll 1
      for (int i = end + 1; i < p.patch_rows; ++i) WaitBarrier(RowFull(place.stage, i), place.parity);
      __syncwarp();
      if (own.lane == 0) Arrive(empty(place.stage));
    }
  }

  // The products of all taps with the pixels at `source`, under way.
  __device__ __forceinline__ void AddTaps(uint32_t source, int (&sums)[kSums]) {
    uint32_t b = MatrixPart(weights.at);
    HoldRegisters(sums);
#pragma unroll 1
    for (int k = 0; k < p.k_tiles; ++k, b += kBytesB / 16) {
      if (k == weights_ready) {
        WaitBarrier(weights_full(k), 0);
        ++weights_ready;
      }
#pragma unroll
      for (int part = 0; part < kSteps; ++part) {
        if (part > 0 && k * kSteps + part >= p.steps) break;  // weights past the last tap
        WgmmaFence();
        const uint32_t a = source + p.step[k * kSteps + part];
#pragma unroll
        for (int i = 0; i < kSlab / 32; ++i) {
          Wgmma<kTileN, kSigned>::Multiply(sums, SlabDescriptor<kSlab>(a + 2 * i),
                                           SlabDescriptor<kRowBytes>(b + part * (kSlab / 16) + 2 * i));
        }
      }
    }
    WgmmaCommit();
  }

  __device__ __forceinline__ void Finish(const int (&sums)[kSums]) const {
    if (p.epilogue.has_residual) {
      WaitForCopies<0>();
      SyncThreads<kWarpgroup>(own.group + 1);
    }
    FinishInRegisters<64, kTileN, kWarpgroup, true, kFinish>(
        p, at, area, fixed.state, own.thread, own.group + 1,
        [&](const auto& f) { ForEachFour<kTileN>(sums, row, column, f); }, PixelsOfPlaces{p, tile * 64});
  }
};
#endif

template <int kTileN, int kSlab, bool kSigned, Finish kFinish>
__global__ void __launch_bounds__(MaxHaloTiles(kTileN) * 128 + 32, 1)
    ConvHalo(const __grid_constant__ HaloParams p, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = Halo<kTileN, kSlab, kSigned, kFinish>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{p, map, fixed, SharedTiles(unaligned)});
#endif
}

}  // namespace

cudaError_t LaunchHalo(const HaloParams& p, const ConvConfig& config, const LaunchOptions& options) {
  if (p.stages < 1 || p.stages > kMaxSlots || p.patch_rows > kMaxHaloRows || p.k_tiles > kMaxHaloWeights ||
      config.tile_m / 64 > MaxHaloTiles(config.tile_n)) {
    return cudaErrorInvalidValue;
  }
  CUtensorMap map;
  const cudaError_t error = EncodeRows(p, &map);
  if (error != cudaSuccess) return error;
  return WithFinish<false>(FinishOf(p.epilogue), options.x_signed, [&]<bool kSigned, Finish kFinish>() {
    return std::visit(
        [&](auto tile_n, auto slab) {
          return LaunchKernel<ConvHalo<tile_n, slab, kSigned, kFinish>>(
              options,
              {Dim(p.shares.blocks, p.n_tiles), config.tile_m / 64 * kWarpgroup + 32, options.shared_bytes},
              p, map);
        },
        OneOf<32, 64, 128>(config.tile_n), OneOf<64, 128>(p.slab));
  });
}

}  // namespace lowbit::cuda
