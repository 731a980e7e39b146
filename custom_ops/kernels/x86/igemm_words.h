// Dot products for processors without dot-product instructions, over the vectors V of simd_<isa>.h: 16-bit
// accumulators where the weights allow it, products of 16-bit words otherwise. The explanation is in
// igemm_tile.h.
#pragma once

#include <array>
#include <utility>

#include "kernels/common/workspace.h"
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

// Dot is for sums alone; tiles multiply words that were copied (below).
template <class V>
struct WideDot : V {
  using I = typename V::I;
  using Weights = I;
  using Bytes = I;
  static constexpr int kMaxVectors = 2;
  static constexpr int kTileRows[kMaxVectors] = {12, 6};
  static constexpr int kWeightBytes = 4 * V::kLanes;
  static I LoadWeights(const int8_t* p) { return V::Load(p); }
  static I Prepare(I group) { return group; }
  static I Dot(I acc, I x, I w) {
    const I even = V::MultiplyAdd16(V::And(x, V::Set(0x00ff00ff)), V::ShiftRightSigned16(V::ShiftLeft16(w)));
    return V::Add(V::Add(acc, even), V::MultiplyAdd16(V::ShiftRight16(x), V::ShiftRightSigned16(w)));
  }
};

// Words of a pixel, and from it to the next one.
inline size_t PixelWords(size_t segments, size_t groups) { return segments * groups * 4; }

inline size_t WordBytes(size_t pixels, size_t segments, size_t groups, bool) {
  return pixels * PixelWords(segments, groups) * sizeof(int16_t);
}

// Unpacking a panel takes a quarter of what a tile of six pixels takes: it pays from three tiles on.
constexpr size_t kDirectPixels = 12;

// What a tile of `wide` reads.
struct WordsArgs {
  const IgemmBlock* block;
  const IgemmPanel* panel;
  const int16_t* x;  // of the tile's first pixel
  const int8_t* weights;
  size_t pixel;
};

// The shifts of the weights (IgemmBlock::weight_shift) of a panel, each twice.
template <class S, int NV>
inline void LoadShifts(const IgemmBlock& b, const IgemmPanel& panel, typename S::I (&shifts)[NV]) {
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v)
    shifts[v] =
        b.weight_shift == nullptr ? S::Set(0) : S::Load(b.weight_shift + panel.channel + v * S::kLanes);
}

// Weights become words: of each group the first two of every channel, then the other two.
template <class S, int NV>
void UnpackPanel(const IgemmBlock& b, const IgemmPanel& panel, int8_t* to) {
  typename S::I shifts[NV];
  LoadShifts<S, NV>(b, panel, shifts);
  const int8_t* from = panel.weights;
  for (size_t g = 0; g < b.segments * b.groups; ++g) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v, from += S::kWeightBytes, to += S::kWeightBytes) {
      const auto bytes = S::Load(from);
      S::Store(to, S::AddWords(S::template WidenHalfGroups<0>(bytes), shifts[v]));
      S::Store(to + NV * S::kWeightBytes, S::AddWords(S::template WidenHalfGroups<1>(bytes), shifts[v]));
    }
    to += NV * S::kWeightBytes;
  }
}

