#include "core/epilogue.h"

#include <bit>

#include "core/activation.h"

namespace lowbit {
namespace {

// What the functions of activation.h ask for.
struct OneFloat {
  using F = float;
  static float SetF(float v) { return v; }
  static float AddF(float a, float b) { return a + b; }
  static float MulF(float a, float b) { return a * b; }
  static float DivF(float a, float b) { return a / b; }
  static float MinF(float a, float b) { return a < b ? a : b; }
  static float MaxF(float a, float b) { return a > b ? a : b; }
  static float TimesPowerOf2(float v, float power) {
    return std::bit_cast<float>(std::bit_cast<uint32_t>(v) + (std::bit_cast<uint32_t>(power) << 23));
  }
};

int32_t RequantizeCode(const Epilogue& e, int32_t acc, size_t c, int32_t residual) {
  const float scaled = static_cast<float>(acc) * e.multiplier[c];
  const int32_t q = ClipToCode(std::rint(scaled) + static_cast<float>(e.zero_point), e.lo, e.hi);
  return e.has_residual ? AddResidualCode(e, q, residual) : q;
}

// The comparisons are written so that NaN passes through, as numpy.maximum and maxps(0, v) have it.
float TailValue(const Epilogue& e, int32_t acc, size_t c, int32_t residual) {
  float v = static_cast<float>(acc) * e.acc_scale[c];
  for (const TailStep step : e.tail) {
    switch (step) {
      case TailStep::kBias:
        v = v + e.tail_bias[c];
        break;
      case TailStep::kAffine: {
        const float scaled = v * e.tail_scale[c];
        v = scaled + e.tail_shift[c];
        break;
      }
      case TailStep::kResidual:
        v = v + DequantizeCode(residual, e.residual_scale, e.residual_zero_point);
        break;
      case TailStep::kRelu:
        v = v < 0.0f ? 0.0f : v;
        break;
      case TailStep::kClip:
        v = v < e.clip_min ? e.clip_min : v;
        v = v > e.clip_max ? e.clip_max : v;
        break;
      case TailStep::kSilu:
        v = Silu<OneFloat>(v);
        break;
      case TailStep::kHardSwish:
        v = HardSwish<OneFloat>(v);
        break;
    }
  }
  return v;
}

}  // namespace

// Compared in int64 because dir * INT32_MIN leaves int32.
int32_t ThresholdCode(const Epilogue& e, int32_t acc, size_t c) {
  const int32_t* row = e.thresholds.data() + c * static_cast<size_t>(e.threshold_count);
  const int64_t dir = e.dir[c], value = dir * acc;
  int32_t reached = 0;
  for (int64_t k = 0; k < e.threshold_count; ++k) reached += value >= dir * row[k] ? 1 : 0;
  return e.base[c] + reached;
}

int32_t AddResidualCode(const Epilogue& e, int32_t q, int32_t residual) {
  const float v = DequantizeCode(q, e.inner_scale, e.zero_point) +
                  DequantizeCode(residual, e.residual_scale, e.residual_zero_point);
  return QuantizeCode(v, e.y_scale, e.y_zero_point, e.y_lo, e.y_hi);
}

int32_t EpilogueCode(const Epilogue& e, int32_t acc, int64_t channel, int32_t residual) {
  const size_t c = static_cast<size_t>(channel);
  switch (e.kind) {
    case EpilogueKind::kRequantize:
      return RequantizeCode(e, acc, c, residual);
    case EpilogueKind::kThresholds: {
      const int32_t q = ThresholdCode(e, acc, c);
      return e.has_residual ? AddResidualCode(e, q, residual) : q;
    }
    case EpilogueKind::kFloat:
    case EpilogueKind::kTail:
      break;
  }
  const float v = TailValue(e, acc, c, residual);
  if (e.adds_behind_tail)
    return AddResidualCode(e, QuantizeCode(v, e.inner_scale, e.zero_point, e.lo, e.hi), residual);
  return QuantizeCode(v, e.y_scale, e.y_zero_point, e.y_lo, e.y_hi);
}

float EpilogueFloat(const Epilogue& e, int32_t acc, int64_t channel, int32_t residual) {
  return TailValue(e, acc, static_cast<size_t>(channel), residual);  // kFloat: a tail without steps
}

}  // namespace lowbit
