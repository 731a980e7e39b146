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
  // From the order of depthwise_block.h to that of the channels: lane l of vector j becomes 128-bit lane 4 l
  // + j.
  static void OrderChannels(I (&)[4]) {}
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
  static void OrderChannels(I (&v)[4]) {
    const I low = _mm256_permute2x128_si256(v[2], v[3], 0x20),
            high = _mm256_permute2x128_si256(v[0], v[1], 0x31);
    v[0] = _mm256_permute2x128_si256(v[0], v[1], 0x20);
    v[3] = _mm256_permute2x128_si256(v[2], v[3], 0x31);
    v[1] = low;
    v[2] = high;
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
  static void OrderChannels(I (&v)[4]) {  // a 4 x 4 transposition of lanes
    const I a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[2], v[3], 0x44),
            c = _mm512_shuffle_i32x4(v[0], v[1], 0xee), d = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
    v[0] = _mm512_shuffle_i32x4(a, b, 0x88);
    v[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
    v[2] = _mm512_shuffle_i32x4(c, d, 0x88);
    v[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
};
#endif

}  // namespace
}  // namespace lowbit
