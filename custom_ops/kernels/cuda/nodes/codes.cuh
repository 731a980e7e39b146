// Codes and floats in registers: vectors to and from memory, codes to float32 values and back, what an index
// is along each dim, what threads combine. Every operation rounds once; what is written as fma is exact by proof.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/elementwise.h"
#include "kernels/cuda/device/fast_divisor.h"
#include "kernels/cuda/device/ptx.cuh"

namespace lowbit::cuda {

// Threads of a block, where a kernel has no reason for another number.
constexpr int kThreads = 256;
constexpr int kWarp = 32;

// What the parameters of kernels begin with that make one tensor of `count` elements from another.
template <typename X, typename Y>
struct Tensors {
  const X* x = nullptr;
  Y* y = nullptr;
  unsigned count = 0;
};

// How a kernel begins that reads nothing before its predecessors have ended. Returns the thread's number.
template <int kBlock = kThreads>
__device__ __forceinline__ unsigned StartThread() {
  LetSuccessorsStart();
  WaitForPredecessors();
  return blockIdx.x * kBlock + threadIdx.x;
}

// All threads of a group of kGroup, a part of a warp, one or the block, get the combination of their values.
template <int kGroup, typename T, typename Combine>
__device__ __forceinline__ T CombineGroup(T v, const Combine& combine) {
#pragma unroll
  for (int step = (kGroup < kWarp ? kGroup : kWarp) / 2; step > 0; step /= 2) {
    v = combine(v, __shfl_xor_sync(0xFFFFFFFFu, v, step));
  }
  if constexpr (kGroup > kWarp) {
    __shared__ T of_warp[kGroup / kWarp];
    __syncthreads();
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = v;
    __syncthreads();
    v = of_warp[0];
#pragma unroll
    for (int i = 1; i < kGroup / kWarp; ++i) v = combine(v, of_warp[i]);
  }
  return v;
}

// n / d and the rest, for 0 <= n < 2^31.
struct Division {
  unsigned quotient, rest;
};
__device__ __forceinline__ Division Divided(unsigned n, const FastDivisor& d) {
  const unsigned quotient = (__umulhi(n, d.multiplier) + n) >> d.shift;
  return {quotient, n - quotient * d.divisor};
}

// kBytes codes (16, 4 or 1) as words.
template <int kBytes>
struct Codes {
  using Vector = std::conditional_t<kBytes == 16, uint4, unsigned>;
  static constexpr int kWords = (kBytes + 3) / 4;
  static constexpr int kPerWord = kBytes < 4 ? kBytes : 4;
  unsigned w[kWords];

  __device__ __forceinline__ unsigned operator[](int i) const { return w[i / 4] >> (8 * (i % 4)) & 255u; }
};

// Aligned to kBytes.
template <int kBytes>
__device__ __forceinline__ Codes<kBytes> LoadCodes(const uint8_t* x) {
  using Vector = typename Codes<kBytes>::Vector;
  if constexpr (kBytes == 1) return {{*x}};
  return __builtin_bit_cast(Codes<kBytes>, *reinterpret_cast<const Vector*>(x));
}

template <int kBytes>
__device__ __forceinline__ void StoreCodes(uint8_t* y, const Codes<kBytes>& codes) {
  using Vector = typename Codes<kBytes>::Vector;
  if constexpr (kBytes == 1) {
    *y = static_cast<uint8_t>(codes.w[0]);
  } else {
    *reinterpret_cast<Vector*>(y) = __builtin_bit_cast(Vector, codes);
  }
}

// The first `valid` codes, at least one, of a vector that may reach past the end of its tensor.
template <int kBytes>
__device__ __forceinline__ Codes<kBytes> LoadCodes(const uint8_t* x, int valid) {
  if (valid >= kBytes || kBytes == 1) return LoadCodes<kBytes>(x);
  Codes<kBytes> out = {};
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    if (i < valid) out.w[i / 4] |= static_cast<unsigned>(x[i]) << (8 * (i % 4));
  }
  return out;
}

template <int kBytes>
__device__ __forceinline__ void StoreCodes(uint8_t* y, const Codes<kBytes>& codes, int valid) {
  if (valid >= kBytes || kBytes == 1) return StoreCodes<kBytes>(y, codes);
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    if (i < valid) y[i] = static_cast<uint8_t>(codes[i]);
  }
}

// kBytes codes from a word of four equal ones.
template <int kBytes>
__device__ __forceinline__ Codes<kBytes> Splat(unsigned word) {
  Codes<kBytes> out;
#pragma unroll
  for (unsigned& w : out.w) w = word;
  return out;
}

