// Float products tile by tile: the kernel that those of CUDA cores and of Tensor Cores have in common, what it
// copies, how it splits k, which tile it is given.
//
// How a sum is made depends on the node and its shapes alone (SumSlices), whatever tiles a GPU is given: k, which runs
// over the channels and inside one over its taps, is cut into slices, each is summed front to back, and the slices'
// sums are added by a binary tree. A block has one or more teams of threads, each of which makes a slice of a tile of
// outputs:
//
//   copies of kStages - 1 stages, kDepth elements of k each, are under way while one is multiplied;
//   the sums of a block's teams, a whole branch of the tree, are added by way of its shared memory;
//   the blocks of a tile are a cluster: each gets a part of the tile from all of them, adds and finishes it.
//   On GPUs without clusters they write their sums to the workspace, which a second kernel adds.
//
// A tile is a type with
//   Params                      of the kernel, SplitParams and what else its weights need;
//   kRows, kColumns, kOutputs   of the tile;
//   kBlocks                     that a multiprocessor is to have registers for;
//   kTeams                      if it has several, a power of two: slices, and teams of kBlock threads, of a block;
//   kRegisters                  of a thread, about;
//   kThreadRows, kThreadColumns outputs of one of a team's kBlock threads, in squares of four, kRowStep and kColumnStep apart;
//   kStages, kDepth             stages, and elements of k in each;
//   kWeightFloats, kPitch       in a stage: weights, and from one element of k of the columns to the next;
//   kProducts, kWeightBytes     for the estimate: products in a clock of a multiprocessor, bytes of a weight; or CostOf;
//   Weights                     which copies those of a stage, by Fetch(step, stage);
//   Sums                        which adds the products of a stage, by Multiply(weights, columns), and tells them, by
//                               At(row, column) from `row` and `column` on.
//   TapSource                   if it has one, of columns where p.taps_first;
//   kCopiesAmong                if it has it: copies of a stage stand among the products of another one, and not in front of
//                               them, where the first operands would wait behind all of them. Weights::Begin(step, stage,
//                               copies) and Copy do what Fetch does, in kPasses parts, and Multiply has a third operand,
//                               which it calls with every element of k.
// A tile whose threads' outputs are no squares of four is one of convolutions, by several teams, whose
//   Sums::Put(tile)             stores them as lines of the tile's columns.
// Where products are made while the threads do something else, it also has
//   Weights::Wait               until those of a stage are there;
//   Sums::Wait, Finish          until Multiply's products are added; what is left to do behind the last ones.
#pragma once

#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/spread.h"
#include "kernels/cuda/nodes/float_product.cuh"

namespace lowbit::cuda {

// Of a sum, and blocks of a cluster that make them.
inline constexpr int kMostSlices = 64, kMostBlocks = 16;

struct SplitParams : ProductParams {
  int k = 0, depth = 0;           // of a sum, and with zeros up to whole stages
  int slices = 1;                 // of k; slice s begins behind s / slices of the stages
  int blocks = 1;                 // that make them
  int most_slices = kMostBlocks;  // that there may be
  bool more_slices = false;       // 3, 6, 12 and so on, too, besides the powers of two
  bool in_cluster = false;        // the blocks of a tile are a cluster
  FastDivisor by_part;        // fours of a tile that a block of a cluster finishes, the last one what is left
  int64_t block_stride = 0;   // where they are not: from a block's sums in the workspace to the next one's
  bool stores_fours = false;  // four outputs side by side begin at 16 bytes, and are all there or none
  bool taps_first = false;    // k runs over the channels of a stage at each tap, then over the next ones
  FastDivisor by_taps;
};

template <typename T>
inline constexpr int kStageFloats = T::kWeightFloats + T::kDepth * T::kPitch;

// Whether products are made while the threads do something else. Such tiles are large: what the blocks of a cluster send
// each other takes the place of the stages.
template <typename T>
inline constexpr bool kIsAsync = requires(const typename T::Weights& weights) { weights.Wait(0, 0u); };

// Whether copies stand among products.
template <typename T>
inline constexpr bool kMayCopyAmong = [] {
  if constexpr (requires { T::kCopiesAmong; }) {
    return T::kCopiesAmong;
  } else {
    return false;
  }
}();
// Whether threads' outputs are not squares of four.
template <typename T>
inline constexpr bool kHasRuns = requires(const typename T::Sums& sums, float* tile) { sums.Put(tile); };

// Of teams of a block: how many, all their threads, which one a thread is in, its number there, a barrier of its threads.
template <typename T>
inline constexpr int kTeamsOf = [] {
  if constexpr (requires { T::kTeams; }) {
    return T::kTeams;
  } else {
    return 1;
  }
}();
template <typename T>
inline constexpr int kThreadsOf = T::kBlock * kTeamsOf<T>;
template <typename T>
__device__ __forceinline__ int Team() {
  return kTeamsOf<T> == 1 ? 0 : static_cast<int>(threadIdx.x) / T::kBlock;
}
template <typename T>
__device__ __forceinline__ int ThreadOfTeam() {
  return static_cast<int>(threadIdx.x) - Team<T>() * T::kBlock;
}
template <typename T>
__device__ __forceinline__ void SyncTeam() {
  if constexpr (kTeamsOf<T> == 1) {
    __syncthreads();
  } else {
    SyncThreads<T::kBlock>(1 + Team<T>());
  }
}

// How many groups of `size` threads a team has, a power of two. Threads behind them copy nothing.
constexpr int GroupsOf(int threads, int size) {
  int groups = 1;
  while (2 * groups * size <= threads) groups *= 2;
  return groups;
}

// ---- where the elements of x lie. Each copies those of a stage, element k of column j to shared memory at
// k * kPitch + j, and zeros where there are none: by Fetch at once, or in kPasses parts by Copy behind Begin.

// Pixels side by side, 16 bytes at a time: 1x1 convolutions, where the addresses allow it.
template <typename T>
struct FoursSource {
  static constexpr int kFours = T::kColumns / 4, kSteps = GroupsOf(T::kBlock, kFours);
  static constexpr int kPasses = T::kDepth / kSteps;
  static constexpr bool kAllCopy = kSteps * kFours == T::kBlock;
  static_assert(T::kColumns % 4 == 0 && T::kDepth % kSteps == 0);
  struct Copies {
    const float* from;
    int k;
    uint32_t to;
    bool any;
  };
  const SplitParams& p;
  const float* first = nullptr;
  int64_t k_step;
  int own = ThreadOfTeam<T>() / kFours;  // along k
  uint32_t to;

