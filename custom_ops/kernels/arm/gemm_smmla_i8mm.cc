// 2 x 8 times 8 x 2 products an instruction: SMMLA. ARMv8.6, or v8.2 with the int8 matrix extension.
//
//   x    p0 k0..7 | p1 k0..7          SMMLA ->  32-bit lanes  [p0 c0] [p0 c1] [p1 c0] [p1 c1]
//   w    c0 k0..7 | c1 k0..7
//
// Sums are 32 bits wide from the first product: nothing is flushed. They are brought into the order of pixels
// at the end.
#include <arm_neon.h>

#include <cstdint>

#include "kernels/arm/gemm_scheme.h"

namespace lowbit {
namespace {

constexpr size_t kChannels = 8;

// The first halves of two vectors, and the second ones.
inline int32x4_t LowHalves(int32x4_t a, int32x4_t b) {
  return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}
inline int32x4_t HighHalves(int32x4_t a, int32x4_t b) {
  return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}

// The first kPixels of kStored pixels.
template <int kPixels, int kStored>
void Tile(const GemmTile& t) {
  const auto* w = reinterpret_cast<const int8_t*>(t.w);
  const auto* x = reinterpret_cast<const int8_t*>(t.x);
  int32x4_t acc[kPixels / 2][4];
#pragma GCC unroll 4
  for (int p = 0; p < kPixels / 2; ++p) {
    const int32_t* even = t.bias != nullptr ? t.bias : t.sums + static_cast<size_t>(2 * p) * kChannels;
    const int32_t* odd = t.bias != nullptr ? t.bias : even + kChannels;
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) acc[p][c] = vcombine_s32(vld1_s32(even + 2 * c), vld1_s32(odd + 2 * c));
  }
  for (size_t s = 0; s < t.steps; ++s) {
    int8x16_t rows[kPixels / 2], columns[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) columns[c] = vld1q_s8(w + c * 16);
#pragma GCC unroll 4
    for (int p = 0; p < kPixels / 2; ++p) rows[p] = vld1q_s8(x + p * 16);
    w += 64;
    x += kStored * 8;
#pragma GCC unroll 4
    for (int p = 0; p < kPixels / 2; ++p) {
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) acc[p][c] = vmmlaq_s32(acc[p][c], rows[p], columns[c]);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < kPixels / 2; ++p) {
    int32_t* even = t.sums + static_cast<size_t>(2 * p) * kChannels;
    vst1q_s32(even, LowHalves(acc[p][0], acc[p][1]));
    vst1q_s32(even + 4, LowHalves(acc[p][2], acc[p][3]));
    vst1q_s32(even + 8, HighHalves(acc[p][0], acc[p][1]));
    vst1q_s32(even + 12, HighHalves(acc[p][2], acc[p][3]));
  }
}

void Tile4(const GemmTile& t) { return t.pixels <= 2 ? Tile<2, 4>(t) : Tile<4, 4>(t); }

size_t Flush(const GemmOperands&) { return 1; }

// Two SMMLA a cycle, each of 32 products, on half of the loop's instructions' slots (modelled Neoverse V1).
double MacsPerCycle(Pipeline, size_t) { return 100; }

}  // namespace

const GemmScheme kGemmSmmla = {
    .channels = kChannels,
    .unit = 8,
    .k_multiple = 8,
    .form = GemmForm::kBytes,
    .flush = &Flush,
    .macs_per_cycle = &MacsPerCycle,
    .tile = {&EachTile<kChannels, 4, 8, &Tile4>, &EachTile<kChannels, 8, 8, &Tile<8, 8>>},
};

}  // namespace lowbit
