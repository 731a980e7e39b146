// The common end of a tile: a requantizer that clips bytes (EpilogueView::pack_clips), without a residual, of
// 8 channels.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "kernels/arm/simd_neon.h"
#include "kernels/common/epilogue_tables.h"
#include "kernels/common/inline.h"

namespace lowbit {
namespace {

// RequantizeTile with everything that is constant in registers, and with the work of four pixels side by
// side, because in-order cores wait for every result.
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
#pragma GCC unroll 4
    for (int p = 0; p < kPixels; ++p) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) values[p][v] = vcvtq_f32_s32(acc[p][v]);
    }
#pragma GCC unroll 4
    for (int p = 0; p < kPixels; ++p) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) values[p][v] = vmulq_f32(values[p][v], scale[v]);
    }
    int32x4_t codes[kPixels][2];
#pragma GCC unroll 4
    for (int p = 0; p < kPixels; ++p) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) codes[p][v] = vcvtnq_s32_f32(values[p][v]);
    }
    uint8x16_t packed[(kPixels + 1) / 2];
#pragma GCC unroll 2
    for (int p = 0; p < kPixels; p += 2) {
      const int next = p + 1 < kPixels ? p + 1 : p;
      packed[p / 2] = Neon::PackClipped(codes[p][0], codes[p][1], codes[next][0], codes[next][1], range);
    }
#pragma GCC unroll 4
    for (int p = 0; p < kPixels; ++p) {
      const uint8x16_t two = packed[p / 2];
      vst1_u8(y + static_cast<size_t>(p) * y_pitch, p % 2 == 0 ? vget_low_u8(two) : vget_high_u8(two));
    }
  }
};

}  // namespace
}  // namespace lowbit
