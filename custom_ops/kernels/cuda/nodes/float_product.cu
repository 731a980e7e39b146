// Gemm, MatMul and Conv in float32 on the CUDA cores. Rows are outputs (of the node or a group), columns are rows of A
// or pixels; k runs over the channels and, inside one, over its taps.
//
// How a sum is made depends on the node and its shapes alone (FloatSlices), whatever tiles a GPU is given: k is cut into
// slices, each is summed front to back with fma, and the slices' sums are added by a binary tree. A block makes one
// slice of a tile of outputs:
//
//   copies of kStages - 1 stages, kDepth elements of k each, are under way while one is multiplied;
//   a thread multiplies 4 or 8 outputs along either side, whose operands it reads from shared memory 16 bytes at a time;
//   the blocks of a tile's slices are a cluster: each gets a part of the tile from all of them, adds and finishes it.
//   On GPUs without clusters they write their sums to the workspace, which a second kernel adds.
#include <bit>
#include <cmath>
#include <limits>
#include <tuple>
#include <type_traits>

#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/nodes/float_product.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kDepth = 16;  // elements of k in a stage
constexpr int kMostSlices = 16;

struct FloatParams : ProductParams {
  const float* weights = nullptr;  // [groups][depth][pitch], with zeros behind the elements of k and the rows
  int k = 0, depth = 0, pitch = 0;
  int slices = 1;             // of k, a power of two; slice s begins behind s / slices of the stages
  bool in_cluster = false;    // the blocks of a tile's slices are a cluster
  int64_t slice_stride = 0;   // where they are not: from a slice's sums in the workspace to the next one's
  bool stores_fours = false;  // four outputs side by side begin at 16 bytes, and are all there or none
  FastDivisor by_taps;
};

// What a block makes, and its threads: kThreadRows x kThreadColumns outputs each, in squares of four.
template <int kTileRows, int kTileColumns, int kRowsOfThread, int kColumnsOfThread, int kStagesOf>
struct Tile {
  static constexpr int kRows = kTileRows, kColumns = kTileColumns, kOutputs = kRows * kColumns;
  static constexpr int kThreadRows = kRowsOfThread, kThreadColumns = kColumnsOfThread, kStages = kStagesOf;
  static constexpr int kBlock = kOutputs / (kThreadRows * kThreadColumns);
  // The threads of a warp: few addresses of either operand, and those next to each other.
  static constexpr int kAcross = kColumns / kThreadColumns;  // threads along a row
  static constexpr int kLanesAcross = kAcross < 8 ? kAcross : 8, kLanesDown = kWarp / kLanesAcross;
  static constexpr int kWarpsAcross = kAcross / kLanesAcross;
  // Elements of a column are copied side by side along k, too, which then lie in other banks.
  static constexpr int kPitch = kColumns + 4;
  static constexpr int kWeightFloats = kDepth * kRows, kStageFloats = kWeightFloats + kDepth * kPitch;
  static_assert(kRows / kThreadRows * kAcross == kBlock && kLanesDown * kLanesAcross == kWarp);
};

// ---- where the elements of x lie. Each copies those of a stage, element k of column j to shared memory at
// k * kPitch + j, and zeros where there are none.

// Columns side by side, 16 bytes at a time: 1x1 convolutions and transposed Gemms, where the addresses allow it.
template <typename Column, typename T>
struct FoursSource {
  static constexpr int kFours = T::kColumns / 4, kSteps = T::kBlock / kFours;
  static_assert(T::kBlock % kFours == 0);
  const FloatParams& p;
  const float* first = nullptr;
  int64_t k_step;
  int own = static_cast<int>(threadIdx.x) / kFours;  // along k
  uint32_t to;

  __device__ __forceinline__ FoursSource(const FloatParams& params, int group, int j0, uint32_t pixels)
      : p(params), k_step(Column::ChannelStep(params)) {
    const int four = static_cast<int>(threadIdx.x) % kFours;
    first = Column(params, group, min(j0 + 4 * four, params.columns - 4)).At(params, 0, 0);
    to = pixels + (own * T::kPitch + 4 * four) * 4;
  }
  __device__ __forceinline__ void Prepare(int, int) const {}
  __device__ __forceinline__ void Fetch(int k0, int stage) const {
    const float* x = first + (k0 + own) * k_step;
#pragma unroll
    for (int k = 0; k < kDepth; k += kSteps) {
      if (kSteps > kDepth && own >= kDepth) break;
      CopyAsyncOrZero<16>(to + (stage * T::kStageFloats + k * T::kPitch) * 4, x + k * k_step,
                          k0 + own + k < p.k);
    }
  }
};

