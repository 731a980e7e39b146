// What the transforms of the Winograd schemes share, templated over their one-dimensional steps:
//
//   Points::kTile           outputs, m
//   Points::kWords          whether values at the points have 16 bits, or 8
//   Points::Weights(w, r)   taps -> values at the points, vectors of bytes or of 16-bit words
//   Points::Inputs(d, r)    inputs -> values at the points, vectors of bytes or of 16-bit words
//   Points::Outputs(t, y)   values at the points -> outputs
//   Points::kOne            the point 1, whose column of A is constant: kOneFactor, where that is not 1
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

inline int8x16_t AsBytes(int8x16_t v) { return v; }
inline int8x16_t AsBytes(int16x8_t v) { return vreinterpretq_s8_s16(v); }

// 16 of a group's weights at a tap; of 4 bits they are the low or the high halves of bytes.
template <int kBits, int kHalf>
inline int8x16_t LoadTap(const uint8_t* tap) {
  if constexpr (kBits == 8) return vreinterpretq_s8_u8(vld1q_u8(tap + 16 * kHalf));
  const int8x16_t halves = vreinterpretq_s8_u8(vld1q_u8(tap));
  return vshrq_n_s8(kHalf == 0 ? vshlq_n_s8(halves, 4) : halves, 4);
}

// A vector of weights, columns first, then rows; tap(i) gives those at tap i.
template <class Points, class Tap>
inline LOWBIT_ALWAYS_INLINE void TransformTaps(const Tap& tap, uint8_t* to, size_t point_pitch) {
  using V = decltype(tap(0));
  constexpr int kN = Points::kTile + 2;
  asm("" : "+r"(point_pitch));  // or the compiler keeps the addresses of all points, more than registers hold
  V columns[kN][3];
#pragma GCC unroll 3
  for (int x = 0; x < 3; ++x) {
    V r[kN];
    Points::Weights({tap(x), tap(3 + x), tap(6 + x)}, r);
#pragma GCC unroll 6
    for (int i = 0; i < kN; ++i) columns[i][x] = r[i];
  }
#pragma GCC unroll 6
  for (int i = 0; i < kN; ++i) {
    V r[kN];
    Points::Weights(columns[i], r);
#pragma GCC unroll 6
    for (int j = 0; j < kN; ++j, to += point_pitch) vst1q_u8(to, vreinterpretq_u8_s8(AsBytes(r[j])));
  }
}

// Half a group: 16 weights to as many bytes, or to words.
template <class Points>
inline LOWBIT_ALWAYS_INLINE void TransformHalf(const int8x16_t (&w)[9], uint8_t* to, size_t point_pitch) {
  if constexpr (Points::kWords) {
    TransformTaps<Points>([&](int i) LOWBIT_ALWAYS_INLINE { return vmovl_s8(vget_low_s8(w[i])); }, to,
                          point_pitch);
    TransformTaps<Points>([&](int i) LOWBIT_ALWAYS_INLINE { return vmovl_high_s8(w[i]); }, to + 16,
                          point_pitch);
  } else {
    TransformTaps<Points>([&](int i) LOWBIT_ALWAYS_INLINE { return w[i]; }, to, point_pitch);
  }
}

template <class Points, int kBits>
void TransformWeights(const WinogradWeights& weights) {
  constexpr size_t kTapBytes = kWinogradGroup * kBits / 8, kHalfBytes = Points::kWords ? 32 : 16;
  const uint8_t* taps = weights.taps;
  uint8_t* to = weights.to;
  const size_t pitch = weights.point_pitch;
  for (size_t group = 0; group < weights.groups; ++group, taps += 9 * kTapBytes, to += 2 * kHalfBytes) {
    int8x16_t w[9];
#pragma GCC unroll 9
    for (size_t tap = 0; tap < 9; ++tap) w[tap] = LoadTap<kBits, 0>(taps + tap * kTapBytes);
    TransformHalf<Points>(w, to, pitch);
#pragma GCC unroll 9
    for (size_t tap = 0; tap < 9; ++tap) w[tap] = LoadTap<kBits, 1>(taps + tap * kTapBytes);
    TransformHalf<Points>(w, to + kHalfBytes, pitch);
  }
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

// The products of a tile, kVectors vectors each: columns first, then rows. Between the two, `offset` is added
// to the values at the point 1: it reaches every output, times kOneFactor. finish(row, outputs) takes the
// outputs of a row, [vector][pixel].
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

}  // namespace
}  // namespace lowbit
