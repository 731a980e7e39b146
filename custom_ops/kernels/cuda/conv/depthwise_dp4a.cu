// Depthwise convolution by dp4a: a thread sums four neighbouring channels of some neighbouring pixels of a row.
// Pixels of four columns are four words of a byte for each channel; transposed in registers, each word holds the four
// columns of one channel, which one dp4a multiplies with as many taps of a row of the window.
//
// Most layers are small, and a network's depthwise kernels take the time of their longest chain of loads: all that is
// the kernel's own is in registers before its turn comes, and all pixels of a window are fetched at once.
#include "kernels/cuda/conv/conv_tile.cuh"
#include "kernels/cuda/conv/depthwise.h"
#include "kernels/cuda/device/ptx.cuh"

namespace lowbit::cuda {
namespace {

constexpr int kThreads = 128, kChannels = kDepthwiseRun;

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

// Taps of a row of a window as kernels read them: of each channel a word of the first four, one of the next four.
template <int kSide>
struct RowTaps {
  static constexpr int kWords = (kSide + 3) / 4;
  unsigned words[kWords][kChannels];

  __device__ __forceinline__ void Load(const uint8_t* row, int channels, int channel) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint4 four = *reinterpret_cast<const uint4*>(row + (i * channels + channel) * 4);
      words[i][0] = four.x;
      words[i][1] = four.y;
      words[i][2] = four.z;
      words[i][3] = four.w;
    }
  }
  // As if every tap were 1, of which a row has `count` in all.
  __device__ __forceinline__ void FillWithOnes(int count = kSide) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int left = count - 4 * i;
#pragma unroll
      for (unsigned& four : words[i]) four = left >= 4 ? 0x01010101u : 0x01010101u & ((1u << 8 * left) - 1);
    }
  }
  // Of a channel the taps that four columns meet, the first of which lies `kFrom` columns behind the window's; no
  // columns are 0.
  template <int kFrom>
  __device__ __forceinline__ unsigned Of(int channel) const {
    static_assert(kFrom > -4 && kFrom < 4 * kWords);
    if constexpr (kFrom <= 0) {
      return words[0][channel] << (-8 * kFrom);
    } else {
      const unsigned low = words[kFrom / 4][channel],
                     high = kFrom / 4 + 1 < kWords ? words[kWords - 1][channel] : 0;
      return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (8 * (kFrom % 4)));
    }
  }
};

// f<i>() for i < kCount.
template <int kCount, typename F>
__device__ __forceinline__ void ForEach(const F& f) {
  if constexpr (kCount > 0) {
    ForEach<kCount - 1>(f);
    f.template operator()<kCount - 1>();
  }
}

// Adds a row of the windows of kPixels neighbours, whose first columns are kStride apart. Words begin at every other
// column where a shift by one reaches all taps from there, at every fourth where taps fill two of them anyway.
template <int kSide, int kStride, bool kSigned, int kPixels, int kColumns>
__device__ __forceinline__ void AddRow(const unsigned (&x)[kColumns], const RowTaps<kSide>& taps,
                                       int (&sums)[kPixels][kChannels]) {
  static_assert(kColumns == (kPixels - 1) * kStride + kSide);
  constexpr int kStep = kSide <= 3 ? 2 : 4;
  ForEach<(kColumns + kStep - 1) / kStep>([&]<int kWord>() {
    constexpr int kFirst = kWord * kStep;
    const auto column = [&](int i) { return x[min(kFirst + i, kColumns - 1)]; };
    unsigned columns[kChannels];
    Transpose(column(0), column(1), column(2), column(3), columns);
    ForEach<kPixels>([&]<int kPixel>() {
      constexpr int kFrom = kFirst - kPixel * kStride;  // columns behind the window's first one
      constexpr bool kHolds = kSide <= 3 ? kFrom == 0 || kFrom == -1 : kFrom > -4 && kFrom < kSide;
      if constexpr (kHolds) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          int& sum = sums[kPixel][c];
          sum = DotFour<kSigned>(static_cast<int>(columns[c]), static_cast<int>(taps.template Of<kFrom>(c)),
                                 sum);
        }
      }
    });
  });
}

// What four channels have of their own.
struct ChannelConstants {
  int4 bias;
  FourChannels channels;

