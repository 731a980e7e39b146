// The loops around the register tiles of the bit-serial kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

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
