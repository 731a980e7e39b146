// Float products on Tensor Cores: operands are rounded as they are packed (weights) and read (x), products summed in
// float32.
//
// A warp multiplies 32 rows, or twice as many, by 32 columns. Which row, column or element of k an instruction calls
// which is free as long as its operands agree: a thread's numbers are those that lie side by side. So it reads four
// columns of x at once, holds squares of four by four outputs, and fetches its four words of 16 rows of weights at once,
// which lie in the order in which threads hold them.
#include "kernels/cuda/nodes/float_tiles.cuh"
#include "kernels/cuda/nodes/float_words.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kTileRows = 16;  // of one instruction
constexpr int kWarpRows = 32, kWarpColumns = 32;
constexpr int kMostRows = 128;  // of a block

struct TensorParams : SplitParams {
  const uint4* weights = nullptr;  // [parts][groups][row tiles][steps][lanes], and what a block reads beyond
  int row_tiles = 0, steps = 0;
  int64_t part = 0;  // from one part to the next
};

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

template <FloatPrecision kPrecision, int kWarpsDown, int kGroups, int kWarpsAcross, int kStagesOf>
struct TensorTile {
  using Of = Words<kPrecision>;
  using Params = TensorParams;
  static constexpr int kRows = kWarpRows * kGroups * kWarpsDown, kColumns = kWarpColumns * kWarpsAcross;
  static constexpr int kOutputs = kRows * kColumns, kBlock = kWarp * kWarpsDown * kWarpsAcross,
                       kBlocks = Of::kHalves && kBlock < 256 ? 384 / kBlock : 1, kRegisters = 128;
  static constexpr int kThreadRows = 4 * kGroups, kThreadColumns = 8, kRowStep = kWarpRows, kColumnStep = 4;
  static constexpr int kStages = kStagesOf, kSteps = 2, kDepth = kSteps * Of::kElements;
  static constexpr int kTiles = kRows / kTileRows, kParts = Of::kParts;
  static constexpr int kWeightFours = kParts * kTiles * kSteps * kWarp, kWeightFloats = 4 * kWeightFours;
  // The four elements of k that a warp reads at once begin in different banks.
  static constexpr int kPitch = kColumns + 8;
  static constexpr double kProducts = Of::kHalves   ? ProductRates::kMmaHalves
                                      : kParts == 1 ? ProductRates::kMmaTf32
                                                    : ProductRates::kMma3xTf32;
  static constexpr double kWeightBytes = Of::kHalves ? 2 : 4 * kParts;
  static_assert(kRows <= kMostRows);

  struct Weights {
    static constexpr int kTileStep = kBlock / (kWarp * kSteps);
    static_assert(kTileStep > 0 && kTiles % kTileStep == 0);
    const TensorParams& p;
    const uint4* first;
    uint32_t to;

    __device__ __forceinline__ Weights(const TensorParams& params, int group, int i0, int k0, uint32_t stages)
        : p(params) {
      const int tid = static_cast<int>(threadIdx.x);
      const int64_t tile = int64_t{group} * p.row_tiles + i0 / kTileRows + tid / (kWarp * kSteps);
      first = p.weights + (tile * p.steps + k0 / Of::kElements) * kWarp + tid % (kWarp * kSteps);
      to = stages + tid * 16;
    }
    __device__ __forceinline__ void Fetch(int step, int stage) const {
      const uint4* const of_step = first + int64_t{step} * (kSteps * kWarp);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int tile = 0; tile < kTiles; tile += kTileStep) {
          CopyAsync<16>(
              to + stage * kStageFloats<TensorTile> * 4 + (part * kTiles + tile) * kSteps * kWarp * 16,
              of_step + part * p.part + int64_t{tile} * p.steps * kWarp);
        }
      }
    }
  };

  struct Sums {
    float sums[2 * kGroups][4][4] = {};  // [tiles of rows][tiles of columns][of an instruction]
    int lane, warp_down, warp_across, row, column;

    __device__ __forceinline__ Sums() {
      lane = static_cast<int>(threadIdx.x) % kWarp;
      const int warp = static_cast<int>(threadIdx.x) / kWarp;
      warp_down = warp / kWarpsAcross, warp_across = warp % kWarpsAcross;
      row = warp_down * kGroups * kWarpRows + lane / 4 * 4;
      column = warp_across * kWarpColumns + lane % 4 * 8;
    }
    __device__ __forceinline__ void Multiply(const float* weights, const float* columns) {
      if constexpr (kParts == 1) return Multiply(weights, columns, sums);
      // The sums of a stage by themselves: the units cut what they add, so that errors grow with the length of a sum
      // that they make.
      float c[2 * kGroups][4][4] = {};
      Multiply(weights, columns, c);
#pragma unroll
      for (int m = 0; m < 2 * kGroups; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[m][n][e] = __fadd_rn(sums[m][n][e], c[m][n][e]);
        }
      }
    }
    __device__ __forceinline__ void Multiply(const float* weights, const float* columns,
                                             float (&c)[2 * kGroups][4][4]) const {
      const uint4* const fours = reinterpret_cast<const uint4*>(weights);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        float4 x[2 * Of::kPerWord];
#pragma unroll
        for (int q = 0; q < 2 * Of::kPerWord; ++q) {
          const int k = step * Of::kElements + lane % 4 + 4 * q;
          x[q] = *reinterpret_cast<const float4*>(columns + k * kPitch + warp_across * kWarpColumns +
                                                  lane / 4 * 4);
        }
        unsigned b[4][kParts][2];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
          for (int word = 0; word < 2; ++word) {
            unsigned parts[kParts];
            Split<kPrecision>(ElementOf(x[word * Of::kPerWord], n),
                              ElementOf(x[word * Of::kPerWord + Of::kPerWord - 1], n), parts);
#pragma unroll
            for (int part = 0; part < kParts; ++part) b[n][part][word] = parts[part];
          }
        }
