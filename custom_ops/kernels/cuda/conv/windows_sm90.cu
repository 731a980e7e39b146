// Convolutions of stride 1 on wgmma, for Hopper (sm_90a), whose weights do not fit beside the pixels or take
// longer to fetch than to use. As in halo_sm90.cu a block reads every pixel once, into a patch that
// stays in shared memory; tiles of weights pass through a ring of stages. Blocks of a cluster may sum over
// other channels of the input (splits); they add up through distributed shared memory.
//
//   patch             slab by slab, each of 128 channels   [line of places][128]
//   ring of weights   slab by slab, its taps               [kTileN][128]
//
// On an H200 a tile of weights takes about 220 clocks of barriers and issue besides its products; several
// blocks of a multiprocessor hide them, hence few stages. Not worth their code: weights that one block
// fetches for others of a cluster (multicast: 0.5 us slower and more for ResNet-50's layers at batch 16), and
// windows with a stride, their pixels sorted by column and row modulo the stride (slower than implicit GEMM).
#include "kernels/cuda/conv/halo_places.cuh"
#include "kernels/cuda/conv/windows.h"

namespace lowbit::cuda {
namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A warpgroup for every 64 places, then a warp that fetches weights.
template <int kTileM, int kTileN, bool kSigned, Finish kFinish>
struct Windows {
  static constexpr int kSums = kTileN / 2, kConsumers = kTileM * 2, kWarps = kConsumers / 32 + 1,
                       kBytesB = kTileN * kRowBytes;
  using StageRing = Ring<kMaxWindowStages>;
  struct Static {
    BlockState<kTileN> state;
    alignas(8) uint64_t barriers[StageRing::kBarriers + kMaxWindowSlabs];
  };

  const WindowsParams& p;
  const CUtensorMap& map;
  Static& fixed;
  SharedTiles stages;

  ThreadPlace own = {};
  const int thread = static_cast<int>(threadIdx.x);
  const StageRing ring = {SharedAddress(fixed.barriers), p.stages};
  const Barriers slab_full = {ring.barriers + StageRing::kBarriers * 8};
  const uint32_t patch = stages.at + p.stages * kBytesB;

  const TilePosition at = TilePosition::Of<kTileM, kTileN>(p);
  const int count = at.k_end - at.k_begin;
  // This block's part of K: the taps of one slab after the other.
  const bool split = p.splits > 1;
  const int taps = p.taps, first_slab = split ? at.k_begin / taps : 0,
            first_tap = at.k_begin - first_slab * taps;
  const int slabs = split ? (at.k_end - 1) / taps - first_slab + 1 : p.slabs;
  const int line0 = Divide(at.m0, p.by_pitch);
  const int lines = Divide(at.m0 + kTileM - 1 + p.reach, p.by_pitch) - line0 + 1;
  const PixelsOfPlaces pixel_of = {p, at.m0};
  const int row = own.warp * 16 + own.lane / 4, column = own.lane % 4 * 4;

  __device__ __forceinline__ void SetUp() {
    KeepInRegister(stages.at);
    if (own.lane == 0) {  // every warp makes a few barriers: each takes a while
      const int first = kWarps - 1 - own.warp;
      for (int stage = own.warp; stage < ring.stages; stage += kWarps)
        ring.MakeBarriers(stage, 1, kConsumers / 32);
      for (int slab = first; slab < slabs; slab += kWarps) InitBarrier(slab_full(slab), 1);
      FenceBarrierInit();
      for (int slab = first; slab < slabs; slab += kWarps)
        ArriveExpecting(slab_full(slab), lines * p.pitch * kRowBytes);
    }
    if (thread == 32) PrefetchMap(map);
    if (split) fixed.state.BeginCluster(kTileM);
  }

  __device__ __forceinline__ bool Loads() const { return own.warp == kConsumers / 32; }
  __device__ __forceinline__ void Load() const {
    if (own.lane == 0) {
      int tap = first_tap, tile = first_tap * p.slabs + first_slab;
      ring.Fill(count, [&](int, int stage) {
        ArriveExpecting(ring.full(stage), kBytesB);
        BulkCopy(stages.at + stage * kBytesB, at.Weights(p, tile), kBytesB, ring.full(stage));
        tile += p.slabs;
        if (++tap == taps) {
          tap = 0;
          tile -= p.k_tiles - 1;
        }
      });
    }
    __syncwarp();
    WaitForPredecessors();
    LetSuccessorsStart();
  }