// Columns of a Gemm, side by side along k in most.
template <typename T>
struct LinesSource {
  static constexpr int kSide = 8, kStep = T::kBlock / kSide;  // threads along k, columns at a time
  const FloatParams& p;
  const float* first;
  int own = static_cast<int>(threadIdx.x) % kSide, j;
  uint32_t to;

  __device__ __forceinline__ LinesSource(const FloatParams& params, int, int j0, uint32_t pixels)
      : p(params) {
    const int column = static_cast<int>(threadIdx.x) / kSide;
    j = j0 + column;
    first = p.x + j * p.column_step + own * p.k_step;
    to = pixels + (own * T::kPitch + column) * 4;
  }
  __device__ __forceinline__ void Prepare(int, int) const {}
  __device__ __forceinline__ void Fetch(int k0, int stage) const {
#pragma unroll
    for (int k = 0; k < kDepth; k += kSide) {
#pragma unroll
      for (int column = 0; column < T::kColumns; column += kStep) {
        CopyAsyncOrZero<4>(to + (stage * T::kStageFloats + k * T::kPitch + column) * 4,
                           first + column * p.column_step + (k0 + k) * p.k_step,
                           k0 + own + k < p.k && j + column < p.columns);
      }
    }
  }
};

// Any columns side by side, an element at a time. Where the elements of k lie in an image is worked out once for all
// columns, a stage ahead of the copies.
constexpr int kOutside = 1 << 30;  // added to a coordinate of an image

struct __align__(16) Step {
  int offset, dy, dx;
};

template <typename T>
struct WindowSource {
  static constexpr int kSteps = T::kBlock / T::kColumns;
  static_assert(T::kBlock % T::kColumns == 0);
  const FloatParams& p;
  const float* first;
  int top = kOutside, left = 0;
  int own = static_cast<int>(threadIdx.x) / T::kColumns;  // along k, equal in a warp
  uint32_t to;

  __device__ __forceinline__ static Step* Table(int stage) {
    __shared__ Step steps[T::kStages][kDepth];
    return steps[stage];
  }
  __device__ __forceinline__ WindowSource(const FloatParams& params, int group, int j0, uint32_t pixels)
      : p(params), first(params.x) {
    const int column = static_cast<int>(threadIdx.x) % T::kColumns;
    const ConvColumn of(p, group, j0 + column);
    if (of.image != nullptr) {
      top = static_cast<int>(of.top), left = static_cast<int>(of.left);
      first = of.image + (of.top * p.windows.w.in + of.left);
    }
    to = pixels + (own * T::kPitch + column) * 4;
  }
  // Element `thread` of the stage from k0 on.
  __device__ __forceinline__ void Prepare(int k0, int stage, int thread) const {
    if (thread >= kDepth) return;
    const int k = k0 + thread;
    Step step = {0, kOutside / 2, 0};
    if (k < p.k) {
      const auto [channel, tap] = Divided(static_cast<unsigned>(k), p.by_taps);
      const auto [ty, tx] = Divided(tap, p.by_kernel_w);
      step.dy = static_cast<int>(ty) * static_cast<int>(p.windows.h.dilation);
      step.dx = static_cast<int>(tx) * static_cast<int>(p.windows.w.dilation);
      const int in_w = static_cast<int>(p.windows.w.in);
      step.offset = (static_cast<int>(channel) * static_cast<int>(p.windows.h.in) + step.dy) * in_w + step.dx;
    }
    Table(stage)[thread] = step;
  }
  __device__ __forceinline__ void Prepare(int k0, int stage) const {
    Prepare(k0, stage, static_cast<int>(threadIdx.x));
  }
  __device__ __forceinline__ void Fetch(int, int stage) const {
    const auto in_h = static_cast<unsigned>(p.windows.h.in), in_w = static_cast<unsigned>(p.windows.w.in);
    const Step* const steps = Table(stage) + own;
#pragma unroll
    for (int k = 0; k < kDepth; k += kSteps) {
      const Step step = steps[k];
      const bool inside =
          static_cast<unsigned>(top + step.dy) < in_h && static_cast<unsigned>(left + step.dx) < in_w;
      CopyAsyncOrZero<4>(to + (stage * T::kStageFloats + k * T::kPitch) * 4, first + step.offset, inside);
    }
  }
};

