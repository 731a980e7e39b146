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

// 8 pixels.
constexpr int kPixels = 8;

struct Step {
  int16x8_t w, x;

  Step(const int16_t* w_at, const int16_t* x_at) : w(vld1q_s16(w_at)), x(vld1q_s16(x_at)) {}

  template <bool kFirst>
  void Multiply(int16x8_t (&t)[kPixels]) const {
    t[0] = Product<kFirst, 0>(t[0], w, x);
    t[1] = Product<kFirst, 1>(t[1], w, x);
    t[2] = Product<kFirst, 2>(t[2], w, x);
    t[3] = Product<kFirst, 3>(t[3], w, x);
    t[4] = Product<kFirst, 4>(t[4], w, x);
    t[5] = Product<kFirst, 5>(t[5], w, x);
    t[6] = Product<kFirst, 6>(t[6], w, x);
    t[7] = Product<kFirst, 7>(t[7], w, x);
  }
};

void Tile8(const GemmTile& tile) {
  const auto* w = reinterpret_cast<const int16_t*>(tile.w);
  const auto* x = reinterpret_cast<const int16_t*>(tile.x);
  GemmBegin begin(tile, kChannels);
  for (size_t left = tile.steps; left > 0;) {
    int16x8_t s[kPixels];
#pragma GCC unroll 8
    for (int p = 0; p < kPixels; ++p) s[p] = vdupq_n_s16(0);
    for (size_t flushes = 0; flushes < kFlushesPerWidening && left > 0; ++flushes) {
      const size_t run = left < tile.flush ? left : tile.flush;
      left -= run;
      int16x8_t t[kPixels];
      const auto step = [&](size_t i) { return Step(w + 8 * i, x + 8 * i); };
      step(0).template Multiply<true>(t);
      size_t i = 1;
      for (; i + 2 <= run; i += 2) {
        const Step first = step(i), second = step(i + 1);
        first.template Multiply<false>(t);
        second.template Multiply<false>(t);
      }
      if (i < run) step(i).template Multiply<false>(t);
      w += 8 * run;
      x += 8 * run;
#pragma GCC unroll 8
      for (int p = 0; p < kPixels; ++p) s[p] = vrsraq_n_s16(s[p], t[p], 8);
    }
#pragma GCC unroll 8
    for (int p = 0; p < kPixels; ++p) {
      const int32_t* from = begin.Of(static_cast<size_t>(p));
      int32_t* sums = tile.sums + static_cast<size_t>(p) * kChannels;
      vst1q_s32(sums, vaddw_s16(vld1q_s32(from), vget_low_s16(s[p])));
      vst1q_s32(sums + 4, vaddw_high_s16(vld1q_s32(from + 4), s[p]));
    }
    begin = GemmBegin(tile.sums, kChannels);
  }
}

