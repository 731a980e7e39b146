// The four epilogues of core/epilogue.cc in device code: float32, each operation rounded once. The intrinsics
// with _rn never contract, whatever the compiler's flags.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/activation.h"
#include "core/conv.h"
#include "kernels/cuda/conv/conv_params.h"
#include "kernels/cuda/conv/places.cuh"
#include "kernels/cuda/device/halves.cuh"
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

// Whether residuals are added to the node's own codes or by its tail, not to what a table has for its codes.
__device__ __forceinline__ bool AddsToCodes(const EpilogueParams& e) {
  return e.has_residual && e.values == nullptr;
}

__device__ __forceinline__ int4 Plus(const int4& a, const int4& b) {
  return make_int4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ float4 Plus(const float4& a, const float4& b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

__device__ __forceinline__ float4 AllFour(float v) { return make_float4(v, v, v, v); }

__device__ __forceinline__ unsigned JoinBytes(unsigned q0, unsigned q1, unsigned q2, unsigned q3) {
  return __byte_perm(__byte_perm(q0, q1, 0x0040), __byte_perm(q2, q3, 0x0040), 0x5410);
}

__device__ __forceinline__ float Limited(float v, float low, float high) {
  v = v < low ? low : v;
  return v > high ? high : v;
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
__device__ __forceinline__ unsigned UnsignedBytes(const float4& v) {
#if __CUDA_ARCH__ >= 900
  return PackUnsigned(__float2int_rn(v.x), __float2int_rn(v.y), __float2int_rn(v.z), __float2int_rn(v.w));
#else
  return JoinBytes(RoundedByte(v.x, 0, 255), RoundedByte(v.y, 0, 255), RoundedByte(v.z, 0, 255),
                   RoundedByte(v.w, 0, 255));
#endif
}

__device__ __forceinline__ unsigned AddZeroPoint(unsigned codes, int zero_point) {
  return zero_point == 0 ? codes : __vadd4(codes, static_cast<unsigned>(zero_point & 255) * 0x01010101u);
}

// lowest + clip(q + shift, 0, top) of four whole numbers smaller than 2^15 in size (the host found so) and
// 12582912, one to a byte: any number of codes. Two of them are clipped at once, as the low 16 bits of
// floats. The shift does not enter before they are rounded: where it is odd, ties would go elsewhere.
__device__ __forceinline__ unsigned ClippedWords(const EpilogueParams& e, const float4& q) {
  const unsigned low = __byte_perm(__float_as_uint(q.x), __float_as_uint(q.y), 0x5410),
                 high = __byte_perm(__float_as_uint(q.z), __float_as_uint(q.w), 0x5410);
  return AddZeroPoint(__byte_perm(__viaddmin_s16x2_relu(low, e.word_shift, e.word_top),
                                  __viaddmin_s16x2_relu(high, e.word_shift, e.word_top), 0x6420),
                      e.word_lowest);
}

// The same of codes that are capped (EpilogueParams::is_capped): the conversion to bytes clips at 0 and 255. Where there
// are 128 codes a byte above 127 becomes 127: all bits of its sign are set, which takes the highest and gives the
// others; of the other bytes none is. Where there are 256, the highest bit of all is that of the lowest code.
__device__ __forceinline__ unsigned CappedBytes(const EpilogueParams& e, const float4& v) {
  const unsigned bytes = UnsignedBytes(v), signs = PermuteBytes(bytes, e.cap_flip, e.cap_select);
  return XorOrMasked<0x7F7F7F7Fu>(bytes, signs);
}

// An inner code q, less the zero point and 12582912 (1.5 * 2^23) more, on its way to the second rounding, as
// (q - hi + 256) / 256: so that clipping at hi costs nothing, being the saturation of the very addition that
// takes the number out of the magic one's low bits. Nothing is rounded: where q leaves 2^22 and with it whole
// numbers, it is clipped. NaN saturates to 0.
__device__ __forceinline__ float Unit(const EpilogueParams& e, float q) {
  return fmaxf(SaturatedLine(q, 0x1p-8f, e.unit_offset), e.unit_lo);
}

// The same of one that is clipped.
__device__ __forceinline__ float UnitOfClipped(const EpilogueParams& e, float q) {
  return __fmaf_rn(q, 0x1p-8f, e.unit_offset);
}

// (a * inner_scale + r * residual_scale) / y_scale, or what rounds to the same code: a the inner code less
// its zero point, r from byte kByte of `residual`, whose signed codes have become unsigned ones. The division
// of kAny is Markstein's sequence, the correctly rounded quotient where the host found that nothing overflows
// or is subnormal.
template <Addition kAddition, int kByte>
__device__ __forceinline__ float Sum(const EpilogueParams& e, float unit, unsigned residual) {
  const float a = __fmaf_rn(unit, 256.0f, e.unit_zero);  // exact
  float r;
  if constexpr (kAddition ==
                Addition::kInverseFromLowest) {  // of an exact product and a power of two times it
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

// core/activation.h.
__device__ __forceinline__ float Silu(float v) {
  const float t = fminf(fmaxf(-v, -kMostExponent), kMostExponent);
  const float power = __fadd_rn(__fmul_rn(t, kLog2e), kRoundsToWhole), n = __fsub_rn(power, kRoundsToWhole);
  // The first product is exact: nothing is rounded twice.
  const float r = __fadd_rn(__fmaf_rn(n, -kLn2High, t), __fmul_rn(n, -kLn2Low));
  float p = __fadd_rn(__fmul_rn(kExp5, r), kExp4);
  p = __fadd_rn(__fmul_rn(p, r), kExp3);
  p = __fadd_rn(__fmul_rn(p, r), kExp2);
  p = __fadd_rn(__fmul_rn(p, r), kExp1);
  p = __fadd_rn(__fmul_rn(p, r), kExp0);
  p = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.0f);
  const float exponential = __uint_as_float(__float_as_uint(p) + (__float_as_uint(power) << 23));
  const float gate = __frcp_rn(__fadd_rn(1.0f, exponential));
  return v == v ? __fmul_rn(v, gate) : v;  // fminf and fmaxf leave no NaN
}

__device__ __forceinline__ float HardSwish(float v) {
  const float half = __fadd_rn(__fmul_rn(v, kSixth), 0.5f);
  const float gate = fminf(fmaxf(half, 0.0f), 1.0f);
  return v == v ? __fmul_rn(v, gate) : v;
}

__device__ __forceinline__ float4 OfFunction(TailFunction function, const float4& v) {
  if (function == TailFunction::kSilu) return make_float4(Silu(v.x), Silu(v.y), Silu(v.z), Silu(v.w));
  if (function == TailFunction::kHardSwish)
    return make_float4(HardSwish(v.x), HardSwish(v.y), HardSwish(v.z), HardSwish(v.w));
  return v;
}

// v / y_scale, or what rounds to the same code (InvertTailScale).
__device__ __forceinline__ float TailCode(const EpilogueParams& e, float v) {
  return __fmaf_rn(v, e.y_inverse, __fmul_rn(v, e.y_inverse_rest));
}

// (v + r * residual_scale) / y_scale, or what rounds to the same code: v what the tail has before it adds the
// residual, which is as Sum takes it.
template <int kByte>
__device__ __forceinline__ float SumInTail(const EpilogueParams& e, float v, unsigned residual) {
  const float sum =
      __fadd_rn(v, __fmul_rn(CodeToFloat<kByte>(e, residual, e.residual_offset), e.residual_scale));
  return TailCode(e, sum);
}

// The same of the number `v` that a table has for a code, or of its product with the residual.
template <int kByte>
__device__ __forceinline__ float SumOfValue(const EpilogueParams& e, float v, unsigned residual) {
  const float r = __fmul_rn(CodeToFloat<kByte>(e, residual, e.residual_offset), e.residual_scale);
  return TailCode(e, e.multiplies ? __fmul_rn(v, r) : __fadd_rn(v, r));
}

// Four inner codes as Unit takes them (of kInTail what the tail has, of kOfValues what a table has) and four residuals
// to four codes. Rounding::kBytes: neither residuals nor codes have a sign, and there are 256 of the latter, the zero
// point being the lowest one. kAny: as the addition has it. kAreClipped: the inner codes are.
template <Addition kAddition, Rounding kRounding, bool kAreClipped = false>
__device__ __forceinline__ unsigned AddFour(const EpilogueParams& e, const float4& inner, unsigned residual) {
  if constexpr (kRounding != Rounding::kBytes) residual ^= SignFlip(e.residual_signed);
  const auto sum = [&]<int kByte>(float q) {
    if constexpr (kAddition == Addition::kInTail) return SumInTail<kByte>(e, q, residual);
    if constexpr (kAddition == Addition::kOfValues) return SumOfValue<kByte>(e, q, residual);
    const float unit = kAreClipped ? UnitOfClipped(e, q) : Unit(e, q);
    if constexpr (kAddition == Addition::kOnLine) return SumOnLine<kByte>(e, unit, residual);
    return Sum<kAddition, kByte>(e, unit, residual);
  };
  const float4 sums = make_float4(sum.template operator()<0>(inner.x), sum.template operator()<1>(inner.y),
                                  sum.template operator()<2>(inner.z), sum.template operator()<3>(inner.w));
  if constexpr (kRounding == Rounding::kBytes) return UnsignedBytes(sums);
  if constexpr (kRounding == Rounding::kCapped) return CappedBytes(e, sums);
  if constexpr (kAddition != Addition::kAny && kAddition != Addition::kInTail &&
                kAddition != Addition::kOfValues)
    return ClippedWords(e, Plus(sums, AllFour(12582912.0f)));
  const float lo = static_cast<float>(e.y_lo - e.y_zero_point),
              hi = static_cast<float>(e.y_hi - e.y_zero_point);
  return AddZeroPoint(JoinBytes(RoundedByte(sums.x, lo, hi), RoundedByte(sums.y, lo, hi),
                                RoundedByte(sums.z, lo, hi), RoundedByte(sums.w, lo, hi)),
                      e.y_zero_point);
}

// Four sums as floats. kFloats: they are SumForm::kFloat.
template <bool kFloats>
__device__ __forceinline__ float4 AsFloats(const int4& sums) {
  const auto as_float = [](int sum) {
    return kFloats ? __fsub_rn(__int_as_float(sum), 12582912.0f) : static_cast<float>(sum);
  };
  return make_float4(as_float(sums.x), as_float(sums.y), as_float(sums.z), as_float(sums.w));
}

__device__ __forceinline__ float4 BitsAsFloats(const int4& sums) {
  return make_float4(__int_as_float(sums.x), __int_as_float(sums.y), __int_as_float(sums.z),
                     __int_as_float(sums.w));
}

__device__ __forceinline__ float4 MultiplyAdd(const float4& x, const float4& gain, const float4& offset) {
  return make_float4(__fmaf_rn(x.x, gain.x, offset.x), __fmaf_rn(x.y, gain.y, offset.y),
                     __fmaf_rn(x.z, gain.z, offset.z), __fmaf_rn(x.w, gain.w, offset.w));
}

__device__ __forceinline__ float4 Multiply(const float4& x, const float4& y) {
  return make_float4(__fmul_rn(x.x, y.x), __fmul_rn(x.y, y.y), __fmul_rn(x.z, y.z), __fmul_rn(x.w, y.w));
}

// What lines would have of four channels that have none, as their tail has it, step by step, for a float bias:
// Markstein's division. Codes of any size are clipped as floats.
__device__ __forceinline__ float4 OfTail(const EpilogueParams& e, const float4& sums, const float4& scale,
                                         const float4& bias) {
  const auto one = [&](float sum, float scale, float bias) {
    const float v = __fadd_rn(__fmul_rn(sum, scale), bias), near = __fmul_rn(v, e.first_inverse),
                code = __fmaf_rn(__fmaf_rn(-near, e.first_scale, v), e.first_inverse, near);
    return fminf(fmaxf(__fadd_rn(__fadd_rn(code, 12582912.0f), e.line_shift), e.line_base), e.line_top);
  };
  return make_float4(one(sums.x, scale.x, bias.x), one(sums.y, scale.y, bias.y), one(sums.z, scale.z, bias.z),
                     one(sums.w, scale.w, bias.w));
}

// Whether start and factor are read at all.
__device__ __forceinline__ bool ReadsStart(const EpilogueParams& e) {
  return e.on_lines || e.in_tail || e.sums != SumForm::kInteger;
}

// What happens to a sum first: a multiplication; the lines of its four channels (channel_lines.h); these or,
// where the four have none, the tail; of a tail that is computed step by step, what is before its function.
enum class First { kMultiplies, kLines, kTail, kBeforeFunction };

// The constants of four channels (EpilogueParams).
struct FourChannels {
  float4 scale, start;
  float factor;
};

// Whether codes are clipped by it. EpilogueParams::line_base says whether they are 12582912 larger, and so
// rounded, too.
template <First kFirst>
inline constexpr bool kIsClipped = kFirst == First::kLines || kFirst == First::kTail;

__device__ __forceinline__ float4 SaturatedLines(const float4& x, const float4& gain, const float4& offset) {
  return make_float4(SaturatedLine(x.x, gain.x, offset.x), SaturatedLine(x.y, gain.y, offset.y),
                     SaturatedLine(x.z, gain.z, offset.z), SaturatedLine(x.w, gain.w, offset.w));
}

// How the product of a line and its addition are rounded, where residuals are added: once for capped codes, else each
// (LineFitter).
enum class LineProduct { kFused, kRounded, kEither };

template <LineProduct kProduct>
__device__ __forceinline__ float4 LineCodes(const EpilogueParams& e, const float4& line, float factor) {
  const float4 factors = AllFour(factor), base = AllFour(e.line_base);
  if (kProduct == LineProduct::kFused || (kProduct == LineProduct::kEither && e.is_capped))
    return MultiplyAdd(line, factors, base);
  return Plus(Multiply(line, factors), base);
}

// Four codes before any residual, of each of kCount sums; of kBeforeFunction no codes yet. kRounds: 12582912
// more, as Unit and ClippedWords take them; else not yet rounded. One branch for all of them: what it parts
// cannot overlap.
template <First kFirst, bool kFloats, bool kRounds, LineProduct kProduct = LineProduct::kFused, int kCount>
__device__ __forceinline__ void FirstCodes(const EpilogueParams& e, const int4 (&sums)[kCount],
                                           const FourChannels& channels, float4 (&codes)[kCount]) {
  const auto& [scale, start, factor] = channels;
  const float4 magic = AllFour(12582912.0f);
  if (kFirst == First::kMultiplies) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      codes[i] = Multiply(AsFloats<kFloats>(sums[i]), scale);
      if (kRounds) codes[i] = Plus(codes[i], magic);
    }
  } else if (kFirst == First::kBeforeFunction) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) codes[i] = Plus(Multiply(AsFloats<kFloats>(sums[i]), scale), start);
  } else if (kFirst == First::kLines || __builtin_expect(factor >= 0, true)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      codes[i] = LineCodes<kProduct>(e, SaturatedLines(BitsAsFloats(sums[i]), scale, start), factor);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) codes[i] = OfTail(e, AsFloats<true>(sums[i]), scale, start);
  }
}

