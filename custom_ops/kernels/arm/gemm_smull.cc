// 8-bit products in 16-bit sums: SMULL, SMLAL and SADALP. ARMv8.0.
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
// There are two tiles, in assembly: compilers copy the registers that LD4R fills, and spill.
//
//   4 pixels x 16 channels   Runs of one or two products. A run's 16-bit sums are temporary, four vectors
//                            at a time, and of four k everything that 16 vectors of 32-bit sums leave
//                            room for.
//   4 pixels x 8 channels    Longer runs: 8 vectors of 16-bit sums and 8 of 32-bit sums.
#include <arm_neon.h>

#include <algorithm>
#include <cstdint>

#include "kernels/arm/gemm_scheme.h"
#include "kernels/common/inline.h"

namespace lowbit {
namespace {

constexpr size_t kPixels = 4, kChannels8 = 8, kChannels16 = 16;
constexpr size_t kMaxFlush = 4096;

#define LOWBIT_CLOBBERS                                                                                   \
  "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", \
      "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27",   \
      "v28", "v29", "v30", "v31"

// The first pixel of a tile: a block's last one may be alone, as in images of 7 x 7.
template <size_t kChannels, bool kSingles>
void Pixel(const GemmTile& t) {
  constexpr int kVectors = kChannels / 4;
  const auto *w = reinterpret_cast<const int8_t*>(t.w), *x = reinterpret_cast<const int8_t*>(t.x);
  const int32_t* from = GemmBegin(t, kChannels).from;
  int32x4_t sums[kVectors];
  for (int v = 0; v < kVectors; ++v) sums[v] = vld1q_s32(from + 4 * v);
  // Long runs come to the narrow tile.
  const size_t run = kChannels == kChannels16 ? 1 : std::max(t.flush / 2, size_t{1});
  for (size_t left = t.steps / 2; left > 0;) {
    int16x8_t products[kVectors];
    for (auto& product : products) product = vdupq_n_s16(0);
    const auto multiply = [&](int8x16_t pair, const int8x16_t* weights) LOWBIT_ALWAYS_INLINE {
      for (int v = 0; v < kVectors; v += 2) {
        products[v] = vmlal_s8(products[v], vget_low_s8(weights[v / 2]), vget_low_s8(pair));
        products[v + 1] = vmlal_high_s8(products[v + 1], weights[v / 2], pair);
      }
    };
    const auto add = [&]() LOWBIT_ALWAYS_INLINE {
      for (int v = 0; v < kVectors; ++v) sums[v] = vpadalq_s16(sums[v], products[v]);
    };
    const size_t quads = std::min(run, left);
    left -= quads;
    for (size_t i = 0; i < quads; ++i, w += 4 * kChannels, x += 4 * kPixels) {
      // Two k of the pixel, in all lanes; the next two are behind those of the other pixels.
      const auto pair = [&](size_t at) LOWBIT_ALWAYS_INLINE {
        return vreinterpretq_s8_s16(vld1q_dup_s16(reinterpret_cast<const int16_t*>(x + at)));
      };
      const int8x16_t first = pair(0), second = pair(2 * kPixels);
      int8x16_t weights[kVectors];
      for (int v = 0; v < kVectors; ++v) weights[v] = vld1q_s8(w + 16 * v);
      multiply(first, weights);
      if constexpr (kSingles) {
        add();
        for (auto& product : products) product = vdupq_n_s16(0);
      }
      multiply(second, weights + kVectors / 2);
    }
    add();
  }
  for (int v = 0; v < kVectors; ++v) vst1q_s32(t.sums + 4 * v, sums[v]);
}

// 16 channels. Of four k, the first two have the pixels in v0..v3 and the weights in v8 and v9, the other two
// v4..v7 and v10 and v11. 16-bit sums are v12..v15, 32-bit sums v16..v31, four a pixel. The operands of the
// next four k are loaded as soon as the last pixel has used their registers. On in-order cores every load
// takes time from the multiplications: LD4R two cycles for its four vectors, and weights one a vector if they
// come in halves, the upper one by way of a general register (an INS and the 64-bit load of another vector
// share a cycle); a 128-bit load would take two.
// clang-format off
#define LOWBIT_FIRST(X)                            \
  "smull v12.8h, v8.8b, v" X ".8b\n"               \
  "smull2 v13.8h, v8.16b, v" X ".16b\n"            \
  "smull v14.8h, v9.8b, v" X ".8b\n"               \
  "smull2 v15.8h, v9.16b, v" X ".16b\n"
#define LOWBIT_SECOND(OP, X)                       \
  OP " v12.8h, v10.8b, v" X ".8b\n"                \
  OP "2 v13.8h, v10.16b, v" X ".16b\n"             \
  OP " v14.8h, v11.8b, v" X ".8b\n"                \
  OP "2 v15.8h, v11.16b, v" X ".16b\n"
#define LOWBIT_ADD(S0, S1, S2, S3)                 \
  "sadalp v" S0 ".4s, v12.8h\n"                    \
  "sadalp v" S1 ".4s, v13.8h\n"                    \
  "sadalp v" S2 ".4s, v14.8h\n"                    \
  "sadalp v" S3 ".4s, v15.8h\n"
// Begins with the upper half of v9 in place and those of v10 and v11 in general registers. BETWEEN are the
// additions where runs are of one product.
#define LOWBIT_QUAD(OP, BETWEEN)                                                               \
  "smull v12.8h, v8.8b, v0.8b\n"                                                               \
  "ins v10.d[1], %[high2]\n"                                                                   \
  "ldr d11, [%[w], #48]\n"                                                                     \
  "smull2 v13.8h, v8.16b, v0.16b\n"                                                            \
  "add %[w], %[w], #64\n"                                                                      \
  "smull v14.8h, v9.8b, v0.8b\n"                                                               \
  "subs %[quads], %[quads], #1\n"                                                              \
  "ins v11.d[1], %[high3]\n"                                                                   \
  "smull2 v15.8h, v9.16b, v0.16b\n"                                                            \
  "csel %[w], %[w_begin], %[w], eq\n"                                                          \
  BETWEEN("16", "17", "18", "19")                                                              \
  LOWBIT_SECOND(OP, "4") LOWBIT_ADD("16", "17", "18", "19")                                    \
  LOWBIT_FIRST("1") BETWEEN("20", "21", "22", "23")                                            \
  LOWBIT_SECOND(OP, "5") LOWBIT_ADD("20", "21", "22", "23")                                    \
  LOWBIT_FIRST("2") BETWEEN("24", "25", "26", "27")                                            \
  LOWBIT_SECOND(OP, "6") LOWBIT_ADD("24", "25", "26", "27")                                    \
  LOWBIT_FIRST("3")                                                                            \
  "ldr d8, [%[w]]\n"                                                                           \
  BETWEEN("28", "29", "30", "31")                                                              \
  OP " v12.8h, v10.8b, v7.8b\n"                                                                \
  "ldr %[high0], [%[w], #8]\n"                                                                 \
  OP "2 v13.8h, v10.16b, v7.16b\n"                                                             \
  "ldr %[high1], [%[w], #24]\n"                                                                \
  OP " v14.8h, v11.8b, v7.8b\n"                                                                \
  "ldr %[high2], [%[w], #40]\n"                                                                \
  OP "2 v15.8h, v11.16b, v7.16b\n"                                                             \
  "ldr %[high3], [%[w], #56]\n"                                                                \
  "ins v8.d[1], %[high0]\n"                                                                    \
  "ldr d9, [%[w], #16]\n"                                                                      \
  "sadalp v28.4s, v12.8h\n"                                                                    \
  "ld4r {v0.8h, v1.8h, v2.8h, v3.8h}, [%[x]], #8\n"                                            \
  "sadalp v29.4s, v13.8h\n"                                                                    \
  "ins v9.d[1], %[high1]\n"                                                                    \
  "ldr d10, [%[w], #32]\n"                                                                     \
  "sadalp v30.4s, v14.8h\n"                                                                    \
  "ld4r {v4.8h, v5.8h, v6.8h, v7.8h}, [%[x]], #8\n"                                            \
  "sadalp v31.4s, v15.8h\n"
#define LOWBIT_NOTHING(S0, S1, S2, S3) ""

// All tiles. The sums of the next one begin while those of the last are stored.
#define LOWBIT_TILES(OP, BETWEEN)                            \
  "ldp q16, q17, [%[from]]\n"                                \
  "ldp q18, q19, [%[from], #32]\n"                           \
  "add %[from], %[from], %[pitch]\n"                         \
  "ldp q20, q21, [%[from]]\n"                                \
  "ldp q22, q23, [%[from], #32]\n"                           \
  "add %[from], %[from], %[pitch]\n"                         \
  "ldp q24, q25, [%[from]]\n"                                \
  "ldp q26, q27, [%[from], #32]\n"                           \
  "add %[from], %[from], %[pitch]\n"                         \
  "ldp q28, q29, [%[from]]\n"                                \
  "ldp q30, q31, [%[from], #32]\n"                           \
  "ldp q8, q9, [%[w]]\n"                                     \
  "ldr d10, [%[w], #32]\n"                                   \
  "ldr %[high2], [%[w], #40]\n"                              \
  "ldr %[high3], [%[w], #56]\n"                              \
  "ld4r {v0.8h, v1.8h, v2.8h, v3.8h}, [%[x]], #8\n"          \
  "ld4r {v4.8h, v5.8h, v6.8h, v7.8h}, [%[x]], #8\n"          \
  "1:\n"                                                     \
  "mov %[quads], %[all_quads]\n"                             \
  "2:\n"                                                     \
  LOWBIT_QUAD(OP, BETWEEN)                                   \
  "b.ne 2b\n"                                                \
  "stp q16, q17, [%[sums]]\n"                                \
  "subs %[count], %[count], #1\n"                            \
  "stp q18, q19, [%[sums], #32]\n"                           \
  "ldp q16, q17, [%[bias]]\n"                                \
  "ldp q18, q19, [%[bias], #32]\n"                           \
  "stp q20, q21, [%[sums], #64]\n"                           \
  "mov v20.16b, v16.16b\n"                                   \
  "mov v21.16b, v17.16b\n"                                   \
  "stp q22, q23, [%[sums], #96]\n"                           \
  "mov v22.16b, v18.16b\n"                                   \
  "mov v23.16b, v19.16b\n"                                   \
  "stp q24, q25, [%[sums], #128]\n"                          \
  "mov v24.16b, v16.16b\n"                                   \
  "mov v25.16b, v17.16b\n"                                   \
  "stp q26, q27, [%[sums], #160]\n"                          \
  "mov v26.16b, v18.16b\n"                                   \
  "mov v27.16b, v19.16b\n"                                   \
  "stp q28, q29, [%[sums], #192]\n"                          \
  "mov v28.16b, v16.16b\n"                                   \
  "mov v29.16b, v17.16b\n"                                   \
  "stp q30, q31, [%[sums], #224]\n"                          \
  "mov v30.16b, v18.16b\n"                                   \
  "mov v31.16b, v19.16b\n"                                   \
  "add %[sums], %[sums], #256\n"                             \
  "b.ne 1b\n"

#define LOWBIT_OPERANDS                                                                                              \
  : [w] "+&r"(w), [x] "+&r"(x), [sums] "+&r"(sums), [from] "+&r"(begin.from), [count] "+&r"(count), [quads] "=&r"(quads),  \
    [high0] "=&r"(high0), [high1] "=&r"(high1), [high2] "=&r"(high2), [high3] "=&r"(high3)                           \
  : [w_begin] "r"(t.w), [bias] "r"(bias), [pitch] "r"(begin.pitch), [all_quads] "r"(t.steps / 2)                           \
  : LOWBIT_CLOBBERS

// Runs of one product, or of two. Without a bias the sums of one tile go on.
template <bool kSingles>
void Multiply16(const GemmTile& t) {
  const uint8_t *w = t.w, *x = t.x;
  int32_t* sums = t.sums;
  GemmBegin begin(t, kChannels16);
  const int32_t* const bias = begin.from;
  size_t count = t.count, quads;
  uint64_t high0, high1, high2, high3;
  if constexpr (kSingles) {
    asm volatile(LOWBIT_TILES("smull", LOWBIT_ADD) LOWBIT_OPERANDS);
  } else {
    asm volatile(LOWBIT_TILES("smlal", LOWBIT_NOTHING) LOWBIT_OPERANDS);
  }
}
// clang-format on

void Tiles16(const GemmTile& t) {
  const bool singles = t.flush == 1;
  const auto multiply = singles ? &Multiply16<true> : &Multiply16<false>;
  const size_t rest = t.pixels % kPixels == 1 ? 1 : 0;
  GemmTile tile = t;
  if (t.bias != nullptr) {
    tile.count = t.count - rest;
    if (tile.count > 0) multiply(tile);
  } else {
    tile.count = 1;
    for (size_t i = 0; i < t.count - rest; ++i) {
      tile.x = t.x + i * kPixels * 2 * t.steps;
      tile.sums = t.sums + i * kPixels * kChannels16;
      multiply(tile);
    }
  }
  if (rest == 0) return;
  tile.x = t.x + (t.count - 1) * kPixels * 2 * t.steps;
  tile.sums = t.sums + (t.count - 1) * kPixels * kChannels16;
  (singles ? &Pixel<kChannels16, true> : &Pixel<kChannels16, false>)(tile);
}

// 8 channels. Step A has its weights in v0 and the pixels in v1..v4, step B in v5 and v6..v9; 16-bit sums are
// v10..v17, 32-bit sums v24..v31. Each step multiplies (OP is SMULL or SMLAL) and loads the other's operands;
// the weights in halves, the upper one by way of a general register: on a Cortex-A53 a 128-bit load blocks
// the multiplier for two cycles, the halves for one.
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
  "ldp q24, q25, [%[from]]\n"                       \
  "add %[from], %[from], %[pitch]\n"                \
  "ldp q26, q27, [%[from]]\n"                       \
  "add %[from], %[from], %[pitch]\n"                \
  "ldp q28, q29, [%[from]]\n"                       \
  "add %[from], %[from], %[pitch]\n"                \
  "ldp q30, q31, [%[from]]\n"                       \
  "ldr q0, [%[w]], #16\n"                           \
  "ld4r {v1.8h, v2.8h, v3.8h, v4.8h}, [%[x]], #8\n"
#define LOWBIT_STORE               \
  "stp q24, q25, [%[sums], #0]\n"  \
  "stp q26, q27, [%[sums], #32]\n" \
  "stp q28, q29, [%[sums], #64]\n" \
  "stp q30, q31, [%[sums], #96]\n"

// One product a flush.
void TileOfSingles(const GemmTile& t) {
  const uint8_t *w = t.w, *x = t.x;
  GemmBegin begin(t, kChannels8);
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
      : [w] "+&r"(w), [x] "+&r"(x), [from] "+&r"(begin.from), [pairs] "+&r"(pairs), [high] "=&r"(high)
      : [sums] "r"(t.sums), [pitch] "r"(begin.pitch)
      : LOWBIT_CLOBBERS);
}

// An even number of products a flush; steps come in pairs because K is a multiple of 4.
void TileOfPairs(const GemmTile& t) {
  const uint8_t *w = t.w, *x = t.x;
  GemmBegin begin(t, kChannels8);
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
      : [w] "+&r"(w), [x] "+&r"(x), [from] "+&r"(begin.from), [left] "+&r"(left), [count] "+&r"(count),
        [high] "=&r"(high)
      : [sums] "r"(t.sums), [pitch] "r"(begin.pitch), [flush] "r"(flush)
      : LOWBIT_CLOBBERS);
}
// clang-format on

