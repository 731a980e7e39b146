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
#include "kernels/cuda/conv/halo.h"
#include "kernels/cuda/conv/halo_places.cuh"
#include "kernels/cuda/device/wgmma_s8.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kGroup = 128, kMaxSlots = 2;

// Warpgroups take tiles in turn, each rounds and stores by itself while others multiply.
template <int kTileN, int kSlab, bool kSigned, Finish kFinish>
__global__ void __launch_bounds__(MaxHaloTiles(kTileN) * kGroup + 32, 1)
    ConvHalo(const __grid_constant__ ConvParams p, const __grid_constant__ HaloParams h,
             const __grid_constant__ CUtensorMap map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kBytesB = kTileN * kRowBytes, kSteps = kRowBytes / kSlab;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ BlockState<kTileN> state;
  __shared__ __align__(8) uint64_t barriers[kMaxHaloWeights + kMaxSlots * (kMaxHaloRows + 1)];

  // From one lane: equal in all of a warp, so that addresses are computed once for all.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), group = warp / 4;
  const int warps = static_cast<int>(blockDim.x) / 32, groups = warps / 4;
  const int thread = static_cast<int>(threadIdx.x) % kGroup, lane = thread % 32;
  // Swizzled tiles start at multiples of 1024 bytes (SharedBytes has room for that).
  const uint32_t weights = (SharedAddress(unaligned) + 1023) & ~1023u;
  uint8_t* const shared = unaligned + (weights - SharedAddress(unaligned));
  const uint32_t slots = weights + p.k_tiles * kBytesB;
  const int slot_bytes = h.slabs * h.plane_bytes;
  const uint32_t barriers_at = SharedAddress(barriers);
  const auto weights_full = [&](int k) { return barriers_at + k * 8; };
  const auto row_full = [&](int slot, int row) {
    return barriers_at + (kMaxHaloWeights + slot * kMaxHaloRows + row) * 8;
  };
  const auto empty = [&](int slot) {
    return barriers_at + (kMaxHaloWeights + kMaxSlots * kMaxHaloRows + slot) * 8;
  };
  const TilePosition at = TilePosition::Of<64, kTileN>(p);
  // This block's tiles: as many as the others have, or one more.
  const int block = static_cast<int>(blockIdx.x), first = block * h.block_tiles + min(block, h.longer_blocks),
            last = first + h.block_tiles + (block < h.longer_blocks ? 1 : 0);
  const int patches = (last - first + groups - 1) / groups;
  const auto first_line = [&](int patch) { return Divide((first + patch * groups) * 64, h.by_pitch); };

  // Every `step`th row of a patch from `row` on, by one thread.
  const auto load = [&](int patch, int slot, int row, int step) {
    const int to = min(first + (patch + 1) * groups, last), line0 = first_line(patch);
    const int lines = Divide(to * 64 - 1 + h.reach, h.by_pitch) - line0 + 1;
#pragma unroll 1
    for (; row < h.patch_rows; row += step) {
      const uint32_t barrier = row_full(slot, row);
      ArriveExpecting(barrier, row < lines ? h.slabs * h.pitch * kSlab : 0);
      if (row >= lines) continue;
      const int line = line0 + row, image = Divide(line, h.by_rows), y = line - image * h.image_rows;
      const uint32_t target = slots + slot * slot_bytes + row * h.pitch * kSlab;
#pragma unroll 1
      for (int slab = 0; slab < h.slabs; ++slab) {
        RowCopy(target + slab * h.plane_bytes, map, slab * kSlab, -p.pad_left, y - p.pad_top, image, barrier);
      }
    }
  };

  if (group == groups - 1) state.template FetchConstants<kGroup>(p, at, thread);
  CommitCopies();
  // The last warp fetches weights, this kernel's own, before the predecessor is done; the others the first
  // patches. The two go side by side where there is nothing to wait for.
  if (group == groups) {
    if (lane == 0) {
      for (int k = 0; k < p.k_tiles; ++k) InitBarrier(weights_full(k), 1);
      // Every warp is done with every tile of a patch.
      for (int slot = 0; slot < p.stages; ++slot) InitBarrier(empty(slot), 4 * groups);
      FenceBarrierInit();
      for (int k = 0; k < p.k_tiles; ++k) {
        ArriveExpecting(weights_full(k), kBytesB);
        BulkCopy(weights + k * kBytesB, at.Weights(p, k), kBytesB, weights_full(k));
      }
    }
  } else if (lane == 0) {
    for (int slot = 0; slot < p.stages; ++slot) {
      for (int row = warp; row < h.patch_rows; row += warps - 1) InitBarrier(row_full(slot, row), 1);
    }
    FenceBarrierInit();
    if (warp == 0) PrefetchMap(map);
    WaitForPredecessors();
    for (int slot = 0; slot < min(p.stages, patches); ++slot) load(slot, slot, warp, warps - 1);
  }
  __syncwarp();
  WaitForCopies<0>();
  WaitForPredecessors();
  __syncthreads();

  if (group == groups) {  // the last warp fetches further patches
    int slot = 0;
    uint32_t parity = 0;
    for (int patch = p.stages; patch < patches; ++patch) {
      WaitBarrier(empty(slot), parity);
      load(patch, slot, lane, 32);
      __syncwarp();
      if (++slot == p.stages) {
        slot = 0;
        parity ^= 1;
      }
    }
    return;
  }
  constexpr int kStride = kTileN + 16;
  uint8_t* const area = shared + group * 64 * kStride;
  uint8_t* const codes = area + p.staging_offset;
  const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 4;
  int slot = 0, weights_ready = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int patch = 0, tile = first + group; tile < last; ++patch, tile += groups) {
    const PixelsOfPlaces pixel_of{p, h, tile * 64};
    const int line0 = first_line(patch), end = Divide(tile * 64 + 63 + h.reach, h.by_pitch) - line0;
#pragma unroll 1
    for (int i = 0; i <= end; ++i) WaitBarrier(row_full(slot, i), parity);

    int sums[kTileN / 2];
    BeginWithBias(state, column, sums);
    const uint32_t source = MatrixPart(slots + slot * slot_bytes + (tile * 64 - line0 * h.pitch) * kSlab);
    uint32_t b = MatrixPart(weights);
    HoldRegisters(sums);
#pragma unroll 1
    for (int k = 0; k < p.k_tiles; ++k, b += kBytesB / 16) {
      if (k == weights_ready) {
        WaitBarrier(weights_full(k), 0);
        ++weights_ready;
      }
#pragma unroll
      for (int part = 0; part < kSteps; ++part) {
        if (part > 0 && k * kSteps + part >= h.steps) break;  // weights past the last tap
        WgmmaFence();
        const uint32_t a = source + h.step[k * kSteps + part];
#pragma unroll
        for (int i = 0; i < kSlab / 32; ++i) {
          Wgmma<kTileN, kSigned>::Multiply(sums, SlabDescriptor<kSlab>(a + 2 * i),
                                           SlabDescriptor<kRowBytes>(b + part * (kSlab / 16) + 2 * i));
        }
      }
    }
    WgmmaCommit();
    if (patch + 1 >= patches) LetSuccessorsStart();
    SyncThreads<kGroup>(group + 1);  // the last tile's codes are out of the way
    FetchResiduals<64, kTileN, kGroup>(p, at, area, thread, pixel_of);
    CommitCopies();
    WgmmaWait<0>();
    HoldRegisters(sums);
    if (patch + p.stages < patches) {
      // No phase of a barrier passes unseen.
#pragma unroll 1
      for (int i = end + 1; i < h.patch_rows; ++i) WaitBarrier(row_full(slot, i), parity);
      __syncwarp();
      if (lane == 0) Arrive(empty(slot));
    }
    if (p.epilogue.has_residual) {
      WaitForCopies<0>();
      SyncThreads<kGroup>(group + 1);
    }
    RequantizeFragments<kFinish, true, 8 * kStride / 4>(
        p.epilogue, state, [&](const auto& f) { ForEachFour<kTileN>(sums, row, column, f); },
        [&](int at_row, int at_column) {
          return reinterpret_cast<unsigned*>(codes + at_row * kStride + at_column);
        });
    SyncThreads<kGroup>(group + 1);
    Chunks<64, kTileN, kGroup, PixelsOfPlaces>{p, at, pixel_of, thread}.ForEach(
        [&](int offset, unsigned index) {
          *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.y) + index) =
              *reinterpret_cast<const uint4*>(codes + offset);
        });
    if (++slot == p.stages) {
      slot = 0;
      parity ^= 1;
    }
  }
