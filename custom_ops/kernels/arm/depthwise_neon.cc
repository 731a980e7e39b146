#include <arm_neon.h>

#include <algorithm>

#include "kernels/arm/depthwise_tile.h"
#include "kernels/arm/requantize8.h"
#include "kernels/arm/simd_neon.h"
#include "kernels/common/inline.h"
#include "kernels/common/tile_finish.h"

namespace lowbit {
namespace {

constexpr int kPixels = kDepthwisePixels;

// Any epilogue of 8 channels of four pixels, of which `count` exist. Not inlined: it is larger than a tile;
// the sums travel in registers.
__attribute__((noinline)) void FinishAny(const TileOutput& output, size_t pixel, size_t channel,
                                         int64_t count, int32x4_t a0, int32x4_t a1, int32x4_t b0,
                                         int32x4_t b1, int32x4_t c0, int32x4_t c1, int32x4_t d0,
                                         int32x4_t d1) {
  const int32x4_t sums[kPixels][2] = {{a0, a1}, {b0, b1}, {c0, c1}, {d0, d1}};
  if (count == kPixels) return FinishRegisters<Neon, kPixels, 2>(output, pixel, channel, 8, sums);
  for (int64_t p = 0; p < count; ++p) {
    const int32x4_t one[1][2] = {{sums[p][0], sums[p][1]}};
    FinishRegisters<Neon, 1, 2>(output, pixel + static_cast<size_t>(p), channel, 8, one);
  }
}

// The end of tiles of 8 channels.
class Ending {
 public:
  Ending(const TileOutput& output, size_t channel)
      : output_(output),
        channel_(channel),
        channels_(output.epilogue->channels),
        plain_(output.epilogue->pack_clips && !output.epilogue->has_residual),
        y_(static_cast<uint8_t*>(output.y) + output.first_pixel * channels_ + channel),
        requantize_(*output.epilogue, plain_ ? output.epilogue->scale + channel : kNoScales) {}

  LOWBIT_ALWAYS_INLINE void Store(size_t pixel, int64_t count, const int32x4_t (&s)[kPixels][2]) const {
    if (plain_ && count == kPixels) {
      requantize_.Store<kPixels>(s, y_ + pixel * channels_, channels_);
    } else {
      FinishAny(output_, pixel, channel_, count, s[0][0], s[0][1], s[1][0], s[1][1], s[2][0], s[2][1],
                s[3][0], s[3][1]);
    }
  }

 private:
  static constexpr float kNoScales[8] = {};
  const TileOutput& output_;
  const size_t channel_, channels_;
  const bool plain_;
  uint8_t* const y_;  // only where codes are stored, one byte each
  const Requantize8 requantize_;
};

template <bool kSigned>
struct Words {
  static constexpr int64_t kChannels = 8;
  using X = int16x8_t;
  using Sums = int32x4_t[2];

  static X Load(const uint8_t* p) {
    if constexpr (kSigned) {
      return vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
    } else {
      return vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p)));
    }
  }
  static X Weights(const uint8_t* p) { return vld1q_s16(reinterpret_cast<const int16_t*>(p)); }
  static void Begin(Sums (&sums)[kPixels], const int32_t* init) {
    for (auto& s : sums) {
      s[0] = vld1q_s32(init);
      s[1] = vld1q_s32(init + 4);
    }
  }
  static void Add(Sums& sums, X x, X w) {
    sums[0] = vmlal_s16(sums[0], vget_low_s16(x), vget_low_s16(w));
    sums[1] = vmlal_high_s16(sums[1], x, w);
  }
  struct End {
    End(const DepthwiseBlock& block, const TileOutput& output) : all(output, block.channel) {}
    LOWBIT_ALWAYS_INLINE void Store(size_t pixel, int64_t count, const Sums (&s)[kPixels]) const {
      all.Store(pixel, count, s);
    }
    Ending all;
  };
};

// kFlip: unsigned codes up to 255 become x - 128 by their top bit.
template <bool kFlip>
struct Bytes {
  static constexpr int64_t kChannels = 16;
  using X = int8x16_t;
  using Sums = int16x8_t[2];