  __device__ __forceinline__ void Begin() {
    fixed.state.template FetchConstants<kConsumers>(p, at, thread);
    CommitCopies();
    WaitForPredecessors();
    if (own.lane == 0) {  // every row of the patch, slab by slab
      for (int slab = 0; slab < slabs; ++slab) {
        for (int i = own.warp; i < lines; i += kConsumers / 32) {
          const int line = line0 + i, image = Divide(line, p.by_rows), y = line - image * p.image_rows;
          RowCopy(patch + slab * p.plane_bytes + i * p.pitch * kRowBytes, map,
                  (first_slab + slab) * kRowBytes, -p.pad_left, y - p.pad_top, image, slab_full(slab));
        }
      }
    }
    __syncwarp();
    if constexpr (!kLeavesRegisters<kFinish>)
      FetchResiduals<kTileM, kTileN, kConsumers>(p, at, stages.data, thread, pixel_of);
  }

  __device__ __forceinline__ void Multiply(int (&sums)[kSums]) const {
    BeginSums<kConsumers, kFinish>(fixed.state, column, sums);
    HoldRegisters(sums);
    // p.step counts from the first slab of all.
    const uint32_t b = MatrixPart(stages.at);
    const uint32_t source = MatrixPart(patch) +
                            (at.m0 + own.warp / 4 * 64 - line0 * p.pitch) * (kRowBytes / 16) -
                            first_slab * (p.plane_bytes / 16);
    int slab = 0, tap = first_tap;
    WaitBarrier(slab_full(0), 0);
    RingPlace place;
    ring.template Drain<Wgmma<kTileN, kSigned>>(
        place, count, sums,
        [&](int i, int stage) -> Operands {
          if (tap == taps) {
            tap = 0;
            WaitBarrier(slab_full(++slab), 0);
          }
          ++tap;
          return {SlabDescriptor<kRowBytes>(source + p.step[at.k_begin + i]),
                  SlabDescriptor<kRowBytes>(b + stage * (kBytesB / 16))};
        },
        [&](int i, int stage) {
          // Only a stage that will be filled again: nobody waits for the others.
          if (own.lane == 0 && i + ring.stages < count) Arrive(ring.empty(stage));
        });
    LetSuccessorsStart();
    WgmmaWait<0>();
    HoldRegisters(sums);
    if constexpr (kMayHaveBorders<kFinish>) {
      if (at.split == 0) AddBorders<kTileN>(p.epilogue, at.n0 + column, row, pixel_of, sums);
    }
  }

  __device__ __forceinline__ void Finish(const int (&sums)[kSums]) const {
    CommitCopies();
    WaitForCopies<0>();  // the constants, the residuals
    SyncThreads<kConsumers>();
    FinishTile<kTileM, kTileN, kConsumers, true, kFinish>(
        p, at, stages.data, fixed.state, split,
        [&](const auto& f) { ForEachFour<kTileN>(sums, row, column, f); }, pixel_of);
  }
};
#endif

template <int kTileM, int kTileN, bool kSigned, Finish kFinish>
__global__ void __launch_bounds__(kTileM * 2 + 32, 1)
    ConvWindows(const __grid_constant__ WindowsParams p, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = Windows<kTileM, kTileN, kSigned, kFinish>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{p, map, fixed, SharedTiles(unaligned)});
#endif
}

}  // namespace

cudaError_t LaunchWindows(const WindowsParams& p, const ConvConfig& config, const LaunchOptions& options) {
  const auto is_side = [](int size) { return size == 64 || size == 128; };
  if (!is_side(config.tile_m) || !is_side(config.tile_n)) return cudaErrorInvalidValue;
  if (p.stages < 1 || p.stages > kMaxWindowStages || p.steps > kMaxWindowWeights)
    return cudaErrorInvalidValue;
  CUtensorMap map;
  const cudaError_t error = EncodeRows(p, &map);
  if (error != cudaSuccess) return error;
  const Finish finish = FinishWithClusters(p.epilogue, p, config.split == Split::kCluster);
  return WithFinish<true>(finish, options.x_signed, [&]<bool kSigned, Finish kFinish>() {
    return std::visit(
        [&](auto tile_m, auto tile_n) {
          if constexpr (HasInstance(IsSampled<kSigned, kFinish>(tile_m * tile_n == 64 * 64))) {
            return LaunchKernel<ConvWindows<tile_m, tile_n, kSigned, kFinish>>(
                options,
                {Dim((p.tiles * 64 + tile_m - 1) / tile_m, p.n_tiles, p.splits), tile_m * 2 + 32,
                 options.shared_bytes, Dim(1, 1, p.splits)},
                p, map);
          } else {
            return cudaErrorInvalidValue;
          }
        },
        OneOf<64, 128>(config.tile_m), OneOf<64, 128>(config.tile_n));
  });
}

}  // namespace lowbit::cuda
