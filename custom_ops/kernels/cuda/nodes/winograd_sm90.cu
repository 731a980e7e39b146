// Winograd's F(2x2,3x3) on Hopper (sm_90a): the sums of winograd.cu in less time.
//
// A block makes some rows of outputs of a patch, 14x14 pixels in 7x7 squares, of a slice of the channels. Its warps
// share the work:
//
//   producers   copy the pixels of kTaskChannels channels of the patch to shared memory; when they are there, a thread
//               takes those of a column of squares to registers, the next ones are copied, and the thread stores the
//               points of its squares;
//   consumers   multiply: a thread has kThreadRows outputs of a column of squares at one point.
//
// They meet in stages of kSliceChannels channels.
//
// When all is multiplied, the sums go through shared memory to threads that have a square of an output with all its
// points, transform it and send it to the block of the cluster that adds and finishes it. Where producers are enough for
// that, they have worked out where all of it lies and goes while the consumers multiplied.
#include <tuple>

#include "kernels/cuda/device/one_of.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/nodes/winograd.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kPatch = 14, kPatchSide = kPatch / kSquareMade;  // outputs, squares along a side
constexpr int kPatchSquares = kPatchSide * kPatchSide;
constexpr int kLines = kPatch + kSquareSide - kSquareMade;  // of pixels of a patch, and pixels of a line

// In shared memory, in floats: of a point the squares of all columns, four of each and then three of each with a gap
// behind, so that eight lanes that store or load 16 bytes have different banks, whichever point or channel they have.
constexpr int kHalfPitch = 4 * kPatchSide, kPointPitch = 2 * kHalfPitch + 4;
constexpr int kChannelPitch = kSquarePoints * kPointPitch + kHalfPitch;
static_assert(kPointPitch % 32 == kHalfPitch && kChannelPitch % 32 == kHalfPitch);
constexpr int kPointFloats = kSliceChannels * kChannelPitch;

// Weights of four rows, [channels][points][4], from memory to memory; in shared memory a gap keeps those of a warp in
// different banks.
constexpr int kFour = 4, kFourFloats = kSliceChannels * kSquarePoints * kFour, kFourPitch = kFourFloats + 4;

// A producer has kTaskChannels channels at a time, a lane for each column of squares.
constexpr int kLanes = 28, kTaskChannels = kLanes / kPatchSide;
// Their pixels. A channel's follow the last one's in such a way that lanes that load two pixels have different banks.
constexpr int kPixelPitch = kLines * kLines + 2 * kPatchSide, kPixelFloats = kTaskChannels * kPixelPitch;
static_assert(kPixelPitch % 32 == 2 * kPatchSide);

// How many rows a block makes: groups of them, of each consumer's thread so many. kProducts: in a clock of a
// multiprocessor.
template <int kGroupsOf, int kThreadRowsOf, int kProducersOf, int kStagesOf, int kProductsOf>
struct PatchTile {
  static constexpr int kGroups = kGroupsOf, kThreadRows = kThreadRowsOf, kRows = kGroups * kThreadRows;
  static constexpr int kPointsOfWarp = kLanes / (kGroups * kPatchSide),
                       kConsumers = kSquarePoints / kPointsOfWarp;
  static constexpr int kProducers = kProducersOf, kBlock = (kConsumers + kProducers) * kWarp;
  static constexpr int kStages = kStagesOf, kProducts = kProductsOf;
  static constexpr int kFours = kRows / kFour, kWeightFloats = kFours * kFourPitch;
  static constexpr int kStageFloats = kPointFloats + kWeightFloats;
  static constexpr int kPairs = kRows * kPatchSquares;  // of an output and a square
  // Pairs of a producer's thread; whether it has registers for where they lie.
  static constexpr int kFinishers = kProducers * kWarp, kEach = (kPairs + kFinishers - 1) / kFinishers;
  static constexpr bool kProducersFinish = kEach <= 4;
  static_assert(kPointsOfWarp * kGroups * kPatchSide == kLanes && kRows % kFour == 0);
  // Sums wait for the transform where the stages were: of a point and a thread's row those of all groups side by side,
  // in different banks.
  static constexpr int kSumPitch = kRows * kPointPitch + (56 - kRows * kPointPitch % 32) % 32;
  static_assert(kSquarePoints * kSumPitch <= kStages * kStageFloats && kSumPitch % 32 == 24);
  // A group has whole fours of rows, and what is left of its rows in a four that it shares with another one.
  static constexpr int kWhole = kThreadRows / kFour * kFour, kRest = kThreadRows % kFour;
  static_assert(kWhole + kRest == kThreadRows && (kRest == 0 || (kRest == 2 && kGroups == 2)));

