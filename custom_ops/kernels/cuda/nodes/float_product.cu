// Gemm, MatMul and Conv in float32 on the CUDA cores, summed with fma. Rows are outputs (of the node or a group), columns
// are rows of A or pixels. A thread multiplies 4, 8 or 14 outputs along either side, whose operands it reads from shared
// memory 16 bytes at a time.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "kernels/cuda/nodes/few_channels.cuh"
#include "kernels/cuda/nodes/float_tiles.cuh"
#include "kernels/cuda/nodes/one_channel.cuh"

namespace lowbit::cuda {
namespace {

struct FloatParams : SplitParams {
  const float* weights = nullptr;  // [groups][depth][pitch], with zeros behind the elements of k and the rows
  int pitch = 0;
  int chunk = 1;  // channels side by side along k: those of a stage where p.taps_first
};

// What the estimate of these tiles counts with, of a multiprocessor. As ProductRates, it decides how sums are split, so that
// another number here is another bit. Fitted on H100s, all tiles with up to 64 slices: to 40 convolutions in rows of equals
// (16 of each, batch 1 and 16), and to what changes the time of a whole ResNet (each of its kinds of layers with other tiles,
// ResNet-50 at batch 1 and 16, ResNet-18 at 1). What is estimated of good tiles is off by 6 % on average; networks take 1.01
// times what they take with the best tiles, rows at batch 1 at most 1.02. What tiles of 28 columns multiply is of rows at batch 1
// alone (19 layers of 7x7 to 112x112 pixels), and so is what 64x64 ones do of 1x1 layers (18): what is chosen of all tiles takes
// at most 1.05 times what the best one takes, but for 1x1 layers of 2048 channels at 7x7 (1.07, 1.09).
struct FloatRates {
  // Clocks of the first blocks, and of those that find no room beside them.
  static constexpr double kStart = 2450, kWave = 3000;
  // In a clock: bytes of the L2 cache, of outputs sent in a cluster, of those that teams leave to be added.
  static constexpr double kBytes = 20, kSent = 13, kMet = 26;
  static constexpr double kHiding = 2600;  // outputs under way that are half as fast
  // Which part of the multiprocessors clusters of more than two blocks reach, of which each holds several.
  static constexpr double kReached = 0.89;
};

// Which part of the blocks that there is room for clusters of so many make: each lies within about 16 multiprocessors.
double PartInClusters(int blocks, int at_once) {
  if (at_once == 1) {
    const int all = DeviceOfEstimates().multiprocessors;
    return static_cast<double>(RoomForClusters(blocks, all)) / all;
  }
  const int room = 16 * at_once;
  return static_cast<double>(room / blocks * blocks) / room * (blocks > 2 ? FloatRates::kReached : 1);
}

// What lies behind a tile's last row is copied from another one, and not stored.
template <typename T>
struct RowWeights {
  static constexpr int kFours = T::kRows / 4, kStep = T::kBlock / kFours, kPasses = T::kDepth / kStep;
  static_assert(T::kBlock % kFours == 0 && T::kDepth % kStep == 0);
  struct Copies {
    const float* from;
    uint32_t to;
    bool any;
  };
  const FloatParams& p;
  const float* first;
  uint32_t to;

  __device__ __forceinline__ RowWeights(const FloatParams& params, int group, int i0, int k0, uint32_t stages)
      : p(params) {
    const int four = ThreadOfTeam<T>() % kFours, k = ThreadOfTeam<T>() / kFours;
    first = p.weights + (static_cast<int64_t>(group) * p.depth + k0 + k) * p.pitch +
            min(i0 + 4 * four, p.pitch - 4);
    to = stages + (k * T::kRows + 4 * four) * 4;
  }
  __device__ __forceinline__ Copies Begin(int step, int stage, bool any) const {
    return {first + static_cast<int64_t>(step * T::kDepth) * p.pitch, to + stage * kStageFloats<T> * 4, any};
  }
  __device__ __forceinline__ void Copy(Copies& copies, int pass) const {
    CopyAsyncAmong<16, false>(copies.to + pass * kStep * T::kRows * 4, copies.from, true, copies.any);
    copies.from += static_cast<int64_t>(kStep) * p.pitch;
  }
  __device__ __forceinline__ void Fetch(int step, int stage) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      CopyAsync<16>(to + (stage * kStageFloats<T> + pass * kStep * T::kRows) * 4,
                    first + static_cast<int64_t>(step * T::kDepth + pass * kStep) * p.pitch);
    }
  }
};

