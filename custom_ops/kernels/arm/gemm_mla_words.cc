// Products in 16-bit sums: MLA on halfwords, by element. ARMv8.0.
//
// Weights and pixels are stored as int16, so that MLA takes a pixel's value out of a vector of 8 pixels:
// nothing is broadcast, and of a step of 16 channels x 8 pixels 16 instructions of 19 cycles multiply
// (in-order cores; SMULL and LD4R: 8 of 12 for half as many products). That is worth the wider operands on
// cores that are no faster at SMLAL than at MLA; it is half as fast as SMLAL on those with 64-bit multipliers
// for MLA.
//
// Overflow. A lane holds one product a step: `flush` is the longest run of successive products that fits
// int16; 511, 127 and 31 for full ranges of 4, 5 and 6 bits, and far more for most trained weights.
#include <arm_neon.h>

#include <algorithm>
#include <cstdint>

#include "kernels/arm/gemm_scheme.h"

namespace lowbit {
namespace {

constexpr size_t kChannels = 16;
constexpr size_t kMaxFlush = 8192;

// 8 pixels. Step A has its weights in v0 and v1 and the pixels in v2, step B in v3, v4 and v5; the 16-bit
// sums are v16..v31, two a pixel. Each step multiplies (OP is MUL or MLA) and loads the other's operands, as
// halves: on Cortex-A53 a 64-bit vector load and the INS of another vector's upper half share a cycle, a
// 128-bit load takes two. The upper half of the second vector of weights is still in `high` when a step
// begins, and in place when that vector is first used.
// clang-format off
#define LOWBIT_PRODUCT(OP, SUM, W, X, PIXEL) OP " v" SUM ".8h, v" W ".8h, v" X ".h[" PIXEL "]\n"
#define LOWBIT_STEP(OP, W0, W1, X, NEXT_W0, NEXT_W1, NEXT_X, AT_W0, AT_W0H, AT_W1, AT_W1H, AT_X, AT_XH, ADD_W, \
                    ADD_X)                                                                                     \
  "ldr d" NEXT_X ", [%[x], #" AT_X "]\n"                                                                       \
  "ins v" W1 ".d[1], %[high]\n"                                                                                \
  LOWBIT_PRODUCT(OP, "16", W0, X, "0")                                                                         \
  "ldr %[high], [%[x], #" AT_XH "]\n"                                                                          \
  LOWBIT_PRODUCT(OP, "18", W0, X, "1")                                                                         \
  LOWBIT_PRODUCT(OP, "20", W0, X, "2")                                                                         \
  LOWBIT_PRODUCT(OP, "22", W0, X, "3")                                                                         \
  LOWBIT_PRODUCT(OP, "24", W0, X, "4")                                                                         \
  "ldr d" NEXT_W0 ", [%[w], #" AT_W0 "]\n"                                                                     \
  "ins v" NEXT_X ".d[1], %[high]\n"                                                                            \
  LOWBIT_PRODUCT(OP, "26", W0, X, "5")                                                                         \
  "ldr %[high], [%[w], #" AT_W0H "]\n"                                                                         \
  LOWBIT_PRODUCT(OP, "28", W0, X, "6")                                                                         \
  LOWBIT_PRODUCT(OP, "30", W0, X, "7")                                                                         \
  LOWBIT_PRODUCT(OP, "17", W1, X, "0")                                                                         \
  LOWBIT_PRODUCT(OP, "19", W1, X, "1")                                                                         \
  "ldr d" NEXT_W1 ", [%[w], #" AT_W1 "]\n"                                                                     \
  "ins v" NEXT_W0 ".d[1], %[high]\n"                                                                           \
  LOWBIT_PRODUCT(OP, "21", W1, X, "2")                                                                         \
  "ldr %[high], [%[w], #" AT_W1H "]\n"                                                                         \
  LOWBIT_PRODUCT(OP, "23", W1, X, "3") ADD_W                                                                   \
  LOWBIT_PRODUCT(OP, "25", W1, X, "4") ADD_X                                                                   \
  LOWBIT_PRODUCT(OP, "27", W1, X, "5")                                                                         \
  LOWBIT_PRODUCT(OP, "29", W1, X, "6")                                                                         \
  LOWBIT_PRODUCT(OP, "31", W1, X, "7")
#define LOWBIT_STEP_A(OP) \
  LOWBIT_STEP(OP, "0", "1", "2", "3", "4", "5", "32", "40", "48", "56", "16", "24", "", "")
#define LOWBIT_STEP_B(OP)                                                                    \
  LOWBIT_STEP(OP, "3", "4", "5", "0", "1", "2", "64", "72", "80", "88", "32", "40",         \
              "add %[w], %[w], #64\n", "add %[x], %[x], #32\n")

#define LOWBIT_DECREMENT "subs %[count], %[count], #1\n"
// 32-bit sums of 8 channels to and from v<A> and v<B>, and the 16-bit sums v<SUM> added to them. Stores and
// the additions of the next sums run side by side.
#define LOWBIT_LOAD(A, B, AT) "ldp q" A ", q" B ", [%[sums], #" AT "]\n"
#define LOWBIT_STORE(A, B, AT) "stp q" A ", q" B ", [%[sums], #" AT "]\n"
#define LOWBIT_ADD(A, B, SUM)                          \
  "saddw v" A ".4s, v" A ".4s, v" SUM ".4h\n"          \
  "saddw2 v" B ".4s, v" B ".4s, v" SUM ".8h\n"
#define LOWBIT_FLUSH                                                                         \
  LOWBIT_LOAD("6", "7", "0") LOWBIT_LOAD("8", "9", "32") LOWBIT_ADD("6", "7", "16")          \
  LOWBIT_LOAD("10", "11", "64") LOWBIT_STORE("6", "7", "0") LOWBIT_ADD("8", "9", "17")       \
  LOWBIT_LOAD("12", "13", "96") LOWBIT_STORE("8", "9", "32") LOWBIT_ADD("10", "11", "18")    \
  LOWBIT_LOAD("6", "7", "128") LOWBIT_STORE("10", "11", "64") LOWBIT_ADD("12", "13", "19")   \
  LOWBIT_LOAD("8", "9", "160") LOWBIT_STORE("12", "13", "96") LOWBIT_ADD("6", "7", "20")     \
  LOWBIT_LOAD("10", "11", "192") LOWBIT_STORE("6", "7", "128") LOWBIT_ADD("8", "9", "21")    \
  LOWBIT_LOAD("12", "13", "224") LOWBIT_STORE("8", "9", "160") LOWBIT_ADD("10", "11", "22")  \
  LOWBIT_LOAD("6", "7", "256") LOWBIT_STORE("10", "11", "192") LOWBIT_ADD("12", "13", "23")  \
  LOWBIT_LOAD("8", "9", "288") LOWBIT_STORE("12", "13", "224") LOWBIT_ADD("6", "7", "24")    \
  LOWBIT_LOAD("10", "11", "320") LOWBIT_STORE("6", "7", "256") LOWBIT_ADD("8", "9", "25")    \
  LOWBIT_LOAD("12", "13", "352") LOWBIT_STORE("8", "9", "288") LOWBIT_ADD("10", "11", "26")  \
  LOWBIT_LOAD("6", "7", "384") LOWBIT_STORE("10", "11", "320") LOWBIT_ADD("12", "13", "27")  \
  LOWBIT_LOAD("8", "9", "416") LOWBIT_STORE("12", "13", "352") LOWBIT_ADD("6", "7", "28")    \
  LOWBIT_LOAD("10", "11", "448") LOWBIT_STORE("6", "7", "384") LOWBIT_ADD("8", "9", "29")    \
  LOWBIT_LOAD("12", "13", "480") LOWBIT_STORE("8", "9", "416") LOWBIT_ADD("10", "11", "30")  \
  LOWBIT_STORE("10", "11", "448") LOWBIT_ADD("12", "13", "31") LOWBIT_STORE("12", "13", "480")

void Tile8(const GemmTile& t) {
  const uint8_t *w = t.w, *x = t.x;
  size_t left = t.steps / 2, count = 0;
  const size_t flush = t.flush / 2;
  uint64_t high = 0;
  asm volatile(
      "ldr q0, [%[w]]\n"
      "ldr q2, [%[x]]\n"
      "ldr d1, [%[w], #16]\n"
      "ldr %[high], [%[w], #24]\n"
      "1:\n"
      "cmp %[left], %[flush]\n"
      "csel %[count], %[left], %[flush], lo\n"
      "sub %[left], %[left], %[count]\n"  //
      LOWBIT_STEP_A("mul") LOWBIT_DECREMENT LOWBIT_STEP_B("mla")
      "b.eq 3f\n"
      "2:\n"  //
      LOWBIT_STEP_A("mla") LOWBIT_DECREMENT LOWBIT_STEP_B("mla")
      "b.ne 2b\n"
      "3:\n"  //
      LOWBIT_FLUSH
      "cbnz %[left], 1b\n"
      : [w] "+&r"(w), [x] "+&r"(x), [left] "+&r"(left), [count] "+&r"(count), [high] "+&r"(high)
      : [sums] "r"(t.sums), [flush] "r"(flush)
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",
        "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30",
        "v31");
}
// clang-format on

// 4 pixels, for the rest of a block.
void Tile4(const GemmTile& t) {
  constexpr size_t kPixels = 4;
  const auto* w = reinterpret_cast<const int16_t*>(t.w);
  const auto* x = reinterpret_cast<const int16_t*>(t.x);
  for (size_t left = t.steps; left > 0;) {
    const size_t run = std::min(left, t.flush);
    left -= run;
    int16x8_t sum[kPixels][2];
#pragma GCC unroll 4
    for (auto& of_pixel : sum) of_pixel[0] = of_pixel[1] = vdupq_n_s16(0);
    for (size_t i = 0; i < run; ++i, w += kChannels, x += kPixels) {
      const int16x8_t w0 = vld1q_s16(w), w1 = vld1q_s16(w + 8);
      const int16x4_t values = vld1_s16(x);
      sum[0][0] = vmlaq_lane_s16(sum[0][0], w0, values, 0);
      sum[1][0] = vmlaq_lane_s16(sum[1][0], w0, values, 1);
      sum[2][0] = vmlaq_lane_s16(sum[2][0], w0, values, 2);
      sum[3][0] = vmlaq_lane_s16(sum[3][0], w0, values, 3);
      sum[0][1] = vmlaq_lane_s16(sum[0][1], w1, values, 0);
      sum[1][1] = vmlaq_lane_s16(sum[1][1], w1, values, 1);
      sum[2][1] = vmlaq_lane_s16(sum[2][1], w1, values, 2);
      sum[3][1] = vmlaq_lane_s16(sum[3][1], w1, values, 3);
    }
    for (size_t p = 0; p < kPixels; ++p) {
      for (size_t half = 0; half < 2; ++half) {
        int32_t* sums = t.sums + p * kChannels + half * 8;
        vst1q_s32(sums, vaddw_s16(vld1q_s32(sums), vget_low_s16(sum[p][half])));
        vst1q_s32(sums + 4, vaddw_high_s16(vld1q_s32(sums + 4), sum[p][half]));
      }
    }
  }
}

// Even, because steps come in pairs.
size_t Flush(const GemmOperands& operands) {
  return LongestSafeRun(operands, 1, INT16_MIN, INT16_MAX, kMaxFlush) / 2 * 2;
}

// Of 128 products a step: 16 multiplications and loads of 3 cycles; a flush is 16 times 8 cycles of loads and
// stores (modelled Cortex-A53).
double MacsPerCycle(size_t flush) { return 128.0 / (19.0 + 135.0 / static_cast<double>(flush)); }

}  // namespace

const GemmScheme kGemmMlaWords = {
    kChannels, 1, 2, GemmForm::kWords, &Flush, &MacsPerCycle, {&Tile4, &Tile8, nullptr}};

}  // namespace lowbit
