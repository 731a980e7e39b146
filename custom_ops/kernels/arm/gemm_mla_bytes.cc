// Products in 8-bit sums: the GEMM of "Extremely Low-bit Convolution Optimization for Quantized Neural
// Network on Modern Computer Architectures" (ICPP 2020) for 2 and 3 bits: MLA on bytes, and SADDW twice.
// ARMv8.0.
//
//   w    c0 c1 ... c15          one k of 16 channels (LD1); the wider tile has 32 channels
//   x    p0 p0 ... | p1 p1 ...  the same k of four pixels, each replicated (LD4R)
//   MLA -> 8-bit sums, every `flush` steps SADDW -> 16-bit sums, every kFlushesPerWidening flushes -> int32
//
// Overflow. An 8-bit lane holds one product a step, and `flush` is the longest run of successive products
// that fits int8: 31 for full ranges of 2 bits, 7 (here 6, steps come in pairs) of 3 bits. What a flush adds
// to 16-bit sums lies in [-128, 127], whatever the operands: 256 * -128 = -2^15 still fits.
//
// The paper's tile is 16 channels x 4 pixels, half of whose cycles on in-order cores are loads. With 32
// channels LD4R serves twice as many products, and the registers are full: 8 vectors of 8-bit sums, 16 of
// 16-bit ones, two steps' weights and one step's pixels.
#include <algorithm>
#include <cstdint>

#include "kernels/arm/gemm_scheme.h"