// The same for 12 pixels, in assembly: 12 sums of products (v8..v19), 12 of d (v20..v31) and the operands of
// two steps (A: v0 weights, v1 and v2 pixels; B: v3, v4, v5) are all the registers there are, and on in-order
// cores the loads of one step must run beside the products of the other. Vectors are loaded in halves, the
// upper one by way of a general register: on a Cortex-A53 a 128-bit load blocks the multiplier for two
// cycles, the halves for one.
// clang-format off
#define LOWBIT_STEP(OP, W, X8, X4, NEXT_W, NEXT_X8, NEXT_X4)  \
  OP " v8.8h, v" W ".8h, v" X8 ".h[0]\n"                      \
  "ldr d" NEXT_W ", [%[w]], #16\n"                            \
  OP " v9.8h, v" W ".8h, v" X8 ".h[1]\n"                      \
  OP " v10.8h, v" W ".8h, v" X8 ".h[2]\n"                     \
  "ldr %[high], [%[w], #-8]\n"                                \
  OP " v11.8h, v" W ".8h, v" X8 ".h[3]\n"                     \
  OP " v12.8h, v" W ".8h, v" X8 ".h[4]\n"                     \
  "ins v" NEXT_W ".d[1], %[high]\n"                           \
  "ldr d" NEXT_X8 ", [%[x8]], #16\n"                          \
  OP " v13.8h, v" W ".8h, v" X8 ".h[5]\n"                     \
  OP " v14.8h, v" W ".8h, v" X8 ".h[6]\n"                     \
  "ldr %[high], [%[x8], #-8]\n"                               \
  OP " v15.8h, v" W ".8h, v" X8 ".h[7]\n"                     \
  OP " v16.8h, v" W ".8h, v" X4 ".h[0]\n"                     \
  "ins v" NEXT_X8 ".d[1], %[high]\n"                          \
  "ldr d" NEXT_X4 ", [%[x4]], #8\n"                           \
  OP " v17.8h, v" W ".8h, v" X4 ".h[1]\n"                     \
  OP " v18.8h, v" W ".8h, v" X4 ".h[2]\n"                     \
  "subs %[count], %[count], #1\n"                             \
  OP " v19.8h, v" W ".8h, v" X4 ".h[3]\n"
#define LOWBIT_STEP_A(OP) LOWBIT_STEP(OP, "0", "1", "2", "3", "4", "5")
#define LOWBIT_STEP_B(OP) LOWBIT_STEP(OP, "3", "4", "5", "0", "1", "2")
// Adds d; then another run of products, or the end.
#define LOWBIT_FLUSH                       \
  "srsra v20.8h, v8.8h, #8\n"              \
  "cmp %[left], %[flush]\n"                \
  "srsra v21.8h, v9.8h, #8\n"              \
  "csel %[count], %[left], %[flush], lo\n" \
  "srsra v22.8h, v10.8h, #8\n"             \
  "sub %[left], %[left], %[count]\n"       \
  "srsra v23.8h, v11.8h, #8\n"             \
  "srsra v24.8h, v12.8h, #8\n"             \
  "srsra v25.8h, v13.8h, #8\n"             \
  "srsra v26.8h, v14.8h, #8\n"             \
  "srsra v27.8h, v15.8h, #8\n"             \
  "srsra v28.8h, v16.8h, #8\n"             \
  "srsra v29.8h, v17.8h, #8\n"             \
  "srsra v30.8h, v18.8h, #8\n"             \
  "srsra v31.8h, v19.8h, #8\n"             \
  "cbz %[count], 9f\n"
// All runs. One may begin with step A or with step B, because runs may be odd.
#define LOWBIT_RUNS                        \
  "1:\n" LOWBIT_STEP_A("mul")              \
  "b.eq 4f\n"                              \
  "2:\n" LOWBIT_STEP_B("mla")              \
  "b.eq 5f\n"                              \
  "3:\n" LOWBIT_STEP_A("mla")              \
  "b.ne 2b\n"                              \
  "4:\n" LOWBIT_FLUSH LOWBIT_STEP_B("mul") \
  "b.ne 3b\n"                              \
  "5:\n" LOWBIT_FLUSH                      \
  "b 1b\n"                                 \
  "9:\n"
