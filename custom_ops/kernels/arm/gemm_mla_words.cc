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
#include <cstdint>

#include "kernels/arm/gemm_scheme.h"

namespace lowbit {
namespace {

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
// The same where the sums begin at the bias, which is in v6..v9; v10..v13 are free.
#define LOWBIT_BIAS(A, B, LOW, HIGH, SUM)                \
  "saddw v" A ".4s, v" LOW ".4s, v" SUM ".4h\n"          \
  "saddw2 v" B ".4s, v" HIGH ".4s, v" SUM ".8h\n"
#define LOWBIT_LOAD_BIAS           \
  "ldp q6, q7, [%[bias]]\n"        \
  "ldp q8, q9, [%[bias], #32]\n"
#define LOWBIT_BEGIN_PIXEL(SUM0, SUM1, AT0, AT1)                                       \
  LOWBIT_BIAS("10", "11", "6", "7", SUM0) LOWBIT_BIAS("12", "13", "8", "9", SUM1)      \
  LOWBIT_STORE("10", "11", AT0) LOWBIT_STORE("12", "13", AT1)
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
  const int32_t* bias = t.bias;
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
      "3:\n"
      "cbz %[bias], 4f\n"  //
      LOWBIT_LOAD_BIAS
      LOWBIT_BEGIN_PIXEL("16", "17", "0", "32") LOWBIT_BEGIN_PIXEL("18", "19", "64", "96")
      LOWBIT_BEGIN_PIXEL("20", "21", "128", "160") LOWBIT_BEGIN_PIXEL("22", "23", "192", "224")
      LOWBIT_BEGIN_PIXEL("24", "25", "256", "288") LOWBIT_BEGIN_PIXEL("26", "27", "320", "352")
      LOWBIT_BEGIN_PIXEL("28", "29", "384", "416") LOWBIT_BEGIN_PIXEL("30", "31", "448", "480")
      "mov %[bias], xzr\n"
      "cbnz %[left], 1b\n"
      "b 5f\n"
      "4:\n"  //
      LOWBIT_FLUSH
      "cbnz %[left], 1b\n"
      "5:\n"
      : [w] "+&r"(w), [x] "+&r"(x), [left] "+&r"(left), [count] "+&r"(count), [high] "+&r"(high),
        [bias] "+&r"(bias)
      : [sums] "r"(t.sums), [flush] "r"(flush)
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",
        "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30",
        "v31");
}
#undef LOWBIT_STEP
#undef LOWBIT_STEP_A
#undef LOWBIT_STEP_B

// 4 pixels, for the rest of a block: the same with 16-bit sums v16..v23 and whole vectors of weights.
#define LOWBIT_STEP(OP, W0, W1, X, NEXT_W0, NEXT_W1, NEXT_X)                          \
  LOWBIT_PRODUCT(OP, "16", W0, X, "0") LOWBIT_PRODUCT(OP, "17", W1, X, "0")           \
  "ldp q" NEXT_W0 ", q" NEXT_W1 ", [%[w]], #32\n"                                     \
  LOWBIT_PRODUCT(OP, "18", W0, X, "1") LOWBIT_PRODUCT(OP, "19", W1, X, "1")           \
  "ldr d" NEXT_X ", [%[x]], #8\n"                                                     \
  LOWBIT_PRODUCT(OP, "20", W0, X, "2") LOWBIT_PRODUCT(OP, "21", W1, X, "2")           \
  LOWBIT_PRODUCT(OP, "22", W0, X, "3") LOWBIT_PRODUCT(OP, "23", W1, X, "3")
