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

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int kTileN, int kSlab, bool kSigned, Finish kFinish>
struct Halo : HaloPatches<kTileN, kSlab, kTileN * kRowBytes, kFinish> {
  using Patches = HaloPatches<kTileN, kSlab, kTileN * kRowBytes, kFinish>;
  using Patches::at, Patches::column, Patches::fixed, Patches::kSums, Patches::p, Patches::slots,
      Patches::weights;
  static constexpr int kBytesB = kTileN * kRowBytes, kSteps = kRowBytes / kSlab;

  __device__ __forceinline__ void SetUp() const {
    Patches::SetUp([&](int k, uint32_t target, uint32_t barrier) {
      BulkCopy(target, at.Weights(p, k), kBytesB, barrier);
    });
  }

  __device__ __forceinline__ void Multiply(int (&sums)[kSums]) {
    const auto rows = this->WaitForRows();
    BeginWithBias(fixed.state, column, sums);
    AddTaps(MatrixPart(slots + this->FirstPlace(rows)), sums);
    this->FetchAddends();
    WgmmaWait<0>();
    HoldRegisters(sums);
    this->LeavePatch(rows, sums);
  }

 private:
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
          if constexpr (HasInstance(kFinish == Finish::kIntegers || tile_n * slab == 32 * 64)) {
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