// Four pixels' d to their 32-bit sums.
#define LOWBIT_WIDEN(D0, D1, D2, D3, AT0, AT1, AT2, AT3)  \
  "ldp q0, q1, [%[sums], #" AT0 "]\n"                     \
  "ldp q2, q3, [%[sums], #" AT1 "]\n"                     \
  "ldp q4, q5, [%[sums], #" AT2 "]\n"                     \
  "ldp q6, q7, [%[sums], #" AT3 "]\n"                     \
  "saddw v0.4s, v0.4s, v" D0 ".4h\n"                      \
  "saddw2 v1.4s, v1.4s, v" D0 ".8h\n"                     \
  "saddw v2.4s, v2.4s, v" D1 ".4h\n"                      \
  "saddw2 v3.4s, v3.4s, v" D1 ".8h\n"                     \
  "saddw v4.4s, v4.4s, v" D2 ".4h\n"                      \
  "saddw2 v5.4s, v5.4s, v" D2 ".8h\n"                     \
  "saddw v6.4s, v6.4s, v" D3 ".4h\n"                      \
  "saddw2 v7.4s, v7.4s, v" D3 ".8h\n"                     \
  "stp q0, q1, [%[sums], #" AT0 "]\n"                     \
  "stp q2, q3, [%[sums], #" AT1 "]\n"                     \
  "stp q4, q5, [%[sums], #" AT2 "]\n"                     \
  "stp q6, q7, [%[sums], #" AT3 "]\n"
// The same of one pixel where 32-bit sums begin at the bias, in v0 and v1; v<A> and v<B> are free.
#define LOWBIT_BIAS(A, B, D)               \
  "saddw v" A ".4s, v0.4s, v" D ".4h\n"    \
  "saddw2 v" B ".4s, v1.4s, v" D ".8h\n"
#define LOWBIT_STORE(A, B, AT) "stp q" A ", q" B ", [%[sums], #" AT "]\n"
// clang-format on

// At most kFlushesPerWidening flushes.
inline void Tile12Of(const int16_t* w, const int16_t* x8, const int16_t* x4, size_t steps, size_t flush,
                     const int32_t* bias, int32_t* sums) {
  size_t count = std::min(steps, flush), left = steps - count;
  uint64_t high;
  // clang-format off
  asm volatile(
      "ldr q0, [%[w]], #16\n"
      "ldr q1, [%[x8]], #16\n"
      "ldr d2, [%[x4]], #8\n"
      "movi v20.2d, #0\n"
      "movi v21.2d, #0\n"
      "movi v22.2d, #0\n"
      "movi v23.2d, #0\n"
      "movi v24.2d, #0\n"
      "movi v25.2d, #0\n"
      "movi v26.2d, #0\n"
      "movi v27.2d, #0\n"
      "movi v28.2d, #0\n"
      "movi v29.2d, #0\n"
      "movi v30.2d, #0\n"
      "movi v31.2d, #0\n"
      LOWBIT_RUNS
      "cbz %[bias], 6f\n"
      "ldp q0, q1, [%[bias]]\n"
      LOWBIT_BIAS("2", "3", "20") LOWBIT_BIAS("4", "5", "21") LOWBIT_STORE("2", "3", "0")
      LOWBIT_BIAS("6", "7", "22") LOWBIT_STORE("4", "5", "32")
      LOWBIT_BIAS("2", "3", "23") LOWBIT_STORE("6", "7", "64")
      LOWBIT_BIAS("4", "5", "24") LOWBIT_STORE("2", "3", "96")
      LOWBIT_BIAS("6", "7", "25") LOWBIT_STORE("4", "5", "128")
      LOWBIT_BIAS("2", "3", "26") LOWBIT_STORE("6", "7", "160")
      LOWBIT_BIAS("4", "5", "27") LOWBIT_STORE("2", "3", "192")
      LOWBIT_BIAS("6", "7", "28") LOWBIT_STORE("4", "5", "224")
      LOWBIT_BIAS("2", "3", "29") LOWBIT_STORE("6", "7", "256")
      LOWBIT_BIAS("4", "5", "30") LOWBIT_STORE("2", "3", "288")
      LOWBIT_BIAS("6", "7", "31") LOWBIT_STORE("4", "5", "320") LOWBIT_STORE("6", "7", "352")
      "b 7f\n"
      "6:\n"
      LOWBIT_WIDEN("20", "21", "22", "23", "0", "32", "64", "96")
      LOWBIT_WIDEN("24", "25", "26", "27", "128", "160", "192", "224")
      LOWBIT_WIDEN("28", "29", "30", "31", "256", "288", "320", "352")
      "7:\n"
      : [w] "+&r"(w), [x8] "+&r"(x8), [x4] "+&r"(x4), [count] "+&r"(count), [left] "+&r"(left), [high] "=&r"(high)
      : [flush] "r"(flush), [bias] "r"(bias), [sums] "r"(sums)
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14",
        "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30",
        "v31");
  // clang-format on
}

