// The common ends of a tile: requantizers that clip bytes (EpilogueView::pack_clips), of 8 channels, without
// and with a residual. RequantizeTile with everything that is constant in registers, and with the work of
// several pixels side by side, because in-order cores wait for every result.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels/arm/simd_neon.h"
#include "kernels/common/epilogue_tables.h"
#include "kernels/common/inline.h"

namespace lowbit {
namespace {

// Two vectors of codes a pixel, at y.
template <int kPixels>
LOWBIT_ALWAYS_INLINE inline void StoreClipped8(const int32x4_t (&codes)[kPixels][2],
                                               const Neon::PackRange& range, uint8_t* y, size_t y_pitch) {
  uint8x16_t packed[(kPixels + 1) / 2];
#pragma GCC unroll 4
  for (int p = 0; p < kPixels; p += 2) {
    const int next = p + 1 < kPixels ? p + 1 : p;
    packed[p / 2] = Neon::PackClipped(codes[p][0], codes[p][1], codes[next][0], codes[next][1], range);
  }
#pragma GCC unroll 8
  for (int p = 0; p < kPixels; ++p) {
    const uint8x16_t two = packed[p / 2];
    vst1_u8(y + static_cast<size_t>(p) * y_pitch, p % 2 == 0 ? vget_low_u8(two) : vget_high_u8(two));
  }
}

struct Requantize8 {
  float32x4_t scale[2];
  Neon::PackRange range;

  // `scales`: those of the 8 channels.
  Requantize8(const EpilogueView& e, const float* scales)
      : scale{vld1q_f32(scales), vld1q_f32(scales + 4)},
        range(e.pack_zero, e.pack_lo, e.pack_hi, e.pack_flip) {}

  template <int kPixels>
  LOWBIT_ALWAYS_INLINE void Store(const int32x4_t (&acc)[kPixels][2], uint8_t* y, size_t y_pitch) const {
    float32x4_t values[kPixels][2];
#pragma GCC unroll 8
    for (int p = 0; p < kPixels; ++p) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) values[p][v] = vcvtq_f32_s32(acc[p][v]);
    }
#pragma GCC unroll 8
    for (int p = 0; p < kPixels; ++p) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) values[p][v] = vmulq_f32(values[p][v], scale[v]);
    }
    int32x4_t codes[kPixels][2];
#pragma GCC unroll 8
    for (int p = 0; p < kPixels; ++p) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) codes[p][v] = vcvtnq_s32_f32(values[p][v]);
    }
    StoreClipped8<kPixels>(codes, range, y, y_pitch);
  }
};

// q = clip(acc * scale), then y = (q * inner_scale + (r - zero point) * residual_scale) / y_scale.
struct RequantizeResidual8 {
  float32x4_t scale[2], lo, hi, inner_scale, residual_scale, y_scale, y_reciprocal;
  uint8x8_t residual_flip, residual_zero;
  Neon::PackRange range;

  static bool Takes(const EpilogueView& e) {
    return e.pack_clips && e.has_residual && e.residual_zero >= 0 && e.residual_zero <= 255;
  }

  RequantizeResidual8(const EpilogueView& e, const float* scales)
      : scale{vld1q_f32(scales), vld1q_f32(scales + 4)},
        lo(vdupq_n_f32(e.lo)),
        hi(vdupq_n_f32(e.hi)),
        inner_scale(vdupq_n_f32(e.inner_scale)),
        residual_scale(vdupq_n_f32(e.residual_scale)),
        y_scale(vdupq_n_f32(e.y_scale)),
        y_reciprocal(vdupq_n_f32(e.y_reciprocal)),
        residual_flip(vdup_n_u8(static_cast<uint8_t>(e.residual_flip))),
        residual_zero(vdup_n_u8(static_cast<uint8_t>(e.residual_zero))),
        range(e.pack_zero, e.pack_lo, e.pack_hi, e.pack_flip) {}

  // The operations of RequantizeTile in their order. FMAXNM and FMINNM differ from its comparisons in the
  // sign of a zero, which no code shows, and like those turn NaN into a bound. The quotient is not clipped
  // before it is corrected (DivideByYScale): pack_clips says that it is below 2^30, so that no product
  // overflows.
  template <int kPixels>
  LOWBIT_ALWAYS_INLINE void Store(const int32x4_t (&acc)[kPixels][2], const uint8_t* residual, uint8_t* y,
                                  size_t y_pitch) const {
    float32x4_t inner[kPixels][2], sum[kPixels][2], quotient[kPixels][2];
    const auto each = [](auto&& step) LOWBIT_ALWAYS_INLINE {
#pragma GCC unroll 8
      for (int p = 0; p < kPixels; ++p) {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) step(p, v);
      }
    };
    each([&](int p, int v) LOWBIT_ALWAYS_INLINE { inner[p][v] = vcvtq_f32_s32(acc[p][v]); });
    each([&](int p, int v) LOWBIT_ALWAYS_INLINE { inner[p][v] = vmulq_f32(inner[p][v], scale[v]); });
    each([&](int p, int v) LOWBIT_ALWAYS_INLINE { inner[p][v] = vmaxnmq_f32(inner[p][v], lo); });
    each([&](int p, int v) LOWBIT_ALWAYS_INLINE { inner[p][v] = vminnmq_f32(inner[p][v], hi); });
    each([&](int p, int v) LOWBIT_ALWAYS_INLINE { inner[p][v] = vrndnq_f32(inner[p][v]); });
    each([&](int p, int v) LOWBIT_ALWAYS_INLINE { inner[p][v] = vmulq_f32(inner[p][v], inner_scale); });
#pragma GCC unroll 8
    for (int p = 0; p < kPixels; ++p) {
      const uint8x8_t r = veor_u8(vld1_u8(residual + static_cast<size_t>(p) * y_pitch), residual_flip);
      const int16x8_t d = vreinterpretq_s16_u16(vsubl_u8(r, residual_zero));
      sum[p][0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(d)));
      sum[p][1] = vcvtq_f32_s32(vmovl_high_s16(d));
    }
    each([&](int p, int v) LOWBIT_ALWAYS_INLINE { sum[p][v] = vmulq_f32(sum[p][v], residual_scale); });
    each([&](int p, int v) LOWBIT_ALWAYS_INLINE { sum[p][v] = vaddq_f32(inner[p][v], sum[p][v]); });
    each([&](int p, int v) LOWBIT_ALWAYS_INLINE { quotient[p][v] = vmulq_f32(sum[p][v], y_reciprocal); });
    each([&](int p, int v)
             LOWBIT_ALWAYS_INLINE { sum[p][v] = vfmsq_f32(sum[p][v], quotient[p][v], y_scale); });
    each([&](int p, int v)
             LOWBIT_ALWAYS_INLINE { quotient[p][v] = vfmaq_f32(quotient[p][v], sum[p][v], y_reciprocal); });
    int32x4_t codes[kPixels][2];
    each([&](int p, int v) LOWBIT_ALWAYS_INLINE { codes[p][v] = vcvtnq_s32_f32(quotient[p][v]); });
    StoreClipped8<kPixels>(codes, range, y, y_pitch);
  }
};

}  // namespace
}  // namespace lowbit
