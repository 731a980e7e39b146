// Bit-serial tiles on NEON: 16 output channels x 16 bits of K in two vectors. ARMv8.0.
//
//   w    c0 c0 c1 c1 ... c7 c7 | c8 c8 ...   the same 16 bits of K of 16 channels, a halfword each
//   x    p0 p0 p0 p0 ...                     these bits of a row, replicated (DUP)
//   EOR or AND, CNT -> counts of bytes; UADALP adds both bytes of a halfword to a 16-bit sum
//
// 128 one-bit products take three instructions. Halfwords, and not bytes that would need wider sums every 31
// steps, make the widening addition the accumulation: a 16-bit sum grows by 16 a step at most and holds
// kMaxUnits of them, all of K for most nodes.
//
// Ternary weights (BitOp::kMasked) are two bit matrices, p where they are 1 and n where they are -1, and the
// bits that are counted are those of x ? n : p, one instruction (BSL) as well. It overwrites x, so every
// vector of weights gets an x of its own.
//
// The rows of a tile are pixels or, where activations have more than one bit, the planes of fewer pixels: two
// or four rows each, which are scaled and added when all is counted. A plane of weights is a pass over the
// tile.
//
// Registers: 16 sums, as the compiler assigns them, the weights of a unit in v0..v3, x and products in the
// others up to v11. On in-order cores results are ready after four cycles: rows are taken in pairs, so that
// four products are under way, and what the next pair needs is loaded and replicated between them. All loads
// are to general registers. On a Cortex-A53 those pair with instructions on vectors, and two 64-bit moves to
// vector registers take the cycle of one such instruction, where a load of a vector would take two.
#include <arm_neon.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/arm/bitserial_engines.h"
#include "kernels/arm/gemm_finish.h"
#include "kernels/arm/requantize8.h"
#include "kernels/common/inline.h"