void Tile12(const GemmTile& tile) {
  const auto* w = reinterpret_cast<const int16_t*>(tile.w);
  const auto* x8 = reinterpret_cast<const int16_t*>(tile.x);
  const int16_t* x4 = x8 + tile.steps * 8;
  const size_t most = kFlushesPerWidening * tile.flush;
  for (size_t done = 0; done < tile.steps; done += most) {
    Tile12Of(w + 8 * done, x8 + 8 * done, x4 + 4 * done, std::min(most, tile.steps - done), tile.flush,
             done == 0 ? tile.bias : nullptr, tile.sums);
  }
}

// The same for 4 pixels, the rest of a block: sums of products v8..v11, of d v20..v23. Step A has its weights
// in v0 and the pixels in v1, step B in v3 and v4.
// clang-format off
#undef LOWBIT_STEP
#undef LOWBIT_STEP_A
#undef LOWBIT_STEP_B
#undef LOWBIT_FLUSH
#define LOWBIT_STEP(OP, W, X, NEXT_W, NEXT_X)  \
  OP " v8.8h, v" W ".8h, v" X ".h[0]\n"        \
  "ldr q" NEXT_W ", [%[w]], #16\n"             \
  OP " v9.8h, v" W ".8h, v" X ".h[1]\n"        \
  "ldr d" NEXT_X ", [%[x]], #8\n"              \
  OP " v10.8h, v" W ".8h, v" X ".h[2]\n"       \
  "subs %[count], %[count], #1\n"              \
  OP " v11.8h, v" W ".8h, v" X ".h[3]\n"
#define LOWBIT_STEP_A(OP) LOWBIT_STEP(OP, "0", "1", "3", "4")
#define LOWBIT_STEP_B(OP) LOWBIT_STEP(OP, "3", "4", "0", "1")
#define LOWBIT_FLUSH                       \
  "srsra v20.8h, v8.8h, #8\n"              \
  "cmp %[left], %[flush]\n"                \
  "srsra v21.8h, v9.8h, #8\n"              \
  "csel %[count], %[left], %[flush], lo\n" \
  "srsra v22.8h, v10.8h, #8\n"             \
  "sub %[left], %[left], %[count]\n"       \
  "srsra v23.8h, v11.8h, #8\n"             \
  "cbz %[count], 9f\n"

inline void Tile4Of(const int16_t* w, const int16_t* x, size_t steps, size_t flush, const int32_t* bias,
                    int32_t* sums) {
  size_t count = std::min(steps, flush), left = steps - count;
  asm volatile(
      "ldr q0, [%[w]], #16\n"
      "ldr d1, [%[x]], #8\n"
      "movi v20.2d, #0\n"
      "movi v21.2d, #0\n"
      "movi v22.2d, #0\n"
      "movi v23.2d, #0\n"
      LOWBIT_RUNS
      "cbz %[bias], 6f\n"
      "ldp q0, q1, [%[bias]]\n"
      LOWBIT_BIAS("2", "3", "20") LOWBIT_BIAS("4", "5", "21") LOWBIT_STORE("2", "3", "0")
      LOWBIT_BIAS("6", "7", "22") LOWBIT_STORE("4", "5", "32")
      LOWBIT_BIAS("2", "3", "23") LOWBIT_STORE("6", "7", "64") LOWBIT_STORE("2", "3", "96")
      "b 7f\n"
      "6:\n"
      LOWBIT_WIDEN("20", "21", "22", "23", "0", "32", "64", "96")
      "7:\n"
      : [w] "+&r"(w), [x] "+&r"(x), [count] "+&r"(count), [left] "+&r"(left)
      : [flush] "r"(flush), [bias] "r"(bias), [sums] "r"(sums)
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v20", "v21", "v22",
        "v23");
}
// clang-format on

