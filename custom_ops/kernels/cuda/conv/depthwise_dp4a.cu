// Depthwise convolution: a thread sums 16 neighbouring channels of one output pixel with dp4a. Four taps
// along a row are four times 16 bytes; transposed in registers, each word holds the four taps of one channel.
#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/conv/depthwise.h"
#include "kernels/cuda/device/ptx.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 128, kChannels = 16;

// out[c] = byte c of each of the four words.
__device__ __forceinline__ void Transpose(unsigned a, unsigned b, unsigned c, unsigned d,
                                          unsigned (&out)[4]) {
  const unsigned ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
  const unsigned cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(ab_low, cd_low, 0x5410);
  out[1] = __byte_perm(ab_low, cd_low, 0x7632);
  out[2] = __byte_perm(ab_high, cd_high, 0x5410);
  out[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

__device__ __forceinline__ const unsigned* Words(const uint4& v) {
  return reinterpret_cast<const unsigned*>(&v);
}

// Adds four taps of 16 channels; `weights` has a word of four taps for each channel.
template <bool kSigned>
__device__ __forceinline__ void AddTaps(const uint4 (&x)[4], const uint8_t* weights, int (&sums)[kChannels]) {
#pragma unroll
  for (int i = 0; i < kChannels / 4; ++i) {
    const uint4 w = *reinterpret_cast<const uint4*>(weights + i * 16);
    unsigned columns[4];
    Transpose(Words(x[0])[i], Words(x[1])[i], Words(x[2])[i], Words(x[3])[i], columns);
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[i * 4 + j] = DotFour<kSigned>(columns[j], Words(w)[j], sums[i * 4 + j]);
  }
}

__device__ __forceinline__ void FinishChannels(const DepthwiseParams& p, int pixel, int channel,
                                               const int (&sums)[kChannels]) {
  const EpilogueParams& e = p.epilogue;
  if (!p.requantizes) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      FinishOne(e, p.residual, p.y, pixel, channel + i, sums[i], e.bias[channel + i], e.scale[channel + i],
                0);
    }
    return;
  }
  const int64_t index = static_cast<int64_t>(pixel) * e.out_channels + channel;
  uint4 residual = {};
  if (e.has_residual) {
    residual = *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.residual) + index);
  }
  uint4 out;
  WithIntegers(e, [&](const auto& requantize) {
#pragma unroll
    for (int i = 0; i < kChannels / 4; ++i) {
      const int4 bias = *reinterpret_cast<const int4*>(e.bias + channel + i * 4);
      const int from = channel + i * 4;
      const FourChannels channels = {*reinterpret_cast<const float4*>(e.scale + from),
                                     *reinterpret_cast<const float4*>(e.start + from), e.factor[from / 4]};
      const int4 four[] = {
          Plus(make_int4(sums[i * 4], sums[i * 4 + 1], sums[i * 4 + 2], sums[i * 4 + 3]), bias)};
      unsigned codes[] = {Words(residual)[i]};
      requantize(four, channels, codes);
      reinterpret_cast<unsigned*>(&out)[i] = codes[0];
    }
  });
  StoreInPlaces(e, pixel, channel, out);
  if (p.y != nullptr) *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.y) + index) = out;
}

template <bool kSigned>
__global__ void __launch_bounds__(kThreads) ConvDepthwise(const __grid_constant__ DepthwiseParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const int channels = p.epilogue.out_channels, runs = channels / kChannels;
  const int index = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (index >= p.m * runs) return;
  const int pixel = Divide(index, p.by_runs), channel = (index - pixel * runs) * kChannels;
  const int image = Divide(pixel, p.by_image), rest = pixel - image * static_cast<int>(p.by_image.divisor);
  const int oy = Divide(rest, p.by_row), ox = rest - oy * static_cast<int>(p.by_row.divisor);
  const int y0 = oy * p.stride_h - p.pad_top, x0 = ox * p.stride_w - p.pad_left;
  const uint4 fill = make_uint4(p.fill, p.fill, p.fill, p.fill);
  const uint8_t* weights = p.weights + channel * 4;
  int sums[kChannels] = {};
  for (int ky = 0; ky < p.kernel_h; ++ky) {
    const int y = y0 + ky * p.dilation_h;
    const bool row_inside = y >= 0 && y < p.in_h;
    const uint8_t* const row = p.x + (static_cast<int64_t>(image) * p.in_h + y) * p.in_w * channels + channel;
    for (int kx = 0; kx < p.kernel_w; kx += 4, weights += channels * 4) {
      uint4 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = x0 + (kx + i) * p.dilation_w;
        const bool inside = row_inside && column >= 0 && column < p.in_w && kx + i < p.kernel_w;
        x[i] = inside ? *reinterpret_cast<const uint4*>(row + static_cast<int64_t>(column) * channels) : fill;
      }
      AddTaps<kSigned>(x, weights, sums);
    }
  }
  FinishChannels(p, pixel, channel, sums);
}

