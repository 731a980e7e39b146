// Float products on Tensor Cores: operands are rounded as they are packed (weights) and fetched (x), products summed
// in float32.
//
// The sums' elements are taken tap by tap, a step being 8 words of channels of one tap, the last one of a tap
// filled up with zeros: threads work out where a tap lies once for 8 or 16 elements, and neighbouring threads read
// neighbouring pixels. Weights lie in the order in which a warp's threads hold them, so that each fetches its four
// words of 16 rows at once. Blocks with few outputs split the steps among their warps, whose sums are added in the
// warps' order: which blocks there are depends on the shape and the GPU alone, so every run gives the same bits.
#include <bit>

#include "kernels/cuda/device/mma_float.cuh"
#include "kernels/cuda/nodes/float_product.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kStepWords = 8;  // along k, of one instruction
constexpr int kTileRows = 16;  // of one instruction
constexpr int kWarpRows = 32, kWarpColumns = 32;
constexpr int kRowTiles = kWarpRows / kTileRows, kColumnTiles = kWarpColumns / 8;
constexpr int kRowUnit = 64;  // packed rows are a multiple of it, the most that a block has

template <FloatPrecision kPrecision>
struct Words {
  static constexpr bool kHalves = kPrecision == FloatPrecision::kFloat16;
  static constexpr int kPerWord = kHalves ? 2 : 1;
  static constexpr int kParts = kPrecision == FloatPrecision::k3xTf32 ? 2 : 1;  // numbers to an operand
  static constexpr int kElements = kStepWords * kPerWord;                       // of a step
};

struct TensorParams : ProductParams {
  const uint4* weights = nullptr;  // [parts][groups][row tiles][steps][lanes]
  int row_tiles = 0, steps = 0;
  int64_t part = 0;       // from one part to the next
  FastDivisor by_chunks;  // steps of a tap
};

// What a block of eight warps makes, kWarpsK of them the same outputs.
template <int kM, int kN, int kK>
struct Blocks {
  static constexpr int kWarpsM = kM, kWarpsN = kN, kWarpsK = kK;
  static constexpr int kRows = kM * kWarpRows, kColumns = kN * kWarpColumns;
  static_assert(kM * kN * kK == kThreads / kWarp);
};
using Large = Blocks<2, 4, 1>;
using Deep = Blocks<1, 2, 4>;
using Deepest = Blocks<1, 1, 8>;

// A word of `low`, and of `high` where words hold two; in upper and lower parts where there are two.
template <FloatPrecision kPrecision>
__device__ __forceinline__ void Split(float low, [[maybe_unused]] float high,
                                      unsigned (&parts)[Words<kPrecision>::kParts]) {
  if constexpr (Words<kPrecision>::kHalves) {
    parts[0] = PackHalves(low, high);
  } else {
    parts[0] = ToTf32(low);
    if constexpr (Words<kPrecision>::kParts == 2)
      parts[1] = ToTf32(__fsub_rn(low, __uint_as_float(parts[0])));
  }
}

// c += a * b^T; of two parts each without the product of the lower ones, and what is small first.
template <FloatPrecision kPrecision>
__device__ __forceinline__ void MultiplyParts(float (&c)[4],
                                              const unsigned (&a)[Words<kPrecision>::kParts][4],
                                              const unsigned (&b)[Words<kPrecision>::kParts][2]) {
  if constexpr (Words<kPrecision>::kHalves) {
    MultiplyHalves(c, a[0], b[0][0], b[0][1]);
  } else {
    if constexpr (Words<kPrecision>::kParts == 2) {
      MultiplyTf32(c, a[1], b[0][0], b[0][1]);
      MultiplyTf32(c, a[0], b[1][0], b[1][1]);
    }
    MultiplyTf32(c, a[0], b[0][0], b[0][1]);
  }
}

// Latencies are hidden by other warps where there are many: three blocks to a multiprocessor, weights in shared memory,
// short stages (.7 of the time of the others for TF32, .8 to 1.1 for float16, on an H100). Where outputs are few, by
// stages twice as long, whose loads are all under way (.7 of the time of short ones for float16).
template <FloatPrecision kPrecision, typename B>
inline constexpr bool kHasManyWarps = Words<kPrecision>::kParts == 1 && B::kWarpsK < kThreads / kWarp;

