// Two convolutions of planes of bits, the codes of the first one the residuals of the second, on wgmma for Hopper
// (sm_90a). A block keeps the weights of both for its channels, and fetches patches of both inputs, which have the same places. A
// thread finds the bits of the second's codes, 32 of them in a register, then those of the first's, and the logic of
// residuals in planes makes what is stored of both (bits_sm90.cu).
#include "kernels/cuda/conv/bit_patches.cuh"
#include "kernels/cuda/fused/bit_pair.h"

namespace lowbit::cuda {
namespace {

template <int kTileN>
__global__ void __launch_bounds__(MaxBitTiles(kTileN, 1, true) * 128 + 32, 1)
    ConvBitPair(const __grid_constant__ BitPairParams p, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = PlanePatches<kTileN, 1, Finish::kPlanesSteps, true>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{{{p, map, fixed, SharedTiles(unaligned)}, p, p.shortcut}});
#endif
}

}  // namespace

cudaError_t LaunchBitPair(const BitPairParams& p, const ConvConfig& config, const LaunchOptions& options) {
  const bool has_instance = p.has_steps && p.shortcut.has_steps && p.combines && p.x_bits == 1 &&
                            p.shortcut.x_bits == 1 && p.stages >= 1 && p.stages <= kMaxBitSlots &&
                            p.patch_rows <= kMaxHaloRows && p.k_tiles <= kMaxHaloWeights &&
                            config.tile_m / 64 <= MaxBitTiles(config.tile_n, 1, true);
  if (!has_instance) return cudaErrorInvalidValue;
  return std::visit(
      [&](auto tile_n) {
        return LaunchKernel<ConvBitPair<tile_n>>(
            options,
            {Dim(p.shares.blocks, p.n_tiles), config.tile_m / 64 * kWarpgroup + 32, options.shared_bytes}, p,
            CUtensorMap{});
      },
      OneOf<64, 128>(config.tile_n));
}

}  // namespace lowbit::cuda