// Windows 3 wide in steps of 1: a thread sums four neighbouring pixels. Columns 0..3 of a row are the taps of
// the first two, columns 2..5 those of the others.
template <bool kSigned>
__global__ void __launch_bounds__(kThreads) ConvDepthwiseFours(const __grid_constant__ DepthwiseParams p) {
  LetSuccessorsStart();
  WaitForPredecessors();
  const int channels = p.epilogue.out_channels, runs = channels / kChannels;
  const int fours = static_cast<int>(p.by_fours.divisor), rows = p.m / p.out_w;
  const int index = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (index >= rows * fours * runs) return;
  const int four = Divide(index, p.by_runs), channel = (index - four * runs) * kChannels;
  const int row = Divide(four, p.by_fours), ox = (four - row * fours) * 4;
  const int image = row / p.out_h, y0 = (row - image * p.out_h) * p.stride_h - p.pad_top,
            x0 = ox - p.pad_left;
  const uint4 fill = make_uint4(p.fill, p.fill, p.fill, p.fill);
  const uint8_t* weights = p.weights + channel * 4;
  int sums[4][kChannels] = {};
  for (int ky = 0; ky < p.kernel_h; ++ky, weights += channels * 4) {
    const int y = y0 + ky * p.dilation_h;
    const bool row_inside = y >= 0 && y < p.in_h;
    const uint8_t* const from =
        p.x + (static_cast<int64_t>(image) * p.in_h + y) * p.in_w * channels + channel;
    uint4 x[6];
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      const int column = x0 + i;
      const bool inside = row_inside && column >= 0 && column < p.in_w;
      x[i] = inside ? *reinterpret_cast<const uint4*>(from + static_cast<int64_t>(column) * channels) : fill;
    }
#pragma unroll
    for (int i = 0; i < kChannels / 4; ++i) {
      const uint4 w = *reinterpret_cast<const uint4*>(weights + i * 16);
      unsigned left[4], right[4];
      Transpose(Words(x[0])[i], Words(x[1])[i], Words(x[2])[i], Words(x[3])[i], left);
      Transpose(Words(x[2])[i], Words(x[3])[i], Words(x[4])[i], Words(x[5])[i], right);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const unsigned taps = Words(w)[j], later = taps << 8;  // the fourth tap is 0
        const int c = i * 4 + j;
        sums[0][c] = DotFour<kSigned>(left[j], taps, sums[0][c]);
        sums[1][c] = DotFour<kSigned>(left[j], later, sums[1][c]);
        sums[2][c] = DotFour<kSigned>(right[j], taps, sums[2][c]);
        sums[3][c] = DotFour<kSigned>(right[j], later, sums[3][c]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (ox + i < p.out_w) FinishChannels(p, row * p.out_w + ox + i, channel, sums[i]);
  }
}

}  // namespace

cudaError_t LaunchDepthwise(const DepthwiseParams& p, const ConvConfig&, const LaunchOptions& options) {
  const int64_t runs = p.epilogue.out_channels / kChannels;
  if (p.kernel_w == 3 && p.stride_w == 1 && p.dilation_w == 1) {
    const int64_t rows = p.m / p.out_w;
    return options.queue.Launch(options.x_signed ? ConvDepthwiseFours<true> : ConvDepthwiseFours<false>,
                                BlocksFor(rows * p.by_fours.divisor * runs, kThreads), kThreads, p);
  }
  return options.queue.Launch(options.x_signed ? ConvDepthwise<true> : ConvDepthwise<false>,
                              BlocksFor(p.m * runs, kThreads), kThreads, p);
}

}  // namespace lowbit::cuda