  __device__ __forceinline__ FoursSource(const SplitParams& params, int group, int j0, uint32_t pixels)
      : p(params), k_step(ConvColumn::ChannelStep(params)) {
    const int four = ThreadOfTeam<T>() % kFours;
    first = ConvColumn(params, group, min(j0 + 4 * four, params.columns - 4)).At(params, 0, 0);
    to = pixels + (own * T::kPitch + 4 * four) * 4;
  }
  __device__ __forceinline__ void Prepare(int, int) const {}
  __device__ __forceinline__ Copies Begin(int k0, int stage, bool any) const {
    return {first + (k0 + own) * k_step, k0 + own, to + stage * kStageFloats<T> * 4,
            any && (kAllCopy || own < kSteps)};
  }
  __device__ __forceinline__ void Copy(Copies& copies, int pass) const {
    CopyAsyncAmong<16, true>(copies.to + pass * kSteps * T::kPitch * 4, copies.from,
                             copies.k + pass * kSteps < p.k, copies.any);
    copies.from += kSteps * k_step;
  }
  __device__ __forceinline__ void Fetch(int k0, int stage) const {
    if (!kAllCopy && own >= kSteps) return;
    const float* x = first + (k0 + own) * k_step;
#pragma unroll
    for (int k = 0; k < T::kDepth; k += kSteps) {
      CopyAsyncOrZero<16>(to + (stage * kStageFloats<T> + k * T::kPitch) * 4, x + k * k_step,
                          k0 + own + k < p.k);
    }
  }
};

// Columns of a Gemm, side by side along k in most.
template <typename T>
struct LinesSource {
  static constexpr int kSide = 8, kStep = T::kBlock / kSide;  // threads along k, columns at a time
  const SplitParams& p;
  const float* first;
  int own = ThreadOfTeam<T>() % kSide, j;
  uint32_t to;

  __device__ __forceinline__ LinesSource(const SplitParams& params, int, int j0, uint32_t pixels)
      : p(params) {
    const int column = ThreadOfTeam<T>() / kSide;
    j = j0 + column;
    first = p.x + j * p.column_step + own * p.k_step;
    to = pixels + (own * T::kPitch + column) * 4;
  }
  __device__ __forceinline__ void Prepare(int, int) const {}
  __device__ __forceinline__ void Fetch(int k0, int stage) const {
#pragma unroll
    for (int k = 0; k < T::kDepth; k += kSide) {
#pragma unroll
      for (int column = 0; column < T::kColumns; column += kStep) {
        CopyAsyncOrZero<4>(to + (stage * kStageFloats<T> + k * T::kPitch + column) * 4,
                           first + column * p.column_step + (k0 + k) * p.k_step,
                           k0 + own + k < p.k && j + column < p.columns);
      }
    }
  }
};

// Any columns side by side, an element at a time. Where the elements of k lie in an image is worked out once for all
// columns, a stage ahead of the copies.
inline constexpr int kOutside = 1 << 30;  // added to a coordinate of an image

struct __align__(16) Step {
  int offset, dy, dx;
};

// Of stages, and of what a cluster's blocks send each other.
template <typename T>
constexpr int SharedBytes(bool in_cluster) {
  constexpr int kStaged = kTeamsOf<T> * T::kStages * kStageFloats<T>;
  const int received = in_cluster ? T::kOutputs + 4 * kMostBlocks : 0;
  return (kIsAsync<T> ? std::max(kStaged, received) : kStaged + received) * static_cast<int>(sizeof(float));
}
// For kernels, which may not call it.
template <typename T>
inline constexpr int kSharedAlone = SharedBytes<T>(false);
template <typename T>
inline constexpr int kSharedInCluster = SharedBytes<T>(true);
// Of where windows lie, which WindowSource keeps behind them.
template <typename T>
inline constexpr int kTableBytes = kTeamsOf<T> * T::kStages * T::kDepth * static_cast<int>(sizeof(Step));

template <typename T>
struct WindowSource {
  static constexpr int kSteps = GroupsOf(T::kBlock, T::kColumns), kPasses = T::kDepth / kSteps;
  static constexpr bool kAllCopy = kSteps * T::kColumns == T::kBlock;
  struct Copies {
    const Step* steps;
    uint32_t to;
    bool any;
  };
  const SplitParams& p;
  const float* first;
  int top = kOutside, left = 0;
  int own = ThreadOfTeam<T>() / T::kColumns;  // along k, equal in a warp
  uint32_t to;

  // Behind everything else in dynamic shared memory: the tables of eight teams are more than kernels may have besides.
  __device__ __forceinline__ Step* Table(int stage) const {
    LOWBIT_DYNAMIC_SHARED(shared, 128);
    auto* const steps =
        reinterpret_cast<Step*>(shared + (p.in_cluster ? kSharedInCluster<T> : kSharedAlone<T>));
    return steps + (Team<T>() * T::kStages + stage) * T::kDepth;
  }
  __device__ __forceinline__ WindowSource(const SplitParams& params, int group, int j0, uint32_t pixels)
      : p(params), first(params.x) {
    const int column = ThreadOfTeam<T>() % T::kColumns;
    const ConvColumn of(p, group, j0 + column);
    if (of.image != nullptr) {
      top = static_cast<int>(of.top), left = static_cast<int>(of.left);
      first = of.image + (of.top * p.windows.w.in + of.left);
    }
    to = pixels + (own * T::kPitch + column) * 4;
  }
  // The first threads work out where the elements of a stage lie.
  __device__ __forceinline__ void Prepare(int k0, int stage) const {
    const int own_step = ThreadOfTeam<T>(), k = k0 + own_step;
    if (own_step >= T::kDepth) return;
    Step step = {0, kOutside / 2, 0};
    if (k < p.k) {
      const auto [channel, tap] = Divided(static_cast<unsigned>(k), p.by_taps);
      const auto [ty, tx] = Divided(tap, p.by_kernel_w);
      step.dy = static_cast<int>(ty) * static_cast<int>(p.windows.h.dilation);
      step.dx = static_cast<int>(tx) * static_cast<int>(p.windows.w.dilation);
      const int in_w = static_cast<int>(p.windows.w.in);
      step.offset = (static_cast<int>(channel) * static_cast<int>(p.windows.h.in) + step.dy) * in_w + step.dx;
    }
    Table(stage)[own_step] = step;
  }
  __device__ __forceinline__ bool IsInside(const Step& step) const {
    return static_cast<unsigned>(top + step.dy) < static_cast<unsigned>(p.windows.h.in) &&
           static_cast<unsigned>(left + step.dx) < static_cast<unsigned>(p.windows.w.in);
  }
  __device__ __forceinline__ Copies Begin(int, int stage, bool any) const {
    return {Table(stage) + min(own, kSteps - 1), to + stage * kStageFloats<T> * 4,
            any && (kAllCopy || own < kSteps)};
  }
  __device__ __forceinline__ void Copy(const Copies& copies, int pass) const {
    const Step step = copies.steps[pass * kSteps];
    CopyAsyncAmong<4, true>(copies.to + pass * kSteps * T::kPitch * 4, first + step.offset, IsInside(step),
                            copies.any);
  }
  __device__ __forceinline__ void Fetch(int, int stage) const {
    if (!kAllCopy && own >= kSteps) return;
    const Step* const steps = Table(stage) + own;
#pragma unroll
    for (int k = 0; k < T::kDepth; k += kSteps) {
      const Step step = steps[k];
      const bool inside = IsInside(step);
      CopyAsyncOrZero<4>(to + (stage * kStageFloats<T> + k * T::kPitch) * 4, first + step.offset, inside);
    }
  }
};

// Any columns whose elements of k in a stage are channels at one tap (p.taps_first), an element at a time.
template <typename T>
struct ChannelsSource {
  static constexpr int kSteps = GroupsOf(T::kBlock, T::kColumns), kPasses = T::kDepth / kSteps;
  static constexpr bool kAllCopy = kSteps * T::kColumns == T::kBlock;
  struct Copies {
    const float* from;
    uint32_t to;
    bool inside;
    bool any;
  };
  const SplitParams& p;
  const float* first;
  int64_t plane;
  int top = kOutside, left = 0;
  int own = ThreadOfTeam<T>() / T::kColumns;  // along k
  uint32_t to;

