// Winograd on vpdpwssd and vpdpbusd, 512 bits.
#include "kernels/x86/simd_avx512.h"
#include "kernels/x86/winograd_schemes.h"
#include "kernels/x86/winograd_tile.h"

namespace lowbit {
namespace {

struct Common : Avx512 {
  using Sums = uint32_t __attribute__((vector_size(64)));
  static constexpr size_t kSliceBytes = 48 * 1024;
  static constexpr int kGroup = 8;  // 16 sums: enough for the latency of two products a cycle

  template <int n>
  static I ShiftRight(I v) {
    return _mm512_srai_epi32(v, n);
  }
};

struct Words : Common {
  using Codes = uint16_t __attribute__((vector_size(64)));
  static constexpr size_t kCodeBytes = 2, kBlockTiles = 80;
  static constexpr int kInputOffset = 0;

  static Codes LoadBytes(const uint8_t* p, uint8_t shift) {
    const __m256i bytes = _mm256_sub_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                                          _mm256_set1_epi8(static_cast<char>(shift)));
    return __builtin_bit_cast(Codes, _mm512_cvtepu8_epi16(bytes));
  }
  static void StoreCodes(uint8_t* to, Codes v) { Store(to, __builtin_bit_cast(I, v)); }
  static void StoreInput(uint8_t* to, Codes v) { StoreCodes(to, v); }
  template <int kBits, int kPart>
  static Codes LoadTap(const uint8_t* p) {
    if constexpr (kBits == 8) {
      return __builtin_bit_cast(
          Codes, _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
    } else {
      const __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
      const I both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_slli_epi16(high, 12)),
                                        _mm256_slli_epi16(high, 8), 1);
      return __builtin_bit_cast(Codes, _mm512_srai_epi16(both, 12));
    }
  }
  static I Dot(I acc, I x, I w) { return _mm512_dpwssd_epi32(acc, x, w); }
};

struct BytesOf : Common {
  static I Dot(I acc, I x, I w) { return _mm512_dpbusd_epi32(acc, x, w); }
};
using Bytes = ByteOperands<BytesOf>;

// Fitted on Zen 5 beside igemm_u8s8_6x64 (benchmarks/pairs.py), the tenth included by which that one's estimates exceed
// what it takes on larger layers.
constexpr WinogradCycles kFourCycles = {
    .group = 10, .tile = 16.3, .weights = 2300, .input = 240, .output = 200, .finish = 95, .sums = 16};
constexpr WinogradCycles kTwoCycles = {
    .group = 10, .tile = 16.3, .weights = 1000, .input = 105, .output = 70, .finish = 30, .sums = 16};
constexpr WinogradCycles kBytesCycles = {
    .group = 6, .tile = 8.1, .weights = 850, .input = 50, .output = 60, .finish = 25, .sums = 16};

}  // namespace

const WinogradScheme kWinogradFourAvx512 = SchemeOf<Words, PointsOfFour, kFourCycles>();
const WinogradScheme kWinogradTwoAvx512 = SchemeOf<Words, PointsOfTwo, kTwoCycles>();
const WinogradScheme kWinogradBytesAvx512 = SchemeOf<Bytes, PointsOfTwo, kBytesCycles>();

}  // namespace lowbit
