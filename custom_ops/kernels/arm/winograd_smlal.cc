// Winograd F(4x4, 3x3) with 16-bit operands and 32-bit sums: SMLAL, for operands of up to 8 bits. ARMv8.0.
//
// The usual points 0, 1, -1, 2, -2, infinity, whose transforms grow the operands least: 68 times a byte, 49
// times a weight, inside 16 bits. G holds powers of two, A the rest: scale = 24, so 576 y = 9 * 64 y is found
// modulo 2^32, and y modulo 2^26.
//
// With e0 = d2 - d0 and so on to e3 = d5 - d3 the values at the points are
//
//   0        4 d0 - 5 d2 + d4              e2 - 4 e0
//   +-1      (d4 - 4 d2) +- (d3 - 4 d1)    (e2 - 3 d2) +- (e1 - 3 d1)
//   +-2      (d4 - d2) +- 2 (d3 - d1)      e2 +- 2 e1
//   infinity 4 d1 - 5 d3 + d5              e3 - 4 e1
#include <arm_neon.h>

#include <cstdint>

#include "kernels/arm/winograd_product.h"
#include "kernels/arm/winograd_scheme.h"
#include "kernels/arm/winograd_transform.h"

namespace lowbit {
namespace {

constexpr size_t kChannels = 8;
// 1 / 9 modulo 2^32
constexpr uint32_t kNinth = 954437177;
static_assert(9 * kNinth == 1);

struct Points {
  static constexpr bool kWords = true;
  static constexpr int kTile = 4, kOne = 1, kOneFactor = -4;

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

  static inline LOWBIT_ALWAYS_INLINE void Weights(const int16x8_t (&w)[3], int16x8_t (&r)[6]) {
    const int16x8_t s = vaddq_s16(w[0], w[2]), m = vshlq_n_s16(w[1], 1);
    const int16x8_t e = vaddq_s16(w[0], vshlq_n_s16(w[2], 2));
    r[0] = w[0];
    r[1] = vaddq_s16(s, w[1]);
    r[2] = vsubq_s16(s, w[1]);
    r[3] = vaddq_s16(e, m);
    r[4] = vsubq_s16(e, m);
    r[5] = w[2];
  }

