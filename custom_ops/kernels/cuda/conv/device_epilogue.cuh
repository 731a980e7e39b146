// The four epilogues of core/epilogue.cc in device code: float32, each operation rounded once. The intrinsics
// with _rn never contract, whatever the compiler's flags.
#pragma once

#include <cstdint>

#include "core/conv.h"
#include "kernels/cuda/conv/conv_params.h"
#include "kernels/cuda/device/ptx.cuh"

namespace lowbit::cuda {

// clip(rint(v) + zero_point, lo, hi) without the slow rounding and conversion instructions. Codes and zero
// points are below 2^9 in size, so clamping v to +-2^21 first changes no result; |v| <= 2^21 plus 1.5 * 2^23
// rounds half to even at the integers, which then sit in the low bits of the float. fmaxf takes the number
// where the other operand is NaN: NaN becomes the lower bound and then lo, as in
// core/epilogue.h.
__device__ __forceinline__ int RoundToCode(float v, int zero_point, int lo, int hi) {
  v = fminf(fmaxf(v, -2097152.0f), 2097152.0f);
  const int q = __float_as_int(__fadd_rn(v, 12582912.0f)) - 0x4B400000 + zero_point;
  return min(max(q, lo), hi);
}

// The low byte of (clip(rint(v) + zero_point, lo, hi) - zero_point), from the bounds less the zero point:
// integers, so clipping before rounding gives the same.
__device__ __forceinline__ unsigned RoundedByte(float v, float lo, float hi) {
  return __float_as_uint(__fadd_rn(fminf(fmaxf(v, lo), hi), 12582912.0f));
}

__device__ __forceinline__ int4 Plus(const int4& a, const int4& b) {
  return make_int4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ unsigned JoinBytes(unsigned q0, unsigned q1, unsigned q2, unsigned q3) {
  return __byte_perm(__byte_perm(q0, q1, 0x0040), __byte_perm(q2, q3, 0x0040), 0x5410);
}

// RoundedByte of four scaled sums, one to a byte.
__device__ __forceinline__ unsigned RoundedBytes(const int4& sums, const float4& scale, float lo, float hi) {
  const unsigned q0 = RoundedByte(__fmul_rn(static_cast<float>(sums.x), scale.x), lo, hi);
  const unsigned q1 = RoundedByte(__fmul_rn(static_cast<float>(sums.y), scale.y), lo, hi);
  const unsigned q2 = RoundedByte(__fmul_rn(static_cast<float>(sums.z), scale.z), lo, hi);
  const unsigned q3 = RoundedByte(__fmul_rn(static_cast<float>(sums.w), scale.w), lo, hi);
  return JoinBytes(q0, q1, q2, q3);
}

__device__ __forceinline__ float DequantizeCode(int code, float scale, int zero_point) {
  return __fmul_rn(static_cast<float>(code - zero_point), scale);
}

__device__ __forceinline__ int InnerCode(const EpilogueParams& e, int acc, float multiplier) {
  return RoundToCode(__fmul_rn(static_cast<float>(acc), multiplier), e.zero_point, e.lo, e.hi);
}

__device__ __forceinline__ int AddResidual(const EpilogueParams& e, int inner, int residual) {
  const float v = __fadd_rn(DequantizeCode(inner, e.inner_scale, e.zero_point),
                            DequantizeCode(residual, e.residual_scale, e.residual_zero_point));
  return RoundToCode(__fdiv_rn(v, e.y_scale), e.y_zero_point, e.y_lo, e.y_hi);
}

// What makes unsigned codes, 128 more, of four signed ones and the reverse.
__device__ __forceinline__ unsigned SignFlip(bool is_signed) { return is_signed ? 0x80808080u : 0u; }

// 2^23 and byte i of `codes`, which is the low bits.
template <int kByte>
__device__ __forceinline__ float CodeFrom23(const EpilogueParams& e, unsigned codes) {
  return __uint_as_float(__byte_perm(codes, e.high_bytes, 0x7540 + kByte));
}

// Byte i of `codes` as float, less `offset`, 2^23 included. Exact.
template <int kByte>
__device__ __forceinline__ float CodeToFloat(const EpilogueParams& e, unsigned codes, float offset) {
  return __fsub_rn(CodeFrom23<kByte>(e, codes), offset);
}

// clip(rint(v), 0, 255) of four values, one to a byte; of NaN 0. From sm_90 on one instruction converts,
// clips and joins two.
__device__ __forceinline__ unsigned UnsignedBytes(float v0, float v1, float v2, float v3) {
#if __CUDA_ARCH__ >= 900
  return PackUnsigned(__float2int_rn(v0), __float2int_rn(v1), __float2int_rn(v2), __float2int_rn(v3));
#else
  return JoinBytes(RoundedByte(v0, 0, 255), RoundedByte(v1, 0, 255), RoundedByte(v2, 0, 255),
                   RoundedByte(v3, 0, 255));
#endif
}

// The same with the bounds -128 and 127, not for NaN.
__device__ __forceinline__ unsigned SignedBytes(float v0, float v1, float v2, float v3) {
#if __CUDA_ARCH__ >= 900
  return PackSigned(__float2int_rn(v0), __float2int_rn(v1), __float2int_rn(v2), __float2int_rn(v3));
#else
  return JoinBytes(RoundedByte(v0, -128, 127), RoundedByte(v1, -128, 127), RoundedByte(v2, -128, 127),
                   RoundedByte(v3, -128, 127));
#endif
}

// An inner code q on its way to the second rounding, as (q - hi + 256) / 256: so that clipping at hi costs
// nothing, being the saturation of the very addition that takes the number out of the magic one's low bits.
// Neither rounds anything: where |v| leaves 2^22 and with it whole numbers, q is clipped. NaN saturates to 0.
__device__ __forceinline__ float RoundedUnit(const EpilogueParams& e, float v) {
  return fmaxf(Saturated256th(__fadd_rn(v, 12582912.0f), e.unit_offset), e.unit_lo);
}

// The same from byte kByte of `codes`: 2^15 + code / 256 has the code in its low bits.
template <int kByte>
__device__ __forceinline__ float CodeToUnit(const EpilogueParams& e, unsigned codes) {
  return __fsub_rn(__uint_as_float(__byte_perm(codes, 0x47000000u, 0x7540 + kByte)), e.code_unit_offset);
}

// (a * inner_scale + r * residual_scale) / y_scale, or what rounds to the same code: a the inner code less
// its zero point, r from byte kByte of `residual`, whose signed codes have become unsigned ones. The division
// of kAny is Markstein's sequence, the correctly rounded quotient where the host found that nothing overflows
// or is subnormal.
template <Addition kAddition, int kByte>
__device__ __forceinline__ float Sum(const EpilogueParams& e, float unit, unsigned residual) {
  const float a = __fmaf_rn(unit, 256.0f, e.unit_zero);  // exact
  float r;
  if constexpr (kAddition == Addition::kBothFromLowest) {  // of an exact product and a power of two times it
    r = __fmaf_rn(CodeFrom23<kByte>(e, residual), e.residual_scale, e.residual_start);
  } else {
    r = __fmul_rn(CodeToFloat<kByte>(e, residual, e.residual_offset), e.residual_scale);
  }
  const float v = __fadd_rn(__fmul_rn(a, e.inner_scale), r);
  if constexpr (kAddition != Addition::kAny) return __fmaf_rn(v, e.y_inverse, __fmul_rn(v, e.y_inverse_rest));
  const float near = __fmul_rn(v, e.y_inverse);
  return __fmaf_rn(__fmaf_rn(-near, e.y_scale, v), e.y_inverse, near);
}

// The same code, less y_lo and not yet rounded, for nodes that the host found fit (FitSum): the residual is
// the second byte of a float of 2^15, where it counts whole numbers.
template <int kByte>
__device__ __forceinline__ float SumOnLine(const EpilogueParams& e, float unit, unsigned residual) {
  const float r = __uint_as_float(__byte_perm(residual, e.residual_bits, 0x7604 + (kByte << 4)));
  return __fmaf_rn(unit, e.unit_gain, __fmaf_rn(r, e.residual_gain, e.sum_offset));
}

__device__ __forceinline__ unsigned AddZeroPoint(unsigned codes, int zero_point) {
  return zero_point == 0 ? codes : __vadd4(codes, static_cast<unsigned>(zero_point & 255) * 0x01010101u);
}

// Four inner codes (RoundedUnit) and four residuals to four codes. kUnsigned: neither residuals nor codes
// have a sign.
template <Addition kAddition, bool kUnsigned = false>
__device__ __forceinline__ unsigned AddFour(const EpilogueParams& e, const float4& inner, unsigned residual) {
  if constexpr (!kUnsigned) residual ^= SignFlip(e.residual_signed);
  const unsigned flip = kUnsigned ? 0 : SignFlip(e.y_lo < 0);
  if constexpr (kAddition == Addition::kOnLine) {  // 256 codes, from 0 or -128 on
    return UnsignedBytes(SumOnLine<0>(e, inner.x, residual), SumOnLine<1>(e, inner.y, residual),
                         SumOnLine<2>(e, inner.z, residual), SumOnLine<3>(e, inner.w, residual)) ^
           flip;
  } else {
    const float4 sum =
        make_float4(Sum<kAddition, 0>(e, inner.x, residual), Sum<kAddition, 1>(e, inner.y, residual),
                    Sum<kAddition, 2>(e, inner.z, residual), Sum<kAddition, 3>(e, inner.w, residual));
    if constexpr (kAddition != Addition::kAny) return UnsignedBytes(sum.x, sum.y, sum.z, sum.w) ^ flip;
    const float lo = static_cast<float>(e.y_lo - e.y_zero_point),
                hi = static_cast<float>(e.y_hi - e.y_zero_point);
    return AddZeroPoint(JoinBytes(RoundedByte(sum.x, lo, hi), RoundedByte(sum.y, lo, hi),
                                  RoundedByte(sum.z, lo, hi), RoundedByte(sum.w, lo, hi)),
                        e.y_zero_point);
  }
}

// Four inner codes and four residuals, one to a byte. For nodes that the host found fit
// (PackedConv::Problem).
__device__ __forceinline__ unsigned AddResiduals(const EpilogueParams& e, unsigned inner, unsigned residual) {
  inner ^= SignFlip(e.lo < 0);
  const float4 units = make_float4(CodeToUnit<0>(e, inner), CodeToUnit<1>(e, inner), CodeToUnit<2>(e, inner),
                                   CodeToUnit<3>(e, inner));
  switch (e.addition) {
    case Addition::kOnLine:
      return AddFour<Addition::kOnLine>(e, units, residual);
    case Addition::kFromLowest:
      return AddFour<Addition::kFromLowest>(e, units, residual);
    case Addition::kBothFromLowest:
      return AddFour<Addition::kBothFromLowest>(e, units, residual);
    default:
      return AddFour<Addition::kAny>(e, units, residual);
  }
}

__device__ __forceinline__ float4 Scaled(const int4& sums, const float4& scale) {
  return make_float4(
      __fmul_rn(static_cast<float>(sums.x), scale.x), __fmul_rn(static_cast<float>(sums.y), scale.y),
      __fmul_rn(static_cast<float>(sums.z), scale.z), __fmul_rn(static_cast<float>(sums.w), scale.w));
}

// The same of sums that are SumForm::kFloat.
__device__ __forceinline__ float4 ScaledFloats(const int4& sums, const float4& scale) {
  const auto scaled = [](int sum, float by) {
    return __fmul_rn(__fsub_rn(__int_as_float(sum), 12582912.0f), by);
  };
  return make_float4(scaled(sums.x, scale.x), scaled(sums.y, scale.y), scaled(sums.z, scale.z),
                     scaled(sums.w, scale.w));
}

// Requantizes four sums, the bias included, and adds four residuals: both roundings without a pause in
// memory. kFloats: sums are SumForm::kFloat, and no code has a sign.
template <Addition kAddition, bool kFloats = false>
__device__ __forceinline__ unsigned RequantizeAndAdd(const EpilogueParams& e, const int4& sums,
                                                     const float4& scale, unsigned residual) {
  const float4 v = kFloats ? ScaledFloats(sums, scale) : Scaled(sums, scale);
  return AddFour<kAddition, kFloats>(
      e, make_float4(RoundedUnit(e, v.x), RoundedUnit(e, v.y), RoundedUnit(e, v.z), RoundedUnit(e, v.w)),
      residual);
}

// Four sums, the bias included, to four codes.
template <Rounding kRounding>
__device__ __forceinline__ unsigned Requantize(const EpilogueParams& e, const int4& sums,
                                               const float4& scale) {
  const float lo = static_cast<float>(e.lo - e.zero_point), hi = static_cast<float>(e.hi - e.zero_point);
  if constexpr (kRounding == Rounding::kAny)
    return AddZeroPoint(RoundedBytes(sums, scale, lo, hi), e.zero_point);
  const float4 v = Scaled(sums, scale);
  if constexpr (kRounding == Rounding::kSignedBytes)
    return AddZeroPoint(SignedBytes(v.x, v.y, v.z, v.w), e.zero_point);
  if constexpr (kRounding == Rounding::kUnsignedBytes) {
    return UnsignedBytes(v.x, v.y, v.z, v.w) ^ SignFlip(e.lo < 0);
  }
  if constexpr (kRounding == Rounding::kAllBytes) {
    // Beyond 2^22, where the magic number does not round to integers, codes are clipped.
    const auto shifted = [&](float v) { return __fadd_rn(__fadd_rn(v, 12582912.0f), e.byte_offset); };
    return UnsignedBytes(shifted(v.x), shifted(v.y), shifted(v.z), shifted(v.w)) ^ SignFlip(e.lo < 0);
  }
  return AddZeroPoint(UnsignedBytes(fminf(v.x, hi), fminf(v.y, hi), fminf(v.z, hi), fminf(v.w, hi)),
                      e.zero_point);
}

// Four sums that are SumForm::kFloatFromZero to four of 256 codes from 0 on. The product of the float less
// what it began with is that of the sum, rounded once: 2^23 times the scale is exact. Below 0, where floats
// are nearer to each other, it is negative.
__device__ __forceinline__ unsigned RequantizeFloats(const int4& sums, const float4& scale,
                                                     const float4& start) {
  return UnsignedBytes(__fmaf_rn(__int_as_float(sums.x), scale.x, start.x),
                       __fmaf_rn(__int_as_float(sums.y), scale.y, start.y),
                       __fmaf_rn(__int_as_float(sums.z), scale.z, start.z),
                       __fmaf_rn(__int_as_float(sums.w), scale.w, start.w));
}

// f(requantize), where requantize(sums, scale) is the Requantize that fits the node, whose sums are integers.
template <typename F>
__device__ __forceinline__ void WithRounding(const EpilogueParams& e, const F& f) {
  switch (e.rounding) {
    case Rounding::kAny:
      return f([&](const int4& v, const float4& scale) { return Requantize<Rounding::kAny>(e, v, scale); });
    case Rounding::kFromZero:
      return f(
          [&](const int4& v, const float4& scale) { return Requantize<Rounding::kFromZero>(e, v, scale); });
    case Rounding::kUnsignedBytes:
      return f([&](const int4& v, const float4& scale) {
        return Requantize<Rounding::kUnsignedBytes>(e, v, scale);
      });
    case Rounding::kSignedBytes:
      return f([&](const int4& v, const float4& scale) {
        return Requantize<Rounding::kSignedBytes>(e, v, scale);
      });
    case Rounding::kAllBytes:
      return f(
          [&](const int4& v, const float4& scale) { return Requantize<Rounding::kAllBytes>(e, v, scale); });
  }
}

// f(add), where add(sums, scale, residual) is the RequantizeAndAdd that fits the node. kMayBeFloats: sums may
// be SumForm::kFloat.
template <bool kMayBeFloats, typename F>
__device__ __forceinline__ void WithAddition(const EpilogueParams& e, const F& f) {
  switch (e.addition) {
    case Addition::kAny:
      return f([&](const int4& v, const float4& scale, unsigned residual) {
        return RequantizeAndAdd<Addition::kAny>(e, v, scale, residual);
      });
    case Addition::kBothFromLowest:
      if (kMayBeFloats && e.sums == SumForm::kFloat) {
        return f([&](const int4& v, const float4& scale, unsigned residual) {
          return RequantizeAndAdd<Addition::kBothFromLowest, true>(e, v, scale, residual);
        });
      }
      [[fallthrough]];
    case Addition::kFromLowest:
      return f([&](const int4& v, const float4& scale, unsigned residual) {
        return RequantizeAndAdd<Addition::kFromLowest>(e, v, scale, residual);
      });
    case Addition::kOnLine:
      if (kMayBeFloats && e.sums == SumForm::kFloat) {
        return f([&](const int4& v, const float4& scale, unsigned residual) {
          return RequantizeAndAdd<Addition::kOnLine, true>(e, v, scale, residual);
        });
      }
      return f([&](const int4& v, const float4& scale, unsigned residual) {
        return RequantizeAndAdd<Addition::kOnLine>(e, v, scale, residual);
      });
  }
}

// f(requantize), where requantize(sums, scale, start, residual) takes four sums of any form to the node's
// codes. Not kMayAdd: there are no residuals.
template <Finish kFinish, bool kMayAdd = true, typename F>
__device__ __forceinline__ void WithEpilogue(const EpilogueParams& e, const F& f) {
  static_assert(kFinish != Finish::kThroughMemory);
  constexpr bool kIsAny = kFinish == Finish::kAny;
  const auto adding = [&](const auto& add) {
    f([&](const int4& v, const float4& scale, const float4&, unsigned residual) {
      return add(v, scale, residual);
    });
  };
  const auto from_zero = [&] {
    f([](const int4& v, const float4& scale, const float4& start, unsigned) {
      return RequantizeFloats(v, scale, start);
    });
  };
  if constexpr (kFinish == Finish::kFloatsFromZero) {
    from_zero();
  } else if constexpr (kFinish == Finish::kFloatsOnLine) {
    adding([&](const int4& v, const float4& scale, unsigned residual) {
      return RequantizeAndAdd<Addition::kOnLine, true>(e, v, scale, residual);
    });
  } else if constexpr (kFinish == Finish::kFloatsFromLowest) {
    adding([&](const int4& v, const float4& scale, unsigned residual) {
      return RequantizeAndAdd<Addition::kBothFromLowest, true>(e, v, scale, residual);
    });
  } else if (kMayAdd && e.has_residual) {
    WithAddition<kIsAny>(e, adding);
  } else if (kIsAny && e.sums == SumForm::kFloatFromZero) {
    from_zero();
  } else {
    WithRounding(e, [&](const auto& requantize) {
      f([&](const int4& v, const float4& scale, const float4&, unsigned) { return requantize(v, scale); });
    });
  }
}

__device__ __forceinline__ int ThresholdCode(const EpilogueParams& e, int acc, int c) {
  const int32_t* row = e.thresholds + static_cast<int64_t>(c) * e.threshold_count;
  const bool rises = e.dir[c] > 0;
  int reached = 0;
  // dir * acc >= dir * T in int64 is acc >= T, or acc <= T for dir -1.
  for (int k = 0; k < e.threshold_count; ++k) reached += (rises ? acc >= row[k] : acc <= row[k]) ? 1 : 0;
  return e.base[c] + reached;
}

__device__ __forceinline__ float TailValue(const EpilogueParams& e, int acc, int c, float scale,
                                           int residual) {
  float v = __fmul_rn(static_cast<float>(acc), scale);
  for (int i = 0; i < e.tail_count; ++i) {
    switch (static_cast<TailStep>(e.tail[i])) {
      case TailStep::kBias:
        v = __fadd_rn(v, e.tail_bias[c]);
        break;
      case TailStep::kAffine:
        v = __fadd_rn(__fmul_rn(v, e.tail_scale[c]), e.tail_shift[c]);
        break;
      case TailStep::kResidual:
        v = __fadd_rn(v, DequantizeCode(residual, e.residual_scale, e.residual_zero_point));
        break;
      case TailStep::kRelu:
        v = v < 0.0f ? 0.0f : v;
        break;
      case TailStep::kClip:
        v = v < e.clip_min ? e.clip_min : v;
        v = v > e.clip_max ? e.clip_max : v;
        break;
    }
  }
  return v;
}

__device__ __forceinline__ int ResidualCode(const EpilogueParams& e, const void* residual, int64_t index) {
  if (!e.has_residual) return 0;
  return e.residual_signed ? static_cast<int>(static_cast<const int8_t*>(residual)[index])
                           : static_cast<int>(static_cast<const uint8_t*>(residual)[index]);
}

__device__ __forceinline__ int FinishCode(const EpilogueParams& e, int acc, int c, float scale,
                                          int residual) {
  switch (static_cast<EpilogueKind>(e.kind)) {
    case EpilogueKind::kRequantize: {
      const int q = InnerCode(e, acc, scale);
      return e.has_residual ? AddResidual(e, q, residual) : q;
    }
    case EpilogueKind::kThresholds:
      return ThresholdCode(e, acc, c);
    default:
      return RoundToCode(__fdiv_rn(TailValue(e, acc, c, scale, residual), e.y_scale), e.y_zero_point, e.y_lo,
                         e.y_hi);
  }
}

// One output, from its raw sum of products to memory. x_sum is the sum of the pixel's activations, for
// weights with a zero point.
__device__ __forceinline__ void FinishOne(const EpilogueParams& e, const void* residual, void* y,
                                          int64_t pixel, int channel, int sum, int bias, float scale,
                                          int x_sum) {
  const int64_t index = pixel * e.out_channels + channel;
  int acc = sum + bias;
  if (e.w_zero != nullptr) acc -= e.w_zero[channel] * x_sum;
  const int r = ResidualCode(e, residual, index);
  if (e.quantized_output) {
    const auto code = static_cast<uint8_t>(FinishCode(e, acc, channel, scale, r));
    if (e.dequantizes) {
      const int value =
          e.output_signed ? static_cast<int>(static_cast<int8_t>(code)) : static_cast<int>(code);
      static_cast<float*>(y)[index] = DequantizeCode(value, e.output_scale, e.output_zero_point);
    } else {
      static_cast<uint8_t*>(y)[index] = code;
    }
  } else {
    static_cast<float*>(y)[index] = TailValue(e, acc, channel, scale, r);
  }
}

}  // namespace lowbit::cuda
