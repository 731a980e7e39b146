// Two convolutions of as many outputs, the codes of the first one the residuals of the second, on wgmma for
// Hopper (sm_90a): a bottleneck's last convolution and that of its shortcut. The tensor between them never
// leaves the block: a thread finishes the same four outputs of both products, and finds the first's codes in
// the shared memory where the second's will stand.
//
//   stages    x1 k0 | x1 k1 | x2 k0 | x2 k1 | x1 k0 of the next tile | ...   fetched by one thread
//   sums      product 1     | product 2     |
//   codes       round into staging area | add there, store
//
// A ring of stages, each a tile of pixels (and of weights, where these do not stay in shared memory), runs
// through the tiles of both products, and of the block's next tile, without a pause. Several blocks share a
// multiprocessor, so that one multiplies while others round.
#include "kernels/cuda/conv/pixel_boxes.cuh"
#include "kernels/cuda/fused/residual_pair.h"

namespace lowbit::cuda {
namespace {

// How the first's sums are finished where the second's are so.
constexpr Finish FirstOf(Finish second) {
  if (second == Finish::kCappedTailOnLine) return Finish::kTail;
  if (second == Finish::kCappedLackingOnLine || second == Finish::kCappedInTail) return Finish::kLackingTail;
  if (second == Finish::kFloatsOnLine || second == Finish::kCappedOnLine) return Finish::kWordsMultiplied;
  return second;
}

struct PairMaps {
  CUtensorMap first, second, y;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Walks along the tiles of both products: which product, which of its tiles, which tap and channels that is.
struct ProductWalk {
  int product = 0, k = 0;
  TapWalk tap;

  __device__ __forceinline__ void Step(const BoxParams& first, const BoxParams& second) {
    const BoxParams& p = product == 0 ? first : second;
    if (++k == p.k_tiles) {
      *this = {1 - product};
    } else {
      tap.Step(p);
    }
  }
};

// Consumers first, a warpgroup for every 64 rows; then a warp whose first thread fetches. `keeps`: a block
// keeps its weights for all of its tiles, else they come with every tile. kFinish: of the second product
// (FirstOf).
template <int kTileM, int kTileN, bool kFirstSigned, bool kSecondSigned, Finish kFinish>
struct Pair {
  static constexpr int kSums = kTileN / 2, kConsumers = kTileM * 2, kBytesA = kTileM * kRowBytes,
                       kBytesB = kTileN * kRowBytes;
  static constexpr auto kFirst = FirstOf(kFinish);
  using StageRing = Ring<kMaxResidualPairStages>;
  struct Static {
    BlockState<kTileN> states[2];
    alignas(8) uint64_t barriers[StageRing::kBarriers + 1];
  };

  const ResidualPairParams& p;
  const PairMaps& maps;
  Static& fixed;
  SharedTiles weights;  // then the stages

  const BoxParams &first = p.first, &second = p.second;
  const bool keeps = p.keeps_weights;
  const int thread = static_cast<int>(threadIdx.x), group = thread / kWarpgroup;
  const int k_tiles = first.k_tiles + second.k_tiles, stage_bytes = kBytesA + (keeps ? 0 : kBytesB);
  const uint32_t stages = weights.at + (keeps ? k_tiles * kBytesB : 0);
  StageRing ring = {SharedAddress(fixed.barriers), second.stages};

  const TilePosition at = TilePosition::Of<kTileM, kTileN>(second);
  const int step = static_cast<int>(gridDim.x) * kTileM;
  int m = at.m0;
  RingPlace place = {};
  OwnCodes<kTileN> mine{thread % kWarpgroup};
  const int codes_at = p.staging_offset + group * 64 * kTileN;
  const bool stores = thread % kWarpgroup == 0;

  __device__ __forceinline__ uint32_t WeightsFull() const { return ring.barriers + StageRing::kBarriers * 8; }

  __device__ __forceinline__ void SetUp() {
    KeepInRegister(ring.barriers);
    if (thread >= ring.stages) return;
    ring.MakeBarriers(thread, 1, kConsumers / 32);
    if (thread == 0) InitBarrier(WeightsFull(), 1);
    FenceBarrierInit();
  }

