// Byte and word operations that depthwise_impl.h needs beside simd_<isa>.h. Kernels that form 4-byte dot
// products derive from these structs and add Dot(acc, x, w).
#pragma once

#include "kernels/x86/simd_sse41.h"
#ifdef __AVX2__
#include "kernels/x86/simd_avx2.h"
#endif
#ifdef __AVX512BW__
#include "kernels/x86/simd_avx512.h"
#endif

namespace lowbit {
namespace {

struct Depthwise128 : Sse41 {
  static constexpr size_t kBytes = 16;
  static I SetBytes(uint8_t v) { return _mm_set1_epi8(static_cast<char>(v)); }
  static I UnpackLow8(I a, I b) { return _mm_unpacklo_epi8(a, b); }
  static I UnpackHigh8(I a, I b) { return _mm_unpackhi_epi8(a, b); }
  static I UnpackLow16(I a, I b) { return _mm_unpacklo_epi16(a, b); }
  static I UnpackHigh16(I a, I b) { return _mm_unpackhi_epi16(a, b); }
  static I PackWords(I a, I b) { return _mm_packs_epi32(a, b); }
  static I PackBytes(I a, I b) { return _mm_packus_epi16(a, b); }
  static I AddSaturated16(I a, I b) { return _mm_adds_epi16(a, b); }
  static I MaxU8(I a, I b) { return _mm_max_epu8(a, b); }
  static I MinU8(I a, I b) { return _mm_min_epu8(a, b); }
  // Lane l to p + 16 l.
  static void StoreLanes(int32_t* p, I v) { Store(p, v); }
};

#ifdef __AVX2__
struct Depthwise256 : Avx2 {
  static constexpr size_t kBytes = 32;
  static I SetBytes(uint8_t v) { return _mm256_set1_epi8(static_cast<char>(v)); }
  static I UnpackLow8(I a, I b) { return _mm256_unpacklo_epi8(a, b); }
  static I UnpackHigh8(I a, I b) { return _mm256_unpackhi_epi8(a, b); }
  static I UnpackLow16(I a, I b) { return _mm256_unpacklo_epi16(a, b); }
  static I UnpackHigh16(I a, I b) { return _mm256_unpackhi_epi16(a, b); }
  static I PackWords(I a, I b) { return _mm256_packs_epi32(a, b); }
  static I PackBytes(I a, I b) { return _mm256_packus_epi16(a, b); }
  static I AddSaturated16(I a, I b) { return _mm256_adds_epi16(a, b); }
  static I MaxU8(I a, I b) { return _mm256_max_epu8(a, b); }
  static I MinU8(I a, I b) { return _mm256_min_epu8(a, b); }
  static void StoreLanes(int32_t* p, I v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(v));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm256_extracti128_si256(v, 1));
  }
};
#endif

#ifdef __AVX512BW__
struct Depthwise512 : Avx512 {
  static constexpr size_t kBytes = 64;
  static I SetBytes(uint8_t v) { return _mm512_set1_epi8(static_cast<char>(v)); }
  static I SetWords(int16_t v) { return _mm512_set1_epi16(v); }
  static I UnpackLow8(I a, I b) { return _mm512_unpacklo_epi8(a, b); }
  static I UnpackHigh8(I a, I b) { return _mm512_unpackhi_epi8(a, b); }
  static I UnpackLow16(I a, I b) { return _mm512_unpacklo_epi16(a, b); }
  static I UnpackHigh16(I a, I b) { return _mm512_unpackhi_epi16(a, b); }
  static I ShiftRight16(I v) { return _mm512_srli_epi16(v, 8); }
  static I MultiplyAdd16(I a, I b) { return _mm512_madd_epi16(a, b); }
  static I PackWords(I a, I b) { return _mm512_packs_epi32(a, b); }
  static I PackBytes(I a, I b) { return _mm512_packus_epi16(a, b); }
  static I AddSaturated16(I a, I b) { return _mm512_adds_epi16(a, b); }
  static I MaxU8(I a, I b) { return _mm512_max_epu8(a, b); }
  static I MinU8(I a, I b) { return _mm512_min_epu8(a, b); }
  static void StoreLanes(int32_t* p, I v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_castsi512_si128(v));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm512_extracti32x4_epi32(v, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 32), _mm512_extracti32x4_epi32(v, 2));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 48), _mm512_extracti32x4_epi32(v, 3));
  }
};
#endif

}  // namespace
}  // namespace lowbit
