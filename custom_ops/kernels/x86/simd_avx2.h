// 256-bit vectors for the kernel templates of this folder; the same names as simd_avx512.h.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lowbit {
namespace {

struct Avx2 {
  using I = __m256i;
  using F = __m256;
  static constexpr int kLanes = 8;

  static I Load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void Store(void* p, I v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
  static F LoadF(const float* p) { return _mm256_loadu_ps(p); }
  static void StoreF(float* p, F v) { _mm256_storeu_ps(p, v); }
  static I Set(int32_t v) { return _mm256_set1_epi32(v); }
  static F SetF(float v) { return _mm256_set1_ps(v); }

  static I Add(I a, I b) { return _mm256_add_epi32(a, b); }
  static I AddBytes(I a, I b) { return _mm256_add_epi8(a, b); }
  static I Sub(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I Mul(I a, I b) { return _mm256_mullo_epi32(a, b); }
  static I Xor(I a, I b) { return _mm256_xor_si256(a, b); }
  static I Or(I a, I b) { return _mm256_or_si256(a, b); }
  static bool HasBits(I v, I bits) { return _mm256_testz_si256(v, bits) == 0; }
  static I And(I a, I b) { return _mm256_and_si256(a, b); }
  static I SetWords(int16_t v) { return _mm256_set1_epi16(v); }
  static I AddWords(I a, I b) { return _mm256_add_epi16(a, b); }
  static I ShiftRight16(I v) { return _mm256_srli_epi16(v, 8); }
  static I ShiftRightSigned16(I v) { return _mm256_srai_epi16(v, 8); }
  static I ShiftLeft16(I v) { return _mm256_slli_epi16(v, 8); }
  // Of each group of four signed bytes the first two (0) or the last two (1), as words.
  template <int kHalf>
  static I WidenHalfGroups(I groups) {
    constexpr char kFirst = 2 * kHalf, kZero = -128;
    const __m128i in_lane =
        _mm_setr_epi8(kZero, kFirst, kZero, kFirst + 1, kZero, kFirst + 4, kZero, kFirst + 5, kZero,
                      kFirst + 8, kZero, kFirst + 9, kZero, kFirst + 12, kZero, kFirst + 13);
    return ShiftRightSigned16(_mm256_shuffle_epi8(groups, _mm256_broadcastsi128_si256(in_lane)));
  }
  // 2 * kLanes bytes, or four, plus those of `shift` modulo 256, as words.
  static void WidenBytes(int16_t* to, const uint8_t* from, I shift) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    Store(to, _mm256_cvtepu8_epi16(_mm_add_epi8(bytes, _mm256_castsi256_si128(shift))));
  }
  static void WidenGroup(int16_t* to, int32_t group, I shift) {
    const __m128i bytes = _mm_add_epi8(_mm_cvtsi32_si128(group), _mm256_castsi256_si128(shift));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_cvtepu8_epi16(bytes));
  }
  static I MultiplyAdd16(I a, I b) { return _mm256_madd_epi16(a, b); }
  static I MultiplyAddBytes(I a, I b) { return _mm256_maddubs_epi16(a, b); }
  // count + (a > b ? 1 : 0); a comparison gives -1 for true.
  static I CountGreater(I count, I a, I b) { return _mm256_sub_epi32(count, _mm256_cmpgt_epi32(a, b)); }