  __device__ __forceinline__ void FetchWeights(const ProductWalk& walk, uint32_t target,
                                               uint32_t barrier) const {
    BulkCopy(target, at.Weights(walk.product == 0 ? first : second, walk.k), kBytesB, barrier);
  }
  __device__ __forceinline__ void Fetch() const {
    const int tiles = (second.m - at.m0 + step - 1) / step, count = tiles * k_tiles,
              ahead = keeps ? 0 : min(count, ring.stages);
    ProductWalk walk;
    if (keeps) {
      ArriveExpecting(WeightsFull(), k_tiles * kBytesB);
      for (int i = 0; i < k_tiles; ++i, walk.Step(first, second))
        FetchWeights(walk, weights.at + i * kBytesB, WeightsFull());
    }
    for (int i = 0; i < ahead; ++i, walk.Step(first, second)) {
      ArriveExpecting(ring.full(i), stage_bytes);
      FetchWeights(walk, stages + i * stage_bytes + kBytesA, ring.full(i));
    }
    WaitForPredecessors();
    walk = {};
    PixelPlace first_pixel = {}, second_pixel = {};
    int next = at.m0;
    ring.Fill(count, [&](int i, int stage) {
      const uint32_t target = stages + stage * stage_bytes, full = ring.full(stage);
      if (walk.product == 0 && walk.k == 0) {
        first_pixel = FirstPixel(first, next);
        second_pixel = FirstPixel(second, next);
        next += step;
      }
      if (i >= ahead) {
        ArriveExpecting(full, stage_bytes);
        if (!keeps) FetchWeights(walk, target + kBytesA, full);
      }
      if (walk.product == 0) {
        PixelCopy(target, maps.first, walk.tap.channel, first_pixel, walk.tap.dx, walk.tap.dy, full);
      } else {
        PixelCopy(target, maps.second, walk.tap.channel, second_pixel, walk.tap.dx, walk.tap.dy, full);
      }
      walk.Step(first, second);
    });
  }

  __device__ __forceinline__ bool Loads() const { return thread >= kConsumers; }
  __device__ __forceinline__ void Load() const {
    if (thread > kConsumers) return WaitForPredecessors();
    Fetch();
    LetSuccessorsStart();
  }

  __device__ __forceinline__ void Begin() {
    fixed.states[0].template FetchConstants<kConsumers>(first, at, thread);
    fixed.states[1].template FetchConstants<kConsumers>(second, at, thread);
    CommitCopies();
    WaitForPredecessors();
    WaitForCopies<0>();
    SyncThreads<kConsumers>();
    if (keeps) WaitBarrier(WeightsFull(), 0);
  }
  __device__ __forceinline__ bool HasTile() const { return m < second.m; }
  __device__ __forceinline__ void Step() { m += step; }

  // One of the two products; its weights are at `kept` where they stay.
  template <bool kSigned>
  __device__ __forceinline__ void MultiplyOne(const BoxParams& product, const BlockState<kTileN>& state,
                                              uint32_t kept, int (&sums)[kSums]) {
    BeginWithBias(state, mine.column, sums);
    const auto release = [&](int, int stage) {
      if (thread % 32 == 0) Arrive(ring.empty(stage));
    };
    const int last = ring.template Drain<Wgmma<kTileN, kSigned>>(
        place, product.k_tiles, sums,
        [&](int k, int stage) -> Operands {
          const uint32_t tile = stages + stage * stage_bytes;
          return {MatrixDescriptor(tile + group * 64 * kRowBytes),
                  MatrixDescriptor(keeps ? kept + k * kBytesB : tile + kBytesA),
                  k * kRowBytes + 64 < product.k};
        },
        release);
    WgmmaWait<0>();
    HoldRegisters(sums);
    release(0, last);
  }
  template <bool kAdds>
  __device__ __forceinline__ void Round(const EpilogueParams& e, const BlockState<kTileN>& state,
                                        const int (&sums)[kSums]) const {
    __builtin_assume(e.has_residual == kAdds);
    mine.template Round<kAdds ? kFinish : kFirst>(e, state, sums, weights.data + codes_at);
  }