  __device__ __forceinline__ ChannelsSource(const SplitParams& params, int group, int j0, uint32_t pixels)
      : p(params), first(params.x), plane(ConvColumn::ChannelStep(params)) {
    const int column = ThreadOfTeam<T>() % T::kColumns;
    const ConvColumn of(p, group, j0 + column);
    if (of.image != nullptr) {
      top = static_cast<int>(of.top), left = static_cast<int>(of.left);
      first = of.image + (own * plane + of.top * p.windows.w.in + of.left);
    }
    to = pixels + (own * T::kPitch + column) * 4;
  }
  __device__ __forceinline__ void Prepare(int, int) const {}
  __device__ __forceinline__ Copies Begin(int k0, int stage, bool any) const {
    const auto [chunk, tap] = Divided(static_cast<unsigned>(k0) / T::kDepth, p.by_taps);
    const auto [ty, tx] = Divided(tap, p.by_kernel_w);
    const int dy = static_cast<int>(ty) * static_cast<int>(p.windows.h.dilation);
    const int dx = static_cast<int>(tx) * static_cast<int>(p.windows.w.dilation);
    const bool inside = static_cast<unsigned>(top + dy) < static_cast<unsigned>(p.windows.h.in) &&
                        static_cast<unsigned>(left + dx) < static_cast<unsigned>(p.windows.w.in);
    const float* const x = first + (chunk * T::kDepth * plane + dy * static_cast<int>(p.windows.w.in) + dx);
    return {x, to + stage * kStageFloats<T> * 4, inside, any && (kAllCopy || own < kSteps)};
  }
  __device__ __forceinline__ void Copy(Copies& copies, int pass) const {
    CopyAsyncAmong<4, true>(copies.to + pass * kSteps * T::kPitch * 4, copies.from, copies.inside,
                            copies.any);
    copies.from += kSteps * plane;
  }
  __device__ __forceinline__ void Fetch(int k0, int stage) const {
    if (!kAllCopy && own >= kSteps) return;
    const Copies copies = Begin(k0, stage, true);
    const float* x = copies.from;
#pragma unroll
    for (int k = 0; k < T::kDepth; k += kSteps, x += kSteps * plane) {
      CopyAsyncOrZero<4>(copies.to + k * T::kPitch * 4, x, copies.inside);
    }
  }
};

// ---- the products

__device__ __forceinline__ float ElementOf(const float4& v, int e) {
  return e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w;
}

struct Fours {
  float v[4];
};

// The sum of the slices' sums, load(slice) of each, by a binary tree.
template <int kMost, typename Load>
__device__ __forceinline__ Fours AddSlices(int slices, const Load& load) {
  Fours sums[kMost];
#pragma unroll
  for (int s = 0; s < kMost; ++s) {
    if (s < slices) sums[s] = load(s);
  }
#pragma unroll
  for (int step = 1; step < kMost; step *= 2) {
#pragma unroll
    for (int s = 0; s < kMost; s += 2 * step) {
      if (s + step >= slices) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[s].v[e] = __fadd_rn(sums[s].v[e], sums[s + step].v[e]);
    }
  }
  return sums[0];
}

// Whether outputs of one column lie side by side, not those of one row.
template <typename Column>
inline constexpr bool kStoresColumns = std::is_same_v<Column, GemmColumn>;

// Four outputs side by side: the row and the column of the first, and where it lies.
struct FourPlace {
  int i, j;
  int64_t at;
};

// What is added to them. kFours: as p.stores_fours.
template <typename Column, bool kFours>
__device__ __forceinline__ Fours LoadResiduals(const SplitParams& p, int group, const FourPlace& place) {
  Fours out = {};
  if (!p.limits.adds || place.i >= p.rows || place.j >= p.columns) return out;
  if constexpr (kFours) {
    const float4 v = *reinterpret_cast<const float4*>(p.residual + place.at);
    return {{v.x, v.y, v.z, v.w}};
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int i = place.i + (kStoresColumns<Column> ? e : 0), j = place.j + (kStoresColumns<Column> ? 0 : e);
    if (i < p.rows && j < p.columns) out.v[e] = p.residual[Column::Target(p, group, i, j)];
  }
  return out;
}

// Their biases, those of kRows rows from i on.
template <int kRows>
__device__ __forceinline__ Fours LoadBiases(const SplitParams& p, int group, int i) {
  Fours out = {};
#pragma unroll
  for (int e = 0; e < kRows; ++e) {
    if (p.bias != nullptr && i + e < p.rows) out.v[e] = p.bias[group * p.rows + i + e];
  }
  return out;
}

// Stores them.
template <typename Column, bool kFours>
__device__ __forceinline__ void StoreFours(const SplitParams& p, float* y, int group, const FourPlace& place,
                                           Fours sums, const Fours& biases, const Fours& residuals) {
  if (place.i >= p.rows || place.j >= p.columns) return;
  if constexpr (kFours) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums.v[e] = FinishSum(p, &biases.v[e], sums.v[e], residuals.v[e]);
    *reinterpret_cast<float4*>(y + place.at) = make_float4(sums.v[0], sums.v[1], sums.v[2], sums.v[3]);
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int of_i = kStoresColumns<Column> ? e : 0, of_j = e - of_i;
    if (place.i + of_i >= p.rows || place.j + of_j >= p.columns) return;
    y[Column::Target(p, group, place.i + of_i, place.j + of_j)] =
        FinishSum(p, &biases.v[e], sums.v[e], residuals.v[e]);
  }
}

