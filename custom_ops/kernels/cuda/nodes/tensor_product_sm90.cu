// Float products on wgmma, for Hopper (sm_90a): columns (pixels) from registers, where they are rounded and split on the
// way, weights from shared memory, packed in the order in which wgmma reads them.
//
//   a warpgroup     64 or 128 columns by kN outputs; its thread reads two or four columns side by side of an element of k;
//   an instruction  64 columns, 8 words along k, kN outputs. Which column, output or element of k it calls which is free
//                   as long as its operands agree: a thread's columns lie side by side, and so do four of its outputs.
//
// While a stage is multiplied the next one's copies are begun: weights by bulk copies, which count at an mbarrier of the
// stage, columns by cp.async.
#include "kernels/cuda/device/pipeline.cuh"
#include "kernels/cuda/nodes/float_tiles.cuh"
#include "kernels/cuda/nodes/float_words.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kColumnsOfProduct = 64, kRowGroup = 8, kRowBytesOfStep = kStepWords * 4;
constexpr int kMostRows = 256;         // of a block
constexpr int kStageElements = 32;     // along k
constexpr int kFourRows = 4 * 4;       // rows of which a thread has four, side by side
constexpr int kRegistersOfSm = 65536;  // of a multiprocessor

struct WgmmaParams : SplitParams {
  // [groups][steps][parts][row groups][halves of a step][8 rows], and what a block reads beyond
  const uint4* weights = nullptr;
  int row_groups = 0;
};

template <FloatPrecision kPrecision, int kProducts64, int kN, int kGroupsAcross, int kGroupsDown,
          int kStagesOf, int kBlocksOf>
struct WgmmaTile {
  using Of = Words<kPrecision>;
  using Params = WgmmaParams;
  static constexpr int kParts = Of::kParts, kSteps = kStageElements / Of::kElements;
  static constexpr int kRows = kN * kGroupsDown, kColumns = kColumnsOfProduct * kProducts64 * kGroupsAcross;
  static constexpr int kOutputs = kRows * kColumns, kBlock = kWarpgroup * kGroupsAcross * kGroupsDown;
  static constexpr int kBlocks = kBlocksOf, kRegisters = kRegistersOfSm / (kBlocks * kBlock);
  static constexpr int kStages = kStagesOf, kDepth = kStageElements;
  static constexpr int kWeightBytesOfStep = kRows * kRowBytesOfStep;
  static constexpr int kWeightFloats = kSteps * kParts * kWeightBytesOfStep / 4;
  // The four elements of k that a warp reads at once begin in different banks.
  static constexpr int kPitch = kColumns + 8;
  // Of a thread: squares of four by four outputs.
  static constexpr int kThreadColumns = 4, kThreadRows = kN * kProducts64 / 8, kColumnStep = 4;
  static constexpr int kRowStep = kProducts64 == 2 ? kFourRows : 2 * kFourRows;
  static_assert(kThreadRows * kThreadColumns * kBlock == kOutputs && kThreadRows / 4 * kRowStep == kN &&
                kColumnStep == kThreadColumns);
  static constexpr double kProducts = Of::kHalves   ? ProductRates::kWgmmaHalves
                                      : kParts == 1 ? ProductRates::kWgmmaTf32
                                                    : ProductRates::kWgmma3xTf32;
  static constexpr double kWeightBytes = Of::kHalves ? 2 : 4 * kParts;
  static_assert(kRows <= kMostRows && (kProducts64 == 1 || kProducts64 == 2));

  // One thread fetches them.
  struct Weights {
    const WgmmaParams& p;
    const uint4* first;  // of the first step
    uint32_t to;

