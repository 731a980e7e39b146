// Winograd F(4x4, 3x3) in 16-bit lanes: MLA on halfwords modulo 2^16, for operands of few bits. ARMv8.0.
//
// An MLA makes twice the products of an SMLAL, but its sums keep only 16 bits, of which scale^2 may cost few:
// the usual points 0, 1, -1, 2, -2, infinity have scale^2 = 9 * 64 and would leave 10. The 2-adic valuation
// of the scale comes from differences of points, so points that are distinct modulo 2 cost nothing; modulo 2
// there are only 0, 1 and infinity, and six points need each twice. The cheapest are pairs that differ by 2
// and not by 4:
//
//   0, 2    1, -1    infinity, 1/2           scale = 2, times an odd number
//
// Odd numbers have inverses modulo 2^16: B and A may contain them, and scale^2 = 4 leaves y modulo 2^14.
//
// The values at a point (p : q), p/q, of d are sum d[k] M[k], M the product of the other points' factors
// (X q' - Y p'). With e1 = d3 - d1 and e2 = d4 - d2, each times a unit that A undoes:
//
//   0        2 (d4 - d0) - 5 e1         / -5    e1 - 2/5 (d4 - d0)
//   1        2 (e2 - e1) - (d2 + d3)    / -1
//   -1       2 (e1 + e2) - 9 (d3 - d2)  / -9    (d3 - d2) - 2/9 (e1 + e2)
//   2        2 e2 - e1                  / -1
//   1/2      e2 - 2 e1
//   infinity 2 (d5 - d1) - 5 e2         / -5    e2 - 2/5 (d5 - d1)
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "kernels/arm/gemm_finish.h"
#include "kernels/arm/pipeline.h"
#include "kernels/arm/winograd_product.h"
#include "kernels/arm/winograd_schemes.h"
#include "kernels/arm/winograd_transform.h"

namespace lowbit {
namespace {

constexpr size_t kChannels = 16, kProductBytes = 32;

// 1 / odd modulo 2^16: Newton's step doubles the bits that are right, of which there are 3 at first.
constexpr uint16_t Inverse(uint32_t odd) {
  uint32_t inverse = odd;
  for (int i = 0; i < 3; ++i) inverse *= 2 - odd * inverse;
  return static_cast<uint16_t>(inverse);
}
static_assert(static_cast<uint16_t>(9u * Inverse(9)) == 1);

constexpr auto kNinth = static_cast<int16_t>(Inverse(9));
constexpr auto kTwoFifths = static_cast<int16_t>(static_cast<uint16_t>(2u * Inverse(5)));
constexpr auto kTwoNinths = static_cast<int16_t>(static_cast<uint16_t>(2u * Inverse(9)));

struct Points {
  static constexpr bool kWords = true;
  static constexpr int kTile = 4, kOne = 1;
  static constexpr int8_t kG[6][3] = {{1, 0, 0}, {1, 1, 1}, {1, -1, 1}, {1, 2, 4}, {4, 2, 1}, {0, 0, 1}};

  template <class D>
  static inline LOWBIT_ALWAYS_INLINE void Inputs(const D (&d)[6], int16x8_t (&r)[6]) {
    const int16x8_t e1 = NeonRing::Minus(d[3], d[1]), e2 = NeonRing::Minus(d[4], d[2]);
    r[0] = vmlsq_n_s16(e1, NeonRing::Minus(d[4], d[0]), kTwoFifths);
    r[1] = vmlsq_n_s16(NeonRing::Plus(d[2], d[3]), vsubq_s16(e2, e1), 2);
    r[2] = vmlsq_n_s16(NeonRing::Minus(d[3], d[2]), vaddq_s16(e1, e2), kTwoNinths);
    r[3] = vmlsq_n_s16(e1, e2, 2);
    r[4] = vmlsq_n_s16(e2, e1, 2);
    r[5] = vmlsq_n_s16(e2, NeonRing::Minus(d[5], d[1]), kTwoFifths);
  }

