// Winograd F(4x4, 3x3) with 16-bit operands and 32-bit sums: SMLAL, for operands of up to 8 bits. ARMv8.0.
//
// The usual points 0, 1, -1, 2, -2, infinity, whose transforms grow the operands least: 68 times a byte, 144
// times a weight, inside 16 bits. G is 24 times its fractions, but 6 instead of 24 at infinity, where A makes
// up for it; scale = 24, so 576 y = 9 * 64 y is found modulo 2^32, and y modulo 2^26.
//
// With e0 = d2 - d0 and so on to e3 = d5 - d3 the values at the points are
//
//   0        4 d0 - 5 d2 + d4              e2 - 4 e0
//   +-1      (d4 - 4 d2) +- (d3 - 4 d1)    (e2 - 3 d2) +- (e1 - 3 d1)
//   +-2      (d4 - d2) +- 2 (d3 - d1)      e2 +- 2 e1
//   infinity 4 d1 - 5 d3 + d5              e3 - 4 e1
#include <arm_neon.h>

#include <cstdint>

#include "kernels/arm/winograd_scheme.h"
#include "kernels/arm/winograd_transform.h"

namespace lowbit {
namespace {

constexpr size_t kChannels = 8;
// 1 / 9 modulo 2^32
constexpr uint32_t kNinth = 954437177;
static_assert(9 * kNinth == 1);

struct Points {
  static constexpr int kOne = 1;

  template <class D>
  static inline LOWBIT_ALWAYS_INLINE void Inputs(const D (&d)[6], int16x8_t (&r)[6]) {
    const int16x8_t e0 = Minus(d[2], d[0]), e1 = Minus(d[3], d[1]);
    const int16x8_t e2 = Minus(d[4], d[2]), e3 = Minus(d[5], d[3]);
    const int16x8_t even = MinusProduct(e2, d[2], 3), odd = MinusProduct(e1, d[1], 3);
    r[0] = vmlsq_n_s16(e2, e0, 4);
    r[1] = vaddq_s16(even, odd);
    r[2] = vsubq_s16(even, odd);
    r[3] = vmlaq_n_s16(e2, e1, 2);
    r[4] = vmlsq_n_s16(e2, e1, 2);
    r[5] = vmlsq_n_s16(e3, e1, 4);
  }

