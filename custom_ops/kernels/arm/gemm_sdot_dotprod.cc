// Four 8-bit products a 32-bit lane: SDOT by element. ARMv8.2 with the dot product extension.
//
//   w    c0 k0..3 | c1 k0..3 | c2 k0..3 | c3 k0..3      4 channels, two such vectors a step
//   x    p0 k0..3 | p1 k0..3 | p2 k0..3 | p3 k0..3      4 pixels; SDOT takes one of them for all lanes
//
// Sums are 32 bits wide from the first product: nothing is flushed.
#include <arm_neon.h>

#include <cstdint>

#include "kernels/arm/gemm_scheme.h"

namespace lowbit {
namespace {

constexpr size_t kChannels = 8;

template <int kPixels>
void Tile(const GemmTile& t) {
  const auto* w = reinterpret_cast<const int8_t*>(t.w);
  const auto* x8 = reinterpret_cast<const int8_t*>(t.x);
  const int8_t* x4 = x8 + (kPixels >= 8 ? t.steps * 32 : 0);
  int32x4_t acc[kPixels][2];
  if (t.bias != nullptr) {
    const int32x4_t bias[2] = {vld1q_s32(t.bias), vld1q_s32(t.bias + 4)};
#pragma GCC unroll 12
    for (int p = 0; p < kPixels; ++p) {
      acc[p][0] = bias[0];
      acc[p][1] = bias[1];
    }
  } else {
#pragma GCC unroll 12
    for (int p = 0; p < kPixels; ++p) {
      acc[p][0] = vld1q_s32(t.sums + p * 8);
      acc[p][1] = vld1q_s32(t.sums + p * 8 + 4);
    }
  }
  // Pixels p .. p + 3, those of one vector.
  const auto dot = [&](int32x4_t(*to)[2], int8x16_t w0, int8x16_t w1, int8x16_t x)
                       __attribute__((always_inline)) {
                         to[0][0] = vdotq_laneq_s32(to[0][0], w0, x, 0);
                         to[0][1] = vdotq_laneq_s32(to[0][1], w1, x, 0);
                         to[1][0] = vdotq_laneq_s32(to[1][0], w0, x, 1);
                         to[1][1] = vdotq_laneq_s32(to[1][1], w1, x, 1);
                         to[2][0] = vdotq_laneq_s32(to[2][0], w0, x, 2);
                         to[2][1] = vdotq_laneq_s32(to[2][1], w1, x, 2);
                         to[3][0] = vdotq_laneq_s32(to[3][0], w0, x, 3);
                         to[3][1] = vdotq_laneq_s32(to[3][1], w1, x, 3);
                       };
  for (size_t s = 0; s < t.steps; ++s) {
    const int8x16_t w0 = vld1q_s8(w), w1 = vld1q_s8(w + 16);
    w += 32;
    if constexpr (kPixels >= 8) {
      const int8x16_t x0 = vld1q_s8(x8), x1 = vld1q_s8(x8 + 16);
      x8 += 32;
      dot(acc, w0, w1, x0);
      dot(acc + 4, w0, w1, x1);
    }
    if constexpr (kPixels % 8 != 0) {
      const int8x16_t x = vld1q_s8(x4);
      x4 += 16;
      dot(acc + (kPixels - 4), w0, w1, x);
    }
  }
#pragma GCC unroll 12
  for (int p = 0; p < kPixels; ++p) {
    vst1q_s32(t.sums + p * 8, acc[p][0]);
    vst1q_s32(t.sums + p * 8 + 4, acc[p][1]);
  }
}

// The first pixel of a tile of 4; steps take turns with two pairs of sums, because SDOT waits for its own.
void Pixel(const GemmTile& t) {
  const auto *w = reinterpret_cast<const int8_t*>(t.w), *x = reinterpret_cast<const int8_t*>(t.x);
  const int32_t* from = t.bias != nullptr ? t.bias : t.sums;
  int32x4_t even[2] = {vld1q_s32(from), vld1q_s32(from + 4)}, odd[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
  const auto dot = [&](int32x4_t(&sums)[2]) __attribute__((always_inline)) {
    const int8x16_t value = vreinterpretq_s8_s32(vld1q_dup_s32(reinterpret_cast<const int32_t*>(x)));
    sums[0] = vdotq_s32(sums[0], vld1q_s8(w), value);
    sums[1] = vdotq_s32(sums[1], vld1q_s8(w + 16), value);
    w += 32;
    x += 16;
  };
  size_t left = t.steps;
  for (; left >= 2; left -= 2) {
    dot(even);
    dot(odd);
  }
  if (left > 0) dot(even);
  vst1q_s32(t.sums, vaddq_s32(even[0], odd[0]));
  vst1q_s32(t.sums + 4, vaddq_s32(even[1], odd[1]));
}

void Tile4(const GemmTile& t) { return t.pixels == 1 ? Pixel(t) : Tile<4>(t); }

size_t Flush(const GemmOperands&) { return 1; }

// Two SDOT a cycle (modelled Neoverse N1).
double MacsPerCycle(Pipeline, size_t) { return 32; }

}  // namespace

const GemmScheme kGemmSdot = {
    .channels = kChannels,
    .unit = 4,
    .k_multiple = 4,
    .form = GemmForm::kBytes,
    .flush = &Flush,
    .macs_per_cycle = &MacsPerCycle,
    .tile = {&EachTile<kChannels, 4, 4, &Tile4>, &EachTile<kChannels, 8, 4, &Tile<8>>,
             &EachTile<kChannels, 12, 4, &Tile<12>>},
};

}  // namespace lowbit
