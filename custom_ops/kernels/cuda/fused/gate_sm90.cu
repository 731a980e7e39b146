// A squeeze-and-excitation block (gate.h), for Hopper (sm_90a). The blocks of a cluster share an image: each
// averages some of its channels, makes some of the first product's outputs and, of the channels that it
// averaged, those of the second one, by which it multiplies them. Codes of the means and of the first product
// go to all blocks:
//
//   block r   means of channels r | send | some of the first product | send | gates of channels r | multiply
//
// Every step waits for the one before it, so that a read of device memory among them would count in full: a
// block fetches its rows of both weights before its predecessors end, and its part of the image at once.
#include <algorithm>

#include "core/elementwise.h"
#include "kernels/cuda/conv/conv_row.h"
#include "kernels/cuda/conv/device_epilogue.cuh"
#include "kernels/cuda/conv/vector.h"
#include "kernels/cuda/conv/weight_rows.h"
#include "kernels/cuda/fused/gate.h"
#include "kernels/cuda/nodes/codes.cuh"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

constexpr int kGateThreads = 512, kGateWarps = kGateThreads / kWarp;
constexpr int kRanks = 8;  // blocks of a cluster
constexpr int kUnit = 16;  // channels that are sent at once
constexpr int kMostGateChannels = 2048, kMostBetween = 1024;
constexpr int kMostOwn = kMostGateChannels / kRanks;

struct GateProduct : ConvParams {
  int n_padded = 0;
  bool x_signed = false;
};

// Bytes of a row of weights in shared memory, behind whose end there are zeros.
__host__ __device__ inline int Pitch(const GateProduct& p) { return (p.k + kUnit - 1) / kUnit * kUnit; }

struct GateParams {
  const uint8_t *x = nullptr, *scaled = nullptr;  // what is averaged, what is multiplied
  uint8_t* y = nullptr;
  int images = 0, pixels = 0, channels = 0;
  bool x_signed = false;
  int32_t zero_sum = 0;  // pixels * zero point
  float multiplier = 1;
  CodeRounder mean_rounder;
  GateProduct first, second;
  CodeReader x_reader, gate_reader;
  float x_scale = 1, gate_scale = 1;
  Divider divider;
  CodeRounder rounder;
};

// More than kernels may have as variables, since they may ask for all that there is besides.
struct GateState {
  alignas(16) uint8_t means[kMostGateChannels];
  alignas(16) uint8_t between[kMostBetween];
  alignas(16) uint8_t made[kMostGateChannels];  // this block's codes, at their channels
  float gates[kMostOwn];
  int sums[kGateThreads * 4];
  alignas(8) uint64_t arrived[2];  // mbarriers: means, between
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The units of a block, of `count` that the blocks of a cluster share.
struct OwnUnits {
  int first, count;
  __device__ __forceinline__ OwnUnits(int all, int rank)
      : first(all * rank / kRanks), count(all * (rank + 1) / kRanks - first) {}
};

// This block's rows [begin, begin + rows) of the weights, to [rows][Pitch(p)].
__device__ __forceinline__ void FetchWeights(const GateProduct& p, int begin, int rows, uint32_t to) {
  constexpr int kUnitsOfTile = kTileK / kUnit;
  const int pitch = Pitch(p), count = rows * ((pitch + kTileK - 1) / kTileK) * kUnitsOfTile;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kGateThreads) {
    const int unit = i % kUnitsOfTile, tile = i / kUnitsOfTile / rows, n = i / kUnitsOfTile - tile * rows;
    const int k = tile * kTileK + unit * kUnit, row = InterleavedRow(begin + n);
    if (k >= pitch) continue;
    CopyAsync<kUnit>(
        to + n * pitch + k,
        p.weights + (static_cast<int64_t>(tile) * p.n_padded + row) * kTileK + (unit ^ row % 8) * kUnit);
  }
}