// Four codes before any residual to bytes; of kWords rounded, others not yet.
template <Rounding kRounding>
__device__ __forceinline__ unsigned RoundFour(const EpilogueParams& e, const float4& v) {
  if constexpr (kRounding == Rounding::kBytes) return UnsignedBytes(v) ^ SignFlip(e.lo < 0);
  if constexpr (kRounding == Rounding::kCapped) return CappedBytes(e, v);
  if constexpr (kRounding == Rounding::kClipped) return UnsignedBytes(v) ^ e.line_flip;
  if constexpr (kRounding == Rounding::kWords) return ClippedWords(e, v);
  const float lo = static_cast<float>(e.lo - e.zero_point), hi = static_cast<float>(e.hi - e.zero_point);
  return AddZeroPoint(JoinBytes(RoundedByte(v.x, lo, hi), RoundedByte(v.y, lo, hi), RoundedByte(v.z, lo, hi),
                                RoundedByte(v.w, lo, hi)),
                      e.zero_point);
}

// Brings what codes are looked up in near, before the kernel's turn: by the threads of a block.
__device__ __forceinline__ void PrefetchTables(const EpilogueParams& e, int thread) {
  constexpr int kLine = 128, kCodes = 256;
  if (e.table != nullptr && thread < kCodes / kLine) PrefetchLine(e.table + thread * kLine);
  if (e.values != nullptr && thread < kCodes * 4 / kLine) PrefetchLine(e.values + thread * (kLine / 4));
}