namespace lowbit {
namespace {

constexpr int kVectors = 2, kLanes = 8;
constexpr size_t kChannels = kVectors * kLanes, kUnitBytes = 2;
template <BitOp kOp>
constexpr size_t kUnitWeights = (kOp == BitOp::kMasked ? 2 : 1) * kChannels * kUnitBytes;
constexpr int kTileRows = 8;
constexpr int kFewCodesDigits = 2;  // at most, of pixels whose tiles end in few codes
constexpr size_t kMaxUnits = 65535 / (8 * kUnitBytes);

// clang-format off
// EOR and AND: products of two rows, XA and XB, with both vectors of weights, added to the sums A0 and A1, B0
// and B1. The bits of the next two rows, LOAD_A and LOAD_B, become NEXT_A and NEXT_B. Beside them scalar
// instructions.
#define LOWBIT_ROWS(OP, XA, XB, LOAD_A, LOAD_B, NEXT_A, NEXT_B, A0, A1, B0, B1, S0, S1, S2, S3, S4, S5) \
  OP " v2.16b, v" XA ".16b, v0.16b\n"                     \
  "ldrh w10, [" LOAD_A ", x15]\n"                         \
  OP " v3.16b, v" XB ".16b, v0.16b\n"                     \
  "ldrh w11, [" LOAD_B ", x15]\n"                         \
  OP " v" XA ".16b, v" XA ".16b, v1.16b\n"                \
  S0                                                      \
  OP " v" XB ".16b, v" XB ".16b, v1.16b\n"                \
  S1                                                      \
  "cnt v2.16b, v2.16b\n"                                  \
  S2                                                      \
  "cnt v3.16b, v3.16b\n"                                  \
  S3                                                      \
  "dup v" NEXT_A ".8h, w10\n"                             \
  "dup v" NEXT_B ".8h, w11\n"                             \
  "cnt v" XA ".16b, v" XA ".16b\n"                        \
  S4                                                      \
  "cnt v" XB ".16b, v" XB ".16b\n"                        \
  "uadalp " A0 ".8h, v2.16b\n"                            \
  "uadalp " B0 ".8h, v3.16b\n"                            \
  S5                                                      \
  "uadalp " A1 ".8h, v" XA ".16b\n"                       \
  "uadalp " B1 ".8h, v" XB ".16b\n"
// The last two rows of a unit: v0 and v1 become the weights of the next one.
#define LOWBIT_LAST_ROWS(OP, XA, XB, LOAD_A, LOAD_B, NEXT_A, NEXT_B, A0, A1, B0, B1) \
  OP " v2.16b, v" XA ".16b, v0.16b\n"                     \
  "ldrh w10, [" LOAD_A ", x15]\n"                         \
  OP " v3.16b, v" XB ".16b, v0.16b\n"                     \
  "ldrh w11, [" LOAD_B ", x15]\n"                         \
  OP " v" XA ".16b, v" XA ".16b, v1.16b\n"                \
  "ldp x12, x13, [%[w]]\n"                                \
  OP " v" XB ".16b, v" XB ".16b, v1.16b\n"                \
  "ldp x14, x17, [%[w], #16]\n"                           \
  "cnt v2.16b, v2.16b\n"                                  \
  "cnt v3.16b, v3.16b\n"                                  \
  "fmov d0, x12\n"                                        \
  "fmov d1, x14\n"                                        \
  "dup v" NEXT_A ".8h, w10\n"                             \
  "dup v" NEXT_B ".8h, w11\n"                             \
  "cnt v" XA ".16b, v" XA ".16b\n"                        \
  "cnt v" XB ".16b, v" XB ".16b\n"                        \
  "ins v0.d[1], x13\n"                                    \
  "ins v1.d[1], x17\n"                                    \
  "uadalp " A0 ".8h, v2.16b\n"                            \
  "uadalp " B0 ".8h, v3.16b\n"                            \
  "uadalp " A1 ".8h, v" XA ".16b\n"                       \
  "uadalp " B1 ".8h, v" XB ".16b\n"
// To the next unit, and behind the last one to the same again.
#define LOWBIT_IS_LAST "subs %[units], %[units], #1\n"
#define LOWBIT_STEP "cset x14, ne\n"
#define LOWBIT_NEXT_OFFSET "add %[offsets], %[offsets], x14, lsl #2\n"
#define LOWBIT_NEXT_WEIGHTS(SHIFT) "add %[w], %[w], x14, lsl #" SHIFT "\n"
#define LOWBIT_LOAD_OFFSET "ldr w15, [%[offsets]]\n"
#define LOWBIT_ADD_SHIFT "add x15, x15, %[shift]\n"
// The rows' addresses, x2 to x9, of pixels with one digit, two, or four, whose upper ones may be the same.
#define LOWBIT_8_ROWS_1                                   \
  "ldp x2, x3, [%[pixels]]\n"                             \
  "ldp x4, x5, [%[pixels], #16]\n"                        \
  "ldp x6, x7, [%[pixels], #32]\n"                        \
  "ldp x8, x9, [%[pixels], #48]\n"
#define LOWBIT_8_ROWS_2                                   \
  "ldp x2, x4, [%[pixels]]\n"                             \
  "ldp x6, x8, [%[pixels], #16]\n"                        \
  "add x3, x2, %[digit1]\n"                               \
  "add x5, x4, %[digit1]\n"                               \
  "add x7, x6, %[digit1]\n"                               \
  "add x9, x8, %[digit1]\n"
#define LOWBIT_8_ROWS_4                                   \
  "ldp x2, x6, [%[pixels]]\n"                             \
  "add x3, x2, %[digit1]\n"                               \
  "add x4, x3, %[digit1]\n"                               \
  "add x5, x2, %[digit3]\n"                               \
  "add x7, x6, %[digit1]\n"                               \
  "add x8, x7, %[digit1]\n"                               \
  "add x9, x6, %[digit3]\n"
#define LOWBIT_4_ROWS_1                                   \
  "ldp x2, x3, [%[pixels]]\n"                             \
  "ldp x4, x5, [%[pixels], #16]\n"
#define LOWBIT_4_ROWS_2                                   \
  "ldp x2, x4, [%[pixels]]\n"                             \
  "add x3, x2, %[digit1]\n"                               \
  "add x5, x4, %[digit1]\n"
#define LOWBIT_4_ROWS_4                                   \
  "ldr x2, [%[pixels]]\n"                                 \
  "add x3, x2, %[digit1]\n"                               \
  "add x4, x3, %[digit1]\n"                               \
  "add x5, x2, %[digit3]\n"
// BSL: the same, with a second copy of x in XA2 and XB2.
#define LOWBIT_SELECT_ROWS(XA, XB, XA2, XB2, LOAD_A, LOAD_B, NEXT_A, NEXT_B, NEXT_A2, NEXT_B2, A0, A1, B0, B1, \
                           S0, S1, S2, S3, S4, S5)        \
  "bsl v" XA ".16b, v2.16b, v0.16b\n"                     \
  "ldrh w10, [" LOAD_A ", x15]\n"                         \
  "bsl v" XB ".16b, v2.16b, v0.16b\n"                     \
  "ldrh w11, [" LOAD_B ", x15]\n"                         \
  "bsl v" XA2 ".16b, v3.16b, v1.16b\n"                    \
  S0                                                      \
  "bsl v" XB2 ".16b, v3.16b, v1.16b\n"                    \
  S1                                                      \
  "cnt v" XA ".16b, v" XA ".16b\n"                        \
  S2                                                      \
  "cnt v" XB ".16b, v" XB ".16b\n"                        \
  S3                                                      \
  "dup v" NEXT_A ".8h, w10\n"                             \
  "dup v" NEXT_B ".8h, w11\n"                             \
  "cnt v" XA2 ".16b, v" XA2 ".16b\n"                      \
  S4                                                      \
  "cnt v" XB2 ".16b, v" XB2 ".16b\n"                      \
  "dup v" NEXT_A2 ".8h, w10\n"                            \
  "dup v" NEXT_B2 ".8h, w11\n"                            \
  "uadalp " A0 ".8h, v" XA ".16b\n"                       \
  "uadalp " B0 ".8h, v" XB ".16b\n"                       \
  S5                                                      \
  "uadalp " A1 ".8h, v" XA2 ".16b\n"                      \
  "uadalp " B1 ".8h, v" XB2 ".16b\n"
#define LOWBIT_SELECT_LAST_ROWS(XA, XB, XA2, XB2, LOAD_A, LOAD_B, NEXT_A, NEXT_B, NEXT_A2, NEXT_B2, A0, A1, B0, B1) \
  "bsl v" XA ".16b, v2.16b, v0.16b\n"                     \
  "ldrh w10, [" LOAD_A ", x15]\n"                         \
  "bsl v" XB ".16b, v2.16b, v0.16b\n"                     \
  "ldrh w11, [" LOAD_B ", x15]\n"                         \
  "bsl v" XA2 ".16b, v3.16b, v1.16b\n"                    \
  "ldp x12, x13, [%[w]]\n"                                \
  "bsl v" XB2 ".16b, v3.16b, v1.16b\n"                    \
  "ldp x14, x17, [%[w], #16]\n"                           \
  "cnt v" XA ".16b, v" XA ".16b\n"                        \
  "ldp x16, x22, [%[w], #32]\n"                           \
  "cnt v" XB ".16b, v" XB ".16b\n"                        \
  "ldp x20, x21, [%[w], #48]\n"                           \
  "fmov d0, x12\n"                                        \
  "fmov d1, x14\n"                                        \
  "cnt v" XA2 ".16b, v" XA2 ".16b\n"                      \
  "cnt v" XB2 ".16b, v" XB2 ".16b\n"                      \
  "fmov d2, x16\n"                                        \
  "fmov d3, x20\n"                                        \
  "dup v" NEXT_A ".8h, w10\n"                             \
  "dup v" NEXT_B ".8h, w11\n"                             \
  "dup v" NEXT_A2 ".8h, w10\n"                            \
  "dup v" NEXT_B2 ".8h, w11\n"                            \
  "ins v0.d[1], x13\n"                                    \
  "ins v1.d[1], x17\n"                                    \
  "ins v2.d[1], x22\n"                                    \
  "ins v3.d[1], x21\n"                                    \
  "uadalp " A0 ".8h, v" XA ".16b\n"                       \
  "uadalp " B0 ".8h, v" XB ".16b\n"                       \
  "uadalp " A1 ".8h, v" XA2 ".16b\n"                      \
  "uadalp " B1 ".8h, v" XB2 ".16b\n"
#define LOWBIT_SELECT_BEGIN                               \
  "ldr w15, [%[offsets]]\n"                               \
  "ldp q0, q1, [%[w]]\n"                                  \
  LOWBIT_ADD_SHIFT                                        \
  "ldrh w10, [x2, x15]\n"                                 \
  "ldrh w11, [x3, x15]\n"                                 \
  "ldp q2, q3, [%[w], #32]\n"                             \
  "dup v4.8h, w10\n"                                      \
  "dup v5.8h, w11\n"                                      \
  "dup v6.8h, w10\n"                                      \
  "dup v7.8h, w11\n"
// Both by the same names: pairs of rows that take turns with their registers, the last of which is an odd one.
#define LOWBIT_SELECT_EVEN(OP, LOAD_A, LOAD_B, ...) \
  LOWBIT_SELECT_ROWS("4", "5", "6", "7", LOAD_A, LOAD_B, "8", "9", "10", "11", __VA_ARGS__)
#define LOWBIT_SELECT_ODD(OP, LOAD_A, LOAD_B, ...) \
  LOWBIT_SELECT_ROWS("8", "9", "10", "11", LOAD_A, LOAD_B, "4", "5", "6", "7", __VA_ARGS__)
#define LOWBIT_SELECT_LAST(OP, LOAD_A, LOAD_B, ...) \
  LOWBIT_SELECT_LAST_ROWS("8", "9", "10", "11", LOAD_A, LOAD_B, "4", "5", "6", "7", __VA_ARGS__)
#define LOWBIT_SELECT_NEXT_WEIGHTS LOWBIT_NEXT_WEIGHTS("6")
#define LOWBIT_LOGIC_EVEN(OP, LOAD_A, LOAD_B, ...) LOWBIT_ROWS(OP, "4", "5", LOAD_A, LOAD_B, "6", "7", __VA_ARGS__)
#define LOWBIT_LOGIC_ODD(OP, LOAD_A, LOAD_B, ...) LOWBIT_ROWS(OP, "6", "7", LOAD_A, LOAD_B, "4", "5", __VA_ARGS__)
#define LOWBIT_LOGIC_LAST(OP, LOAD_A, LOAD_B, ...) \
  LOWBIT_LAST_ROWS(OP, "6", "7", LOAD_A, LOAD_B, "4", "5", __VA_ARGS__)
#define LOWBIT_LOGIC_NEXT_WEIGHTS LOWBIT_NEXT_WEIGHTS("5")
#define LOWBIT_LOGIC_BEGIN                                \
  "ldr w15, [%[offsets]]\n"                               \
  "ldp x12, x13, [%[w]]\n"                                \
  "ldp x14, x17, [%[w], #16]\n"                           \
  LOWBIT_ADD_SHIFT                                        \
  "ldrh w10, [x2, x15]\n"                                 \
  "ldrh w11, [x3, x15]\n"                                 \
  "fmov d0, x12\n"                                        \
  "fmov d1, x14\n"                                        \
  "dup v4.8h, w10\n"                                      \
  "dup v5.8h, w11\n"                                      \
  "ins v0.d[1], x13\n"                                    \
  "ins v1.d[1], x17\n"
#define LOWBIT_ZERO(A, B, C, D)                           \
  "movi %[" A "].2d, #0\n"                                \
  "movi %[" B "].2d, #0\n"                                \
  "movi %[" C "].2d, #0\n"                                \
  "movi %[" D "].2d, #0\n"
#define LOWBIT_COUNT_8(KIND, OP, ADDRESSES)                                                              \
  asm volatile(                                                                                          \
      ADDRESSES                                                                                          \
      LOWBIT_ZERO("a0", "a1", "b0", "b1")                                                                \
      LOWBIT_ZERO("c0", "c1", "d0", "d1")                                                                \
      LOWBIT_##KIND##_BEGIN                                                                              \
      LOWBIT_ZERO("e0", "e1", "f0", "f1")                                                                \
      LOWBIT_ZERO("g0", "g1", "h0", "h1")                                                                \
      "1:\n"                                                                                             \
      LOWBIT_##KIND##_EVEN(OP, "x4", "x5", "%[a0]", "%[a1]", "%[b0]", "%[b1]", "", "", "", "", "", "")   \
      LOWBIT_##KIND##_ODD(OP, "x6", "x7", "%[c0]", "%[c1]", "%[d0]", "%[d1]", LOWBIT_IS_LAST,            \
                          LOWBIT_STEP, LOWBIT_NEXT_OFFSET, LOWBIT_##KIND##_NEXT_WEIGHTS, "", "")         \
      LOWBIT_##KIND##_EVEN(OP, "x8", "x9", "%[e0]", "%[e1]", "%[f0]", "%[f1]", LOWBIT_LOAD_OFFSET, "",   \
                           "", "", "", LOWBIT_ADD_SHIFT)                                                 \
      LOWBIT_##KIND##_LAST(OP, "x2", "x3", "%[g0]", "%[g1]", "%[h0]", "%[h1]")                           \
      "b.ne 1b\n"                                                                                        \
      : [a0] "=&w"(c[0][0]), [a1] "=&w"(c[0][1]), [b0] "=&w"(c[1][0]), [b1] "=&w"(c[1][1]),              \
        [c0] "=&w"(c[2][0]), [c1] "=&w"(c[2][1]), [d0] "=&w"(c[3][0]), [d1] "=&w"(c[3][1]),              \
        [e0] "=&w"(c[4][0]), [e1] "=&w"(c[4][1]), [f0] "=&w"(c[5][0]), [f1] "=&w"(c[5][1]),              \
        [g0] "=&w"(c[6][0]), [g1] "=&w"(c[6][1]), [h0] "=&w"(c[7][0]), [h1] "=&w"(c[7][1]),              \
        [offsets] "+&r"(offsets), [w] "+&r"(w), [units] "+&r"(units)                                     \
      : [pixels] "r"(pixels), [digit1] "r"(digit1), [digit3] "r"(digit3), [shift] "r"(shift)             \
      : LOWBIT_##KIND##_CLOBBERED)
#define LOWBIT_COUNT_4(KIND, OP, ADDRESSES)                                                              \
  asm volatile(                                                                                          \
      ADDRESSES                                                                                          \
      LOWBIT_ZERO("a0", "a1", "b0", "b1")                                                                \
      LOWBIT_##KIND##_BEGIN                                                                              \
      LOWBIT_ZERO("c0", "c1", "d0", "d1")                                                                \
      "1:\n"                                                                                             \
      LOWBIT_##KIND##_EVEN(OP, "x4", "x5", "%[a0]", "%[a1]", "%[b0]", "%[b1]", LOWBIT_IS_LAST,           \
                           LOWBIT_STEP, LOWBIT_NEXT_OFFSET, LOWBIT_##KIND##_NEXT_WEIGHTS,                \
                           LOWBIT_LOAD_OFFSET, LOWBIT_ADD_SHIFT)                                         \
      LOWBIT_##KIND##_LAST(OP, "x2", "x3", "%[c0]", "%[c1]", "%[d0]", "%[d1]")                           \
      "b.ne 1b\n"                                                                                        \
      : [a0] "=&w"(c[0][0]), [a1] "=&w"(c[0][1]), [b0] "=&w"(c[1][0]), [b1] "=&w"(c[1][1]),              \
        [c0] "=&w"(c[2][0]), [c1] "=&w"(c[2][1]), [d0] "=&w"(c[3][0]), [d1] "=&w"(c[3][1]),              \
        [offsets] "+&r"(offsets), [w] "+&r"(w), [units] "+&r"(units)                                     \
      : [pixels] "r"(pixels), [digit1] "r"(digit1), [digit3] "r"(digit3), [shift] "r"(shift)             \
      : LOWBIT_##KIND##_CLOBBERED)
#define LOWBIT_LOGIC_CLOBBERED                                                                           \
  "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x17",       \
      "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "cc", "memory"
#define LOWBIT_SELECT_CLOBBERED                                                                          \
  "x16", "x22", "x20", "x21", "v8", "v9", "v10", "v11", LOWBIT_LOGIC_CLOBBERED
#define LOWBIT_COUNT(KIND, OP)                                                            \
  if constexpr (kRows == 8 && kDigits == 1) LOWBIT_COUNT_8(KIND, OP, LOWBIT_8_ROWS_1);    \
  if constexpr (kRows == 8 && kDigits == 2) LOWBIT_COUNT_8(KIND, OP, LOWBIT_8_ROWS_2);    \
  if constexpr (kRows == 8 && kDigits == 4) LOWBIT_COUNT_8(KIND, OP, LOWBIT_8_ROWS_4);    \
  if constexpr (kRows == 4 && kDigits == 1) LOWBIT_COUNT_4(KIND, OP, LOWBIT_4_ROWS_1);    \
  if constexpr (kRows == 4 && kDigits == 2) LOWBIT_COUNT_4(KIND, OP, LOWBIT_4_ROWS_2);    \
  if constexpr (kRows == 4 && kDigits == 4) LOWBIT_COUNT_4(KIND, OP, LOWBIT_4_ROWS_4)
// clang-format on

// Where the rows of a tile are: `shift` behind `pixels` the first digit, then that many bytes to the second
// one (and from there to the third) and to the fourth.
struct Rows {
  const uint8_t* const* pixels;
  size_t shift, digit1, digit3;
};

// Counts of `units` (1..kMaxUnits) units that lie at `offsets` from the rows.
template <BitOp kOp, int kDigits, int kRows>
LOWBIT_ALWAYS_INLINE inline void Count(const Rows& rows, const uint32_t* offsets, const uint8_t* w,
                                       size_t units, uint16x8_t (&c)[kRows][kVectors]) {
  static_assert((kRows == 8 || kRows == 4) && (kDigits == 1 || kDigits == 2 || kDigits == 4));
  const uint8_t* const* pixels = rows.pixels;
  const size_t shift = rows.shift, digit1 = rows.digit1, digit3 = rows.digit3;
  if constexpr (kOp == BitOp::kAnd) {
    LOWBIT_COUNT(LOGIC, "and");
  } else if constexpr (kOp == BitOp::kXor) {
    LOWBIT_COUNT(LOGIC, "eor");
  } else {
    LOWBIT_COUNT(SELECT, "bsl");
  }
}

// The passes of a block: of each plane of weights, with all digits at once.
struct Passes {
  // What the counts of a plane [plane] and a digit are multiplied with, in units of the least factor, which
  // is that of the first of both; 0 where a row repeats another one. Codes minus a zero point may need a
  // plane for their sign.
  int16_t factors[kMaxBitPlanes + 1][kMaxBitPlanes] = {};
  int32_t unit = 1;
  int planes = 0, digits = 0;
  size_t digit1 = 0, digit3 = 0;  // as in Rows

