// The products of operands in 16-bit lanes, in assembly: what winograd_mla.cc and winograd_smlal.cc have in common.
//
// A product takes blocks of 8 channels of 4 or 8 tiles, one after the other, each in 8 steps. A step multiplies
// one channel of every tile with its weights:
//
//   v0..v7     8 channels of a tile each
//   v8..v15    the weights of the next steps, as many vectors as the file uses
//   v16..v31   sums, which stay there for all blocks of an item
//
// A block's steps load the next block's first weights, and its last step the next block's channels, each where
// this block's had their last use; an item's last block loads the next item's, and the last item's loads what
// lies behind (kWinogradOverread). So nothing waits for a load.
//
// For the in-order cores a 128-bit load is LDR D, which issues alone or beside an INS, then LDR X beside a
// multiplication (LOWBIT_HIGH), and two loads later the INS that puts X into the upper half. Such loads take
// turns with the general registers a and b.
//
// A file defines LOWBIT_FIRST_WEIGHTS, LOWBIT_STEPS4 and LOWBIT_STEPS8 (by LOWBIT_BLOCK), from which
// LOWBIT_PRODUCT makes a function.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/winograd_scheme.h"

// clang-format off
#define LOWBIT_HIGH(t, from, offset) "ldr %[" #t "], [%[" #from "], #" #offset "]\n"
#define LOWBIT_ZERO(n) "movi d" #n ", #0\n"

// What depends on the number of tiles: the first block's channels but for the upper half of the last vectors, which
// come by a and b; sums that begin at 0 or go on; sums stored.
#define LOWBIT_CHANNELS4 "ldp q0, q1, [%[x], #0]\n ldp q2, q3, [%[x], #32]\n"
#define LOWBIT_CHANNELS8 LOWBIT_CHANNELS4 "ldp q4, q5, [%[x], #64]\n ldp q6, q7, [%[x], #96]\n"
#define LOWBIT_UPPER_A4 LOWBIT_HIGH(a, x, 40)
#define LOWBIT_UPPER_A8 LOWBIT_HIGH(a, x, 104)
#define LOWBIT_UPPER_B4 LOWBIT_HIGH(b, x, 56)
#define LOWBIT_UPPER_B8 LOWBIT_HIGH(b, x, 120)
#define LOWBIT_ZEROS4                                                                                            \
  LOWBIT_ZERO(16) LOWBIT_ZERO(17) LOWBIT_ZERO(18) LOWBIT_ZERO(19) LOWBIT_ZERO(20) LOWBIT_ZERO(21)                \
  LOWBIT_ZERO(22) LOWBIT_ZERO(23)
#define LOWBIT_ZEROS8                                                                                            \
  LOWBIT_ZEROS4 LOWBIT_ZERO(24) LOWBIT_ZERO(25) LOWBIT_ZERO(26) LOWBIT_ZERO(27)                                  \
  LOWBIT_ZERO(28) LOWBIT_ZERO(29) LOWBIT_ZERO(30) LOWBIT_ZERO(31)
#define LOWBIT_SUMS4(move)                                                                                       \
  #move " q16, q17, [%[to], #0]\n" #move " q18, q19, [%[to], #32]\n"                                             \
  #move " q20, q21, [%[to], #64]\n" #move " q22, q23, [%[to], #96]\n"
#define LOWBIT_SUMS8(move)                                                                                       \
  LOWBIT_SUMS4(move)                                                                                             \
  #move " q24, q25, [%[to], #128]\n" #move " q26, q27, [%[to], #160]\n"                                          \
  #move " q28, q29, [%[to], #192]\n" #move " q30, q31, [%[to], #224]\n"

// Eight steps, and between them what finds the next block: behind this one, or where the next item's first is.
#define LOWBIT_BLOCK(step0, step1, step2, step3, step4, step5, step6, last)                                      \
  step0 "csel %[next_x], %[x_end], %[x_block], eq\n"                                                             \
  step1 "csel %[next_w], %[w_end], %[w_block], eq\n"                                                             \
  step2 "add %[next_x], %[x], %[next_x]\n"                                                                       \
  step3 "add %[next_w], %[w], %[next_w]\n"                                                                       \
  step4 step5 step6 last

// kTiles: 4 or 8. weight_bytes: of a block. Further arguments: the vectors of weights beyond v11 that the steps use.
#define LOWBIT_PRODUCT(name, kTiles, weight_bytes, ...)                                                          \
  void name(const WinogradProduct& p) {                                                                          \
    const uint8_t *x = p.x, *w = p.w, *next_x, *next_w;                                                          \
    uint8_t* to = p.to;                                                                                          \
    const ptrdiff_t blocks = static_cast<ptrdiff_t>(p.blocks), x_block = (kTiles) * 16, w_block = weight_bytes;  \
    /* From an item's last block to the next item. */                                                            \
    const ptrdiff_t x_jump = p.x_step - (blocks - 1) * x_block, w_jump = p.w_step - (blocks - 1) * w_block;      \
    ptrdiff_t left, x_end, w_end;                                                                                \
    size_t count = p.count;                                                                                      \
    uint64_t a, b;                                                                                               \
    const uint64_t adds = p.adds ? 1 : 0;                                                                        \
    asm volatile(                                                                                                \
        LOWBIT_CHANNELS##kTiles LOWBIT_FIRST_WEIGHTS LOWBIT_UPPER_A##kTiles                                      \
        "0:\n"                                                                                                   \
        "cbnz %[adds], 2f\n"                                                                                     \
        LOWBIT_ZEROS##kTiles                                                                                     \
        "b 3f\n"                                                                                                 \
        "2:\n"                                                                                                   \
        LOWBIT_SUMS##kTiles(ldp)                                                                                 \
        "3:\n"                                                                                                   \
        "cmp %[count], #1\n"                                                                                     \
        "csel %[x_end], %[x_block], %[x_jump], eq\n"                                                             \
        "csel %[w_end], %[w_block], %[w_jump], eq\n"                                                             \
        "mov %[left], %[blocks]\n"                                                                               \
        "1:\n"                                                                                                   \
        LOWBIT_UPPER_B##kTiles                                                                                   \
        "subs %[left], %[left], #1\n"                                                                            \
        LOWBIT_STEPS##kTiles                                                                                     \
        "b.ne 1b\n"                                                                                              \
        LOWBIT_SUMS##kTiles(stp)                                                                                 \
        "add %[to], %[to], %[to_step]\n"                                                                         \
        "subs %[count], %[count], #1\n"                                                                          \
        "b.ne 0b\n"                                                                                              \
        : [x] "+&r"(x), [w] "+&r"(w), [next_x] "=&r"(next_x), [next_w] "=&r"(next_w), [to] "+&r"(to),            \
          [left] "=&r"(left), [count] "+&r"(count), [x_end] "=&r"(x_end), [w_end] "=&r"(w_end),                  \
          [a] "=&r"(a), [b] "=&r"(b)                                                                             \
        : [blocks] "r"(blocks), [x_block] "r"(x_block), [w_block] "r"(w_block), [x_jump] "r"(x_jump),            \
          [w_jump] "r"(w_jump), [to_step] "r"(p.to_step), [adds] "r"(adds)                                       \
        : "cc", "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v16",       \
          "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30",      \
          "v31" __VA_OPT__(,) __VA_ARGS__);                                                                      \
  }
// clang-format on