// The byte that a table has for a code's.
__device__ __forceinline__ unsigned Mapped(const EpilogueParams& e, unsigned code) {
  return e.table[code & 255u];
}

// Whether residuals of codes that are finished so may be added to what a table has for the codes, or multiplied with it.
template <Finish kFinish>
inline constexpr bool kMayHaveValues =
    kFinish == Finish::kAny || kFinish == Finish::kIntegersInTail || kFinish == Finish::kIntegersOfTail ||
    kFinish == Finish::kFloatsOfValues;

// What is stored for each of some fours of codes, and of residuals where these are added to a table's.
template <Finish kFinish, int kCount>
__device__ __forceinline__ void MapFours(const EpilogueParams& e, const unsigned (&residuals)[kCount],
                                         unsigned (&codes)[kCount]) {
  if constexpr (kMayHaveValues<kFinish>) {
    if (e.values != nullptr) {
      const auto value = [&](unsigned code) { return e.values[code & 255u]; };
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const unsigned four = codes[i];
        codes[i] = AddFour<Addition::kOfValues, Rounding::kAny>(
            e, make_float4(value(four), value(four >> 8), value(four >> 16), value(four >> 24)),
            residuals[i]);
      }
      return;
    }
  }
  if (e.table == nullptr) return;
#pragma unroll
  for (unsigned& four : codes) {
    four = JoinBytes(Mapped(e, four), Mapped(e, four >> 8), Mapped(e, four >> 16), Mapped(e, four >> 24));
  }
}