// kDirect: `weights` are as they are packed, else words.
template <class S, int MR, int NV, bool kDirect>
void WordsTile(const WordsArgs& t) {
  using I = typename S::I;
  const IgemmBlock& b = *t.block;
  I acc[MR][NV], shifts[NV];
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
    const I bias = S::Load(b.bias + t.panel->channel + v * S::kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) acc[r][v] = bias;
  }
  const size_t words = PixelWords(b.segments, b.groups);
  const int16_t* x[MR];
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) x[r] = t.x + static_cast<size_t>(r) * words;
  const int8_t* w = t.weights;
  const auto add = [&](const I(&weights)[NV], size_t k) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      const I pair = S::Set(LoadGroup(reinterpret_cast<const uint8_t*>(x[r] + k)));
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = S::Add(acc[r][v], S::MultiplyAdd16(pair, weights[v]));
    }
  };
  I weights[NV];
  if constexpr (kDirect) {
    LoadShifts<S, NV>(b, *t.panel, shifts);
    const auto widened = [&]<int kHalf>(I(&to)[NV]) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v)
        to[v] = S::AddWords(S::template WidenHalfGroups<kHalf>(S::Load(w + v * S::kWeightBytes)), shifts[v]);
    };
    for (size_t k = 0; k < words; k += 4, w += NV * S::kWeightBytes) {
      widened.template operator()<0>(weights);
      add(weights, k);
      widened.template operator()<1>(weights);
      add(weights, k + 2);
    }
  } else {
    for (size_t k = 0; k < words; k += 2, w += NV * S::kWeightBytes) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) weights[v] = S::Load(w + v * S::kWeightBytes);
      add(weights, k);
    }
  }
  FinishTile<S, MR, NV>(b, *t.panel, t.pixel, acc);
}

template <class S, int NV, bool kDirect>
void RunWordsPanel(const IgemmBlock& b, const IgemmPanel& panel) {
  using Function = void (*)(const WordsArgs&);
  constexpr int kMax = S::kTileRows[NV - 1];
  static constexpr auto kTiles = []<int... kRows>(std::integer_sequence<int, kRows...>) {
    return std::array<Function, sizeof...(kRows)>{&WordsTile<S, kRows + 1, NV, kDirect>...};
  }(std::make_integer_sequence<int, kMax>());
  const size_t tiles = DivideUp(b.pixels, static_cast<size_t>(kMax));
  const size_t rows = b.pixels / tiles, longer = b.pixels % tiles;
  const int8_t* weights = panel.weights;
  if constexpr (!kDirect) {
    weights = reinterpret_cast<const int8_t*>(b.unpacked);
    UnpackPanel<S, NV>(b, panel, reinterpret_cast<int8_t*>(b.unpacked));
  }
  WordsArgs t{&b, &panel, reinterpret_cast<const int16_t*>(b.operands), weights, 0};
  for (size_t i = 0; i < tiles; ++i) {
    const size_t n = rows + (i < longer ? 1 : 0);
    kTiles[n - 1](t);
    t.pixel += n;
    t.x += n * PixelWords(b.segments, b.groups);
  }
}

// The windows of a block's pixels as words, one behind the other.
template <class S>
void CopyWords(const IgemmBlock& b, size_t x_offset) {
  const size_t bytes = b.groups * 4, words = PixelWords(b.segments, b.groups);
  const auto shift = S::Set(b.x_shift);
  auto* const first = reinterpret_cast<int16_t*>(b.operands);
  for (size_t s = 0; s < b.segments; ++s) {
    for (size_t p = 0; p < b.pixels; ++p) {
      const uint8_t* x = b.rows[s * b.pitch + p] + x_offset;
      int16_t* to = first + p * words + s * bytes;
      size_t i = 0;
      for (; i + 2 * S::kLanes <= bytes; i += 2 * S::kLanes) S::WidenBytes(to + i, x + i, shift);
      for (; i < bytes; i += 4) S::WidenGroup(to + i, LoadGroup(x + i), shift);
    }
  }
}

template <class S>
void RunWords(const IgemmBlock& b) {
  for (size_t p = 0; p < b.panel_count; ++p) {
    const IgemmPanel& panel = b.panels[p];
    if (*b.operands_of != panel.x_offset + 1) {
      CopyWords<S>(b, panel.x_offset);
      *b.operands_of = panel.x_offset + 1;
    }
    const auto run = [&]<int NV>() {
      b.unpacked == nullptr ? RunWordsPanel<S, NV, true>(b, panel) : RunWordsPanel<S, NV, false>(b, panel);
    };
    if (panel.vectors == 1) run.template operator()<1>();
    if (panel.vectors == 2) run.template operator()<2>();
  }
}

}  // namespace
}  // namespace lowbit