// ---- the products

struct Fours {
  float v[4];
};

__device__ __forceinline__ float ElementOf(const float4& v, int e) {
  return e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w;
}

// The sum of the slices' sums, load(slice) of each, by a binary tree.
template <typename Load>
__device__ __forceinline__ Fours AddSlices(int slices, const Load& load) {
  Fours sums[kMostSlices];
#pragma unroll
  for (int s = 0; s < kMostSlices; ++s) {
    if (s < slices) sums[s] = load(s);
  }
#pragma unroll
  for (int step = 1; step < kMostSlices; step *= 2) {
#pragma unroll
    for (int s = 0; s < kMostSlices; s += 2 * step) {
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

// Four outputs side by side from row i and column j on.
template <typename Column>
__device__ __forceinline__ void StoreFours(const FloatParams& p, float* y, int group, int i, int j,
                                           Fours sums) {
  if (i >= p.rows || j >= p.columns) return;
  const int output = group * p.rows + i;
  if (p.stores_fours) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sums.v[e] = FinishSum(p, output + (kStoresColumns<Column> ? e : 0), sums.v[e]);
    }
    *reinterpret_cast<float4*>(y + Column::Target(p, group, i, j)) =
        make_float4(sums.v[0], sums.v[1], sums.v[2], sums.v[3]);
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int of_i = kStoresColumns<Column> ? e : 0, of_j = e - of_i;
    if (i + of_i >= p.rows || j + of_j >= p.columns) return;
    y[Column::Target(p, group, i + of_i, j + of_j)] = FinishSum(p, output + of_i, sums.v[e]);
  }
}

template <typename Source, typename Column, typename T>
__global__ void __launch_bounds__(T::kBlock) ProductTiles(const __grid_constant__ FloatParams p) {
  constexpr int kStages = T::kStages, kFoursDown = T::kThreadRows / 4, kFoursAcross = T::kThreadColumns / 4;
  LOWBIT_DYNAMIC_SHARED(shared, 128);
  __shared__ uint64_t exchange;  // mbarrier: the sums that the blocks of a cluster send each other
  float* const stages = reinterpret_cast<float*>(shared);
  float* const received = stages + kStages * T::kStageFloats;  // [slices][a part of the tile]
  const int tid = static_cast<int>(threadIdx.x);
  const int group = static_cast<int>(blockIdx.z) / p.slices,
            slice = static_cast<int>(blockIdx.z) - group * p.slices;
  const int i0 = static_cast<int>(blockIdx.y) * T::kRows, j0 = static_cast<int>(blockIdx.x) * T::kColumns;
  const auto begin_of = [&](unsigned s) { return static_cast<int>(s * (p.depth / kDepth) / p.slices); };
  const int first = begin_of(slice), steps = begin_of(slice + 1) - first, k0 = first * kDepth;
  if (p.in_cluster) {
    if (tid == 0) {
      InitBarrier(SharedAddress(&exchange), 1);
      FenceBarrierInit();
      ArriveExpecting(SharedAddress(&exchange), T::kOutputs * 4);
    }
    ClusterArrive();
  }

  // What lies behind the last row is copied from another one, and not stored.
  constexpr int kRowFours = T::kRows / 4, kWeightStep = T::kBlock / kRowFours;
  static_assert(T::kBlock % kRowFours == 0 && kDepth % kWeightStep == 0);
  const int row_four = tid % kRowFours, weight_k = tid / kRowFours;
  const float* const weights = p.weights + (static_cast<int64_t>(group) * p.depth + k0 + weight_k) * p.pitch +
                               min(i0 + 4 * row_four, p.pitch - 4);
  const uint32_t weights_to = SharedAddress(stages) + (weight_k * T::kRows + 4 * row_four) * 4;
  const auto fetch_weights = [&](int step, int stage) {
#pragma unroll
    for (int k = 0; k < kDepth; k += kWeightStep) {
      CopyAsync<16>(weights_to + (stage * T::kStageFloats + k * T::kRows) * 4,
                    weights + static_cast<int64_t>(step * kDepth + k) * p.pitch);
    }
  };
  // The weights are the kernel's own: they may be fetched before the predecessor is done.
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) fetch_weights(s, s);
  }
  const Source source(p, group, j0, SharedAddress(stages + T::kWeightFloats));
  for (int s = 0; s < kStages; ++s) source.Prepare(k0 + s * kDepth, s);
  __syncthreads();
  WaitForPredecessors();
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) source.Fetch(k0 + s * kDepth, s);
    CommitCopies();
  }

  const int lane = tid % kWarp, warp = tid / kWarp;
  const int row = 4 * (warp / T::kWarpsAcross * T::kLanesDown + lane / T::kLanesAcross),
            column = 4 * (warp % T::kWarpsAcross * T::kLanesAcross + lane % T::kLanesAcross);
  constexpr int kRowStep = T::kRows / kFoursDown, kColumnStep = T::kColumns / kFoursAcross;
  float sums[T::kThreadRows][T::kThreadColumns] = {};
  int stage = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    WaitForCopies<kStages - 2>();
    __syncthreads();
    const int next = step + kStages - 1;
    if (next < steps) {
      const int target = stage == 0 ? kStages - 1 : stage - 1;  // read in the last step
      fetch_weights(next, target);
      source.Fetch(k0 + next * kDepth, target);
      source.Prepare(k0 + (next + 1) * kDepth, stage);
    }
    CommitCopies();
    const float* const a = stages + stage * T::kStageFloats + row;
    const float* const b = stages + stage * T::kStageFloats + T::kWeightFloats + column;
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      float4 w[kFoursDown], x[kFoursAcross];
#pragma unroll
      for (int i = 0; i < kFoursDown; ++i) {
        w[i] = *reinterpret_cast<const float4*>(a + k * T::kRows + i * kRowStep);
      }
