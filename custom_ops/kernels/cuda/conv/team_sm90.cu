// 1x1 convolutions on wgmma, for Hopper (sm_90a): the warpgroups of a block share its channels' weights, each
// finishes tiles of 64 pixels on its own. Tiles stand in lines, column of channels by column or pixel by pixel
// (TeamParams); a block has as many neighbours of them as the others or one more, so that all multiprocessors
// end together, and the weights of a second column where its tiles reach into one. The tensor memory
// accelerator fetches pixels and residuals of many tiles ahead, as far as slots reach, and stores codes, which
// take the residuals' place.
//
//   slot   pixels            | residuals, then codes
//   free   once multiplied   | once the store has read them
//
// Every warpgroup has slots of its own, in turn, so that it sees all phases of their barriers: one that saw
// only some could take a phase for the one two later.
#include "kernels/cuda/conv/pixel_boxes.cuh"
#include "kernels/cuda/conv/team.h"

namespace lowbit::cuda {
namespace {

constexpr int kTileM = 64;
constexpr int kConstantsBarrier = 15;  // behind those of the warpgroups

struct StreamMaps {
  CUtensorMap x, residual, y;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Behind the warpgroups two warps fetch: pixels; residuals.
template <int kTileN, bool kSigned, Finish kFinish>
struct Team {
  static constexpr int kSums = kTileN / 2, kBytesA = kTileM * kRowBytes, kBytesB = kTileN * kRowBytes,
                       kBytesY = kTileM * kTileN;
  struct Static {
    BlockState<kTileN> states[kTeamColumns];
    alignas(8) uint64_t barriers[4 * kMaxTeamSlots + kTeamColumns];
  };

  const TeamParams& p;
  const StreamMaps& maps;
  Static& fixed;
  SharedTiles weights;

  ThreadPlace own = {};
  const int groups = static_cast<int>(blockDim.x) / kWarpgroup, slots = p.stages;
  const int weight_bytes = p.k_tiles * kBytesB, pixel_bytes = p.k_tiles * kBytesA;
  const uint32_t pixels = weights.at + p.pixels_offset, codes = weights.at + p.staging_offset;
  const uint32_t barriers = SharedAddress(fixed.barriers);
  // A slot's pixels; its residuals, then codes.
  const Ring<kMaxTeamSlots> pixel_ring = {barriers, slots},
                            code_ring = {barriers + 2 * kMaxTeamSlots * 8, slots};
  const Barriers weights_full = {barriers + 4 * kMaxTeamSlots * 8};

  // This block's tiles, the columns of channels they lie in, and where the thread is.
  const TileRange tiles = {p.shares, static_cast<int>(blockIdx.x)};
  const int column0 =
                p.by_pixel ? static_cast<int>(blockIdx.y) * kTeamColumns : Divide(tiles.first, p.by_row),
            columns = p.by_pixel ? kTeamColumns : Divide(tiles.last - 1, p.by_row) - column0 + 1;
  TilePosition at = {};
  int tile = tiles.first + own.group, column = 0, stored = -1;
  RingPlace place = {own.group};
  OwnCodes<kTileN> mine{own.thread};

  __device__ __forceinline__ bool FetchesPixels() const { return own.warp == groups * 4 && own.lane == 0; }
  __device__ __forceinline__ bool FetchesResiduals() const {
    return own.warp == groups * 4 + 1 && own.lane == 0;
  }
  // Returns which of the block's columns the tile lies in.
  __device__ __forceinline__ int GoTo(int to) {
    const int row = Divide(to, p.by_row), in_row = to - row * static_cast<int>(p.by_row.divisor);
    const int column = p.by_pixel ? in_row : row - column0;
    at.m0 = (p.by_pixel ? row : in_row) * kTileM;
    at.n0 = (column0 + column) * kTileN;
    return column;
  }

  __device__ __forceinline__ void SetUp() {
    if (own.lane == 0) {  // every warp makes a few barriers: each takes a while
      const int warps = groups * 4 + 2;
      for (int slot = own.warp; slot < slots; slot += warps) {
        pixel_ring.MakeBarriers(slot, 1, 4);  // every warp of a group
        code_ring.MakeBarriers(slot, 1, 1);
      }
      if (warps - 1 - own.warp < columns) InitBarrier(weights_full(warps - 1 - own.warp), 1);
      FenceBarrierInit();
    }
    if (FetchesPixels()) {
      PrefetchMap(maps.x);
    } else if (FetchesResiduals()) {
      PrefetchMap(maps.residual);
      PrefetchMap(maps.y);
    } else if (own.group < columns) {  // no fewer groups than columns
      at.n0 = (column0 + own.group) * kTileN;
      fixed.states[own.group].template FetchConstants<kWarpgroup>(p, at, own.thread);
      CommitCopies();
    }
  }