    __device__ __forceinline__ static uint32_t Full(int stage) {
      __shared__ uint64_t full[kStages];
      return SharedAddress(&full[stage]);
    }
    __device__ __forceinline__ Weights(const WgmmaParams& params, int group, int i0, int k0, uint32_t stages)
        : p(params), to(stages) {
      const int64_t step = int64_t{group} * (p.depth / Of::kElements) + k0 / Of::kElements;
      first = p.weights + (step * kParts * p.row_groups + i0 / kRowGroup) * (2 * kRowGroup);
      if (threadIdx.x != 0) return;
      for (int stage = 0; stage < kStages; ++stage) InitBarrier(Full(stage), 1);
      FenceBarrierInit();
    }
    __device__ __forceinline__ void Fetch(int stage_of_k, int stage) const {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
      if (threadIdx.x != 0) return;
      ArriveExpecting(Full(stage), kWeightFloats * 4);
      const uint32_t at = to + stage * kStageFloats<WgmmaTile> * 4;
      const int64_t of_part = int64_t{p.row_groups} * (2 * kRowGroup);
      const uint4* const from = first + stage_of_k * (kSteps * kParts) * of_part;
#pragma unroll
      for (int part = 0; part < kSteps * kParts; ++part) {
        BulkCopy(at + part * kWeightBytesOfStep, from + part * of_part, kWeightBytesOfStep, Full(stage));
      }
#endif
    }
    __device__ __forceinline__ void Wait(int stage, uint32_t parity) const {
      WaitBarrier(Full(stage), parity);
    }
  };

  struct Sums {
    static constexpr int kSums = kN / 2;
    float sums[kProducts64][kSums] = {};  // of an instruction
    // Of two parts each, the sums of a stage by themselves: the units cut what they add, so that errors grow with the
    // length of a sum that they make.
    float of_stage[kProducts64][kSums];
    int lane, row, column, own_column;

    __device__ __forceinline__ Sums() {
      const int thread = static_cast<int>(threadIdx.x), group = thread / kWarpgroup,
                warp = thread % kWarpgroup / kWarp;
      constexpr int kOfWarp = 16 * kProducts64;  // columns
      lane = thread % kWarp;
      const int first = (group % kGroupsAcross * 4 + warp) * kOfWarp, first_row = group / kGroupsAcross * kN;
      own_column = first + lane / 4 * (2 * kProducts64);
      // Where a thread has two columns, it exchanges four outputs of them for those of the next two (Finish).
      column = first + (kProducts64 == 2 ? lane / 4 : lane / 8) * 4;
      row = first_row + lane % 4 * 4 + (kProducts64 == 2 ? 0 : lane / 4 % 2 * kFourRows);
    }