  static F ToFloat(I v) { return _mm256_cvtepi32_ps(v); }
  static F AsFloat(I bits) { return _mm256_castsi256_ps(bits); }
  static I AsInt(F v) { return _mm256_castps_si256(v); }
  static I RoundToInt(F v) { return _mm256_cvtps_epi32(v); }
  static F Rint(F v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F AddF(F a, F b) { return _mm256_add_ps(a, b); }
  static F SubF(F a, F b) { return _mm256_sub_ps(a, b); }
  static F MulF(F a, F b) { return _mm256_mul_ps(a, b); }
  static F DivF(F a, F b) { return _mm256_div_ps(a, b); }
  // v * 2^n, a normal number; the low bits of `power` are n.
  static F TimesPowerOf2(F v, F power) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(v), _mm256_slli_epi32(_mm256_castps_si256(power), 23)));
  }
  static F MinF(F a, F b) { return _mm256_min_ps(a, b); }
  static F MaxF(F a, F b) { return _mm256_max_ps(a, b); }
  // The first `count` of `size` bytes; the others are anything.
  static void CopyBytes(uint8_t* to, const uint8_t* from, size_t /*size*/, size_t count) {
    std::memcpy(to, from, count);
  }
  static constexpr bool kHasFma = true, kAddsFewSums = true;
  static F FmaF(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F FnmaF(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }

  // Half a vector of bytes -> words.
  using Half = __m128i;
  static I WordsOfU8(Half bytes) { return _mm256_cvtepu8_epi16(bytes); }
  static I WordsOfS8(Half bytes) { return _mm256_cvtepi8_epi16(bytes); }

  static I LoadU8(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static I LoadS8(const uint8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static void StoreU8(uint8_t* p, I v) {
    const I low = _mm256_and_si256(v, _mm256_set1_epi32(255));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
  }
  struct PackRange {
    I zero, lo, hi, flip;
    PackRange(int16_t zero_value, uint8_t lo_value, uint8_t hi_value, uint8_t flip_value)
        : zero(_mm256_set1_epi16(zero_value)),
          lo(_mm256_set1_epi8(static_cast<char>(lo_value))),
          hi(_mm256_set1_epi8(static_cast<char>(hi_value))),
          flip(_mm256_set1_epi8(static_cast<char>(flip_value))) {}
  };
  using Packed = __m256i;
  // Tables of 16 bytes, read by the low halves of the bytes of `index`, whose top bits are 0.
  static I Table(const uint8_t* table) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  }
  static I Shuffle(I table, I index) { return _mm256_shuffle_epi8(table, index); }
  static I SetBytes(uint8_t v) { return _mm256_set1_epi8(static_cast<char>(v)); }
  // count + (a > b ? 1 : 0), signed bytes
  static Packed CountGreaterBytes(Packed count, Packed a, Packed b) {
    return _mm256_sub_epi8(count, _mm256_cmpgt_epi8(a, b));
  }
  // In the order of four vectors: the packs work inside 128-bit lanes.
  static I InOrder(I packed) {
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  // Clipped to [0, 255].
  static Packed PackSaturated(I v0, I v1, I v2, I v3) {
    return InOrder(_mm256_packus_epi16(_mm256_packs_epi32(v0, v1), _mm256_packs_epi32(v2, v3)));
  }
  static Packed PackClipped(I v0, I v1, I v2, I v3, const PackRange& range) {
    I bytes = _mm256_packus_epi16(_mm256_adds_epi16(_mm256_packs_epi32(v0, v1), range.zero),
                                  _mm256_adds_epi16(_mm256_packs_epi32(v2, v3), range.zero));
    bytes = _mm256_max_epu8(bytes, range.lo);
    bytes = _mm256_min_epu8(bytes, range.hi);
    return InOrder(_mm256_xor_si256(bytes, range.flip));
  }
  // The bytes of two vectors, and of two others.
  static Packed LoadPairs(const uint8_t* low, const uint8_t* high) {
    const auto load = [](const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load(low)), load(high), 1);
  }
  static void StoreAll(uint8_t* p, Packed v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  template <int i>
  static void StorePair(uint8_t* p, Packed v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_extracti128_si256(v, i / 2));
  }
  template <int i>
  static void StoreOne(uint8_t* p, Packed v) {
    const int64_t bytes = _mm256_extract_epi64(v, i);
    std::memcpy(p, &bytes, 8);
  }
  template <int i>
  static void StorePart(uint8_t* p, Packed v, size_t count) {
    const int64_t bytes = _mm256_extract_epi64(v, i);
    std::memcpy(p, &bytes, count);
  }
};

}  // namespace
}  // namespace lowbit