#pragma unroll
      for (int j = 0; j < kFoursAcross; ++j) {
        x[j] = *reinterpret_cast<const float4*>(b + k * T::kPitch + j * kColumnStep);
      }
#pragma unroll
      for (int i = 0; i < T::kThreadRows; ++i) {
#pragma unroll
        for (int j = 0; j < T::kThreadColumns; ++j) {
          sums[i][j] = __fmaf_rn(ElementOf(w[i / 4], i % 4), ElementOf(x[j / 4], j % 4), sums[i][j]);
        }
      }
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  LetSuccessorsStart();

  // fn(place in the tile, four outputs side by side from there on).
  const auto for_fours = [&](const auto& fn) {
#pragma unroll
    for (int i = 0; i < kFoursDown; ++i) {
#pragma unroll
      for (int j = 0; j < kFoursAcross; ++j) {
#pragma unroll
        for (int line = 0; line < 4; ++line) {
          Fours four;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            four.v[e] =
                kStoresColumns<Column> ? sums[4 * i + e][4 * j + line] : sums[4 * i + line][4 * j + e];
          }
          const int at_row = row + i * kRowStep, at_column = column + j * kColumnStep;
          fn(kStoresColumns<Column> ? (at_column + line) * T::kRows + at_row
                                    : (at_row + line) * T::kColumns + at_column,
             four);
        }
      }
    }
  };
  float* const y = p.y + slice * p.slice_stride;
  const auto store = [&](int place, const Fours& four) {
    constexpr int kLine = kStoresColumns<Column> ? T::kRows : T::kColumns;
    const int line = place / kLine, in_line = place % kLine;
    const int i = kStoresColumns<Column> ? in_line : line, j = kStoresColumns<Column> ? line : in_line;
    StoreFours<Column>(p, y, group, i0 + i, j0 + j, four);
  };
  if (!p.in_cluster) return for_fours(store);

  // Each block gets its part of the tile from all of them.
  ClusterWait();
  const int part = T::kOutputs / p.slices, part_bits = 31 - __clz(part);
  for_fours([&](int place, const Fours& four) {
    const int owner = place >> part_bits, in_part = place - owner * part;
    const int4 words = {__float_as_int(four.v[0]), __float_as_int(four.v[1]), __float_as_int(four.v[2]),
                        __float_as_int(four.v[3])};
    StoreToCluster(ClusterAddress(SharedAddress(received + slice * part + in_part), owner), words,
                   ClusterAddress(SharedAddress(&exchange), owner));
  });
  WaitBarrier(SharedAddress(&exchange), 0);
  for (int at = 4 * tid; at < part; at += 4 * T::kBlock) {
    const auto load = [&](int s) {
      const float4 v = *reinterpret_cast<const float4*>(received + s * part + at);
      return Fours{{v.x, v.y, v.z, v.w}};
    };
    store(slice * part + at, AddSlices(p.slices, load));
  }
}