template <typename Column, FloatPrecision kPrecision, typename B>
__global__ void __launch_bounds__(kThreads, kHasManyWarps<kPrecision, B> ? 3 : 2)
    TensorTiles(const __grid_constant__ TensorParams p) {
  using Of = Words<kPrecision>;
  constexpr int kParts = Of::kParts, kPerWord = Of::kPerWord, kElements = Of::kElements;
  constexpr int kSharers = kThreads / B::kColumns;  // threads that fetch one column
  constexpr bool kKeepsWeights = kHasManyWarps<kPrecision, B>;
  constexpr int kOwn = kKeepsWeights || kParts == 2 ? 1 : 2;  // steps of a stage that each of them fetches
  constexpr int kStageSteps = kOwn * kSharers;
  // Four rows of words begin in different banks, as the 32 words of a fragment then do.
  constexpr int kPitch = B::kColumns + 8, kPartWords = kStageSteps * kStepWords * kPitch;
  constexpr int kStageWords = kParts * kPartWords;
  static_assert(kStageSteps % B::kWarpsK == 0);
  constexpr int kBlockTiles = B::kRows / kTileRows, kStageFours = kStageSteps * kBlockTiles * kWarp;
  constexpr int kSums = B::kWarpsK > 1 ? B::kWarpsK * B::kRows * B::kColumns : 0;
  constexpr int kStages = 2 * (kStageWords + (kKeepsWeights ? 4 * kStageFours : 0));
  __shared__ __align__(16) unsigned memory[kStages > kSums ? kStages : kSums];
  const auto pixels_at = [&](int stage) { return memory + stage % 2 * kStageWords; };
  const auto weights_at = [&](int stage) {
    return reinterpret_cast<uint4*>(memory + 2 * kStageWords) + stage % 2 * kStageFours;
  };
  LetSuccessorsStart();
  WaitForPredecessors();

  const int tid = static_cast<int>(threadIdx.x), lane = tid % kWarp, warp = tid / kWarp;
  const int group = static_cast<int>(blockIdx.z);
  const int i0 = static_cast<int>(blockIdx.y) * B::kRows, j0 = static_cast<int>(blockIdx.x) * B::kColumns;
  const int own = tid % B::kColumns, sharer = tid / B::kColumns;  // one sharer a warp
  const Column column(p, group, j0 + own);
  const int64_t channel_step = Column::ChannelStep(p);

  const uint4* const weights =
      p.weights + (static_cast<int64_t>(group) * p.row_tiles + i0 / kTileRows) * p.steps * kWarp;
  float fetched[kOwn][kElements];
  const auto fetch = [&](int stage) {
    if constexpr (kKeepsWeights) {
#pragma unroll
      for (int at = tid; at < kStageFours; at += kThreads) {
        const int step = stage * kStageSteps + at / kWarp / kBlockTiles, tile = at / kWarp % kBlockTiles;
        if (step >= p.steps) continue;
        CopyAsync<16>(SharedAddress(weights_at(stage) + at),
                      weights + (static_cast<int64_t>(tile) * p.steps + step) * kWarp + lane);
      }
      CommitCopies();
    }
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
      const int step = stage * kStageSteps + s * kSharers + sharer;
      const auto [tap, chunk] = Divided(static_cast<unsigned>(step), p.by_chunks);
      const auto [ty, tx] = Divided(tap, p.by_kernel_w);
      const float* const pixel = step < p.steps ? column.At(p, ty, tx) : nullptr;
      const int first = static_cast<int>(chunk) * kElements, left = p.channels - first;
      const float* const x = pixel + first * channel_step;
      if (left >= kElements) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) fetched[s][e] = pixel != nullptr ? x[e * channel_step] : 0.0f;
      } else {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          fetched[s][e] = pixel != nullptr && e < left ? x[e * channel_step] : 0.0f;
        }
      }
    }
  };
  const auto store = [&](int stage) {
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
      unsigned* const to = pixels_at(stage) + (s * kSharers + sharer) * kStepWords * kPitch + own;
#pragma unroll
      for (int w = 0; w < kStepWords; ++w) {
        unsigned parts[kParts];
        Split<kPrecision>(fetched[s][w * kPerWord], fetched[s][w * kPerWord + kPerWord - 1], parts);
#pragma unroll
        for (int part = 0; part < kParts; ++part) to[part * kPartWords + w * kPitch] = parts[part];
      }
    }
    if constexpr (kKeepsWeights) WaitForCopies<0>();
  };

  const int warp_k = warp / (B::kWarpsM * B::kWarpsN), warp_m = warp / B::kWarpsN % B::kWarpsM;
  const int row = warp_m * kWarpRows, first_column = warp % B::kWarpsN * kWarpColumns;
  float sums[kRowTiles][kColumnTiles][4] = {};
  // The sums of a stage by themselves where they are to be exact: the units cut what they add, so that errors grow
  // with the length of a sum that they make.
  const auto multiply = [&](int stage, float (&c)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
    for (int s = 0; s < kStageSteps / B::kWarpsK; ++s) {
      const int of_stage = s * B::kWarpsK + warp_k, step = stage * kStageSteps + of_stage;
      if (step >= p.steps) break;
      unsigned a[kRowTiles][kParts][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int tile = row / kTileRows + m;
          const uint4 four =
              kKeepsWeights
                  ? weights_at(stage)[(of_stage * kBlockTiles + tile) * kWarp + lane]
                  : weights[part * p.part + (static_cast<int64_t>(tile) * p.steps + step) * kWarp + lane];
          a[m][part][0] = four.x, a[m][part][1] = four.y, a[m][part][2] = four.z, a[m][part][3] = four.w;
        }
      }
      const unsigned* const of_step =
          pixels_at(stage) + (of_stage * kStepWords + lane % 4) * kPitch + first_column + lane / 4;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        unsigned b[kParts][2];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const unsigned* const of_part = of_step + part * kPartWords + 8 * n;
          b[part][0] = of_part[0], b[part][1] = of_part[4 * kPitch];
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) MultiplyParts<kPrecision>(c[m][n], a[m], b);
      }
    }
  };

  const int stages = (p.steps + kStageSteps - 1) / kStageSteps;
  fetch(0);
  store(0);
  __syncthreads();
  for (int stage = 0; stage < stages; ++stage) {
    const bool more = stage + 1 < stages;
    if (more) fetch(stage + 1);
    if constexpr (kParts == 2) {
      float c[kRowTiles][kColumnTiles][4] = {};
      multiply(stage, c);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[m][n][e] = __fadd_rn(sums[m][n][e], c[m][n][e]);
        }
      }
    } else {
      multiply(stage, sums);
    }
    if (more) store(stage + 1);
    __syncthreads();
  }

  const auto finish = [&](int i, int j, float sum) {
    if (i0 + i >= p.rows || j0 + j >= p.columns) return;
    p.y[Column::Target(p, group, i0 + i, j0 + j)] = FinishSum(p, group * p.rows + i0 + i, sum);
  };
  const auto for_each_sum = [&](const auto& fn) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          fn(row + m * kTileRows + lane / 4 + e / 2 * 8, first_column + n * 8 + lane % 4 * 2 + e % 2,
             sums[m][n][e]);
        }
      }
    }
  };
  if constexpr (B::kWarpsK == 1) {
    for_each_sum(finish);
  } else {
    float* const all = reinterpret_cast<float*>(memory);  // [kWarpsK][kRows][kColumns]
    constexpr int kOutputs = B::kRows * B::kColumns;
    for_each_sum([&](int i, int j, float sum) { all[warp_k * kOutputs + i * B::kColumns + j] = sum; });
    __syncthreads();
    for (int e = tid; e < kOutputs; e += kThreads) {
      float sum = all[e];
#pragma unroll
      for (int k = 1; k < B::kWarpsK; ++k) sum = __fadd_rn(sum, all[k * kOutputs + e]);
      finish(e / B::kColumns, e % B::kColumns, sum);
    }
  }
}

