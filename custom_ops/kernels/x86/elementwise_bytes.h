// 128-bit byte operations that elementwise_impl.h needs beside simd_sse41.h. The wider levels use them as the
// narrow end of loops over channels.
#pragma once

#include "kernels/x86/simd_sse41.h"

namespace lowbit {
namespace {

struct Bytes128 : Sse41 {
  using Half = Bytes128;  // nothing narrower
  static constexpr int kBytes = 16;

  static I SetB(uint8_t v) { return _mm_set1_epi8(static_cast<char>(v)); }
  static I MaxU8(I a, I b) { return _mm_max_epu8(a, b); }
  static I MinU8(I a, I b) { return _mm_min_epu8(a, b); }
  static I MaxS8(I a, I b) { return _mm_max_epi8(a, b); }
  static I SubSaturatedS8(I a, I b) { return _mm_subs_epi8(a, b); }
  static I ShuffleB(I table, I index) { return _mm_shuffle_epi8(table, index); }
  static I Broadcast128(const uint8_t* p) { return Load(p); }

  // count + (a >= b ? 1 : 0) and count + (a >= b ? step : 0); false for NaN. A true comparison is -1.
  static I CountGeF(I count, F a, F b) { return _mm_sub_epi32(count, _mm_castps_si128(_mm_cmpge_ps(a, b))); }
  static I StepGeF(I count, I step, F a, F b) {
    return _mm_add_epi32(count, _mm_and_si128(step, _mm_castps_si128(_mm_cmpge_ps(a, b))));
  }
  static F Gather(const float* table, I index) {
    return _mm_setr_ps(table[_mm_cvtsi128_si32(index)], table[_mm_extract_epi32(index, 1)],
                       table[_mm_extract_epi32(index, 2)], table[_mm_extract_epi32(index, 3)]);
  }

  static I Add16(I a, I b) { return _mm_add_epi16(a, b); }
  static I LoadU8As16(const uint8_t* p) {
    return _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static I LoadS8As16(const uint8_t* p) {
    return _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }

  static I SetWords(int16_t v) { return _mm_set1_epi16(v); }
  static I AddSaturated16(I a, I b) { return _mm_adds_epi16(a, b); }
  static I PackWords(I a, I b) { return _mm_packs_epi32(a, b); }
  static I PackBytes(I a, I b) { return _mm_packus_epi16(a, b); }
  static I InOrder(I bytes) { return bytes; }
  // The first kLanes bytes.
  static void StoreQuarter(uint8_t* p, I v) {
    const int32_t bytes = _mm_cvtsi128_si32(v);
    std::memcpy(p, &bytes, 4);
  }
};

}  // namespace
}  // namespace lowbit