// Stores a tile's outputs one by one, where fours of them do not lie side by side: by way of the stages' shared memory, so
// that threads side by side store outputs side by side. The first squares of the threads cover whole rows, as do the next.
template <typename Column, typename T>
__device__ __forceinline__ void StoreOneByOne(const typename T::Params& p, float* y, int group, int i0,
                                              int j0, const typename T::Sums& sums, float* stages) {
  constexpr int kDown = T::kThreadRows / 4, kAcross = T::kThreadColumns / 4, kPassRows = T::kRowStep;
  constexpr int kLine = kStoresColumns<Column> ? kPassRows : T::kColumns;  // outputs side by side
  constexpr int kLines = kPassRows * T::kColumns / kLine,
                kThreadsAlong = kLine < T::kBlock ? kLine : T::kBlock;
  static_assert(kLine * kLines <= T::kStages * kStageFloats<T>);
  const int tid = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int down = 0; down < kDown; ++down) {
    __syncthreads();
#pragma unroll
    for (int across = 0; across < kAcross; ++across) {
      const int column = sums.column + across * T::kColumnStep;
#pragma unroll
      for (int line = 0; line < 4; ++line) {
        float* const to = stages + (kStoresColumns<Column> ? (column + line) * kLine + sums.row
                                                           : (sums.row + line) * kLine + column);
        float v[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          v[e] = kStoresColumns<Column> ? sums.At(4 * down + e, 4 * across + line)
                                        : sums.At(4 * down + line, 4 * across + e);
        }
        *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
    __syncthreads();
    for (int along = tid % kThreadsAlong; along < kLine; along += kThreadsAlong) {
      const int first_row = i0 + down * kPassRows + (kStoresColumns<Column> ? along : 0);
      const int first_column = j0 + (kStoresColumns<Column> ? 0 : along);
      const int64_t first = Column::Target(p, group, first_row, first_column);
      for (int line = tid / kThreadsAlong; line < kLines; line += T::kBlock / kThreadsAlong) {
        const int row = first_row + (kStoresColumns<Column> ? 0 : line);
        if (row >= p.rows || first_column + (kStoresColumns<Column> ? line : 0) >= p.columns) break;
        const int64_t at = first + line * Column::LineStep(p);
        y[at] = FinishSum(p, group * p.rows + row, stages[line * kLine + along], ResidualAt(p, at));
      }
    }
  }
}

template <typename Source, typename Column, typename T>
__device__ __forceinline__ void MakeTile(const typename T::Params& p) {
  constexpr int kStages = T::kStages, kFoursDown = T::kThreadRows / 4, kFoursAcross = T::kThreadColumns / 4;
  // A block's own part of the sums takes no way between multiprocessors, which carries half of what the L2 cache does.
  // (Gemms have no registers to spare for that.)
  constexpr bool kKeepsOwn = !kStoresColumns<Column>;
  LOWBIT_DYNAMIC_SHARED(shared, 128);
  __shared__ uint64_t exchange;  // mbarrier: the sums that the blocks of a cluster send each other
  // Fetched with the first weights, since what finishes a tile would wait for them. (Gemms finish outputs of many rows.)
  constexpr bool kKeepsBiases = !kStoresColumns<Column>;
  __shared__ float biases_of_rows[kKeepsBiases ? T::kRows : 1];
  constexpr int kTeams = kTeamsOf<T>, kThreads = kThreadsOf<T>;
  float* const all_stages = reinterpret_cast<float*>(shared);
  float* const stages = all_stages + Team<T>() * (kStages * kStageFloats<T>);
  // [blocks][a part of the tile]
  float* const received = kIsAsync<T> ? all_stages : all_stages + kTeams * kStages * kStageFloats<T>;
  const int tid = static_cast<int>(threadIdx.x);
  const int group = static_cast<int>(blockIdx.z) / p.blocks,
            block = static_cast<int>(blockIdx.z) - group * p.blocks, slice = block * kTeams + Team<T>();
  const int i0 = static_cast<int>(blockIdx.y) * T::kRows, j0 = static_cast<int>(blockIdx.x) * T::kColumns;
  const auto begin_of = [&](unsigned s) { return static_cast<int>(s * (p.depth / T::kDepth) / p.slices); };
  const int first = begin_of(slice), steps = begin_of(slice + 1) - first, k0 = first * T::kDepth;
  const int part = static_cast<int>(p.by_part.divisor);
  const int own_part = min(part, T::kOutputs / 4 - block * part);  // fours
  if (p.in_cluster) {
    if (tid == 0) {
      InitBarrier(SharedAddress(&exchange), 1);
      FenceBarrierInit();
      ArriveExpecting(SharedAddress(&exchange), (p.blocks - (kKeepsOwn ? 1 : 0)) * own_part * 16);
    }
    if constexpr (!kIsAsync<T>) ClusterArrive();
  }

  typename T::Sums sums;
  const typename T::Weights weights(p, group, i0, k0, SharedAddress(stages));
  // The weights are the kernel's own: they may be fetched before the predecessor is done.
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) weights.Fetch(s, s);
  }
  if (kKeepsBiases && p.bias != nullptr) {
    for (int row = tid; row < T::kRows; row += kThreads) {
      CopyAsyncOrZero<4>(SharedAddress(biases_of_rows + row),
                         p.bias + group * p.rows + min(i0 + row, p.rows - 1), true);
    }
  }
  const Source source(p, group, j0, SharedAddress(stages + T::kWeightFloats));
  for (int s = 0; s < kStages; ++s) source.Prepare(k0 + s * T::kDepth, s);
  SyncTeam<T>();
  WaitForPredecessors();
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) source.Fetch(k0 + s * T::kDepth, s);
    CommitCopies();
  }

  int stage = 0;
  uint32_t parity = 0;
  constexpr bool kCopiesAmong = kMayCopyAmong<T> && requires { source.Begin(0, 0, true); };
  const auto fetch_next = [&](int step) {
    const int next = step + kStages - 1;
    if (next < steps) {
      const int target = stage == 0 ? kStages - 1 : stage - 1;  // read in the last step
      weights.Fetch(next, target);
      source.Fetch(k0 + next * T::kDepth, target);
      source.Prepare(k0 + (next + 1) * T::kDepth, stage);
    }
    CommitCopies();
  };
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    WaitForCopies<kStages - 2>();
    SyncTeam<T>();
    float* const weights_of_stage = stages + stage * kStageFloats<T>;
    if constexpr (kIsAsync<T>) {
      weights.Wait(stage, parity);
      sums.Multiply(weights_of_stage, weights_of_stage + T::kWeightFloats);
      fetch_next(step);
      sums.Wait();
    } else if constexpr (kCopiesAmong) {
      const int next = step + kStages - 1, target = stage == 0 ? kStages - 1 : stage - 1;
      auto weight_copies = weights.Begin(next, target, next < steps);
      auto column_copies = source.Begin(k0 + next * T::kDepth, target, next < steps);
      constexpr int kWeightEach = T::kDepth / T::Weights::kPasses, kColumnEach = T::kDepth / Source::kPasses;
      sums.Multiply(weights_of_stage, weights_of_stage + T::kWeightFloats, [&](int k) {
        if (k % kWeightEach == 0) weights.Copy(weight_copies, k / kWeightEach);
        if (k % kColumnEach == 0) source.Copy(column_copies, k / kColumnEach);
      });
      if (next < steps) source.Prepare(k0 + (next + 1) * T::kDepth, stage);
      CommitCopies();
    } else {
      fetch_next(step);
      sums.Multiply(weights_of_stage, weights_of_stage + T::kWeightFloats);
    }
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  if (kKeepsBiases && steps == 0) {  // sums of nothing: no step has waited for the biases
    WaitForCopies<0>();
    __syncthreads();
  }
  LetSuccessorsStart();
  if constexpr (kIsAsync<T>) {
    if (p.in_cluster) ClusterArrive();
    sums.Finish();
  }

  // A thread's squares of four by four outputs, each as four lines of four side by side: where in the tile a line
  // begins, and the four.
  constexpr int kSquares = kFoursDown * kFoursAcross;
  const auto place_of = [&](int square, int line) {
    const int at_row = sums.row + square / kFoursAcross * T::kRowStep;
    const int at_column = sums.column + square % kFoursAcross * T::kColumnStep;
    return kStoresColumns<Column> ? (at_column + line) * T::kRows + at_row
                                  : (at_row + line) * T::kColumns + at_column;
  };
  const auto four_of = [&](int square, int line) {
    const int i = square / kFoursAcross * 4, j = square % kFoursAcross * 4;
    Fours four;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      four.v[e] = kStoresColumns<Column> ? sums.At(i + e, j + line) : sums.At(i + line, j + e);
    return four;
  };
  const auto row_of = [&](int place) {
    return i0 + (kStoresColumns<Column> ? place % T::kRows : place / T::kColumns);
  };
  const auto column_of = [&](int place) {
    return j0 + (kStoresColumns<Column> ? place / T::kRows : place % T::kColumns);
  };
  float* const y = p.y + block * p.block_stride;
  // Biases of outputs of one row, of which they are all.
  const auto biases_of_row = [&](int i) {
    Fours biases = {};
#pragma unroll
    for (float& bias : biases.v) bias = p.bias == nullptr ? 0.0f : biases_of_rows[i];
    return biases;
  };
  // What is added to the outputs from a place in the tile on: to four that lie side by side, or to one.
  const auto residuals_at = [&](auto fours, int place) -> Fours {
    const int i = row_of(place), j = column_of(place);
    const FourPlace at = {i, j, Column::Target(p, group, i, j)};
    if constexpr (decltype(fours)::value) return LoadResiduals<Column, true>(p, group, at);
    return {{i < p.rows && j < p.columns ? ResidualAt(p, at.at) : 0.0f}};
  };
  // Finishes fours of the tile from number `begin` on, whose sums are what `parts` parts, part_floats apart, have from
  // `first_part` on once wait() is through: four outputs at a time, or one where four do not lie side by side.
  // `residuals`: of a thread's first.
  const auto finish_part = [&](auto fours, int begin, int fours_count, const float* first_part,
                               int part_floats, int parts, auto most, Fours residuals, const auto& wait) {
    constexpr bool kFours = decltype(fours)::value;
    constexpr int kWidth = kFours ? 4 : 1;
    const int count = fours_count * 4 / kWidth;
    Fours next_biases = {};
    const auto load_biases = [&](int at) {
      if (!kKeepsBiases && at < count) {
        next_biases = LoadBiases<kWidth>(p, group, row_of(begin * 4 + at * kWidth));
      }
    };
    const auto target_of = [&](int at) -> FourPlace {
      const int place = begin * 4 + at * kWidth, i = row_of(place), j = column_of(place);
      return {i, j, Column::Target(p, group, i, j)};
    };
    load_biases(tid);
    FourPlace next_target = target_of(tid);  // worked out while sums are on their way
    wait();
    for (int at = tid; at < count; at += kThreads) {
      const Fours own_residuals = residuals, own_biases = next_biases;
      const FourPlace target = next_target;
      load_biases(at + kThreads);
      next_target = target_of(at + kThreads);
      if (p.limits.adds && at + kThreads < count) {
        residuals = residuals_at(fours, begin * 4 + (at + kThreads) * kWidth);
      }
      const auto load = [&](int s) {
        const float* const from = first_part + s * part_floats + at * kWidth;
        Fours out = {};
        if constexpr (kFours) {
          const float4 v = *reinterpret_cast<const float4*>(from);
          out = {{v.x, v.y, v.z, v.w}};
        } else {
          out.v[0] = *from;
        }
        return out;
      };
      // Of few parts, as most tiles have, without the code for many.
      constexpr int kMost = decltype(most)::value, kFew = kMost < 4 ? kMost : 4;
      const Fours all = parts <= kFew ? AddSlices<kFew>(parts, load) : AddSlices<kMost>(parts, load);
      const Fours biases = kKeepsBiases ? biases_of_row(target.i - i0) : own_biases;
      if constexpr (kFours) {
        StoreFours<Column, true>(p, y, group, target, all, biases, own_residuals);
      } else if (target.i < p.rows && target.j < p.columns) {
        y[target.at] = FinishSum(p, biases.v, all.v[0], own_residuals.v[0]);
      }
    }
  };
  const auto send = [&](const Fours& four, int place) {
    const auto [owner, in_part] = Divided(static_cast<unsigned>(place) / 4, p.by_part);
    float* const to = received + (block * part + in_part) * 4;
    if (kKeepsOwn && static_cast<int>(owner) == block) {
      *reinterpret_cast<float4*>(to) = make_float4(four.v[0], four.v[1], four.v[2], four.v[3]);
      return;
    }
    const int4 words = {__float_as_int(four.v[0]), __float_as_int(four.v[1]), __float_as_int(four.v[2]),
                        __float_as_int(four.v[3])};
    StoreToCluster(ClusterAddress(SharedAddress(to), owner), words,
                   ClusterAddress(SharedAddress(&exchange), owner));
  };

  using std::bool_constant, std::integral_constant;
  // Of the first outputs that a thread finishes: under way while sums meet.
  Fours residuals = {};
  if (p.limits.adds && (kTeams > 1 || p.in_cluster)) {
    const int begin = p.in_cluster ? block * part : 0, count = p.in_cluster ? own_part : T::kOutputs / 4;
    if (p.stores_fours) {
      if (tid < count) residuals = residuals_at(bool_constant<true>(), (begin + tid) * 4);
    } else if (tid < count * 4) {
      residuals = residuals_at(bool_constant<false>(), begin * 4 + tid);
    }
  }
  if constexpr (kTeams > 1) {
    // The teams' sums, [teams][the tile], take the place of the stages, where every thread finds those of some outputs.
    static_assert(T::kOutputs <= kStages * kStageFloats<T>);
    __syncthreads();
    float* const own_sums = all_stages + Team<T>() * T::kOutputs;
    if constexpr (kHasRuns<T>) {
      sums.Put(own_sums);
    } else {
#pragma unroll
      for (int square = 0; square < kSquares; ++square) {
#pragma unroll
        for (int line = 0; line < 4; ++line) {
          const Fours four = four_of(square, line);
          *reinterpret_cast<float4*>(own_sums + place_of(square, line)) =
              make_float4(four.v[0], four.v[1], four.v[2], four.v[3]);
        }
      }
    }
    __syncthreads();
    if (!p.in_cluster) {
      const auto finish_all = [&](auto fours) {
        finish_part(fours, 0, T::kOutputs / 4, all_stages, T::kOutputs, kTeams,
                    integral_constant<int, kTeams>(), residuals, [] {});
      };
      if (p.stores_fours) {
        finish_all(bool_constant<true>());
      } else {
        finish_all(bool_constant<false>());
      }
      return;
    }
  } else if (!p.in_cluster) {
    // Every output's place would take more instructions than all else here: it follows from the one of the thread's
    // first row. Residuals are loaded a square ahead, where there are registers for that: the compiler moves no load
    // across a store, since y may lie where they do.
    const int first_row = i0 + sums.row, first_column = j0 + sums.column;
    int64_t first[kFoursAcross];
#pragma unroll
    for (int j = 0; j < kFoursAcross; ++j) {
      first[j] = Column::Target(p, group, first_row, first_column + j * T::kColumnStep);
    }
    const auto biases_of = [&](int square, int line) {
      const int row = sums.row + square / kFoursAcross * T::kRowStep;
      return kKeepsBiases ? biases_of_row(row + line) : LoadBiases<4>(p, group, i0 + row);
    };
    const auto store_all = [&](auto fours, auto adds) {
      constexpr bool kFours = decltype(fours)::value, kMayAdd = decltype(adds)::value;
      constexpr int kAhead = kIsAsync<T> ? 1 : 0;
      const auto line_of = [&](int square, int line) -> FourPlace {
        const int down = square / kFoursAcross * T::kRowStep, across = square % kFoursAcross;
        if constexpr (kStoresColumns<Column>) {
          return {first_row + down, first_column + across * T::kColumnStep + line,
                  first[across] + int64_t{line} * p.rows + down};
        } else {
          return {first_row + down + line, first_column + across * T::kColumnStep,
                  first[across] + (down + line) * Column::LineStep(p)};
        }
      };
      Fours residuals[2][4] = {};
      const auto load = [&](int square) {
#pragma unroll
        for (int line = 0; line < 4; ++line) {
          residuals[square % 2][line] = LoadResiduals<Column, kFours>(p, group, line_of(square, line));
        }
      };
      if (kMayAdd && kAhead > 0) load(0);
#pragma unroll
      for (int square = 0; square < kSquares; ++square) {
        if (kMayAdd && square + kAhead < kSquares) load(square + kAhead);
#pragma unroll
        for (int line = 0; line < 4; ++line) {
          StoreFours<Column, kFours>(p, y, group, line_of(square, line), four_of(square, line),
                                     biases_of(square, line), residuals[square % 2][line]);
        }
      }
    };
    if (!p.stores_fours) {
      if constexpr (kFoursDown * T::kRowStep != T::kRows || kFoursAcross * T::kColumnStep != T::kColumns) {
        store_all(bool_constant<false>(), bool_constant<true>());
      } else {
        StoreOneByOne<Column, T>(p, y, group, i0, j0, sums, stages);
      }
    } else if (p.limits.adds) {
      store_all(bool_constant<true>(), bool_constant<true>());
    } else {
      store_all(bool_constant<true>(), bool_constant<false>());
    }
    return;
  }

  // Each block gets its part of the tile from all of them.
  ClusterWait();
  if constexpr (kTeams > 1) {
    for (int at = tid; at < T::kOutputs / 4; at += kThreads) {
      const auto load = [&](int team) {
        const float4 v = *reinterpret_cast<const float4*>(all_stages + team * T::kOutputs + at * 4);
        return Fours{{v.x, v.y, v.z, v.w}};
      };
      send(AddSlices<kTeams>(kTeams, load), at * 4);
    }
  } else {
#pragma unroll
    for (int square = 0; square < kSquares; ++square) {
#pragma unroll
      for (int line = 0; line < 4; ++line) send(four_of(square, line), place_of(square, line));
    }
  }
  if constexpr (kKeepsOwn) __syncthreads();
  const auto finish_own = [&](auto fours) {
    finish_part(fours, block * part, own_part, received, part * 4, p.blocks,
                integral_constant<int, kMostBlocks>(), residuals,
                [&] { WaitBarrier(SharedAddress(&exchange), 0); });
  };
  if (p.stores_fours) {
    finish_own(bool_constant<true>());
  } else {
    finish_own(bool_constant<false>());
  }
}

