// Winograd without dot-product instructions, 256 bits: vpmaddwd.
#include "kernels/x86/simd_avx2.h"
#include "kernels/x86/winograd_schemes.h"
#include "kernels/x86/winograd_tile.h"

namespace lowbit {
namespace {

// 12 registers of sums, two of weights, a broadcast and a product.
struct WordSums : SumVectors<Avx2, 24 * 1024, 6> {
  static I Dot(I acc, I x, I w) { return Add(acc, MultiplyAdd16(x, w)); }
};
using Words = WordOperands<WordSums>;

// Measured on Zen 3 beside the igemm of 16-bit weights, six cycles of whose estimates are seven there.
constexpr WinogradCycles kFourCycles = {
    .group = 14, .tile = 6.5, .weights = 1000, .input = 150, .output = 240, .finish = 70, .sums = 12};
constexpr WinogradCycles kTwoCycles = {
    .group = 14, .tile = 6.5, .weights = 450, .input = 60, .output = 80, .finish = 25, .sums = 12};

}  // namespace

const WinogradScheme kWinogradFourAvx2 = SchemeOf<Words, PointsOfFour, kFourCycles>();
const WinogradScheme kWinogradTwoAvx2 = SchemeOf<Words, PointsOfTwo, kTwoCycles>();

}  // namespace lowbit