// About how many clocks a multiprocessor needs for its blocks, some at once and those waves one after the other.
template <typename T>
double CostOfBlocks(const SplitParams& p, int slices, int multiprocessors, int products, int plain_products) {
  using Rates = FloatRates;
  constexpr int kShared = 227 << 10, kSharedOfBlock = 1 << 10;
  const int blocks = slices / T::kTeams;  // of a tile of outputs
  if (blocks > kMostBlocks) return std::numeric_limits<double>::infinity();
  const int at_once = std::min(T::kBlocks, kShared / (SharedBytes<T>(blocks > 1) + kSharedOfBlock));
  const double tiles =
      static_cast<double>(BlocksFor(p.columns, T::kColumns)) * BlocksFor(p.rows, T::kRows) * p.groups;
  const double all = tiles * blocks / (multiprocessors * PartInClusters(blocks, at_once));
  const double waves = std::floor(all / at_once), rest = std::ceil(all - waves * at_once);
  // Elements of k: halfway between what takes as long as a team's longest slice and what the block has, since teams that
  // are done leave their time to the others.
  const auto steps_of = [&](int parts) { return BlocksFor(p.depth, int64_t{parts} * T::kDepth); };
  const double longest = T::kDepth * 0.5 * (steps_of(slices) * T::kTeams + steps_of(blocks));
  const double most = p.by_taps.divisor == 1 ? plain_products : products;
  const double fetched = (T::kRows + T::kColumns) * longest * sizeof(float) / Rates::kBytes;
  constexpr double kSum = T::kOutputs * sizeof(float);  // bytes
  const double sent =
      (blocks > 1 ? kSum / Rates::kSent : 0) + (T::kTeams > 1 ? kSum * T::kTeams / Rates::kMet : 0);
  const auto together = [&](double count) {  // clocks of so many blocks at once
    const double under_way = count * T::kOutputs * T::kTeams;
    const double multiplied = T::kOutputs * longest * (under_way + Rates::kHiding) / (under_way * most);
    return count * (std::max(multiplied, fetched) + sent);
  };
  const double last = rest > 0 ? together(rest) : -Rates::kWave;
  return Rates::kStart + waves * (together(at_once) + Rates::kWave) + last;
}

// kProducts, kPlainProducts: products in a clock of very many outputs under way, of windows and where those are 1x1.
template <int kTileRows, int kTileColumns, int kRowsOfThread, int kColumnsOfThread, int kStagesOf,
          int kProducts, int kPlainProducts, int kTeamsOf = 1, int kThreadsAtOnce = 512>
struct Tile {
  using Params = FloatParams;
  static constexpr int kRows = kTileRows, kColumns = kTileColumns, kOutputs = kRows * kColumns;
  static constexpr int kThreadRows = kRowsOfThread, kThreadColumns = kColumnsOfThread, kStages = kStagesOf;
  static constexpr int kTeams = kTeamsOf, kBlock = kOutputs / (kThreadRows * kThreadColumns),
                       kBlocks = kThreadsAtOnce / (kBlock * kTeams);
  static constexpr int kDepth = 16;
  using TapSource = ChannelsSource<Tile>;
  static constexpr int kFoursDown = kThreadRows / 4, kFoursAcross = kThreadColumns / 4;
  static constexpr int kRowStep = kRows / kFoursDown, kColumnStep = kColumns / kFoursAcross;
  // Elements of a column are copied side by side along k, too, which then lie in other banks.
  static constexpr int kWeightFloats = kDepth * kRows, kPitch = kColumns + 4;
  // The threads of a warp: few addresses of either operand, and those next to each other.
  static constexpr int kAcross = kColumns / kThreadColumns;  // threads along a row
  static constexpr int kLanesAcross = kAcross < 8 ? kAcross : 8, kLanesDown = kWarp / kLanesAcross;
  static constexpr int kWarpsAcross = kAcross / kLanesAcross;
  static_assert(kRows / kThreadRows * kAcross == kBlock && kLanesDown * kLanesAcross == kWarp);