template <typename Source, typename Column, typename T>
__global__ void __launch_bounds__(kThreadsOf<T>, T::kBlocks)
    ProductTiles(const __grid_constant__ typename T::Params p) {
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (!kIsAsync<T>)  // those are launched on Hopper alone
#endif
    MakeTile<Source, Column, T>(p);
}

// The sums of slices in the workspace.
struct SliceParams {
  SplitParams product;  // whose x they are
  int outputs = 0;
};
template <typename Column>
__global__ void __launch_bounds__(kThreads) FinishSlices(const __grid_constant__ SliceParams p) {
  const unsigned at = StartThread();
  if (at >= p.product.count) return;
  const auto load = [&](int s) { return Fours{{p.product.x[s * p.product.block_stride + at]}}; };
  const float sum = AddSlices<kMostSlices>(p.product.blocks, load).v[0];
  const unsigned line = kStoresColumns<Column> ? at : Divided(at, p.product.by_pixels).quotient;
  p.product.y[at] = FinishSum(p.product, static_cast<int>(line) % p.outputs, sum, ResidualAt(p.product, at));
}

// ---- which tile, how many slices

// About how many clocks of a multiprocessor, of which the busiest has `blocks` one after the other and some at once; what
// the tile says itself, where it does.
template <typename T>
double CostOf(const SplitParams& p, int slices, int multiprocessors) {
  if constexpr (requires { T::CostOf(p, slices, multiprocessors); }) {
    return T::CostOf(p, slices, multiprocessors);
  } else {
    using Rates = ProductRates;
    constexpr int kThreadsAtOnce = 65536 / T::kRegisters, kShared = 227 << 10;
    const double tiles =
        static_cast<double>(BlocksFor(p.columns, T::kColumns)) * BlocksFor(p.rows, T::kRows) * p.groups;
    const int at_once = std::min(kThreadsAtOnce / T::kBlock, kShared / SharedBytes<T>(slices > 1));
    const double blocks = std::ceil(tiles * slices / multiprocessors);
    const double under_way = std::min<double>(blocks, at_once) * T::kOutputs;
    const double rate = T::kProducts * under_way / (under_way + Rates::kHiding);
    const double longest = static_cast<double>(BlocksFor(p.depth, int64_t{slices} * T::kDepth)) * T::kDepth;
    const double bytes = (T::kWeightBytes * T::kRows + 4.0 * T::kColumns) * longest;
    const double stored = 4.0 * T::kOutputs / (slices == 1 ? Rates::kBytes : Rates::kSent);
    return Rates::kStart + Rates::JoinOf(slices) +
           blocks * (std::max(T::kOutputs * longest / rate, bytes / Rates::kBytes) + stored);
  }
}

