// igemm without dot-product instructions, 128 bits: 16-bit accumulators (pmaddubsw) where the weights allow
// it, products of 16-bit words (pmaddwd) otherwise. The explanation is in igemm_tile.h.
#include "kernels/x86/igemm_tile.h"
#include "kernels/x86/simd_sse41.h"

namespace lowbit {
namespace {

struct Sse41Narrow : Sse41 {
  static constexpr bool kNarrow = true;
  static constexpr int kMaxVectors = 2;
  // Pixels per tile, by vectors per panel: 16 registers hold the accumulators, the weights, a broadcast and a
  // product.
  static constexpr int kTileRows[kMaxVectors] = {12, 6};
  static constexpr int kWeightBytes = 4 * kLanes;
  static I DotPairs(I x, I w) { return _mm_maddubs_epi16(x, w); }
  static I AddWords(I a, I b) { return _mm_add_epi16(a, b); }
  static I SumPairs(I words) { return _mm_madd_epi16(words, _mm_set1_epi16(1)); }
};

struct Sse41Wide : Sse41 {
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
  static Bytes Prepare(I group) { return {And(group, Set(0x00ff00ff)), _mm_srli_epi16(group, 8)}; }
  static I Dot(I acc, Bytes x, Weights w) {
    return Add(Add(acc, _mm_madd_epi16(x.even, w.even)), _mm_madd_epi16(x.odd, w.odd));
  }
};

}  // namespace

const IgemmEngine kIgemmSse41Narrow = {4, 2, WeightLayout::kBytes, true, 22.0, &Run<Sse41Narrow>};
const IgemmEngine kIgemmSse41Wide = {4, 2, WeightLayout::kWords, false, 12.0, &Run<Sse41Wide>};

}  // namespace lowbit