  // Of the pairs, those that a block of a cluster finishes.
  static constexpr int PartOf(int slices) { return (kPairs + slices - 1) / slices; }
  static constexpr int SharedBytes(int slices) {
    const int received = slices > 1 ? slices * PartOf(slices) * 4 : 0;
    return (kStages * kStageFloats + kProducers * kPixelFloats + received) * static_cast<int>(sizeof(float));
  }
};
using PatchTiles =
    std::tuple<PatchTile<2, 8, 8, 4, 60>, PatchTile<2, 10, 8, 4, 68>, PatchTile<4, 8, 4, 3, 59>>;

static_assert(WinogradTiling::kTiles == std::tuple_size_v<PatchTiles>);

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ __forceinline__ int PlaceOf(int line, int column) {
  return line / 4 * kHalfPitch + 4 * column + line % 4;
}

// A producer's copies of the pixels of a patch, every second line of a lane's; of outside the image zeros.
class PixelCopies {
 public:
  __device__ __forceinline__ PixelCopies(const WinogradParams& p, const SquarePlace& patch, int lane,
                                         uint32_t to)
      : p_(p), in_w_(static_cast<int>(p.windows.w.in)) {
    const int in_h = static_cast<int>(p.windows.h.in);
    const int line = lane / kLines, column = lane % kLines;
    const int y = patch.y - static_cast<int>(p.windows.h.pad_begin) + line;
    const int x = patch.x - static_cast<int>(p.windows.w.pad_begin) + column;
    plane_ = int64_t{in_h} * in_w_;
    first_ = p.x + int64_t{patch.image} * p.channels * plane_ + int64_t{y} * in_w_ + x;
    to_ = to + (line * kLines + column) * 4;
#pragma unroll
    for (int i = 0; i < kLines / 2; ++i) {
      inside_[i] = x >= 0 && x < in_w_ && y + 2 * i >= 0 && y + 2 * i < in_h;
    }
  }
  // Those of kTaskChannels channels.
  __device__ __forceinline__ void Begin(int channel0) const {
    const float* of_channel = first_ + channel0 * plane_;
#pragma unroll
    for (int c = 0; c < kTaskChannels; ++c, of_channel += plane_) {
      const float* from = of_channel;
      const bool there = channel0 + c < p_.channels;
#pragma unroll
      for (int i = 0; i < kLines / 2; ++i, from += 2 * in_w_) {
        CopyAsyncOrZero<4>(to_ + (c * kPixelPitch + 2 * i * kLines) * 4, from, there && inside_[i]);
      }
    }
    CommitCopies();
  }

 private:
  const WinogradParams& p_;
  int in_w_;
  int64_t plane_;
  const float* first_;
  uint32_t to_;
  bool inside_[kLines / 2];
};

// The pixels of a column of squares, then B^T d of each line.
using Column = float[kLines][kSquareSide];

// B^T d of four numbers, number i of them.
__device__ __forceinline__ float Transformed(int i, float d0, float d1, float d2, float d3) {
  if (i == 0) return __fsub_rn(d0, d2);
  if (i == 1) return __fadd_rn(d1, d2);
  return i == 2 ? __fsub_rn(d2, d1) : __fsub_rn(d1, d3);
}

__device__ __forceinline__ void TransformLines(Column& d) {
#pragma unroll
  for (int i = 0; i < kLines; ++i) {
    const float from[kSquareSide] = {d[i][0], d[i][1], d[i][2], d[i][3]};
#pragma unroll
    for (int j = 0; j < kSquareSide; ++j) d[i][j] = Transformed(j, from[0], from[1], from[2], from[3]);
  }
}