// Calls fn with the tile of that number.
template <typename Tiles, typename Fn>
void WithTile(int index, const Fn& fn) {
  [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
    static_cast<void>(((index == kIndices && (fn(std::tuple_element_t<kIndices, Tiles>()), true)) || ...));
  }(std::make_integer_sequence<int, std::tuple_size_v<Tiles>>());
}

// Few columns are of Gemms with few rows.
template <typename Column, typename T>
inline constexpr bool kMayUse =
    kHasRuns<T> ? !kStoresColumns<Column> : kStoresColumns<Column> || T::kColumns >= kWarp;

// The first tile where no other can make so many slices on a device.
struct TileChoice {
  int tile = 0;
  double cost = std::numeric_limits<double>::infinity();
};
template <typename Tiles, typename Column>
TileChoice CheapestTile(const SplitParams& p, int slices, const Device& device) {
  TileChoice best;
  for (int i = 0; i < static_cast<int>(std::tuple_size_v<Tiles>); ++i) {
    WithTile<Tiles>(i, [&](auto tile) {
      using T = decltype(tile);
      if (!kMayUse<Column, T> || slices % kTeamsOf<T> != 0 ||
          SharedBytes<T>(false) + kTableBytes<T> > device.shared_bytes)
        return;
      const double cost = CostOf<T>(p, slices, device.multiprocessors);
      if (cost < best.cost) best = {i, cost};
    });
  }
  return best;
}