// The sums of slices in the workspace.
struct SliceParams {
  FloatParams product;  // whose x they are
  int outputs = 0;
};
template <typename Column>
__global__ void __launch_bounds__(kThreads) FinishSlices(const __grid_constant__ SliceParams p) {
  const unsigned at = StartThread();
  if (at >= p.product.count) return;
  const auto load = [&](int s) { return Fours{{p.product.x[s * p.product.slice_stride + at]}}; };
  const float sum = AddSlices(p.product.slices, load).v[0];
  const unsigned line = kStoresColumns<Column> ? at : Divided(at, p.product.by_pixels).quotient;
  p.product.y[at] = FinishSum(p.product, static_cast<int>(line) % p.outputs, sum);
}

// Few outputs of a group (depthwise), or windows that reach beyond 31 bits: a thread sums one output.
__global__ void __launch_bounds__(kThreads) ConvNarrow(const __grid_constant__ FloatParams p) {
  const int j = static_cast<int>(StartThread());
  if (j >= p.columns) return;
  const int channel = static_cast<int>(blockIdx.y), group = channel / p.rows, row = channel - group * p.rows;
  const ConvColumn column(p, group, j);
  const float* weight = p.weights + static_cast<int64_t>(group) * p.depth * p.pitch + row;
  const int64_t plane = ConvColumn::ChannelStep(p);
  float sum = 0;
  for (int c = 0; c < p.channels; ++c) {
    for (unsigned ty = 0; ty < p.windows.h.kernel; ++ty) {
      for (unsigned tx = 0; tx < p.windows.w.kernel; ++tx, weight += p.pitch) {
        const float* const x = column.At(p, ty, tx);
        sum = __fmaf_rn(*weight, x == nullptr ? 0.0f : x[c * plane], sum);
      }
    }
  }
  p.y[ConvColumn::Target(p, group, row, j)] = FinishSum(p, channel, sum);
}

// ---- which tile, how many slices

using Tiles = std::tuple<Tile<128, 128, 8, 8, 3>, Tile<64, 128, 8, 8, 4>, Tile<64, 64, 8, 4, 4>,
                         Tile<64, 32, 8, 4, 4>, Tile<128, 8, 4, 4, 6>>;
constexpr int kTileCount = FloatTiling::kTiles;
static_assert(kTileCount == std::tuple_size_v<Tiles>);

// Calls fn with the tile of that number.
template <typename Fn, int... kIndices>
void WithTile(int index, const Fn& fn, std::integer_sequence<int, kIndices...>) {
  static_cast<void>(((index == kIndices && (fn(std::tuple_element_t<kIndices, Tiles>()), true)) || ...));
}
template <typename Fn>
void WithTile(int index, const Fn& fn) {
  WithTile(index, fn, std::make_integer_sequence<int, kTileCount>());
}

// Few columns are of Gemms with few rows.
template <typename Column, typename T>
constexpr bool kMayUse = kStoresColumns<Column> || T::kColumns >= kWarp;

template <typename T>
constexpr int SharedBytes(bool in_cluster) {
  return (T::kStages * T::kStageFloats + (in_cluster ? T::kOutputs : 0)) * static_cast<int>(sizeof(float));
}

