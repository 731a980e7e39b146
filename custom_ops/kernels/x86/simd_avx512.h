// 512-bit vectors for the kernel templates of this folder. Every simd_<isa>.h defines the same set of names,
// so a template written against one of them compiles for all. Include it only from files built with that
// ISA's flags.
#pragma once

// GCC 12 takes the deliberately undefined merge operand inside its own AVX-512 intrinsics for an
// uninitialized variable (GCC bug 105593).
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
  static I Or(I a, I b) { return _mm512_or_si512(a, b); }
  static bool HasBits(I v, I bits) { return _mm512_test_epi32_mask(v, bits) != 0; }
  static I And(I a, I b) { return _mm512_and_si512(a, b); }
  // count + (a > b ? 1 : 0), signed
  static I CountGreater(I count, I a, I b) {
    return _mm512_mask_add_epi32(count, _mm512_cmpgt_epi32_mask(a, b), count, _mm512_set1_epi32(1));
  }

  static F ToFloat(I v) { return _mm512_cvtepi32_ps(v); }
  static F AsFloat(I bits) { return _mm512_castsi512_ps(bits); }
  static I AsInt(F v) { return _mm512_castps_si512(v); }
  static I RoundToInt(F v) { return _mm512_cvtps_epi32(v); }  // half to even (MXCSR default)
  static F Rint(F v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F AddF(F a, F b) { return _mm512_add_ps(a, b); }
  static F SubF(F a, F b) { return _mm512_sub_ps(a, b); }
  static F MulF(F a, F b) { return _mm512_mul_ps(a, b); }
  static F DivF(F a, F b) { return _mm512_div_ps(a, b); }
  // v * 2^n, a normal number; the low bits of `power` are n.
  static F TimesPowerOf2(F v, F power) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(v), _mm512_slli_epi32(_mm512_castps_si512(power), 23)));
  }
  // As the instruction: the second operand when either is NaN.
  static F MinF(F a, F b) { return _mm512_min_ps(a, b); }
  static F MaxF(F a, F b) { return _mm512_max_ps(a, b); }
  // The first `count` of `size` bytes, at most 64; the others are 0.
  static void CopyBytes(uint8_t* to, const uint8_t* from, size_t size, size_t count) {
    const __m512i bytes = _mm512_maskz_loadu_epi8(~__mmask64{0} >> (64 - count), from);
    if (size <= 16) return _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_castsi512_si128(bytes));
    if (size <= 32) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(bytes));
    _mm512_mask_storeu_epi8(to, ~__mmask64{0} >> (64 - size), bytes);
  }
  static constexpr bool kHasFma = true, kAddsFewSums = true;
  static F FmaF(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }    // a*b + c
  static F FnmaF(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a*b

  // Half a vector of bytes -> words.
  using Half = __m256i;
  static I WordsOfU8(Half bytes) { return _mm512_cvtepu8_epi16(bytes); }
  static I WordsOfS8(Half bytes) { return _mm512_cvtepi8_epi16(bytes); }

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
  // Four vectors of int32 -> 4 * kLanes bytes in the same order: saturated to int16, + zero (saturating),
  // clipped to [lo, hi] as unsigned bytes, XORed with flip.
  struct PackRange {
    I zero, lo, hi, flip;
    PackRange(int16_t zero_value, uint8_t lo_value, uint8_t hi_value, uint8_t flip_value)
        : zero(_mm512_set1_epi16(zero_value)),
          lo(_mm512_set1_epi8(static_cast<char>(lo_value))),
          hi(_mm512_set1_epi8(static_cast<char>(hi_value))),
          flip(_mm512_set1_epi8(static_cast<char>(flip_value))) {}
  };
  using Packed = __m512i;
  // Tables of 16 bytes, read by the low halves of the bytes of `index`, whose top bits are 0.
  static I Table(const uint8_t* table) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  }
  static I Shuffle(I table, I index) { return _mm512_shuffle_epi8(table, index); }
  static I SetBytes(uint8_t v) { return _mm512_set1_epi8(static_cast<char>(v)); }
  // count + (a > b ? 1 : 0), signed bytes
  static Packed CountGreaterBytes(Packed count, Packed a, Packed b) {
    return _mm512_mask_add_epi8(count, _mm512_cmpgt_epi8_mask(a, b), count, _mm512_set1_epi8(1));
  }
  // In the order of four vectors: the packs work inside 128-bit lanes.
  static I InOrder(I packed) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                                    packed);
  }
  // Clipped to [0, 255].
  static Packed PackSaturated(I v0, I v1, I v2, I v3) {
    return InOrder(_mm512_packus_epi16(_mm512_packs_epi32(v0, v1), _mm512_packs_epi32(v2, v3)));
  }
  static Packed PackClipped(I v0, I v1, I v2, I v3, const PackRange& range) {
    I bytes = _mm512_packus_epi16(_mm512_adds_epi16(_mm512_packs_epi32(v0, v1), range.zero),
                                  _mm512_adds_epi16(_mm512_packs_epi32(v2, v3), range.zero));
    bytes = _mm512_max_epu8(bytes, range.lo);
    bytes = _mm512_min_epu8(bytes, range.hi);
    return InOrder(_mm512_xor_si512(bytes, range.flip));
  }
  // The bytes of two vectors, and of two others.
  static Packed LoadPairs(const uint8_t* low, const uint8_t* high) {
    const auto load = [](const uint8_t* p) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    };
    return _mm512_inserti64x4(_mm512_castsi256_si512(load(low)), load(high), 1);
  }
  static void StoreAll(uint8_t* p, Packed v) { _mm512_storeu_si512(p, v); }
  // The bytes of vectors i and i + 1 (i = 0, 2), of vector i, or the first `count` of vector i.
  template <int i>
  static void StorePair(uint8_t* p, Packed v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_extracti64x4_epi64(v, i / 2));
  }
  template <int i>
  static void StoreOne(uint8_t* p, Packed v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_extracti32x4_epi32(v, i));
  }
  template <int i>
  static void StorePart(uint8_t* p, Packed v, size_t count) {
    _mm_mask_storeu_epi8(p, static_cast<__mmask16>((1u << count) - 1), _mm512_extracti32x4_epi32(v, i));
  }
};

}  // namespace
}  // namespace lowbit
