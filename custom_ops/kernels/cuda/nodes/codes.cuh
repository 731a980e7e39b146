// Codes in registers: vectors of bytes to and from memory, codes to float32 values and back. Every operation
// rounds once; what is written as fma is exact by proof.
#pragma once

#include <cstdint>

#include "kernels/cuda/nodes/code_params.h"

namespace lowbit::cuda {

// n / d for 0 <= n < 2^31.
__device__ __forceinline__ unsigned Quotient(unsigned n, const FastDivisor& d) {
  return (__umulhi(n, d.multiplier) + n) >> d.shift;
}

// kBytes codes (16, 4 or 1) as words.
template <int kBytes>
struct Codes {
  static constexpr int kWords = (kBytes + 3) / 4;
  static constexpr int kPerWord = kBytes < 4 ? kBytes : 4;
  unsigned w[kWords];
};

// Aligned to kBytes.
template <int kBytes>
__device__ __forceinline__ Codes<kBytes> LoadCodes(const uint8_t* x) {
  Codes<kBytes> out;
  if constexpr (kBytes == 16) {
    const uint4 v = *reinterpret_cast<const uint4*>(x);
    out.w[0] = v.x, out.w[1] = v.y, out.w[2] = v.z, out.w[3] = v.w;
  } else if constexpr (kBytes == 4) {
    out.w[0] = *reinterpret_cast<const unsigned*>(x);
  } else {
    out.w[0] = *x;
  }
  return out;
}

template <int kBytes>
__device__ __forceinline__ void StoreCodes(uint8_t* y, const Codes<kBytes>& codes) {
  if constexpr (kBytes == 16) {
    *reinterpret_cast<uint4*>(y) = make_uint4(codes.w[0], codes.w[1], codes.w[2], codes.w[3]);
  } else if constexpr (kBytes == 4) {
    *reinterpret_cast<unsigned*>(y) = codes.w[0];
  } else {
    *y = static_cast<uint8_t>(codes.w[0]);
  }
}

// The first `valid` codes of a vector that may reach past the end of its tensor.
template <int kBytes>
__device__ __forceinline__ Codes<kBytes> LoadCodes(const uint8_t* x, int valid) {
  if (valid >= kBytes) return LoadCodes<kBytes>(x);
  Codes<kBytes> out = {};
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    if (i < valid) out.w[i / 4] |= static_cast<unsigned>(x[i]) << (8 * (i % 4));
  }
  return out;
}

template <int kBytes>
__device__ __forceinline__ void StoreCodes(uint8_t* y, const Codes<kBytes>& codes, int valid) {
  if (valid >= kBytes) return StoreCodes<kBytes>(y, codes);
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    if (i < valid) y[i] = static_cast<uint8_t>(codes.w[i / 4] >> (8 * (i % 4)));
  }
}

// kBytes times the code at x.
template <int kBytes>
__device__ __forceinline__ Codes<kBytes> SplatCode(const uint8_t* x) {
  const unsigned word = *x * 0x01010101u;
  Codes<kBytes> out;
#pragma unroll
  for (unsigned& w : out.w) w = word;
  return out;
}

// f32(code - zero_point) of byte `i` of a word that was flipped. 0x4B0000bb is the float 2^23 + bb.
__device__ __forceinline__ float CodeValue(unsigned flipped, int i, const CodeReader& reader) {
  return __fsub_rn(__uint_as_float(__byte_perm(flipped, 0x4B000000u, 0x7650u + static_cast<unsigned>(i))),
                   reader.bias);
}

// v / scale, rounded once. kFast: by Markstein's sequence, which is exact under the condition of
// FastDivisionIsExact.
template <bool kFast>
__device__ __forceinline__ float Divide(float v, const Divider& d) {
  if constexpr (kFast) {
    const float q = __fmul_rn(v, d.inverse);
    return __fmaf_rn(__fmaf_rn(-q, d.scale, v), d.inverse, q);
  } else {
    return __fdiv_rn(v, d.scale);
  }
}

// The code of clip(rint(v) + zero_point, lo, hi) in the low byte, without a zero point that is odd (see
// AddOdd). Bounds are integers, so clipping first gives the same; fmaxf takes the bound where v is NaN.
__device__ __forceinline__ unsigned RoundedCode(float v, const CodeRounder& r) {
  return __float_as_uint(__fadd_rn(fminf(fmaxf(v, r.lo), r.hi), r.magic));
}

// One more in every byte.
__device__ __forceinline__ unsigned AddOnes(unsigned word) {
  return ((word & 0x7F7F7F7Fu) + 0x01010101u) ^ (word & 0x80808080u);
}

// The low bytes of four codes, or of one, as a word.
template <int kCount>
__device__ __forceinline__ unsigned PackBytes(const unsigned (&code)[kCount]) {
  if constexpr (kCount == 4) {
    return __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
  } else {
    return code[0];
  }
}

// The same of rounded codes.
template <int kCount>
__device__ __forceinline__ unsigned PackCodes(const unsigned (&code)[kCount], const CodeRounder& r) {
  const unsigned word = PackBytes(code);
  return r.odd ? AddOnes(word) : word;
}

}  // namespace lowbit::cuda