// Whether codes that are finished so may have places.
template <Finish kFinish>
inline constexpr bool kMayHavePlaces =
    kFinish == Finish::kAny || kFinish == Finish::kIntegers || kFinish == Finish::kIntegersInTail ||
    kFinish == Finish::kIntegersOfTail || kFinish == Finish::kFloats || kFinish == Finish::kFloatsAdding ||
    kFinish == Finish::kFloatsOfValues;

// Whether codes that are finished so may have a table behind them.
template <Finish kFinish>
inline constexpr bool kMayMap =
    kFinish == Finish::kAny || kFinish == Finish::kIntegersInTail || kFinish == Finish::kIntegersOfTail ||
    kFinish == Finish::kFloats || kFinish == Finish::kFloatsOfValues;

// f(requantize), where requantize(sums, channels, codes) takes some fours of sums of any form, the bias
// included, to the node's codes, in the place of residuals. Not kMayAdd: there are no residuals.
//
// Sums that are SumForm::kFloatFromZero need no line through 0: the product of the float less what it began
// with is that of the sum, rounded once, as 2^23 times the scale is exact. Below 0, where floats are nearer
// to each other, it is negative.
template <Finish kFinish, bool kMayAdd = true, typename F>
__device__ __forceinline__ void WithEpilogue(const EpilogueParams& e, const F& f) {
  static_assert(!kLeavesRegisters<kFinish>);
  constexpr bool kIsAny = kFinish == Finish::kAny;
  const auto from_zero = [&]<Rounding kRounding>() {
    f([&]<int kCount>(const int4(&sums)[kCount], const FourChannels& channels, unsigned (&codes)[kCount]) {
      unsigned residuals[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        residuals[i] = codes[i];
        const float4 unrounded = MultiplyAdd(BitsAsFloats(sums[i]), channels.scale, channels.start);
        if constexpr (kRounding == Rounding::kBytes) {  // its codes have no sign
          codes[i] = UnsignedBytes(unrounded);
        } else if constexpr (kRounding == Rounding::kWords) {
          codes[i] = ClippedWords(e, Plus(unrounded, AllFour(12582912.0f)));
        } else {
          codes[i] = RoundFour<kRounding>(e, unrounded);
        }
      }
      if constexpr (kMayMap<kFinish>) MapFours<kFinish>(e, residuals, codes);
    });
  };
  // round(first codes, residuals), four each.
  const auto with_first =
      [&]<First kFirst, bool kFloats, bool kRounds, LineProduct kProduct = LineProduct::kFused>(
          const auto& round) {
        f([&]<int kCount>(const int4(&sums)[kCount], const FourChannels& channels,
                          unsigned (&codes)[kCount]) {
          float4 first[kCount];
          unsigned residuals[kCount];
          FirstCodes<kFirst, kFloats, kRounds, kProduct>(e, sums, channels, first);
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            residuals[i] = codes[i];
            codes[i] = round(first[i], codes[i]);
          }
          if constexpr (kMayMap<kFinish>) MapFours<kFinish>(e, residuals, codes);
        });
      };
  const auto rounding = [&]<First kFirst, bool kFloats, Rounding kRounding>() {
    with_first.template operator()<kFirst, kFloats, kRounding == Rounding::kWords>(
        [&](const float4& first, unsigned) { return RoundFour<kRounding>(e, first); });
  };
  const auto adding =
      [&]<First kFirst, bool kFloats, Addition kAddition, Rounding kRounding = Rounding::kAny>() {
        constexpr auto kProduct = kRounding == Rounding::kCapped        ? LineProduct::kFused
                                  : kFinish == Finish::kWordsTailOnLine ? LineProduct::kRounded
                                                                        : LineProduct::kEither;
        with_first.template operator()<kFirst, kFloats, true, kProduct>(
            [&](const float4& first, unsigned residual) {
              return AddFour<kAddition, kRounding, kIsClipped<kFirst>>(e, first, residual);
            });
      };
  const auto adding_quickly = [&]<First kFirst, bool kFloats>() {
    if (e.addition == Addition::kOnLine)
      return adding.template operator()<kFirst, kFloats, Addition::kOnLine>();
    return adding.template operator()<kFirst, kFloats, Addition::kInverse>();
  };
  const auto adding_in_tail = [&]<Rounding kRounding>() {
    return adding.template operator()<First::kBeforeFunction, true, Addition::kInTail, kRounding>();
  };
  const auto integers_in_tail = [&] {
    with_first.template operator()<First::kBeforeFunction, false, false>(
        [&](const float4& first, unsigned residual) {
          const float4 v = OfFunction(e.function, first);
          if (kMayAdd && e.has_residual) return AddFour<Addition::kInTail, Rounding::kAny>(e, v, residual);
          return RoundFour<Rounding::kAny>(
              e, make_float4(TailCode(e, v.x), TailCode(e, v.y), TailCode(e, v.z), TailCode(e, v.w)));
        });
  };
  const auto adding_floats = [&] {
    if (e.in_tail) return adding_in_tail.template operator()<Rounding::kAny>();
    if (e.on_lines) return adding_quickly.template operator()<First::kTail, true>();
    return adding_quickly.template operator()<First::kMultiplies, true>();
  };
  const auto rounding_floats = [&] {
    if (e.sums == SumForm::kFloat) {
      if (!e.on_lines) return rounding.template operator()<First::kMultiplies, true, Rounding::kWords>();
      return rounding.template operator()<First::kTail, true, Rounding::kClipped>();
    }
    if (e.rounding == Rounding::kWords) return from_zero.template operator()<Rounding::kWords>();
    return from_zero.template operator()<Rounding::kBytes>();
  };
  if constexpr (kFinish == Finish::kFloatsFromZero) return from_zero.template operator()<Rounding::kBytes>();
  if constexpr (kFinish == Finish::kFloatsOnLine)
    return adding.template operator()<First::kMultiplies, true, Addition::kOnLine, Rounding::kBytes>();
  if constexpr (kFinish == Finish::kFloatsInverse)
    return adding
        .template operator()<First::kMultiplies, true, Addition::kInverseFromLowest, Rounding::kBytes>();
  if constexpr (kFinish == Finish::kCappedFromZero) return from_zero.template operator()<Rounding::kCapped>();
  if constexpr (kFinish == Finish::kWordsMultiplied)
    return rounding.template operator()<First::kMultiplies, true, Rounding::kWords>();
  if constexpr (kFinish == Finish::kTail || kFinish == Finish::kBorderTail || kFinish == Finish::kPlanesTail)
    return rounding.template operator()<First::kLines, true, Rounding::kClipped>();
  if constexpr (kFinish == Finish::kLackingTail)
    return rounding.template operator()<First::kTail, true, Rounding::kClipped>();
  if constexpr (kFinish == Finish::kWordsTailOnLine)
    return adding.template operator()<First::kLines, true, Addition::kOnLine>();
  if constexpr (kFinish == Finish::kCappedOnLine)
    return adding.template operator()<First::kMultiplies, true, Addition::kOnLine, Rounding::kCapped>();
  if constexpr (kFinish == Finish::kCappedTailOnLine)
    return adding.template operator()<First::kLines, true, Addition::kOnLine, Rounding::kCapped>();
  if constexpr (kFinish == Finish::kCappedLackingOnLine)
    return adding.template operator()<First::kTail, true, Addition::kOnLine, Rounding::kCapped>();
  if constexpr (kFinish == Finish::kCappedInTail)
    return adding_in_tail.template operator()<Rounding::kCapped>();
  if constexpr (kFinish == Finish::kFloats || kFinish == Finish::kFloatsOfValues) return rounding_floats();
  if constexpr (kFinish == Finish::kFloatsAdding) return adding_floats();
  const auto rounding_integers = [&] {
    switch (e.rounding) {
      case Rounding::kAny:
        return rounding.template operator()<First::kMultiplies, false, Rounding::kAny>();
      case Rounding::kBytes:
        return rounding.template operator()<First::kMultiplies, false, Rounding::kBytes>();
      default:
        return rounding.template operator()<First::kMultiplies, false, Rounding::kWords>();
    }
  };
  if constexpr (kFinish == Finish::kIntegersInTail)
    return e.in_tail ? integers_in_tail() : rounding_integers();
  if constexpr (kFinish == Finish::kCappedIntegersOfTail) {
    if (kMayAdd && e.in_tail) return adding_in_tail.template operator()<Rounding::kCapped>();
    if (kMayAdd && e.has_residual)
      return adding.template operator()<First::kTail, true, Addition::kOnLine, Rounding::kCapped>();
    return rounding.template operator()<First::kTail, true, Rounding::kClipped>();
  }
  if constexpr (kIsAny || kFinish == Finish::kIntegers || kFinish == Finish::kIntegersOfTail) {
    constexpr bool kMayBeTail = kFinish != Finish::kIntegers;
    if (kIsAny && e.in_tail && e.sums == SumForm::kInteger) return integers_in_tail();
    if (kIsAny && e.sums != SumForm::kInteger) return AddsToCodes(e) ? adding_floats() : rounding_floats();
    if (kMayAdd && AddsToCodes(e)) {
      if (kMayBeTail && e.on_lines) return adding_quickly.template operator()<First::kTail, true>();
      if constexpr (kFinish == Finish::kIntegersOfTail) return;
      if (e.addition != Addition::kAny)
        return adding_quickly.template operator()<First::kMultiplies, false>();
      return adding.template operator()<First::kMultiplies, false, Addition::kAny>();
    }
    if (kMayBeTail && e.on_lines) {
      return rounding.template operator()<First::kTail, true, Rounding::kClipped>();
    }
    if constexpr (kFinish == Finish::kIntegersOfTail) return;
    rounding_integers();
  }
}