  explicit Passes(const BitserialBlock& b) {
    const BitserialPass* const end = b.passes + b.pass_count;
    unit = end[-1].factor;
    for (const BitserialPass* pass = b.passes; pass < end; ++pass) {
      factors[pass->weight_plane][pass->digit] = static_cast<int16_t>(pass->factor / unit);
      planes = std::max(planes, static_cast<int>(pass->weight_plane) + 1);
      digits = std::max(digits, static_cast<int>(pass->digit) + 1);
    }
    if (digits > 1) digit1 = b.offsets[b.units] - b.offsets[0];
    digit3 = static_cast<size_t>(digits - 1) * digit1;
  }
};

// ---- the ends of tiles whose sums are 16-bit numbers, of a panel: Finish(sums, pixel, left) ends kPixels
// pixels from `pixel` on, of which `left` exist, or more than all

// Few codes. The limits of the first comparison and what follows from the counts stay in registers.
class FewCodesEnd {
 public:
  FewCodesEnd(const BitserialBlock& b, const BitserialPanel& panel, const Passes&)
      : limit_rows_(b.limit_rows),
        limits_(b.limits + panel.channel),
        channel_(panel.channel),
        channel_count_(panel.count),
        limit_count_(b.few_codes->count),
        limit_pitch_(b.few_codes->pitch),
        y_pitch_(b.output.epilogue->channels),
        y_(static_cast<uint8_t*>(b.output.y) + b.output.first_pixel * y_pitch_ + panel.channel),
        start_(vld1q_u8(b.few_codes->start + panel.channel)),
        flip_(vld1q_u8(b.few_codes->flip + panel.channel)) {
    for (int v = 0; v < kVectors; ++v) first_[v] = vld1q_s16(limits_ + v * kLanes);
  }

