// What the transforms of the Winograd schemes share, templated over their one-dimensional steps:
//
//   Points::kTile           outputs, m
//   Points::Inputs(d, r)    inputs -> values at the points, vectors of bytes or of 16-bit words
//   Points::Outputs(t, y)   values at the points -> outputs
//   Points::kOne            the point 1
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels/arm/simd_neon.h"
#include "kernels/arm/winograd_scheme.h"
#include "kernels/common/inline.h"

namespace lowbit {
namespace {

inline int16x8_t Plus(uint8x8_t a, uint8x8_t b) { return vreinterpretq_s16_u16(vaddl_u8(a, b)); }
inline int16x8_t Plus(int16x8_t a, int16x8_t b) { return vaddq_s16(a, b); }
inline int16x8_t Minus(uint8x8_t a, uint8x8_t b) { return vreinterpretq_s16_u16(vsubl_u8(a, b)); }
inline int16x8_t Minus(int16x8_t a, int16x8_t b) { return vsubq_s16(a, b); }
// a - b * factor, factor within a byte
inline int16x8_t MinusProduct(int16x8_t a, uint8x8_t b, uint8_t factor) {
  return vreinterpretq_s16_u16(vmlsl_u8(vreinterpretq_u16_s16(a), b, vdup_n_u8(factor)));
}
inline int16x8_t MinusProduct(int16x8_t a, int16x8_t b, uint8_t factor) {
  return vmlsq_n_s16(a, b, static_cast<int16_t>(factor));
}

// Words of 16 bits from bytes: columns first, then rows. The differences of bytes that a step begins with
// widen them on the way.
template <class Points>
void TransformWords(const WinogradInput& in) {
  constexpr int kN = Points::kTile + 2;
  const uint8x8_t shift = vdup_n_u8(in.shift);
  uint8_t* to = in.to;
  for (size_t block = 0; block < in.blocks; ++block, to += in.block_pitch) {
    const size_t channel = block * 8;
    int16x8_t columns[kN][kN];
#pragma GCC unroll 6
    for (int x = 0; x < kN; ++x) {
      uint8x8_t d[kN];
#pragma GCC unroll 6
      for (int y = 0; y < kN; ++y) d[y] = vsub_u8(vld1_u8(in.pixels[y * kN + x] + channel), shift);
      int16x8_t r[kN];
      Points::Inputs(d, r);
#pragma GCC unroll 6
      for (int y = 0; y < kN; ++y) columns[y][x] = r[y];
    }
    uint8_t* point = to;
#pragma GCC unroll 6
    for (int y = 0; y < kN; ++y) {
      int16x8_t r[kN];
      Points::Inputs(columns[y], r);
#pragma GCC unroll 6
      for (int x = 0; x < kN; ++x, point += in.point_pitch)
        vst1q_s16(reinterpret_cast<int16_t*>(point), r[x]);
    }
  }
}

// The products of a tile, kVectors vectors each: columns first, then rows. `offset` is added where the values
// at the point (1, 1) are, whose column of A is all ones: it reaches every output once. finish(row, outputs)
// takes the outputs of a row, [vector][pixel].
//
// Loops, because the compiler would not find registers for a whole tile.
template <class Points, int kVectors, class V, class Load, class Finish>
inline LOWBIT_ALWAYS_INLINE void TransformOutputs(const Load& load, const V (&offset)[kVectors],
                                                  const Finish& finish) {
  constexpr int kN = Points::kTile + 2, kT = Points::kTile;
  V rows[kT][kN][kVectors];
#pragma GCC unroll 1
  for (int x = 0; x < kN; ++x) {
    V t[kVectors][kN], y[kVectors][kT];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 6
      for (int i = 0; i < kN; ++i) t[v][i] = load(i * kN + x, v);
    }
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      Points::Outputs(t[v], y[v]);
#pragma GCC unroll 4
      for (int i = 0; i < kT; ++i) rows[i][x][v] = y[v][i];
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
    for (int i = 0; i < kT; ++i) rows[i][Points::kOne][v] += offset[v];
  }
#pragma GCC unroll 1
  for (int i = 0; i < kT; ++i) {
    V t[kVectors][kN], y[kVectors][kT];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 6
      for (int x = 0; x < kN; ++x) t[v][x] = rows[i][x][v];
      Points::Outputs(t[v], y[v]);
    }
    finish(i, y);
  }
}

// Sums to codes: as RequantizeTile of kernels/common/epilogue.h, with what is constant in registers.
template <int kVectors>
struct Requantizer {
  float32x4_t scale[kVectors];
  Neon::PackRange range;

  Requantizer(const EpilogueView& e, size_t channel) : range(e.pack_zero, e.pack_lo, e.pack_hi, e.pack_flip) {
    // Thresholds have no scale, and do not come here for their codes.
    for (size_t v = 0; v < kVectors; ++v)
      scale[v] = e.scale == nullptr ? vdupq_n_f32(0) : vld1q_f32(e.scale + channel + 4 * v);
  }

  int32x4_t Code(int32x4_t sum, int vector) const {
    return vcvtnq_s32_f32(vmulq_f32(vcvtq_f32_s32(sum), scale[vector]));
  }
  uint8x16_t Pack(const int32x4_t (&codes)[4]) const {
    return Neon::PackClipped(codes[0], codes[1], codes[2], codes[3], range);
  }
};

// [n][n] values at the points from [3][3] taps, G on both sides, modulo 2^32.
template <size_t kN>
void TransformWeights(const int32_t* taps, const uint32_t (&g)[kN][3], uint32_t (&to)[kN * kN]) {
  for (size_t i = 0; i < kN; ++i) {
    uint32_t row[3] = {};
    for (size_t x = 0; x < 3; ++x) {
      for (size_t y = 0; y < 3; ++y) row[x] += g[i][y] * static_cast<uint32_t>(taps[y * 3 + x]);
    }
    for (size_t j = 0; j < kN; ++j) to[i * kN + j] = g[j][0] * row[0] + g[j][1] * row[1] + g[j][2] * row[2];
  }
}

}  // namespace
}  // namespace lowbit
