// 1x1 convolutions on wgmma, for Hopper (sm_90a): the warpgroups of a block share its channels' weights, each
// finishes tiles of 64 pixels on its own. Tiles stand in one line, column of channels by column; a block has
// as many neighbours of them as the others or one more, so that all multiprocessors end together, and the
// weights of a second column where its tiles reach into one. The tensor memory accelerator fetches pixels and
// residuals of many tiles ahead, as far as slots reach, and stores codes, which take the residuals' place.
//
//   slot   pixels            | residuals, then codes
//   free   once multiplied   | once the store has read them
//
// Every warpgroup has slots of its own, in turn, so that it sees all phases of their barriers: one that saw
// only some could take a phase for the one two later.
#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/conv/pixel_boxes.cuh"
#include "kernels/cuda/conv/team.h"
#include "kernels/cuda/device/wgmma_s8.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kGroup = 128, kTileM = 64;
constexpr int kConstantsBarrier = 15;  // behind those of the warpgroups

// Behind the warpgroups two warps fetch: pixels; residuals.
template <int kTileN, bool kSigned, Finish kFinish>
__global__ void __launch_bounds__(MaxTeamGroups(kTileN) * kGroup + 64, 1)
    ConvTeam(const __grid_constant__ ConvParams p, const __grid_constant__ CUtensorMap x_map,
             const __grid_constant__ CUtensorMap residual_map, const __grid_constant__ CUtensorMap y_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kBytesA = kTileM * kRowBytes, kBytesB = kTileN * kRowBytes, kBytesY = kTileM * kTileN;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ BlockState<kTileN> states[2];  // of the two columns
  __shared__ __align__(8) uint64_t barriers[4 * kMaxTeamSlots + 2];

  // From one lane: equal in all of a warp.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), group = warp / 4;
  const int groups = static_cast<int>(blockDim.x) / kGroup;
  const int thread = static_cast<int>(threadIdx.x) % kGroup, lane = thread % 32;
  // Swizzled tiles start at multiples of 1024 bytes (SharedBytes has room for that).
  const uint32_t weights = (SharedAddress(unaligned) + 1023) & ~1023u;
  uint8_t* const shared = unaligned + (weights - SharedAddress(unaligned));
  const int weight_bytes = p.k_tiles * kBytesB, pixel_bytes = p.k_tiles * kBytesA, slots = p.stages;
  const uint32_t pixels = weights + p.weight_columns * weight_bytes, codes = weights + p.staging_offset;
  const uint32_t barriers_at = SharedAddress(barriers);
  const auto pixels_full = [&](int slot) { return barriers_at + slot * 8; };
  const auto pixels_free = [&](int slot) { return barriers_at + (kMaxTeamSlots + slot) * 8; };
  const auto residuals_full = [&](int slot) { return barriers_at + (2 * kMaxTeamSlots + slot) * 8; };
  const auto codes_free = [&](int slot) { return barriers_at + (3 * kMaxTeamSlots + slot) * 8; };
  const auto weights_full = [&](int column) { return barriers_at + (4 * kMaxTeamSlots + column) * 8; };

  // This block's tiles.
  const int block = static_cast<int>(blockIdx.x), first = block * p.block_tiles + min(block, p.longer_blocks),
            last = first + p.block_tiles + (block < p.longer_blocks ? 1 : 0);
  const int column0 = Divide(first, p.by_column), columns = Divide(last - 1, p.by_column) - column0 + 1;
  const int m_tiles = static_cast<int>(p.by_column.divisor);
  TilePosition at = {};
  const auto go_to = [&](int tile) {
    const int column = Divide(tile, p.by_column);
    at.m0 = (tile - column * m_tiles) * kTileM;
    at.n0 = column * kTileN;
    return column - column0;
  };

  const bool fetches_pixels = warp == groups * 4 && lane == 0,
             fetches_residuals = warp == groups * 4 + 1 && lane == 0;
  if (lane == 0) {  // every warp makes a few barriers: each takes a while
    const int warps = groups * 4 + 2;
    for (int slot = warp; slot < slots; slot += warps) {
      InitBarrier(pixels_full(slot), 1);
      InitBarrier(pixels_free(slot), 4);  // every warp of a group
      InitBarrier(residuals_full(slot), 1);
      InitBarrier(codes_free(slot), 1);
    }
    if (warps - 1 - warp < columns) InitBarrier(weights_full(warps - 1 - warp), 1);
    FenceBarrierInit();
  }
  if (fetches_pixels) {
    PrefetchMap(x_map);
  } else if (fetches_residuals) {
    PrefetchMap(residual_map);
    PrefetchMap(y_map);
  } else if (group < columns) {  // no fewer groups than columns
    at.n0 = (column0 + group) * kTileN;
    states[group].template FetchConstants<kGroup>(p, at, thread);
    CommitCopies();
  }
  __syncthreads();  // all barriers are there
  if (fetches_residuals) {
    // The weights are this kernel's own: they may be fetched before the predecessor is done.
    for (int column = 0; column < columns; ++column) {
      at.n0 = (column0 + column) * kTileN;
      ArriveExpecting(weights_full(column), weight_bytes);
      for (int k = 0; k < p.k_tiles; ++k) {
        BulkCopy(weights + column * weight_bytes + k * kBytesB, at.Weights(p, k), kBytesB,
                 weights_full(column));
      }
    }
  }
  WaitForPredecessors();

  // What belongs to the tiles of the line, into the slots in turn.
  const auto fetch = [&](const auto& free, const auto& load) {
    int slot = 0;
    uint32_t parity = 1;  // of a barrier that has seen nothing
#pragma unroll 1
    for (int tile = first; tile < last; ++tile) {
      WaitBarrier(free(slot), parity);
      go_to(tile);
      load(slot);
      if (++slot == slots) {
        slot = 0;
        parity ^= 1;
      }
    }
  };
  if (warp >= groups * 4) {
    if (fetches_pixels) {
      fetch(pixels_free, [&](int slot) {
        const PixelPlace place = FirstPixel(p, at.m0);
        const uint32_t target = pixels + slot * pixel_bytes;
        ArriveExpecting(pixels_full(slot), pixel_bytes);
        for (int k = 0; k < p.k_tiles; ++k)
          PixelCopy(target + k * kBytesA, x_map, k * kRowBytes, place, 0, 0, pixels_full(slot));
      });
    } else if (fetches_residuals && p.epilogue.has_residual) {
      fetch(codes_free, [&](int slot) {
        ArriveExpecting(residuals_full(slot), kBytesY);
        CodesCopy(codes + slot * kBytesY, residual_map, at.n0, at.m0, residuals_full(slot));
      });
    }
    return;
  }
  WaitForCopies<0>();
  SyncThreads(kConstantsBarrier, groups * kGroup);

  const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 4;
  const int swizzle = CodesSwizzle<kTileN>(row);
  int slot = group, stored = -1;
  uint32_t parity = 0;
#pragma unroll 1
  for (int tile = first + group; tile < last; tile += groups) {
    const int which = go_to(tile);
    const BlockState<kTileN>& state = states[which];
    if (tile + groups >= last) LetSuccessorsStart();
    int sums[kTileN / 2];
    BeginWithBias(state, column, sums);
    WaitBarrier(weights_full(which), 0);
    WaitBarrier(pixels_full(slot), parity);
    const uint32_t a_tiles = pixels + slot * pixel_bytes, b_tiles = weights + which * weight_bytes;
#pragma unroll 1
    for (int k = 0; k < p.k_tiles; ++k) {
      const uint64_t a = MatrixDescriptor(a_tiles + k * kBytesA), b = MatrixDescriptor(b_tiles + k * kBytesB);
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
    // Only slots that will be filled again: nobody waits for the others.
    if (lane == 0 && tile + slots < last) Arrive(pixels_free(slot));
    if (thread == 0 && stored >= 0) {
      WaitForStoresToRead<0>();
      if (tile - groups + slots < last) Arrive(codes_free(stored));
    }
    __syncwarp();
    if (p.epilogue.has_residual) {
      WaitBarrier(residuals_full(slot), parity);
    } else {
      WaitBarrier(codes_free(slot), parity ^ 1);
    }
    uint8_t* const rows = shared + p.staging_offset + slot * kBytesY + row * kTileN;
    RequantizeFragments<kFinish, true, 8 * kTileN / 4>(
        p.epilogue, state, [&](const auto& f) { ForEachFour<kTileN>(sums, row, column, f); },
        [&](int, int at_column) { return reinterpret_cast<unsigned*>(rows + (at_column ^ swizzle)); });
    FenceAsyncProxy();
    SyncThreads<kGroup>(group + 1);  // all codes are there
    if (thread == 0) StoreCodes(y_map, at.n0, at.m0, codes + slot * kBytesY);
    stored = slot;
    slot += groups;
    if (slot >= slots) {
      slot -= slots;
      parity ^= 1;
    }
  }
  if (thread == 0) WaitForStores();
#endif
}

template <int kTileN, bool kSigned, Finish kFinish>
cudaError_t LaunchWith(const ConvParams& p, const ConvConfig& config, const LaunchOptions& options) {
  constexpr auto kKernel = ConvTeam<kTileN, kSigned, kFinish>;
  cudaError_t error = PrepareKernel<kKernel>(options.device);
  CUtensorMap x_map, residual_map, y_map;
  if (error == cudaSuccess) error = EncodePixels(p, kTileM, &x_map);
  if (error == cudaSuccess) error = EncodeCodes<kTileN>(p, p.y, &y_map);
  if (error == cudaSuccess) {
    error = EncodeCodes<kTileN>(p, p.epilogue.has_residual ? p.residual : p.y, &residual_map);
  }
  if (error != cudaSuccess) return error;
  const dim3 threads(static_cast<unsigned>(config.tile_m / kTileM * kGroup + 64));
  return options.queue.LaunchWith({static_cast<size_t>(p.shared_bytes), nullptr, 0}, kKernel,
                                  dim3(static_cast<unsigned>(p.persistent_blocks)), threads, p, x_map,
                                  residual_map, y_map);
}

}  // namespace

cudaError_t LaunchTeam(const ConvParams& p, const ConvConfig& config, const LaunchOptions& options) {
  const int groups = config.tile_m / kTileM;
  if (groups < p.weight_columns || groups > MaxTeamGroups(config.tile_n) || p.stages < 1 ||
      p.stages % groups != 0 || p.stages > kMaxTeamSlots) {
    return cudaErrorInvalidValue;
  }
  return WithFinish<false>(FinishOf(p.epilogue), options.x_signed, [&]<bool kSigned, Finish kFinish>() {
    return config.tile_n == 64 ? LaunchWith<64, kSigned, kFinish>(p, config, options)
                               : LaunchWith<128, kSigned, kFinish>(p, config, options);
  });
}

}  // namespace lowbit::cuda