  using Weights = RowWeights<Tile>;
  struct Sums {
    float sums[kThreadRows][kThreadColumns] = {};
    int row, column;

    __device__ __forceinline__ Sums() {
      const int lane = ThreadOfTeam<Tile>() % kWarp, warp = ThreadOfTeam<Tile>() / kWarp;
      row = 4 * (warp / kWarpsAcross * kLanesDown + lane / kLanesAcross);
      column = 4 * (warp % kWarpsAcross * kLanesAcross + lane % kLanesAcross);
    }
    __device__ __forceinline__ void Multiply(const float* weights, const float* columns) {
      Multiply(weights, columns, [](int) {});
    }
    template <typename Among>
    __device__ __forceinline__ void Multiply(const float* weights, const float* columns, const Among& among) {
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
        float4 w[kFoursDown], x[kFoursAcross];
#pragma unroll
        for (int i = 0; i < kFoursDown; ++i) {
          w[i] = *reinterpret_cast<const float4*>(weights + k * kRows + row + i * kRowStep);
        }
#pragma unroll
        for (int j = 0; j < kFoursAcross; ++j) {
          x[j] = *reinterpret_cast<const float4*>(columns + k * kPitch + column + j * kColumnStep);
        }
        among(k);
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
          for (int j = 0; j < kThreadColumns; ++j) {
            sums[i][j] = __fmaf_rn(ElementOf(w[i / 4], i % 4), ElementOf(x[j / 4], j % 4), sums[i][j]);
          }
        }
      }
    }
    __device__ __forceinline__ float At(int i, int j) const { return sums[i][j]; }
  };

  static double CostOf(const SplitParams& p, int slices, int multiprocessors) {
    return CostOfBlocks<Tile>(p, slices, multiprocessors, kProducts, kPlainProducts);
  }
};

// Of 28 columns, as many as divide images of 14, 28, 56 and 112 pixels a side: their last tile is not cut off, as one of 32 or
// 64 columns is. A thread makes four outputs of 14, in three fours and a pair.
template <int kTileRows, int kTeamsOf, int kProducts, int kPlainProducts>
struct RunTile {
  using Params = FloatParams;
  static constexpr int kRows = kTileRows, kColumns = 28, kOutputs = kRows * kColumns;
  static constexpr int kThreadRows = 4, kThreadColumns = 14, kStages = 3, kDepth = 16;
  static constexpr int kTeams = kTeamsOf, kBlock = kOutputs / (kThreadRows * kThreadColumns);
  static constexpr int kBlocks = 256 / (kBlock * kTeams);
  static constexpr bool kCopiesAmong = true;
  using TapSource = ChannelsSource<RunTile>;
  using Weights = RowWeights<RunTile>;
  static constexpr int kFours = 3, kAcross = kColumns / kThreadColumns;
  static constexpr int kRowStep = kRows, kColumnStep = 4 * kAcross;
  static constexpr int kWeightFloats = kDepth * kRows, kPitch = kColumns + 4;
  static_assert(kBlock % kWarp == 0);

  struct Sums {
    float sums[kThreadRows][kThreadColumns] = {};
    int row, column, pair;  // the first row, where the first four and the pair are