// The same of integers, by kernels that are not made for one finish.
template <bool kMayAdd = true, typename F>
__device__ __forceinline__ void WithIntegers(const EpilogueParams& e, const F& f) {
  if (e.on_lines) {
    WithEpilogue<Finish::kIntegersOfTail, kMayAdd>(e, f);
  } else if (e.in_tail || e.values != nullptr || e.table != nullptr) {
    WithEpilogue<Finish::kIntegersInTail, kMayAdd>(e, f);
  } else {
    WithEpilogue<Finish::kIntegers, kMayAdd>(e, f);
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

// The tail of neighbouring channels from `c` on.
template <int kCount>
__device__ __forceinline__ void TailValues(const EpilogueParams& e, const int (&acc)[kCount], int c,
                                           const float (&scale)[kCount], int residual, float (&v)[kCount]) {
  const auto each = [&](const auto& f) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) v[j] = f(v[j], c + j);
  };
#pragma unroll
  for (int j = 0; j < kCount; ++j) v[j] = __fmul_rn(static_cast<float>(acc[j]), scale[j]);
  for (int i = 0; i < e.tail_count; ++i) {
    switch (static_cast<TailStep>(e.tail[i])) {
      case TailStep::kBias:
        each([&](float x, int channel) { return __fadd_rn(x, e.tail_bias[channel]); });
        break;
      case TailStep::kAffine:
        each([&](float x, int channel) {
          return __fadd_rn(__fmul_rn(x, e.tail_scale[channel]), e.tail_shift[channel]);
        });
        break;
      case TailStep::kResidual:
        each([&](float x, int) {
          return __fadd_rn(x, DequantizeCode(residual, e.residual_scale, e.residual_zero_point));
        });
        break;
      case TailStep::kRelu:
        each([](float x, int) { return x < 0.0f ? 0.0f : x; });
        break;
      case TailStep::kClip:
        each([&](float x, int) { return Limited(x, e.clip_min, e.clip_max); });
        break;
      case TailStep::kSilu:
        each([](float x, int) { return Silu(x); });
        break;
      case TailStep::kHardSwish:
        each([](float x, int) { return HardSwish(x); });
        break;
    }
  }
}