// Stores the points of the squares of a column; `to`: the first one's first point.
__device__ __forceinline__ void StorePoints(const Column& d, float* to) {
#pragma unroll
  for (int point = 0; point < kSquarePoints; ++point) {
    const int j = point / kSquareSide, i = point % kSquareSide;
    float of[8] = {};
#pragma unroll
    for (int square = 0; square < kPatchSide; ++square) {
      const int line = square * kSquareMade;
      of[square] = Transformed(i, d[line][j], d[line + 1][j], d[line + 2][j], d[line + 3][j]);
    }
    float* const at = to + point * kPointPitch;
    *reinterpret_cast<float4*>(at) = make_float4(of[0], of[1], of[2], of[3]);
    *reinterpret_cast<float4*>(at + kHalfPitch) = make_float4(of[4], of[5], of[6], of[7]);
  }
}

// Which row of the block a row of a group is.
template <typename T>
__device__ __forceinline__ int RowOf(int group, int i) {
  return i < T::kWhole ? group * T::kWhole + i : T::kGroups * T::kWhole + group * T::kRest + i - T::kWhole;
}

// The products of a consumer's thread.
template <typename T>
class Products {
 public:
  // Eight lanes, one of them idle, have a group: those that load 16 bytes at a time then have one of weights and the same
  // ones of pixels as the next eight.
  __device__ __forceinline__ explicit Products(int warp) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, eight = lane / 8;
    point_ = warp * T::kPointsOfWarp + eight / T::kGroups;
    group_ = eight % T::kGroups;
    column_ = min(lane % 8, kPatchSide - 1);
    works_ = lane % 8 < kPatchSide;
  }
  __device__ __forceinline__ void Multiply(const float* stage) {
    const float* const x_of = stage + point_ * kPointPitch + 4 * column_;
    const float* const w_of = stage + kPointFloats + point_ * kFour;
#pragma unroll
    for (int k = 0; k < kSliceChannels; ++k) {
      const float* const weights = w_of + k * kSquarePoints * kFour;
      float4 x[2], w[T::kWhole / kFour];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[i] = *reinterpret_cast<const float4*>(x_of + k * kChannelPitch + i * kHalfPitch);
      }
#pragma unroll
      for (int i = 0; i < T::kWhole; i += kFour) {
        w[i / kFour] = *reinterpret_cast<const float4*>(weights + RowOf<T>(group_, i) / kFour * kFourPitch);
      }
      float2 rest = {0, 0};
      if constexpr (T::kRest > 0) {
        rest = *reinterpret_cast<const float2*>(weights + T::kGroups * T::kWhole / kFour * kFourPitch +
                                                group_ * T::kRest);
      }
#pragma unroll
      for (int i = 0; i < T::kThreadRows; ++i) {
        float weight = i % 2 == 0 ? rest.x : rest.y;
        if (i < T::kWhole) weight = ElementOf(w[i / kFour], i % kFour);
#pragma unroll
        for (int j = 0; j < kPatchSide; ++j) {
          sums_[i][j] = __fmaf_rn(weight, ElementOf(x[j / 4], j % 4), sums_[i][j]);
        }
      }
    }
  }
  // To [points][rows of a group][groups][kPointPitch].
  __device__ __forceinline__ void Put(float* to) const {
    if (!works_) return;
#pragma unroll
    for (int i = 0; i < T::kThreadRows; ++i) {
      const float* const v = sums_[i];
      float* const at = to + point_ * T::kSumPitch + (i * T::kGroups + group_) * kPointPitch + 4 * column_;
      *reinterpret_cast<float4*>(at) = make_float4(v[0], v[1], v[2], v[3]);
      *reinterpret_cast<float4*>(at + kHalfPitch) = make_float4(v[4], v[5], v[6], 0);
    }
  }

 private:
  int point_, group_, column_;
  bool works_;
  float sums_[T::kThreadRows][kPatchSide] = {};
};
#endif

