// Matrix times few vectors: a classifier's last layer. A block sums eight output channels for all rows of x,
// its warps along K. Each thread fetches its part of the weights into registers before the predecessor is
// done, as far as they fit: what remains then is one round trip for x, straight into the registers that mma
// reads.
//
// A thread's 16 bytes of a row make two of mma's fragments: the order of K is nobody's business as long as x
// and weights have the same.
//
//   bytes of K     0 .. 63           64 .. 127   ...
//   lanes of a row 0 | 1 | 2 | 3     0 | 1 | 2 | 3
//   product        1122 1122 ...
//
// Codes are added up, where zero points stay outside of weights (ZeroPoints), by one product more, with ones:
// each thread then has the sums of the rows whose outputs it has.
#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/conv/vector.h"
#include "kernels/cuda/device/mma_s8.cuh"
#include "kernels/cuda/device/ptx.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kChannels = 8;
constexpr int kLaneBytes = 16, kStepBytes = 4 * kLaneBytes, kSteps = 4;
constexpr int kRoundBytes = kWarps * kSteps * kStepBytes;  // of K, that a block sums at once

__device__ __forceinline__ uint4 LoadOrZero(const uint8_t* from, bool inside) {
  return inside ? *reinterpret_cast<const uint4*>(from) : uint4{};
}

// kRows: 8 or 16, those of x are no more.
template <int kRows, bool kSigned, bool kHasZeros>
__global__ void __launch_bounds__(kThreads) ConvVector(const __grid_constant__ VectorParams p) {
  __shared__ int partial[kWarps][kRows * kChannels];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, row = lane / 4;
  const int channel0 = static_cast<int>(blockIdx.x) * kChannels;
  const EpilogueParams& e = p.epilogue;
  // The output that this thread finishes.
  const int channel = channel0 + thread % kChannels, pixel = thread / kChannels;
  const bool finishes = pixel < p.m && channel < p.n;
  const int bias = finishes ? e.bias[channel] : 0;
  const float scale = finishes ? e.scale[channel] : 0.0f;

  // The lane's bytes of its warp's first step; tiles of weights have 128 bytes of a row, rows past the last
  // channel are there.
  const int k0 = (thread / 32 * kSteps * 4 + lane % 4) * kLaneBytes;
  const int weight_row = InterleavedRow(channel0 + row);
  uint4 w[kSteps];
  const auto load_weights = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int k = begin + k0 + i * kStepBytes;
      const uint8_t* const tile =
          p.weights + (static_cast<int64_t>(k / kRowBytes) * p.n_padded + weight_row) * kRowBytes;
      w[i] = LoadOrZero(tile + (k / kLaneBytes % 8 ^ weight_row % 8) * kLaneBytes, k < p.k);
    }
  };
  load_weights(0);
  PrefetchTables(e, thread);
  WaitForPredecessors();

  int parts[kSteps][4] = {};  // apart, so that products do not wait for each other
  int codes[4] = {};
  for (int begin = 0;;) {
    uint4 top[kSteps], bottom[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int k = begin + k0 + i * kStepBytes;
      const uint8_t* const x = p.x + static_cast<int64_t>(row) * p.k + k;
      top[i] = LoadOrZero(x, k < p.k && row < p.m);
      bottom[i] = LoadOrZero(x + static_cast<int64_t>(8) * p.k, kRows > 8 && k < p.k && row + 8 < p.m);
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const unsigned first[4] = {top[i].x, bottom[i].x, top[i].y, bottom[i].y},
                     second[4] = {top[i].z, bottom[i].z, top[i].w, bottom[i].w};
      Multiply<kSigned>(parts[i], first, w[i].x, w[i].y);
      Multiply<kSigned>(parts[i], second, w[i].z, w[i].w);
      if constexpr (kHasZeros) {
        constexpr unsigned kOnes = 0x01010101;
        Multiply<kSigned>(codes, first, kOnes, kOnes);
        Multiply<kSigned>(codes, second, kOnes, kOnes);
      }
    }
    begin += kRoundBytes;
    if (begin >= p.k) break;
    load_weights(begin);
  }
  LetSuccessorsStart();
  int* const own = partial[thread / 32] + row * kChannels + lane % 4 * 2;
  int zeros[2] = {};
  if constexpr (kHasZeros) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int of_sum = channel0 + lane % 4 * 2 + i;
      if (of_sum < p.n) zeros[i] = e.w_zero[of_sum];
    }
  }
  const auto sum_of = [&](int i) {
    int sum = -zeros[i % 2] * codes[i];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) sum += parts[step][i];
    return sum;
  };
  *reinterpret_cast<int2*>(own) = make_int2(sum_of(0), sum_of(1));
  if (kRows > 8) *reinterpret_cast<int2*>(own + 8 * kChannels) = make_int2(sum_of(2), sum_of(3));
  __syncthreads();
  if (!finishes) return;
  int sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp][thread];
  FinishOne(e, p.residual, p.y, pixel, channel, sum, bias, scale);
}

}  // namespace

cudaError_t LaunchVector(const VectorParams& p, const ConvConfig&, const LaunchOptions& options) {
  static_assert(kMaxVectorRows == 16);
  return std::visit(
      [&](auto rows, auto is_signed, auto has_zeros) {
        return options.queue.Launch(ConvVector<rows, is_signed, has_zeros>,
                                    Dim((p.n + kChannels - 1) / kChannels), kThreads, p);
      },
      OneOf<8, 16>(p.m <= 8 ? 8 : 16), OneOf(options.x_signed), OneOf(p.epilogue.w_zero != nullptr));
}

}  // namespace lowbit::cuda