    __device__ __forceinline__ void Multiply(const float* weights, const float* columns) {
      auto& c = kParts == 2 ? of_stage : sums;
      const uint32_t b = SharedAddress(weights) +
                         static_cast<int>(threadIdx.x) / kWarpgroup / kGroupsAcross * kN * kRowBytesOfStep;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step >= 2) WgmmaWait<1>();  // who used the registers before
        unsigned a[kProducts64][kParts][4];
        LoadColumns(columns + step * Of::kElements * kPitch, a);
        Hold(c);
        WgmmaFence();
        const auto descriptor = [&](int part) {
          return PlainDescriptor(b + (step * kParts + part) * kWeightBytesOfStep);
        };
#pragma unroll
        for (int m = 0; m < kProducts64; ++m) {
          if constexpr (kParts == 2) {
            // Without the product of the lower ones, and what is small first.
            if (step == 0) {
              MultiplyFloatRows<false, false>(c[m], a[m][1], descriptor(0));
            } else {
              MultiplyFloatRows<false>(c[m], a[m][1], descriptor(0));
            }
            MultiplyFloatRows<false>(c[m], a[m][0], descriptor(1));
          }
          MultiplyFloatRows<Of::kHalves>(c[m], a[m][0], descriptor(0));
        }
        WgmmaCommit();
      }
    }
    __device__ __forceinline__ void Wait() {
      WgmmaWait<0>();
      if constexpr (kParts == 1) return Hold(sums);
      Hold(of_stage);
#pragma unroll
      for (int m = 0; m < kProducts64; ++m) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[m][i] = __fadd_rn(sums[m][i], of_stage[m][i]);
      }
    }
    __device__ __forceinline__ void Finish() {
      if constexpr (kProducts64 == 2) return;
      const bool is_second = lane / 4 % 2 != 0;
#pragma unroll
      for (int pair = 0; pair < kSums; pair += 16) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float &low = sums[0][pair + i], &high = sums[0][pair + 8 + i];
          const float received = __shfl_xor_sync(~0u, is_second ? low : high, 4);
          (is_second ? low : high) = received;
        }
      }
    }
    __device__ __forceinline__ float At(int i, int j) const {
      const int in_four = i % 4 / 2 * 4 + j % 2 * 2 + i % 2;
      return kProducts64 == 2 ? sums[j / 2][i / 4 * 8 + in_four] : sums[0][(i / 4 * 2 + j / 2) * 8 + in_four];
    }

   private:
    __device__ __forceinline__ static void Hold(float (&of)[kProducts64][kSums]) {
#pragma unroll
      for (auto& product : of) HoldRegisters(product);
    }
    // Of a step, as wgmma takes them from registers.
    __device__ __forceinline__ void LoadColumns(const float* columns,
                                                unsigned (&a)[kProducts64][kParts][4]) const {
      constexpr int kElementsOfThread = 2 * Of::kPerWord;
      float x[kElementsOfThread][2 * kProducts64];
#pragma unroll
      for (int q = 0; q < kElementsOfThread; ++q) {
        const float* const from = columns + (lane % 4 + 4 * q) * kPitch + own_column;
        if constexpr (kProducts64 == 2) {
          const float4 four = *reinterpret_cast<const float4*>(from);
          x[q][0] = four.x, x[q][1] = four.y, x[q][2] = four.z, x[q][3] = four.w;
        } else {
          const float2 two = *reinterpret_cast<const float2*>(from);
          x[q][0] = two.x, x[q][1] = two.y;
        }
      }
#pragma unroll
      for (int e = 0; e < 2 * kProducts64; ++e) {
#pragma unroll
        for (int word = 0; word < 2; ++word) {
          unsigned parts[kParts];
          Split<kPrecision>(x[word * Of::kPerWord][e], x[word * Of::kPerWord + Of::kPerWord - 1][e], parts);
#pragma unroll
          for (int part = 0; part < kParts; ++part) a[e / 2][part][word * 2 + e % 2] = parts[part];
        }
      }
    }
  };
};

// As many stages as the blocks of a multiprocessor leave room for.
template <FloatPrecision kPrecision>
struct TilesOf;
template <>
struct TilesOf<FloatPrecision::kFloat16> {
  static constexpr auto kOf = FloatPrecision::kFloat16;
  using Types = std::tuple<WgmmaTile<kOf, 2, 128, 1, 2, 5, 1>, WgmmaTile<kOf, 2, 128, 1, 1, 4, 2>,
                           WgmmaTile<kOf, 1, 128, 1, 1, 4, 3>, WgmmaTile<kOf, 1, 64, 1, 1, 4, 4>>;
};
template <>
struct TilesOf<FloatPrecision::kTf32> {
  static constexpr auto kOf = FloatPrecision::kTf32;
  using Types = std::tuple<WgmmaTile<kOf, 2, 128, 1, 2, 4, 1>, WgmmaTile<kOf, 2, 128, 1, 1, 3, 2>,
                           WgmmaTile<kOf, 1, 128, 1, 1, 4, 2>, WgmmaTile<kOf, 1, 64, 1, 1, 4, 3>>;
};
// A thread has twice the sums.
template <>
struct TilesOf<FloatPrecision::k3xTf32> {
  static constexpr auto kOf = FloatPrecision::k3xTf32;
  using Types = std::tuple<WgmmaTile<kOf, 2, 64, 1, 2, 4, 1>, WgmmaTile<kOf, 2, 64, 1, 1, 3, 2>,
                           WgmmaTile<kOf, 1, 64, 1, 2, 4, 1>, WgmmaTile<kOf, 1, 64, 1, 1, 4, 2>>;
};

