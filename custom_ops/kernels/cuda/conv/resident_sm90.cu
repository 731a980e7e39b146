// 1x1 convolutions of many pixels on wgmma, for Hopper (sm_90a): a block keeps its channels' weights in
// shared memory and stays for many tiles of 64 pixels. The tensor memory accelerator fetches them, and
// residuals, while the block finishes earlier ones, and stores the codes; setting a tile up costs two threads
// a few instructions. Several blocks share a multiprocessor, so that one multiplies while others round.
//
// Codes take the place of their residuals, in one of two buffers:
//   tile i     products | residuals i there, codes i in their place | store i
//   tile i + 1 products, store i has read its buffer, fetch residuals i + 2 into it | ...
#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/conv/pixel_boxes.cuh"
#include "kernels/cuda/conv/resident.h"
#include "kernels/cuda/device/wgmma_s8.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 128, kTileM = 64, kMaxSlots = 4;
constexpr int kPixelThread = 0,
              kCodeThread = 32;  // which threads fetch pixels; fetch residuals and store codes

template <int kTileN, bool kSigned, Finish kFinish>
__global__ void __launch_bounds__(kThreads, 4)
    ConvResident(const __grid_constant__ ConvParams p, const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap residual_map,
                 const __grid_constant__ CUtensorMap y_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kBytesA = kTileM * kRowBytes, kBytesB = kTileN * kRowBytes, kBytesY = kTileM * kTileN;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ BlockState<kTileN> state;
  __shared__ __align__(8) uint64_t barriers[kMaxSlots + 3];

  const int thread = static_cast<int>(threadIdx.x);
  // Swizzled tiles start at multiples of 1024 bytes (SharedBytes has room for that).
  const uint32_t weights = (SharedAddress(unaligned) + 1023) & ~1023u;
  uint8_t* const shared = unaligned + (weights - SharedAddress(unaligned));
  const int slot_bytes = p.k_tiles * kBytesA;
  const uint32_t slots = weights + p.k_tiles * kBytesB;
  const uint32_t codes = weights + p.staging_offset;
  const uint32_t barriers_at = SharedAddress(barriers), weights_full = barriers_at + kMaxSlots * 8;
  const auto full = [&](int slot) { return barriers_at + slot * 8; };
  const auto residuals_full = [&](int buffer) { return weights_full + 8 + buffer * 8; };
  TilePosition at = TilePosition::Of<kTileM, kTileN>(p);
  const int step = static_cast<int>(gridDim.x) * kTileM;

  // The tile whose first pixel is m, by one thread. Pixels past the last are never stored.
  const auto load = [&](int m, int slot) {
    const PixelPlace first = FirstPixel(p, m);
    ArriveExpecting(full(slot), slot_bytes);
    for (int k = 0; k < p.k_tiles; ++k) {
      PixelCopy(slots + slot * slot_bytes + k * kBytesA, x_map, k * kRowBytes, first, 0, 0, full(slot));
    }
  };

  const auto load_residuals = [&](int m, int buffer) {
    ArriveExpecting(residuals_full(buffer), kBytesY);
    CodesCopy(codes + buffer * kBytesY, residual_map, at.n0, m, residuals_full(buffer));
  };

  if (thread == kPixelThread) {
    for (int slot = 0; slot < p.stages; ++slot) InitBarrier(full(slot), 1);
    InitBarrier(weights_full, 1);
    for (int buffer = 0; buffer < 2; ++buffer) InitBarrier(residuals_full(buffer), 1);
    FenceBarrierInit();
    // The weights are this kernel's own: they may be fetched before the predecessor is done.
    ArriveExpecting(weights_full, p.k_tiles * kBytesB);
    for (int k = 0; k < p.k_tiles; ++k)
      BulkCopy(weights + k * kBytesB, at.Weights(p, k), kBytesB, weights_full);
    WaitForPredecessors();
    for (int slot = 0, m = at.m0; slot < p.stages && m < p.m; ++slot, m += step) load(m, slot);
  }
  state.template FetchConstants<kThreads>(p, at, thread);
  CommitCopies();
  WaitForPredecessors();
  __syncthreads();
  WaitBarrier(weights_full, 0);

  if (thread == kCodeThread && p.epilogue.has_residual) load_residuals(at.m0, 0);
  WaitForCopies<0>();
  SyncThreads<kThreads>();  // all constants are there

  const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 4;
  const int swizzle = CodesSwizzle<kTileN>(row);
  int slot = 0, buffer = 0;
  uint32_t parity = 0, buffer_parity = 0;
#pragma unroll 1
  for (; at.m0 < p.m; at.m0 += step) {
    const bool last = at.m0 + step >= p.m;
    if (last) LetSuccessorsStart();
    int sums[kTileN / 2];
    BeginWithBias(state, column, sums);
    WaitBarrier(full(slot), parity);
    const uint32_t tile = slots + slot * slot_bytes;
#pragma unroll 1
    for (int k = 0; k < p.k_tiles; ++k) {
      const uint64_t a = MatrixDescriptor(tile + k * kBytesA), b = MatrixDescriptor(weights + k * kBytesB);
      HoldRegisters(sums);
      WgmmaFence();
      Wgmma<kTileN, kSigned>::Multiply(sums, a, b);
      Wgmma<kTileN, kSigned>::Multiply(sums, a + 2, b + 2);
      if (k * kRowBytes + 64 < p.k) {  // channels past the last read 0
        Wgmma<kTileN, kSigned>::Multiply(sums, a + 4, b + 4);
        Wgmma<kTileN, kSigned>::Multiply(sums, a + 6, b + 6);
      }
      WgmmaCommit();
    }
    WgmmaWait<0>();
    HoldRegisters(sums);
    if (thread == kCodeThread) {
      if (!p.epilogue.has_residual) {
        WaitForStoresToRead<1>();  // this tile's buffer is free
      } else if (!last) {
        WaitForStoresToRead<0>();  // the next tile's is
        load_residuals(at.m0 + step, buffer ^ 1);
      }
    }
    SyncThreads<kThreads>();  // all have read the tile
    if (thread == kPixelThread && at.m0 + p.stages * step < p.m) load(at.m0 + p.stages * step, slot);
    __syncwarp();
    if (p.epilogue.has_residual) WaitBarrier(residuals_full(buffer), buffer_parity);
    uint8_t* const rows = shared + p.staging_offset + buffer * kBytesY + row * kTileN;
    RequantizeFragments<kFinish, true, 8 * kTileN / 4>(
        p.epilogue, state, [&](const auto& f) { ForEachFour<kTileN>(sums, row, column, f); },
        [&](int, int at_column) { return reinterpret_cast<unsigned*>(rows + (at_column ^ swizzle)); });
    FenceAsyncProxy();
    SyncThreads<kThreads>();  // all codes are there
    if (thread == kCodeThread) StoreCodes(y_map, at.n0, at.m0, codes + buffer * kBytesY);
    buffer_parity ^= buffer;
    buffer ^= 1;
    if (++slot == p.stages) {
      slot = 0;
      parity ^= 1;
    }
  }
  if (thread == kCodeThread) WaitForStores();
#endif
}

template <int kTileN, bool kSigned, Finish kFinish>
cudaError_t LaunchWith(const ConvParams& p, const LaunchOptions& options) {
  constexpr auto kKernel = ConvResident<kTileN, kSigned, kFinish>;
  cudaError_t error = PrepareKernel<kKernel>(options.device);
  CUtensorMap x_map, residual_map, y_map;
  if (error == cudaSuccess) error = EncodePixels(p, kTileM, &x_map);
  if (error == cudaSuccess) error = EncodeCodes<kTileN>(p, p.y, &y_map);
  if (error == cudaSuccess) {
    error = EncodeCodes<kTileN>(p, p.epilogue.has_residual ? p.residual : p.y, &residual_map);
  }
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(p.persistent_blocks), static_cast<unsigned>(p.n_tiles));
  return options.queue.LaunchWith({static_cast<size_t>(p.shared_bytes), nullptr, 0}, kKernel, grid,
                                  dim3(kThreads), p, x_map, residual_map, y_map);
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