#endif
}

template <int kTileN, int kSlab, bool kSigned, Finish kFinish>
cudaError_t LaunchWith(const ConvParams& p, const HaloParams& h, const ConvConfig& config,
                       const LaunchOptions& options) {
  constexpr auto kKernel = ConvHalo<kTileN, kSlab, kSigned, kFinish>;
  cudaError_t error = PrepareKernel<kKernel>(options.device);
  CUtensorMap map;
  if (error == cudaSuccess) error = EncodeRows(p, h, &map);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(p.persistent_blocks), static_cast<unsigned>(p.n_tiles));
  return options.queue.LaunchWith({static_cast<size_t>(p.shared_bytes), nullptr, 0}, kKernel, grid,
                                  dim3(static_cast<unsigned>(config.tile_m / 64 * kGroup + 32)), p, h, map);
}

template <int kTileN, int kSlab>
cudaError_t LaunchSlab(const ConvParams& p, const HaloParams& h, const ConvConfig& config,
                       const LaunchOptions& options) {
  return WithFinish<false>(FinishOf(p.epilogue), options.x_signed, [&]<bool kSigned, Finish kFinish>() {
    return LaunchWith<kTileN, kSlab, kSigned, kFinish>(p, h, config, options);
  });
}

}  // namespace

cudaError_t LaunchHalo(const ConvParams& p, const HaloParams& h, const ConvConfig& config,
                       const LaunchOptions& options) {
  if (p.stages < 1 || p.stages > kMaxSlots || h.patch_rows > kMaxHaloRows || p.k_tiles > kMaxHaloWeights ||
      config.tile_m / 64 > MaxHaloTiles(config.tile_n)) {
    return cudaErrorInvalidValue;
  }
  const bool wide = h.slab == 128;
  if (config.tile_n == 32) {
    return wide ? LaunchSlab<32, 128>(p, h, config, options) : LaunchSlab<32, 64>(p, h, config, options);
  }
  if (config.tile_n == 64) {
    return wide ? LaunchSlab<64, 128>(p, h, config, options) : LaunchSlab<64, 64>(p, h, config, options);
  }
  return wide ? LaunchSlab<128, 128>(p, h, config, options) : LaunchSlab<128, 64>(p, h, config, options);
}

}  // namespace lowbit::cuda