  template <int kPixels>
  LOWBIT_ALWAYS_INLINE void Finish(const int16x8_t (*sums)[kVectors], size_t pixel, size_t left) const {
    int16x8_t exceeded[kPixels][kVectors];
    if (limit_rows_ == nullptr) {
      CountExceeded<false, kPixels>(sums, pixel, exceeded);
    } else {
      CountExceeded<true, kPixels>(sums, pixel, exceeded);
    }
    uint8x16_t codes[kPixels];
#pragma GCC unroll 4
    for (int p = 0; p < kPixels; ++p)
      codes[p] = vuzp1q_u8(vreinterpretq_u8_s16(exceeded[p][0]), vreinterpretq_u8_s16(exceeded[p][1]));
#pragma GCC unroll 4
    for (int p = 0; p < kPixels; ++p) codes[p] = vsubq_u8(start_, codes[p]);
#pragma GCC unroll 4
    for (int p = 0; p < kPixels; ++p) codes[p] = veorq_u8(codes[p], flip_);

    uint8_t some[kPixels][kChannels];
    const bool whole = left >= kPixels && channel_count_ == kChannels;
    uint8_t* const y = y_ + pixel * y_pitch_;
    uint8_t* to = whole ? y : &some[0][0];
    const size_t pitch = whole ? y_pitch_ : kChannels;
#pragma GCC unroll 4
    for (int p = 0; p < kPixels; ++p, to += pitch) vst1q_u8(to, codes[p]);
    if (whole) return;
    for (size_t p = 0; p < std::min<size_t>(left, kPixels); ++p)
      std::memcpy(y + p * y_pitch_, some[p], channel_count_);
  }

