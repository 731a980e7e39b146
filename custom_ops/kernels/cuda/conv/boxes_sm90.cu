// Tiles on wgmma whose pixels the tensor memory accelerator fetches as boxes.
#include "kernels/cuda/conv/wgmma_tiles.cuh"

namespace lowbit::cuda {
namespace {

template <int kTileM, int kTileN, bool kSigned, Finish kFinish>
__global__ void __launch_bounds__(kTileM * 2 + kBoxFetchers)
    ConvBoxes(const __grid_constant__ BoxTileParams p, bool cluster,
              const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (threadIdx.x == 0) PrefetchMap(map);
  using Pipeline = Tiles<kTileM, kTileN, kSigned, kBoxFetchers, kFinish>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{p, cluster, &map, fixed, SharedTiles(unaligned)});
#endif
}

template <int kTileM, int kTileN>
cudaError_t LaunchTile(const GatherParams& p, const ConvConfig& config, const LaunchOptions& options) {
  CUtensorMap map;
  const cudaError_t error = EncodePixels(p.x, p.m, p, kTileM / p.sharing, &map);
  if (error != cudaSuccess) return error;
  const Finish finish = FinishWithClusters(p.epilogue, p, config.split == Split::kCluster);
  const auto launch = [&]<bool kSigned, Finish kFinish>() {
    constexpr bool kIsKept = kTileM <= kMostSplitRows || !kLeavesRegisters<kFinish>;
    if constexpr (kIsKept && kMayFinish<kFinish, kTileN> &&
                  HasInstance(IsSampled<kSigned, kFinish>(false) ||
                              (kTileM * kTileN == 64 * 64 && !kSigned))) {
      return LaunchTiled<ConvBoxes<kTileM, kTileN, kSigned, kFinish>>(
          static_cast<const BoxTileParams&>(p), config, options, kTileM * 2 + kBoxFetchers, map);
    } else {
      return cudaErrorInvalidValue;
    }
  };
  if (finish != Finish::kOfZeros) return WithFinish<true>(finish, options.x_signed, launch);
  return options.x_signed ? launch.template operator()<true, Finish::kOfZeros>()
                          : launch.template operator()<false, Finish::kOfZeros>();
}

}  // namespace

cudaError_t LaunchBoxes(const GatherParams& p, const ConvConfig& config, const LaunchOptions& options) {
  const auto is = [&](int m, int n) { return config.tile_m == m && config.tile_n == n; };
  if (is(64, 32)) return LaunchTile<64, 32>(p, config, options);
  if (is(64, 64)) return LaunchTile<64, 64>(p, config, options);
  if (is(64, 128)) return LaunchTile<64, 128>(p, config, options);
  if (is(128, 64)) return LaunchTile<128, 64>(p, config, options);
  if (is(128, 128)) return LaunchTile<128, 128>(p, config, options);
  if (is(192, 128)) return LaunchTile<192, 128>(p, config, options);
  return cudaErrorInvalidValue;
}

}  // namespace lowbit::cuda