  // p^j q^(2-j) at each point.
  static inline LOWBIT_ALWAYS_INLINE void Weights(const int16x8_t (&w)[3], int16x8_t (&r)[6]) {
    const int16x8_t s = vaddq_s16(w[0], w[2]), m = vshlq_n_s16(w[1], 1);
    r[0] = w[0];
    r[1] = vaddq_s16(s, w[1]);
    r[2] = vsubq_s16(s, w[1]);
    r[3] = vmlaq_n_s16(vaddq_s16(m, w[0]), w[2], 4);
    r[4] = vmlaq_n_s16(vaddq_s16(m, w[2]), w[0], 4);
    r[5] = w[2];
  }

  // p^j q^(3-j) at each point, times 2 / N, N its own product of differences, times the unit above: 5, 1, -1,
  // -1/9, 1/9, -5.
  static inline LOWBIT_ALWAYS_INLINE void Outputs(const int16x8_t (&t)[6], int16x8_t (&y)[4]) {
    const int16x8_t s = vaddq_s16(t[1], t[2]), d = vsubq_s16(t[1], t[2]);
    y[0] = vmlaq_n_s16(vmlsq_n_s16(vmlaq_n_s16(d, t[0], 5), t[3], kNinth), t[4], Times(8));
    y[1] = vmlaq_n_s16(vmlsq_n_s16(s, t[3], Times(2)), t[4], Times(4));
    y[2] = vmlaq_n_s16(vmlsq_n_s16(d, t[3], Times(4)), t[4], Times(2));
    y[3] = vmlaq_n_s16(vmlsq_n_s16(vmlsq_n_s16(s, t[5], 5), t[3], Times(8)), t[4], kNinth);
  }

