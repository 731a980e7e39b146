// Winograd on vpdpwssd and vpdpbusd, 256 bits.
#include "kernels/x86/simd_avx2.h"
#include "kernels/x86/winograd_schemes.h"
#include "kernels/x86/winograd_tile.h"

namespace lowbit {
namespace {

using Sums = SumVectors<Avx2, 24 * 1024, 6>;  // 12 registers of sums, two of weights and a broadcast
struct WordSums : Sums {
  static I Dot(I acc, I x, I w) { return _mm256_dpwssd_avx_epi32(acc, x, w); }
};
struct ByteSums : Sums {
  static I Dot(I acc, I x, I w) { return _mm256_dpbusd_avx_epi32(acc, x, w); }
};
using Words = WordOperands<WordSums>;
using Bytes = ByteOperands<ByteSums>;

// Fitted on Zen 5 beside igemm_u8s8_6x16_avxvnni (benchmarks/pairs.py).
constexpr WinogradCycles kFourCycles = {
    .group = 10, .tile = 6.2, .weights = 800, .input = 140, .output = 210, .finish = 60, .sums = 12};
constexpr WinogradCycles kBytesCycles = {
    .group = 10, .tile = 6.2, .weights = 400, .input = 55, .output = 72, .finish = 22, .sums = 12};

}  // namespace

const WinogradScheme kWinogradFourAvxVnni = SchemeOf<Words, PointsOfFour, kFourCycles>();
const WinogradScheme kWinogradBytesAvxVnni = SchemeOf<Bytes, PointsOfTwo, kBytesCycles>();

}  // namespace lowbit