    __device__ __forceinline__ Sums() {
      row = kThreadRows * (ThreadOfTeam<RunTile>() / kAcross);
      column = 4 * (ThreadOfTeam<RunTile>() % kAcross);
      pair = kFours * kColumnStep + column / 2;
    }
    template <typename Among>
    __device__ __forceinline__ void Multiply(const float* weights, const float* columns, const Among& among) {
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
        const float4 w = *reinterpret_cast<const float4*>(weights + k * kRows + row);
        float4 x[kFours];
#pragma unroll
        for (int j = 0; j < kFours; ++j) {
          x[j] = *reinterpret_cast<const float4*>(columns + k * kPitch + column + j * kColumnStep);
        }
        const float2 last = *reinterpret_cast<const float2*>(columns + k * kPitch + pair);
        among(k);
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
          for (int j = 0; j < 4 * kFours; ++j) {
            sums[i][j] = __fmaf_rn(ElementOf(w, i), ElementOf(x[j / 4], j % 4), sums[i][j]);
          }
          sums[i][4 * kFours] = __fmaf_rn(ElementOf(w, i), last.x, sums[i][4 * kFours]);
          sums[i][4 * kFours + 1] = __fmaf_rn(ElementOf(w, i), last.y, sums[i][4 * kFours + 1]);
        }
      }
    }
    __device__ __forceinline__ void Put(float* tile) const {
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        float* const line = tile + (row + i) * kColumns;
        const float* const v = sums[i];
#pragma unroll
        for (int j = 0; j < kFours; ++j) {
          *reinterpret_cast<float4*>(line + column + j * kColumnStep) =
              make_float4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
        }
        *reinterpret_cast<float2*>(line + pair) = make_float2(v[4 * kFours], v[4 * kFours + 1]);
      }
    }
    __device__ __forceinline__ float At(int i, int j) const { return sums[i][j]; }
  };

  static double CostOf(const SplitParams& p, int slices, int multiprocessors) {
    return CostOfBlocks<RunTile>(p, slices, multiprocessors, kProducts, kPlainProducts);
  }
};

using Tiles =
    std::tuple<Tile<128, 64, 8, 8, 3, 97, 85>, Tile<64, 64, 8, 4, 4, 95, 84>, Tile<64, 32, 8, 4, 4, 90, 71>,
               Tile<64, 32, 8, 4, 4, 97, 95, 4>, Tile<64, 32, 8, 8, 3, 97, 84, 8, 256>,
               RunTile<64, 8, 97, 88>, RunTile<128, 4, 102, 88>, Tile<128, 8, 4, 4, 6, 96, 92>>;
constexpr int kDepth = std::tuple_element_t<0, Tiles>::kDepth;
static_assert(FloatTiling::kTiles == std::tuple_size_v<Tiles>);

// Few outputs of a group (depthwise), or windows that reach beyond 31 bits: a thread sums one output.
__global__ void __launch_bounds__(kThreads) ConvNarrow(const __grid_constant__ FloatParams p) {
  const int j = static_cast<int>(StartThread());
  if (j >= p.columns) return;
  const int channel = static_cast<int>(blockIdx.y), group = channel / p.rows, row = channel - group * p.rows;
  const ConvColumn column(p, group, j);
  const float* weight = p.weights + static_cast<int64_t>(group) * p.depth * p.pitch + row;
  const int64_t plane = ConvColumn::ChannelStep(p);
  float sum = 0;
  for (int chunk = 0; chunk < p.channels; chunk += p.chunk) {
    for (unsigned ty = 0; ty < p.windows.h.kernel; ++ty) {
      for (unsigned tx = 0; tx < p.windows.w.kernel; ++tx) {
        const float* const x = column.At(p, ty, tx);
        for (int c = chunk; c < chunk + p.chunk; ++c, weight += p.pitch) {
          sum = __fmaf_rn(*weight, x == nullptr ? 0.0f : x[c * plane], sum);
        }
      }
    }
  }
  const int64_t at = ConvColumn::Target(p, group, row, j);
  p.y[at] = FinishSum(p, channel, sum, ResidualAt(p, at));
}

