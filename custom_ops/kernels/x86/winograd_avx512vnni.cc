// Winograd on vpdpwssd and vpdpbusd, 512 bits.
#include "kernels/x86/simd_avx512.h"
#include "kernels/x86/winograd_schemes.h"
#include "kernels/x86/winograd_tile.h"

namespace lowbit {
namespace {

using Sums = SumVectors<Avx512, 48 * 1024, 8>;  // 16 sums: enough for the latency of two products a cycle
struct WordSums : Sums {
  static I Dot(I acc, I x, I w) { return _mm512_dpwssd_epi32(acc, x, w); }
};
struct ByteSums : Sums {
  static I Dot(I acc, I x, I w) { return _mm512_dpbusd_epi32(acc, x, w); }
};
using Words = WordOperands<WordSums>;
using Bytes = ByteOperands<ByteSums>;

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