template <typename T>
__global__ void __launch_bounds__(T::kBlock, 1) WinogradPatches(const __grid_constant__ WinogradParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  LOWBIT_DYNAMIC_SHARED(shared, 128);
  // mbarriers: a stage is full, is empty; the outputs that the blocks of a cluster send each other
  __shared__ uint64_t barriers[2 * T::kStages + 1];
  __shared__ float biases[T::kRows];
  constexpr int kTasks = kSliceChannels / kTaskChannels;  // of a stage
  // Else a producer might be two rounds ahead, which an mbarrier does not tell from none.
  static_assert(T::kProducers <= kTasks * T::kStages);
  float* const stages = reinterpret_cast<float*>(shared);
  float* const pixels = stages + T::kStages * T::kStageFloats;  // [producers]
  float4* const received =
      reinterpret_cast<float4*>(pixels + T::kProducers * kPixelFloats);  // [slices][part]
  const int tid = static_cast<int>(threadIdx.x), lane = tid % kWarp;
  // The compiler then knows that it is the same in all lanes.
  const int warp = __shfl_sync(0xFFFFFFFFu, tid / kWarp, 0);
  const int slice = static_cast<int>(blockIdx.z), row0 = static_cast<int>(blockIdx.y) * T::kRows;
  const int channel0 = FirstChannelOf(p, slice);
  const int steps = (FirstChannelOf(p, slice + 1) - channel0) / kSliceChannels;
  const uint32_t full = SharedAddress(barriers), empty = SharedAddress(barriers + T::kStages),
                 exchange = SharedAddress(barriers + 2 * T::kStages);
  const int part = static_cast<int>(p.by_part.divisor), own = min(part, max(0, T::kPairs - slice * part));
  const auto fetch_weights = [&](int step) {
    const int stage = step % T::kStages, first_four = row0 / kFour;
    const int fours = min(T::kFours, (p.rows + kFour - 1) / kFour - first_four);
    const float* from =
        p.weights +
        (int64_t{first_four} * (p.depth / kSliceChannels) + channel0 / kSliceChannels + step) * kFourFloats;
    uint32_t to = SharedAddress(stages + stage * T::kStageFloats + kPointFloats);
    ArriveExpecting(full + stage * 8, fours * kFourFloats * 4);
    for (int four = 0; four < fours;
         ++four, from += int64_t{p.depth} * kSquarePoints * kFour, to += kFourPitch * 4) {
      BulkCopy(to, from, kFourFloats * 4, full + stage * 8);
    }
  };
  if (tid == 0) {
    for (int stage = 0; stage < T::kStages; ++stage) {
      InitBarrier(full + stage * 8, 1 + kTasks);
      InitBarrier(empty + stage * 8, T::kConsumers);
    }
    InitBarrier(exchange, 1);
    FenceBarrierInit();
    if (p.in_cluster) ArriveExpecting(exchange, p.slices * own * static_cast<int>(sizeof(float4)));
  }
  if (p.bias != nullptr && tid < T::kRows) biases[tid] = row0 + tid < p.rows ? p.bias[row0 + tid] : 0.0f;
  if (p.in_cluster) ClusterArrive();
  __syncthreads();
  // The weights are the kernel's own: they may be fetched before the predecessor is done.
  if (tid == 0) {
    for (int step = 0; step < min(T::kStages, steps); ++step) fetch_weights(step);
  }
  const SquarePlace patch(p, blockIdx.x, kPatch);
  WaitForPredecessors();

  // A pair is of a row, as they lie there, and a square.
  const auto sums_of = [&](int pair) {
    const int square = pair % kPatchSquares;
    return stages + pair / kPatchSquares * kPointPitch + PlaceOf(square / kPatchSide, square % kPatchSide);
  };
  const auto outputs_of = [](const float* of_pair) {
    return TransformSums(
        [&](int down, int column) { return of_pair[(column * kSquareSide + down) * T::kSumPitch]; });
  };
  const auto row_of = [](int pair) {
    const int place = pair / kPatchSquares;
    return RowOf<T>(place % T::kGroups, place / T::kGroups);
  };
  const auto y_of = [&](int pair) { return patch.y + pair % kPatchSquares / kPatchSide * kSquareMade; };
  const auto x_of = [&](int pair) { return patch.x + pair % kPatchSquares % kPatchSide * kSquareMade; };
  const auto is_there = [&](int pair) {
    return row0 + row_of(pair) < p.rows && y_of(pair) < p.windows.h.out && x_of(pair) < p.windows.w.out;
  };
  const auto target_of = [&](int pair) {
    return SquareTarget(p, row0 + row_of(pair), patch.image, y_of(pair), x_of(pair));
  };
  const auto store = [&](int pair, const Fours& sums) {
    if (is_there(pair)) StoreOutputs(p, p.y, biases + row_of(pair), target_of(pair), sums);
  };
  struct Receiver {
    uint32_t to, barrier;
  };
  const auto receiver_of = [&](int pair) -> Receiver {
    const auto [owner, in_part] = Divided(static_cast<unsigned>(pair), p.by_part);
    return {ClusterAddress(SharedAddress(received + slice * part + in_part), owner),
            ClusterAddress(exchange, owner)};
  };
  const auto send = [](const Receiver& receiver, const Fours& outputs) {
    const int4 words = {__float_as_int(outputs.v[0]), __float_as_int(outputs.v[1]),
                        __float_as_int(outputs.v[2]), __float_as_int(outputs.v[3])};
    StoreToCluster(receiver.to, words, receiver.barrier);
  };
  const auto sum_of = [&](int at) {
    const auto load = [&](int s) {
      const float4 v = received[s * part + at];
      return Fours{{v.x, v.y, v.z, v.w}};
    };
    constexpr int kFew = 8;  // half of the code
    return p.slices <= kFew ? AddSlices<kFew>(p.slices, load) : AddSlices<kMostBlocks>(p.slices, load);
  };

  if (warp >= T::kConsumers) {
    const int producer = warp - T::kConsumers;
    const int of_task = min(lane, kLanes - 1) / kPatchSide, column = min(lane, kLanes - 1) % kPatchSide;
    float* const own_pixels = pixels + producer * kPixelFloats;
    const float* const own_column = own_pixels + of_task * kPixelPitch + column * kSquareMade;
    const PixelCopies copies(p, patch, lane, SharedAddress(own_pixels));
    if (producer < steps * kTasks) copies.Begin(channel0 + producer * kTaskChannels);
#pragma unroll 1
    for (int task = producer; task < steps * kTasks; task += T::kProducers) {
      const int step = task / kTasks, stage = step % T::kStages, round = step / T::kStages;
      Column d;
      WaitForCopies<0>();
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kLines; ++i) {
#pragma unroll
        for (int j = 0; j < kSquareSide; j += 2) {
          const float2 pair = *reinterpret_cast<const float2*>(own_column + i * kLines + j);
          d[i][j] = pair.x;
          d[i][j + 1] = pair.y;
        }
      }
      __syncwarp();
      if (task + T::kProducers < steps * kTasks)
        copies.Begin(channel0 + (task + T::kProducers) * kTaskChannels);
      TransformLines(d);
      if (round > 0) {
        WaitBarrier(empty + stage * 8, (round - 1) % 2);
        if (task % kTasks == 0 && lane == 0) fetch_weights(step);
      }
      const int k = task % kTasks * kTaskChannels + of_task;
      if (lane < kLanes) StorePoints(d, stages + stage * T::kStageFloats + k * kChannelPitch + 4 * column);
      __syncwarp();
      if (lane == 0) Arrive(full + stage * 8);
    }
  } else {
    Products<T> products(warp);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int stage = step % T::kStages;
      WaitBarrier(full + stage * 8, step / T::kStages % 2);
      products.Multiply(stages + stage * T::kStageFloats);
      __syncwarp();
      if (lane == 0) Arrive(empty + stage * 8);
    }
    SyncThreads<T::kConsumers * kWarp>();  // the sums take the place of the stages
    products.Put(stages);
  }
  if constexpr (T::kProducersFinish) {
    if (p.in_cluster && warp >= T::kConsumers) {
      const int own_thread = tid - T::kConsumers * kWarp, first = slice * part + own_thread;
      const float* sums[T::kEach];
      Receiver receivers[T::kEach];
#pragma unroll
      for (int i = 0; i < T::kEach; ++i) {
        const int pair = min(own_thread + i * T::kFinishers, T::kPairs - 1);
        sums[i] = sums_of(pair);
        receivers[i] = receiver_of(pair);
      }
      const bool has_first = own_thread < own && is_there(first);
      SquareTarget target;
      float bias = 0;
      if (has_first) {
        target = target_of(first);
        bias = biases[row_of(first)];
      }
      LetSuccessorsStart();
      ClusterWait();
      __syncthreads();
#pragma unroll
      for (int i = 0; i < T::kEach; ++i) {
        if (own_thread + i * T::kFinishers < T::kPairs) send(receivers[i], outputs_of(sums[i]));
      }
      WaitBarrier(exchange, 0);
      if (has_first) StoreOutputs(p, p.y, &bias, target, sum_of(own_thread));
      for (int at = own_thread + T::kFinishers; at < own; at += T::kFinishers) {
        store(slice * part + at, sum_of(at));
      }
      return;
    }
  }
  LetSuccessorsStart();
  if (p.in_cluster) ClusterWait();
  __syncthreads();
  if (T::kProducersFinish && p.in_cluster) return;

  for (int pair = tid; pair < T::kPairs; pair += T::kBlock) {
    const Fours outputs = outputs_of(sums_of(pair));
    if (p.in_cluster) {
      send(receiver_of(pair), outputs);
    } else {
      store(pair, outputs);
    }
  }
  if (!p.in_cluster) return;

  WaitBarrier(exchange, 0);
  for (int at = tid; at < own; at += T::kBlock) store(slice * part + at, sum_of(at));