 private:
  // -1 where it does.
  static int16x8_t Exceeds(int16x8_t sum, int16x8_t limit) {
    return vreinterpretq_s16_u16(vcgtq_s16(sum, limit));
  }

  // Minus the number of limits that are.
  template <bool kOwnLimits, int kPixels>
  LOWBIT_ALWAYS_INLINE void CountExceeded(const int16x8_t (*sums)[kVectors], size_t pixel,
                                          int16x8_t (&exceeded)[kPixels][kVectors]) const {
#pragma GCC unroll 4
    for (int p = 0; p < kPixels; ++p) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        exceeded[p][v] =
            Exceeds(sums[p][v], kOwnLimits ? Limit(pixel + static_cast<size_t>(p), 0, v) : first_[v]);
    }
    for (size_t k = 1; k < limit_count_; ++k) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const int16x8_t of_all = vld1q_s16(limits_ + k * limit_pitch_ + v * kLanes);
#pragma GCC unroll 4
        for (int p = 0; p < kPixels; ++p) {
          const int16x8_t limit = kOwnLimits ? Limit(pixel + static_cast<size_t>(p), k, v) : of_all;
          exceeded[p][v] = vaddq_s16(exceeded[p][v], Exceeds(sums[p][v], limit));
        }
      }
    }
  }

  int16x8_t Limit(size_t pixel, size_t k, int v) const {
    return vld1q_s16(limit_rows_[pixel] + channel_ + k * limit_pitch_ + v * kLanes);
  }

  const int16_t* const* const limit_rows_;
  const int16_t* const limits_;
  const size_t channel_, channel_count_, limit_count_, limit_pitch_, y_pitch_;
  uint8_t* const y_;
  const uint8x16_t start_, flip_;
  int16x8_t first_[kVectors];
};

int32x4_t LoadBias(const BitserialBlock& b, size_t pixel, size_t channel) {
  return vld1q_s32((b.bias_rows != nullptr ? b.bias_rows[pixel] : b.bias) + channel);
}

// Any epilogue; a requantizer in registers.
class WordsEnd {
 public:
  WordsEnd(const BitserialBlock& b, const BitserialPanel& panel, const Passes& passes)
      : block_(b),
        panel_(panel),
        unit_(vdup_n_s16(static_cast<int16_t>(passes.unit))),
        plain_(b.output.epilogue->pack_clips && !b.output.epilogue->has_residual && panel.count == kChannels),
        y_pitch_(b.output.epilogue->channels),
        y_(static_cast<uint8_t*>(b.output.y) + b.output.first_pixel * y_pitch_ + panel.channel),
        requantize_{Requantizer(b, panel, plain_, 0), Requantizer(b, panel, plain_, 1)} {}

