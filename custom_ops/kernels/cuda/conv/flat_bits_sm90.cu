// Products of rows as they lie, of weights of 1 or 2 bits by codes of up to 4, for Hopper (sm_90a): where a layer has few
// rows, and what takes time is to fetch them. With the codes q = sum of c_j q_j, c_j being 2^j or, of the highest bit
// of codes with signs, -2^j, and the weights w = lowest + 2^shift * (b_0 + 2 b_1),
//   sum of q w = 2^shift * sum of c_j 2^i popcount(q_j AND b_i) + lowest * (sum of q),
// and rows of ones behind those of weights count the bits of q for the last term.
//
// A block has 64 rows of codes and few channels, with all of K or a cluster's share of it at once. The planes of weights
// lie one behind the other along the columns of one product, each plane of codes is multiplied with all of them.
//
//   A   [plane][word][64 rows][16 bytes]                     as planes lie in memory (core/bit_planes.h)
//   B   [plane, then ones][eight rows][step][word][8][16]    both without swizzle
//
// Codes that come as bytes are cut by all threads of a block, of which there are more then: four threads fetch 64 codes
// of a row, each those of a chunk of 16, and exchange sums of them until each has its own bits of the planes.
#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/conv/flat_bits.h"
#include "kernels/cuda/device/pipeline.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kConsumers = kWarpgroup, kCutters = 256;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// 16 codes of a row from `channel` on; 0 past its last one.
__device__ __forceinline__ uint4 LoadCodes(const FlatBitsParams& p, int row, int channel) {
  const uint8_t* const from = p.x + static_cast<int64_t>(row) * p.row_bytes + channel;
  if (row >= p.m || channel >= p.row_bytes) return {};
  if (p.row_bytes % 16 == 0) return *reinterpret_cast<const uint4*>(from);
  uint4 codes = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const unsigned code = channel + i < p.row_bytes ? from[i] : 0u;
    (&codes.x)[i / 4] |= code << i % 4 * 8;
  }
  return codes;
}

// What HalvesOfPlanes makes of codes below 2^kPlanes, of which the calling thread, of four, has the own-th 16 of the 64:
// chunks 0 and 2 are added up, and 1 and 3, as no bits of theirs meet.
template <int kPlanes>
__device__ __forceinline__ void HalvesOfChunks(const uint4& codes, uint32_t mask, int own,
                                               unsigned (&halves)[kPlanes]) {
  static_assert(kPlanes <= 4);
  const int place = own / 2 * 4;
  const auto placed = [&](unsigned four) { return (four & mask) << place; };
  const bool is_low = own < 2, is_even = own % 2 == 0;
  const unsigned x = placed(codes.x), y = placed(codes.y), z = placed(codes.z), w = placed(codes.w);
  const unsigned first = (is_low ? x : z) + __shfl_xor_sync(~0u, is_low ? z : x, 2),
                 second = (is_low ? y : w) + __shfl_xor_sync(~0u, is_low ? w : y, 2);
  const unsigned kept = is_even ? first : second, given = __shfl_xor_sync(~0u, is_even ? second : first, 1);
  const unsigned even = is_even ? kept : given, odd = is_even ? given : kept;
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) {
    const unsigned gapped = (even >> plane & 0x11111111u) | (odd >> plane & 0x11111111u) << 2;
    halves[plane] = gapped | gapped >> 15;
  }
}

template <int kTileN, int kWeightPlanes, int kCodePlanes>
struct FlatBits {
  static constexpr int kSums = kTileN / 2, kOnesRows = FlatOnesRows(kTileN, kWeightPlanes),
                       kColumns = FlatColumns(kTileN, kWeightPlanes);
  static constexpr int kEights = kTileN / 8;  // of a plane of weights
  struct Static {
    uint64_t full;
    BlockState<kTileN> state;
  };

  const FlatBitsParams& p;
  const bool cluster;
  Static& fixed;
  const SharedTiles tiles;

  const ThreadPlace own;
  const TilePosition at = TilePosition::Of<kFlatRows, kTileN>(p);
  const int steps = at.k_end - at.k_begin, words = steps * kFlatStepWords,
            first_word = at.k_begin * kFlatStepWords, there = min(words, p.words - first_word);
  const int eight_bytes = steps * kFlatEightBytes, weights = kCodePlanes * words * kFlatWordBytes,
            ones = weights + kWeightPlanes * kEights * eight_bytes;
  const uint32_t full = SharedAddress(&fixed.full);

  __device__ __forceinline__ void SetUp() const {
    const int thread = static_cast<int>(threadIdx.x), rows = min(kFlatRows, p.m - at.m0);
    if (own.warp == 0) {
      if (own.lane == 0) {
        InitBarrier(full, 1);
        FenceBarrierInit();
        const int of_codes = p.of_planes ? kCodePlanes * there * rows * kPlaneWordBytes : 0;
        ArriveExpecting(full, kWeightPlanes * kEights * eight_bytes + of_codes);
      }
      __syncwarp();
      for (int i = own.lane; i < kWeightPlanes * kEights; i += 32) {
        const int eight = i / kEights * p.eights + at.n0 / 8 + i % kEights;
        BulkCopy(tiles.at + weights + i * eight_bytes,
                 p.weights + static_cast<int64_t>(eight * p.k_tiles + at.k_begin) * kFlatEightBytes,
                 eight_bytes, full);
      }
    }
    if (cluster) fixed.state.BeginCluster(kFlatRows);
    MakeOnes(thread);
    if (thread < kConsumers) fixed.state.template FetchConstants<kConsumers>(p, at, thread);
    CommitCopies();
    WaitForPredecessors();
    if (!p.of_planes) {
      Cut(thread);
    } else if (own.warp == 0) {
      for (int i = own.lane; i < kCodePlanes * words; i += 32) {
        const int plane = i / words, word = i - plane * words;
        if (word >= there) continue;
        const int64_t pixel = static_cast<int64_t>(plane * p.words + first_word + word) * p.m + at.m0;
        BulkCopy(tiles.at + i * kFlatWordBytes, p.x + pixel * kPlaneWordBytes, rows * kPlaneWordBytes, full);
      }
    }
    FenceAsyncProxy();
  }

