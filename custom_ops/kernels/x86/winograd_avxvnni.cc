// Winograd on vpdpwssd and vpdpbusd, 256 bits.
#include "kernels/x86/winograd_256.h"

namespace lowbit {
namespace {

struct WordsAvxVnni : Words256 {
  static I Dot(I acc, I x, I w) { return _mm256_dpwssd_avx_epi32(acc, x, w); }
};

struct BytesOf : Common256 {
  static I Dot(I acc, I x, I w) { return _mm256_dpbusd_avx_epi32(acc, x, w); }
};
using BytesAvxVnni = ByteOperands<BytesOf>;

// Fitted on Zen 5 beside igemm_u8s8_6x16_avxvnni (benchmarks/pairs.py).
constexpr WinogradCycles kFourCycles = {
    .group = 10, .tile = 6.2, .weights = 800, .input = 140, .output = 210, .finish = 60, .sums = 12};
constexpr WinogradCycles kBytesCycles = {
    .group = 10, .tile = 6.2, .weights = 400, .input = 55, .output = 72, .finish = 22, .sums = 12};

}  // namespace

const WinogradScheme kWinogradFourAvxVnni = SchemeOf<WordsAvxVnni, PointsOfFour, kFourCycles>();
const WinogradScheme kWinogradBytesAvxVnni = SchemeOf<BytesAvxVnni, PointsOfTwo, kBytesCycles>();

}  // namespace lowbit