// Adds the codes of this block's channels over all pixels; sums[channel] has them behind the next barrier of
// the block.
template <bool kSigned>
__device__ __forceinline__ void SumPixels(const uint8_t* image, int pixels, int units, int* sums) {
  const int thread = static_cast<int>(threadIdx.x), words = units * (kUnit / 4);
  int lanes = kGateThreads / words;
  while ((lanes & (lanes - 1)) != 0) lanes &= lanes - 1;  // a power of 2
  const int word = thread % words, lane = thread / words;
  if (lane < lanes) {
    int of_word[4] = {};
#pragma unroll 4
    for (int pixel = lane; pixel < pixels; pixel += lanes) {
      const int four = *reinterpret_cast<const int*>(image + (pixel * words + word) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) of_word[i] = DotFour<kSigned>(four, 1 << (8 * i), of_word[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[(lane * words + word) * 4 + i] = of_word[i];
  }
  for (int half = lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    for (int i = thread; i < half * words * 4; i += kGateThreads) sums[i] += sums[i + half * words * 4];
  }
}

// What a thread needs to finish its output: output `begin` + thread.
struct Constants {
  int bias = 0;
  float scale = 0;
  __device__ __forceinline__ Constants(const GateProduct& p, int begin, int rows) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < rows) bias = p.epilogue.bias[begin + thread], scale = p.epilogue.scale[begin + thread];
  }
};

// The outputs [begin, begin + rows) of a product of codes, to made[output]. A warp sums kAtOnce of them at a
// time, its lanes 16 bytes along K each; a thread finishes one.
template <bool kSigned>
__device__ __forceinline__ void MakeOutputs(const GateProduct& p, const uint8_t* codes,
                                            const uint8_t* weights, int begin, int rows,
                                            const Constants& constants, int* sums, uint8_t* made) {
  constexpr int kAtOnce = 4;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, pitch = Pitch(p);
  for (int n0 = thread / kWarp * kAtOnce; n0 < rows; n0 += kGateWarps * kAtOnce) {
    int of_row[kAtOnce] = {};
    for (int k = lane * kUnit; k < pitch; k += kWarp * kUnit) {
      const uint4 x = *reinterpret_cast<const uint4*>(codes + k);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint4 w = *reinterpret_cast<const uint4*>(weights + min(n0 + i, rows - 1) * pitch + k);
        of_row[i] = DotFour<kSigned>(static_cast<int>(x.x), static_cast<int>(w.x), of_row[i]);
        of_row[i] = DotFour<kSigned>(static_cast<int>(x.y), static_cast<int>(w.y), of_row[i]);
        of_row[i] = DotFour<kSigned>(static_cast<int>(x.z), static_cast<int>(w.z), of_row[i]);
        of_row[i] = DotFour<kSigned>(static_cast<int>(x.w), static_cast<int>(w.w), of_row[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int step = kWarp / 2; step > 0; step /= 2) {
        of_row[i] += __shfl_xor_sync(0xFFFFFFFFu, of_row[i], step);
      }
      if (lane == i && n0 + i < rows) sums[n0 + i] = of_row[i];
    }
  }
  __syncthreads();
  if (thread < rows) {
    FinishOne(p.epilogue, nullptr, made, 0, begin + thread, sums[thread], constants.bias, constants.scale, 0);
  }
}
__device__ __forceinline__ void MakeOutputs(const GateProduct& p, const uint8_t* codes,
                                            const uint8_t* weights, int begin, int rows,
                                            const Constants& constants, int* sums, uint8_t* made) {
  if (p.x_signed) {
    MakeOutputs<true>(p, codes, weights, begin, rows, constants, sums, made);
  } else {
    MakeOutputs<false>(p, codes, weights, begin, rows, constants, sums, made);
  }
}

// This block's units of `made` to the same place of `to` in all blocks, where they count at `barrier`.
__device__ __forceinline__ void SendToAll(const OwnUnits& own, const uint8_t* made, uint8_t* to,
                                          uint64_t* barrier) {
  const int unit = static_cast<int>(threadIdx.x) / kRanks;
  if (unit >= own.count) return;
  const int at = (own.first + unit) * kUnit;
  const auto rank = static_cast<uint32_t>(threadIdx.x) % kRanks;
  StoreToCluster(ClusterAddress(SharedAddress(to + at), rank), *reinterpret_cast<const int4*>(made + at),
                 ClusterAddress(SharedAddress(barrier), rank));
}
static_assert(kMostOwn / kUnit * kRanks <= kGateThreads);
#endif

template <bool kFast>
__global__ void __launch_bounds__(kGateThreads) SqueezeExcite(const __grid_constant__ GateParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  LOWBIT_DYNAMIC_SHARED(shared, 16);
  GateState& state = *reinterpret_cast<GateState*>(shared);
  const int thread = static_cast<int>(threadIdx.x), rank = static_cast<int>(blockIdx.x) % kRanks,
            at_image = static_cast<int>(blockIdx.x) / kRanks;
  const int units_between = (p.first.n + kUnit - 1) / kUnit;
  const OwnUnits own(p.channels / kUnit, rank), own_between(units_between, rank);
  const int first_channel = own.first * kUnit, channels = own.count * kUnit,
            first_between = own_between.first * kUnit,
            between = max(0, min(p.first.n - first_between, own_between.count * kUnit));
  uint8_t* const first_weights = shared + sizeof(GateState);
  uint8_t* const second_weights = first_weights + between * Pitch(p.first);
  uint8_t* const image = second_weights + channels * Pitch(p.second);
  FetchWeights(p.first, first_between, between, SharedAddress(first_weights));
  FetchWeights(p.second, first_channel, channels, SharedAddress(second_weights));
  const Constants of_first(p.first, first_between, between), of_second(p.second, first_channel, channels);
  if (thread == 0) {
    for (uint64_t& barrier : state.arrived) InitBarrier(SharedAddress(&barrier), 1);
    FenceBarrierInit();
    ArriveExpecting(SharedAddress(&state.arrived[0]), p.channels);
    ArriveExpecting(SharedAddress(&state.arrived[1]), units_between * kUnit);
  }
  ClusterArrive();
  WaitForPredecessors();
  const int64_t begin = static_cast<int64_t>(at_image) * p.pixels * p.channels + first_channel;
  for (int i = thread; i < p.pixels * own.count; i += kGateThreads) {
    const int pixel = i / own.count, unit = i - pixel * own.count;
    CopyAsync<kUnit>(SharedAddress(image) + i * kUnit,
                     p.x + begin + static_cast<int64_t>(pixel) * p.channels + unit * kUnit);
  }
  CommitCopies();
  WaitForCopies<0>();
  __syncthreads();
  if (own.count > 0) {
    if (p.x_signed) {
      SumPixels<true>(image, p.pixels, own.count, state.sums);
    } else {
      SumPixels<false>(image, p.pixels, own.count, state.sums);
    }
  }
  __syncthreads();
  for (int i = thread; i < channels; i += kGateThreads) {
    const float mean = __fmul_rn(static_cast<float>(state.sums[i] - p.zero_sum), p.multiplier);
    StoreCodes(state.made + first_channel + i, RoundCodes<1>(p.mean_rounder, [&](int) { return mean; }));
  }
  __syncthreads();
  ClusterWait();  // all blocks' barriers are there
  SendToAll(own, state.made, state.means, &state.arrived[0]);
  WaitBarrier(SharedAddress(&state.arrived[0]), 0);

  __syncthreads();  // all have sent what is overwritten now
  // Past the last output there are zeros, which count nothing.
  if (thread < units_between * kUnit - p.first.n) state.made[p.first.n + thread] = 0;
  MakeOutputs(p.first, state.means, first_weights, first_between, between, of_first, state.sums, state.made);
  __syncthreads();
  SendToAll(own_between, state.made, state.between, &state.arrived[1]);
  WaitBarrier(SharedAddress(&state.arrived[1]), 0);
  __syncthreads();  // as above

  MakeOutputs(p.second, state.between, second_weights, first_channel, channels, of_second, state.sums,
              state.made);
  LetSuccessorsStart();
  __syncthreads();
  for (int i = thread; i < channels; i += kGateThreads) {
    const Codes<1> code = LoadCodes<1>(state.made + first_channel + i);
    state.gates[i] = __fmul_rn(CodeValue(code, 0, p.gate_reader), p.gate_scale);
  }
  __syncthreads();
  if (own.count == 0) return;
  const int unit = thread % own.count, lanes = kGateThreads / own.count;
  if (thread / own.count >= lanes) return;
  for (int pixel = thread / own.count; pixel < p.pixels; pixel += lanes) {
    const int64_t at = begin + static_cast<int64_t>(pixel) * p.channels + unit * kUnit;
    const Codes<kUnit> x =
        LoadCodes<kUnit>(p.x == p.scaled ? image + (pixel * own.count + unit) * kUnit : p.scaled + at);
    StoreCodes(p.y + at, RoundCodes<kUnit>(p.rounder, [&](int i) {
                 const float v = __fmul_rn(CodeValue(x, i, p.x_reader), p.x_scale);
                 return Divide<kFast>(__fmul_rn(v, state.gates[unit * kUnit + i]), p.divider);
               }));
  }
#endif
}

bool IsPointwise(const ConvSpec& spec) {
  const ConvGeometry& g = spec.geometry;
  return g.Taps() == 1 && g.group == 1 && !g.transposed && g.stride_h == 1 && g.stride_w == 1 &&
         std::max({g.pad_top, g.pad_left, g.pad_bottom, g.pad_right}) == 0 &&
         spec.epilogue.quantized_output && !spec.epilogue.has_residual;
}

std::optional<GateProduct> ProductOf(const PackedConv& conv) {
  const ConvShape shape = {1, 1, 1, 1, 1};
  const ConvProblem problem = conv.Problem(shape);
  if (!problem.tiled || problem.repacks || problem.has_w_zero) return std::nullopt;
  GateProduct p = {conv.Params(shape, {&kVectorRow})};
  p.n_padded = static_cast<int>(PaddedColumns(problem.n));
  p.x_signed = conv.XSigned();
  return p;
}

}  // namespace

bool FitsGate(const GlobalAveragePoolNode& pool, const ConvSpec& first, const ConvSpec& second,
              const BinarySpec& mul, const Device& device) {
  const int64_t channels = first.geometry.in_channels, between = first.geometry.out_channels;
  return device.capability == 90 && pool.keep_dims && pool.spec.quantizer.quantized && IsPointwise(first) &&
         IsPointwise(second) && second.geometry.in_channels == between &&
         second.geometry.out_channels == channels && channels % kUnit == 0 && channels <= kMostGateChannels &&
         between <= kMostBetween && mul.kind == BinaryKind::kMul && mul.quantizer.quantized;
}

// Few images: each reads all weights. Few pixels: of few channels some blocks have none.
std::shared_ptr<const NodePlan> PlanGate(const Gate& gate, std::span<const TensorShape> fed) {
  constexpr int64_t kMostImages = 32, kMostPixels = 4096;
  const std::vector<int64_t>& dims = fed[0].dims;
  if (dims.size() != 4 || fed[1].dims != dims || dims[3] != gate.first->Geometry().in_channels)
    return nullptr;
  const int64_t pixels = dims[1] * dims[2];
  const auto first = ProductOf(*gate.first), second = ProductOf(*gate.second);
  if (!first || !second || dims[0] < 1 || dims[0] > kMostImages || pixels < 1 || pixels > kMostPixels)
    return nullptr;
  // What the block with the most channels has in shared memory.
  const Device& device = gate.first->On();
  const auto share = [](int64_t count) { return (count + kUnit * kRanks - 1) / (kUnit * kRanks) * kUnit; };
  const int64_t channels = share(dims[3]), between = share(first->n),
                shared_bytes = static_cast<int64_t>(sizeof(GateState)) + between * Pitch(*first) +
                               channels * (Pitch(*second) + pixels);
  if (shared_bytes > device.shared_bytes) return nullptr;
  GateParams p;
  p.images = static_cast<int>(dims[0]);
  p.pixels = static_cast<int>(pixels);
  p.channels = static_cast<int>(dims[3]);
  p.x_signed = gate.pool.spec.x_signed;
  const Quantizer& of_means = gate.pool.spec.quantizer;
  p.zero_sum = p.pixels * gate.pool.x_zero_point;
  p.multiplier = gate.pool.x_scale / (of_means.scale * static_cast<float>(p.pixels));
  p.mean_rounder = MakeRounder(of_means);
  p.first = *first;
  p.second = *second;
  const BinarySpec& mul = gate.mul;
  const CodeReader a = MakeReader(mul.a_signed, mul.a_zero_point),
                   b = MakeReader(mul.b_signed, mul.b_zero_point);
  p.x_reader = gate.gate_first ? b : a;
  p.gate_reader = gate.gate_first ? a : b;
  p.x_scale = gate.gate_first ? mul.b_scale : mul.a_scale;
  p.gate_scale = gate.gate_first ? mul.a_scale : mul.b_scale;
  p.divider = MakeDivider(mul.quantizer.scale);
  p.rounder = MakeRounder(mul.quantizer);
  const bool fast = FastIsExact(mul.quantizer, MostOf(mul), 1.0);
  return MakePlan("gate", [p, fast, device, shared_bytes](const Run& run) {
    GateParams own = p;
    own.x = static_cast<const uint8_t*>(run.fed[0]);
    own.scaled = static_cast<const uint8_t*>(run.fed[1]);
    own.y = static_cast<uint8_t*>(run.y);
    RequireAligned({own.x, own.scaled, own.y});
    const LaunchOptions options{run.queue, device};
    const LaunchShape shape = {Dim(own.images * kRanks), kGateThreads, static_cast<int>(shared_bytes),
                               Dim(kRanks)};
    Check(fast ? LaunchKernel<SqueezeExcite<true>>(options, shape, own)
               : LaunchKernel<SqueezeExcite<false>>(options, shape, own),
          "launching a gate");
  });
}

}  // namespace lowbit::cuda