  __device__ __forceinline__ void Load(const EpilogueParams& e, int channel) {
    bias = *reinterpret_cast<const int4*>(e.bias + channel);
    channels = {*reinterpret_cast<const float4*>(e.scale + channel),
                *reinterpret_cast<const float4*>(e.start + channel), e.factor[channel / 4]};
  }
};

// How sums are finished, an instance for each: in one for everything most of 2,000 to 7,000 instructions are not those of the
// node, and what is lies far apart (H100, 672 channels of 14x14 between two 1x1 layers: .1 to .4 us a launch of 3x3, .4 to .7
// of 5x5). kOnes: one by one, as their epilogue has it. kAny: four at a time, any of them. The others store all codes as they
// are: what multiplication gives, 256 from the zero point on or any number; what lines give. OfZeros: weights
// have zero points that stay outside of them (ZeroPoints), and codes are added up beside the products, as if
// all taps were 1.
enum class Way { kOnes, kAny, kOnesOfZeros, kAnyOfZeros, kBytes, kWords, kLines };
template <Way kWay>
inline constexpr bool kHasZeros = kWay == Way::kOnesOfZeros || kWay == Way::kAnyOfZeros;
template <Way kWay>
inline constexpr bool kFinishesOnes = kWay == Way::kOnes || kWay == Way::kOnesOfZeros;
template <Way kWay>
inline constexpr bool kStoresAlone = kWay == Way::kBytes || kWay == Way::kWords || kWay == Way::kLines;

// sums -= zero points * codes.
template <int kPixels>
__device__ __forceinline__ void TakeZerosAway(const EpilogueParams& e, int channel,
                                              const int (&codes)[kPixels][kChannels],
                                              int (&sums)[kPixels][kChannels]) {
  const int4 four = *reinterpret_cast<const int4*>(e.w_zero + channel);
  const int zeros[] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) sums[i][c] -= zeros[c] * codes[i][c];
  }
}

template <Way kWay>
__device__ __forceinline__ unsigned FourCodes(const EpilogueParams& e, const int4& sums,
                                              const FourChannels& channels) {
  static_assert(kStoresAlone<kWay>);
  constexpr First kFirst = kWay == Way::kLines ? First::kTail : First::kMultiplies;
  constexpr Rounding kRounding = kWay == Way::kBytes   ? Rounding::kBytes
                                 : kWay == Way::kWords ? Rounding::kWords
                                                       : Rounding::kClipped;
  return FourAlone<kFirst, kRounding>(e, sums, channels);
}

// The outputs of neighbouring pixels, `count` of them. kMaps: a table has what is stored for a code.
template <Way kWay, bool kMaps, int kPixels>
__device__ __forceinline__ void FinishPixels(const DepthwiseParams& p, const ChannelConstants& constants,
                                             int pixel, int count, int channel,
                                             int (&sums)[kPixels][kChannels]) {
  const EpilogueParams& e = p.epilogue;
  if constexpr (kStoresAlone<kWay>) {
    unsigned codes[kPixels], none[kPixels] = {};
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      const int4 four = Plus(make_int4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]), constants.bias);
      codes[i] = FourCodes<kWay>(e, four, constants.channels);
    }
    if constexpr (kMaps) MapFours<Finish::kFloats>(e, none, codes);
    uint8_t* const y = static_cast<uint8_t*>(p.y) + static_cast<int64_t>(pixel) * e.out_channels + channel;
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      if (i < count) *reinterpret_cast<unsigned*>(y + i * e.out_channels) = codes[i];
    }
  } else if constexpr (!kFinishesOnes<kWay>) {
    const int64_t index = static_cast<int64_t>(pixel) * e.out_channels + channel;
    int4 fours[kPixels];
    unsigned codes[kPixels] = {};
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      fours[i] = Plus(make_int4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]), constants.bias);
      if (e.has_residual && i < count) {
        codes[i] = *reinterpret_cast<const unsigned*>(static_cast<const uint8_t*>(p.residual) + index +
                                                      i * e.out_channels);
      }
    }
    WithIntegers(e, [&](const auto& requantize) { requantize(fours, constants.channels, codes); });
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      if (i >= count) break;
      StoreInPlaces(e, pixel + i, channel, codes[i]);
      if (p.y != nullptr) {
        *reinterpret_cast<unsigned*>(static_cast<uint8_t*>(p.y) + index + i * e.out_channels) = codes[i];
      }
    }
  } else {
#pragma unroll 1  // rare, and long
    for (int i = 0; i < count * kChannels; ++i) {
      const int c = channel + i % kChannels;
      FinishOne(e, p.residual, p.y, pixel + i / kChannels, c, sums[i / kChannels][i % kChannels], e.bias[c],
                e.scale[c]);
    }
  }
}

