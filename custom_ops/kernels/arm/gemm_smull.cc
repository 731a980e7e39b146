// 8-bit products in 16-bit sums: SMULL, SMLAL and, every `flush` steps, SADALP. ARMv8.0.
//
// Two successive k of a channel are neighbours in a vector of 16-bit products, and SADALP adds neighbours:
//
//   w    c0k0 c0k1 | c1k0 c1k1 | ... c7k1       8 channels x 2 k
//   x    k0 k1     | k0 k1     | ...            one pixel, replicated; LD4R loads four pixels so
//   SMULL/SMLAL -> 16-bit lanes [c0 k0][c0 k1][c1 k0] ..., SADALP -> 32-bit lanes [c0][c1][c2][c3]
//
// Overflow. A 16-bit lane holds the products of every second k: `flush` is the longest run of them that fits
// int16. For 8-bit codes at full range that is 1 (2 * -128 * -128 = 2^15), for weights of 7 bits and less
// than -128 2 and more; most trained weights allow far longer runs than their range alone would.
//
// The tile is 4 pixels x 8 channels: 8 vectors of 16-bit sums and 8 of 32-bit sums leave room for two steps'
// operands, so that loads run ahead of the multiplications on in-order cores.
#include <arm_neon.h>

#include <cstdint>

#include "kernels/arm/gemm_scheme.h"

namespace lowbit {
namespace {

constexpr size_t kPixels = 4, kChannels = 8;
constexpr size_t kMaxFlush = 4096;

struct Step {
  int8x16_t w;
  int16x8x4_t x;

  Step(const int8_t* w_at, const int16_t* x_at) : w(vld1q_s8(w_at)), x(vld4q_dup_s16(x_at)) {}
};

inline void Multiply(const Step& s, int16x8_t (&products)[kPixels][2]) {
#pragma GCC unroll 4
  for (size_t p = 0; p < kPixels; ++p) {
    const int8x16_t x = vreinterpretq_s8_s16(s.x.val[p]);
    products[p][0] = vmull_s8(vget_low_s8(s.w), vget_low_s8(x));
    products[p][1] = vmull_high_s8(s.w, x);
  }
}

inline void MultiplyAdd(const Step& s, int16x8_t (&products)[kPixels][2]) {
#pragma GCC unroll 4
  for (size_t p = 0; p < kPixels; ++p) {
    const int8x16_t x = vreinterpretq_s8_s16(s.x.val[p]);
    products[p][0] = vmlal_s8(products[p][0], vget_low_s8(s.w), vget_low_s8(x));
    products[p][1] = vmlal_high_s8(products[p][1], s.w, x);
  }
}

void Tile(const GemmTile& t) {
  const auto* w = reinterpret_cast<const int8_t*>(t.w);
  const auto* x = reinterpret_cast<const int16_t*>(t.x);
  int32x4_t acc[kPixels][2];
#pragma GCC unroll 4
  for (size_t p = 0; p < kPixels; ++p) {
    acc[p][0] = vld1q_s32(t.sums + p * kChannels);
    acc[p][1] = vld1q_s32(t.sums + p * kChannels + 4);
  }
  for (size_t left = t.steps; left > 0;) {
    const size_t run = left < t.flush ? left : t.flush;
    left -= run;
    int16x8_t products[kPixels][2];
    Multiply(Step(w, x), products);
    w += 16;
    x += 4;
    size_t i = 1;
    for (; i + 2 <= run; i += 2) {
      const Step first(w, x), second(w + 16, x + 4);
      MultiplyAdd(first, products);
      MultiplyAdd(second, products);
      w += 32;
      x += 8;
    }
    if (i < run) {
      MultiplyAdd(Step(w, x), products);
      w += 16;
      x += 4;
    }
#pragma GCC unroll 4
    for (size_t p = 0; p < kPixels; ++p) {
      acc[p][0] = vpadalq_s16(acc[p][0], products[p][0]);
      acc[p][1] = vpadalq_s16(acc[p][1], products[p][1]);
    }
  }
#pragma GCC unroll 4
  for (size_t p = 0; p < kPixels; ++p) {
    vst1q_s32(t.sums + p * kChannels, acc[p][0]);
    vst1q_s32(t.sums + p * kChannels + 4, acc[p][1]);
  }
}

size_t Flush(const GemmOperands& operands) {
  return LongestSafeRun(operands, 2, INT16_MIN, INT16_MAX, kMaxFlush);
}

// Of 64 products a step: 8 multiplications, loads of 4 cycles, and 8 SADALP a flush (modelled Cortex-A53).
double MacsPerCycle(size_t flush) { return 64.0 / (12.0 + 8.0 / static_cast<double>(flush)); }

}  // namespace

const GemmScheme kGemmSmull = {kChannels, 2, 2, GemmForm::kBytes, &Flush, &MacsPerCycle, {&Tile}};

}  // namespace lowbit
