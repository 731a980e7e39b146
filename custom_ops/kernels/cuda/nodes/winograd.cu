// Convolutions of 3x3 windows, one pixel apart, by Winograd's F(2x2,3x3) in float32: 16 products for each channel of a
// square of 2x2 outputs instead of 36.
//
// Four inputs d and three weights g of a line give two outputs of its correlation, from polynomials through the points
// 0, 1, -1 and infinity, by A^T ((G g) * (B^T d)), products of numbers at equal places:
//
//          1  0 -1  0           1    0    0
//   B^T =  0  1  1  0     G =  1/2  1/2  1/2     A^T =  1  1  1  0
//          0 -1  1  0          1/2 -1/2  1/2            0  1 -1 -1
//          0  1  0 -1           0    0    1
//
// In two dims a square of 4x4 pixels becomes B^T d B, a window G g G^T (when packed), and 2x2 outputs A^T m A of m, the
// products of both summed over the channels: at each of the 16 points a product of matrices.
//
// A block makes kRows outputs of kSquares squares, those of a slice of the channels. A warp has one point. kDepth channels
// are a stage: their pixels are copied, transformed and multiplied, the copies of the next stages being under way.
// Slices meet as those of float_tiles.cuh do, behind the transform of the outputs. On Hopper winograd_sm90.cu makes the same
// sums.
#include "kernels/cuda/nodes/winograd.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kOfPatches = 90;            // the capability of GPUs that have winograd_sm90.cu
constexpr int kRows = 64, kSquares = 32;  // of a block
constexpr int kSide = kSquareSide, kPoints = kSquarePoints, kMade = kSquareMade;
constexpr int kBlock = kPoints * kWarp;
constexpr int kDepth = 4;                                        // channels of a stage
constexpr int kThreadRows = 8, kThreadSquares = 8;               // of a thread, in fours
constexpr int kRowStep = kRows / 2, kSquareStep = kSquares / 2;  // from the first four to the second
static_assert(kSquares * kDepth * kSide == kBlock);              // a thread copies a line of a square
static_assert(kThreadRows * kThreadSquares * kWarp == kRows * kSquares);

// In shared memory, in floats. Points lie so far apart that those of a warp's four lines are in different banks.
constexpr int kPointPitch = kDepth * kSquares + 8;
constexpr int kPointFloats = kPoints * kPointPitch, kWeightFloats = kPoints * kDepth * kRows;
constexpr int kStages = 2;
constexpr int kStageFloats = kStages * (kPointFloats + kWeightFloats) + kBlock * kSide;
// Sums wait there for the transform, those of so many outputs at a time.
constexpr int kPassRows = 16, kPasses = kRows / kPassRows, kPassPitch = kSquares + 8;
static_assert(kPoints * kPassRows * kPassPitch <= kStageFloats && kPassRows * kSquares == kBlock);
constexpr int kPairs = kRows * kSquares;  // of an output and a square
constexpr int kReceived = kPairs * kMade * kMade;

// A thread's line of a square, of every kDepth-th channel; of outside the image zeros.
class Line {
 public:
  __device__ __forceinline__ Line(const WinogradParams& p, int square, int channel0)
      : p_(p), channel_(channel0 + static_cast<int>(threadIdx.x) / (kSide * kSquares)) {
    const SquarePlace of(p, static_cast<unsigned>(min(square, p.squares - 1)), kMade);
    const int in_h = static_cast<int>(p.windows.h.in), in_w = static_cast<int>(p.windows.w.in);
    const int y = of.y - static_cast<int>(p.windows.h.pad_begin) + static_cast<int>(threadIdx.x) % kSide;
    const int x = of.x - static_cast<int>(p.windows.w.pad_begin);
    plane_ = int64_t{in_h} * in_w;
    first_ = p.x + (int64_t{of.image} * p.channels + channel_) * plane_ + int64_t{y} * in_w + x;
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
      inside_[i] = y >= 0 && y < in_h && x + i >= 0 && x + i < in_w;
    }
  }
  __device__ __forceinline__ void FetchNext(uint32_t to) {
    const bool there = channel_ < p_.channels;
#pragma unroll
    for (int i = 0; i < kSide; ++i) CopyAsyncOrZero<4>(to + i * 4, first_ + i, there && inside_[i]);
    channel_ += kDepth;
    first_ += kDepth * plane_;
  }

 private:
  const WinogradParams& p_;
  int channel_;
  int64_t plane_;
  const float* first_;
  bool inside_[kSide];
};