__device__ __forceinline__ float TailValue(const EpilogueParams& e, int acc, int c, float scale,
                                           int residual) {
  const int sums[] = {acc};
  const float scales[] = {scale};
  float v[1];
  TailValues(e, sums, c, scales, residual, v);
  return v[0];
}

// A float result over the scale of its codes, up to numbers that have the same code.
__device__ __forceinline__ float DividedBy(const PlaceParams& place, float v) {
  if (place.inverse == 0.0f) return __fdiv_rn(v, place.scale);
  v = fminf(fmaxf(v, -place.limit), place.limit);
  const float near = __fmul_rn(v, place.inverse);
  return __fmaf_rn(__fmaf_rn(-near, place.scale, v), place.inverse, near);
}

// Rounds neighbouring numbers, 4 or 1, to float16, as which they are stored.
template <int kCount>
__device__ __forceinline__ void RoundToHalves(float (&v)[kCount], uint16_t* to) {
  if constexpr (kCount == 4) {
    const uint2 halves = make_uint2(PackHalves(v[0], v[1]), PackHalves(v[2], v[3]));
    const float2 low = UnpackHalves(halves.x), high = UnpackHalves(halves.y);
    v[0] = low.x;
    v[1] = low.y;
    v[2] = high.x;
    v[3] = high.y;
    *reinterpret_cast<uint2*>(to) = halves;
  } else {
    const unsigned half = PackHalves(v[0], 0.0f);
    v[0] = UnpackHalves(half).x;
    *to = static_cast<uint16_t>(half);
  }
}

