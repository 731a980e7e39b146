// What the Winograd kernels of 256-bit vectors have in common (winograd_tile.h).
#pragma once

#include "kernels/x86/simd_avx2.h"
#include "kernels/x86/winograd_schemes.h"
#include "kernels/x86/winograd_tile.h"

namespace lowbit {
namespace {

struct Common256 : Avx2 {
  using Sums = uint32_t __attribute__((vector_size(32)));
  static constexpr size_t kSliceBytes = 24 * 1024;
  static constexpr int kGroup = 6;  // 12 registers of sums, two of weights, a broadcast and a product

  template <int n>
  static I ShiftRight(I v) {
    return _mm256_srai_epi32(v, n);
  }
};

struct Words256 : Common256 {
  using Codes = uint16_t __attribute__((vector_size(32)));
  static constexpr size_t kCodeBytes = 2, kBlockTiles = 80;
  static constexpr int kInputOffset = 0;

  static __m128i LoadHalf(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static Codes LoadBytes(const uint8_t* p, uint8_t shift) {
    const __m128i bytes = _mm_sub_epi8(LoadHalf(p), _mm_set1_epi8(static_cast<char>(shift)));
    return __builtin_bit_cast(Codes, _mm256_cvtepu8_epi16(bytes));
  }
  static void StoreCodes(uint8_t* to, Codes v) { Store(to, __builtin_bit_cast(I, v)); }
  static void StoreInput(uint8_t* to, Codes v) { StoreCodes(to, v); }
  template <int kBits, int kPart>
  static Codes LoadTap(const uint8_t* p) {
    I words = _mm256_cvtepi8_epi16(LoadHalf(p + (kBits == 8 ? 16 * kPart : 0)));
    if constexpr (kBits == 4) {
      if constexpr (kPart == 0) words = _mm256_slli_epi16(words, 12);
      words = _mm256_srai_epi16(words, kPart == 0 ? 12 : 4);
    }
    return __builtin_bit_cast(Codes, words);
  }
};

}  // namespace
}  // namespace lowbit