  __device__ __forceinline__ void Multiply(int (&sums)[kSums]) {
    MultiplyOne<kFirstSigned>(first, fixed.states[0], weights.at, sums);
    if (stores) WaitForStoresToRead<0>();  // the codes of the tile before
    SyncThreads<kWarpgroup>(2 + group);
    Round<false>(first.epilogue, fixed.states[0], sums);
    MultiplyOne<kSecondSigned>(second, fixed.states[1], weights.at + first.k_tiles * kBytesB, sums);
  }
  __device__ __forceinline__ void Finish(const int (&sums)[kSums]) const {
    Round<true>(second.epilogue, fixed.states[1], sums);
    FenceAsyncProxy();
    SyncThreads<kWarpgroup>(2 + group);  // all codes are there
    if (stores) StoreCodes(maps.y, at.n0, m + group * 64, weights.at + codes_at);
  }
  __device__ __forceinline__ void End() const {
    if (stores) WaitForStores();
  }
};
#endif

template <int kTileM, int kTileN, bool kFirstSigned, bool kSecondSigned, Finish kFinish>
__global__ void __launch_bounds__(kTileM * 2 + 32)
    ConvPair(const __grid_constant__ ResidualPairParams p, const __grid_constant__ PairMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = Pair<kTileM, kTileN, kFirstSigned, kSecondSigned, kFinish>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{p, maps, fixed, SharedTiles(unaligned)});
#endif
}

template <int kTileM, int kTileN>
cudaError_t LaunchTile(const ResidualPairParams& p, bool first_signed, const LaunchOptions& options) {
  const auto &first = p.first, &second = p.second;
  PairMaps maps;
  cudaError_t error = EncodePixels(first.x, first.m, first, kTileM, &maps.first);
  if (error == cudaSuccess) error = EncodePixels(second.x, second.m, second, kTileM, &maps.second);
  if (error == cudaSuccess) error = EncodeCodes<kTileN>(second.y, second.m, second.n, &maps.y);
  if (error != cudaSuccess) return error;
  const auto launch = [&]<bool kFirstSigned, bool kSecondSigned, Finish kFinish>() {
    if constexpr (HasInstance(kFinish == Finish::kFloatsOnLine || kTileM * kTileN == 64 * 64)) {
      return LaunchKernel<ConvPair<kTileM, kTileN, kFirstSigned, kSecondSigned, kFinish>>(
          options, {Dim(p.blocks, second.n_tiles), kTileM * 2 + 32, options.shared_bytes}, p, maps);
    } else {
      return cudaErrorInvalidValue;
    }
  };
  const Finish finish = FinishOf(p);
  if (finish == Finish::kFloatsOnLine)
    return launch.template operator()<false, false, Finish::kFloatsOnLine>();
  if (finish == Finish::kCappedOnLine)
    return launch.template operator()<false, false, Finish::kCappedOnLine>();
  if (second.epilogue.on_lines || second.epilogue.in_tail) {
    const bool lacks_lines = p.first.epilogue.lacks_lines || second.epilogue.lacks_lines;
    if (!options.x_signed) {
      if (second.epilogue.in_tail) return launch.template operator()<false, false, Finish::kCappedInTail>();
      return lacks_lines ? launch.template operator()<false, false, Finish::kCappedLackingOnLine>()
                         : launch.template operator()<false, false, Finish::kCappedTailOnLine>();
    }
    return std::visit(
        [&](auto is_signed) {
          return launch.template operator()<is_signed, is_signed, Finish::kCappedIntegersOfTail>();
        },
        OneOf(options.x_signed));
  }
  return std::visit(
      [&](auto is_first_signed, auto is_second_signed) {
        return launch.template operator()<is_first_signed, is_second_signed, Finish::kIntegers>();
      },
      OneOf(first_signed), OneOf(options.x_signed));
}

}  // namespace

cudaError_t LaunchResidualPair(const ResidualPairParams& p, bool first_signed, const ConvConfig& config,
                               const LaunchOptions& options) {
  if (p.second.stages < 1 || p.second.stages > kMaxResidualPairStages) return cudaErrorInvalidValue;
  const bool is_tail = p.second.epilogue.on_lines || p.second.epilogue.in_tail;
  const bool fits =
      first_signed == options.x_signed && p.first.epilogue.is_capped && p.second.epilogue.is_capped;
  if (p.first.epilogue.on_lines != is_tail || (is_tail && !fits)) return cudaErrorInvalidValue;
  const auto launch = [&](const auto& tile) { return tile(p, first_signed, options); };
  const auto is = [&](int m, int n) { return config.tile_m == m && config.tile_n == n; };
  if (is(64, 32)) return launch(LaunchTile<64, 32>);
  if (is(64, 64)) return launch(LaunchTile<64, 64>);
  if (is(64, 128)) return launch(LaunchTile<64, 128>);
  if (is(128, 128)) return launch(LaunchTile<128, 128>);
  if (is(192, 128)) return launch(LaunchTile<192, 128>);
  return cudaErrorInvalidValue;
}

}  // namespace lowbit::cuda