#pragma unroll
        for (int m = 0; m < 2 * kGroups; ++m) {
          unsigned a[kParts][4];
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            const int tile = part * kTiles + warp_down * 2 * kGroups + m;
            const uint4 four = fours[(tile * kSteps + step) * kWarp + lane];
            a[part][0] = four.x, a[part][1] = four.y, a[part][2] = four.z, a[part][3] = four.w;
          }
#pragma unroll
          for (int n = 0; n < 4; ++n) MultiplyParts<kPrecision>(c[m][n], a, b[n]);
        }
      }
    }
    __device__ __forceinline__ float At(int i, int j) const { return sums[i / 2][j % 4][i % 2 * 2 + j / 4]; }
  };
};
template <FloatPrecision kPrecision>
using TensorTiles = std::tuple<TensorTile<kPrecision, 2, 2, 4, 3>, TensorTile<kPrecision, 2, 2, 2, 4>,
                               TensorTile<kPrecision, 2, 1, 2, 4>, TensorTile<kPrecision, 2, 1, 1, 4>>;
static_assert(FloatTiling::kTensorTiles == std::tuple_size_v<TensorTiles<FloatPrecision::kFloat16>>);

// Weights [groups][rows][k] as the threads hold them.
template <FloatPrecision kPrecision>
std::vector<uint4> PackWeights(const TensorParams& p, const std::vector<float>& weights) {
  using Of = Words<kPrecision>;
  std::vector<uint4> out;
  const int64_t beyond = int64_t{kMostRows / kTileRows} * p.steps * kWarp;
  out.reserve(static_cast<size_t>(Of::kParts * p.part + beyond));
  for (int part = 0; part < Of::kParts; ++part) {
    for (int64_t at = 0; at < p.part; ++at) {
      const auto lane = static_cast<int>(at % kWarp), step = static_cast<int>(at / kWarp % p.steps);
      const int64_t tile = at / kWarp / p.steps, group = tile / p.row_tiles, of_group = tile % p.row_tiles;
      const auto word = [&](int i) {
        const int64_t row = of_group / 2 * kWarpRows + lane / 4 * 4 + of_group % 2 * 2 + i % 2;
        const auto weight = [&](int half) {
          const int k = step * Of::kElements + lane % 4 + 4 * half + i / 2 * 4 * Of::kPerWord;
          if (row >= p.rows || k >= p.k) return 0.0f;
          return weights[static_cast<size_t>((group * p.rows + row) * p.k + k)];
        };
        return WordOf<kPrecision>(part, weight(0), weight(Of::kPerWord - 1));
      };
      out.push_back({word(0), word(1), word(2), word(3)});
    }
  }
  out.resize(out.size() + static_cast<size_t>(beyond), uint4{0, 0, 0, 0});
  return out;
}

template <typename Column, typename Op>
PackedNodePtr PackProduct(const std::string& name, const Op& op, const Device& device,
                          FloatPrecision precision, const Limits& limits, const FloatTiling& tiling) {
  const auto pack = [&](auto known) {
    constexpr FloatPrecision kPrecision = decltype(known)::value;
    using Tiles = TensorTiles<kPrecision>;
    TensorParams shared;
    DescribeTiles(op, limits, std::tuple_element_t<0, Tiles>::kDepth, shared);
    shared.steps = shared.depth / Words<kPrecision>::kElements;
    shared.row_tiles = static_cast<int>(BlocksFor(shared.rows, kWarpRows)) * (kWarpRows / kTileRows);
    shared.part = int64_t{shared.groups} * shared.row_tiles * shared.steps * kWarp;
    const auto plan = [=, text = name + "_" + NameOf(precision)](const TensorParams& geometry) {
      return PlanProduct<Tiles, Column>(text, geometry, device, tiling);
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
         (UsesTensorCores(precision) && device.capability >= kFirstTf32);
}

bool HasWgmma(const Device& device) { return device.capability == 90; }

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
                                const Limits& limits, const FloatTiling& tiling) {
  if (HasWgmma(device)) return PackWgmmaProduct(op, device, precision, limits, tiling);
  return PackProduct<GemmColumn>("float_gemm", op, device, precision, limits, tiling);
}
PackedNodePtr PackTensorProduct(const FloatConvOp& op, const Device& device, FloatPrecision precision,
                                const Limits& limits, const FloatTiling& tiling) {
  if (HasNhwcConv(op, device, precision)) return PackNhwcConv(op, device, precision, limits, tiling);
  if (HasWgmma(device)) return PackWgmmaProduct(op, device, precision, limits, tiling);
  return PackProduct<ConvColumn>("float_conv", op, device, precision, limits, tiling);
}

}  // namespace lowbit::cuda
