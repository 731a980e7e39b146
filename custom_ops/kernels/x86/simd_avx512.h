// 512-bit vectors for the kernel templates of this folder. Every simd_<isa>.h defines the same set of names, so a
// template written against one of them compiles for all. Include it only from files built with that ISA's flags.
#pragma once

// GCC 12 takes the deliberately undefined merge operand inside its own AVX-512 intrinsics for an uninitialized variable
// (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace lowbit {
namespace {

struct Avx512 {
  using I = __m512i;  // int32 lanes
  using F = __m512;   // float lanes
  static constexpr int kLanes = 16;

  static I Load(const void* p) { return _mm512_loadu_si512(p); }
  static void Store(void* p, I v) { _mm512_storeu_si512(p, v); }
  static F LoadF(const float* p) { return _mm512_loadu_ps(p); }
  static void StoreF(float* p, F v) { _mm512_storeu_ps(p, v); }
  static I Set(int32_t v) { return _mm512_set1_epi32(v); }
  static F SetF(float v) { return _mm512_set1_ps(v); }

  static I Add(I a, I b) { return _mm512_add_epi32(a, b); }
  static I AddBytes(I a, I b) { return _mm512_add_epi8(a, b); }
  static I Sub(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I Mul(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static I Xor(I a, I b) { return _mm512_xor_si512(a, b); }
  static I And(I a, I b) { return _mm512_and_si512(a, b); }
  // count + (a >= b ? 1 : 0), signed
  static I CountGe(I count, I a, I b) {
    return _mm512_mask_add_epi32(count, _mm512_cmpge_epi32_mask(a, b), count, _mm512_set1_epi32(1));
  }

  static F ToFloat(I v) { return _mm512_cvtepi32_ps(v); }
  static I RoundToInt(F v) { return _mm512_cvtps_epi32(v); }  // half to even (MXCSR default)
  static F Rint(F v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F AddF(F a, F b) { return _mm512_add_ps(a, b); }
  static F SubF(F a, F b) { return _mm512_sub_ps(a, b); }
  static F MulF(F a, F b) { return _mm512_mul_ps(a, b); }
  static F DivF(F a, F b) { return _mm512_div_ps(a, b); }
  // As the instruction: the second operand when either is NaN.
  static F MinF(F a, F b) { return _mm512_min_ps(a, b); }
  static F MaxF(F a, F b) { return _mm512_max_ps(a, b); }
  static constexpr bool kHasFma = true;
  static F FmaF(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }    // a*b + c
  static F FnmaF(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a*b

  // kLanes bytes <-> kLanes int32; StoreU8 keeps the low byte of each lane.
  static I LoadU8(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I LoadS8(const uint8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void StoreU8(uint8_t* p, I v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
  }
  // N vectors of int32 -> N * kLanes bytes: saturated to int16, + zero (saturating), clipped to [lo, hi] as unsigned
  // bytes, XORed with flip.
  template <int N>
  static void StoreClippedU8(uint8_t* p, const I (&v)[N], int16_t zero, uint8_t lo, uint8_t hi, uint8_t flip) {
    const I z = _mm512_set1_epi16(zero);
    // The packs work inside 128-bit lanes; the permutation at the end restores the order of the channels.
    const I low = _mm512_adds_epi16(_mm512_packs_epi32(v[0], v[N > 1 ? 1 : 0]), z);
    I high = low;
    if constexpr (N > 2) high = _mm512_adds_epi16(_mm512_packs_epi32(v[2], v[N - 1]), z);
    I bytes = _mm512_packus_epi16(low, high);
    bytes = _mm512_max_epu8(bytes, _mm512_set1_epi8(static_cast<char>(lo)));
    bytes = _mm512_min_epu8(bytes, _mm512_set1_epi8(static_cast<char>(hi)));
    bytes = _mm512_xor_si512(bytes, _mm512_set1_epi8(static_cast<char>(flip)));
    bytes = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
    if constexpr (N == 4) {
      _mm512_storeu_si512(p, bytes);
    } else if constexpr (N == 3) {
      _mm512_mask_storeu_epi32(p, 0x0fff, bytes);
    } else if constexpr (N == 2) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(bytes));
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_castsi512_si128(bytes));
    }
  }
};

}  // namespace
}  // namespace lowbit
