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

  // The sums less what `center` holds, as bytes, in the order of channels.
  I Bytes(const Words512& center) const {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), PackedBytes(center));
  }
  I PackedBytes(const Words512& center) const {
    return _mm512_packus_epi16(_mm512_subs_epi16(lower, center.lower),
                               _mm512_subs_epi16(upper, center.upper));
  }

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
  I Bytes(const Words512& center) const {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                                    PackedBytes(center));
  }
};

// Limits of bytes; codes of residuals by FewSums::table. The numbers of exceeded limits are then multiplied by 16, as
// parts of places in that table: a falling channel's are subtracted.
template <int MR, int kLimits, bool kSums, class WordsOf>
inline __attribute__((always_inline)) void FinishFewBytes(const BitserialTile& t, size_t skipped,
                                                          const WordsOf& words_of) {
  using S = Avx512;
  using I = Avx512::I;
  using Words = decltype(words_of(0));
  const BitserialBlock& b = *t.block;
  const FewCodesView& few = *b.few_codes;
  const size_t channel = t.panel->channel + skipped, count = t.panel->count - skipped;
  const __mmask64 valid = ~__mmask64{0} >> (count < 64 ? 64 - count : 0);
  const I flip = S::Load(few.flip + channel);
  I start = S::Xor(S::Load(few.byte_start + channel), flip), step = _mm512_or_si512(flip, S::SetBytes(1));
  I sign{}, lowest{}, steps{}, table{};
  if constexpr (kSums) {
    start = _mm512_slli_epi16(start, 4);
    step = S::And(_mm512_slli_epi16(step, 4), S::SetBytes(0xf0));
    sign = S::SetBytes(few.sums->flip ^ 0x80);
    lowest = S::SetBytes(few.sums->lowest);
    steps = S::SetBytes(kFewSteps);
    table = S::Load(few.sums->table);
  }
  const Words center = Words::Limits(few.center + channel);
  I limits[kLimits];
#pragma GCC unroll 3
  for (size_t k = 0; k < kLimits; ++k)
    limits[k] = k < few.count ? S::Load(few.byte_limits + k * few.pitch + channel) : S::SetBytes(255);
  const size_t pitch = b.output.pixel_step * b.output.epilogue->channels, index = IndexOf(t) + skipped;
  uint8_t* y = static_cast<uint8_t*>(b.output.y) + index;
  // Read before codes are written that may have the same last bits of their address (RequantizeTile).
  const uint8_t* residual = kSums ? b.output.residual + index : nullptr;
  I ahead = kSums ? _mm512_maskz_loadu_epi8(valid, residual) : start;
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) {
    const I sums = words_of(r).Bytes(center);
    I codes = start;
    if constexpr (kSums) {
      const I above = _mm512_subs_epu8(S::Xor(ahead, sign), lowest);
      codes = S::AddBytes(start, _mm512_min_epu8(above, steps));
      residual += pitch;
      if (r + 1 < MR) ahead = _mm512_maskz_loadu_epi8(valid, residual);
    }
#pragma GCC unroll 3
    for (int k = 0; k < kLimits; ++k)
      codes = _mm512_mask_add_epi8(codes, _mm512_cmpgt_epu8_mask(sums, limits[k]), codes, step);
    if constexpr (kSums) codes = _mm512_permutexvar_epi8(codes, table);
    _mm512_mask_storeu_epi8(y, valid, codes);
    y += pitch;
  }
}

// Limits of words.
template <int MR, class WordsOf>
inline __attribute__((always_inline)) void FinishFewWords(const BitserialTile& t, size_t skipped,
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
  constexpr size_t kLimits = kMaxFewCodeLimits;
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
    for (size_t k = 1; k < kLimits; ++k)
      exceeded = _mm512_mask_add_epi8(exceeded, words.Exceed(limits[k]), exceeded, one);
    rows.Write(S::AddBytes(rows.start(), Words::Ordered(exceeded)), r + 1 < MR, load, store);
  }
}

// The tile's channels [skipped, skipped + 64), or what there is of them; words_of(r) are the sums of pixel r.
template <int MR, class WordsOf>
inline __attribute__((always_inline)) void FinishFewCodes(const BitserialTile& t, size_t skipped,
                                                          const WordsOf& words_of) {
  const FewCodesView& few = *t.block->few_codes;
  if (few.center == nullptr || (few.sums != nullptr && !few.sums->has_table))
    return FinishFewWords<MR>(t, skipped, words_of);
  if (few.sums != nullptr) {
    return few.count == 1 ? FinishFewBytes<MR, 1, true>(t, skipped, words_of)
                          : FinishFewBytes<MR, kMaxFewCodeLimits, true>(t, skipped, words_of);
  }
  return few.count == 1 ? FinishFewBytes<MR, 1, false>(t, skipped, words_of)
                        : FinishFewBytes<MR, kMaxFewCodeLimits, false>(t, skipped, words_of);
}

}  // namespace
}  // namespace lowbit