// B^T d B of a square whose lines four threads hold. Each stores its line of the result, to the points of column i at
// `to` + i * kSide * kPointPitch.
__device__ __forceinline__ void TransformLine(const float4& d, float* to) {
  const float along[kSide] = {__fsub_rn(d.x, d.z), __fadd_rn(d.y, d.z), __fsub_rn(d.z, d.y),
                              __fsub_rn(d.y, d.w)};
  // Line 0 is 0 - 2, line 1 is 1 + 2, line 2 is 2 - 1, line 3 is 1 - 3.
  const int lane = static_cast<int>(threadIdx.x) % kWarp, line = lane % kSide;
  const int other = lane - line + (line < 2 ? 2 : 1);
  const float own_sign = line == 3 ? -1.0f : 1.0f, other_sign = line == 1 || line == 3 ? 1.0f : -1.0f;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const float of_other = __shfl_sync(0xFFFFFFFFu, along[i], other);
    to[i * kSide * kPointPitch] = __fmaf_rn(along[i], own_sign, __fmul_rn(of_other, other_sign));
  }
}

// A pair is (pass * kPassRows + row) * kSquares + square; which output the row of a pass is.
__device__ __forceinline__ int RowOfPair(int pair) {
  const int row = pair / kSquares % kPassRows, pass = pair / (kPassRows * kSquares);
  return pass / 2 * kRowStep + row / 2 * 4 + pass % 2 * 2 + row % 2;
}

__device__ __forceinline__ void StoreSquare(const WinogradParams& p, float* y, int row, int square,
                                            const Fours& sums) {
  if (row >= p.rows || square >= p.squares) return;
  const SquarePlace of(p, static_cast<unsigned>(square), kMade);
  StoreOutputs(p, y, p.bias == nullptr ? nullptr : p.bias + row, SquareTarget(p, row, of.image, of.y, of.x),
               sums);
}

__global__ void __launch_bounds__(kBlock) WinogradSquares(const __grid_constant__ WinogradParams p) {
  LOWBIT_DYNAMIC_SHARED(shared, 128);
  __shared__ uint64_t exchange;  // mbarrier: the outputs that the blocks of a cluster send each other
  float* const points = reinterpret_cast<float*>(shared);  // [stages]
  float* const weights = points + kStages * kPointFloats;  // [stages]
  float* const pixels = weights + kStages * kWeightFloats;
  float4* const received = reinterpret_cast<float4*>(points + kStageFloats);  // [slices][a part of the pairs]
  const int tid = static_cast<int>(threadIdx.x), lane = tid % kWarp, point = tid / kWarp;
  const int slice = static_cast<int>(blockIdx.z);
  const int i0 = static_cast<int>(blockIdx.y) * kRows, square0 = static_cast<int>(blockIdx.x) * kSquares;
  const int first = FirstChannelOf(p, slice) / kDepth, steps = FirstChannelOf(p, slice + 1) / kDepth - first;
  if (p.in_cluster) {
    if (tid == 0) {
      InitBarrier(SharedAddress(&exchange), 1);
      FenceBarrierInit();
      ArriveExpecting(SharedAddress(&exchange), kReceived * 4);
    }
    ClusterArrive();
  }

  const float* const own_weights =
      p.weights + (int64_t{blockIdx.y} * (p.depth / kDepth) + first) * kWeightFloats + tid * 4;
  const auto fetch_weights = [&](int step) {
    const float* const from = own_weights + int64_t{step} * kWeightFloats;
    const uint32_t to = SharedAddress(weights + step % kStages * kWeightFloats + tid * 4);
#pragma unroll
    for (int at = 0; at < kWeightFloats; at += kBlock * 4) CopyAsync<16>(to + at * 4, from + at);
  };
  const float4* const own_pixels = reinterpret_cast<const float4*>(pixels) + tid;
  const int square = tid / kSide % kSquares, channel = tid / (kSide * kSquares);
  float* const own_points = points + tid % kSide * kPointPitch + channel * kSquares + square;
  const auto transform = [&](int step) {
    TransformLine(*own_pixels, own_points + step % kStages * kPointFloats);
  };

  // The weights are the kernel's own: they may be fetched before the predecessor is done.
  fetch_weights(0);
  Line line(p, square0 + square, first * kDepth);
  WaitForPredecessors();
  line.FetchNext(SharedAddress(own_pixels));
  CommitCopies();
  WaitForCopies<0>();
  transform(0);
  if (steps > 1) line.FetchNext(SharedAddress(own_pixels));
  CommitCopies();
  __syncthreads();

  float sums[kThreadRows][kThreadSquares] = {};
  const int row = lane / 4 * 4, across = lane % 4 * 4;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) fetch_weights(step + 1);
    CommitCopies();
    WaitForCopies<1>();  // the pixels of the next stage, which this thread alone reads
    if (step + 1 < steps) transform(step + 1);
    if (step + 2 < steps) line.FetchNext(SharedAddress(own_pixels));
    CommitCopies();
    const float* const w_of = weights + step % kStages * kWeightFloats + point * kDepth * kRows + row;
    const float* const x_of = points + step % kStages * kPointFloats + point * kPointPitch + across;
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      float4 w[kThreadRows / 4], x[kThreadSquares / 4];
#pragma unroll
      for (int i = 0; i < kThreadRows / 4; ++i) {
        w[i] = *reinterpret_cast<const float4*>(w_of + k * kRows + i * kRowStep);
      }
