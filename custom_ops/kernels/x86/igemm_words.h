// Dot products for processors without dot-product instructions, over the vectors V of simd_<isa>.h: 16-bit
// accumulators where the weights allow it, products of 16-bit words otherwise. The explanation is in
// igemm_tile.h.
#pragma once

#include "kernels/x86/igemm_tile.h"

namespace lowbit {
namespace {

template <class V>
struct NarrowDot : V {
  using I = typename V::I;
  static constexpr bool kNarrow = true;
  static constexpr int kMaxVectors = 2;
  // Pixels per tile, by vectors per panel: 16 registers hold the accumulators, the weights, a broadcast and a
  // product.
  static constexpr int kTileRows[kMaxVectors] = {12, 6};
  static constexpr int kWeightBytes = 4 * V::kLanes;
  static I DotPairs(I x, I w) { return V::MultiplyAddBytes(x, w); }
  static I SumPairs(I words) { return V::MultiplyAdd16(words, V::SetWords(1)); }
};

template <class V>
struct WideDot : V {
  using I = typename V::I;
  static constexpr bool kNarrow = false;
  static constexpr int kMaxVectors = 2;
  static constexpr int kTileRows[kMaxVectors] = {8, 4};
  struct Words {
    I even, odd;
  };
  using Weights = Words;
  using Bytes = Words;
  static constexpr int kWeightBytes = 2 * 4 * V::kLanes;
  static Weights LoadWeights(const int8_t* p) { return {V::Load(p), V::Load(p + 4 * V::kLanes)}; }
  static Bytes Prepare(I group) { return {V::And(group, V::Set(0x00ff00ff)), V::ShiftRight16(group)}; }
  static I Dot(I acc, Bytes x, Weights w) {
    return V::Add(V::Add(acc, V::MultiplyAdd16(x.even, w.even)), V::MultiplyAdd16(x.odd, w.odd));
  }
};

}  // namespace
}  // namespace lowbit