inline constexpr int kMostGridRows = 65535;

// The GPUs that this was made for. What decides the bits is estimated for them, whatever GPU is there.
inline Device DeviceOfEstimates() { return {.multiprocessors = 132, .shared_bytes = 227 << 10, .name = ""}; }

// The powers of two; with `between` those and what lies halfway between two of them.
constexpr int NextSlices(int slices, bool between) {
  if (!between || slices == 1) return 2 * slices;
  return slices % 3 == 0 ? slices / 3 * 4 : slices / 2 * 3;
}

// The cheapest number of slices, or the largest up to what is asked for; one, or at most `most`.
template <typename Cost>
int CheapestSlices(int most, int asked, const Cost& cost_of, bool between = false) {
  int best = 1;
  double least = std::numeric_limits<double>::infinity();
  for (int slices = 1; slices <= (asked > 0 ? asked : kMostSlices); slices = NextSlices(slices, between)) {
    if (slices > 1 && slices > most) break;
    const double cost = cost_of(slices);
    if (asked > 0 || cost < least) least = cost, best = slices;
  }
  return best;
}
template <typename Tiles, typename Column>
int CheapestSlices(const SplitParams& p, int asked = 0) {
  constexpr int kDepth = std::tuple_element_t<0, Tiles>::kDepth;
  const auto cost_of = [&, device = DeviceOfEstimates()](int slices) {
    return CheapestTile<Tiles, Column>(p, slices, device).cost;
  };
  const int most = std::min({p.depth / kDepth, kMostGridRows / std::max(1, p.groups), p.most_slices});
  return CheapestSlices(most, asked, cost_of, p.more_slices);
}

// Whether 32 bits hold what the kernel computes of pixels.
inline bool IsNear(const ProductParams& p) {
  constexpr int64_t kFar = kOutside / 4;
  const auto is_near = [](const WindowDim& d) {
    return std::max({d.in, d.pad_begin, d.kernel, d.dilation, d.stride}) < kFar &&
           std::max(d.kernel * d.dilation, d.out * d.stride) < kFar;
  };
  const WindowDim &h = p.windows.h, &w = p.windows.w;
  constexpr int64_t kEnd = int64_t{1} << 31;
  return is_near(h) && is_near(w) &&
         (p.channels * h.in + h.kernel * h.dilation) * w.in + w.kernel * w.dilation < kEnd;
}

// ---- launches

