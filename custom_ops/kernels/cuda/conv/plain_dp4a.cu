// The GPU's own reference: one thread sums one output with dp4a, every node. Its values take no shortcut
// through padding codes or folded zero points. Besides it the small kernels around the tile kernels: input
// repacking, the reduction of split sums.
#include <algorithm>

#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/conv/device_epilogue.cuh"
#include "kernels/cuda/conv/plain.h"
#include "kernels/cuda/device/ptx.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 128;

// Which input pixel tap t of output o reads in one dimension; -1: none.
__device__ __forceinline__ int InputPixel(bool transposed, int o, int t, int stride, int dilation, int pad,
                                          int size) {
  int i = o * stride + t * dilation - pad;
  if (transposed) {
    const int scaled = o + pad - t * dilation;
    if (scaled < 0 || scaled % stride != 0) return -1;
    i = scaled / stride;
  }
  return i >= 0 && i < size ? i : -1;
}

// Four weights of channel n of a group, of `tap`, from channel i on: in the tiles of the tile kernels, or in
// rows [taps][channels rounded up to 4].
__device__ __forceinline__ int Weights(const PlainParams& p, int group, int n, int tap, int i) {
  const int padded = (p.channels + 3) / 4 * 4, k = tap * padded + i;
  if (!p.weights_in_tiles) {
    const int64_t row = static_cast<int64_t>(group) * p.n + n;
    return *reinterpret_cast<const int*>(p.weights + row * p.kernel_h * p.kernel_w * padded + k);
  }
  const int r = InterleavedRow(n);
  const int64_t row = (static_cast<int64_t>(group) * p.k_tiles + k / 128) * p.n_padded + r;
  return *reinterpret_cast<const int*>(p.weights + row * 128 + ((k % 128 / 16 ^ r % 8) * 16) + k % 16);
}

// With v(x) = x_mul q - x_zero and
// v(w) = w - w_zero, the sum over the taps inside the image is
//   x_mul S(q w) - x_zero S(w) - w_zero S(v(x)).
// Of channels that are filled up to fours, weights are not read: they may have a zero point. The weights of
// bits are even.
template <bool kSigned>
__global__ void __launch_bounds__(kThreads) ConvPlain(const __grid_constant__ PlainParams p) {
  WaitForPredecessors();
  LetSuccessorsStart();
  const int out_channels = p.epilogue.out_channels;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= static_cast<int64_t>(p.m) * out_channels) return;
  const int pixel = static_cast<int>(index / out_channels), c = static_cast<int>(index % out_channels);
  const int group = c / p.n;
  const int image = pixel / (p.out_h * p.out_w), oy = pixel / p.out_w % p.out_h, ox = pixel % p.out_w;
  const bool words = p.channels % 4 == 0;
  int products = 0, x_sum = 0, w_sum = 0, count = 0;
  for (int ty = 0; ty < p.kernel_h; ++ty) {
    const int iy = InputPixel(p.transposed, oy, ty, p.stride_h, p.dilation_h, p.pad_top, p.in_h);
    if (iy < 0) continue;
    for (int tx = 0; tx < p.kernel_w; ++tx) {
      const int ix = InputPixel(p.transposed, ox, tx, p.stride_w, p.dilation_w, p.pad_left, p.in_w);
      if (ix < 0) continue;
      const uint8_t* x = p.x + (static_cast<int64_t>(image * p.in_h + iy) * p.in_w + ix) * p.pixel_bytes +
                         group * p.channels;
      for (int i = 0; i < p.channels; i += 4) {
        int four = 0;
        if (words) {
          four = *reinterpret_cast<const int*>(x + i);
        } else {
          for (int j = 0; j < 4 && i + j < p.channels; ++j) four |= static_cast<int>(x[i + j]) << (8 * j);
        }
        int weights = Weights(p, group, c - group * p.n, ty * p.kernel_w + tx, i);
        if (i + 4 > p.channels) weights &= (1 << 8 * (p.channels - i)) - 1;
        products = DotFour<kSigned>(four, weights, products);
        x_sum = DotFour<kSigned>(four, 0x01010101, x_sum);
        w_sum = DotFour<true>(weights, 0x01010101, w_sum);
      }
      count += p.channels;
    }
  }
  int sum = p.x_mul * products - p.x_zero * w_sum - (p.is_bits ? w_sum / 2 : 0);
  if (p.epilogue.w_zero != nullptr) sum -= p.epilogue.w_zero[c] * (p.x_mul * x_sum - p.x_zero * count);
  FinishOne(p.epilogue, p.residual, p.y, pixel, c, sum, p.epilogue.bias[c], p.epilogue.scale[c]);
}

__global__ void __launch_bounds__(kThreads) Reduce(const __grid_constant__ ReduceParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const int64_t outputs = static_cast<int64_t>(p.groups) * p.m * p.n;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= outputs) return;
  const int64_t row = index / p.n;  // group * m + pixel
  const int group = static_cast<int>(row / p.m), pixel = static_cast<int>(row % p.m);
  const int channel = group * p.n + static_cast<int>(index % p.n);
  int sum = 0;
  for (int s = 0; s < p.splits; ++s) sum += p.partial[s * outputs + index];
  FinishOne(p.epilogue, p.residual, p.y, pixel, channel, sum, p.epilogue.bias[channel],
            p.epilogue.scale[channel]);
}

__global__ void __launch_bounds__(kThreads) Repack(const __grid_constant__ RepackParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;  // of 4 bytes of y
  const int words = p.groups * p.channels / 4;
  if (index >= p.pixels * words) return;
  const int64_t pixel = index / words;
  const int column = static_cast<int>(index % words) * 4, group = column / p.channels,
            c = column % p.channels;
  const uint8_t* x = p.x + (pixel * p.groups + group) * p.group_in + c;
  unsigned four = 0;
  for (int i = 0; i < 4 && c + i < p.group_in; ++i) {
    four |= static_cast<unsigned>((p.mul * static_cast<int>(x[i]) - p.sub) & 255) << (8 * i);
  }
  reinterpret_cast<unsigned*>(p.y)[index] = four;
}

}  // namespace

cudaError_t LaunchPlain(const PlainParams& p, const ConvConfig&, const LaunchOptions& options) {
  const int64_t threads = static_cast<int64_t>(p.m) * p.epilogue.out_channels;
  return options.queue.Launch(options.x_signed ? ConvPlain<true> : ConvPlain<false>,
                              BlocksFor(threads, kThreads), kThreads, p);
}

cudaError_t LaunchReduce(const ReduceParams& p, const LaunchOptions& options) {
  return options.queue.Launch(Reduce, BlocksFor(static_cast<int64_t>(p.groups) * p.m * p.n, kThreads),
                              kThreads, p);
}

cudaError_t LaunchRepack(const RepackParams& p, const LaunchOptions& options) {
  return options.queue.Launch(Repack, BlocksFor(p.pixels * p.groups * p.channels / 4, kThreads), kThreads, p);
}

}  // namespace lowbit::cuda