  __device__ __forceinline__ bool Loads() const { return own.warp >= groups * 4; }
  __device__ __forceinline__ void Load() {
    if (FetchesResiduals()) {
      for (int column = 0; column < columns; ++column) {
        at.n0 = (column0 + column) * kTileN;
        at.template FetchWeights<kTileN>(p, weights.at + column * weight_bytes, weights_full(column));
      }
    }
    WaitForPredecessors();
    const int count = tiles.last - tiles.first;
    if (FetchesPixels()) {
      pixel_ring.Fill(count, [&](int i, int slot) {
        GoTo(tiles.first + i);
        StreamCopy(pixels + slot * pixel_bytes, maps.x, p, at.m0, pixel_ring.full(slot));
      });
    } else if (FetchesResiduals() && p.epilogue.has_residual) {
      code_ring.Fill(count, [&](int i, int slot) {
        GoTo(tiles.first + i);
        ArriveExpecting(code_ring.full(slot), kBytesY);
        CodesCopy(codes + slot * kBytesY, maps.residual, at.n0, at.m0, code_ring.full(slot));
      });
    }
  }

  __device__ __forceinline__ void Begin() const {
    WaitForPredecessors();
    WaitForCopies<0>();
    SyncThreads(kConstantsBarrier, groups * kWarpgroup);
  }
  __device__ __forceinline__ bool HasTile() const { return tile < tiles.last; }
  __device__ __forceinline__ void Step() {
    stored = place.stage;
    place.Step(slots, groups);
    tile += groups;
  }

  __device__ __forceinline__ void Multiply(int (&sums)[kSums]) {
    column = GoTo(tile);
    if (tile + groups >= tiles.last) LetSuccessorsStart();
    BeginWithBias(fixed.states[column], mine.column, sums);
    WaitBarrier(weights_full(column), 0);
    WaitBarrier(pixel_ring.full(place.stage), place.parity);
    MultiplyTiles<Wgmma<kTileN, kSigned>, kBytesA, kBytesB>(
        pixels + place.stage * pixel_bytes, weights.at + column * weight_bytes, p.k_tiles, p.k, sums);
    // Only slots that will be filled again: nobody waits for the others.
    if (own.lane == 0 && tile + slots < tiles.last) Arrive(pixel_ring.empty(place.stage));
  }

  __device__ __forceinline__ void Finish(const int (&sums)[kSums]) {
    if (own.thread == 0 && stored >= 0) {
      WaitForStoresToRead<0>();
      if (tile - groups + slots < tiles.last) Arrive(code_ring.empty(stored));
    }
    __syncwarp();
    if (p.epilogue.has_residual) {
      WaitBarrier(code_ring.full(place.stage), place.parity);
    } else {
      WaitBarrier(code_ring.empty(place.stage), place.parity ^ 1);
    }
    const int box = place.stage * kBytesY;
    mine.template Round<kFinish>(p.epilogue, fixed.states[column], sums,
                                 weights.data + p.staging_offset + box);
    FenceAsyncProxy();
    SyncThreads<kWarpgroup>(own.group + 1);  // all codes are there
    if (own.thread == 0) StoreCodes(maps.y, at.n0, at.m0, codes + box);
  }

  __device__ __forceinline__ void End() const {
    if (own.thread == 0) WaitForStores();
  }
};
#endif

template <int kTileN, bool kSigned, Finish kFinish>
__global__ void __launch_bounds__(MaxTeamGroups(kTileN) * 128 + 64, 1)
    ConvTeam(const __grid_constant__ TeamParams p, const __grid_constant__ StreamMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = Team<kTileN, kSigned, kFinish>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{p, maps, fixed, SharedTiles(unaligned)});
#endif
}

}  // namespace

cudaError_t LaunchTeam(const TeamParams& p, const ConvConfig& config, const LaunchOptions& options) {
  const int groups = config.tile_m / kTileM;
  if (groups < kTeamColumns || groups > MaxTeamGroups(config.tile_n) || p.stages < 1 ||
      p.stages % groups != 0 || p.stages > kMaxTeamSlots) {
    return cudaErrorInvalidValue;
  }
  return WithFinish<false>(FinishOf(p.epilogue), options.x_signed, [&]<bool kSigned, Finish kFinish>() {
    return std::visit(
        [&](auto tile_n) {
          StreamMaps maps;
          const auto encode = [&](const void* codes, CUtensorMap* map) {
            return EncodeCodes<tile_n>(codes, p.m, p.n, map);
          };
          cudaError_t error = EncodePixels(p.x, p.m, p, 64, &maps.x);
          if (error == cudaSuccess) error = encode(p.y, &maps.y);
          if (error == cudaSuccess)
            error = encode(p.epilogue.has_residual ? p.residual : p.y, &maps.residual);
          if (error != cudaSuccess) return error;
          if constexpr (kFinish == Finish::kPlanesTail || kFinish == Finish::kBorderTail) {
            return cudaErrorInvalidValue;  // whole boxes of bytes are stored, and nothing lies outside of images
          } else if constexpr (HasInstance(IsSampled<kSigned, kFinish>(true))) {
            return LaunchKernel<ConvTeam<tile_n, kSigned, kFinish>>(
                options, {Dim(p.shares.blocks, p.lines), groups * kWarpgroup + 64, options.shared_bytes}, p,
                maps);
          } else {
            return cudaErrorInvalidValue;
          }
        },
        OneOf<64, 128>(config.tile_n));
  });
}

}  // namespace lowbit::cuda