// About how many clocks of a multiprocessor, of which the busiest has `blocks` one after the other and some at once.
template <typename T>
double CostOf(const FloatParams& p, int slices, int multiprocessors) {
  constexpr double kProducts = 128, kBytes = 24,
                   kSent = 16;  // in a clock: fma, bytes of the L2 cache, of a cluster
  constexpr double kHiding =
      3072;  // outputs under way, beside which as many would hide half of the latencies
  constexpr double kStart = 1500, kJoin = 1000;                 // of the first block, and of its cluster
  constexpr int kRegisters = 65536 / 128, kShared = 227 << 10;  // threads of 128 registers; bytes
  constexpr double kRate = T::kThreadRows * T::kThreadColumns >= 64 ? 0.9 : 0.8;  // more products for a read
  const double tiles =
      static_cast<double>(BlocksFor(p.columns, T::kColumns)) * BlocksFor(p.rows, T::kRows) * p.groups;
  const double blocks = std::ceil(tiles * slices / multiprocessors);
  const int at_once = std::min(kRegisters / T::kBlock, kShared / SharedBytes<T>(slices > 1));
  const double under_way = std::min<double>(blocks, at_once) * T::kOutputs;
  const double rate = kRate * under_way / (under_way + kHiding);
  const double slice =
      static_cast<double>(BlocksFor(p.depth, int64_t{slices} * kDepth)) * kDepth;  // of the longest
  const double products = T::kOutputs * slice / (kProducts * rate);
  const double bytes = 4.0 * (T::kRows + T::kColumns) * slice / kBytes;
  const double stored = 4.0 * T::kOutputs / (slices == 1 ? kBytes : kSent);
  return kStart + (slices > 1 ? kJoin : 0) + blocks * (std::max(products, bytes) + stored);
}

struct Choice {
  int tile = 0;
  double cost = std::numeric_limits<double>::infinity();
};
template <typename Column>
Choice CheapestTile(const FloatParams& p, int slices, int multiprocessors) {
  Choice best;
  for (int i = 0; i < kTileCount; ++i) {
    WithTile(i, [&](auto tile) {
      using T = decltype(tile);
      if (!kMayUse<Column, T>) return;
      const double cost = CostOf<T>(p, slices, multiprocessors);
      if (cost < best.cost) best = {i, cost};
    });
  }
  return best;
}

constexpr int kMostGridRows = 65535;

// Whether a thread sums an output, front to back.
bool IsNarrow(const FloatGemmOp&, const FloatParams&) { return false; }
bool IsNarrow(const FloatConvOp&, const FloatParams& p) {
  constexpr int kNarrow = 8;
  constexpr int64_t kFar = kOutside / 2;
  const auto is_near = [](const WindowDim& d) {
    return std::max({d.in, d.pad_begin, d.kernel, d.dilation, d.stride}) < kFar &&
           std::max(d.kernel * d.dilation, d.out * d.stride) < kFar;
  };
  const WindowDim &h = p.windows.h, &w = p.windows.w;
  const bool fits = is_near(h) && is_near(w) &&
                    (p.channels * h.in + h.kernel * h.dilation) * w.in + w.kernel * w.dilation < int64_t{1}
                                                                                                     << 31;
  return !fits || (p.groups > 1 && p.rows < kNarrow && int64_t{p.rows} * p.groups <= kMostGridRows);
}

template <typename Op>
struct ColumnOf;
template <>
struct ColumnOf<FloatGemmOp> {
  using type = GemmColumn;
};
template <>
struct ColumnOf<FloatConvOp> {
  using type = ConvColumn;
};

// The cheapest number of slices for the GPUs that this was made for, whatever GPU is there: it decides the bits.
template <typename Op>
void SetSlices(const Op& op, int asked, FloatParams& p) {
  constexpr int kMultiprocessors = 132;
  p.slices = 1;
  if (IsNarrow(op, p)) return;
  double least = std::numeric_limits<double>::infinity();
  for (int slices = 1; slices <= (asked > 0 ? asked : kMostSlices); slices *= 2) {
    if (slices > 1 && (slices > p.depth / kDepth || p.groups > kMostGridRows / slices)) break;
    const double cost = CheapestTile<typename ColumnOf<Op>::type>(p, slices, kMultiprocessors).cost;
    if (asked > 0 || cost < least) least = cost, p.slices = slices;
  }
}

// ---- launches