// Few columns of a Gemm: the warps of a block split the steps of 16 rows and 8 columns.
constexpr int kNarrowColumns = 8;
template <FloatPrecision kPrecision>
__global__ void __launch_bounds__(kThreads) TensorNarrow(const __grid_constant__ TensorParams p) {
  constexpr int kParts = Words<kPrecision>::kParts, kPerWord = Words<kPrecision>::kPerWord;
  constexpr int kWarps = kThreads / kWarp, kOutputs = kTileRows * kNarrowColumns;
  __shared__ float all[kWarps][kOutputs];
  LetSuccessorsStart();
  WaitForPredecessors();
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int i0 = static_cast<int>(blockIdx.x) * kTileRows, j0 = static_cast<int>(blockIdx.y) * kNarrowColumns;
  const float* const x = p.x + min(j0 + lane / 4, p.columns - 1) * p.column_step;
  const uint4* const weights = p.weights + static_cast<int64_t>(blockIdx.x) * p.steps * kWarp + lane;
  float sums[4] = {};
#pragma unroll 2
  for (int step = warp; step < p.steps; step += kWarps) {
    float c[4] = {};
    unsigned a[kParts][4], b[kParts][2];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint4 four = weights[part * p.part + static_cast<int64_t>(step) * kWarp];
      a[part][0] = four.x, a[part][1] = four.y, a[part][2] = four.z, a[part][3] = four.w;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float v[2] = {};
#pragma unroll
      for (int e = 0; e < kPerWord; ++e) {
        const int k = (step * kStepWords + lane % 4 + 4 * half) * kPerWord + e;
        v[e] = k < p.channels ? x[k * p.k_step] : 0.0f;
      }
      unsigned words[kParts];
      Split<kPrecision>(v[0], v[1], words);
#pragma unroll
      for (int part = 0; part < kParts; ++part) b[part][half] = words[part];
    }
    MultiplyParts<kPrecision>(c, a, b);
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[e] = __fadd_rn(sums[e], c[e]);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    all[warp][(lane / 4 + e / 2 * 8) * kNarrowColumns + lane % 4 * 2 + e % 2] = sums[e];
  }
  __syncthreads();
  const int output = static_cast<int>(threadIdx.x), i = i0 + output % kTileRows, j = j0 + output / kTileRows;
  if (output >= kOutputs || i >= p.rows || j >= p.columns) return;
  float sum = 0;
