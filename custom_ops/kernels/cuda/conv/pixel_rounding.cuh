// Quantizing the float pixels of an image.
#pragma once

#include "kernels/cuda/conv/conv_params.h"

namespace lowbit::cuda {

// A pixel's code, where PixelRounding::add is added, in the low bits: rounded from a value within the clip
// bounds. NaN becomes the lower one, as in core/epilogue.h; Markstein's sequence is the correctly rounded
// quotient where the host found fast_division.
__device__ __forceinline__ unsigned RoundedPixel(const PixelRounding& rounding, int channel, float v) {
  const float scale = rounding.scale[channel], inverse = rounding.inverse[channel];
  const float clipped = fminf(fmaxf(v, rounding.low[channel]), rounding.high[channel]);
  const float near = __fmul_rn(clipped, inverse);
  const float quotient = __fmaf_rn(__fmaf_rn(-near, scale, clipped), inverse, near);
  return __float_as_uint(__fadd_rn(quotient, 12582912.0f));
}

}  // namespace lowbit::cuda