#endif
}

// As CostOf of float_tiles.cuh. Fitted to layers of 14x14 to 56x56 pixels at batch 1 and 16 on an H100: off by 7 % at most
// where it chooses these.
template <typename T>
double CostOf(const WinogradParams& p, int slices) {
  using Rates = ProductRates;
  constexpr double kStart = 3500, kFinish = 6000;
  const double blocks = static_cast<double>(p.squares) * BlocksFor(p.rows, T::kRows) * slices;
  const double waves = std::ceil(blocks / RoomForClusters(slices, DeviceOfEstimates().multiprocessors));
  const double steps = BlocksFor(p.depth / kSliceChannels, slices);
  const double step = static_cast<double>(kSquarePoints * T::kPairs * kSliceChannels) / T::kProducts;
  return kStart + Rates::JoinOf(slices) + waves * (steps * step + kFinish);
}

template <size_t... kIndex>
std::pair<int, double> CheapestPatches(const WinogradParams& p, int slices, std::index_sequence<kIndex...>) {
  const double costs[] = {CostOf<std::tuple_element_t<kIndex, PatchTiles>>(p, slices)...};
  const auto* const least = std::min_element(std::begin(costs), std::end(costs));
  return {static_cast<int>(least - costs), *least};
}
std::pair<int, double> CheapestPatches(const WinogradParams& p, int slices) {
  return CheapestPatches(p, slices, std::make_index_sequence<std::tuple_size_v<PatchTiles>>());
}