template <typename Source, typename Column, typename T>
void LaunchTile(const Run& run, typename T::Params p, const Device& device) {
  p.by_part = MakeDivisor(BlocksFor(T::kOutputs / 4, p.blocks));
  const dim3 grid(BlocksFor(p.columns, T::kColumns), BlocksFor(p.rows, T::kRows),
                  static_cast<unsigned>(p.groups) * p.blocks);
  Require(grid.y <= kMostGridRows && grid.z <= kMostGridRows, "a float product of ", p.rows, " outputs in ",
          p.groups, " groups is too large");
  constexpr int kTables = std::is_same_v<Source, WindowSource<T>> ? kTableBytes<T> : 0;
  const int cluster = p.in_cluster ? p.blocks : 1;
  const int bytes =
      SpreadBytes(SharedBytes<T>(p.in_cluster) + kTables, int64_t{grid.x} * grid.y * grid.z, cluster, device);
  const LaunchShape shape{grid, kThreadsOf<T>, bytes, Dim(1, 1, cluster)};
  run.Check(LaunchKernel<ProductTiles<Source, Column, T>>(run.queue, device, shape, p));
}

// Whether FoursSource has the columns of a convolution.
inline bool HasFours(const ProductParams& p) {
  const auto is_plain = [](const WindowDim& d) {
    return d.kernel == 1 && d.stride == 1 && d.pad_begin == 0 && d.out == d.in;
  };
  return is_plain(p.windows.h) && is_plain(p.windows.w) && p.by_pixels.divisor % 4 == 0 &&
         CommonUnit({p.x}) == 16;
}

template <typename Tiles, typename Column, typename Params>
void LaunchProduct(const Run& run, const Params& p, int tile, const Device& device) {
  WithTile<Tiles>(tile, [&](auto known) {
    using T = decltype(known);
    constexpr bool kIsTypical = HasInstance(std::is_same_v<T, std::tuple_element_t<0, Tiles>>);
    if constexpr (!kMayUse<Column, T>) {
      run.Check(cudaErrorInvalidValue);
    } else if constexpr (kStoresColumns<Column>) {
      if constexpr (kIsTypical) {
        LaunchTile<LinesSource<T>, Column, T>(run, p, device);
      } else {
        run.Check(cudaErrorInvalidValue);
      }
    } else {
      if constexpr (kIsTypical) {
        if (HasFours(p)) return LaunchTile<FoursSource<T>, Column, T>(run, p, device);
      }
      if constexpr (requires { typename T::TapSource; }) {
        if (p.taps_first) return LaunchTile<typename T::TapSource, Column, T>(run, p, device);
      }
      if constexpr (HasInstance(kIsTypical || requires { typename T::TapSource; })) {
        LaunchTile<WindowSource<T>, Column, T>(run, p, device);
      } else {
        run.Check(cudaErrorInvalidValue);
      }
    }
  });
}

// A plan whose kernel makes slices of sums, by launch(run, parameters). In clusters it needs so many bytes of shared memory.
template <typename Column, typename Params, typename Launch>
NodePlanPtr PlanSlices(std::string text, Params geometry, const Device& device, int shared_bytes,
                       const Launch& launch) {
  constexpr int kFirstClusters = 90, kLargeClusters = 90, kMostPortable = 8;
  if (geometry.slices > 1) text += " slices " + std::to_string(geometry.slices);
  const int most = device.capability == kLargeClusters ? kMostBlocks : kMostPortable;
  geometry.in_cluster = geometry.blocks > 1 && device.capability >= kFirstClusters &&
                        geometry.blocks <= most && shared_bytes <= device.shared_bytes;
  if (geometry.blocks == 1 || geometry.in_cluster) return MakeKernelPlan(text, geometry, launch);
  geometry.block_stride = BlocksFor(geometry.count, 64) * int64_t{64};
  const auto in_memory = [=](const Run& run, const Params& p) {
    Params slices = p;
    slices.y = static_cast<float*>(run.workspace);
    slices.bias = slices.residual = nullptr;
    slices.limits = {};
    launch(run, slices);
    SliceParams finish = {p, p.rows * p.groups};
    finish.product.x = slices.y;
    run.LaunchFor(p.count, FinishSlices<Column>, kThreads, finish);
  };
  return MakeKernelPlan(text + " in memory", geometry, in_memory,
                        static_cast<size_t>(geometry.blocks * geometry.block_stride) * sizeof(float));
}

template <typename Tiles, typename Column, typename Params>
NodePlanPtr PlanProduct(const std::string& name, Params geometry, const Device& device,
                        const FloatTiling& tiling = {}) {
  Require(IsNear(geometry), "the windows of a float product reach too far, expected less than 2^28 pixels");
  Require(
      geometry.depth < std::numeric_limits<int>::max() / kMostSlices * std::tuple_element_t<0, Tiles>::kDepth,
      "a float product sums ", geometry.depth, " products, which are too many");
  geometry.slices = CheapestSlices<Tiles, Column>(geometry, tiling.slices);
  bool may_use = false;
  WithTile<Tiles>(tiling.tile, [&](auto known) {
    using T = decltype(known);
    may_use = kMayUse<Column, T> && geometry.slices % kTeamsOf<T> == 0;
  });
  const int tile =
      may_use ? tiling.tile : CheapestTile<Tiles, Column>(geometry, geometry.slices, device).tile;
  std::string text = name;
  int shared_bytes = 0;
  WithTile<Tiles>(tile, [&](auto known) {
    using T = decltype(known);
    text += " " + std::to_string(T::kRows) + "x" + std::to_string(T::kColumns);
    if (kTeamsOf<T> > 1) text += " by " + std::to_string(kTeamsOf<T>) + " teams";
    geometry.blocks = geometry.slices / kTeamsOf<T>;
    shared_bytes = SharedBytes<T>(true) + kTableBytes<T>;
  });
  // Outputs that lie side by side.
  const unsigned line =
      kStoresColumns<Column> ? static_cast<unsigned>(geometry.rows) : geometry.by_pixels.divisor;
  const auto launch = [=](const Run& run, Params p) {
    p.stores_fours = line % 4 == 0 && CommonUnit({p.y, p.residual}) == 16;
    LaunchProduct<Tiles, Column>(run, p, tile, device);
  };
  return PlanSlices<Column>(text, geometry, device, shared_bytes, launch);
}

// All that is known before the shapes, of sums in whole stages of `depth` elements.
template <typename Op, typename Params>
void DescribeTiles(const Op& op, const Limits& limits, int depth, Params& p) {
  Describe(op, limits, p);
  p.k = CheckedSize(p.channels * TapsOf(op), "sums of length");
  p.depth = CheckedSize(int64_t{BlocksFor(p.k, depth)} * depth, "sums of length");
  p.by_taps = MakeDivisor(TapsOf(op));
}

}  // namespace lowbit::cuda