// Whether a thread sums an output, front to back.
template <typename Column>
bool IsNarrow(const FloatParams& p) {
  constexpr int kNarrow = 8;
  if (kStoresColumns<Column>) return false;
  const bool may = int64_t{p.rows} * p.groups <= kMostGridRows;
  return may && (!IsNear(p) || (p.groups > 1 && p.rows < kNarrow));
}

void LaunchNarrow(const Run& run, const FloatParams& p) {
  const dim3 grid(BlocksFor(p.columns, kThreads), static_cast<unsigned>(p.rows * p.groups));
  run.Launch(ConvNarrow, grid, kThreads, p);
}

// Convolutions that bands may serve have one slice, as those have.
bool HasFewChannels(const FloatParams& p) {
  constexpr int kMostProducts = 256;
  return p.groups == 1 && p.channels <= kMostFewChannels && p.k <= kMostProducts;
}

template <typename Op>
FloatParams Described(const Op& op, const Limits& limits) {
  FloatParams p;
  DescribeTiles(op, limits, kDepth, p);
  p.pitch = static_cast<int>(BlocksFor(p.rows, 4)) * 4;
  p.more_slices = true;
  p.most_slices = kMostSlices;
  p.taps_first = std::is_same_v<Op, FloatConvOp> && p.channels > 0 && p.channels % kDepth == 0;
  p.chunk = p.taps_first ? kDepth : 1;
  if (std::is_same_v<Op, FloatConvOp> && HasFewChannels(p)) p.most_slices = 1;
  return p;
}

SumSlices OrderOf(const FloatParams& p, int slices) {
  return {slices, p.depth / kDepth, kDepth, p.chunk, static_cast<int>(p.by_taps.divisor)};
}

// Weights [groups][rows][k] as the blocks copy them.
std::vector<float> PackWeights(const FloatParams& p, const std::vector<float>& weights) {
  std::vector<float> out(static_cast<size_t>(int64_t{p.groups} * p.depth * p.pitch));
  const SumSlices order = OrderOf(p, 1);
  std::vector<int64_t> element_at;
  for (int64_t k = 0; k < p.k; ++k) element_at.push_back(order.ElementAt(k));
  const float* w = weights.data();
  for (int64_t group = 0; group < p.groups; ++group) {
    float* const of_group = out.data() + group * p.depth * p.pitch;
    for (int64_t row = 0; row < p.rows; ++row, w += p.k) {
      for (int64_t k = 0; k < p.k; ++k) of_group[k * p.pitch + row] = w[element_at[static_cast<size_t>(k)]];
    }
  }
  return out;
}

// Of sums that stay floats; longer ones take less time in tiles (a 7x7 window of three channels, 16 images of 224x224, H100:
// 141 us in bands, 128 in tiles).
constexpr int kMostBandProducts = 128;

// How a convolution is cut into bands, if it is.
std::optional<BandParams> BandsOf(const FloatParams& p, const Device& device,
                                  const FloatTiling& tiling = {}) {
  BandParams bands{p, p.weights, p.pitch};
  bands.slices = CheapestSlices<Tiles, ConvColumn>(p, tiling.slices);
  if (tiling.tile >= 0 || !CutIntoBands(bands, device)) return std::nullopt;
  return bands;
}

