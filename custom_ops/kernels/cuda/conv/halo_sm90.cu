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
#include "kernels/cuda/conv/halo_patches.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kMaxSlots = 2;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Slots for whole patches, each row of which has a barrier.
template <int kTileN, int kSlab, bool kSigned, Finish kFinish>
struct Halo : PatchTiles<kTileN, kSlab, kTileN * kRowBytes, kMaxSlots*(kMaxHaloRows + 1), kFinish> {
  using Patches = PatchTiles<kTileN, kSlab, kTileN * kRowBytes, kMaxSlots*(kMaxHaloRows + 1), kFinish>;
  using Patches::at, Patches::behind_weights, Patches::column, Patches::fixed, Patches::groups,
      Patches::kSums, Patches::own, Patches::p, Patches::patch, Patches::patches, Patches::tile,
      Patches::warps, Patches::weights;
  static constexpr int kBytesB = kTileN * kRowBytes, kSteps = kRowBytes / kSlab;

  const int slot_bytes = p.slabs * p.plane_bytes;
  const Barriers empty = {this->patch_barriers(kMaxSlots * kMaxHaloRows)};
  RingPlace place = {};

  __device__ __forceinline__ uint32_t RowFull(int slot, int i) const {
    return this->patch_barriers(slot * kMaxHaloRows + i);
  }

  __device__ __forceinline__ void SetUp() const {
    Patches::SetUp(
        [&] {
          // Every warp is done with every tile of a patch.
          for (int slot = 0; slot < p.stages; ++slot) InitBarrier(empty(slot), 4 * groups);
        },
        [&](int k, uint32_t target, uint32_t barrier) {
          BulkCopy(target, at.Weights(p, k), kBytesB, barrier);
        },
        [&] {
          if (own.lane != 0) return;
          for (int slot = 0; slot < p.stages; ++slot) {
            for (int i = own.warp; i < p.patch_rows; i += warps - 1) InitBarrier(RowFull(slot, i), 1);
          }
          FenceBarrierInit();
          if (own.warp == 0) PrefetchMap(this->map);
          WaitForPredecessors();
          for (int slot = 0; slot < min(p.stages, patches); ++slot) {
            FetchRows(slot, slot, own.warp, warps - 1);
          }
        });
  }

  __device__ __forceinline__ void Load() const {
    RingPlace to;
    for (int i = p.stages; i < patches; ++i, to.Step(p.stages)) {
      WaitBarrier(empty(to.stage), to.parity);
      __syncwarp();  // lanes without a row have seen this phase, too, before the next one can end
      FetchRows(i, to.stage, own.lane, 32);
    }
  }

  __device__ __forceinline__ void Step() {
    Patches::Step();
    place.Step(p.stages);
  }

  __device__ __forceinline__ void Multiply(int (&sums)[kSums]) {
    // A tile's part of the patch.
    const int first_line = this->FirstLine(patch),
              end = Divide(tile * 64 + 63 + p.reach, p.by_pitch) - first_line;
#pragma unroll 1
    for (int i = 0; i <= end; ++i) WaitBarrier(RowFull(place.stage, i), place.parity);
    BeginWithBias(fixed.state, column, sums);
    AddTaps(
        MatrixPart(behind_weights + place.stage * slot_bytes + (tile * 64 - first_line * p.pitch) * kSlab),
        sums);
    this->FetchAddends();
    WgmmaWait<0>();
    HoldRegisters(sums);
    this->AddPadding(sums);
    if (patch + p.stages < patches) {
      // No phase of a barrier passes unseen.
#pragma unroll 1
      for (int i = end + 1; i < p.patch_rows; ++i) WaitBarrier(RowFull(place.stage, i), place.parity);
      __syncwarp();
      if (own.lane == 0) Arrive(empty(place.stage));
    }
  }

 private:
  // Every `step`th row of a patch from `i` on, by one thread.
  __device__ __forceinline__ void FetchRows(int of_patch, int slot, int i, int step) const {
    const int line0 = this->FirstLine(of_patch), lines = this->LinesOf(of_patch);
#pragma unroll 1
    for (; i < p.patch_rows; i += step) {
      const uint32_t full = RowFull(slot, i);
      ArriveExpecting(full, i < lines ? p.slabs * p.pitch * kSlab : 0);
      if (i >= lines) continue;
      const uint32_t target = behind_weights + slot * slot_bytes + i * p.pitch * kSlab;
#pragma unroll 1
      for (int slab = 0; slab < p.slabs; ++slab) {
        this->FetchLine(line0 + i, slab, target + slab * p.plane_bytes, full);
      }
    }
  }

  // The products of all taps with the pixels at `source`, under way.
  __device__ __forceinline__ void AddTaps(uint32_t source, int (&sums)[kSums]) {
    uint32_t b = MatrixPart(weights.at);
    HoldRegisters(sums);
#pragma unroll 1
    for (int k = 0; k < p.k_tiles; ++k, b += kBytesB / 16) {
      this->WaitForWeights(k);
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
};
#endif

template <int kTileN, int kSlab, bool kSigned, Finish kFinish>
__global__ void __launch_bounds__(MaxHaloTiles(kTileN) * 128 + 32, 1)
    ConvHalo(const __grid_constant__ HaloParams p, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = Halo<kTileN, kSlab, kSigned, kFinish>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{{p, map, fixed, SharedTiles(unaligned)}});
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
          if constexpr (kMayFinish<kFinish, tile_n> &&
                        HasInstance(IsSampled<kSigned, kFinish>(tile_n * slab == 32 * 64))) {
            return LaunchKernel<ConvHalo<tile_n, slab, kSigned, kFinish>>(
                options,
                {Dim(p.shares.blocks, p.n_tiles), config.tile_m / 64 * kWarpgroup + 32, options.shared_bytes},
                p, map);
          } else {
            return cudaErrorInvalidValue;
          }
        },
        OneOf<32, 64, 128>(config.tile_n), OneOf<64, 128>(p.slab));
  });
}

}  // namespace lowbit::cuda
