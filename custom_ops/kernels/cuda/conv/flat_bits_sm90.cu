// Products of rows as they lie, of weights of 1 or 2 bits by codes of up to 4, for Hopper (sm_90a): where a layer has few
// rows, and what takes time is to fetch them. With the codes q = sum of c_j q_j, c_j being 2^j or, of the highest bit
// of codes with signs, -2^j, and the weights w = lowest + 2^shift * (b_0 + 2 b_1),
//   sum of q w = 2^shift * sum of c_j 2^i popcount(q_j AND b_i) + lowest * (sum of q),
// and rows of ones behind those of weights count the bits of q for the last term.
//
// A block has 64 rows of codes and few channels, with all of K at once. The planes of weights
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
// 16 codes of a row from `channel` on; 0 past its last one, or where there is no such row. kWhole: rows are whole chunks.
template <bool kWhole>
__device__ __forceinline__ uint4 LoadCodes(const uint8_t* row, int channel, int row_bytes, bool is_row) {
  uint4 codes = {};
  if constexpr (kWhole) {
    if (is_row && channel < row_bytes) codes = *reinterpret_cast<const uint4*>(row + channel);
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const unsigned code = is_row && channel + i < row_bytes ? row[channel + i] : 0u;
      (&codes.x)[i / 4] |= code << i % 4 * 8;
    }
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
  // Codes of more bits have no planes in memory.
  static constexpr bool kMayBePlanes = kCodePlanes <= kMostPlanes;
  static constexpr int kStride = FlatStagedInts(kTileN);
  struct Static {
    uint64_t full;
    BlockState<kTileN> state;
  };

  const FlatBitsParams& p;
  Static& fixed;
  const SharedTiles tiles;

  const ThreadPlace own;
  const TilePosition at = TilePosition::Of<kFlatRows, kTileN>(p);
  const int words = p.k_tiles * kFlatStepWords;  // of a plane, the last of which may be none
  const int eight_bytes = p.k_tiles * kFlatEightBytes, weights = kCodePlanes * words * kFlatWordBytes,
            ones = weights + kWeightPlanes * kEights * eight_bytes;
  const uint32_t full = SharedAddress(&fixed.full);
  // Once the codes are there nothing hides what instructions take: what can be known before is. (Not the descriptors of
  // operands, which are to stay in registers of the warp.)
  int row = own.thread / 32 * 16 + own.lane / 4, column = own.lane % 4 * 4;
  int top_counts = p.x_top << p.w_shift, lowest = p.w_lowest;  // what a bit of the highest plane counts
  int64_t first_output = static_cast<int64_t>(at.m0 + row) * p.n + at.n0 + column;

  __device__ __forceinline__ void SetUp() {
    const int thread = static_cast<int>(threadIdx.x);
    if (own.warp == 0) {
      if (own.lane == 0) {
        InitBarrier(full, 1);
        FenceBarrierInit();
        ArriveExpecting(full, kWeightPlanes * kEights * eight_bytes);
      }
      __syncwarp();
      for (int i = own.lane; i < kWeightPlanes * kEights; i += 32) {
        const int eight = i / kEights * p.eights + at.n0 / 8 + i % kEights;
        BulkCopy(tiles.at + weights + i * eight_bytes, p.weights + static_cast<int64_t>(eight) * eight_bytes,
                 eight_bytes, full);
      }
    }
    MakeOnes(thread);
    if (thread < kConsumers) fixed.state.template FetchConstants<kConsumers>(p, at, thread);
    for (int* const value : {&row, &column, &top_counts, &lowest}) KeepInRegister(*value);
    KeepInRegister(first_output);
    if (p.starts_early) LetSuccessorsStart();
    const bool of_planes = kMayBePlanes && p.of_planes;
    if constexpr (kMayBePlanes) {
      if (of_planes) FetchPlanes(thread);
    }
    if (!of_planes) {
      WaitForPredecessors();
      LetSuccessorsStart();
      p.row_bytes % 16 == 0 ? Cut<true>(thread) : Cut<false>(thread);
    }
    CommitCopies();
    WaitForCopies<0>();
    FenceAsyncProxy();
  }

  __device__ __forceinline__ bool Loads() const { return own.group > 0; }
  __device__ __forceinline__ void Load() const {}  // has cut

  __device__ __forceinline__ void Begin() const {}

  __device__ __forceinline__ void Multiply(int (&sums)[kSums]) const {
    int counts[kCodePlanes][kColumns / 2] = {};
    const auto hold = [&] {
#pragma unroll
      for (auto& of_plane : counts) HoldRegisters(of_plane);
    };
    WaitBarrier(full, 0);
    hold();
    uint32_t codes = (tiles.at & 0x3FFFF) >> 4 | kFlatWordBytes >> 4 << 16;
    uint64_t columns = PlainDescriptor(tiles.at + weights, eight_bytes);
    WgmmaFence();
#pragma unroll 1
    for (int step = 0; step < p.k_tiles; ++step) {
#pragma unroll
      for (int plane = 0; plane < kCodePlanes; ++plane) {
        MultiplyBits<kColumns>(counts[plane], PlacesDescriptor(codes + plane * words * (kFlatWordBytes >> 4)),
                               columns);
      }
      codes += kFlatStepWords * kFlatWordBytes >> 4;
      columns += kFlatEightBytes >> 4;
    }
    WgmmaCommit();
    WgmmaWait<0>();
    hold();
    // To the sum of what bits of the highest plane count comes that of the others, which are less by powers of two.
    const auto of_planes = [&](int top, int lower, const auto& f) {
      int sum = f(counts[kCodePlanes - 1]) * top;
#pragma unroll
      for (int plane = 0; plane < kCodePlanes - 1; ++plane) sum += f(counts[plane]) * (lower << plane);
      return sum;
    };
    const auto of_codes = [&](int i) {
      return lowest * of_planes(p.x_top, 1, [&](const auto& of) { return of[kWeightPlanes * kSums + i]; });
    };
    const int start[] = {of_codes(0), of_codes(2)};  // of a thread's rows, eight apart
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      sums[j] = start[j / 2 % 2] + of_planes(top_counts, 1 << p.w_shift, [&](const auto& of) {
                  return kWeightPlanes == 1 ? of[j] : of[j] + 2 * of[kSums + j];
                });
    }
  }

  // Where four channels are finished together, sums leave from the registers: through shared memory a thread
  // has several times as many instructions before it, whose latencies nothing hides.
  __device__ __forceinline__ void Finish(const int (&sums)[kSums]) const {
    if (!p.finishes_fours) return FinishOnes(sums);
    if (p.epilogue.quantized_output) {
      FinishCodes(sums);
    } else {
      FinishFloats(sums);
    }
  }

 private:
  // Words that there are not are 0: what lies in their place among the codes counts nowhere.
  __device__ __forceinline__ void MakeOnes(int thread) const {
    const int chunks = kOnesRows / 8 * eight_bytes / kPlaneWordBytes;
#pragma unroll 1
    for (int i = thread; i < chunks; i += static_cast<int>(blockDim.x)) {
      const int word = i / 8 % words;
      const unsigned bits = word < p.words ? ~0u : 0u;
      *reinterpret_cast<uint4*>(tiles.data + ones + i * kPlaneWordBytes) = make_uint4(bits, bits, bits, bits);
    }
  }

  // f(i, first, both), of a thread's i-th four neighbouring sums, from channel `first` of the tile on, of each of its two rows.
  template <typename F>
  __device__ __forceinline__ void ForEachBiased(const int (&sums)[kSums], const F& f) const {
    int i = 0;
    ForEachFour<kTileN>(sums, 0, column, [&](int, int first, const int4& top, const int4& bottom) {
      const int4 bias = *reinterpret_cast<const int4*>(fixed.state.bias + first);
      const int4 both[] = {Plus(top, bias), Plus(bottom, bias)};
      f(i++, first, both);
    });
  }

  // Through shared memory.
  __device__ __forceinline__ void FinishOnes(const int (&sums)[kSums]) const {
    int* const staged = reinterpret_cast<int*>(tiles.data + p.exchange_offset);
    ForEachFour<kTileN>(sums, row, column, [&](int of_row, int first, const int4& top, const int4& bottom) {
      *reinterpret_cast<int4*>(staged + of_row * kStride + first) = top;
      *reinterpret_cast<int4*>(staged + (of_row + 8) * kStride + first) = bottom;
    });
    SyncThreads<kConsumers>();
#pragma unroll 1
    for (int i = own.thread; i < kFlatRows * kTileN; i += kConsumers) {
      const int of_row = i / kTileN, channel = i % kTileN;
      if (at.m0 + of_row >= p.m || at.n0 + channel >= p.n) continue;
      FinishOne(p.epilogue, p.residual, p.y, at.m0 + of_row, at.n0 + channel,
                staged[of_row * kStride + channel], fixed.state.bias[channel], fixed.state.scale[channel]);
    }
  }

  // f32(sum) * scale, to nothing else.
  __device__ __forceinline__ void FinishFloats(const int (&sums)[kSums]) const {
    float* const y = static_cast<float*>(p.y) + first_output;
    ForEachBiased(sums, [&](int four, int first, const int4(&both)[2]) {
      const float4 scale = *reinterpret_cast<const float4*>(fixed.state.scale + first);
      if (at.n0 + first >= p.n) return;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (at.m0 + row + 8 * i >= p.m) continue;
        *reinterpret_cast<float4*>(y + static_cast<int64_t>(8 * i) * p.n + 16 * four) =
            lowbit::cuda::Multiply(AsFloats<false>(both[i]), scale);
      }
    });
  }

  __device__ __forceinline__ void FinishCodes(const int (&sums)[kSums]) const {
    constexpr int kFours = kTileN / 16;
    const EpilogueParams& e = p.epilogue;
    const auto index = [&](int i, int four) {
      return first_output + static_cast<int64_t>(8 * i) * p.n + 16 * four;
    };
    const auto is_output = [&](int i, int four) {
      return at.m0 + row + 8 * i < p.m && at.n0 + column + 16 * four < p.n;
    };
    unsigned codes[2][1][kFours] = {};  // of a row and the one eight below, the residuals at first
    if (e.has_residual) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int four = 0; four < kFours; ++four) {
          if (!is_output(i, four)) continue;
          codes[i][0][four] =
              *reinterpret_cast<const unsigned*>(static_cast<const uint8_t*>(p.residual) + index(i, four));
        }
      }
    }
    WithIntegers(e, [&](const auto& requantize) {
      ForEachBiased(sums, [&](int four, int first, const int4(&both)[2]) {
        unsigned of_rows[] = {codes[0][0][four], codes[1][0][four]};
        requantize(both, fixed.state.Four(first), of_rows);
        codes[0][0][four] = of_rows[0];
        codes[1][0][four] = of_rows[1];
      });
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kTileN == kPlaneChannels / 2) {
        if (e.plane_count > 0) {
          if (is_output(i, 0)) StoreWords(p, at.m0 + row + 8 * i, at.n0, own.lane % 4, codes[i]);
          continue;
        }
      }
#pragma unroll
      for (int four = 0; four < kFours; ++four) {
        if (!is_output(i, four)) continue;
        StoreInPlaces(e, at.m0 + row + 8 * i, at.n0 + column + 16 * four, codes[i][0][four]);
        if (p.y != nullptr)
          *reinterpret_cast<unsigned*>(static_cast<uint8_t*>(p.y) + index(i, four)) = codes[i][0][four];
      }
    }
  }

  // By the threads themselves: what the tensor memory accelerator fetches comes later, and nothing is to do meanwhile.
  __device__ __forceinline__ void FetchPlanes(int thread) const {
    static_assert(kConsumers == 2 * kFlatRows);
    const int of_row = thread % kFlatRows, first = thread / kFlatRows;
    const int64_t word_bytes = static_cast<int64_t>(p.m) * kPlaneWordBytes;
    const uint8_t* from = p.x + first * word_bytes + (at.m0 + of_row) * kPlaneWordBytes;
    const bool is_row = at.m0 + of_row < p.m;
    WaitForPredecessors();
    LetSuccessorsStart();
    if (!is_row) return;
#pragma unroll
    for (int plane = 0; plane < kCodePlanes; ++plane) {
      const uint8_t* next = from + plane * (p.words * word_bytes);
      uint32_t to = tiles.at + (plane * words + first) * kFlatWordBytes + of_row * kPlaneWordBytes;
#pragma unroll 4
      for (int word = first; word < p.words; word += 2) {
        CopyAsync<16>(to, next);
        next += 2 * word_bytes;
        to += 2 * kFlatWordBytes;
      }
    }
  }

  // Each four threads have a row.
  template <bool kWhole>
  __device__ __forceinline__ void Cut(int thread) const {
    static_assert(kCutters == 4 * kFlatRows);
    constexpr int kAtOnce = kWhole ? 8 : 1;  // words on their way
    const int of_row = thread / 4, quarter = thread % 4;
    const uint8_t* const from = p.x + static_cast<int64_t>(at.m0 + of_row) * p.row_bytes;
    uint8_t* const to = tiles.data + of_row * kPlaneWordBytes + quarter * 4;
    const bool is_row = at.m0 + of_row < p.m;
#pragma unroll 1
    for (int begin = 0; begin < p.words; begin += kAtOnce) {
      uint4 codes[kAtOnce][2];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int channel = (begin + i) * kPlaneChannels + half * (kPlaneChannels / 2) + quarter * 16;
          codes[i][half] = LoadCodes<kWhole>(from, channel, p.row_bytes, is_row && begin + i < p.words);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (begin + i >= p.words) break;
        unsigned halves[2][kCodePlanes];
#pragma unroll
        for (int half = 0; half < 2; ++half) HalvesOfChunks(codes[i][half], p.x_mask, quarter, halves[half]);
#pragma unroll
        for (int plane = 0; plane < kCodePlanes; ++plane) {
          *reinterpret_cast<unsigned*>(to + (plane * words + begin + i) * kFlatWordBytes) =
              JoinHalves(halves[0][plane], halves[1][plane]);
        }
      }
    }
  }
};
#endif