void Tile8(const GemmTile& t) {
  const bool one = t.pixels == 1;
  if (t.flush == 1) return one ? Pixel<kChannels8, true>(t) : TileOfSingles(t);
  return one ? Pixel<kChannels8, false>(t) : TileOfPairs(t);
}

size_t Flush(const GemmOperands& operands) {
  return LongestSafeRun(operands, 2, INT16_MIN, INT16_MAX, kMaxFlush);
}

// 256 products take 32 multiplications, 16 SADALP, or 32 where one product is a run, and loads of 9 cycles
// (modelled Cortex-A53). On A72 the loads and SADALP run beside the multiplications.
double MacsPerCycle16(Pipeline pipeline, size_t flush) {
  if (pipeline == Pipeline::kOutOfOrder) return 7.95;
  return 256.0 / (flush == 1 ? 73.0 : 57.0);
}

// A step of 64 products takes 8 multiplications, loads of 4 cycles, a flush 8 SADALP (modelled Cortex-A53);
// without the loads on A72.
double MacsPerCycle8(Pipeline pipeline, size_t flush) {
  const double products = flush == 1 ? 1.0 : static_cast<double>(flush / 2 * 2);
  return 64.0 / ((pipeline == Pipeline::kInOrder ? 12.0 : 8.0) + 8.0 / products);
}

}  // namespace

const GemmScheme kGemmSmull16 = {
    .channels = kChannels16,
    .unit = 2,
    .k_multiple = 4,
    .form = GemmForm::kBytes,
    .flush = &Flush,
    .macs_per_cycle = &MacsPerCycle16,
    .tile = {&Tiles16},
};
const GemmScheme kGemmSmull8 = {
    .channels = kChannels8,
    .unit = 2,
    .k_multiple = 4,
    .form = GemmForm::kBytes,
    .flush = &Flush,
    .macs_per_cycle = &MacsPerCycle8,
    .tile = {&EachTile<kChannels8, kPixels, 2, &Tile8>},
};

}  // namespace lowbit
