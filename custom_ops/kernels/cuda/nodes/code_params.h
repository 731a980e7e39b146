// How kernels read and round codes, as plain data.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/elementwise.h"
#include "kernels/cuda/device/fast_divisor.h"

namespace lowbit::cuda {

// f32(code - zero_point) of a stored byte b: 2^23 + (b ^ flip) less `bias`, all of them integers below 2^24.
struct CodeReader {
  uint32_t flip = 0;  // four times 128 where codes are signed
  float bias = 8388608.0f;
};
inline CodeReader MakeReader(bool is_signed, int32_t zero_point) {
  return {is_signed ? 0x80808080u : 0u, 8388608.0f + static_cast<float>(zero_point + (is_signed ? 128 : 0))};
}

struct Divider {
  float scale = 1, inverse = 1;
};
inline Divider MakeDivider(float scale) { return {scale, 1.0f / scale}; }

// The condition of FastIsExact (core/elementwise.h), for one scale and any |v| <= max_abs that is no NaN.
inline bool FastDivisionIsExact(float scale, double max_abs) {
  return scale >= 0x1p-60f && scale <= 0x1p60f && max_abs < 0x1p22 * static_cast<double>(scale);
}

// clip(rint(v) + zero_point, lo, hi). Adding 1.5 * 2^23 rounds |v| < 2^22 half to even at the integers, which
// then sit in the low bits of the float; an even number more changes neither ties nor their direction. An odd
// zero point leaves 1 to add afterwards.
struct CodeRounder {
  float lo = 0, hi = 255;  // less the zero point
  float magic = 12582912.0f;
  bool odd = false;
};
inline CodeRounder MakeRounder(int32_t zero_point, int32_t lo, int32_t hi) {
  CodeRounder r;
  r.odd = zero_point % 2 != 0;
  r.lo = static_cast<float>(lo - zero_point);
  r.hi = static_cast<float>(hi - zero_point);
  r.magic = 12582912.0f + static_cast<float>(zero_point - (r.odd ? 1 : 0));
  return r;
}
inline CodeRounder MakeRounder(const Quantizer& q) { return MakeRounder(q.zero_point, q.lo, q.hi); }

}  // namespace lowbit::cuda
