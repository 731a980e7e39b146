// The scalar arithmetic of the numeric contract: float32, each operation rounded once, rint half to even.
// Reference kernels are written with it, vector kernels repeat it lane by lane. Compile with
// -ffp-contract=off.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/conv.h"

namespace lowbit {

// Clipping happens in float32, before the conversion, so that huge values are defined and NaN becomes lo
// (every comparison with NaN is false). lo and hi are codes, hence exact in float32.
inline int32_t ClipToCode(float v, int32_t lo, int32_t hi) {
  const float f_lo = static_cast<float>(lo), f_hi = static_cast<float>(hi);
  v = v > f_lo ? v : f_lo;
  v = v < f_hi ? v : f_hi;
  return static_cast<int32_t>(v);
}

// rq(v, scale, zero_point) of docs/numerics.md: a real division, never a multiplication by the reciprocal.
inline int32_t QuantizeCode(float v, float scale, int32_t zero_point, int32_t lo, int32_t hi) {
  return ClipToCode(std::rint(v / scale) + static_cast<float>(zero_point), lo, hi);
}

inline float DequantizeCode(int32_t code, float scale, int32_t zero_point) {
  return static_cast<float>(code - zero_point) * scale;
}

// One accumulator of channel c through the epilogue. `residual` is the residual's code (ignored without one).
// The result is a code for quantized outputs and v itself for float outputs.
int32_t EpilogueCode(const Epilogue& e, int32_t acc, int64_t c, int32_t residual);
// kThresholds, before any residual.
int32_t ThresholdCode(const Epilogue& e, int32_t acc, size_t c);
// What a residual adds: q is the code of the inner quantizer.
int32_t AddResidualCode(const Epilogue& e, int32_t q, int32_t residual);
float EpilogueFloat(const Epilogue& e, int32_t acc, int64_t c, int32_t residual);

}  // namespace lowbit
