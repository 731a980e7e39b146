// 1x1 convolutions of many pixels on wgmma, for Hopper (sm_90a): a block keeps its channels' weights in
// shared memory and stays for many tiles of 64 pixels. The tensor memory accelerator fetches them, and
// residuals, while the block finishes earlier ones, and stores the codes; setting a tile up costs two threads
// a few instructions. Several blocks share a multiprocessor, so that one multiplies while others round.
//
// Codes take the place of their residuals, in one of two buffers:
//   tile i     products | residuals i there, codes i in their place | store i
//   tile i + 1 products, store i has read its buffer, fetch residuals i + 2 into it | ...
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
constexpr int kPixelThread = 0,
              kCodeThread = 32;  // which threads fetch pixels; fetch residuals and store codes

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

// A box of `map`: 64 pixels from m on, the channels of a tile from c on.
__device__ __forceinline__ void ResidualCopy(uint32_t shared, const CUtensorMap& map, int c, int m,
                                             uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c), "r"(m)
      : "memory");
}
__device__ __forceinline__ void StoreCodes(const CUtensorMap& map, int c, int m, uint32_t shared) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
               "r"(shared), "r"(c), "r"(m)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until at most kPending of this thread's stores have still to read shared memory.
template <int kPending>
__device__ __forceinline__ void WaitForStoresToRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until this thread's stores are done.
__device__ __forceinline__ void WaitForStores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#endif

template <int kTileN, bool kSigned>
__global__ void __launch_bounds__(kThreads, 4)
    ConvResident(const __grid_constant__ ConvParams p, const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap residual_map,
                 const __grid_constant__ CUtensorMap y_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kBytesA = kTileM * kRowBytes, kBytesB = kTileN * kRowBytes, kBytesY = kTileM * kTileN;
  extern __shared__ uint8_t unaligned[];
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
    int n = 0, h = 0, w = m;
    if (!p.flat) {
      n = Divide(m, p.by_image);
      const int rest = m - n * static_cast<int>(p.by_image.divisor), oy = Divide(rest, p.by_row);
      h = oy * p.stride_h;
      w = (rest - oy * static_cast<int>(p.by_row.divisor)) * p.stride_w;
    }
    ArriveExpecting(full(slot), slot_bytes);
    for (int k = 0; k < p.k_tiles; ++k) {
      PixelCopy(slots + slot * slot_bytes + k * kBytesA, x_map, k * kRowBytes, w, h, n, full(slot));
    }
  };

  const auto load_residuals = [&](int m, int buffer) {
    ArriveExpecting(residuals_full(buffer), kBytesY);
    ResidualCopy(codes + buffer * kBytesY, residual_map, at.n0, m, residuals_full(buffer));
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
  // Where a row's chunks of 16 bytes lie in a swizzled box: exchanged by the bits of the row, of its half
  // where two rows share 128 bytes.
  const int swizzle = (kTileN == 128 ? row % 8 : row / 2 % 4) * 16;
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
    RequantizeFragments<true, 8 * kTileN / 4>(
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

// The input in boxes of 64 pixels and 128 channels. They walk along the pixels that outputs read, in steps of
// the strides, from image to image; where those are all pixels, along one long row.
cudaError_t EncodePixels(const ConvParams& p, CUtensorMap* map) {
  static const auto encode =
      reinterpret_cast<decltype(&cuTensorMapEncodeIm2col)>(DriverFunction("cuTensorMapEncodeIm2col"));
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

// Codes of outputs in boxes of 64 pixels and kTileN channels. What lies past the last of either is neither
// read nor written.
template <int kTileN>
cudaError_t EncodeCodes(const ConvParams& p, const void* codes, CUtensorMap* map) {
  static const auto encode =
      reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(DriverFunction("cuTensorMapEncodeTiled"));
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(p.n), static_cast<cuuint64_t>(p.m)};
  const cuuint32_t box[] = {kTileN, kTileM}, steps[] = {1, 1};
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(codes), sizes,
                                 sizes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 kTileN == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <int kTileN, bool kSigned>
cudaError_t LaunchWith(const ConvParams& p, const LaunchOptions& options) {
  constexpr auto kKernel = ConvResident<kTileN, kSigned>;
  cudaError_t error = PrepareKernel<kKernel>(options.device);
  CUtensorMap x_map, residual_map, y_map;
  if (error == cudaSuccess) error = EncodePixels(p, &x_map);
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
  if (config.tile_n == 64) {
    return options.x_signed ? LaunchWith<64, true>(p, options) : LaunchWith<64, false>(p, options);
  }
  return options.x_signed ? LaunchWith<128, true>(p, options) : LaunchWith<128, false>(p, options);
}

}  // namespace lowbit::cuda