  __device__ __forceinline__ bool Loads() const { return own.group > 0; }
  __device__ __forceinline__ void Load() const {}  // has cut

  __device__ __forceinline__ void Begin() const {
    WaitForCopies<0>();
    SyncThreads<kConsumers>();
  }

  __device__ __forceinline__ void Multiply(int (&sums)[kSums]) const {
    int counts[kCodePlanes][kColumns / 2] = {};
    const auto hold = [&] {
#pragma unroll
      for (auto& of_plane : counts) HoldRegisters(of_plane);
    };
    uint32_t a = (tiles.at & 0x3FFFF) >> 4 | kFlatWordBytes >> 4 << 16;
    uint64_t b = PlainDescriptor(tiles.at + weights, eight_bytes);
    WaitBarrier(full, 0);
    hold();
    WgmmaFence();
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int plane = 0; plane < kCodePlanes; ++plane)
        MultiplyBits<kColumns>(counts[plane], PlacesDescriptor(a + plane * words * (kFlatWordBytes >> 4)), b);
      a += kFlatStepWords * kFlatWordBytes >> 4;
      b += kFlatEightBytes >> 4;
    }
    WgmmaCommit();
    LetSuccessorsStart();
    WgmmaWait<0>();
    hold();
    const auto of_planes = [&](const auto& f) {
      int sum = p.x_top * f(counts[kCodePlanes - 1]);
#pragma unroll
      for (int plane = 0; plane < kCodePlanes - 1; ++plane) sum += f(counts[plane]) << plane;
      return sum;
    };
    const auto codes = [&](int i) {
      return of_planes([&](const auto& counts_of) { return counts_of[kWeightPlanes * kSums + i]; });
    };
    const int of_codes[] = {codes(0), codes(2)};  // of a thread's rows, eight apart
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      const int sum = of_planes([&](const auto& counts_of) {
        return kWeightPlanes == 1 ? counts_of[j] : counts_of[j] + 2 * counts_of[kSums + j];
      });
      sums[j] = (sum << p.w_shift) + of_codes[j / 2 % 2] * p.w_lowest;
    }
  }

  __device__ __forceinline__ void Finish(const int (&sums)[kSums]) const {
    const int row = own.thread / 32 * 16 + own.lane / 4, column = own.lane % 4 * 4;
    FinishTile<kFlatRows, kTileN, kConsumers, false, Finish::kThroughMemory>(
        p, at, tiles.data, fixed.state, cluster,
        [&](const auto& f) { ForEachFour<kTileN>(sums, row, column, f); });
  }

 private:
  // Words that there are not are 0: what lies in their place among the codes counts nowhere.
  __device__ __forceinline__ void MakeOnes(int thread) const {
    const int chunks = kOnesRows / 8 * eight_bytes / kPlaneWordBytes;
#pragma unroll 1
    for (int i = thread; i < chunks; i += static_cast<int>(blockDim.x)) {
      const int word = i / 8 % words;
      const unsigned bits = word < there ? ~0u : 0u;
      *reinterpret_cast<uint4*>(tiles.data + ones + i * kPlaneWordBytes) = make_uint4(bits, bits, bits, bits);
    }
  }

  // Each four threads have a row.
  __device__ __forceinline__ void Cut(int thread) const {
    static_assert(kCutters == 4 * kFlatRows);
    const int row = thread / 4, quarter = thread % 4;
    uint8_t* const to = tiles.data + row * kPlaneWordBytes + quarter * 4;
#pragma unroll 4
    for (int word = 0; word < there; ++word) {
      unsigned halves[2][kCodePlanes];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = (first_word + word) * kPlaneChannels + half * (kPlaneChannels / 2) + quarter * 16;
        HalvesOfChunks(LoadCodes(p, at.m0 + row, channel), p.x_mask, quarter, halves[half]);
      }
#pragma unroll
      for (int plane = 0; plane < kCodePlanes; ++plane) {
        *reinterpret_cast<unsigned*>(to + (plane * words + word) * kFlatWordBytes) =
            JoinHalves(halves[0][plane], halves[1][plane]);
      }
    }
  }
};
#endif

template <int kTileN, int kWeightPlanes, int kCodePlanes>
__global__ void __launch_bounds__(kCutters, 1)
    ConvFlatBits(const __grid_constant__ FlatBitsParams p, bool cluster) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = FlatBits<kTileN, kWeightPlanes, kCodePlanes>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{p, cluster, fixed, SharedTiles(unaligned)});
#endif
}

}  // namespace

cudaError_t LaunchFlatBits(const FlatBitsParams& p, const ConvConfig& config, const LaunchOptions& options) {
  return std::visit(
      [&](auto tile_n, auto w_planes, auto code_planes) {
        if constexpr (HasFlatInstance(tile_n, w_planes, code_planes) &&
                      HasInstance(tile_n == 16 || w_planes * code_planes == 1)) {
          return LaunchTiled<ConvFlatBits<tile_n, w_planes, code_planes>>(
              p, config, options, p.of_planes ? kConsumers : kCutters);
        } else {
          return cudaErrorInvalidValue;
        }
      },
      OneOf<16, 32, 64>(config.tile_n), OneOf<1, 2>(p.w_planes), OneOf<1, 2, 4>(p.code_planes));
}

}  // namespace lowbit::cuda