namespace lowbit {
namespace {

constexpr size_t kPixels = 4;
constexpr size_t kFlushesPerWidening = 256;
constexpr size_t kMaxFlush = 4096;

// What is multiplied between two widenings, in pairs of steps.
struct Run {
  const uint8_t* x;
  const uint8_t* w;
  size_t pairs, flush;
  GemmBegin begin;
  int32_t* sums;
};

// clang-format off
#define LOWBIT_PRODUCT(OP, SUM, W, X) OP " v" SUM ".16b, v" W ".16b, v" X ".16b\n"
#define LOWBIT_FLUSH(LOW, HIGH, SUM)                      \
  "saddw v" LOW ".8h, v" LOW ".8h, v" SUM ".8b\n"         \
  "saddw2 v" HIGH ".8h, v" HIGH ".8h, v" SUM ".16b\n"
// Two vectors of 16-bit sums to their 32-bit sums, which were <FROM> behind those of the pixel's first channel.
#define LOWBIT_WIDEN(SUM0, SUM1, FROM0, FROM1, AT0, AT1) \
  "ldp q0, q1, [%[from], #" FROM0 "]\n"         \
  "ldp q2, q3, [%[from], #" FROM1 "]\n"         \
  "saddw v0.4s, v0.4s, v" SUM0 ".4h\n"          \
  "saddw2 v1.4s, v1.4s, v" SUM0 ".8h\n"         \
  "saddw v2.4s, v2.4s, v" SUM1 ".4h\n"          \
  "saddw2 v3.4s, v3.4s, v" SUM1 ".8h\n"         \
  "stp q0, q1, [%[sums], #" AT0 "]\n"           \
  "stp q2, q3, [%[sums], #" AT1 "]\n"
#define LOWBIT_NEXT_PIXEL "add %[from], %[from], %[pitch]\n"
#define LOWBIT_DECREMENT "subs %[count], %[count], #1\n"
#define LOWBIT_COUNT                       \
  "cmp %[left], %[flush]\n"                \
  "csel %[count], %[left], %[flush], lo\n" \
  "sub %[left], %[left], %[count]\n"

// 16 channels. Step A has its weights in v0 and the pixels in v4..v7, step B in v1 and v8..v11; 8-bit sums are
// v12..v15, 16-bit sums v16..v23.
#define LOWBIT_STEP(OP, W, X0, X1, X2, X3, NEXT_W, NEXT_X)                  \
  LOWBIT_PRODUCT(OP, "12", W, X0)                                           \
  "ldr q" NEXT_W ", [%[w]], #16\n"                                          \
  LOWBIT_PRODUCT(OP, "13", W, X1)                                           \
  "ld4r {" NEXT_X "}, [%[x]], #4\n"                                         \
  LOWBIT_PRODUCT(OP, "14", W, X2) LOWBIT_PRODUCT(OP, "15", W, X3)
#define LOWBIT_STEP_A(OP) LOWBIT_STEP(OP, "0", "4", "5", "6", "7", "1", "v8.16b, v9.16b, v10.16b, v11.16b")
#define LOWBIT_STEP_B(OP) LOWBIT_STEP(OP, "1", "8", "9", "10", "11", "0", "v4.16b, v5.16b, v6.16b, v7.16b")
void Multiply16(const Run& run) {
  const uint8_t *w = run.w, *x = run.x;
  const int32_t* from = run.begin.from;
  size_t left = run.pairs, count = 0;
  asm volatile(
      "ldr q0, [%[w]], #16\n"
      "ld4r {v4.16b, v5.16b, v6.16b, v7.16b}, [%[x]], #4\n"
      "movi v16.2d, #0\n"
      "movi v17.2d, #0\n"
      "movi v18.2d, #0\n"
      "movi v19.2d, #0\n"
      "movi v20.2d, #0\n"
      "movi v21.2d, #0\n"
      "movi v22.2d, #0\n"
      "movi v23.2d, #0\n"
      "1:\n"  //
      LOWBIT_COUNT LOWBIT_STEP_A("mul") LOWBIT_DECREMENT LOWBIT_STEP_B("mla")
      "b.eq 3f\n"
      "2:\n"  //
      LOWBIT_STEP_A("mla") LOWBIT_DECREMENT LOWBIT_STEP_B("mla")
      "b.ne 2b\n"
      "3:\n"  //
      LOWBIT_FLUSH("16", "17", "12") LOWBIT_FLUSH("18", "19", "13") LOWBIT_FLUSH("20", "21", "14")
      LOWBIT_FLUSH("22", "23", "15")
      "cbnz %[left], 1b\n"  //
      LOWBIT_WIDEN("16", "17", "0", "32", "0", "32") LOWBIT_NEXT_PIXEL
      LOWBIT_WIDEN("18", "19", "0", "32", "64", "96") LOWBIT_NEXT_PIXEL
      LOWBIT_WIDEN("20", "21", "0", "32", "128", "160") LOWBIT_NEXT_PIXEL
      LOWBIT_WIDEN("22", "23", "0", "32", "192", "224")
      : [w] "+&r"(w), [x] "+&r"(x), [from] "+&r"(from), [left] "+&r"(left), [count] "+&r"(count)
      : [sums] "r"(run.sums), [pitch] "r"(run.begin.pitch), [flush] "r"(run.flush)
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",
        "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23");
}
#undef LOWBIT_STEP
#undef LOWBIT_STEP_A
#undef LOWBIT_STEP_B

// 32 channels. Step A has its weights in v0 and v1, step B in v2 and v3, and both have the pixels in v4..v7;
// 8-bit sums are v8..v15, 16-bit sums v16..v31. A step ends with the load of its own next weights, so that the
// pixels have arrived when the other step begins.
#define LOWBIT_STEP(OP, W0, W1)                                              \
  LOWBIT_PRODUCT(OP, "8", W0, "4") LOWBIT_PRODUCT(OP, "9", W1, "4")          \
  LOWBIT_PRODUCT(OP, "10", W0, "5") LOWBIT_PRODUCT(OP, "11", W1, "5")        \
  LOWBIT_PRODUCT(OP, "12", W0, "6") LOWBIT_PRODUCT(OP, "13", W1, "6")        \
  LOWBIT_PRODUCT(OP, "14", W0, "7") LOWBIT_PRODUCT(OP, "15", W1, "7")        \
  "ld4r {v4.16b, v5.16b, v6.16b, v7.16b}, [%[x]], #4\n"                      \
  "ldp q" W0 ", q" W1 ", [%[w]], #32\n"
#define LOWBIT_STEP_A(OP) LOWBIT_STEP(OP, "0", "1")
#define LOWBIT_STEP_B(OP) LOWBIT_STEP(OP, "2", "3")
void Multiply32(const Run& run) {
  const uint8_t *w = run.w, *x = run.x;
  const int32_t* from = run.begin.from;
  size_t left = run.pairs, count = 0;
  asm volatile(
      "ldp q0, q1, [%[w]], #32\n"
      "ldp q2, q3, [%[w]], #32\n"
      "ld4r {v4.16b, v5.16b, v6.16b, v7.16b}, [%[x]], #4\n"
      "movi v16.2d, #0\n"
      "movi v17.2d, #0\n"
      "movi v18.2d, #0\n"
      "movi v19.2d, #0\n"
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
      "1:\n"  //
      LOWBIT_COUNT LOWBIT_STEP_A("mul") LOWBIT_DECREMENT LOWBIT_STEP_B("mla")
      "b.eq 3f\n"
      "2:\n"  //
      LOWBIT_STEP_A("mla") LOWBIT_DECREMENT LOWBIT_STEP_B("mla")
      "b.ne 2b\n"
      "3:\n"  //
      LOWBIT_FLUSH("16", "17", "8") LOWBIT_FLUSH("18", "19", "9") LOWBIT_FLUSH("20", "21", "10")
      LOWBIT_FLUSH("22", "23", "11") LOWBIT_FLUSH("24", "25", "12") LOWBIT_FLUSH("26", "27", "13")
      LOWBIT_FLUSH("28", "29", "14") LOWBIT_FLUSH("30", "31", "15")
      "cbnz %[left], 1b\n"  //
      LOWBIT_WIDEN("16", "17", "0", "32", "0", "32")
      LOWBIT_WIDEN("18", "19", "64", "96", "64", "96") LOWBIT_NEXT_PIXEL
      LOWBIT_WIDEN("20", "21", "0", "32", "128", "160")
      LOWBIT_WIDEN("22", "23", "64", "96", "192", "224") LOWBIT_NEXT_PIXEL
      LOWBIT_WIDEN("24", "25", "0", "32", "256", "288")
      LOWBIT_WIDEN("26", "27", "64", "96", "320", "352") LOWBIT_NEXT_PIXEL
      LOWBIT_WIDEN("28", "29", "0", "32", "384", "416")
      LOWBIT_WIDEN("30", "31", "64", "96", "448", "480")
      : [w] "+&r"(w), [x] "+&r"(x), [from] "+&r"(from), [left] "+&r"(left), [count] "+&r"(count)
      : [sums] "r"(run.sums), [pitch] "r"(run.begin.pitch), [flush] "r"(run.flush)
      : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",
        "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28",
        "v29", "v30", "v31");
}
// clang-format on

template <size_t kChannels, void (*kMultiply)(const Run&)>
void Tile(const GemmTile& t) {
  const size_t pairs = t.steps / 2, flush = t.flush / 2, most = kFlushesPerWidening * flush;
  GemmBegin begin(t, kChannels);
  for (size_t done = 0; done < pairs; done += most) {
    kMultiply({t.x + done * 2 * kPixels, t.w + done * 2 * kChannels, std::min(most, pairs - done), flush,
               begin, t.sums});
    begin = GemmBegin(t.sums, kChannels);
  }
}

// Even, because steps come in pairs.
size_t Flush(const GemmOperands& operands) {
  return LongestSafeRun(operands, 1, INT8_MIN, INT8_MAX, kMaxFlush) / 2 * 2;
}

// A step of 64 products takes 4 multiplications, loads of 4 cycles, 8 SADDW a flush; one of 128: 8, 6 and 16
// (modelled Cortex-A53). On A72 a multiplication takes two cycles.
double MacsPerCycle16(Pipeline pipeline, size_t flush) {
  const auto n = static_cast<double>(flush);
  return 64.0 / (8.0 + (pipeline == Pipeline::kInOrder ? 8.0 : 7.0) / n);
}
double MacsPerCycle32(Pipeline pipeline, size_t flush) {
  const auto n = static_cast<double>(flush);
  return 128.0 / (pipeline == Pipeline::kInOrder ? 14.0 + 16.0 / n : 16.0 + 14.0 / n);
}

}  // namespace

const GemmScheme kGemmMlaBytes16 = {
    .channels = 16,
    .unit = 1,
    .k_multiple = 2,
    .form = GemmForm::kBytes,
    .flush = &Flush,
    .macs_per_cycle = &MacsPerCycle16,
    .tile = {&EachTile<16, 4, 1, &Tile<16, &Multiply16>>},
};
const GemmScheme kGemmMlaBytes32 = {
    .channels = 32,
    .unit = 1,
    .k_multiple = 2,
    .form = GemmForm::kBytes,
    .flush = &Flush,
    .macs_per_cycle = &MacsPerCycle32,
    .tile = {&EachTile<32, 4, 1, &Tile<32, &Multiply32>>},
};

}  // namespace lowbit
