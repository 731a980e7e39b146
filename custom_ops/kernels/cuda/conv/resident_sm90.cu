// 1x1 convolutions of many pixels on wgmma, for Hopper (sm_90a): a block keeps its channels' weights in
// shared memory and stays for many tiles of 64 pixels. The tensor memory accelerator fetches them, and
// residuals, while the block finishes earlier ones, and stores the codes; setting a tile up costs two threads
// a few instructions. Several blocks share a multiprocessor, so that one multiplies while others round.
//
// Codes take the place of their residuals, in one of two buffers:
//   tile i     products | residuals i there, codes i in their place | store i
//   tile i + 1 products, store i has read its buffer, fetch residuals i + 2 into it | ...
#include "kernels/cuda/conv/pixel_boxes.cuh"
#include "kernels/cuda/conv/resident.h"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 128, kTileM = 64, kMaxSlots = 4;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int kTileN, bool kSigned, Finish kFinish>
struct Resident {
  static constexpr int kSums = kTileN / 2, kBytesA = kTileM * kRowBytes, kBytesB = kTileN * kRowBytes,
                       kBytesY = kTileM * kTileN;
  struct Static {
    BlockState<kTileN> state;
    alignas(8) uint64_t barriers[kMaxSlots + 3];
  };

  const ConvParams& p;
  const StreamMaps& maps;
  Static& fixed;
  SharedTiles weights;

  const int thread = static_cast<int>(threadIdx.x);
  // Which of them fetches pixels; fetches residuals and stores codes.
  const bool fetches = thread == 0, stores = thread == 32;
  const int slot_bytes = p.k_tiles * kBytesA;
  const uint32_t slots = weights.at + p.k_tiles * kBytesB, codes = weights.at + p.staging_offset;
  const Barriers full = {SharedAddress(fixed.barriers)}, residuals_full = {full(kMaxSlots + 1)};
  const uint32_t weights_full = full(kMaxSlots);

  TilePosition at = TilePosition::Of<kTileM, kTileN>(p);
  const int step = static_cast<int>(gridDim.x) * kTileM;
  OwnCodes<kTileN> mine{thread};
  RingPlace place = {}, buffer = {};  // of the slot; of the residuals, then codes

  // The tile whose first pixel is m, by one thread. Pixels past the last are never stored.
  __device__ __forceinline__ void FetchPixels(int m, int slot) const {
    const PixelPlace first = FirstPixel(p, m);
    ArriveExpecting(full(slot), slot_bytes);
    for (int k = 0; k < p.k_tiles; ++k) {
      PixelCopy(slots + slot * slot_bytes + k * kBytesA, maps.x, k * kRowBytes, first, 0, 0, full(slot));
    }
  }
  __device__ __forceinline__ void FetchCodes(int m, int to) const {
    ArriveExpecting(residuals_full(to), kBytesY);
    CodesCopy(codes + to * kBytesY, maps.residual, at.n0, m, residuals_full(to));
  }

  __device__ __forceinline__ void SetUp() {
    if (fetches) {
      for (int slot = 0; slot < p.stages; ++slot) InitBarrier(full(slot), 1);
      InitBarrier(weights_full, 1);
      for (int i = 0; i < 2; ++i) InitBarrier(residuals_full(i), 1);
      FenceBarrierInit();
      at.template FetchWeights<kTileN>(p, weights.at, weights_full);
      WaitForPredecessors();
      for (int slot = 0, m = at.m0; slot < p.stages && m < p.m; ++slot, m += step) FetchPixels(m, slot);
    }
    fixed.state.template FetchConstants<kThreads>(p, at, thread);
    CommitCopies();
    WaitForPredecessors();
  }

  __device__ __forceinline__ void Begin() const {
    WaitBarrier(weights_full, 0);
    if (stores && p.epilogue.has_residual) FetchCodes(at.m0, 0);
    WaitForCopies<0>();
    SyncThreads<kThreads>();  // all constants are there
  }
  __device__ __forceinline__ bool HasTile() const { return at.m0 < p.m; }
  __device__ __forceinline__ void Step() {
    buffer.Step(2);
    place.Step(p.stages);
    at.m0 += step;
  }

  __device__ __forceinline__ void Multiply(int (&sums)[kSums]) const {
    const bool last = at.m0 + step >= p.m;
    if (last) LetSuccessorsStart();
    BeginWithBias(fixed.state, mine.column, sums);
    WaitBarrier(full(place.stage), place.parity);
    MultiplyTiles<Wgmma<kTileN, kSigned>, kBytesA, kBytesB>(slots + place.stage * slot_bytes, weights.at,
                                                            p.k_tiles, p.k, sums);
    if (stores) {
      if (!p.epilogue.has_residual) {
        WaitForStoresToRead<1>();  // this tile's buffer is free
      } else if (!last) {
        WaitForStoresToRead<0>();  // the next tile's is
        FetchCodes(at.m0 + step, buffer.stage ^ 1);
      }
    }
    SyncThreads<kThreads>();  // all have read the tile
    if (fetches && at.m0 + p.stages * step < p.m) FetchPixels(at.m0 + p.stages * step, place.stage);
    __syncwarp();
  }

  __device__ __forceinline__ void Finish(const int (&sums)[kSums]) const {
    if (p.epilogue.has_residual) WaitBarrier(residuals_full(buffer.stage), buffer.parity);
    const int box = buffer.stage * kBytesY;
    mine.template Round<kFinish>(p.epilogue, fixed.state, sums, weights.data + p.staging_offset + box);
    FenceAsyncProxy();
    SyncThreads<kThreads>();  // all codes are there
    if (stores) StoreCodes(maps.y, at.n0, at.m0, codes + box);
  }

  __device__ __forceinline__ void End() const {
    if (stores) WaitForStores();
  }
};
#endif

template <int kTileN, bool kSigned, Finish kFinish>
__global__ void __launch_bounds__(kThreads, 4)
    ConvResident(const __grid_constant__ ConvParams p, const __grid_constant__ StreamMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = Resident<kTileN, kSigned, kFinish>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{p, maps, fixed, SharedTiles(unaligned)});
#endif
}

template <int kTileN, bool kSigned, Finish kFinish>
cudaError_t LaunchWith(const ConvParams& p, const LaunchOptions& options) {
  constexpr auto kKernel = ConvResident<kTileN, kSigned, kFinish>;
  cudaError_t error = PrepareKernel<kKernel>(options.device);
  StreamMaps maps;
  if (error == cudaSuccess) error = EncodeStreams<kTileN>(p, &maps);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(p.persistent_blocks), static_cast<unsigned>(p.n_tiles));
  return options.queue.LaunchWith({static_cast<size_t>(p.shared_bytes), nullptr, 0}, kKernel, grid,
                                  dim3(kThreads), p, maps);
}

}  // namespace

cudaError_t LaunchResident(const ConvParams& p, const ConvConfig& config, const LaunchOptions& options) {
  if (p.stages < 1 || p.stages > kMaxSlots) return cudaErrorInvalidValue;
  return WithFinish<false>(FinishOf(p.epilogue), options.x_signed, [&]<bool kSigned, Finish kFinish>() {
    return config.tile_n == 64 ? LaunchWith<64, kSigned, kFinish>(p, options)
                               : LaunchWith<128, kSigned, kFinish>(p, options);
  });
}

}  // namespace lowbit::cuda