#pragma unroll
      for (int j = 0; j < kThreadSquares / 4; ++j) {
        x[j] = *reinterpret_cast<const float4*>(x_of + k * kSquares + j * kSquareStep);
      }
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
        for (int j = 0; j < kThreadSquares; ++j) {
          sums[i][j] = __fmaf_rn(ElementOf(w[i / 4], i % 4), ElementOf(x[j / 4], j % 4), sums[i][j]);
        }
      }
    }
    WaitForCopies<1>();  // the weights of the next stage
    __syncthreads();
  }
  LetSuccessorsStart();

  float* const y = p.y + slice * p.block_stride;
  const int part = kPairs / p.slices, part_bits = 31 - __clz(part);
  if (p.in_cluster) ClusterWait();
  float* const staged = points;  // [points][kPassRows][kPassPitch]
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    if (pass > 0) __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* const of_row = sums[pass / 2 * 4 + pass % 2 * 2 + i];
      float* const to = staged + (point * kPassRows + lane / 4 * 2 + i) * kPassPitch + across;
#pragma unroll
      for (int j = 0; j < kThreadSquares; j += 4) {
        *reinterpret_cast<float4*>(to + j / 4 * kSquareStep) =
            make_float4(of_row[j], of_row[j + 1], of_row[j + 2], of_row[j + 3]);
      }
    }
    __syncthreads();
    const float* const from = staged + tid / kSquares * kPassPitch + tid % kSquares;
    const Fours outputs = TransformSums(
        [&](int down, int column) { return from[(column * kSide + down) * (kPassRows * kPassPitch)]; });
    const int pair = pass * kBlock + tid;
    if (p.in_cluster) {
      const int owner = pair >> part_bits, in_part = pair - owner * part;
      const int4 words = {__float_as_int(outputs.v[0]), __float_as_int(outputs.v[1]),
                          __float_as_int(outputs.v[2]), __float_as_int(outputs.v[3])};
      StoreToCluster(ClusterAddress(SharedAddress(received + slice * part + in_part), owner), words,
                     ClusterAddress(SharedAddress(&exchange), owner));
    } else {
      StoreSquare(p, y, i0 + RowOfPair(pair), square0 + tid % kSquares, outputs);
    }
  }
  if (!p.in_cluster) return;

  WaitBarrier(SharedAddress(&exchange), 0);
  for (int at = tid; at < part; at += kBlock) {
    const auto load = [&](int s) {
      const float4 v = received[s * part + at];
      return Fours{{v.x, v.y, v.z, v.w}};
    };
    const int pair = slice * part + at;
    StoreSquare(p, y, i0 + RowOfPair(pair), square0 + pair % kSquares,
                AddSlices<kMostBlocks>(p.slices, load));
  }
}

