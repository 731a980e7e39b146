// Convolutions of one channel in float32 whose windows, of 3x3 or 5x5 pixels at stride 1, stay in registers.
//
// A thread has the pixels that four outputs side by side read: it loads them once, four at a time, and makes these outputs of
// some channels, four by four. What is left to load is weights. No pixel goes through shared memory, so that little stands
// between the predecessor's end and the first product, and the code is straight from there to the last store: a warp runs it a
// few times only, and would else wait for branches and for code that it does not use.
//
// A warp's task: 32 such units, which follow each other line by line from image to image, and some fours of channels. Blocks have
// equally many tasks, those of some channels along the units, then those of the next ones.
// The sums are those of one slice (SumSlices), front to back.
#pragma once

#include "kernels/cuda/nodes/few_channels.cuh"

namespace lowbit::cuda {

struct OneChannelParams : SplitParams {
  const float* weights = nullptr;  // [k][pitch]
  int pitch = 0;
  int units = 0;        // of all images
  int tasks = 0;        // of warps
  int warps = 0;        // of a block
  int task_fours = 0;   // of channels
  int block_fours = 0;  // the same of all tasks of a block
  bool clamps_high = false;
  FastDivisor by_fours, by_lines, by_unit_warps;  // units: across, down; warps of all units
};

// Of a block, the most; outputs of a unit, of how many channels at a time.
inline constexpr int kOneChannelThreads = 384, kUnitColumns = 4, kUnitRows = 4;

// The pixels of a line that a unit's windows cover, the first one kWidth / 2 to the left of column x; outside the image zeros.
template <int kWidth>
__device__ __forceinline__ void LoadWindowLine(const float* line, int x, int width, bool is_there,
                                               float (&v)[kWidth + kUnitColumns - 1]) {
  constexpr int kSide = kWidth / 2, kRight = kSide + kUnitColumns;
  static_assert(kSide == 1 || kSide == 2);
#pragma unroll
  for (float& each : v) each = 0;
  const bool is_left = is_there && x > 0 && x <= width, is_right = is_there && x + kUnitColumns < width;
  if constexpr (kSide == 1) {
    if (is_left) v[0] = line[x - 1];
    if (is_right) v[kRight] = line[x + kUnitColumns];
  } else {
    if (is_left) {
      const float2 pair = *reinterpret_cast<const float2*>(line + x - kSide);
      v[0] = pair.x, v[1] = pair.y;
    }
    if (is_right) {
      const float2 pair = *reinterpret_cast<const float2*>(line + x + kUnitColumns);
      v[kRight] = pair.x, v[kRight + 1] = pair.y;
    }
  }
  if (is_there && x < width) {
    const float4 four = *reinterpret_cast<const float4*>(line + x);
    v[kSide] = four.x, v[kSide + 1] = four.y, v[kSide + 2] = four.z, v[kSide + 3] = four.w;
  }
}

template <int kWidth>
__global__ void __launch_bounds__(kOneChannelThreads)
    ConvOneChannel(const __grid_constant__ OneChannelParams p) {
  LOWBIT_DYNAMIC_SHARED(shared, 128);
  constexpr int kTaps = kWidth * kWidth, kLine = kTaps + 1;   // of a four of channels: weights, then biases
  float4* const weights = reinterpret_cast<float4*>(shared);  // [fours][kLine]
  const int tid = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int first_task = static_cast<int>(blockIdx.x) * p.warps, task = first_task + tid / kWarp;
  const int first_four =
      static_cast<int>(Divided(static_cast<unsigned>(first_task), p.by_unit_warps).quotient) * p.task_fours;
  // The weights are the kernel's own: they may be fetched before the predecessor is done.
#pragma unroll 1
  for (int at = tid; at < p.block_fours * kLine; at += threads) {
    const int four = at / kLine, k = at - four * kLine, row = (first_four + four) * kUnitRows;
    if (k < kTaps) {
      CopyAsyncOrZero<16>(SharedAddress(weights + at), p.weights + (row < p.pitch ? k * p.pitch + row : 0),
                          row < p.pitch);
    } else {
      // To add -0 changes no sum.
      const auto bias = [&](int i) {
        return p.bias != nullptr && row + i < p.rows ? p.bias[row + i] : -0.0f;
      };
      weights[at] = make_float4(bias(0), bias(1), bias(2), bias(3));
    }
  }
  CommitCopies();
  const auto [chunk, unit_warp] = Divided(static_cast<unsigned>(task), p.by_unit_warps);
  const unsigned unit = unit_warp * kWarp + threadIdx.x % kWarp;
  const auto [line, across] = Divided(unit, p.by_fours);
  const auto [image, down] = Divided(line, p.by_lines);
  const int out_h = static_cast<int>(p.windows.h.out), out_w = static_cast<int>(p.windows.w.out);
  const int in_h = static_cast<int>(p.windows.h.in), in_w = static_cast<int>(p.windows.w.in);
  const int y = static_cast<int>(down), x = static_cast<int>(across) * kUnitColumns;
  const bool works = task < p.tasks && unit < static_cast<unsigned>(p.units);
  WaitForCopies<0>();
  __syncthreads();
  WaitForPredecessors();
  float pixels[kWidth][kWidth + kUnitColumns - 1];
  const int top = y - static_cast<int>(p.windows.h.pad_begin);
#pragma unroll
  for (int l = 0; l < kWidth; ++l) {
    LoadWindowLine<kWidth>(p.x + (int64_t{image} * in_h + top + l) * in_w, x, in_w,
                           works && top + l >= 0 && top + l < in_h, pixels[l]);
  }
  // Not behind the products: the compiler would load all weights before it.
  LetSuccessorsStart();
  if (task >= p.tasks) return;

  int row = static_cast<int>(chunk) * p.task_fours * kUnitRows;
  const float4* of_four = weights + (static_cast<int>(chunk) * p.task_fours - first_four) * kLine;
  const int64_t plane = int64_t{out_h} * out_w;
  float* to = p.y + (int64_t{image} * p.rows + row) * plane + int64_t{y} * out_w + x;
  const int end = min(row + p.task_fours * kUnitRows, p.rows);
#pragma unroll 1
  for (; row < end; row += kUnitRows, of_four += kLine) {
    float sums[kUnitRows][kUnitColumns] = {};
#pragma unroll
    for (int ty = 0; ty < kWidth; ++ty) {
#pragma unroll
      for (int tx = 0; tx < kWidth; ++tx) {
        const float4 w = of_four[ty * kWidth + tx];
#pragma unroll
        for (int i = 0; i < kUnitRows; ++i) {
#pragma unroll
          for (int j = 0; j < kUnitColumns; ++j) {
            sums[i][j] = __fmaf_rn(ElementOf(w, i), pixels[ty][tx + j], sums[i][j]);
          }
        }
      }
    }
    const float4 bias = of_four[kTaps];
#pragma unroll
    for (int i = 0; i < kUnitRows; ++i) {
#pragma unroll
      for (float& sum : sums[i]) {
        sum = __fadd_rn(sum, ElementOf(bias, i));
        sum = sum < p.limits.low ? p.limits.low : sum;
      }
    }
    if (p.clamps_high) {
#pragma unroll
      for (auto& of_row : sums) {
#pragma unroll
        for (float& sum : of_row) sum = sum > p.limits.high ? p.limits.high : sum;
      }
    }
#pragma unroll
    for (int i = 0; i < kUnitRows; ++i, to += plane) {
      const float (&four)[kUnitColumns] = sums[i];
      if (works && row + i < p.rows) {
        *reinterpret_cast<float4*>(to) = make_float4(four[0], four[1], four[2], four[3]);
      }
    }
  }
}

inline int OneChannelBytes(const OneChannelParams& p) {
  return p.block_fours * static_cast<int>(size_t{static_cast<unsigned>(p.k) + 1} * sizeof(float4));
}

// Sets the tasks: so many fours of channels each, so many warps to a block.
inline void SetTasks(OneChannelParams& p, int fours, int warps) {
  const auto unit_warps = static_cast<int>(p.by_unit_warps.divisor);
  const auto chunks = static_cast<int>(BlocksFor(p.rows, fours * kUnitRows));
  p.task_fours = fours;
  p.warps = warps;
  p.tasks = unit_warps * chunks;
  // Of tasks that follow each other the last one is so many times behind the first one's units.
  p.block_fours = std::min(chunks, static_cast<int>(BlocksFor(warps - 1, unit_warps)) + 1) * fours;
}

// About how many clocks tasks take. A multiprocessor with few warps at once waits for what they load; the first blocks overlap
// with the predecessor, those that find no room beside them do not. Fitted to maps of 28x28 to 1024x1024 in rows of equals on
// an H100: what is chosen takes at most 1.03 times what the best numbers take, but for 5x5 windows at 112x112 (1.09).
inline double CostOfTasks(const OneChannelParams& p, const Device& device) {
  constexpr double kTask = 1000, kRate = 78, kWave = 1000, kHiding = 0.9, kStored = 1325;
  constexpr int kSchedulers = 4, kRegisters = 65536;
  const int registers = p.windows.w.kernel == 3 ? 64 : 88;
  const double all = BlocksFor(p.tasks, p.warps) / static_cast<double>(device.multiprocessors);
  const int at_once = std::max(1, kRegisters / (registers * kWarp * p.warps));
  const double hiding = kHiding * kSchedulers / (std::min<double>(all, at_once) * p.warps);
  const double products = double{kWarp} * kUnitRows * kUnitColumns * p.k * p.task_fours;
  const double of_task = products / kRate * (1 + hiding);
  const double multiplied = std::ceil(all) * p.warps * (kTask + of_task);
  const double stored = static_cast<double>(p.count) * sizeof(float) / kStored;
  return std::max(multiplied, stored) + std::max(0.0, all / at_once - 1) * kWave + kSchedulers * of_task;
}

// Sets how a convolution of one channel is cut into tasks; false where it has no kernel for that.
inline bool CutIntoTasks(OneChannelParams& p, const Device& device) {
  const WindowDim &h = p.windows.h, &w = p.windows.w;
  const bool has_window = h.kernel == w.kernel && (w.kernel == 3 || w.kernel == 5) && h.stride == 1 &&
                          w.stride == 1 && h.dilation == 1 && w.dilation == 1 && w.pad_begin == w.kernel / 2;
  if (p.groups > 1 || p.channels != 1 || p.slices > 1 || p.limits.adds || !has_window) return false;
  if (w.in % kUnitColumns != 0 || w.out % kUnitColumns != 0 || p.count == 0 || !IsNear(p)) return false;
  const int64_t fours = w.out / kUnitColumns, units = p.columns / kUnitColumns;
  constexpr int64_t kMostTasks = int64_t{1} << 30;
  if (int64_t{BlocksFor(units, kWarp)} * BlocksFor(p.rows, kUnitRows) >= kMostTasks) return false;
  p.units = static_cast<int>(units);
  p.by_fours = MakeDivisor(fours);
  p.by_lines = MakeDivisor(h.out);
  p.by_unit_warps = MakeDivisor(BlocksFor(units, kWarp));
  p.clamps_high = p.limits.high < std::numeric_limits<float>::infinity();
  OneChannelParams best;
  double least = std::numeric_limits<double>::infinity();
  for (const int of_task : {1, 2, 3, 4, 8}) {
    for (const int warps : {12, 8, 6, 4}) {  // of equals the largest blocks, which store long runs
      if ((of_task - 1) * kUnitRows >= p.rows) continue;
      SetTasks(p, of_task, warps);
      const double cost = CostOfTasks(p, device);
      if (OneChannelBytes(p) <= device.shared_bytes && cost < least) least = cost, best = p;
    }
  }
  p = best;
  return std::isfinite(least);
}

inline void LaunchTasks(const Run& run, const Device& device, const OneChannelParams& p) {
  const LaunchShape shape{Dim(static_cast<int>(BlocksFor(p.tasks, p.warps))), p.warps * kWarp,
                          OneChannelBytes(p)};
  run.Check(p.windows.w.kernel == 3 ? LaunchKernel<ConvOneChannel<3>>(run.queue, device, shape, p)
                                    : LaunchKernel<ConvOneChannel<5>>(run.queue, device, shape, p));
}

// `bands`: the same convolution, of tensors that do not begin at 16 bytes.
inline NodePlanPtr PlanTasks(const std::string& name, const OneChannelParams& geometry,
                             const BandParams& bands, const Device& device) {
  const auto launch = [=](const Run& run, const OneChannelParams& p) {
    if (CommonUnit({p.x, p.y}) == 16) return LaunchTasks(run, device, p);
    BandParams of_any = bands;
    of_any.x = p.x;
    of_any.y = p.y;
    LaunchBands(run, device, of_any, false);
  };
  return MakeKernelPlan(name + " one channel, " + std::to_string(geometry.warps) + " warps of " +
                            std::to_string(geometry.task_fours * kUnitRows) + " outputs",
                        geometry, launch);
}

}  // namespace lowbit::cuda