__device__ __forceinline__ bool IsInside(int i, int size) {
  return static_cast<unsigned>(i) < static_cast<unsigned>(size);
}

// Windows of kSide x kSide without dilation, in steps of kStride along a row: a thread sums kPixels neighbours.
template <int kSide, int kStride, int kPixels, bool kSigned, Way kWay, bool kMaps>
__global__ void __launch_bounds__(kThreads) ConvDepthwiseRow(const __grid_constant__ DepthwiseParams p) {
  constexpr int kColumns = (kPixels - 1) * kStride + kSide;
  const int channels = p.epilogue.out_channels;
  const int thread = static_cast<int>(blockIdx.x * kThreads + threadIdx.x),
            index = min(thread, p.threads - 1);
  const int run = Divide(index, p.by_runs),
            channel = (index - run * static_cast<int>(p.by_runs.divisor)) * kChannels;
  const int row = Divide(run, p.by_pieces),
            ox = (run - row * static_cast<int>(p.by_pieces.divisor)) * kPixels;
  const int image = Divide(row, p.by_rows), oy = row - image * p.out_h;
  const int y0 = oy * p.stride_h - p.pad_top, x0 = ox * kStride - p.pad_left;
  const uint8_t* rows[kSide];  // where each begins; from there it is one addition to any pixel
  rows[0] = p.x + ((static_cast<int64_t>(image) * p.in_h + y0) * p.in_w + x0) * channels + channel;
#pragma unroll
  for (int ky = 0; ky < kSide; ++ky) {
    if (ky > 0) rows[ky] = rows[ky - 1] + p.in_w * channels;
    KeepInRegister(rows[ky]);
  }

  RowTaps<kSide> taps[kSide];
#pragma unroll
  for (int ky = 0; ky < kSide; ++ky)
    taps[ky].Load(p.weights + ky * RowTaps<kSide>::kWords * channels * 4, channels, channel);
  ChannelConstants constants;
  if constexpr (!kFinishesOnes<kWay>) constants.Load(p.epilogue, channel);
  PrefetchTables(p.epilogue, static_cast<int>(threadIdx.x));
  WaitForPredecessors();
  LetSuccessorsStart();
  if (thread >= p.threads) return;

  unsigned x[kSide][kColumns];
#pragma unroll
  for (int ky = 0; ky < kSide; ++ky) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const bool inside = IsInside(y0 + ky, p.in_h) & IsInside(x0 + i, p.in_w);
      x[ky][i] = LoadWordOr(rows[ky] + int64_t{channels} * i, inside, p.fill);
    }
  }
  int sums[kPixels][kChannels] = {};
#pragma unroll
  for (int ky = 0; ky < kSide; ++ky) AddRow<kSide, kStride, kSigned>(x[ky], taps[ky], sums);
  if constexpr (kHasZeros<kWay>) {
    RowTaps<kSide> ones;
    ones.FillWithOnes();
    int codes[kPixels][kChannels] = {};
#pragma unroll
    for (int ky = 0; ky < kSide; ++ky) AddRow<kSide, kStride, kSigned>(x[ky], ones, codes);
    TakeZerosAway(p.epilogue, channel, codes, sums);
  }
  FinishPixels<kWay, kMaps>(p, constants, row * p.out_w + ox, min(kPixels, p.out_w - ox), channel, sums);
}