template <typename Source, typename Column, typename T>
void LaunchTile(const Run& run, const FloatParams& p, const Device& device) {
  constexpr auto kKernel = ProductTiles<Source, Column, T>;
  const cudaError_t prepared = PrepareKernel<kKernel>(device);
  Require(prepared == cudaSuccess, "CUDA: preparing ", run.plan, " failed: ", cudaGetErrorString(prepared));
  const dim3 grid(BlocksFor(p.columns, T::kColumns), BlocksFor(p.rows, T::kRows),
                  static_cast<unsigned>(p.groups) * p.slices);
  Require(grid.y <= kMostGridRows && grid.z <= kMostGridRows, "a float product of ", p.rows, " outputs in ",
          p.groups, " groups is too large");
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {1, 1, static_cast<unsigned>(p.slices)};
  const size_t shared_bytes = SharedBytes<T>(p.in_cluster);
  const cudaError_t error =
      run.queue.LaunchWith({shared_bytes, &cluster, p.in_cluster ? 1 : 0}, kKernel, grid, dim3(T::kBlock), p);
  Require(error == cudaSuccess, "CUDA: launching ", run.plan, " failed: ", cudaGetErrorString(error));
}

bool HasFours(const FloatGemmOp&, const FloatParams& p) {
  return p.column_step == 1 && p.columns % 4 == 0 && CommonUnit({p.x}) == 16;
}
bool HasFours(const FloatConvOp&, const FloatParams& p) {
  const auto is_plain = [](const WindowDim& d) {
    return d.kernel == 1 && d.stride == 1 && d.pad_begin == 0 && d.out == d.in;
  };
  return is_plain(p.windows.h) && is_plain(p.windows.w) && p.by_pixels.divisor % 4 == 0 &&
         CommonUnit({p.x}) == 16;
}

// The node tells by its type alone where its columns lie.
template <typename Op>
void LaunchProduct(const Op& op, const Run& run, const FloatParams& p, int tile, const Device& device) {
  using Column = typename ColumnOf<Op>::type;
  WithTile(tile, [&](auto known) {
    using T = decltype(known);
    if constexpr (kMayUse<Column, T>) {
      if (HasFours(op, p)) return LaunchTile<FoursSource<Column, T>, Column, T>(run, p, device);
      if constexpr (kStoresColumns<Column>) {
        LaunchTile<LinesSource<T>, Column, T>(run, p, device);
      } else {
        LaunchTile<WindowSource<T>, Column, T>(run, p, device);
      }
    }
  });
}

void LaunchNarrow(const Run& run, const FloatParams& p) {
  const int64_t outputs = int64_t{p.rows} * p.groups;
  Require(outputs <= kMostGridRows, "a float product of ", p.rows, " outputs in ", p.groups,
          " groups is too large");
  run.Launch(ConvNarrow, dim3(BlocksFor(p.columns, kThreads), static_cast<unsigned>(outputs)), kThreads, p);
}

template <typename Op>
NodePlanPtr PlanProduct(const std::string& name, const Op& op, FloatParams geometry, const Device& device,
                        const FloatTiling& tiling) {
  if (IsNarrow(op, geometry)) return MakeKernelPlan(name + " narrow", geometry, LaunchNarrow);
  using Column = typename ColumnOf<Op>::type;
  constexpr int kFirstClusters = 90, kLargeClusters = 90, kMostPortable = 8;
  SetSlices(op, tiling.slices, geometry);
  const int tile = tiling.tile >= 0
                       ? tiling.tile
                       : CheapestTile<Column>(geometry, geometry.slices, device.multiprocessors).tile;
  std::string text = name;
  WithTile(tile, [&](auto known) {
    text += " " + std::to_string(decltype(known)::kRows) + "x" + std::to_string(decltype(known)::kColumns);
  });
  if (geometry.slices > 1) text += " slices " + std::to_string(geometry.slices);
  int shared_bytes = 0;
  WithTile(tile, [&](auto known) { shared_bytes = SharedBytes<decltype(known)>(true); });
  geometry.in_cluster = geometry.slices > 1 && device.capability >= kFirstClusters &&
                        (geometry.slices <= kMostPortable || device.capability == kLargeClusters) &&
                        shared_bytes <= device.shared_bytes;
  // Outputs that lie side by side.
  const unsigned line =
      kStoresColumns<Column> ? static_cast<unsigned>(geometry.rows) : geometry.by_pixels.divisor;
  const auto stores_fours = [line](const float* y) { return line % 4 == 0 && CommonUnit({y}) == 16; };
  if (geometry.slices == 1 || geometry.in_cluster) {
    return MakeKernelPlan(text, geometry, [=, op = Op()](const Run& run, FloatParams p) {
      p.stores_fours = stores_fours(p.y);
      LaunchProduct(op, run, p, tile, device);
    });
  }
  geometry.slice_stride = BlocksFor(geometry.count, 64) * int64_t{64};
  const auto launch = [=, op = Op()](const Run& run, const FloatParams& p) {
    FloatParams slices = p;
    slices.y = static_cast<float*>(run.workspace);
    slices.bias = nullptr;
    slices.limits = {};
    slices.stores_fours = stores_fours(slices.y);
    LaunchProduct(op, run, slices, tile, device);
    SliceParams finish = {p, p.rows * p.groups};
    finish.product.x = slices.y;
    run.LaunchFor(p.count, FinishSlices<Column>, kThreads, finish);
  };
  return MakeKernelPlan(text + " in memory", geometry, launch,
                        static_cast<size_t>(geometry.slices * geometry.slice_stride) * sizeof(float));
}

