// Winograd F(4x4, 3x3) with 16-bit operands and 32-bit sums: SMLAL, for operands of up to 8 bits. ARMv8.0.
#include <arm_neon.h>

#include <cstdint>

#include "kernels/arm/gemm_finish.h"
#include "kernels/arm/pipeline.h"
#include "kernels/arm/winograd_product.h"
#include "kernels/arm/winograd_schemes.h"
#include "kernels/arm/winograd_transform.h"

namespace lowbit {
namespace {

constexpr size_t kChannels = 8, kProductBytes = 32;
struct Points : PointsOfFour<NeonRing> {
  static constexpr bool kWords = true;
};

// Without branches inside a row: what is independent can run side by side.
template <bool kDirect, bool kAdds>
void OutputTiles(const WinogradOutput& out) {
  constexpr int kT = static_cast<int>(Points::kTile);
  int32x4_t offset[2], base[2];
  for (size_t v = 0; v < 2; ++v) {
    offset[v] = vmulq_n_s32(vld1q_s32(out.offset + 4 * v), Points::kScale / Points::kOneFactor);
    base[v] = kAdds ? vdupq_n_s32(0) : vld1q_s32(out.base + 4 * v);
  }
  const int32x4_t ninth = vreinterpretq_s32_u32(vdupq_n_u32(Points::kOdd));
  const Requantizer<2> requantizer(*out.epilogue, out.channel);
  const size_t y_pitch = out.epilogue->channels, point_pitch = out.point_pitch / sizeof(int32_t);
  for (size_t tile = 0; tile < out.tiles; ++tile) {
    const auto* products = reinterpret_cast<const int32_t*>(out.products + tile * kProductBytes);
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
        sum[i] = vsraq_n_s32(before, vmulq_s32(y[i % 2][i / 2], ninth), Points::kShift);
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

void Product(const WinogradProduct& p) { return p.tiles == 8 ? Product8(p) : Product4(p); }

// 8 channels' steps of 8 tiles are 128 multiplications, 16 loads and an insertion (modelled Cortex-A53). On
// A72 the loads run beside the products, and everything else takes about half as many cycles.
constexpr WinogradCycles kInOrder = {
    .group = 11, .tile = 17, .weights = 1030, .input = 496, .output = 700, .finish = 200, .sums = 90};
constexpr WinogradCycles kOutOfOrder = {
    .group = 1, .tile = 16.25, .weights = 570, .input = 270, .output = 385, .finish = 110, .sums = 60};

}  // namespace

const WinogradScheme kWinogradSmlal = {
    .tile = Points::kTile,
    .channels = kChannels,
    .code_bytes = 2,
    .block = 8,
    .unit = 1,
    .sum_bytes = 4,
    .group = 8,
    .granule = 4,
    .pass_points = 36,
    .scratch_bytes = 256 * 1024,
    .slice_bytes = 256 * 1024,
    .block_tiles = 40,
    .signed_inputs = false,
    .input_offset = 0,
    .bits = 26,
    .chunks_per_widening = 1,
    .g = Points::kG,
    .weights4 = &TransformWeights<Points, 4>,
    .weights8 = &TransformWeights<Points, 8>,
    .input = &TransformWords<Points>,
    .product = &Product,
    .output = &Output,
    .finish = &FinishSums,
    .cycles = []() -> const WinogradCycles& {
      return MachinePipeline() == Pipeline::kInOrder ? kInOrder : kOutOfOrder;
    },
};

}  // namespace lowbit