// What is added to float results, as it comes from memory: four neighbours, float32 or, in its first half, float16.
__device__ __forceinline__ uint4 FetchAdded(const EpilogueParams& e, const void* added, int64_t index) {
  if (!e.adds_halves) return *reinterpret_cast<const uint4*>(static_cast<const float*>(added) + index);
  const uint2 halves = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(added) + index);
  return make_uint4(halves.x, halves.y, 0, 0);
}
__device__ __forceinline__ float4 AddedNumbers(const EpilogueParams& e, const uint4& fetched) {
  if (e.adds_halves) {
    const float2 low = UnpackHalves(fetched.x), high = UnpackHalves(fetched.y);
    return make_float4(low.x, low.y, high.x, high.y);
  }
  return make_float4(__uint_as_float(fetched.x), __uint_as_float(fetched.y), __uint_as_float(fetched.z),
                     __uint_as_float(fetched.w));
}

// Neighbouring float results of a pixel from `channel` on, 4 or 1: what the tail has; another tensor's numbers (`added`),
// where they are; stored, and what is stored rounded to codes. A residual is one of a single result.
template <int kCount>
__device__ __forceinline__ void FinishFloats(const EpilogueParams& e, const float (&added)[kCount], void* y,
                                             int64_t pixel, int channel, const int (&acc)[kCount],
                                             const float (&scale)[kCount], int residual = 0) {
  using Floats = std::conditional_t<kCount == 4, float4, float>;
  using Bytes = std::conditional_t<kCount == 4, unsigned, uint8_t>;
  const int64_t index = pixel * e.out_channels + channel;
  alignas(16) float v[kCount];
  TailValues(e, acc, channel, scale, residual, v);
  if (e.adds_floats) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) v[j] = Limited(__fadd_rn(v[j], added[j]), e.sum_min, e.sum_max);
  }
  if (e.makes_halves) RoundToHalves(v, static_cast<uint16_t*>(y) + index);
