// The transforms of kernels/common/winograd_transform.h on ARM. Of the Points besides: kWords, whether values at the
// points have 16 bits, or 8.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels/arm/simd_neon.h"
#include "kernels/common/inline.h"
#include "kernels/common/winograd_points.h"
#include "kernels/common/winograd_scheme.h"
#include "kernels/common/winograd_transform.h"

namespace lowbit {
namespace {

// What winograd_points.h computes with. Differences of bytes widen them on the way.
struct NeonRing {
  static int16x8_t Plus(uint8x8_t a, uint8x8_t b) { return vreinterpretq_s16_u16(vaddl_u8(a, b)); }
  static int16x8_t Minus(uint8x8_t a, uint8x8_t b) { return vreinterpretq_s16_u16(vsubl_u8(a, b)); }
  template <uint8_t n>
  static int16x8_t MinusTimes(int16x8_t a, uint8x8_t b) {
    return vreinterpretq_s16_u16(vmlsl_u8(vreinterpretq_u16_s16(a), b, vdup_n_u8(n)));
  }
  static int8x16_t Plus(int8x16_t a, int8x16_t b) { return vaddq_s8(a, b); }
  static int8x16_t Minus(int8x16_t a, int8x16_t b) { return vsubq_s8(a, b); }
  static int16x8_t Plus(int16x8_t a, int16x8_t b) { return vaddq_s16(a, b); }
  static int16x8_t Minus(int16x8_t a, int16x8_t b) { return vsubq_s16(a, b); }
  template <int16_t n>
  static int16x8_t PlusTimes(int16x8_t a, int16x8_t b) {
    return vmlaq_n_s16(a, b, n);
  }
  template <int16_t n>
  static int16x8_t MinusTimes(int16x8_t a, int16x8_t b) {
    return vmlsq_n_s16(a, b, n);
  }
  template <int n>
  static int16x8_t Times(int16x8_t a) {
    return vshlq_n_s16(a, __builtin_ctz(n));
  }
  static int32x4_t Plus(int32x4_t a, int32x4_t b) { return vaddq_s32(a, b); }
  static int32x4_t Minus(int32x4_t a, int32x4_t b) { return vsubq_s32(a, b); }
  template <int n>
  static int32x4_t PlusTimes(int32x4_t a, int32x4_t b) {
    return vmlaq_n_s32(a, b, n);
  }
  template <int n>
  static int32x4_t MinusTimes(int32x4_t a, int32x4_t b) {
    return vmlsq_n_s32(a, b, n);
  }
  template <int n>
  static int32x4_t Times(int32x4_t a) {
    return vshlq_n_s32(a, __builtin_ctz(n));
  }
};

inline int8x16_t AsBytes(int8x16_t v) { return v; }
inline int8x16_t AsBytes(int16x8_t v) { return vreinterpretq_s8_s16(v); }
constexpr auto kStoreVector = [](uint8_t* to, auto v)
                                  LOWBIT_ALWAYS_INLINE { vst1q_u8(to, vreinterpretq_u8_s8(AsBytes(v))); };

// 16 of a group's weights at a tap; of 4 bits they are the low or the high halves of bytes.
template <int kBits, int kHalf>
inline int8x16_t LoadTap(const uint8_t* tap) {
  if constexpr (kBits == 8) return vreinterpretq_s8_u8(vld1q_u8(tap + 16 * kHalf));
  const int8x16_t halves = vreinterpretq_s8_u8(vld1q_u8(tap));
  return vshrq_n_s8(kHalf == 0 ? vshlq_n_s8(halves, 4) : halves, 4);
}

// Half a group: 16 weights to as many bytes, or to words.
template <class Points>
inline LOWBIT_ALWAYS_INLINE void TransformHalf(const int8x16_t (&w)[9], uint8_t* to, size_t point_pitch) {
  if constexpr (Points::kWords) {
    TransformTaps<Points, 0, Points::kTile + 2>(
        [&](int i) LOWBIT_ALWAYS_INLINE { return vmovl_s8(vget_low_s8(w[i])); }, to, point_pitch,
        kStoreVector);
    TransformTaps<Points, 0, Points::kTile + 2>(
        [&](int i) LOWBIT_ALWAYS_INLINE { return vmovl_high_s8(w[i]); }, to + 16, point_pitch, kStoreVector);
  } else {
    TransformTaps<Points, 0, Points::kTile + 2>([&](int i) LOWBIT_ALWAYS_INLINE { return w[i]; }, to,
                                                point_pitch, kStoreVector);
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

// Words of 16 bits from bytes.
template <class Points>
void TransformWords(const WinogradInput& in) {
  const uint8x8_t shift = vdup_n_u8(in.shift);
  for (size_t block = 0; block < in.blocks; ++block) {
    const auto load = [&](int i)
                          LOWBIT_ALWAYS_INLINE { return vsub_u8(vld1_u8(in.pixels[i] + block * 8), shift); };
    TransformInputs<Points, int16x8_t>(load, in.to + block * in.block_pitch, in.point_pitch, kStoreVector);
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