#define LOWBIT_STEP_A(OP) LOWBIT_STEP(OP, "0", "1", "2", "3", "4", "5")
#define LOWBIT_STEP_B(OP) LOWBIT_STEP(OP, "3", "4", "5", "0", "1", "2")
void Tile4(const GemmTile& t) {
  const uint8_t *w = t.w, *x = t.x;
  const int32_t* bias = t.bias;
  size_t left = t.steps / 2, count = 0;
  const size_t flush = t.flush / 2;
  asm volatile(
      "ldp q0, q1, [%[w]], #32\n"
      "ldr d2, [%[x]], #8\n"
      "1:\n"
      "cmp %[left], %[flush]\n"
      "csel %[count], %[left], %[flush], lo\n"
      "sub %[left], %[left], %[count]\n"  //
      LOWBIT_STEP_A("mul") LOWBIT_DECREMENT LOWBIT_STEP_B("mla")
      "b.eq 3f\n"
      "2:\n"  //
      LOWBIT_STEP_A("mla") LOWBIT_DECREMENT LOWBIT_STEP_B("mla")
      "b.ne 2b\n"
      "3:\n"
      "cbz %[bias], 4f\n"  //
      LOWBIT_LOAD_BIAS
      LOWBIT_BEGIN_PIXEL("16", "17", "0", "32") LOWBIT_BEGIN_PIXEL("18", "19", "64", "96")
      LOWBIT_BEGIN_PIXEL("20", "21", "128", "160") LOWBIT_BEGIN_PIXEL("22", "23", "192", "224")
      "mov %[bias], xzr\n"
      "cbnz %[left], 1b\n"
      "b 5f\n"
      "4:\n"  //
      LOWBIT_LOAD("6", "7", "0") LOWBIT_LOAD("8", "9", "32") LOWBIT_ADD("6", "7", "16")
      LOWBIT_LOAD("10", "11", "64") LOWBIT_STORE("6", "7", "0") LOWBIT_ADD("8", "9", "17")
      LOWBIT_LOAD("12", "13", "96") LOWBIT_STORE("8", "9", "32") LOWBIT_ADD("10", "11", "18")
      LOWBIT_LOAD("6", "7", "128") LOWBIT_STORE("10", "11", "64") LOWBIT_ADD("12", "13", "19")
      LOWBIT_LOAD("8", "9", "160") LOWBIT_STORE("12", "13", "96") LOWBIT_ADD("6", "7", "20")
      LOWBIT_LOAD("10", "11", "192") LOWBIT_STORE("6", "7", "128") LOWBIT_ADD("8", "9", "21")
      LOWBIT_LOAD("12", "13", "224") LOWBIT_STORE("8", "9", "160") LOWBIT_ADD("10", "11", "22")
      LOWBIT_STORE("10", "11", "192") LOWBIT_ADD("12", "13", "23") LOWBIT_STORE("12", "13", "224")
      "cbnz %[left], 1b\n"
      "5:\n"
      : [w] "+&r"(w), [x] "+&r"(x), [left] "+&r"(left), [count] "+&r"(count), [bias] "+&r"(bias)
      : [sums] "r"(t.sums), [flush] "r"(flush)
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",
        "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23");
}
// clang-format on

// Even, because steps come in pairs.
size_t Flush(const GemmOperands& operands) {
  return LongestSafeRun(operands, 1, INT16_MIN, INT16_MAX, kMaxFlush) / 2 * 2;
}

// A step of 128 products takes 16 multiplications, loads of 3 cycles; a flush: 16 times 8 cycles of loads and
// stores (modelled Cortex-A53). On A72 a multiplication takes two cycles.
double MacsPerCycle(Pipeline pipeline, size_t flush) {
  const auto n = static_cast<double>(flush);
  return 128.0 / (pipeline == Pipeline::kInOrder ? 19.0 + 135.0 / n : 32.0 + 63.0 / n);
}

}  // namespace

const GemmScheme kGemmMlaWords = {
    .channels = 16,
    .unit = 1,
    .k_multiple = 2,
    .form = GemmForm::kWords,
    .flush = &Flush,
    .macs_per_cycle = &MacsPerCycle,
    .tile = {&EachTile<16, 4, 2, &Tile4>, &EachTile<16, 8, 2, &Tile8>, nullptr},
};

}  // namespace lowbit