#pragma unroll 1
  for (int i = 0; i < e.place_count; ++i) {
    const PlaceParams& place = e.places[i];
    Bytes codes = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int code = RoundToCode(DividedBy(place, v[j]), place.zero_point, place.lo, place.hi);
      codes |= static_cast<Bytes>(static_cast<Bytes>(code & 255) << 8 * j);
    }
    *reinterpret_cast<Bytes*>(place.y + pixel * place.pixel_bytes + channel) = codes;
  }
  if (y != nullptr && !e.makes_halves) {
    *reinterpret_cast<Floats*>(static_cast<float*>(y) + index) = *reinterpret_cast<const Floats*>(v);
  }
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
      return AddsToCodes(e) ? AddResidual(e, q, residual) : q;
    }
    case EpilogueKind::kThresholds: {
      const int q = ThresholdCode(e, acc, c);
      return AddsToCodes(e) ? AddResidual(e, q, residual) : q;
    }
    default:
      if (e.adds_behind_tail || e.values != nullptr) {
        const int q =
            RoundToCode(__fdiv_rn(TailValue(e, acc, c, scale, 0), e.first_scale), e.zero_point, e.lo, e.hi);
        return AddsToCodes(e) ? AddResidual(e, q, residual) : q;
      }
      return RoundToCode(__fdiv_rn(TailValue(e, acc, c, scale, residual), e.y_scale), e.y_zero_point, e.y_lo,
                         e.y_hi);
  }
}

// One output, from its raw sum of products to memory.
__device__ __forceinline__ void FinishOne(const EpilogueParams& e, const void* residual, void* y,
                                          int64_t pixel, int channel, int sum, int bias, float scale) {
  const int64_t index = pixel * e.out_channels + channel;
  const int acc = sum + bias;
  const int r = ResidualCode(e, residual, index);
  if (e.quantized_output) {
    auto code = static_cast<uint8_t>(FinishCode(e, acc, channel, scale, r));
    if (e.values != nullptr) {
      const float of_residual = DequantizeCode(r, e.residual_scale, e.residual_zero_point);
      const float v =
          e.multiplies ? __fmul_rn(e.values[code], of_residual) : __fadd_rn(e.values[code], of_residual);
      code = static_cast<uint8_t>(RoundToCode(__fdiv_rn(v, e.y_scale), e.y_zero_point, e.y_lo, e.y_hi));
    } else if (e.table != nullptr) {
      code = static_cast<uint8_t>(Mapped(e, code));
    }
    if (e.dequantizes) {
      const int value =
          e.output_signed ? static_cast<int>(static_cast<int8_t>(code)) : static_cast<int>(code);
      static_cast<float*>(y)[index] = DequantizeCode(value, e.output_scale, e.output_zero_point);
    } else {
      StoreInPlaces(e, pixel, channel, code);
      if (y != nullptr) static_cast<uint8_t*>(y)[index] = code;
    }
  } else {
    float added = 0.0f;
    if (e.adds_floats) {
      added = e.adds_halves ? UnpackHalves(static_cast<const uint16_t*>(residual)[index]).x
                            : static_cast<const float*>(residual)[index];
    }
    FinishFloats<1>(e, {added}, y, pixel, channel, {acc}, {scale}, r);
  }
}

}  // namespace lowbit::cuda
