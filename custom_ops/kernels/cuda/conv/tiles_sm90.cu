// Implicit-precomp GEMM on wgmma, for Hopper (sm_90a): both operands from shared memory. Activations come by
// cp.async (a gather) from a warpgroup of producers, or as one box that the tensor memory accelerator fetches
// for a single thread, where it can; a weight tile by one bulk copy, since it is packed in the very order of
// shared memory. A consuming warpgroup sums 64 x kTileN outputs. Each stage has an mbarrier that counts what
// arrives in it and one that counts the warps that are done with it.
//
// What limits large tiles is neither the products nor shared memory but the second-level cache, which gives an H100's
// multiprocessors about 6100 bytes a clock together: tiles of 192x128 want 40 KB each for 768 clocks of products. So two
// blocks that make other channels of the same pixels may be a cluster and fetch half of these each, for both (multicast:
// 3x3 of 256 channels at 14x14 and batch 128 take 22.3 us for 25.6). Weights fetched so, for blocks of other pixels, were
// slower: 28.9 us, and in tiles of 64x128 at batch 16 6.9 for 5.8.
//
// Here are the kernels that gather, of any convolution; those that fetch boxes are in boxes_sm90.cu.
#include "kernels/cuda/conv/wgmma_tiles.cuh"

namespace lowbit::cuda {
namespace {

template <int kTileM, int kTileN, bool kSigned, int kProducers, Finish kFinish>
__global__ void __launch_bounds__(kTileM * 2 + kProducers)
    ConvWgmma(const __grid_constant__ GatherParams p, bool cluster) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = Tiles<kTileM, kTileN, kSigned, kProducers, kFinish>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{p, cluster, nullptr, fixed, SharedTiles(unaligned)});
#endif
}

template <int kTileM, int kTileN>
cudaError_t LaunchTile(const GatherParams& p, const ConvConfig& config, const LaunchOptions& options) {
  return std::visit(
      [&](auto producers) {
        return WithGatheredFinish<true>(p, options.x_signed, [&]<bool kSigned, Finish kFinish>() {
          if constexpr (kMayFinish<kFinish, kTileN> &&
                        HasInstance(IsSampled<kSigned, kFinish>(producers && kTileM * kTileN == 64 * 64))) {
            return LaunchTiled<ConvWgmma<kTileM, kTileN, kSigned, producers, kFinish>>(
                p, config, options, kTileM * 2 + producers);
          } else {
            return cudaErrorInvalidValue;
          }
        });
      },
      OneOf<0, kGatherers>(config.producers ? kGatherers : 0));
}

}  // namespace

cudaError_t LaunchWgmma(const GatherParams& p, const ConvConfig& config, const LaunchOptions& options) {
  const auto is = [&](int m, int n) { return config.tile_m == m && config.tile_n == n; };
  if (p.stages < 1 || p.stages > kMaxTileStages) return cudaErrorInvalidValue;
  if (config.boxes) return LaunchBoxes(p, config, options);
  if (is(64, 32)) return LaunchTile<64, 32>(p, config, options);
  if (is(64, 64)) return LaunchTile<64, 64>(p, config, options);
  if (is(64, 128)) return LaunchTile<64, 128>(p, config, options);
  if (is(128, 64)) return LaunchTile<128, 64>(p, config, options);
  if (is(128, 128)) return LaunchTile<128, 128>(p, config, options);
  if (is(128, 256)) return LaunchTile<128, 256>(p, config, options);
  return cudaErrorInvalidValue;
}

}  // namespace lowbit::cuda