// All that is known before the shapes.
template <typename Op>
FloatParams Describe(const Op& op, const Limits& limits) {
  FloatParams p;
  Describe(op, limits, p);
  p.k = CheckedSize(p.channels * TapsOf(op), "sums of length");
  p.depth = CheckedSize(int64_t{BlocksFor(p.k, kDepth)} * kDepth, "sums of length");
  p.pitch = static_cast<int>(BlocksFor(p.rows, 4)) * 4;
  p.by_taps = MakeDivisor(TapsOf(op));
  return p;
}

// Weights [groups][rows][k] as the blocks copy them.
std::vector<float> PackWeights(const FloatParams& p, const std::vector<float>& weights) {
  std::vector<float> out(static_cast<size_t>(int64_t{p.groups} * p.depth * p.pitch));
  const float* w = weights.data();
  for (int64_t group = 0; group < p.groups; ++group) {
    float* const of_group = out.data() + group * p.depth * p.pitch;
    for (int64_t row = 0; row < p.rows; ++row) {
      for (int64_t k = 0; k < p.k; ++k) of_group[k * p.pitch + row] = *w++;
    }
  }
  return out;
}

template <typename Op>
PackedNodePtr PackProduct(const char* name, const Op& op, const Device& device, const Limits& limits,
                          const FloatTiling& tiling) {
  const FloatParams shared = Describe(op, limits);
  const auto plan = [=](const FloatParams& geometry) {
    return PlanProduct(name, Op(), geometry, device, tiling);
  };
  return MakeProduct(op, shared, PackWeights(shared, op.weights), device, plan);
}

template <typename Op>
SumSlices SlicesOfShapes(const Op& op, const TensorShape& x, const TensorShape& y,
                         const FloatTiling& tiling) {
  FloatParams p = Describe(op, {});
  SetShapes(op, x, y, p);
  SetSlices(op, tiling.slices, p);
  return {p.slices, p.depth / kDepth, kDepth};
}

}  // namespace

SumSlices SlicesOf(const FloatGemmOp& op, const TensorShape& x, const TensorShape& y,
                   const FloatTiling& tiling) {
  return SlicesOfShapes(op, x, y, tiling);
}
SumSlices SlicesOf(const FloatConvOp& op, const TensorShape& x, const TensorShape& y,
                   const FloatTiling& tiling) {
  return SlicesOfShapes(op, x, y, tiling);
}

PackedNodePtr PackTiled(const FloatGemmOp& op, const Device& device, const Limits& limits,
                        const FloatTiling& tiling) {
  return PackProduct("float_gemm", op, device, limits, tiling);
}
PackedNodePtr PackTiled(const FloatConvOp& op, const Device& device, const Limits& limits,
                        const FloatTiling& tiling) {
  return PackProduct("float_conv", op, device, limits, tiling);
}

PackedNodePtr Pack(const FloatGemmOp& op, const Device& device, FloatPrecision precision,
                   const Limits& limits) {
  return HasTensorProduct(op, device, precision) ? PackTensorProduct(op, device, precision, limits)
                                                 : PackTiled(op, device, limits);
}
PackedNodePtr Pack(const FloatConvOp& op, const Device& device, FloatPrecision precision,
                   const Limits& limits) {
  return HasTensorProduct(op, device, precision) ? PackTensorProduct(op, device, precision, limits)
                                                 : PackTiled(op, device, limits);
}

}  // namespace lowbit::cuda
