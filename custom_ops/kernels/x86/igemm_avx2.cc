// igemm without dot-product instructions, 256 bits: 16-bit accumulators (vpmaddubsw) where the weights allow
// it, products of 16-bit words (vpmaddwd) otherwise. The explanation is in igemm_tile.h.
#include "kernels/x86/igemm_tile.h"
#include "kernels/x86/simd_avx2.h"

namespace lowbit {
namespace {

struct Avx2Narrow : Avx2 {
  static constexpr bool kNarrow = true;
  static constexpr int kMaxVectors = 2;
  // Pixels per tile, by vectors per panel: 16 registers hold the accumulators, the weights, a broadcast and a
  // product.
  static constexpr int kTileRows[kMaxVectors] = {12, 6};
  static constexpr int kWeightBytes = 4 * kLanes;
  static I DotPairs(I x, I w) { return _mm256_maddubs_epi16(x, w); }
  static I AddWords(I a, I b) { return _mm256_add_epi16(a, b); }
  static I SumPairs(I words) { return _mm256_madd_epi16(words, _mm256_set1_epi16(1)); }
};

struct Avx2Wide : Avx2 {
  static constexpr bool kNarrow = false;
  static constexpr int kMaxVectors = 2;
  static constexpr int kTileRows[kMaxVectors] = {8, 4};
  struct Words {
    I even, odd;
  };
  using Weights = Words;
  using Bytes = Words;
  static constexpr int kWeightBytes = 2 * 4 * kLanes;
  static Weights LoadWeights(const int8_t* p) { return {Load(p), Load(p + 4 * kLanes)}; }
  static Bytes Prepare(I group) { return {And(group, Set(0x00ff00ff)), _mm256_srli_epi16(group, 8)}; }
  static I Dot(I acc, Bytes x, Weights w) {
    return Add(Add(acc, _mm256_madd_epi16(x.even, w.even)), _mm256_madd_epi16(x.odd, w.odd));
  }
};

}  // namespace

const IgemmEngine kIgemmAvx2Narrow = {8, 2, WeightLayout::kBytes, true, 45.0, &Run<Avx2Narrow>};
const IgemmEngine kIgemmAvx2Wide = {8, 2, WeightLayout::kWords, false, 25.0, &Run<Avx2Wide>};

}  // namespace lowbit
