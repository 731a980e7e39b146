// Codes by comparisons (few_codes.h), 512 bits: those of 64 channels of a pixel are bits of a mask.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/x86/bitserial_tile.h"
#include "kernels/x86/simd_avx512.h"

namespace lowbit {
namespace {

// Sums of 64 channels, in order.
struct Words512 {
  using I = Avx512::I;
  I lower, upper;

  static Words512 Limits(const int16_t* p) { return {Avx512::Load(p), Avx512::Load(p + 32)}; }
  static I Ordered(I bytes) { return bytes; }

  __mmask64 Exceed(const Words512& limits) const {
    return _mm512_kunpackd(_mm512_cmpgt_epi16_mask(upper, limits.upper),
                           _mm512_cmpgt_epi16_mask(lower, limits.lower));
  }
};

// In the order in which vectors of int32 are packed: four of each in turn.
struct PackedWords512 : Words512 {
  static I InOrder(const int16_t* p) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), Avx512::Load(p));
  }
  static PackedWords512 Limits(const int16_t* p) { return {{InOrder(p), InOrder(p + 32)}}; }
  static I Ordered(I bytes) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15),
                                    bytes);
  }
};

// The tile's channels [skipped, skipped + 64), or what there is of them; words_of(r) are the sums of pixel r. What is
// more than kLimits is not there.
template <int MR, int kLimits, class WordsOf>
inline __attribute__((always_inline)) void FinishFewCodes(const BitserialTile& t, size_t skipped,
                                                          const WordsOf& words_of) {
  using S = Avx512;
  using I = Avx512::I;
  using Words = decltype(words_of(0));
  const BitserialBlock& b = *t.block;
  const FewCodesView few = *b.few_codes;
  const size_t channel = t.panel->channel + skipped, count = t.panel->count - skipped;
  const __mmask64 valid = ~__mmask64{0} >> (count < 64 ? 64 - count : 0);
  const I one = _mm512_set1_epi8(1);
  const auto load = [&](const uint8_t* p) LOWBIT_ALWAYS_INLINE { return _mm512_maskz_loadu_epi8(valid, p); };
  const auto store = [&](uint8_t* p, I codes)
                         LOWBIT_ALWAYS_INLINE { _mm512_mask_storeu_epi8(p, valid, codes); };
  FewCodesRows<S> rows(t, skipped, few.sums, load);
  Words limits[kLimits];
  const auto load_limits = [&](const int16_t* from) __attribute__((always_inline)) {
#pragma GCC unroll 3
    for (size_t k = 0; k < kLimits; ++k) {
      const I never = _mm512_set1_epi16(0x7fff);  // no word exceeds it
      limits[k].lower = limits[k].upper = never;
      if (k < few.count) limits[k] = Words::Limits(from + k * few.pitch + channel);
    }
  };
  if (b.limit_rows == nullptr) load_limits(b.limits);
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) {
    if (b.limit_rows != nullptr) load_limits(b.limit_rows[t.pixel + static_cast<size_t>(r)]);
    const Words words = words_of(r);
    I exceeded = _mm512_maskz_mov_epi8(words.Exceed(limits[0]), one);
#pragma GCC unroll 3
    for (int k = 1; k < kLimits; ++k)
      exceeded = _mm512_mask_add_epi8(exceeded, words.Exceed(limits[k]), exceeded, one);
    rows.Write(S::AddBytes(rows.start(), Words::Ordered(exceeded)), r + 1 < MR, load, store);
  }
}

}  // namespace
}  // namespace lowbit