 private:
  // Ninths modulo 2^16.
  static constexpr int16_t Times(int ninths) {
    return static_cast<int16_t>(static_cast<uint16_t>(ninths * Inverse(9)));
  }
};

// A tile's recovered outputs are 14 bits wide: four of them add up inside 16.
constexpr size_t kChunksPerWidening = 4;

enum class Last : uint8_t { kNo, kSums, kDirect };

// Without branches inside a row: what is independent can run side by side.
template <bool kFirst, Last kLast, bool kAdds>
void OutputTiles(const WinogradOutput& out) {
  constexpr int kT = static_cast<int>(Points::kTile);
  const size_t row_pitch = out.row_pitch, point_pitch = out.point_pitch / sizeof(int16_t);
  // 4 times the offset, modulo 2^16
  int16x8_t offset[2];
  int32x4_t base[4];
  for (size_t v = 0; v < 2; ++v) {
    const int32x4_t low = vld1q_s32(out.offset + 8 * v), high = vld1q_s32(out.offset + 8 * v + 4);
    offset[v] = vshlq_n_s16(vcombine_s16(vmovn_s32(low), vmovn_s32(high)), 2);
  }
  for (size_t v = 0; v < 4; ++v) base[v] = kAdds ? vdupq_n_s32(0) : vld1q_s32(out.base + 4 * v);
  const Requantizer<4> requantizer(*out.epilogue, out.channel);
  const size_t y_pitch = out.epilogue->channels;
  for (size_t tile = 0; tile < out.tiles; ++tile) {
    const auto* products = reinterpret_cast<const int16_t*>(out.products + tile * kProductBytes);
    const auto load = [&](int point, int v) LOWBIT_ALWAYS_INLINE {
      return vld1q_s16(products + static_cast<size_t>(point) * point_pitch + v * 8);
    };
    const size_t at = tile * Points::kTile * kChannels;
    int16_t* narrow = static_cast<int16_t*>(out.narrow) + at;
    int32_t* sums = out.sums + at;
    WinogradDirect direct{};
    if (kLast == Last::kDirect) direct = out.direct[tile];
    const auto finish = [&](int row, const int16x8_t(&y)[2][Points::kTile]) LOWBIT_ALWAYS_INLINE {
      if (kLast == Last::kDirect && static_cast<size_t>(row) >= direct.rows) return;
      int16x8_t sum[kT][2];
#pragma GCC unroll 8
      for (int i = 0; i < 2 * kT; ++i) {
        const int16x8_t value = y[i % 2][i / 2];
        sum[i / 2][i % 2] = kFirst ? vshrq_n_s16(value, 2) : vsraq_n_s16(vld1q_s16(narrow + 8 * i), value, 2);
        if (kLast == Last::kNo) vst1q_s16(narrow + 8 * i, sum[i / 2][i % 2]);
      }
      narrow += row_pitch;
      if (kLast == Last::kNo) return;
      uint8x16_t codes[kT];
#pragma GCC unroll 4
      for (int x = 0; x < kT; ++x) {
        int32x4_t whole[4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
          int32_t* to = sums + x * static_cast<int>(kChannels) + 4 * v;
          const int32x4_t before = kAdds ? vld1q_s32(to) : base[v];
          const int16x8_t added = sum[x][v / 2];
          whole[v] = v % 2 == 0 ? vaddw_s16(before, vget_low_s16(added)) : vaddw_high_s16(before, added);
          if (kLast == Last::kSums) vst1q_s32(to, whole[v]);
          whole[v] = requantizer.Code(whole[v], v);
        }
        codes[x] = requantizer.Pack(whole);
      }
      sums += row_pitch;
      if (kLast == Last::kSums) return;
      uint8_t* to = direct.y;
      direct.y += out.y_row_pitch;
      if (direct.columns == Points::kTile) {
#pragma GCC unroll 4
        for (int x = 0; x < kT; ++x) vst1q_u8(to + static_cast<size_t>(x) * y_pitch, codes[x]);
        return;
      }
      vst1q_u8(to, codes[0]);
      if (direct.columns > 1) vst1q_u8(to + y_pitch, codes[1]);
      if (direct.columns > 2) vst1q_u8(to + 2 * y_pitch, codes[2]);
    };
    TransformOutputs<Points, 2>(load, offset, finish);
  }
}

template <bool kFirst, Last kLast>
void OutputLast(const WinogradOutput& out) {
  return out.base != nullptr ? OutputTiles<kFirst, kLast, false>(out) : OutputTiles<kFirst, kLast, true>(out);
}

template <bool kFirst>
void OutputFirst(const WinogradOutput& out) {
  if (!out.last) return OutputTiles<kFirst, Last::kNo, true>(out);
  return out.direct == nullptr ? OutputLast<kFirst, Last::kSums>(out)
                               : OutputLast<kFirst, Last::kDirect>(out);
}

void Output(const WinogradOutput& out) {
  return out.first ? OutputFirst<true>(out) : OutputFirst<false>(out);
}

// The products, in the frame of winograd_product.h. Weights are v8..v15, those of four steps: a step multiplies a
// channel with 16 weights, which were loaded two steps ahead.
//
// clang-format off
#define LOWBIT_TILE(x, s0, s1, w0, w1, k)                 \
  "mla v" #s0 ".8h, v" #w0 ".8h, v" #x ".h[" #k "]\n"     \
  "mla v" #s1 ".8h, v" #w1 ".8h, v" #x ".h[" #k "]\n"
// The same with a load's beginning between: `done` is complete now, `next` begins. The other half of the load
// before comes between the products.
#define LOWBIT_FIRST(x, s, w, k) "mla v" #s ".8h, v" #w ".8h, v" #x ".h[" #k "]\n"
#define LOWBIT_LOW(done, t, next, from, offset) \
  "mov v" #done ".d[1], %[" #t "]\n"            \
  "ldr d" #next ", [%[" #from "], #" #offset "]\n"

// One of the steps 0..6 for 8 tiles; d0 and d1 are completed, n0 and n1 loaded from bytes at0 and at1 of
// `from`, whose upper halves are 8 bytes further.
#define LOWBIT_STEP8(k, w0, w1, d0, d1, n0, n1, from, at0, at0h, at1, at1h) \
  LOWBIT_TILE(0, 16, 17, w0, w1, k)                                   \
  LOWBIT_LOW(d0, a, n0, from, at0)                                       \
  LOWBIT_FIRST(1, 18, w0, k) LOWBIT_HIGH(a, from, at0h) LOWBIT_FIRST(1, 19, w1, k) \
  LOWBIT_TILE(2, 20, 21, w0, w1, k)                                   \
  LOWBIT_TILE(3, 22, 23, w0, w1, k)                                   \
  LOWBIT_TILE(4, 24, 25, w0, w1, k)                                   \
  LOWBIT_LOW(d1, b, n1, from, at1)                                       \
  LOWBIT_FIRST(5, 26, w0, k) LOWBIT_HIGH(b, from, at1h) LOWBIT_FIRST(5, 27, w1, k) \
  LOWBIT_TILE(6, 28, 29, w0, w1, k)                                   \
  LOWBIT_TILE(7, 30, 31, w0, w1, k)

#define LOWBIT_STEP4(k, w0, w1, d0, d1, n0, n1, from, at0, at0h, at1, at1h) \
  LOWBIT_FIRST(0, 16, w0, k)                                          \
  LOWBIT_LOW(d0, a, n0, from, at0)                                       \
  LOWBIT_FIRST(0, 17, w1, k) LOWBIT_HIGH(a, from, at0h)                  \
  LOWBIT_FIRST(1, 18, w0, k)                                          \
  LOWBIT_LOW(d1, b, n1, from, at1)                                       \
  LOWBIT_FIRST(1, 19, w1, k) LOWBIT_HIGH(b, from, at1h)                  \
  LOWBIT_TILE(2, 20, 21, w0, w1, k)                                   \
  LOWBIT_TILE(3, 22, 23, w0, w1, k)

#define LOWBIT_FIRST_WEIGHTS "ldp q8, q9, [%[w]]\n ldp q10, q11, [%[w], #32]\n"

// The last step: the weights of the next block's second step, and its channels.
#define LOWBIT_LAST4                                                                                             \
  LOWBIT_FIRST(0, 16, 14, 7)                                                                                     \
  LOWBIT_LOW(8, a, 10, next_w, 32)                                                                               \
  LOWBIT_FIRST(0, 17, 15, 7) LOWBIT_HIGH(a, next_w, 40)                                                          \
  LOWBIT_LOW(9, b, 0, next_x, 0)                                                                                 \
  LOWBIT_FIRST(1, 18, 14, 7) LOWBIT_HIGH(b, next_x, 8)                                                           \
  LOWBIT_LOW(10, a, 11, next_w, 48)                                                                              \
  LOWBIT_FIRST(1, 19, 15, 7) LOWBIT_HIGH(a, next_w, 56)                                                          \
  LOWBIT_LOW(0, b, 1, next_x, 16)                                                                                \
  "mov %[w], %[next_w]\n"                                                                                        \
  LOWBIT_FIRST(2, 20, 14, 7) LOWBIT_HIGH(b, next_x, 24)                                                          \
  LOWBIT_FIRST(2, 21, 15, 7)                                                                                     \
  LOWBIT_LOW(11, a, 2, next_x, 32)                                                                               \
  "mov %[x], %[next_x]\n"                                                                                        \
  LOWBIT_FIRST(3, 22, 14, 7) LOWBIT_HIGH(a, next_x, 40)                                                          \
  LOWBIT_FIRST(3, 23, 15, 7)                                                                                     \
  LOWBIT_LOW(1, b, 3, next_x, 48)
#define LOWBIT_LAST8                                                                                             \
  LOWBIT_LAST4                                                                                                   \
  LOWBIT_FIRST(4, 24, 14, 7) LOWBIT_HIGH(b, next_x, 56)                                                          \
  LOWBIT_FIRST(4, 25, 15, 7)                                                                                     \
  LOWBIT_LOW(2, a, 4, next_x, 64)                                                                                \
  LOWBIT_FIRST(5, 26, 14, 7) LOWBIT_HIGH(a, next_x, 72)                                                          \
  LOWBIT_FIRST(5, 27, 15, 7)                                                                                     \
  LOWBIT_LOW(3, b, 5, next_x, 80)                                                                                \
  LOWBIT_FIRST(6, 28, 14, 7) LOWBIT_HIGH(b, next_x, 88)                                                          \
  LOWBIT_FIRST(6, 29, 15, 7)                                                                                     \
  LOWBIT_LOW(4, a, 6, next_x, 96)                                                                                \
  LOWBIT_FIRST(7, 30, 14, 7) LOWBIT_HIGH(a, next_x, 104)                                                         \
  LOWBIT_FIRST(7, 31, 15, 7)                                                                                     \
  LOWBIT_LOW(5, b, 7, next_x, 112)

// d0 and d1: the vectors of channels whose upper halves are in a and b.
#define LOWBIT_STEPS(STEP, d0, d1, last)                                                                         \
  LOWBIT_BLOCK(STEP(0, 8, 9, d0, d1, 12, 13, w, 64, 72, 80, 88),                                                 \
  STEP(1, 10, 11, 12, 13, 14, 15, w, 96, 104, 112, 120),                                                         \
  STEP(2, 12, 13, 14, 15, 8, 9, w, 128, 136, 144, 152),                                                          \
  STEP(3, 14, 15, 8, 9, 10, 11, w, 160, 168, 176, 184),                                                          \
  STEP(4, 8, 9, 10, 11, 12, 13, w, 192, 200, 208, 216),                                                          \
  STEP(5, 10, 11, 12, 13, 14, 15, w, 224, 232, 240, 248),                                                        \
  STEP(6, 12, 13, 14, 15, 8, 9, next_w, 0, 8, 16, 24),                                                           \
  last)
#define LOWBIT_STEPS4 LOWBIT_STEPS(LOWBIT_STEP4, 2, 3, LOWBIT_LAST4)
#define LOWBIT_STEPS8 LOWBIT_STEPS(LOWBIT_STEP8, 6, 7, LOWBIT_LAST8)

LOWBIT_PRODUCT(Product8, 8, 256, "v12", "v13", "v14", "v15")
LOWBIT_PRODUCT(Product4, 4, 256, "v12", "v13", "v14", "v15")
// clang-format on

void Product(const WinogradProduct& p) { return p.tiles == 8 ? Product8(p) : Product4(p); }

// 8 channels' steps of 8 tiles are 128 multiplications and 24 loads (modelled Cortex-A53). On A72 a
// multiplication takes two cycles, and everything beside the products about half as many.
constexpr WinogradCycles kInOrder = {
    .group = 19, .tile = 16.75, .weights = 2260, .input = 470, .output = 700, .finish = 570, .sums = 90};
constexpr WinogradCycles kOutOfOrder = {
    .group = 4, .tile = 31.5, .weights = 1240, .input = 260, .output = 385, .finish = 310, .sums = 60};

}  // namespace

const WinogradScheme kWinogradMla = {
    .tile = Points::kTile,
    .channels = kChannels,
    .code_bytes = 2,
    .block = 8,
    .unit = 1,
    .sum_bytes = 2,
    .group = 8,
    .granule = 4,
    .pass_points = 36,
    .scratch_bytes = 256 * 1024,
    .slice_bytes = 256 * 1024,
    .block_tiles = 40,
    .signed_inputs = false,
    .input_offset = 0,
    .bits = 14,
    .chunks_per_widening = kChunksPerWidening,
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
