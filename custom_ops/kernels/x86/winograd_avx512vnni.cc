// Winograd on vpdpwssd, 512 bits.
#include "kernels/x86/simd_avx512.h"
#include "kernels/x86/winograd_schemes.h"
#include "kernels/x86/winograd_tile.h"

namespace lowbit {
namespace {

struct WinogradAvx512 : Avx512 {
  using Words = uint16_t __attribute__((vector_size(64)));
  using Sums = uint32_t __attribute__((vector_size(64)));
  static constexpr int kGroup = 8;  // 16 sums: enough for the latency of two vpdpwssd a cycle

  static Words LoadBytes(const uint8_t* p, uint8_t shift) {
    const __m256i bytes = _mm256_sub_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                                          _mm256_set1_epi8(static_cast<char>(shift)));
    return __builtin_bit_cast(Words, _mm512_cvtepu8_epi16(bytes));
  }
  static void StoreWords(uint8_t* to, Words v) { Store(to, __builtin_bit_cast(I, v)); }
  template <int kBits, int kPart>
  static Words LoadTap(const uint8_t* p) {
    if constexpr (kBits == 8) {
      return __builtin_bit_cast(
          Words, _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
    } else {
      const __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
      const I both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_slli_epi16(high, 12)),
                                        _mm256_slli_epi16(high, 8), 1);
      return __builtin_bit_cast(Words, _mm512_srai_epi16(both, 12));
    }
  }
  static I Dot(I acc, I x, I w) { return _mm512_dpwssd_epi32(acc, x, w); }
  template <int n>
  static I ShiftRight(I v) {
    return _mm512_srai_epi32(v, n);
  }
};

// Fitted to the 3x3 layers of ResNet-18 and VGG-16 on Sapphire Rapids (benchmarks/pairs.py). `weights` is what a
// panel's block costs whenever a block of tiles reads it, most of it for what no longer lies in L2 then.
constexpr WinogradCycles kFourCycles = {
    .group = 24, .tile = 18, .weights = 7000, .input = 150, .output = 240, .finish = 70, .sums = 16};
constexpr WinogradCycles kTwoCycles = {
    .group = 24, .tile = 18, .weights = 2500, .input = 60, .output = 80, .finish = 25, .sums = 16};

}  // namespace

const WinogradScheme kWinogradFourAvx512 = SchemeOf<WinogradAvx512, PointsOfFour, kFourCycles>();
const WinogradScheme kWinogradTwoAvx512 = SchemeOf<WinogradAvx512, PointsOfTwo, kTwoCycles>();

}  // namespace lowbit