  static X Load(const uint8_t* p) {
    const uint8x16_t codes = vld1q_u8(p);
    return vreinterpretq_s8_u8(kFlip ? veorq_u8(codes, vdupq_n_u8(0x80)) : codes);
  }
  static X Weights(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
  static void Begin(Sums (&sums)[kPixels], const int32_t*) {
    for (auto& s : sums) s[0] = s[1] = vdupq_n_s16(0);
  }
  static void Add(Sums& sums, X x, X w) {
    sums[0] = vmlal_s8(sums[0], vget_low_s8(x), vget_low_s8(w));
    sums[1] = vmlal_high_s8(sums[1], x, w);
  }
  struct End {
    End(const DepthwiseBlock& block, const TileOutput& output)
        : init(block.init), low(output, block.channel), high(output, block.channel + 8) {}
    LOWBIT_ALWAYS_INLINE void Store(size_t pixel, int64_t count, const Sums (&s)[kPixels]) const {
      StoreHalf<0>(low, pixel, count, s);
      StoreHalf<1>(high, pixel, count, s);
    }
    template <int kHalf>
    LOWBIT_ALWAYS_INLINE void StoreHalf(const Ending& end, size_t pixel, int64_t count,
                                        const Sums (&s)[kPixels]) const {
      const int32x4_t first = vld1q_s32(init + 8 * kHalf), second = vld1q_s32(init + 8 * kHalf + 4);
      int32x4_t sums[kPixels][2];
      for (int p = 0; p < kPixels; ++p) {
        sums[p][0] = vaddw_s16(first, vget_low_s16(s[p][kHalf]));
        sums[p][1] = vaddw_high_s16(second, s[p][kHalf]);
      }
      end.Store(pixel, count, sums);
    }
    const int32_t* init;
    Ending low, high;
  };
};

// Four outputs from `ox` on, of which `count` exist. Windows of width 3 and 5 are as high as wide, so that
// the lines of a tile are straight code, in which loads are far ahead of their use; of width 1 the number of
// lines and the stride are known at run time.
template <class Form, int kWidth, int kStride>
LOWBIT_ALWAYS_INLINE inline void Tile(const DepthwiseBlock& block, const DepthwiseRow& row,
                                      const typename Form::End& end, int64_t ox, int64_t count) {
  static_assert((kWidth == 1) == (kStride == 0));
  constexpr int kColumns = kWidth == 1 ? kPixels : (kPixels - 1) * kStride + kWidth;
  // Columns and addresses outside the image, whatever the stride, are no overflow in unsigned arithmetic, and
  // one comparison tells them: a negative column is a large unsigned one.
  const auto column_step = static_cast<uint64_t>(kWidth == 1 ? row.stride : 1);
  const auto in_w = static_cast<uint64_t>(row.in_w);
  const auto pad = reinterpret_cast<uintptr_t>(row.pad + block.channel);
  typename Form::Sums sums[kPixels];
  Form::Begin(sums, block.init);
  const auto add_line = [&](const DepthwiseLine& line, const uint8_t* weights) LOWBIT_ALWAYS_INLINE {
    typename Form::X w[kWidth];
#pragma GCC unroll 5
    for (int t = 0; t < kWidth; ++t) w[t] = Form::Weights(weights + 16 * t);
    const auto left = static_cast<uint64_t>(line.left) + static_cast<uint64_t>(ox * row.stride);
    const uintptr_t step = column_step * static_cast<uint64_t>(line.step);
    uintptr_t from =
        reinterpret_cast<uintptr_t>(line.row + block.channel) + left * static_cast<uint64_t>(line.step);
#pragma GCC unroll 16
    for (uint64_t i = 0; i < kColumns; ++i, from += step) {
      const bool inside = left + i * column_step < in_w;
      const auto x = Form::Load(reinterpret_cast<const uint8_t*>(inside ? from : pad));
#pragma GCC unroll 4
      for (int p = 0; p < kPixels; ++p) {
        const int tap = static_cast<int>(i) - p * (kWidth == 1 ? 1 : kStride);
        if (tap >= 0 && tap < kWidth) Form::Add(sums[p], x, w[tap]);
      }
    }
  };
  if constexpr (kWidth == 1) {
    const uint8_t* weights = block.weights;
    for (size_t l = 0; l < row.line_count; ++l, weights += 16) add_line(row.lines[l], weights);
  } else {
#pragma GCC unroll 5
    for (int l = 0; l < kWidth; ++l) add_line(row.lines[l], block.weights + 16 * kWidth * l);
  }
  end.Store(static_cast<size_t>(ox), count, sums);
}

template <class Form, int kWidth, int kStride>
void Run(const DepthwiseBlock& block, const DepthwiseRow& row) {
  const typename Form::End end(block, row.output);
  const int64_t count = std::min<int64_t>(kPixels, row.out_w);
  // The last tile moves back over its neighbour where it would reach too far.
  for (int64_t ox = 0; ox < row.out_w; ox += kPixels) {
    const int64_t first = std::max<int64_t>(std::min(ox, row.out_w - kPixels), 0);
    Tile<Form, kWidth, kStride>(block, row, end, first, count);
  }
}

template <class Form>
DepthwiseRun RunOf(int64_t width, int64_t stride) {
  if (width == 1) return Run<Form, 1, 0>;
  if (width == 3) return stride == 1 ? Run<Form, 3, 1> : Run<Form, 3, 2>;
  return stride == 1 ? Run<Form, 5, 1> : Run<Form, 5, 2>;
}

DepthwiseRun RunWords(int64_t width, int64_t stride, bool x_signed, bool) {
  return x_signed ? RunOf<Words<true>>(width, stride) : RunOf<Words<false>>(width, stride);
}

DepthwiseRun RunBytes(int64_t width, int64_t stride, bool, bool offset) {
  return offset ? RunOf<Bytes<true>>(width, stride) : RunOf<Bytes<false>>(width, stride);
}

}  // namespace

const DepthwiseForm kDepthwiseWords = {Words<false>::kChannels, RunWords};
const DepthwiseForm kDepthwiseBytes = {Bytes<false>::kChannels, RunBytes};

}  // namespace lowbit
