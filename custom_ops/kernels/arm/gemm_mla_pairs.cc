// Two products in one 16-bit lane: MLA on halfwords, for operands of up to 4 bits. ARMv8.0.
//
// With x = x0 + 256 x1 and, crosswise, w = w1 + 256 w0, modulo 2^16
//
//   x w = x0 w1 + 256 (x0 w0 + x1 w1)                (65536 x1 w0 vanishes)
//
// so a sum of n such products holds low = sum x0 w1 and, 256 times as high, the wanted d = sum x0 w0 + x1 w1.
// While -128 <= low <= 127 and -127 <= d <= 127, the sum as a number, low + 256 d, is inside int16, and
// shifting it right by 8 with rounding gives exactly d: SRSRA #8 adds it to a second 16-bit sum. Those grow
// by at most 127 a flush and are added to the 32-bit sums every kFlushesPerWidening flushes: 127 * 256 <
// 2^15.
//
// `flush` is the largest n for which both hold with the weights at hand: d is a sum of 2 n successive
// products, and low one of n successive weights of odd k, each times some x.
#include <arm_neon.h>

#include <algorithm>
#include <cstdint>

#include "kernels/arm/gemm_scheme.h"

namespace lowbit {
namespace {

constexpr size_t kChannels = 8;
constexpr size_t kFlushesPerWidening = 256;
constexpr size_t kMaxFlush = 4096;

template <bool kFirst, int kLane>
inline int16x8_t Product(int16x8_t sum, int16x8_t w, int16x8_t x) {
  return kFirst ? vmulq_laneq_s16(w, x, kLane) : vmlaq_laneq_s16(sum, w, x, kLane);
}

// The values of kPixels pixels in one step: 8 of them, then 4.
template <int kPixels>
struct Step {
  int16x8_t w, x8;
  int16x4_t x4;

  Step(const int16_t* w_at, const int16_t* x8_at, const int16_t* x4_at) : w(vld1q_s16(w_at)) {
    if constexpr (kPixels >= 8) x8 = vld1q_s16(x8_at);
    if constexpr (kPixels % 8 != 0) x4 = vld1_s16(x4_at);
  }

  template <bool kFirst>
  void Multiply(int16x8_t (&t)[kPixels]) const {
    if constexpr (kPixels >= 8) {
      t[0] = Product<kFirst, 0>(t[0], w, x8);
      t[1] = Product<kFirst, 1>(t[1], w, x8);
      t[2] = Product<kFirst, 2>(t[2], w, x8);
      t[3] = Product<kFirst, 3>(t[3], w, x8);
      t[4] = Product<kFirst, 4>(t[4], w, x8);
      t[5] = Product<kFirst, 5>(t[5], w, x8);
      t[6] = Product<kFirst, 6>(t[6], w, x8);
      t[7] = Product<kFirst, 7>(t[7], w, x8);
    }
    if constexpr (kPixels % 8 != 0) {
      constexpr int kAt = kPixels - 4;
      const int16x8_t x = vcombine_s16(x4, x4);
      t[kAt] = Product<kFirst, 0>(t[kAt], w, x);
      t[kAt + 1] = Product<kFirst, 1>(t[kAt + 1], w, x);
      t[kAt + 2] = Product<kFirst, 2>(t[kAt + 2], w, x);
      t[kAt + 3] = Product<kFirst, 3>(t[kAt + 3], w, x);
    }
  }
};

template <int kPixels>
void Tile(const GemmTile& tile) {
  const auto* w = reinterpret_cast<const int16_t*>(tile.w);
  const auto* x8 = reinterpret_cast<const int16_t*>(tile.x);
  const int16_t* x4 = x8 + (kPixels >= 8 ? tile.steps * 8 : 0);
  for (size_t left = tile.steps; left > 0;) {
    int16x8_t s[kPixels];
#pragma GCC unroll 12
    for (int p = 0; p < kPixels; ++p) s[p] = vdupq_n_s16(0);
    for (size_t flushes = 0; flushes < kFlushesPerWidening && left > 0; ++flushes) {
      const size_t run = left < tile.flush ? left : tile.flush;
      left -= run;
      int16x8_t t[kPixels];
      const auto step = [&](size_t i) { return Step<kPixels>(w + 8 * i, x8 + 8 * i, x4 + 4 * i); };
      step(0).template Multiply<true>(t);
      size_t i = 1;
      for (; i + 2 <= run; i += 2) {
        const Step<kPixels> first = step(i), second = step(i + 1);
        first.template Multiply<false>(t);
        second.template Multiply<false>(t);
      }
      if (i < run) step(i).template Multiply<false>(t);
      w += 8 * run;
      x8 += 8 * run;
      x4 += 4 * run;
#pragma GCC unroll 12
      for (int p = 0; p < kPixels; ++p) s[p] = vrsraq_n_s16(s[p], t[p], 8);
    }
#pragma GCC unroll 12
    for (int p = 0; p < kPixels; ++p) {
      int32_t* sums = tile.sums + static_cast<size_t>(p) * kChannels;
      vst1q_s32(sums, vaddw_s16(vld1q_s32(sums), vget_low_s16(s[p])));
      vst1q_s32(sums + 4, vaddw_high_s16(vld1q_s32(sums + 4), s[p]));
    }
  }
}

size_t Flush(const GemmOperands& operands) {
  const size_t both = LongestSafeRun(operands, 1, -127, 127, 2 * kMaxFlush) / 2;
  return std::min(both, LongestSafeRun(operands, 2, -128, 127, kMaxFlush));
}

// Of 192 products a step of 12 pixels: 12 multiplications, loads of 5 cycles, and 12 SRSRA a flush (modelled
// Cortex-A53).
double MacsPerCycle(size_t flush) { return 192.0 / (17.0 + 12.0 / static_cast<double>(flush)); }

}  // namespace

const GemmScheme kGemmMlaPairs = {
    kChannels, 2, 2, GemmForm::kPairs, &Flush, &MacsPerCycle, {&Tile<4>, &Tile<8>, &Tile<12>}};

}  // namespace lowbit