// Any window, four taps of a row at a time.
template <bool kSigned, Way kWay, bool kMaps>
__global__ void __launch_bounds__(kThreads) ConvDepthwise(const __grid_constant__ DepthwiseParams p) {
  const int channels = p.epilogue.out_channels;
  const int thread = static_cast<int>(blockIdx.x * kThreads + threadIdx.x),
            index = min(thread, p.threads - 1);
  const int pixel = Divide(index, p.by_runs),
            channel = (index - pixel * static_cast<int>(p.by_runs.divisor)) * kChannels;
  const int row = Divide(pixel, p.by_pieces), ox = pixel - row * static_cast<int>(p.by_pieces.divisor);
  const int image = Divide(row, p.by_rows), oy = row - image * p.out_h;
  const int y0 = oy * p.stride_h - p.pad_top, x0 = ox * p.stride_w - p.pad_left;
  ChannelConstants constants;
  if constexpr (!kFinishesOnes<kWay>) constants.Load(p.epilogue, channel);
  PrefetchTables(p.epilogue, static_cast<int>(threadIdx.x));
  WaitForPredecessors();
  LetSuccessorsStart();
  if (thread >= p.threads) return;

  const uint8_t* weights = p.weights;
  int sums[1][kChannels] = {};
  int codes[1][kChannels] = {};
  for (int ky = 0; ky < p.kernel_h; ++ky) {
    const int y = y0 + ky * p.dilation_h;
    const bool row_inside = IsInside(y, p.in_h);
    const uint8_t* const from =
        p.x + (static_cast<int64_t>(image) * p.in_h + y) * p.in_w * channels + channel;
    for (int kx = 0; kx < p.kernel_w; kx += 4, weights += channels * 4) {
      unsigned x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = x0 + (kx + i) * p.dilation_w;
        const bool inside = row_inside && IsInside(column, p.in_w) && kx + i < p.kernel_w;
        x[i] = inside ? *reinterpret_cast<const unsigned*>(from + static_cast<int64_t>(column) * channels)
                      : p.fill;
      }
      RowTaps<4> taps;
      taps.Load(weights, channels, channel);
      AddRow<4, 1, kSigned>(x, taps, sums);
      if constexpr (kHasZeros<kWay>) {
        taps.FillWithOnes(p.kernel_w - kx);
        AddRow<4, 1, kSigned>(x, taps, codes);
      }
    }
  }
  if constexpr (kHasZeros<kWay>) TakeZerosAway(p.epilogue, channel, codes, sums);
  FinishPixels<kWay, kMaps>(p, constants, pixel, 1, channel, sums);
}

Way WayOf(const DepthwiseParams& p) {
  const EpilogueParams& e = p.epilogue;
  if (e.w_zero != nullptr) return p.requantizes ? Way::kAnyOfZeros : Way::kOnesOfZeros;
  if (!p.requantizes) return Way::kOnes;
  if (!StoresCodesAlone(e)) return Way::kAny;
  if (e.on_lines) return Way::kLines;
  return e.rounding == Rounding::kBytes   ? Way::kBytes
         : e.rounding == Rounding::kWords ? Way::kWords
                                          : Way::kAny;
}

}  // namespace

cudaError_t LaunchDepthwise(const DepthwiseParams& p, const ConvConfig&, const LaunchOptions& options) {
  const auto launch = [&](const auto& kernel) {
    return options.queue.Launch(kernel, BlocksFor(p.threads, kThreads), kThreads, p);
  };
  return std::visit(
      [&](auto is_signed, auto way, auto has_table) {
        constexpr bool kMaps = has_table && kStoresAlone<way>;
        if constexpr (HasInstance(is_signed == (way == Way::kAny))) {
          const auto of_row = [&]<int kSide, int kStride>() {
            return launch(ConvDepthwiseRow<kSide, kStride, PixelsOfThread(kStride), is_signed, way, kMaps>);
          };
          if (!p.is_row) return launch(ConvDepthwise<is_signed, way, kMaps>);
          if (p.kernel_w == 3 && p.stride_w == 1) return of_row.template operator()<3, 1>();
          if (p.kernel_w == 3) return of_row.template operator()<3, 2>();
          if (p.stride_w == 1) return of_row.template operator()<5, 1>();
          return of_row.template operator()<5, 2>();
        } else {
          return cudaErrorInvalidValue;
        }
      },
      OneOf(options.x_signed),
      OneOf<Way::kOnes, Way::kAny, Way::kOnesOfZeros, Way::kAnyOfZeros, Way::kBytes, Way::kWords,
            Way::kLines>(WayOf(p)),
      OneOf(p.epilogue.table != nullptr));
}

}  // namespace lowbit::cuda