  template <int kPixels>
  LOWBIT_ALWAYS_INLINE void Finish(const int16x8_t (*sums)[kVectors], size_t pixel, size_t left) const {
    int32x4_t accumulators[kVectors][kPixels][2];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
      for (int p = 0; p < kPixels; ++p) {
        const size_t at = pixel + static_cast<size_t>(p),
                     channel = panel_.channel + static_cast<size_t>(v) * kLanes;
        const int16x8_t sum = sums[p][v];
        accumulators[v][p][0] = vmlal_s16(LoadBias(block_, at, channel), vget_low_s16(sum), unit_);
        accumulators[v][p][1] = vmlal_s16(LoadBias(block_, at, channel + 4), vget_high_s16(sum), unit_);
      }
      if (plain_ && left >= kPixels)
        requantize_[v].Store<kPixels>(accumulators[v], y_ + pixel * y_pitch_ + v * kLanes, y_pitch_);
    }
    if (plain_ && left >= kPixels) return;
    alignas(64) int32_t stored[kPixels][kChannels];
    for (int p = 0; p < kPixels; ++p) {
      for (size_t i = 0; i < 4; ++i) vst1q_s32(&stored[p][4 * i], accumulators[i / 2][p][i % 2]);
    }
    FinishSums(block_.output, {&stored[0][0], kChannels, pixel, std::min<size_t>(left, kPixels),
                               panel_.channel, panel_.count});
  }

 private:
  static Requantize8 Requantizer(const BitserialBlock& b, const BitserialPanel& panel, bool plain, size_t v) {
    static constexpr float kNoScales[kLanes] = {};
    const EpilogueView& e = *b.output.epilogue;
    return {e, plain ? e.scale + panel.channel + v * kLanes : kNoScales};
  }

  const BitserialBlock& block_;
  const BitserialPanel& panel_;
  const int16x4_t unit_;
  const bool plain_;
  const size_t y_pitch_;
  uint8_t* const y_;
  const Requantize8 requantize_[kVectors];
};

// The counts of plane `plane` to the sums of pixels.
template <int kDigits, int kRows, bool kFirst>
LOWBIT_ALWAYS_INLINE inline void Scale(const uint16x8_t (&counts)[kRows][kVectors], const int16_t* factors,
                                       int16x8_t (&sums)[kRows / kDigits][kVectors]) {
#pragma GCC unroll 4
  for (int digit = 0; digit < kDigits; ++digit) {
    const int16x8_t factor = vld1q_dup_s16(factors + digit);
#pragma GCC unroll 8
    for (int p = 0; p < kRows / kDigits; ++p) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const int16x8_t c = vreinterpretq_s16_u16(counts[p * kDigits + digit][v]);
        // The first factor of all is 1.
        sums[p][v] = kFirst && digit == 0 ? c : vmlaq_s16(sums[p][v], c, factor);
      }
    }
  }
}

template <class End, BitOp kOp, int kDigits, int kRows>
LOWBIT_ALWAYS_INLINE inline void WordsTile(const BitserialBlock& b, const Passes& passes, const End& end,
                                           const BitserialPanel& panel, size_t pixel) {
  constexpr int kPixels = kRows / kDigits;
  const Rows rows{b.pixels + pixel, panel.x_offset, passes.digit1, passes.digit3};
  int16x8_t sums[kPixels][kVectors];
  uint16x8_t counts[kRows][kVectors];
  const uint8_t* w = panel.weights;
  Count<kOp, kDigits, kRows>(rows, b.offsets, w, b.units, counts);
  Scale<kDigits, kRows, true>(counts, passes.factors[0], sums);
  for (int plane = 1; plane < passes.planes; ++plane) {
    w += b.units * kUnitWeights<kOp>;
    Count<kOp, kDigits, kRows>(rows, b.offsets, w, b.units, counts);
    Scale<kDigits, kRows, false>(counts, passes.factors[plane], sums);
  }
  // Four pixels at a time, for which the registers suffice; the last four have one at least.
  constexpr size_t kFinished = kPixels < 4 ? kPixels : 4;
#pragma GCC unroll 2
  for (size_t p = 0; p < kPixels; p += kFinished)
    end.template Finish<kFinished>(&sums[p], pixel + p, b.pixel_count - pixel - p);
}

template <class End, BitOp kOp, int kDigits>
void RunWords(const BitserialBlock& b, const BitserialPanel& panel, const Passes& passes) {
  constexpr size_t kPixels = kTileRows / kDigits;
  const End end(b, panel, passes);
  for (size_t pixel = 0; pixel < b.pixel_count; pixel += kPixels) {
    if (b.pixel_count - pixel > kPixels / 2) {
      WordsTile<End, kOp, kDigits, kTileRows>(b, passes, end, panel, pixel);
    } else {
      WordsTile<End, kOp, kDigits, kTileRows / 2>(b, passes, end, panel, pixel);
    }
  }
}

// ---- any sums and any epilogue

// One digit after the other.
template <BitOp kOp>
void RunAny(const BitserialBlock& b, const BitserialPanel& panel, const Passes& passes) {
  constexpr size_t kPixels = kTileRows;
  for (size_t pixel = 0; pixel < b.pixel_count; pixel += kPixels) {
    alignas(64) int32_t sums[kPixels][kChannels];
    for (size_t p = 0; p < kPixels; ++p) {
      for (size_t c = 0; c < kChannels; c += 4)
        vst1q_s32(&sums[p][c], LoadBias(b, pixel + p, panel.channel + c));
    }
    const uint8_t* w = panel.weights;
    for (int plane = 0; plane < passes.planes; ++plane) {
      for (size_t unit = 0; unit < b.units; unit += kMaxUnits) {
        const size_t units = std::min(kMaxUnits, b.units - unit);
        for (int digit = 0; digit < passes.digits; ++digit) {
          uint16x8_t counts[kTileRows][kVectors];
          Count<kOp, 1, kTileRows>(
              {b.pixels + pixel, panel.x_offset + static_cast<size_t>(digit) * passes.digit1, 0, 0},
              b.offsets + unit, w, units, counts);
          alignas(16) uint16_t stored[kPixels][kChannels];
#pragma GCC unroll 8
          for (int p = 0; p < kTileRows; ++p) {
            for (int v = 0; v < kVectors; ++v) vst1q_u16(&stored[p][v * kLanes], counts[p][v]);
          }
          const int32_t factor = passes.unit * passes.factors[plane][digit];
          for (size_t p = 0; p < kPixels; ++p) {
            for (size_t c = 0; c < kChannels; c += 4) {
              const int32x4_t count = vreinterpretq_s32_u32(vmovl_u16(vld1_u16(&stored[p][c])));
              vst1q_s32(&sums[p][c], vmlaq_n_s32(vld1q_s32(&sums[p][c]), count, factor));
            }
          }
        }
        w += units * kUnitWeights<kOp>;
      }
    }
    FinishSums(b.output, {&sums[0][0], kChannels, pixel, std::min(kPixels, b.pixel_count - pixel),
                          panel.channel, panel.count});
  }
}

