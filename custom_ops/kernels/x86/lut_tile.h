// The loops around the register tiles of the look-up kernels, templated over a SIMD trait: what comes before
// the first product and after the last one, and the order in which tiles, panels and depths are visited.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/tile_finish.h"
#include "kernels/x86/lut_block.h"

namespace lowbit {
namespace {

// The arguments of one tile and depth.
struct LutTile {
  const LutBlock* block;
  const LutPanel* panel;
  const uint8_t* const* rows;  // of the tile's first pixel in the depth's first segment
  const uint8_t* indices;      // of the depth
  size_t segments, lookups;
  size_t table_offset;  // of the depth's first table inside a pixel's tables
  size_t pixel;         // first pixel of the tile, within the block
  int32_t* partial;     // accumulators between two depths
  bool first, last;     // depth
};

// Whether all pixels of a tile lie outside the image in this segment, where that adds nothing.
template <int MR>
inline bool AllPadding(const uint8_t* const* rows, const uint8_t* zero_row) {
  if (!zero_row) return false;
  bool all = true;
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) all &= rows[r] == zero_row;
  return all;
}

// Calls step<n>(), n the number of look-ups between two flushes.
template <class Step>
inline __attribute__((always_inline)) void WithFlush(int per_flush, const Step& step) {
  if (per_flush == 4) return step.template operator()<4>();
  if (per_flush == 2) return step.template operator()<2>();
  step.template operator()<1>();
}

template <class S, int MR, int NV>
inline __attribute__((always_inline)) void StartTile(const LutTile& t, typename S::I (&acc)[MR][NV]) {
  const LutBlock& b = *t.block;
  if (!t.first) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = S::Load(t.partial + (r * NV + v) * S::kLanes);
    }
    return;
  }
  const size_t channel = t.panel->channel;
  const int32_t* sums = b.row_sums ? b.row_sums + t.panel->group * b.pitch + t.pixel : nullptr;
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
    const auto bias = S::Load(b.bias + channel + v * S::kLanes);
    if (!sums) {
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) acc[r][v] = bias;
    } else if (!b.row_sum_weight) {
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) acc[r][v] = S::Sub(bias, S::Set(sums[r]));
    } else {
      const auto weight = S::Load(b.row_sum_weight + channel + v * S::kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) acc[r][v] = S::Add(bias, S::Mul(S::Set(sums[r]), weight));
    }
  }
}

template <class S, int MR, int NV>
inline __attribute__((always_inline)) void EndTile(const LutTile& t, const typename S::I (&acc)[MR][NV]) {
  if (!t.last) return StoreTile<S, MR, NV>(t.partial, acc);
  FinishPanel<S, MR, NV>(t.block->output, t.pixel, t.panel->channel, t.panel->count, acc);
}

using LutTileFunction = void (*)(const LutTile&);

// The tiles K::Tile<MR, units, planes> of one panel width, for 1..kMax pixels.
template <class K, int kUnits, int kPlanes>
struct LutTileTable {
  LutTileFunction run[K::kMaxPixels];
  constexpr LutTileTable() : run() { Fill<1>(); }
  template <int MR>
  constexpr void Fill() {
    run[MR - 1] = &K::template Tile<MR, kUnits, kPlanes>;
    if constexpr (MR < K::kMaxPixels) Fill<MR + 1>();
  }
};

// Pixels outside, panels inside: the tables of a tile's pixels stay in L1 while the indices, a quarter of a
// byte per weight and plane, stream from L2. Chunks of panels keep them there where a layer has more.
template <class K, int kPlanes>
void RunBlock(const LutBlock& b) {
  static constexpr LutTileTable<K, 1, kPlanes> kSingle;
  static constexpr LutTileTable<K, K::kMaxUnits, kPlanes> kWide;
  const size_t tiles = (b.pixels + K::kMaxPixels - 1) / K::kMaxPixels;
  const size_t rows = b.pixels / tiles, longer = b.pixels % tiles;
  LutTile t{};
  t.block = &b;
  for (size_t chunk = 0; chunk < b.panel_count; chunk += b.panels_per_chunk) {
    const size_t left = b.panel_count - chunk;
    const size_t panels = left < b.panels_per_chunk ? left : b.panels_per_chunk;
    t.pixel = 0;
    for (size_t i = 0; i < tiles; ++i) {
      const size_t n = rows + (i < longer ? 1 : 0);
      for (size_t d = 0; d < b.depth_count; ++d) {
        const LutDepth& depth = b.depths[d];
        t.segments = depth.segments;
        t.lookups = depth.lookups;
        t.rows = b.rows + depth.first_segment * b.pitch + t.pixel;
        t.first = d == 0;
        t.last = d + 1 == b.depth_count;
        const size_t skipped = depth.first_segment * b.lookups + depth.first_lookup;
        t.partial = b.partial;
        for (size_t p = chunk; p < chunk + panels; ++p) {
          const LutPanel& panel = b.panels[p];
          t.panel = &panel;
          t.indices = panel.indices + skipped * panel.units * K::template kIndexBytes<kPlanes>;
          t.table_offset = panel.group * b.group_pitch + depth.first_lookup * K::template kTableStep<kPlanes>;
          (panel.units == 1 ? kSingle.run : kWide.run)[n - 1](t);
          t.partial += K::kMaxPixels * K::kMaxUnits * kLutUnit;
        }
      }
      t.pixel += n;
    }
  }
}

template <class K>
void RunLut(const LutBlock& b) {
  b.planes == 1 ? RunBlock<K, 1>(b) : RunBlock<K, 2>(b);
}

}  // namespace
}  // namespace lowbit
