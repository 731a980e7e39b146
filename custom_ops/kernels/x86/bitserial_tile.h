// The loops around the register tiles of the bit-serial kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/common/inline.h"
#include "kernels/common/tile_finish.h"
#include "kernels/x86/bitserial_engines.h"

namespace lowbit {
namespace {

// The arguments of one tile.
struct BitserialTile {
  const BitserialBlock* block;
  const BitserialPanel* panel;
  const uint8_t* const* pixels;  // of the tile
  size_t pixel;                  // first pixel of the tile, within the block
};

inline uint32_t LoadUnit32(const uint8_t* p) {
  uint32_t unit;
  std::memcpy(&unit, p, sizeof(unit));
  return unit;
}

// Of a tile's first output in y.
inline size_t IndexOf(const BitserialTile& t) {
  const TileOutput& out = t.block->output;
  return (out.first_pixel + t.pixel * out.pixel_step) * out.epilogue->channels + t.panel->channel;
}

inline const int32_t* BiasOf(const BitserialBlock& b, size_t pixel) {
  return b.bias_rows ? b.bias_rows[pixel] : b.bias;
}

// What the end of a tile reads and writes comes while its products are counted. The lines of neighbouring tiles
// are a pixel apart, which no prefetcher of the hardware follows (Zen 3: a w1a1 ResNet-50 takes 0.93 of the time).
template <int MR, size_t kAhead = 0>
inline __attribute__((always_inline)) void FetchOutputs(const BitserialTile& t) {
  const TileOutput& out = t.block->output;
  const size_t pitch = out.pixel_step * out.epilogue->channels, index = IndexOf(t);
#pragma GCC unroll 16
  for (size_t r = kAhead * MR; r < (kAhead + 1) * MR; ++r) {
    if (out.residual != nullptr) __builtin_prefetch(out.residual + index + r * pitch);
    __builtin_prefetch(static_cast<const uint8_t*>(out.y) + index + r * pitch, 1);
  }
}

// The codes of few limits (few_codes.h), of a vector of channels from `skipped` on, for one pixel of a tile
// after the other. load(p) and store(p, codes) know how many of the channels there are; sums:
// FewCodesView::sums, or null.
template <class V>
class FewCodesRows {
  using I = typename V::I;

 public:
  template <class Load>
  inline LOWBIT_ALWAYS_INLINE FewCodesRows(const BitserialTile& t, size_t skipped, const FewSums* sums,
                                           const Load& load)
      : sums_(sums) {
    const BitserialBlock& b = *t.block;
    const size_t channel = t.panel->channel + skipped, index = IndexOf(t) + skipped;
    start_ = V::Load(b.few_codes->start + channel);
    flip_ = V::Load(b.few_codes->flip + channel);
    pitch_ = b.output.pixel_step * b.output.epilogue->channels;
    y_ = static_cast<uint8_t*>(b.output.y) + index;
    residual_ = b.output.residual + index;
    ahead_ = sums != nullptr ? load(residual_) : start_;
  }
  // What the number of exceeded limits is added to.
  I start() const { return start_; }
  // `more`: pixels behind this one.
  template <class Load, class Store>
  inline LOWBIT_ALWAYS_INLINE void Write(I counted, bool more, const Load& load, const Store& store) {
    I codes = V::Xor(counted, flip_);
    if (sums_ != nullptr) {
      const I other = ahead_;
      // Read before codes are written that may have the same last bits of their address (RequantizeTile).
      residual_ += pitch_;
      if (more) ahead_ = load(residual_);
      codes = AddFewSums<V>(*sums_, codes, other);
    }
    store(y_, codes);
    y_ += pitch_;
  }

 private:
  const FewSums* sums_;
  I start_, flip_, ahead_;
  size_t pitch_;
  uint8_t* y_;
  const uint8_t* residual_;
};

using BitserialTileFunction = void (*)(const BitserialTile&);

// The tiles K::Tile<MR, NV> of one panel width, for 1..kMax pixels.
template <class K, int NV>
struct BitserialTileTable {
  static constexpr size_t kMax = K::kTileRows[NV - 1];
  BitserialTileFunction run[kMax];
  constexpr BitserialTileTable() : run() { Fill<1>(); }
  template <int MR>
  constexpr void Fill() {
    run[MR - 1] = &K::template Tile<MR, NV>;
    if constexpr (MR < kMax) Fill<MR + 1>();
  }
};

// Panels outside, tiles inside: a panel's weights stay in L1 or L2 while the pixels of the block pass. The
// pixels are dealt out evenly, so that no tile is left with one or two of them.
template <class K, int NV>
void RunBitserialPanel(const BitserialBlock& b, const BitserialPanel& panel) {
  static constexpr BitserialTileTable<K, NV> kTiles;
  const size_t tiles = (b.pixel_count + kTiles.kMax - 1) / kTiles.kMax;
  const size_t rows = b.pixel_count / tiles, longer = b.pixel_count % tiles;
  BitserialTile t{&b, &panel, b.pixels, 0};
  for (size_t i = 0; i < tiles; ++i) {
    const size_t n = rows + (i < longer ? 1 : 0);
    t.pixels = b.pixels + t.pixel;
    kTiles.run[n - 1](t);
    t.pixel += n;
  }
}

template <class K>
void RunBitserial(const BitserialBlock& b) {
  for (size_t p = 0; p < b.panel_count; ++p) {
    const BitserialPanel& panel = b.panels[p];
    if (panel.vectors == 1) RunBitserialPanel<K, 1>(b, panel);
    if (panel.vectors == 2) RunBitserialPanel<K, 2>(b, panel);
    if constexpr (K::kMaxVectors == 4) {
      if (panel.vectors == 3) RunBitserialPanel<K, 3>(b, panel);
      if (panel.vectors == 4) RunBitserialPanel<K, 4>(b, panel);
    }
  }
}

}  // namespace
}  // namespace lowbit