// ---- blocks

template <class End, BitOp kOp>
void RunWordsPanel(const BitserialBlock& b, const BitserialPanel& panel, const Passes& passes) {
  if (passes.digits == 1) return RunWords<End, kOp, 1>(b, panel, passes);
  if (passes.digits == 2) return RunWords<End, kOp, 2>(b, panel, passes);
  if constexpr (!std::is_same_v<End, FewCodesEnd>) RunWords<End, kOp, 4>(b, panel, passes);
}

template <BitOp kOp>
void RunPanels(const BitserialBlock& b) {
  const Passes passes(b);
  for (size_t p = 0; p < b.panel_count; ++p) {
    const BitserialPanel& panel = b.panels[p];
    if (b.few_codes != nullptr) {
      RunWordsPanel<FewCodesEnd, kOp>(b, panel, passes);
    } else if (b.terms_fit_words) {
      RunWordsPanel<WordsEnd, kOp>(b, panel, passes);
    } else {
      RunAny<kOp>(b, panel, passes);
    }
  }
}

void RunBlock(const BitserialBlock& b) {
  switch (b.op) {
    case BitOp::kAnd:
      return RunPanels<BitOp::kAnd>(b);
    case BitOp::kXor:
      return RunPanels<BitOp::kXor>(b);
    case BitOp::kMasked:
      return RunPanels<BitOp::kMasked>(b);
  }
}

// ---- packing

// 64 codes as 8 vectors of 8: in a transposed run bit j of a plane's byte i is that of code 8 j + i, so bytes
// are merged as they are. SLI (shift left and insert) puts a vector above the bits that the ones before it
// left. Two such runs fill 128-bit vectors.
constexpr size_t kRun = 64, kRunBytes = kRun / 8;

// By way of a general register, which in-order cores load beside other work.
inline uint64x1_t LoadEight(const uint8_t* p) {
  uint64_t codes;
  std::memcpy(&codes, p, sizeof(codes));
  asm("" : "+r"(codes));
  return vcreate_u64(codes);
}

struct Runs {
  uint8x16_t row[8];

  LOWBIT_ALWAYS_INLINE Runs(const uint8_t* a, const uint8_t* b) {
#pragma GCC unroll 8
    for (size_t j = 0; j < 8; ++j)
      row[j] = vreinterpretq_u8_u64(vcombine_u64(LoadEight(a + 8 * j), LoadEight(b + 8 * j)));
  }

  // Bit `plane` of all codes.
  template <int kPlane>
  LOWBIT_ALWAYS_INLINE uint8x16_t Plane() const {
    const auto shifted = [&](int j) LOWBIT_ALWAYS_INLINE {
      if constexpr (kPlane == 0) {
        return row[j];
      } else {
        return vshrq_n_u8(row[j], kPlane);
      }
    };
    const uint8x16_t a = vsliq_n_u8(shifted(0), shifted(1), 1), b = vsliq_n_u8(shifted(2), shifted(3), 1),
                     c = vsliq_n_u8(shifted(4), shifted(5), 1), d = vsliq_n_u8(shifted(6), shifted(7), 1);
    return vsliq_n_u8(vsliq_n_u8(a, b, 2), vsliq_n_u8(c, d, 2), 4);
  }

  // Both bits of two: fields of two bits are merged first.
  LOWBIT_ALWAYS_INLINE void TwoPlanes(uint8x16_t& low, uint8x16_t& high) const {
    const uint8x16_t even = vsliq_n_u8(vsliq_n_u8(row[0], row[2], 2), vsliq_n_u8(row[4], row[6], 2), 4),
                     odd = vsliq_n_u8(vsliq_n_u8(row[1], row[3], 2), vsliq_n_u8(row[5], row[7], 2), 4);
    const uint8x16_t fields = vdupq_n_u8(0x55);
    low = vbslq_u8(fields, even, vshlq_n_u8(odd, 1));
    high = vbslq_u8(fields, vshrq_n_u8(even, 1), odd);
  }
};

// Goes from one run to the next, through all rows of a packing.
class RunCursor {
 public:
  RunCursor(const DigitPacking& p, size_t runs)
      : x(p.x),
        digits(p.digits),
        runs_(runs),
        x_wrap_(p.rows > 1 ? p.x_pitch - (runs - 1) * kRun : kRun),
        digits_wrap_(p.rows > 1 ? p.pitch - (runs - 1) * kRunBytes : kRunBytes) {}

  LOWBIT_ALWAYS_INLINE void Advance() {
    const bool wraps = ++run_ == runs_;
    x += wraps ? x_wrap_ : kRun;
    digits += wraps ? digits_wrap_ : kRunBytes;
    run_ = wraps ? 0 : run_;
  }

  const uint8_t* x;
  uint8_t* digits;

 private:
  const size_t runs_, x_wrap_, digits_wrap_;
  size_t run_ = 0;
};