constexpr int SharedBytes(bool in_cluster) {
  return (kStageFloats + (in_cluster ? kReceived : 0)) * static_cast<int>(sizeof(float));
}

dim3 GridOf(const WinogradParams& p) {
  return dim3(BlocksFor(p.squares, kSquares), BlocksFor(p.rows, kRows), static_cast<unsigned>(p.slices));
}

WinogradParams Described(const FloatConvOp& op, const Limits& limits) {
  WinogradParams p;
  Describe(op, limits, p);
  p.depth = static_cast<int>(BlocksFor(p.channels, kSliceChannels)) * kSliceChannels;
  return p;
}

void LaunchSquares(const Run& run, const WinogradParams& p, const Device& device) {
  const dim3 grid = GridOf(p);
  const int cluster = p.in_cluster ? p.slices : 1;
  const int bytes =
      SpreadBytes(SharedBytes(p.in_cluster), int64_t{grid.x} * grid.y * grid.z, cluster, device);
  const LaunchShape shape{grid, kBlock, bytes, Dim(1, 1, cluster)};
  run.Check(LaunchKernel<WinogradSquares>(run.queue, device, shape, p));
}

PackedNodePtr PackSquares(const FloatConvOp& op, const WinogradParams& shared, const Device& device,
                          int slices) {
  const auto plan = [=](WinogradParams p) {
    CutInto(kMade, p);
    p.blocks = p.slices = SlicesOfSquares(p, slices);
    const auto launch = [device](const Run& run, WinogradParams of) {
      of.stores_pairs = StoresPairs(of);
      LaunchSquares(run, of, device);
    };
    return PlanSlices<ConvColumn>("float_conv winograd 2x2", p, device, SharedBytes(true), launch);
  };
  return MakeProduct(op, shared, TransformSquareWeights(shared, op.weights, kRows, kDepth, false), device,
                     plan);
}

}  // namespace

int SlicesOfSquares(const WinogradParams& p, int asked) {
  const int most = std::min(p.depth / kSliceChannels, kMostBlocks);  // a slice is a block's
  return CheapestSlices(most, asked, [&p](int slices) { return CostOfPatches(p, slices); });
}

bool HasWinograd(const FloatConvOp& op) {
  const auto is = [&op](const std::array<int64_t, kMaxSpatial>& dims, int64_t value) {
    return dims[kMaxSpatial - 2] == value && dims[kMaxSpatial - 1] == value;
  };
  return op.group == 1 && op.in_channels > kMostFewChannels && is(op.window.kernel, kSquareWindow) &&
         is(op.window.stride, 1) && is(op.window.dilation, 1);
}

PackedNodePtr PackWinograd(const FloatConvOp& op, const Device& device, const Limits& limits,
                           const WinogradTiling& tiling) {
  const std::shared_ptr<const PackedNode> direct = PackTiled(op, device, limits),
                                          planes = PackWinogradPlanes(op, device, limits, tiling.slices),
                                          squares =
                                              device.capability == kOfPatches
                                                  ? PackPatches(op, Described(op, limits), device, tiling)
                                                  : PackSquares(op, Described(op, limits), device,
                                                                tiling.slices);
  const auto of_shapes = [=, op = WithoutConstants(op)](Shapes fed, const TensorShape& y) {
    const TensorShape& x = fed[0];
    WinogradParams p = Described(op, limits);
    SetShapes(op, x, y, p);
    if (!IsNear(p) || p.count == 0 || p.rows > kMostGridRows) return direct->Plan(fed, y);
    const auto cost_of = [&](int made, double cost) {
      if (tiling.made == 0) return cost;
      return made == tiling.made ? 0 : std::numeric_limits<double>::infinity();
    };
    const double of_direct = cost_of(1, CostOfTiles(op, x, y));
    const double of_squares = cost_of(kMade, CostOfPatches(p, SlicesOfSquares(p, 0)));
    const double of_planes = cost_of(2 * kMade, CostOfPlanes(op, x, y));
    if (of_direct <= std::min(of_squares, of_planes)) return direct->Plan(fed, y);
    return (of_squares <= of_planes ? squares : planes)->Plan(fed, y);
  };
  return MakeNode(of_shapes);
}

}  // namespace lowbit::cuda