template <typename T>
NodePlanPtr PlanPatches(WinogradParams p, const Device& device) {
  p.by_part = MakeDivisor(T::PartOf(p.slices));
  const auto launch = [device](const Run& run, WinogradParams of) {
    of.stores_pairs = StoresPairs(of);
    const dim3 grid(static_cast<unsigned>(of.squares), BlocksFor(of.rows, T::kRows),
                    static_cast<unsigned>(of.slices));
    const LaunchShape shape{grid, T::kBlock, T::SharedBytes(of.slices),
                            Dim(1, 1, of.in_cluster ? of.slices : 1)};
    run.Check(LaunchKernel<WinogradPatches<T>>(run.queue, device, shape, of));
  };
  const std::string text = "float_conv winograd 2x2 " + std::to_string(T::kRows) + " rows";
  return PlanSlices<ConvColumn>(text, p, device, T::SharedBytes(p.slices), launch);
}

}  // namespace

double CostOfPatches(const WinogradParams& of_squares, int slices) {
  WinogradParams p = of_squares;
  CutInto(kPatch, p);
  return CheapestPatches(p, slices).second;
}

PackedNodePtr PackPatches(const FloatConvOp& op, const WinogradParams& shared, const Device& device,
                          const WinogradTiling& tiling) {
  const auto plan = [=](WinogradParams p) {
    CutInto(kPatch, p);
    p.blocks = p.slices = SlicesOfSquares(p, tiling.slices);
    const int tile = tiling.tile >= 0 ? tiling.tile : CheapestPatches(p, p.slices).first;
    NodePlanPtr out;
    WithTile<PatchTiles>(tile, [&](auto known) { out = PlanPatches<decltype(known)>(p, device); });
    return out;
  };
  return MakeProduct(op, shared, TransformSquareWeights(shared, op.weights, kFour, kSliceChannels, true),
                     device, plan);
}

}  // namespace lowbit::cuda