  // 6 t0, -4 t1, -4 t2, t3, t4 and 24 t5 times the powers of the points.
  static inline LOWBIT_ALWAYS_INLINE void Outputs(const int32x4_t (&t)[6], int32x4_t (&y)[4]) {
    const int32x4_t s1 = vaddq_s32(t[1], t[2]), d1 = vsubq_s32(t[2], t[1]);
    const int32x4_t s2 = vaddq_s32(t[3], t[4]), d2 = vsubq_s32(t[3], t[4]);
    y[0] = vmlsq_n_s32(vmlaq_n_s32(s2, t[0], 6), s1, 4);
    y[1] = vshlq_n_s32(vmlaq_n_s32(d2, d1, 2), 1);
    y[2] = vshlq_n_s32(vsubq_s32(s2, s1), 2);
    y[3] = vshlq_n_s32(vmlaq_n_s32(vmlaq_n_s32(d1, d2, 2), t[5], 6), 2);
  }
};

// Without branches inside a row: what is independent can run side by side.
template <bool kDirect, bool kAdds>
void OutputTiles(const WinogradOutput& out) {
  constexpr int kT = static_cast<int>(Points::kTile);
  int32x4_t offset[2], base[2];
  for (size_t v = 0; v < 2; ++v) {
    offset[v] = vmulq_n_s32(vld1q_s32(out.offset + 4 * v), 576 / Points::kOneFactor);
    base[v] = kAdds ? vdupq_n_s32(0) : vld1q_s32(out.base + 4 * v);
  }
  const int32x4_t ninth = vreinterpretq_s32_u32(vdupq_n_u32(kNinth));
  const Requantizer<2> requantizer(*out.epilogue, out.channel);
  const size_t y_pitch = out.epilogue->channels, point_pitch = out.point_pitch / sizeof(int32_t);
  for (size_t tile = 0; tile < out.tiles; ++tile) {
    const auto* products = reinterpret_cast<const int32_t*>(out.products + tile * kWinogradProductBytes);
    const auto load = [&](int point, int v) LOWBIT_ALWAYS_INLINE {
      return vld1q_s32(products + static_cast<size_t>(point) * point_pitch + v * 4);
    };
    int32_t* sums = out.sums + tile * Points::kTile * kChannels;
    WinogradDirect direct{};
    if (kDirect) direct = out.direct[tile];
    const auto finish = [&](int row, const int32x4_t(&y)[2][Points::kTile]) LOWBIT_ALWAYS_INLINE {
      if (kDirect && static_cast<size_t>(row) >= direct.rows) return;
      int32x4_t sum[2 * kT];  // [pixel][vector]
#pragma GCC unroll 8
      for (int i = 0; i < 2 * kT; ++i) {
        const int32x4_t before = kAdds ? vld1q_s32(sums + 4 * i) : base[i % 2];
        sum[i] = vsraq_n_s32(before, vmulq_s32(y[i % 2][i / 2], ninth), 6);
        if (!kDirect) vst1q_s32(sums + 4 * i, sum[i]);
      }
      sums += out.row_pitch;
      if (!kDirect) return;
#pragma GCC unroll 8
      for (int i = 0; i < 2 * kT; ++i) sum[i] = requantizer.Code(sum[i], i % 2);
      const uint8x16_t first = requantizer.Pack({sum[0], sum[1], sum[2], sum[3]});
      const uint8x16_t second = requantizer.Pack({sum[4], sum[5], sum[6], sum[7]});
      uint8_t* to = direct.y;
      direct.y += out.y_row_pitch;
      vst1_u8(to, vget_low_u8(first));
      if (direct.columns > 1) vst1_u8(to + y_pitch, vget_high_u8(first));
      if (direct.columns > 2) vst1_u8(to + 2 * y_pitch, vget_low_u8(second));
      if (direct.columns > 3) vst1_u8(to + 3 * y_pitch, vget_high_u8(second));
    };
    TransformOutputs<Points, 2>(load, offset, finish);
  }
}

template <bool kDirect>
void OutputDirect(const WinogradOutput& out) {
  return out.base != nullptr ? OutputTiles<kDirect, false>(out) : OutputTiles<kDirect, true>(out);
}

void Output(const WinogradOutput& out) {
  return out.direct != nullptr ? OutputDirect<true>(out) : OutputDirect<false>(out);
}

// The products, in the frame of winograd_product.h. Weights are v8..v11, those of four steps: a step multiplies a
// channel with 8 weights, which were loaded three steps ahead.
//
// clang-format off
#define LOWBIT_FIRST(x, s, w, k)  "smlal v" #s ".4s, v" #w ".4h, v" #x ".h[" #k "]\n"
#define LOWBIT_SECOND(x, s, w, k) "smlal2 v" #s ".4s, v" #w ".8h, v" #x ".h[" #k "]\n"
#define LOWBIT_TILE(x, s0, s1, w, k) LOWBIT_FIRST(x, s0, w, k) LOWBIT_SECOND(x, s1, w, k)
#define LOWBIT_INSERT(done, t) "mov v" #done ".d[1], %[" #t "]\n"
#define LOWBIT_LOW(next, from, offset) "ldr d" #next ", [%[" #from "], #" #offset "]\n"

// One of the steps 0..6 for 8 tiles: `insert` completes what was loaded two loads ago through t, v`next` is
// loaded from byte `at` of `from`; `late` is a second insertion.
#define LOWBIT_STEP8(k, wk, insert, t, next, from, at, at_high, late)                        \
  LOWBIT_TILE(0, 16, 17, wk, k)                                                        \
  insert LOWBIT_LOW(next, from, at)                                                       \
  LOWBIT_FIRST(1, 18, wk, k) LOWBIT_HIGH(t, from, at_high) LOWBIT_SECOND(1, 19, wk, k)    \
  LOWBIT_TILE(2, 20, 21, wk, k)                                                        \
  late                                                                                 \
  LOWBIT_TILE(3, 22, 23, wk, k)                                                        \
  LOWBIT_TILE(4, 24, 25, wk, k)                                                        \
  LOWBIT_TILE(5, 26, 27, wk, k)                                                        \
  LOWBIT_TILE(6, 28, 29, wk, k)                                                        \
  LOWBIT_TILE(7, 30, 31, wk, k)

#define LOWBIT_STEP4(k, wk, insert, t, next, from, at, at_high, late)                        \
  LOWBIT_FIRST(0, 16, wk, k)                                                           \
  insert LOWBIT_LOW(next, from, at)                                                       \
  LOWBIT_SECOND(0, 17, wk, k) LOWBIT_HIGH(t, from, at_high)                               \
  late                                                                                 \
  LOWBIT_TILE(1, 18, 19, wk, k)                                                        \
  LOWBIT_TILE(2, 20, 21, wk, k)                                                        \
  LOWBIT_TILE(3, 22, 23, wk, k)

#define LOWBIT_FIRST_WEIGHTS "ldp q8, q9, [%[w]]\n ldr q10, [%[w], #32]\n"

// The last step: the weights of the next block's third step, and its channels.
#define LOWBIT_LAST4                                                                                             \
  LOWBIT_FIRST(0, 16, 11, 7)                                                                                     \
  LOWBIT_INSERT(8, b) LOWBIT_LOW(10, next_w, 32)                                                                 \
  LOWBIT_SECOND(0, 17, 11, 7) LOWBIT_HIGH(b, next_w, 40)                                                         \
  LOWBIT_INSERT(9, a) LOWBIT_LOW(0, next_x, 0)                                                                   \
  LOWBIT_FIRST(1, 18, 11, 7) LOWBIT_HIGH(a, next_x, 8)                                                           \
  LOWBIT_SECOND(1, 19, 11, 7)                                                                                    \
  LOWBIT_INSERT(10, b) LOWBIT_LOW(1, next_x, 16)                                                                 \
  "mov %[w], %[next_w]\n"                                                                                        \
  LOWBIT_FIRST(2, 20, 11, 7) LOWBIT_HIGH(b, next_x, 24)                                                          \
  LOWBIT_SECOND(2, 21, 11, 7)                                                                                    \
  LOWBIT_INSERT(0, a) LOWBIT_LOW(2, next_x, 32)                                                                  \
  "mov %[x], %[next_x]\n"                                                                                        \
  LOWBIT_FIRST(3, 22, 11, 7) LOWBIT_HIGH(a, next_x, 40)                                                          \
  LOWBIT_SECOND(3, 23, 11, 7)                                                                                    \
  LOWBIT_INSERT(1, b) LOWBIT_LOW(3, next_x, 48)
#define LOWBIT_LAST8                                                                                             \
  LOWBIT_LAST4                                                                                                   \
  LOWBIT_FIRST(4, 24, 11, 7) LOWBIT_HIGH(b, next_x, 56)                                                          \
  LOWBIT_SECOND(4, 25, 11, 7)                                                                                    \
  LOWBIT_INSERT(2, a) LOWBIT_LOW(4, next_x, 64)                                                                  \
  LOWBIT_FIRST(5, 26, 11, 7) LOWBIT_HIGH(a, next_x, 72)                                                          \
  LOWBIT_SECOND(5, 27, 11, 7)                                                                                    \
  LOWBIT_INSERT(3, b) LOWBIT_LOW(5, next_x, 80)                                                                  \
  LOWBIT_FIRST(6, 28, 11, 7) LOWBIT_HIGH(b, next_x, 88)                                                          \
  LOWBIT_SECOND(6, 29, 11, 7)                                                                                    \
  LOWBIT_INSERT(4, a) LOWBIT_LOW(6, next_x, 96)                                                                  \
  LOWBIT_FIRST(7, 30, 11, 7) LOWBIT_HIGH(a, next_x, 104)                                                         \
  LOWBIT_SECOND(7, 31, 11, 7)                                                                                    \
  LOWBIT_INSERT(5, b) LOWBIT_LOW(7, next_x, 112)

// d0 and d1: the vectors of channels whose upper halves are in a and b.
#define LOWBIT_STEPS(STEP, d0, d1, last)                                                                         \
  LOWBIT_BLOCK(STEP(0, 8, LOWBIT_INSERT(d0, a), a, 11, w, 48, 56, LOWBIT_INSERT(d1, b)),                         \
  STEP(1, 9, "", b, 8, w, 64, 72, ""),                                                                           \
  STEP(2, 10, LOWBIT_INSERT(11, a), a, 9, w, 80, 88, ""),                                                        \
  STEP(3, 11, LOWBIT_INSERT(8, b), b, 10, w, 96, 104, ""),                                                       \
  STEP(4, 8, LOWBIT_INSERT(9, a), a, 11, w, 112, 120, ""),                                                       \
  STEP(5, 9, LOWBIT_INSERT(10, b), b, 8, next_w, 0, 8, ""),                                                      \
  STEP(6, 10, LOWBIT_INSERT(11, a), a, 9, next_w, 16, 24, ""),                                                   \
  last)
#define LOWBIT_STEPS4 LOWBIT_STEPS(LOWBIT_STEP4, 2, 3, LOWBIT_LAST4)
#define LOWBIT_STEPS8 LOWBIT_STEPS(LOWBIT_STEP8, 6, 7, LOWBIT_LAST8)

LOWBIT_PRODUCT(Product8, 8, 128)
LOWBIT_PRODUCT(Product4, 4, 128)
// clang-format on

}  // namespace

// 8 channels' steps of 8 tiles are 128 multiplications, 16 loads and an insertion (modelled Cortex-A53). On
// A72 the loads run beside the products, and everything else takes about half as many cycles.
const WinogradScheme kWinogradSmlal = {
    .tile = Points::kTile,
    .channels = kChannels,
    .code_bytes = 2,
    .block = 8,
    .unit = 1,
    .signed_inputs = false,
    .bits = 26,
    .chunks_per_widening = 1,
    .g = {{1, 0, 0}, {1, 1, 1}, {1, -1, 1}, {1, 2, 4}, {1, -2, 4}, {0, 0, 1}},
    .weights4 = &TransformWeights<Points, 4>,
    .weights8 = &TransformWeights<Points, 8>,
    .input = &TransformWords<Points>,
    .product4 = &Product4,
    .product8 = &Product8,
    .output = &Output,
    .in_order = {.product4 = 79,
                 .product8 = 147,
                 .weights = 1030,
                 .input = 496,
                 .output = 700,
                 .finish = 200,
                 .sums = 90},
    .out_of_order = {.product4 = 66,
                     .product8 = 131,
                     .weights = 570,
                     .input = 270,
                     .output = 385,
                     .finish = 110,
                     .sums = 60},
};

}  // namespace lowbit
