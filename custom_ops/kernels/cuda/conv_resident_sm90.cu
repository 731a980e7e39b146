// 1x1 convolutions of many pixels on wgmma, for Hopper (sm_90a): a block keeps its channels' weights in
// shared memory and stays for many tiles of 64 pixels, which the tensor memory accelerator fetches while the
// block finishes earlier ones. Setting a tile up costs one thread a few instructions; several blocks share a
// multiprocessor, so that one multiplies while others round and store.
#include <cuda.h>

#include <algorithm>

#include "kernels/cuda/conv_tile.cuh"
#include "kernels/cuda/heuristic.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/wgmma_s8.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 128, kTileM = 64, kMaxSlots = 4;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A box of `map`: 64 pixels from (w, h, n) on, 128 channels from c on.
__device__ __forceinline__ void PixelCopy(uint32_t shared, const CUtensorMap& map, int c, int w, int h, int n,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, "
      "%5, %6}], [%2], {%7, %7};" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"(static_cast<uint16_t>(0))
      : "memory");
}
#endif

template <int kTileN, bool kSigned>
__global__ void __launch_bounds__(kThreads, 4)
    ConvResident(const __grid_constant__ ConvParams p, const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kBytesA = kTileM * kRowBytes, kBytesB = kTileN * kRowBytes;
  extern __shared__ uint8_t unaligned[];
  __shared__ BlockState<kTileN> state;
  __shared__ __align__(8) uint64_t barriers[kMaxSlots + 1];

  const int thread = static_cast<int>(threadIdx.x);
  // Swizzled tiles start at multiples of 1024 bytes (SharedBytes has room for that).
  const uint32_t weights = (SharedAddress(unaligned) + 1023) & ~1023u;
  uint8_t* const shared = unaligned + (weights - SharedAddress(unaligned));
  const int slot_bytes = p.k_tiles * kBytesA;
  const uint32_t slots = weights + p.k_tiles * kBytesB;
  const uint32_t barriers_at = SharedAddress(barriers), weights_full = barriers_at + kMaxSlots * 8;
  const auto full = [&](int slot) { return barriers_at + slot * 8; };
  TilePosition at = TilePosition::Of<kTileM, kTileN>(p);
  const int step = static_cast<int>(gridDim.x) * kTileM;

  // The tile whose first pixel is m, by one thread. Pixels past the last are never stored.
  const auto load = [&](int m, int slot) {
    int n = 0, h = 0, w = m;
    if (!p.flat) {
      n = Divide(m, p.by_image);
      const int rest = m - n * static_cast<int>(p.by_image.divisor), oy = Divide(rest, p.by_row);
      h = oy * p.stride_h;
      w = (rest - oy * static_cast<int>(p.by_row.divisor)) * p.stride_w;
    }
    ArriveExpecting(full(slot), slot_bytes);
    for (int k = 0; k < p.k_tiles; ++k) {
      PixelCopy(slots + slot * slot_bytes + k * kBytesA, map, k * kRowBytes, w, h, n, full(slot));
    }
  };

  LetSuccessorsStart();
  if (thread == 0) {
    for (int slot = 0; slot < p.stages; ++slot) InitBarrier(full(slot), 1);
    InitBarrier(weights_full, 1);
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

  const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 4;
  int slot = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (; at.m0 < p.m; at.m0 += step) {
    const PixelsInOrder pixel_of{at.m0, p.m};
    if (p.epilogue.has_residual) {
      SyncThreads<kThreads>();  // the last tile's codes are out of the way
      FetchResiduals<kTileM, kTileN, kThreads>(p, at, shared, thread, pixel_of);
      CommitCopies();
    }
    int sums[kTileN / 2] = {};
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
    WaitForCopies<0>();
    SyncThreads<kThreads>();  // all have read the tile
    if (thread == 0 && at.m0 + p.stages * step < p.m) load(at.m0 + p.stages * step, slot);
    __syncwarp();
    FinishInRegisters<kTileM, kTileN, kThreads>(
        p, at, shared, state,
        [&](const auto& f) {
#pragma unroll
          for (int j = 0; j < kTileN / 16; ++j) {
            const int* const v = sums + 8 * j;
            f(row, column + j * 16, make_int4(v[0], v[1], v[4], v[5]), make_int4(v[2], v[3], v[6], v[7]));
          }
        },
        pixel_of);
    if (++slot == p.stages) {
      slot = 0;
      parity ^= 1;
    }
  }
#endif
}

using EncodeIm2col = decltype(&cuTensorMapEncodeIm2col);

// The driver's function, found at run time: the library must load where there is no driver.
EncodeIm2col EncodeFunction() {
  static const auto function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeIm2col", &entry, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? entry : nullptr;
  }();
  return reinterpret_cast<EncodeIm2col>(function);
}

// The input in boxes of 64 pixels and 128 channels. They walk along the pixels that outputs read, in steps of
// the strides, from image to image; where those are all pixels, along one long row.
cudaError_t EncodeMap(const ConvParams& p, CUtensorMap* map) {
  const auto encode = EncodeFunction();
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto wide = [](int v) { return static_cast<cuuint64_t>(v); };
  const int in_w = p.flat ? p.m : p.in_w, in_h = p.flat ? 1 : p.in_h, out_w = p.flat ? p.m : p.out_w,
            out_h = p.flat ? 1 : p.out_h;
  const int batch = p.flat ? 1 : p.m / (p.out_h * p.out_w);
  const cuuint64_t sizes[] = {wide(p.pixel_bytes), wide(in_w), wide(in_h), wide(batch)};
  const cuuint64_t strides[] = {wide(p.pixel_bytes), wide(p.pixel_bytes) * wide(in_w),
                                wide(p.pixel_bytes) * wide(in_w) * wide(in_h)};
  const int lower[] = {0, 0};
  const int upper[] = {(out_w - 1) * p.stride_w - in_w + 1, (out_h - 1) * p.stride_h - in_h + 1};
  const cuuint32_t steps[] = {1, static_cast<cuuint32_t>(p.stride_w), static_cast<cuuint32_t>(p.stride_h), 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, const_cast<uint8_t*>(p.x), sizes, strides, lower, upper,
             kRowBytes, kTileM, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <int kTileN, bool kSigned>
cudaError_t LaunchWith(const ConvParams& p, const LaunchOptions& options) {
  constexpr auto kKernel = ConvResident<kTileN, kSigned>;
  cudaError_t error = PrepareKernel<kKernel>(options.device);
  CUtensorMap map;
  if (error == cudaSuccess) error = EncodeMap(p, &map);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(p.persistent_blocks), static_cast<unsigned>(p.n_tiles));
  return options.queue.LaunchWith({static_cast<size_t>(p.shared_bytes), nullptr, 0}, kKernel, grid,
                                  dim3(kThreads), p, map);
}

}  // namespace

cudaError_t LaunchResident(const ConvParams& p, const ConvConfig& config, const LaunchOptions& options) {
  if (p.stages < 1 || p.stages > kMaxSlots) return cudaErrorInvalidValue;
  if (config.tile_n == 64) {
    return options.x_signed ? LaunchWith<64, true>(p, options) : LaunchWith<64, false>(p, options);
  }
  return options.x_signed ? LaunchWith<128, true>(p, options) : LaunchWith<128, false>(p, options);
}

}  // namespace lowbit::cuda