#pragma unroll
  for (int k = 0; k < kWarps; ++k) {
    sum = __fadd_rn(sum, all[k][output % kTileRows * kNarrowColumns + output / kTileRows]);
  }
  p.y[static_cast<int64_t>(j) * p.rows + i] = FinishSum(p, i, sum);
}

template <FloatPrecision kPrecision>
uint32_t WordOf(int part, float low, float high) {
  if (Words<kPrecision>::kHalves) return ToHalf(low) | uint32_t{ToHalf(high)} << 16;
  const float upper = RoundToTf32(low);
  return std::bit_cast<uint32_t>(part == 0 ? upper : RoundToTf32(low - upper));
}

// Weights [groups][rows][channels][taps] as the threads hold them.
template <FloatPrecision kPrecision>
std::vector<uint4> PackWeights(const TensorParams& p, const std::vector<float>& weights) {
  constexpr int kPerWord = Words<kPrecision>::kPerWord;
  const auto chunks = static_cast<int>(p.by_chunks.divisor), taps = p.steps / chunks;
  std::vector<uint4> out;
  out.reserve(static_cast<size_t>(Words<kPrecision>::kParts * p.part));
  for (int part = 0; part < Words<kPrecision>::kParts; ++part) {
    for (int64_t at = 0; at < p.part; ++at) {
      const auto lane = static_cast<int>(at % kWarp), step = static_cast<int>(at / kWarp % p.steps);
      const int64_t tile = at / kWarp / p.steps, group = tile / p.row_tiles;
      const auto word = [&](int i) {
        const int64_t row = tile % p.row_tiles * kTileRows + lane / 4 + i % 2 * 8;
        const int first = step % chunks * Words<kPrecision>::kElements + (lane % 4 + i / 2 * 4) * kPerWord;
        const auto weight = [&](int channel) {
          if (row >= p.rows || channel >= p.channels) return 0.0f;
          const int64_t place = (group * p.rows + row) * p.channels + channel;
          return weights[static_cast<size_t>(place * taps + step / chunks)];
        };
        return WordOf<kPrecision>(part, weight(first), weight(first + kPerWord - 1));
      };
      out.push_back({word(0), word(1), word(2), word(3)});
    }
  }
  return out;
}