// kCount 4 or 1 neighbouring floats, of which the first `valid` are in the tensor.
template <int kCount>
__device__ __forceinline__ void LoadFloats(const float* x, float (&v)[kCount], int valid = kCount) {
  if constexpr (kCount == 4) {
    if (valid >= 4) {
      const float4 four = *reinterpret_cast<const float4*>(x);
      v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = i < valid ? x[i] : 0.0f;
}

template <int kCount>
__device__ __forceinline__ void StoreFloats(float* y, const float (&v)[kCount], int valid = kCount) {
  if constexpr (kCount == 4) {
    if (valid >= 4) {
      *reinterpret_cast<float4*>(y) = make_float4(v[0], v[1], v[2], v[3]);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i < valid) y[i] = v[i];
  }
}

// f32(code - zero_point) of a stored byte b: 2^23 + (b ^ flip) less `bias`, all of them integers below 2^24.
struct CodeReader {
  uint32_t flip = 0;  // four times 128 where codes are signed
  float bias = 8388608.0f;
};
inline CodeReader MakeReader(bool is_signed, int32_t zero_point) {
  return {is_signed ? 0x80808080u : 0u, 8388608.0f + static_cast<float>(zero_point + (is_signed ? 128 : 0))};
}

// 0x4B0000bb is the float 2^23 + bb.
template <int kBytes>
__device__ __forceinline__ float CodeValue(const Codes<kBytes>& codes, int i, const CodeReader& reader) {
  const unsigned bits = __byte_perm(codes.w[i / 4] ^ reader.flip, 0x4B000000u, 0x7650u + (i % 4));
  return __fsub_rn(__uint_as_float(bits), reader.bias);
}

struct Divider {
  float scale = 1, inverse = 1;
};
inline Divider MakeDivider(float scale) { return {scale, 1.0f / scale}; }

// v / scale, rounded once. kFast: by Markstein's sequence, which is exact under the condition of
// FastIsExact (core/elementwise.h).
template <bool kFast>
__device__ __forceinline__ float Divide(float v, const Divider& d) {
  if constexpr (kFast) {
    const float q = __fmul_rn(v, d.inverse);
    return __fmaf_rn(__fmaf_rn(-q, d.scale, v), d.inverse, q);
  } else {
    return __fdiv_rn(v, d.scale);
  }
}

// clip(rint(v) + zero_point, lo, hi). Adding 1.5 * 2^23 rounds |v| < 2^22 half to even at the integers, which
// then sit in the low bits of the float; an even number more changes neither ties nor their direction. An odd
// zero point leaves 1 to add afterwards.
struct CodeRounder {
  float lo = 0, hi = 255;  // less the zero point
  float magic = 12582912.0f;
  uint32_t odd = 0;
};
inline CodeRounder MakeRounder(int32_t zero_point, int32_t lo, int32_t hi) {
  CodeRounder r;
  r.odd = zero_point % 2 != 0 ? 1 : 0;
  r.lo = static_cast<float>(lo - zero_point);
  r.hi = static_cast<float>(hi - zero_point);
  r.magic = 12582912.0f + static_cast<float>(zero_point - static_cast<int32_t>(r.odd));
  return r;
}
inline CodeRounder MakeRounder(const Quantizer& q) { return MakeRounder(q.zero_point, q.lo, q.hi); }

// The code in the low byte, but for `odd`. Bounds are integers, so clipping first gives the same; fmaxf takes
// the bound where v is NaN.
__device__ __forceinline__ unsigned RoundedCode(float v, const CodeRounder& r) {
  return __float_as_uint(__fadd_rn(fminf(fmaxf(v, r.lo), r.hi), r.magic));
}

// LowBitQuantize of one channel.
struct QuantizerGrid {
  Divider divider;
  CodeRounder rounder;
  float limit = 1024;  // beyond +-limit every value has the same code as there
};
inline QuantizerGrid MakeGrid(const Quantizer& q) {
  return {MakeDivider(q.scale), MakeRounder(q), 1024 * q.scale};
}
// Whether the fast division rounds every value to the same code.
inline bool QuantizesFast(const Quantizer& q) {
  return FastIsExact(q, 1024 * static_cast<double>(q.scale), 1.0);
}

// The code in the low byte. Divisions by Markstein's sequence need bounds; fmaxf takes the number where v is NaN.
template <bool kFast>
__device__ __forceinline__ unsigned QuantizedCode(float v, const QuantizerGrid& g) {
  if constexpr (kFast) v = fminf(fmaxf(v, -g.limit), g.limit);
  return RoundedCode(Divide<kFast>(v, g.divider), g.rounder) + g.rounder.odd;
}

// Codes whose i-th is the low byte of code(i).
template <int kBytes, typename Code>
__device__ __forceinline__ Codes<kBytes> MakeCodes(const Code& code) {
  Codes<kBytes> out;
#pragma unroll
  for (int i = 0; i < kBytes; i += 4) {
    out.w[i / 4] = code(i);
    if constexpr (kBytes >= 4) {
      const unsigned low = __byte_perm(out.w[i / 4], code(i + 1), 0x0040);
      out.w[i / 4] = __byte_perm(low, __byte_perm(code(i + 2), code(i + 3), 0x0040), 0x5410);
    }
  }
  return out;
}

// Codes whose i-th is value(i), rounded. An odd zero point adds its 1 to four bytes at once.
template <int kBytes, typename Value>
__device__ __forceinline__ Codes<kBytes> RoundCodes(const CodeRounder& r, const Value& value) {
  Codes<kBytes> out = MakeCodes<kBytes>([&](int i) { return RoundedCode(value(i), r); });
  if (r.odd == 0) return out;
#pragma unroll
  for (unsigned& w : out.w) w = ((w & 0x7F7F7F7Fu) + 0x01010101u) ^ (w & 0x80808080u);
  return out;
}

}  // namespace lowbit::cuda
