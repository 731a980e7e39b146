// Matrix times few vectors: a classifier's last layer on one image. A warp sums one output channel for all
// rows of x. Each lane fetches its part of the channel's weights into registers before the predecessor is
// done, as far as they fit: what remains then is one round trip for x.
#include "kernels/cuda/conv_tile.cuh"
#include "kernels/cuda/heuristic.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/ptx.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kLaneBytes = 16, kStepBytes = 32 * kLaneBytes, kSteps = 4;

__device__ __forceinline__ uint4 LoadFour(const uint8_t* from, bool inside) {
  return inside ? *reinterpret_cast<const uint4*>(from) : uint4{};
}

template <bool kSigned>
__device__ __forceinline__ int Dot(const uint4& x, const uint4& w, int sum) {
  sum = DotFour<kSigned>(static_cast<int>(x.x), static_cast<int>(w.x), sum);
  sum = DotFour<kSigned>(static_cast<int>(x.y), static_cast<int>(w.y), sum);
  sum = DotFour<kSigned>(static_cast<int>(x.z), static_cast<int>(w.z), sum);
  return DotFour<kSigned>(static_cast<int>(x.w), static_cast<int>(w.w), sum);
}

// p.m is at most kRows.
template <int kRows, bool kSigned>
__global__ void __launch_bounds__(kThreads) ConvVector(const __grid_constant__ ConvParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int channel = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int n = min(channel, p.n - 1);  // a warp past the last repeats it
  const EpilogueParams& e = p.epilogue;
  const int bias = e.bias[n];
  const float scale = e.scale[n];
  // Eight lanes cover the 128 bytes of a tile's row.
  const int row = InterleavedRow(n);
  const uint8_t* const weights = p.weights + (static_cast<int64_t>(lane / 8) * p.n_padded + row) * kRowBytes +
                                 ((lane % 8 ^ row % 8) * kLaneBytes);
  const int64_t weight_step = static_cast<int64_t>(kStepBytes / kRowBytes) * p.n_padded * kRowBytes;
  uint4 w[kSteps];
  const auto load_weights = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int step = begin + i;
      w[i] = LoadFour(weights + step * weight_step, step * kStepBytes + lane * kLaneBytes < p.k);
    }
  };
  load_weights(0);
  WaitForPredecessors();

  int sums[kRows] = {};
  for (int begin = 0;;) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const uint8_t* const x = p.x + static_cast<int64_t>(m) * p.pixel_bytes;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int k = (begin + i) * kStepBytes + lane * kLaneBytes;
        sums[m] = Dot<kSigned>(LoadFour(x + k, k < p.k && m < p.m), w[i], sums[m]);
      }
    }
    begin += kSteps;
    if (begin * kStepBytes >= p.k) break;
    load_weights(begin);
  }
  LetSuccessorsStart();
  int mine = 0;  // lane m finishes row m
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sums[m] += __shfl_xor_sync(0xFFFFFFFFu, sums[m], step);
    if (lane == m) mine = sums[m];
  }
  if (lane < p.m && channel < p.n) FinishOne(e, p.residual, p.y, lane, channel, mine, bias, scale, 0);
}

template <int kRows>
cudaError_t LaunchRows(const ConvParams& p, const LaunchOptions& options) {
  const dim3 grid(static_cast<unsigned>((p.n + kWarps - 1) / kWarps));
  return options.x_signed ? options.queue.Launch(ConvVector<kRows, true>, grid, kThreads, p)
                          : options.queue.Launch(ConvVector<kRows, false>, grid, kThreads, p);
}

}  // namespace

cudaError_t LaunchVector(const ConvParams& p, const LaunchOptions& options) {
  static_assert(kMaxVectorRows == 4);
  if (p.m == 1) return LaunchRows<1>(p, options);
  return p.m == 2 ? LaunchRows<2>(p, options) : LaunchRows<4>(p, options);
}

}  // namespace lowbit::cuda
