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
// operands, so that on in-order cores the loads of one step run beside the multiplications of the other. In
// assembly: compilers copy the registers that LD4R fills, and spill.
#include <arm_neon.h>

#include <algorithm>
#include <cstdint>

#include "kernels/arm/gemm_scheme.h"

namespace lowbit {
namespace {

constexpr size_t kChannels = 8;
constexpr size_t kMaxFlush = 4096;

// Step A has its weights in v0 and the pixels in v1..v4, step B in v5 and v6..v9; 16-bit sums are v10..v17,
// 32-bit sums v24..v31. Each step multiplies (OP is SMULL or SMLAL) and loads the other's operands; the
// weights in halves, the upper one by way of a general register: on a Cortex-A53 a 128-bit load blocks the
// multiplier for two cycles, the halves for one.
// clang-format off
#define LOWBIT_STEP(OP, W, X0, X1, X2, X3, NEXT_W, NEXT_X)  \
  OP " v10.8h, v" W ".8b, v" X0 ".8b\n"                     \
  OP "2 v11.8h, v" W ".16b, v" X0 ".16b\n"                  \
  "ldr d" NEXT_W ", [%[w]], #16\n"                          \
  OP " v12.8h, v" W ".8b, v" X1 ".8b\n"                     \
  OP "2 v13.8h, v" W ".16b, v" X1 ".16b\n"                  \
  "ldr %[high], [%[w], #-8]\n"                              \
  OP " v14.8h, v" W ".8b, v" X2 ".8b\n"                     \
  OP "2 v15.8h, v" W ".16b, v" X2 ".16b\n"                  \
  "ins v" NEXT_W ".d[1], %[high]\n"                         \
  "ld4r {" NEXT_X "}, [%[x]], #8\n"                         \
  OP " v16.8h, v" W ".8b, v" X3 ".8b\n"                     \
  OP "2 v17.8h, v" W ".16b, v" X3 ".16b\n"
#define LOWBIT_STEP_A(OP) LOWBIT_STEP(OP, "0", "1", "2", "3", "4", "5", "v6.8h, v7.8h, v8.8h, v9.8h")
#define LOWBIT_STEP_B(OP) LOWBIT_STEP(OP, "5", "6", "7", "8", "9", "0", "v1.8h, v2.8h, v3.8h, v4.8h")
// With room for scalar instructions, which cost nothing beside SADALP.
#define LOWBIT_FLUSH(SCALAR0, SCALAR1, SCALAR2)  \
  "sadalp v24.4s, v10.8h\n" SCALAR0              \
  "sadalp v25.4s, v11.8h\n" SCALAR1              \
  "sadalp v26.4s, v12.8h\n" SCALAR2              \
  "sadalp v27.4s, v13.8h\n"                      \
  "sadalp v28.4s, v14.8h\n"                      \
  "sadalp v29.4s, v15.8h\n"                      \
  "sadalp v30.4s, v16.8h\n"                      \
  "sadalp v31.4s, v17.8h\n"
#define LOWBIT_LOAD                                 \
  "ldp q24, q25, [%[sums], #0]\n"                   \
  "ldp q26, q27, [%[sums], #32]\n"                  \
  "ldp q28, q29, [%[sums], #64]\n"                  \
  "ldp q30, q31, [%[sums], #96]\n"                  \
  "ldr q0, [%[w]], #16\n"                           \
  "ld4r {v1.8h, v2.8h, v3.8h, v4.8h}, [%[x]], #8\n"
#define LOWBIT_STORE               \
  "stp q24, q25, [%[sums], #0]\n"  \
  "stp q26, q27, [%[sums], #32]\n" \
  "stp q28, q29, [%[sums], #64]\n" \
  "stp q30, q31, [%[sums], #96]\n"
#define LOWBIT_CLOBBERS                                                                            \
  "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", \
  "v13", "v14", "v15", "v16", "v17", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31"

// One product a flush.
void TileOfSingles(const GemmTile& t) {
  const uint8_t *w = t.w, *x = t.x;
  size_t pairs = t.steps / 2;
  uint64_t high;
  asm volatile(
      LOWBIT_LOAD
      "1:\n"
      LOWBIT_STEP_A("smull")
      LOWBIT_FLUSH("", "", "")
      LOWBIT_STEP_B("smull")
      LOWBIT_FLUSH("", "", "")
      "subs %[pairs], %[pairs], #1\n"
      "b.ne 1b\n"
      LOWBIT_STORE
      : [w] "+&r"(w), [x] "+&r"(x), [pairs] "+&r"(pairs), [high] "=&r"(high)
      : [sums] "r"(t.sums)
      : LOWBIT_CLOBBERS);
}

// An even number of products a flush; steps come in pairs because K is a multiple of 4.
void TileOfPairs(const GemmTile& t) {
  const uint8_t *w = t.w, *x = t.x;
  const size_t flush = t.flush / 2;
  size_t count = std::min(t.steps / 2, flush), left = t.steps / 2 - count;
  uint64_t high;
  asm volatile(
      LOWBIT_LOAD
      "1:\n"
      LOWBIT_STEP_A("smull")
      "subs %[count], %[count], #1\n"
      LOWBIT_STEP_B("smlal")
      "b.eq 3f\n"
      "2:\n"
      LOWBIT_STEP_A("smlal")
      "subs %[count], %[count], #1\n"
      LOWBIT_STEP_B("smlal")
      "b.ne 2b\n"
      "3:\n"
      LOWBIT_FLUSH("cmp %[left], %[flush]\n", "csel %[count], %[left], %[flush], lo\n",
                   "sub %[left], %[left], %[count]\n")
      "cbnz %[count], 1b\n"
      LOWBIT_STORE
      : [w] "+&r"(w), [x] "+&r"(x), [left] "+&r"(left), [count] "+&r"(count), [high] "=&r"(high)
      : [sums] "r"(t.sums), [flush] "r"(flush)
      : LOWBIT_CLOBBERS);
}
// clang-format on

void Tile(const GemmTile& t) {
  if (t.flush == 1) return TileOfSingles(t);
  TileOfPairs(t);
}

size_t Flush(const GemmOperands& operands) {
  return LongestSafeRun(operands, 2, INT16_MIN, INT16_MAX, kMaxFlush);
}

// Of 64 products a step: 8 multiplications, loads of 4 cycles, and 8 SADALP a flush (modelled Cortex-A53);
// without the loads on A72.
double MacsPerCycle(Pipeline pipeline, size_t flush) {
  const double products = flush == 1 ? 1.0 : static_cast<double>(flush / 2 * 2);
  return 64.0 / ((pipeline == Pipeline::kInOrder ? 12.0 : 8.0) + 8.0 / products);
}

}  // namespace

const GemmScheme kGemmSmull = {kChannels, 2, 4, GemmForm::kBytes, &Flush, &MacsPerCycle, {&Tile}};

}  // namespace lowbit