// Weights [groups][rows][k] as blocks copy them.
template <FloatPrecision kPrecision>
std::vector<uint4> PackWeights(const WgmmaParams& p, const std::vector<float>& weights) {
  using Of = Words<kPrecision>;
  const int steps = p.depth / Of::kElements;
  const auto weight = [&](int64_t group, int row, int k) {
    if (row >= p.rows || k >= p.k) return 0.0f;
    return weights[static_cast<size_t>((group * p.rows + row) * p.k + k)];
  };
  std::vector<uint4> out;
  out.reserve(static_cast<size_t>(int64_t{p.groups} * steps * Of::kParts * p.row_groups * 2 * kRowGroup));
  for (int64_t group = 0; group < p.groups; ++group) {
    for (int at = 0; at < steps * Of::kParts * p.row_groups * 2 * kRowGroup; ++at) {
      const int in_group = at % kRowGroup, half = at / kRowGroup % 2,
                row_group = at / (2 * kRowGroup) % p.row_groups;
      const int part = at / (2 * kRowGroup) / p.row_groups % Of::kParts,
                step = at / (2 * kRowGroup) / p.row_groups / Of::kParts;
      const int row = row_group / 2 * kFourRows + in_group / 2 * 4 + row_group % 2 * 2 + in_group % 2;
      const auto word = [&](int i) {
        const int k = step * Of::kElements + i + half * 4 * Of::kPerWord;
        return WordOf<kPrecision>(part, weight(group, row, k),
                                  weight(group, row, k + 4 * (Of::kPerWord - 1)));
      };
      out.push_back({word(0), word(1), word(2), word(3)});
    }
  }
  out.resize(out.size() + size_t{kMostRows * 2}, uint4{0, 0, 0, 0});
  return out;
}

template <typename Column, typename Op>
PackedNodePtr PackProduct(const char* name, const Op& op, const Device& device, FloatPrecision precision,
                          const Limits& limits, const FloatTiling& tiling) {
  const auto pack = [&](auto known) {
    constexpr FloatPrecision kPrecision = decltype(known)::value;
    using Tiles = typename TilesOf<kPrecision>::Types;
    static_assert(FloatTiling::kTensorTiles == std::tuple_size_v<Tiles>);
    WgmmaParams shared;
    DescribeTiles(op, limits, kStageElements, shared);
    shared.row_groups = static_cast<int>(BlocksFor(shared.rows, kFourRows)) * (kFourRows / kRowGroup);
    const auto plan = [=, text = std::string(name) + "_" + NameOf(precision) +
                                 " wgmma"](const WgmmaParams& geometry) {
      return PlanProduct<Tiles, Column>(text, geometry, device, tiling);
    };
    return MakeProduct(op, shared, PackWeights<kPrecision>(shared, op.weights), device, plan);
  };
  return std::visit(
      pack, OneOf<FloatPrecision::kFloat16, FloatPrecision::kTf32, FloatPrecision::k3xTf32>(precision));
}

}  // namespace

PackedNodePtr PackWgmmaProduct(const FloatGemmOp& op, const Device& device, FloatPrecision precision,
                               const Limits& limits, const FloatTiling& tiling) {
  return PackProduct<GemmColumn>("float_gemm", op, device, precision, limits, tiling);
}
PackedNodePtr PackWgmmaProduct(const FloatConvOp& op, const Device& device, FloatPrecision precision,
                               const Limits& limits, const FloatTiling& tiling) {
  return PackProduct<ConvColumn>("float_conv", op, device, precision, limits, tiling);
}

}  // namespace lowbit::cuda
