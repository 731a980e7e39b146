// Byte operations that kernels/common/elementwise_impl.h needs beside simd_<isa>.h: those of 128 bits, which
// the wider levels use as the narrow end of loops over channels, and what all levels share.
#pragma once

#include "kernels/common/inline.h"
#include "kernels/x86/simd_sse41.h"

namespace lowbit {
namespace {

// S::ByteTable by pshufb. Sixteen 16-entry tables T[h] make up the 256-entry one. pshufb looks up by the low
// four bits of the index and gives 0 where its top bit is set. With D[0] = T[0], D[h] = T[h] ^ T[h-1], and an
// index that sinks by 16 per step (signed, saturating), a code below 128 with high nibble h collects
// D[0] ^ .. ^ D[h] = T[h]; a code of 128 and above is negative from the start and collects 0. The upper half
// does the same with the top bit flipped.
template <class S>
struct ShuffledTable {
  explicit ShuffledTable(const uint8_t* table) {
    for (int i = 0; i < 256; ++i) {
      steps[i] = (i & 0x70) == 0 ? table[i] : static_cast<uint8_t>(table[i] ^ table[i - 16]);
    }
  }
  LOWBIT_ALWAYS_INLINE auto operator()(auto codes) const {
    const auto sixteen = S::SetB(16);
    auto low = codes, high = S::Xor(codes, S::SetB(0x80));
    auto out =
        S::Xor(S::ShuffleB(S::Broadcast128(steps), low), S::ShuffleB(S::Broadcast128(steps + 128), high));
    for (int h = 1; h < 8; ++h) {
      low = S::SubSaturatedS8(low, sixteen);
      high = S::SubSaturatedS8(high, sixteen);
      out = S::Xor(out, S::Xor(S::ShuffleB(S::Broadcast128(steps + 16 * h), low),
                               S::ShuffleB(S::Broadcast128(steps + 128 + 16 * h), high)));
    }
    return out;
  }
  alignas(64) uint8_t steps[256];
};

// Output byte j of 16 interleaved pixels takes pixel j / 3 of plane j % 3; -1 gives 0 and leaves the place to
// another plane. [vector][plane][byte]
struct Interleave3Tables {
  constexpr Interleave3Tables() {
    for (int vector = 0; vector < 3; ++vector) {
      for (int plane = 0; plane < 3; ++plane) {
        for (int i = 0; i < 16; ++i) {
          const int j = 16 * vector + i;
          index[vector][plane][i] = static_cast<uint8_t>(j % 3 == plane ? j / 3 : -1);
        }
      }
    }
  }
  alignas(16) uint8_t index[3][3][16] = {};
};
inline constexpr Interleave3Tables kInterleave3;

struct Bytes128 : Sse41 {
  using ByteTable = ShuffledTable<Bytes128>;
  using Half = Bytes128;  // nothing narrower
  static constexpr int kBytes = 16;

  static I SetB(uint8_t v) { return _mm_set1_epi8(static_cast<char>(v)); }
  static I MaxU8(I a, I b) { return _mm_max_epu8(a, b); }
  static I MinU8(I a, I b) { return _mm_min_epu8(a, b); }
  static I MaxS8(I a, I b) { return _mm_max_epi8(a, b); }
  static I SubSaturatedS8(I a, I b) { return _mm_subs_epi8(a, b); }
  static I ShuffleB(I table, I index) { return _mm_shuffle_epi8(table, index); }
  static I Broadcast128(const uint8_t* p) { return Load(p); }

  static I UnpackLow8(I a, I b) { return _mm_unpacklo_epi8(a, b); }
  static I UnpackHigh8(I a, I b) { return _mm_unpackhi_epi8(a, b); }
  // 16 pixels of three planes to a0 b0 c0 a1 b1 c1 ...
  static void StoreInterleaved3(const uint8_t* a, const uint8_t* b, const uint8_t* c, uint8_t* y) {
    const I planes[3] = {Load(a), Load(b), Load(c)};
    for (int v = 0; v < 3; ++v) {
      I merged = _mm_setzero_si128();
      for (int plane = 0; plane < 3; ++plane) {
        merged = _mm_or_si128(merged, ShuffleB(planes[plane], Load(kInterleave3.index[v][plane])));
      }
      Store(y + 16 * v, merged);
    }
  }

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
