#include "kernels/common/elementwise_impl.h"
#include "kernels/x86/elementwise.h"
#include "kernels/x86/elementwise_bytes.h"
#include "kernels/x86/simd_avx2.h"

namespace lowbit {
namespace {

struct Bytes256 : Avx2 {
  using Half = Bytes128;
  using ByteTable = ShuffledTable<Bytes256>;
  static constexpr int kBytes = 32;

  static I SetB(uint8_t v) { return _mm256_set1_epi8(static_cast<char>(v)); }
  static I MaxU8(I a, I b) { return _mm256_max_epu8(a, b); }
  static I MinU8(I a, I b) { return _mm256_min_epu8(a, b); }
  static I MaxS8(I a, I b) { return _mm256_max_epi8(a, b); }
  static I SubSaturatedS8(I a, I b) { return _mm256_subs_epi8(a, b); }
  static I ShuffleB(I table, I index) { return _mm256_shuffle_epi8(table, index); }
  static I Broadcast128(const uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }

  static I CountGeF(I count, F a, F b) {
    return _mm256_sub_epi32(count, _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
  }
  static I StepGeF(I count, I step, F a, F b) {
    return _mm256_add_epi32(count,
                            _mm256_and_si256(step, _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_GE_OQ))));
  }
  static F Gather(const float* table, I index) { return _mm256_i32gather_ps(table, index, 4); }

  static I Add16(I a, I b) { return _mm256_add_epi16(a, b); }
  static I LoadU8As16(const uint8_t* p) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I LoadS8As16(const uint8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }

  static I SetWords(int16_t v) { return _mm256_set1_epi16(v); }
  static I AddSaturated16(I a, I b) { return _mm256_adds_epi16(a, b); }
  static I PackWords(I a, I b) { return _mm256_packs_epi32(a, b); }
  static I PackBytes(I a, I b) { return _mm256_packus_epi16(a, b); }
  // The packs work inside 128-bit lanes: dwords a0 b0 c0 d0 a1 b1 c1 d1 (4 bytes of each half); put them in
  // order.
  static I InOrder(I bytes) {
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static void StoreQuarter(uint8_t* p, I v) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(v));
  }
};

}  // namespace

const ElementwiseKernels& ElementwiseAvx2() {
  static constexpr ElementwiseKernels kernels = MakeKernels<Bytes256>("avx2");
  return kernels;
}

}  // namespace lowbit
