#include "kernels/common/elementwise_impl.h"
#include "kernels/x86/elementwise.h"
#include "kernels/x86/elementwise_bytes.h"
#include "kernels/x86/simd_avx512.h"

namespace lowbit {
namespace {

// 256-bit vectors for loops over 32..63 channels.
struct Bytes256 {
  using I = __m256i;
  using Half = Bytes128;
  static constexpr int kBytes = 32;
  static I Load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void Store(void* p, I v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
  static I SetB(uint8_t v) { return _mm256_set1_epi8(static_cast<char>(v)); }
  static I MaxU8(I a, I b) { return _mm256_max_epu8(a, b); }
  static I MaxS8(I a, I b) { return _mm256_max_epi8(a, b); }
};

struct Bytes512 : Avx512 {
  using Half = Bytes256;
  using ByteTable = ShuffledTable<Bytes512>;
  static constexpr int kBytes = 64;

  static I SetB(uint8_t v) { return _mm512_set1_epi8(static_cast<char>(v)); }
  static I MaxU8(I a, I b) { return _mm512_max_epu8(a, b); }
  static I MinU8(I a, I b) { return _mm512_min_epu8(a, b); }
  static I MaxS8(I a, I b) { return _mm512_max_epi8(a, b); }
  static I SubSaturatedS8(I a, I b) { return _mm512_subs_epi8(a, b); }
  static I ShuffleB(I table, I index) { return _mm512_shuffle_epi8(table, index); }
  static I Broadcast128(const uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }

  static I CountGeF(I count, F a, F b) { return StepGeF(count, _mm512_set1_epi32(1), a, b); }
  static I StepGeF(I count, I step, F a, F b) {
    return _mm512_mask_add_epi32(count, _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), count, step);
  }
  static F Gather(const float* table, I index) { return _mm512_i32gather_ps(index, table, 4); }

  static I Add16(I a, I b) { return _mm512_add_epi16(a, b); }
  static I LoadU8As16(const uint8_t* p) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static I LoadS8As16(const uint8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }

  static I SetWords(int16_t v) { return _mm512_set1_epi16(v); }
  static I AddSaturated16(I a, I b) { return _mm512_adds_epi16(a, b); }
  static I PackWords(I a, I b) { return _mm512_packs_epi32(a, b); }
  static I PackBytes(I a, I b) { return _mm512_packus_epi16(a, b); }
  // The packs work inside 128-bit lanes: dword 4 * lane + vector. Put them in order.
  static I InOrder(I bytes) {
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, bytes);
  }
  static void StoreQuarter(uint8_t* p, I v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_castsi512_si128(v));
  }
};

}  // namespace

const ElementwiseKernels& ElementwiseAvx512() {
  static constexpr ElementwiseKernels kernels = MakeKernels<Bytes512>("avx512vnni");
  return kernels;
}

}  // namespace lowbit