// The same for the first of 4 pixels: a block's last one may be alone.
// clang-format off
#undef LOWBIT_STEP
#undef LOWBIT_FLUSH
#define LOWBIT_STEP(OP, W, X, NEXT_W, NEXT_X)  \
  OP " v8.8h, v" W ".8h, v" X ".h[0]\n"        \
  "ldr q" NEXT_W ", [%[w]], #16\n"             \
  "ldr d" NEXT_X ", [%[x]], #8\n"              \
  "subs %[count], %[count], #1\n"
#define LOWBIT_FLUSH                       \
  "srsra v20.8h, v8.8h, #8\n"              \
  "cmp %[left], %[flush]\n"                \
  "csel %[count], %[left], %[flush], lo\n" \
  "sub %[left], %[left], %[count]\n"       \
  "cbz %[count], 9f\n"

inline void PixelOf(const int16_t* w, const int16_t* x, size_t steps, size_t flush, const int32_t* bias,
                    int32_t* sums) {
  size_t count = std::min(steps, flush), left = steps - count;
  const int32_t* from = bias != nullptr ? bias : sums;
  asm volatile(
      "ldr q0, [%[w]], #16\n"
      "ldr d1, [%[x]], #8\n"
      "movi v20.2d, #0\n"
      LOWBIT_RUNS
      "ldp q0, q1, [%[from]]\n"
      LOWBIT_BIAS("2", "3", "20") LOWBIT_STORE("2", "3", "0")
      : [w] "+&r"(w), [x] "+&r"(x), [count] "+&r"(count), [left] "+&r"(left)
      : [flush] "r"(flush), [from] "r"(from), [sums] "r"(sums)
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v8", "v20");
}
// clang-format on

void Tile4(const GemmTile& tile) {
  const auto* w = reinterpret_cast<const int16_t*>(tile.w);
  const auto* x = reinterpret_cast<const int16_t*>(tile.x);
  const size_t most = kFlushesPerWidening * tile.flush;
  for (size_t done = 0; done < tile.steps; done += most) {
    (tile.pixels == 1 ? &PixelOf : &Tile4Of)(w + 8 * done, x + 4 * done, std::min(most, tile.steps - done),
                                             tile.flush, done == 0 ? tile.bias : nullptr, tile.sums);
  }
}

size_t Flush(const GemmOperands& operands) {
  const size_t both = LongestSafeRun(operands, 1, -127, 127, 2 * kMaxFlush) / 2;
  return std::min(both, LongestSafeRun(operands, 2, -128, 127, kMaxFlush));
}

// A step of 12 pixels, 192 products, takes 12 multiplications, loads of 3 cycles; a flush 12 SRSRA, 2 jumps
// (modelled Cortex-A53). On A72 a multiplication takes two cycles, and the loads run beside it.
double MacsPerCycle(Pipeline pipeline, size_t flush) {
  const auto n = static_cast<double>(flush);
  return 192.0 / (pipeline == Pipeline::kInOrder ? 15.0 + 14.0 / n : 24.0 + 12.0 / n);
}

}  // namespace

const GemmScheme kGemmMlaPairs = {
    .channels = kChannels,
    .unit = 2,
    .k_multiple = 2,
    .form = GemmForm::kPairs,
    .flush = &Flush,
    .macs_per_cycle = &MacsPerCycle,
    .tile = {&EachTile<kChannels, 4, 2, &Tile4>, &EachTile<kChannels, 8, 2, &Tile8>,
             &EachTile<kChannels, 12, 2, &Tile12>},
};

}  // namespace lowbit
