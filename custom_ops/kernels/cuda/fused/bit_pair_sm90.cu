// Two convolutions of planes of bits, the codes of the first one the residuals of the second, on wgmma for Hopper
// (sm_90a). A block keeps the weights of both for its channels, and fetches patches of both inputs, which have the same places. A
// thread finds the bits of the second's codes, 32 of a plane in a register, then those of the first's, and the logic of
// residuals in planes makes what is stored of both (bits_sm90.cu).
#include "kernels/cuda/conv/bit_patches.cuh"
#include "kernels/cuda/fused/bit_pair.h"

namespace lowbit::cuda {
namespace {

template <int kTileN, int kBits>
__global__ void __launch_bounds__(MaxBitTiles(kTileN, true) * 128 + 32, 1)
    ConvBitPair(const __grid_constant__ BitPairParams p, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = PlanePatches<kTileN, kBits, Finish::kPlanesSteps, true>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{{{p, map, fixed, SharedTiles(unaligned)}, p, p.shortcut}});
#endif
}

}  // namespace

cudaError_t LaunchBitPair(const BitPairParams& p, const ConvConfig& config, const LaunchOptions& options) {
  const bool has_instance = p.has_steps && p.shortcut.has_steps && p.shortcut.x_bits == p.x_bits &&
                            p.stages >= 1 && p.stages <= kMaxBitSlots && p.patch_rows <= kMaxHaloRows &&
                            p.k_tiles <= kMaxBitWeights &&
                            config.tile_m / 64 <= MaxBitTiles(config.tile_n, true);
  if (!has_instance) return cudaErrorInvalidValue;
  return std::visit(
      [&](auto tile_n, auto x_bits) {
        return LaunchKernel<ConvBitPair<tile_n, x_bits>>(
            options,
            {Dim(p.shares.blocks, p.n_tiles), config.tile_m / 64 * kWarpgroup + 32, options.shared_bytes}, p,
            CUtensorMap{});
      },
      OneOf<64, 128>(config.tile_n), OneOf<1, 2>(p.x_bits));
}

}  // namespace lowbit::cuda