template <typename Column, FloatPrecision kPrecision>
void LaunchTiles(const Run& run, const TensorParams& p, int multiprocessors) {
  const auto launch = [&](auto blocks, bool must) {
    using B = decltype(blocks);
    const dim3 grid(BlocksFor(p.columns, B::kColumns), BlocksFor(p.rows, B::kRows),
                    static_cast<unsigned>(p.groups));
    if (!must && int64_t{grid.x} * grid.y * grid.z < multiprocessors) return false;
    run.Launch(TensorTiles<Column, kPrecision, B>, grid, kThreads, p);
    return true;
  };
  if (!launch(Large(), false) && !launch(Deep(), false)) launch(Deepest(), true);
}

template <typename Column, FloatPrecision kPrecision>
void LaunchProduct(const Run& run, const TensorParams& p, int multiprocessors) {
  if constexpr (std::is_same_v<Column, GemmColumn>) {
    constexpr int kNarrow = 32;
    if (p.columns <= kNarrow) {
      const dim3 grid(BlocksFor(p.rows, kTileRows), BlocksFor(p.columns, kNarrowColumns));
      return run.Launch(TensorNarrow<kPrecision>, grid, kThreads, p);
    }
  }
  LaunchTiles<Column, kPrecision>(run, p, multiprocessors);
}

template <typename Column, typename Op>
PackedNodePtr PackProduct(const std::string& name, const Op& op, const Device& device,
                          FloatPrecision precision, const Limits& limits) {
  const auto pack = [&](auto known) {
    constexpr FloatPrecision kPrecision = decltype(known)::value;
    TensorParams shared;
    Describe(op, limits, shared);
    const int64_t chunks = BlocksFor(shared.channels, Words<kPrecision>::kElements);
    shared.steps = CheckedSize(TapsOf(op) * chunks, "steps");
    shared.by_chunks = MakeDivisor(chunks);
    shared.row_tiles = static_cast<int>(BlocksFor(shared.rows, kRowUnit)) * (kRowUnit / kTileRows);
    shared.part = int64_t{shared.groups} * shared.row_tiles * shared.steps * kWarp;
    const auto launch = [multiprocessors = device.multiprocessors](const Run& run, const TensorParams& p) {
      LaunchProduct<Column, kPrecision>(run, p, multiprocessors);
    };
    const auto plan = [=, text = name + "_" + NameOf(precision)](const TensorParams& geometry) {
      return MakeKernelPlan(text, geometry, launch);
    };
    return MakeProduct(op, shared, PackWeights<kPrecision>(shared, op.weights), device, plan);
  };
  return std::visit(
      pack, OneOf<FloatPrecision::kFloat16, FloatPrecision::kTf32, FloatPrecision::k3xTf32>(precision));
}

// TF32 came with sm_80.
bool HasUnits(const Device& device, FloatPrecision precision) {
  constexpr int kFirstTf32 = 80;
  return precision == FloatPrecision::kFloat16 ||
         (precision != FloatPrecision::kFloat32 && device.capability >= kFirstTf32);
}

}  // namespace

bool HasTensorProduct(const FloatGemmOp&, const Device& device, FloatPrecision precision) {
  return HasUnits(device, precision);
}
// Few outputs of a group would leave most rows of a tile empty.
bool HasTensorProduct(const FloatConvOp& op, const Device& device, FloatPrecision precision) {
  constexpr int kFewest = 8;
  return HasUnits(device, precision) && op.out_channels / op.group >= kFewest;
}
PackedNodePtr PackTensorProduct(const FloatGemmOp& op, const Device& device, FloatPrecision precision,
                                const Limits& limits) {
  return PackProduct<GemmColumn>("float_gemm", op, device, precision, limits);
}
PackedNodePtr PackTensorProduct(const FloatConvOp& op, const Device& device, FloatPrecision precision,
                                const Limits& limits) {
  return PackProduct<ConvColumn>("float_conv", op, device, precision, limits);
}

}  // namespace lowbit::cuda
