// Products in 16-bit sums: the GEMM of "Extremely Low-bit Convolution Optimization for Quantized Neural
// Network on Modern Computer Architectures" (ICPP 2020) for 4 to 8 bits: SMLAL, SMLAL2 and, every `flush`
// steps, SADDW. ARMv8.0.
//
//   w    c0 c1 ... c15          one k of 16 channels (LD1)
//   x    p0 p0 ... | p1 p1 ...  the same k of four pixels, each replicated (LD4R)
//   SMLAL, SMLAL2 -> 8 vectors of 16-bit sums, two a pixel
//
// Overflow. A 16-bit lane holds one product a step, and `flush` is the longest run of successive products
// that fits int16. The paper's intervals are 511, 127, 31, 8 and 2 steps for 4 to 8 bits, from (2^15 - 1) /
// 2^(2b - 2). At full range the last two overflow: 8 * -64 * -64 = 2 * -128 * -128 = 2^15. They hold once
// the least weight is left out. Here the number comes from the values that meet: 7 steps for full 7-bit
// ranges, none for 8 bits (one product a flush is refused: that is SMULL's work), and more where the weights
// allow.
#include <cstdint>

#include "kernels/arm/gemm_scheme.h"

namespace lowbit {
namespace {

constexpr size_t kChannels = 16;
constexpr size_t kMaxFlush = 8192;

// The paper's registers. Step A has its weights in v0 and the pixels in v2..v5, step B in v1 and v6..v9, so
// that the loads of one run beside the products (OP is SMULL or SMLAL) of the other. 16-bit sums are
// v10..v17. Of the 16 vectors of 32-bit sums 14 are v18..v31. The paper keeps the last two in general
// registers; here they stay in memory: a load and a store a flush are no slower than the moves.
// clang-format off
#define LOWBIT_STEP(OP, W, X0, X1, X2, X3, NEXT_W, NEXT_X)           \
  OP " v10.8h, v" W ".8b, v" X0 ".8b\n"                              \
  OP "2 v11.8h, v" W ".16b, v" X0 ".16b\n"                           \
  "ldr q" NEXT_W ", [%[w]], #16\n"                                   \
  OP " v12.8h, v" W ".8b, v" X1 ".8b\n"                              \
  OP "2 v13.8h, v" W ".16b, v" X1 ".16b\n"                           \
  "ld4r {" NEXT_X "}, [%[x]], #4\n"                                  \
  OP " v14.8h, v" W ".8b, v" X2 ".8b\n"                              \
  OP "2 v15.8h, v" W ".16b, v" X2 ".16b\n"                           \
  OP " v16.8h, v" W ".8b, v" X3 ".8b\n"                              \
  OP "2 v17.8h, v" W ".16b, v" X3 ".16b\n"
#define LOWBIT_STEP_A(OP) LOWBIT_STEP(OP, "0", "2", "3", "4", "5", "1", "v6.16b, v7.16b, v8.16b, v9.16b")
#define LOWBIT_STEP_B(OP) LOWBIT_STEP(OP, "1", "6", "7", "8", "9", "0", "v2.16b, v3.16b, v4.16b, v5.16b")
#define LOWBIT_DECREMENT "subs %[count], %[count], #1\n"
#define LOWBIT_ADD(LOW, HIGH, SUM)                        \
  "saddw v" LOW ".4s, v" LOW ".4s, v" SUM ".4h\n"         \
  "saddw2 v" HIGH ".4s, v" HIGH ".4s, v" SUM ".8h\n"

void Tile(const GemmTile& t) {
  const uint8_t *w = t.w, *x = t.x;
  size_t left = t.steps / 2, count = 0;
  const size_t flush = t.flush / 2;
  GemmBegin begin(t, kChannels);
  asm volatile(
      "ldp q18, q19, [%[from]]\n"
      "ldp q20, q21, [%[from], #32]\n"
      "add %[from], %[from], %[pitch]\n"
      "ldp q22, q23, [%[from]]\n"
      "ldp q24, q25, [%[from], #32]\n"
      "add %[from], %[from], %[pitch]\n"
      "ldp q26, q27, [%[from]]\n"
      "ldp q28, q29, [%[from], #32]\n"
      "add %[from], %[from], %[pitch]\n"
      "ldp q30, q31, [%[from]]\n"
      "ldp q6, q7, [%[from], #32]\n"
      "stp q6, q7, [%[sums], #224]\n"
      "ldr q0, [%[w]], #16\n"
      "ld4r {v2.16b, v3.16b, v4.16b, v5.16b}, [%[x]], #4\n"
      "1:\n"
      "cmp %[left], %[flush]\n"
      "csel %[count], %[left], %[flush], lo\n"
      "sub %[left], %[left], %[count]\n"  //
      LOWBIT_STEP_A("smull") LOWBIT_DECREMENT LOWBIT_STEP_B("smlal")
      "b.eq 3f\n"
      "2:\n"  //
      LOWBIT_STEP_A("smlal") LOWBIT_DECREMENT LOWBIT_STEP_B("smlal")
      "b.ne 2b\n"
      "3:\n"
      "ldp q6, q7, [%[sums], #224]\n"  //
      LOWBIT_ADD("18", "19", "10") LOWBIT_ADD("20", "21", "11") LOWBIT_ADD("6", "7", "17")
      "stp q6, q7, [%[sums], #224]\n"  //
      LOWBIT_ADD("22", "23", "12") LOWBIT_ADD("24", "25", "13") LOWBIT_ADD("26", "27", "14")
      LOWBIT_ADD("28", "29", "15") LOWBIT_ADD("30", "31", "16")
      "cbnz %[left], 1b\n"
      "stp q18, q19, [%[sums]]\n"
      "stp q20, q21, [%[sums], #32]\n"
      "stp q22, q23, [%[sums], #64]\n"
      "stp q24, q25, [%[sums], #96]\n"
      "stp q26, q27, [%[sums], #128]\n"
      "stp q28, q29, [%[sums], #160]\n"
      "stp q30, q31, [%[sums], #192]\n"
      : [w] "+&r"(w), [x] "+&r"(x), [from] "+&r"(begin.from), [left] "+&r"(left), [count] "+&r"(count)
      : [sums] "r"(t.sums), [pitch] "r"(begin.pitch), [flush] "r"(flush)
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",
        "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28",
        "v29", "v30", "v31");
}
// clang-format on

// Even, because steps come in pairs.
size_t Flush(const GemmOperands& operands) {
  return LongestSafeRun(operands, 1, INT16_MIN, INT16_MAX, kMaxFlush) / 2 * 2;
}

// A step of 64 products takes 8 multiplications, loads of 4 cycles; a flush 16 SADDW, load, store (modelled
// Cortex-A53). Without the loads on A72.
double MacsPerCycle(Pipeline pipeline, size_t flush) {
  const auto n = static_cast<double>(flush);
  return 64.0 / (pipeline == Pipeline::kInOrder ? 12.0 + 22.0 / n : 8.1 + 12.0 / n);
}

}  // namespace

const GemmScheme kGemmSmlal = {
    .channels = kChannels,
    .unit = 1,
    .k_multiple = 2,
    .form = GemmForm::kBytes,
    .flush = &Flush,
    .macs_per_cycle = &MacsPerCycle,
    .tile = {&EachTile<kChannels, 4, 1, &Tile>, nullptr, nullptr},
};

}  // namespace lowbit