template <int kTileN, int kWeightPlanes, int kCodePlanes>
__global__ void __launch_bounds__(kCutters, 1) ConvFlatBits(const __grid_constant__ FlatBitsParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = FlatBits<kTileN, kWeightPlanes, kCodePlanes>;
  LOWBIT_DYNAMIC_SHARED(unaligned, 1);
  __shared__ typename Pipeline::Static fixed;
  RunPipeline(Pipeline{p, fixed, SharedTiles(unaligned)});
#endif
}

}  // namespace

cudaError_t LaunchFlatBits(const FlatBitsParams& params, const ConvConfig& config,
                           const LaunchOptions& options) {
  FlatBitsParams p = params;
  const EpilogueParams& e = p.epilogue;
  const bool is_product =
      !e.has_residual && !e.adds_floats && !e.makes_halves && e.tail_count == 0 && e.place_count == 0;
  // Blocks of the next kernel come before this one has its turn where they find multiprocessors that it leaves alone: of
  // planes, 64 rows by 128 channels, 1.17 us instead of 1.35, by 1024 in 64 blocks 1.47 either way (H100, in rows of
  // equals). Of bytes they would only be in the way of those that cut.
  const int blocks = p.n_tiles * ((p.m + kFlatRows - 1) / kFlatRows);
  p.starts_early = p.of_planes && 2 * blocks <= options.device.multiprocessors;
  p.finishes_fours = e.quantized_output ? p.requantizes_fours : is_product && p.n % 4 == 0;
  return std::visit(
      [&](auto tile_n, auto w_planes, auto code_planes) {
        if constexpr (HasFlatInstance(tile_n, w_planes, code_planes) &&
                      HasInstance(tile_n == 16 || w_planes * code_planes == 1)) {
          return LaunchKernel<ConvFlatBits<tile_n, w_planes, code_planes>>(
              options,
              {Dim((p.m + kFlatRows - 1) / kFlatRows, p.n_tiles), p.of_planes ? kConsumers : kCutters,
               options.shared_bytes},
              p);
        } else {
          return cudaErrorInvalidValue;
        }
      },
      OneOf<16, 32, 64>(config.tile_n), OneOf<1, 2>(p.w_planes), OneOf<1, 2, 4>(p.code_planes));
}

}  // namespace lowbit::cuda
