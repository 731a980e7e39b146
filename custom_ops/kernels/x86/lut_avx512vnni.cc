// Look-ups with vpshufb, 512 bits: tiles of up to 8 pixels x 16 channels. The explanation is in
// lut_shuffle.h.
#include "kernels/x86/lut_build_avx512.h"
#include "kernels/x86/lut_shuffle.h"

namespace lowbit {
namespace {

struct Words512 {
  using Vector = Avx512;
  using I = __m512i;
  static constexpr int kTileRows = 8;
  static I Lookup(I table, I index) { return _mm512_shuffle_epi8(table, index); }
  static I AddWords(I a, I b) { return _mm512_add_epi16(a, b); }
  static I SubWords(I a, I b) { return _mm512_sub_epi16(a, b); }
  static I HighBytes(I v) { return _mm512_srli_epi16(v, 8); }
  static I HighPlaces(I v) { return _mm512_slli_epi16(v, 8); }
  static I AddPairs(I bytes, I weights) { return _mm512_maddubs_epi16(bytes, weights); }
  static I UnpackLow(I a, I b) { return _mm512_unpacklo_epi16(a, b); }
  static I UnpackHigh(I a, I b) { return _mm512_unpackhi_epi16(a, b); }
  // The four lanes of `low` and of `high` hold words of the channels 0..7 and 8..15.
  template <bool kSigned>
  static void AddLanes(I low, I high, I (&sums)[1]) {
    sums[0] =
        _mm512_inserti64x4(_mm512_castsi256_si512(SumOfLanes<kSigned>(low)), SumOfLanes<kSigned>(high), 1);
  }

 private:
  template <bool kSigned>
  static __m256i SumOfLanes(I words) {
    const __m256i a = _mm512_castsi512_si256(words), b = _mm512_extracti64x4_epi64(words, 1);
    const I sum = kSigned ? _mm512_add_epi32(_mm512_cvtepi16_epi32(a), _mm512_cvtepi16_epi32(b))
                          : _mm512_add_epi32(_mm512_cvtepu16_epi32(a), _mm512_cvtepu16_epi32(b));
    return _mm256_add_epi32(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
  }
};

using Kernel = Shuffle<Words512>;

}  // namespace

const LutEngine kLutAvx512Vnni = {
    .layout = LutLayout::kShuffle,
    .vector_tables = 4,
    .max_units = Kernel::kMaxUnits,
    .max_pixels = Kernel::kMaxPixels,
    .lookup_cycles = 0.53,
    .table_cycles = 0.35,
    .wide_cycles = 0.25,
    .unit_cycles = 9.5,
    .build = &TableBuilder<Bytes512>::Run,
    .run = &RunLut<Kernel>,
};

}  // namespace lowbit
