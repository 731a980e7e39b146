// Look-ups with vpshufb, 256 bits: tiles of up to 4 pixels x 16 channels. The explanation is in
// lut_shuffle.h.
#include "kernels/x86/lut_build.h"
#include "kernels/x86/lut_shuffle.h"
#include "kernels/x86/simd_avx2.h"

namespace lowbit {
namespace {

struct Words256 {
  using Vector = Avx2;
  using I = __m256i;
  static constexpr int kTileRows = 4;
  static I Lookup(I table, I index) { return _mm256_shuffle_epi8(table, index); }
  static I AddWords(I a, I b) { return _mm256_add_epi16(a, b); }
  static I SubWords(I a, I b) { return _mm256_sub_epi16(a, b); }
  static I HighBytes(I v) { return _mm256_srli_epi16(v, 8); }
  static I HighPlaces(I v) { return _mm256_slli_epi16(v, 8); }
  static I AddPairs(I bytes, I weights) { return _mm256_maddubs_epi16(bytes, weights); }
  static I UnpackLow(I a, I b) { return _mm256_unpacklo_epi16(a, b); }
  static I UnpackHigh(I a, I b) { return _mm256_unpackhi_epi16(a, b); }
  // The two lanes of `low` and of `high` hold words of the channels 0..7 and 8..15.
  template <bool kSigned>
  static void AddLanes(I low, I high, I (&sums)[2]) {
    sums[0] = SumOfLanes<kSigned>(low);
    sums[1] = SumOfLanes<kSigned>(high);
  }

 private:
  template <bool kSigned>
  static I SumOfLanes(I words) {
    const __m128i a = _mm256_castsi256_si128(words), b = _mm256_extracti128_si256(words, 1);
    return kSigned ? _mm256_add_epi32(_mm256_cvtepi16_epi32(a), _mm256_cvtepi16_epi32(b))
                   : _mm256_add_epi32(_mm256_cvtepu16_epi32(a), _mm256_cvtepu16_epi32(b));
  }
};

struct Bytes256 {
  using I = __m256i;
  static constexpr size_t kBytes = 32;
  static I Load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const I*>(p)); }
  static void Store(uint8_t* p, I v) { _mm256_store_si256(reinterpret_cast<I*>(p), v); }
  static I Set(uint8_t v) { return _mm256_set1_epi8(static_cast<char>(v)); }
  static I Add(I a, I b) { return _mm256_add_epi8(a, b); }
  static I Shuffle(I a, I index) { return _mm256_shuffle_epi8(a, index); }
  // `count` bytes, at most 16, in every lane; more may follow, but nothing from `end` on is read.
  static I LoadQuad(const uint8_t* p, size_t count, const uint8_t* end) {
    alignas(16) uint8_t bytes[16] = {};
    if (end - p < 16) p = static_cast<const uint8_t*>(std::memcpy(bytes, p, count));
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I KeepFirst(I v, size_t count) {
    const __m128i place = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i kept = _mm_cmpgt_epi8(_mm_set1_epi8(static_cast<char>(count)), place);
    return _mm256_and_si256(v, _mm256_broadcastsi128_si256(kept));
  }
  static I FirstLane(I v) { return _mm256_blend_epi32(v, _mm256_setzero_si256(), 0xf0); }
  static I AddSums(I sums, I v) { return _mm256_add_epi32(sums, _mm256_sad_epu8(v, _mm256_setzero_si256())); }
  static int32_t Total(I sums) {
    const __m128i two = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_srli_si128(two, 8)));
  }
};

using Kernel = Shuffle<Words256>;

}  // namespace

const LutEngine kLutAvx2 = {
    .layout = LutLayout::kShuffle,
    .vector_tables = 2,
    .max_units = Kernel::kMaxUnits,
    .max_pixels = Kernel::kMaxPixels,
    .lookup_cycles = 0.57,
    .table_cycles = 0.35,
    .wide_cycles = 0.27,
    .unit_cycles = 10.4,
    .build = &TableBuilder<Bytes256>::Run,
    .run = &RunLut<Kernel>,
};

}  // namespace lowbit