// Packs 2 kPairs runs at a time, which may be of neighbouring rows, as long as there are so many; `left` is
// what is left of them. The flip of a code is that of its top plane.
template <int kPlanes, int kPairs>
void PackRuns(const DigitPacking& p, RunCursor& cursor, size_t& left) {
  uint8x16_t flip[kPlanes];
#pragma GCC unroll 4
  for (int plane = 0; plane < kPlanes; ++plane)
    flip[plane] = vdupq_n_u8((p.flip >> plane & 1) != 0 ? 0xff : 0);
  const size_t pitch = p.digit_pitch;
  for (; left >= 2 * kPairs; left -= 2 * kPairs) {
    const uint8_t* x[2 * kPairs];
    uint8_t* to[2 * kPairs];
#pragma GCC unroll 4
    for (int i = 0; i < 2 * kPairs; ++i, cursor.Advance()) {
      x[i] = cursor.x;
      to[i] = cursor.digits;
    }
    uint8x16_t bits[kPairs][kPlanes];
#pragma GCC unroll 2
    for (int i = 0; i < kPairs; ++i) {
      const Runs runs(x[2 * i], x[2 * i + 1]);
      if constexpr (kPlanes == 1) {
        bits[i][0] = runs.Plane<0>();
      } else {
        runs.TwoPlanes(bits[i][0], bits[i][1]);
      }
      if constexpr (kPlanes > 2) bits[i][2] = runs.Plane<2>();
      if constexpr (kPlanes > 3) bits[i][3] = runs.Plane<3>();
    }
#pragma GCC unroll 2
    for (int i = 0; i < kPairs; ++i) {
#pragma GCC unroll 4
      for (int plane = 0; plane < kPlanes; ++plane) {
        const uint8x16_t flipped = veorq_u8(bits[i][plane], flip[plane]);
        vst1_u8(to[2 * i] + static_cast<size_t>(plane) * pitch, vget_low_u8(flipped));
        vst1_u8(to[2 * i + 1] + static_cast<size_t>(plane) * pitch, vget_high_u8(flipped));
      }
    }
  }
}

template <int kPlanes>
void PackAllRuns(const DigitPacking& p, size_t runs) {
  RunCursor cursor(p, runs);
  size_t left = p.rows * runs;
  PackRuns<kPlanes, 2>(p, cursor, left);
  PackRuns<kPlanes, 1>(p, cursor, left);
  if (left == 0) return;
  // The last one, together with itself.
  const DigitPacking last = {cursor.x,      2,         0,       kRun,   cursor.digits, 0,
                             p.digit_pitch, kRunBytes, kPlanes, p.flip, true};
  RunCursor twice(last, 1);
  left = 2;
  PackRuns<kPlanes, 1>(last, twice, left);
}

// Up to 16 codes to two bytes, in order.
uint16_t PackInOrder(const uint8_t* x, size_t codes, uint8_t flip, int plane) {
  uint8_t some[16];
  if (codes < 16) {
    std::memset(some, flip, sizeof(some));  // becomes 0
    std::memcpy(some, x, codes);
    x = some;
  }
  static constexpr uint8_t kBits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t set =
      vtstq_u8(veorq_u8(vld1q_u8(x), vdupq_n_u8(flip)), vdupq_n_u8(static_cast<uint8_t>(1 << plane)));
  uint8x16_t bits = vandq_u8(set, vld1q_u8(kBits));
  bits = vpaddq_u8(bits, bits);
  bits = vpaddq_u8(bits, bits);
  bits = vpaddq_u8(bits, bits);
  return vgetq_lane_u16(vreinterpretq_u16_u8(bits), 0);
}

void Pack(const DigitPacking& p) {
  const size_t runs = p.transposed ? p.codes / kRun : 0;
  if (runs > 0) {
    if (p.planes == 1) PackAllRuns<1>(p, runs);
    if (p.planes == 2) PackAllRuns<2>(p, runs);
    if (p.planes == 3) PackAllRuns<3>(p, runs);
    if (p.planes == 4) PackAllRuns<4>(p, runs);
  }
  if (runs * kRunBytes == p.digit_bytes) return;
  for (size_t row = 0; row < p.rows; ++row) {
    const uint8_t* x = p.x + row * p.x_pitch;
    for (int plane = 0; plane < p.planes; ++plane) {
      uint8_t* to = p.digits + row * p.pitch + static_cast<size_t>(plane) * p.digit_pitch;
      for (size_t byte = runs * kRunBytes; byte < p.digit_bytes; byte += 2) {
        const size_t first = std::min(8 * byte, p.codes);
        const uint16_t bits = PackInOrder(x + first, std::min(p.codes - first, size_t{16}), p.flip, plane);
        std::memcpy(to + byte, &bits, std::min(p.digit_bytes - byte, size_t{2}));
      }
    }
  }
}

constexpr BitserialEngine kEngine = {.lanes = kChannels,
                                     .lane_step = 1,
                                     .max_vectors = 1,
                                     .unit_bits = 8 * kUnitBytes,
                                     .digit_planes = 1,
                                     .codes_per_byte = 8,
                                     .has_masked = true,
                                     .masks_by_selection = true,
                                     .masked_operations = 60.0 / 54.0,
                                     .few_codes_bits = kFewCodesDigits,
                                     .few_sums = false,
                                     .transposed_codes = kRun,
                                     .block_bytes = 16 * 1024,  // half of the L1 of a Cortex-A53
                                                                // Modelled Cortex-A53.
                                     .products_per_cycle = 37.9,
                                     .fetch_cycles = 0.0,
                                     .outputs_per_cycle = 0.42,
                                     .few_codes_per_cycle = 10.0,
                                     .sums_per_cycle = 0.77,
                                     .code_cycles = 0.25,
                                     .digit_cycles = 0.15,
                                     .call_cycles = 500,
                                     .tile_rows = kTileRows,
                                     .least_rows = kTileRows / 2,
                                     .digits_are_rows = true,
                                     .pack = &Pack,
                                     .run = &RunBlock};

constexpr BitserialEngine OutOfOrder() {
  BitserialEngine engine = kEngine;
  // Modelled Cortex-A72.
  engine.products_per_cycle = 58.0;
  engine.outputs_per_cycle = 0.7;
  engine.sums_per_cycle = 1.5;
  engine.code_cycles = 0.2;
  engine.digit_cycles = 0.1;
  engine.masked_operations = 1.6;
  return engine;
}

}  // namespace

const BitserialEngine kBitserialInOrder = kEngine, kBitserialOutOfOrder = OutOfOrder();

}  // namespace lowbit