  static inline LOWBIT_ALWAYS_INLINE void Outputs(const int32x4_t (&t)[6], int32x4_t (&y)[4]) {
    const int32x4_t s1 = vaddq_s32(t[1], t[2]), d1 = vsubq_s32(t[1], t[2]);
    const int32x4_t s2 = vaddq_s32(t[3], t[4]), d2 = vsubq_s32(t[3], t[4]);
    y[0] = vaddq_s32(vaddq_s32(t[0], s1), s2);
    y[1] = vmlaq_n_s32(d1, d2, 2);
    y[2] = vmlaq_n_s32(s1, s2, 4);
    y[3] = vmlaq_n_s32(vmlaq_n_s32(d1, d2, 8), t[5], 4);
  }
};

void Weights(const int32_t* taps, int16_t* to) {
  constexpr int32_t kG[kWinogradWindow][3] = {{6, 0, 0}, {-4, -4, -4}, {-4, 4, -4},
                                              {1, 2, 4}, {1, -2, 4},   {0, 0, 6}};
  int32_t values[kWinogradPoints];
  TransformWeights(taps, kG, values);
  for (size_t i = 0; i < kWinogradPoints; ++i) to[i] = static_cast<int16_t>(values[i]);
}

void Output(const WinogradOutput& out) {
  const uint8_t* products = out.products;
  int32_t* sums = out.sums;
  for (size_t tile = 0; tile < out.tiles; ++tile, products += kWinogradProductBytes) {
#pragma GCC unroll 1
    for (size_t half = 0; half < kChannels; half += 4) {
      const auto load = [&](int point) LOWBIT_ALWAYS_INLINE {
        return vld1q_s32(
            reinterpret_cast<const int32_t*>(products + static_cast<size_t>(point) * out.point_pitch) + half);
      };
      const int32x4_t offset = vmulq_n_s32(vld1q_s32(out.offset + half), 576);
      int32x4_t y[kWinogradTile][kWinogradTile];
      TransformOutputs<Points>(load, offset, y);
      const int32x4_t ninth = vreinterpretq_s32_u32(vdupq_n_u32(kNinth));
      int32_t* to = sums + half;
      const int32x4_t base = out.base != nullptr ? vld1q_s32(out.base + half) : vdupq_n_s32(0);
#pragma GCC unroll 16
      for (size_t i = 0; i < kWinogradOutputs; ++i) {
        int32_t* at = to + i * kChannels;
        const int32x4_t before = out.base != nullptr ? base : vld1q_s32(at);
        vst1q_s32(at, vsraq_n_s32(before, vmulq_s32(y[i / 4][i % 4], ninth), 6));
      }
    }
    sums += kWinogradOutputs * kChannels;
  }
}

// The products. Registers: v0..v7 8 channels of a tile each, v8..v11 four steps' weights, v16..v31 sums. A
// step multiplies one channel of every tile with its 8 weights, which were loaded three steps ahead; the next
// block's channels take the place of this one's behind their last use. 128-bit loads are in three parts as in
// winograd_mla.cc.
//
// clang-format off
#define LOWBIT_FIRST(x, s, w, k)  "smlal v" #s ".4s, v" #w ".4h, v" #x ".h[" #k "]\n"
#define LOWBIT_SECOND(x, s, w, k) "smlal2 v" #s ".4s, v" #w ".8h, v" #x ".h[" #k "]\n"
#define LOWBIT_TILE(x, s0, s1, w, k) LOWBIT_FIRST(x, s0, w, k) LOWBIT_SECOND(x, s1, w, k)
#define LOWBIT_INSERT(done, t) "mov v" #done ".d[1], %[" #t "]\n"
#define LOWBIT_LOW(next, from, offset) "ldr d" #next ", [%[" #from "], #" #offset "]\n"
#define LOWBIT_HIGH(t, from, offset) "ldr %[" #t "], [%[" #from "], #" #offset "]\n"

// One of the steps 0..6 for 8 tiles: `insert` completes what was loaded two loads ago through t, v`next` is
// loaded from byte `at` of w; `late` is a second insertion.
#define LOWBIT_STEP8(k, wk, insert, t, next, at, at_high, late)                        \
  LOWBIT_TILE(0, 16, 17, wk, k)                                                        \
  insert LOWBIT_LOW(next, w, at)                                                       \
  LOWBIT_FIRST(1, 18, wk, k) LOWBIT_HIGH(t, w, at_high) LOWBIT_SECOND(1, 19, wk, k)    \
  LOWBIT_TILE(2, 20, 21, wk, k)                                                        \
  late                                                                                 \
  LOWBIT_TILE(3, 22, 23, wk, k)                                                        \
  LOWBIT_TILE(4, 24, 25, wk, k)                                                        \
  LOWBIT_TILE(5, 26, 27, wk, k)                                                        \
  LOWBIT_TILE(6, 28, 29, wk, k)                                                        \
  LOWBIT_TILE(7, 30, 31, wk, k)

#define LOWBIT_STEP4(k, wk, insert, t, next, at, at_high, late)                        \
  LOWBIT_FIRST(0, 16, wk, k)                                                           \
  insert LOWBIT_LOW(next, w, at)                                                       \
  LOWBIT_SECOND(0, 17, wk, k) LOWBIT_HIGH(t, w, at_high)                               \
  late                                                                                 \
  LOWBIT_TILE(1, 18, 19, wk, k)                                                        \
  LOWBIT_TILE(2, 20, 21, wk, k)                                                        \
  LOWBIT_TILE(3, 22, 23, wk, k)

#define LOWBIT_ZERO(n) "movi v" #n ".4s, #0\n"
#define LOWBIT_CLOBBERS                                                                                              \
  "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v16", "v17", "v18",     \
      "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31"

void Product8(const int16_t* x, const int16_t* w, size_t blocks, void* to) {
  uint64_t a, b;
  asm volatile(
      "ldp q0, q1, [%[x]]\n ldp q2, q3, [%[x], #32]\n ldp q4, q5, [%[x], #64]\n ldp q6, q7, [%[x], #96]\n"
      "ldp q8, q9, [%[w]]\n ldr q10, [%[w], #32]\n"
      LOWBIT_HIGH(a, x, 104)
      LOWBIT_ZERO(16) LOWBIT_ZERO(17) LOWBIT_ZERO(18) LOWBIT_ZERO(19) LOWBIT_ZERO(20) LOWBIT_ZERO(21)
      LOWBIT_ZERO(22) LOWBIT_ZERO(23) LOWBIT_ZERO(24) LOWBIT_ZERO(25) LOWBIT_ZERO(26) LOWBIT_ZERO(27)
      LOWBIT_ZERO(28) LOWBIT_ZERO(29) LOWBIT_ZERO(30) LOWBIT_ZERO(31)
      "1:\n"
      LOWBIT_HIGH(b, x, 120)
      LOWBIT_STEP8(0, 8, LOWBIT_INSERT(6, a), a, 11, 48, 56, LOWBIT_INSERT(7, b))
      LOWBIT_STEP8(1, 9, "", b, 8, 64, 72, "")
      LOWBIT_STEP8(2, 10, LOWBIT_INSERT(11, a), a, 9, 80, 88, "")
      LOWBIT_STEP8(3, 11, LOWBIT_INSERT(8, b), b, 10, 96, 104, "")
      LOWBIT_STEP8(4, 8, LOWBIT_INSERT(9, a), a, 11, 112, 120, "")
      LOWBIT_STEP8(5, 9, LOWBIT_INSERT(10, b), b, 8, 128, 136, "")
      LOWBIT_STEP8(6, 10, LOWBIT_INSERT(11, a), a, 9, 144, 152, "")
      "subs %[blocks], %[blocks], #1\n"
      LOWBIT_FIRST(0, 16, 11, 7)
      LOWBIT_INSERT(8, b) LOWBIT_LOW(10, w, 160)
      LOWBIT_SECOND(0, 17, 11, 7) LOWBIT_HIGH(b, w, 168)
      LOWBIT_INSERT(9, a) LOWBIT_LOW(0, x, 128)
      LOWBIT_FIRST(1, 18, 11, 7) LOWBIT_HIGH(a, x, 136) LOWBIT_SECOND(1, 19, 11, 7)
      LOWBIT_INSERT(10, b) LOWBIT_LOW(1, x, 144)
      LOWBIT_FIRST(2, 20, 11, 7) LOWBIT_HIGH(b, x, 152) LOWBIT_SECOND(2, 21, 11, 7)
      LOWBIT_INSERT(0, a) LOWBIT_LOW(2, x, 160)
      LOWBIT_FIRST(3, 22, 11, 7) LOWBIT_HIGH(a, x, 168) LOWBIT_SECOND(3, 23, 11, 7)
      LOWBIT_INSERT(1, b) LOWBIT_LOW(3, x, 176)
      LOWBIT_FIRST(4, 24, 11, 7) LOWBIT_HIGH(b, x, 184) LOWBIT_SECOND(4, 25, 11, 7)
      LOWBIT_INSERT(2, a) LOWBIT_LOW(4, x, 192)
      LOWBIT_FIRST(5, 26, 11, 7) LOWBIT_HIGH(a, x, 200) LOWBIT_SECOND(5, 27, 11, 7)
      LOWBIT_INSERT(3, b) LOWBIT_LOW(5, x, 208)
      LOWBIT_FIRST(6, 28, 11, 7) LOWBIT_HIGH(b, x, 216) LOWBIT_SECOND(6, 29, 11, 7)
      LOWBIT_INSERT(4, a) LOWBIT_LOW(6, x, 224)
      LOWBIT_FIRST(7, 30, 11, 7) LOWBIT_HIGH(a, x, 232) LOWBIT_SECOND(7, 31, 11, 7)
      LOWBIT_INSERT(5, b) LOWBIT_LOW(7, x, 240)
      "add %[w], %[w], #128\n"
      "add %[x], %[x], #128\n"
      "b.ne 1b\n"
      "stp q16, q17, [%[to]]\n stp q18, q19, [%[to], #32]\n stp q20, q21, [%[to], #64]\n stp q22, q23, [%[to], #96]\n"
      "stp q24, q25, [%[to], #128]\n stp q26, q27, [%[to], #160]\n stp q28, q29, [%[to], #192]\n stp q30, q31, [%[to], #224]\n"
      : [x] "+r"(x), [w] "+r"(w), [blocks] "+r"(blocks), [a] "=&r"(a), [b] "=&r"(b)
      : [to] "r"(to)
      : LOWBIT_CLOBBERS);
}

void Product4(const int16_t* x, const int16_t* w, size_t blocks, void* to) {
  uint64_t a, b;
  asm volatile(
      "ldp q0, q1, [%[x]]\n ldp q2, q3, [%[x], #32]\n"
      "ldp q8, q9, [%[w]]\n ldr q10, [%[w], #32]\n"
      LOWBIT_HIGH(a, x, 40)
      LOWBIT_ZERO(16) LOWBIT_ZERO(17) LOWBIT_ZERO(18) LOWBIT_ZERO(19) LOWBIT_ZERO(20) LOWBIT_ZERO(21)
      LOWBIT_ZERO(22) LOWBIT_ZERO(23)
      "1:\n"
      LOWBIT_HIGH(b, x, 56)
      LOWBIT_STEP4(0, 8, LOWBIT_INSERT(2, a), a, 11, 48, 56, LOWBIT_INSERT(3, b))
      LOWBIT_STEP4(1, 9, "", b, 8, 64, 72, "")
      LOWBIT_STEP4(2, 10, LOWBIT_INSERT(11, a), a, 9, 80, 88, "")
      LOWBIT_STEP4(3, 11, LOWBIT_INSERT(8, b), b, 10, 96, 104, "")
      LOWBIT_STEP4(4, 8, LOWBIT_INSERT(9, a), a, 11, 112, 120, "")
      LOWBIT_STEP4(5, 9, LOWBIT_INSERT(10, b), b, 8, 128, 136, "")
      LOWBIT_STEP4(6, 10, LOWBIT_INSERT(11, a), a, 9, 144, 152, "")
      "subs %[blocks], %[blocks], #1\n"
      LOWBIT_FIRST(0, 16, 11, 7)
      LOWBIT_INSERT(8, b) LOWBIT_LOW(10, w, 160)
      LOWBIT_SECOND(0, 17, 11, 7) LOWBIT_HIGH(b, w, 168)
      LOWBIT_INSERT(9, a) LOWBIT_LOW(0, x, 64)
      LOWBIT_FIRST(1, 18, 11, 7) LOWBIT_HIGH(a, x, 72) LOWBIT_SECOND(1, 19, 11, 7)
      LOWBIT_INSERT(10, b) LOWBIT_LOW(1, x, 80)
      LOWBIT_FIRST(2, 20, 11, 7) LOWBIT_HIGH(b, x, 88) LOWBIT_SECOND(2, 21, 11, 7)
      LOWBIT_INSERT(0, a) LOWBIT_LOW(2, x, 96)
      LOWBIT_FIRST(3, 22, 11, 7) LOWBIT_HIGH(a, x, 104) LOWBIT_SECOND(3, 23, 11, 7)
      LOWBIT_INSERT(1, b) LOWBIT_LOW(3, x, 112)
      "add %[w], %[w], #128\n"
      "add %[x], %[x], #64\n"
      "b.ne 1b\n"
      "stp q16, q17, [%[to]]\n stp q18, q19, [%[to], #32]\n stp q20, q21, [%[to], #64]\n stp q22, q23, [%[to], #96]\n"
      : [x] "+r"(x), [w] "+r"(w), [blocks] "+r"(blocks), [a] "=&r"(a), [b] "=&r"(b)
      : [to] "r"(to)
      : LOWBIT_CLOBBERS);
}
// clang-format on

}  // namespace

// 8 channels' steps of 8 tiles are 128 multiplications, 16 loads and an insertion.
const WinogradScheme kWinogradSmlal = {
    kChannels, 26,        INT16_MAX / 144, &Weights, &TransformInputs<Points>,
    &Product4, &Product8, &Output,         78,       146,
    400,       600};

}  // namespace lowbit