template <typename Column, typename Op>
PackedNodePtr PackProduct(const char* name, const Op& op, const Device& device, const Limits& limits,
                          const FloatTiling& tiling, const Quantizer* codes = nullptr) {
  const FloatParams shared = Described(op, limits);
  const QuantizerGrid grid = codes == nullptr ? QuantizerGrid() : MakeGrid(*codes);
  const auto plan = [=, to_codes = codes != nullptr](const FloatParams& geometry) {
    if (IsNarrow<Column>(geometry)) {
      return MakeKernelPlan(std::string(name) + " narrow", geometry, LaunchNarrow);
    }
    if constexpr (!kStoresColumns<Column>) {
      auto bands = BandsOf(geometry, device, tiling);
      if (bands && (to_codes || geometry.k <= kMostBandProducts)) {
        bands->grid = grid;
        OneChannelParams tasks{geometry, geometry.weights, geometry.pitch};
        tasks.slices = bands->slices;
        if (!to_codes && CutIntoTasks(tasks, device)) return PlanTasks(name, tasks, *bands, device);
        return PlanBands(name, *bands, device, to_codes);
      }
    }
    return PlanProduct<Tiles, Column>(name, geometry, device, tiling);
  };
  return MakeProduct(op, shared, PackWeights(shared, op.weights), device, plan);
}

template <typename Column, typename Op>
SumSlices SlicesOfShapes(const Op& op, const TensorShape& x, const TensorShape& y,
                         const FloatTiling& tiling) {
  FloatParams p = Described(op, {});
  SetShapes(op, x, y, p);
  const int slices = IsNarrow<Column>(p) ? 1 : CheapestSlices<Tiles, Column>(p, tiling.slices);
  return OrderOf(p, slices);
}

}  // namespace

SumSlices SlicesOf(const FloatGemmOp& op, const TensorShape& x, const TensorShape& y,
                   const FloatTiling& tiling) {
  return SlicesOfShapes<GemmColumn>(op, x, y, tiling);
}
SumSlices SlicesOf(const FloatConvOp& op, const TensorShape& x, const TensorShape& y,
                   const FloatTiling& tiling) {
  return SlicesOfShapes<ConvColumn>(op, x, y, tiling);
}

double CostOfTiles(const FloatConvOp& op, const TensorShape& x, const TensorShape& y) {
  FloatParams p = Described(op, {});
  SetShapes(op, x, y, p);
  return CheapestTile<Tiles, ConvColumn>(p, CheapestSlices<Tiles, ConvColumn>(p), DeviceOfEstimates()).cost;
}

PackedNodePtr PackTiled(const FloatGemmOp& op, const Device& device, const Limits& limits,
                        const FloatTiling& tiling) {
  return PackProduct<GemmColumn>("float_gemm", op, device, limits, tiling);
}
PackedNodePtr PackTiled(const FloatConvOp& op, const Device& device, const Limits& limits,
                        const FloatTiling& tiling) {
  return PackProduct<ConvColumn>("float_conv", op, device, limits, tiling);
}

bool MayMakeCodes(const FloatConvOp& op, const Quantizer& codes) {
  return op.group == 1 && op.in_channels <= kMostFewChannels && QuantizesFast(codes);
}
PackedNodePtr PackToCodes(const FloatConvOp& op, const Device& device, const Limits& limits,
                          const Quantizer& codes) {
  return PackProduct<ConvColumn>("float_conv", op, device, limits, {}, &codes);
}
bool MakesCodes(const FloatConvOp& op, const TensorShape& x, const TensorShape& y, const Device& device) {
  FloatParams p = Described(op, {});
  SetShapes(op, x, y, p);
  return !IsNarrow<ConvColumn>(p) && BandsOf(p, device).has_value();
}

PackedNodePtr Pack(const FloatGemmOp& op, const Device& device, FloatPrecision precision,
                   const Limits& limits) {
  return HasTensorProduct(op, device, precision) ? PackTensorProduct(op, device, precision, limits)
                                                 : PackTiled(op, device, limits);
}
PackedNodePtr Pack(const FloatConvOp& op, const Device& device, FloatPrecision precision,
                   const Limits& limits) {
  if (precision == FloatPrecision::kWinograd && HasWinograd(op)) return PackWinograd(op, device, limits);
  return HasTensorProduct(op, device, precision) ? PackTensorProduct(op, device, precision, limits)
                                                 : PackTiled(op, device, limits);
}

}  // namespace lowbit::cuda
