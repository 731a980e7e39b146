// The register tile of the igemm kernels, templated over a SIMD trait and a tile shape.
//
//   One tile: MR output pixels x NV vectors of output channels. Weights are packed so that one k-group (four
//   input bytes) of a whole panel is contiguous; the four bytes of x are broadcast to all lanes:
//
//        x, pixel r   [x0 x1 x2 x3]  ->  broadcast  [x0 x1 x2 x3 | x0 x1 x2 x3 | x0 x1 x2 x3 | ...]
//        weights, vector v           ->             [ channel 0  |  channel 1  |  channel 2  | ...]
//                                                     4 x int8 each
//        acc[r][v] (int32 lanes)     +=             [  sum of 4  |   sum of 4  |   sum of 4  | ...]
//
//   Per k-group: NV loads of weights, MR broadcasts, MR * NV dot products. There is no im2col: the window of
//   a pixel is a list of `segments` (taps, or whole kernel rows), each a pointer to consecutive bytes of x
//   (igemm.cc sets the pointers up, padding included).
//
// Accumulators start at the bias, into which the zero points are folded:
//
//     sum (x - zx)(w - zw)
//   = sum x w'  +  s * sum x  -  zx * sum (w - zw)     over the window,  w' = w - zw - s  stored as int8
//     ^ tile       ^ row sums    ^ constant: in the bias
//
// where s = 0 unless w - zw needs 9 bits. It holds for padded taps too, because they read zx. Signed x of b
// bits is used as x + 2^(b-1), with zx + 2^(b-1).
//
// Without vpdpbusd there are two ways to multiply, and every node takes the first that is exact for its
// weights:
//
//   narrow  vpmaddubsw, u8 x s8 -> sums of two products in int16, which saturate. Accumulators stay 16 bits
//           wide for as many k-groups as cannot overflow (igemm.cc derives that number from the packed
//           weights), then they are widened and added to 32-bit sums in memory: two instructions per eight
//           products of a lane and a bit.
//   wide    vpmaddwd on words, always exact: two instructions per two products of a lane. The windows of a block
//           of pixels are copied once, as words, for all panels; a panel's weights are unpacked once per block
//           (igemm_words.h). On Zen 3 ResNet-50 takes 0.88 and MobileNetV2 0.87 of the time that they take where a
//           tile takes even and odd bytes of x apart and weights are stored as words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/common/tile_finish.h"
#include "kernels/x86/igemm_block.h"

namespace lowbit {
namespace {

// The arguments of one tile. `rows` points at the tile's first pixel of segment 0; where windows lie equally
// far apart, x is the first one.
struct TileArgs {
  const IgemmBlock* block;
  const IgemmPanel* panel;
  const uint8_t* const* rows;
  const uint8_t* x;
  size_t pixel;  // first pixel of the tile, within the block
  // Weights of the next panel are fetched into L2 while this one is multiplied, each tile its share: one
  // prefetch per k-group, `fetch_step` bytes on.
  const int8_t* fetch;
  size_t fetch_step;
  bool streams;  // the panel's only tile: its weights are read once, and fetched kStreamBytes ahead
};

// How far ahead of its use a weight that is read once is fetched. The first fully connected layer of VGG-16, 25088 x 4096
// and one pixel, takes 0.68 of the time on Sapphire Rapids and 0.74 to 0.83 on Zen 5 that it takes where a line of four is
// fetched a panel (1.6 MB) ahead, and 0.84 and 0.9 to 1.0 of that without a fetch; 8 to 32 KB ahead are equal.
constexpr size_t kStreamBytes = 32 * 1024, kLineBytes = 64;

// What a tile of NV vectors fetches for a k-group, whose own weights are at `weights`. Panels lie behind each other, so that
// the end of one that streams fetches the beginning of the next.
template <class S, int NV>
inline __attribute__((always_inline)) void FetchAhead(const TileArgs& t, const int8_t* weights,
                                                      const int8_t*& fetch) {
  if (!t.streams) {
    __builtin_prefetch(fetch, 0, 2);
    fetch += t.fetch_step;
    return;
  }
#pragma GCC unroll 4
  for (size_t i = 0; i < NV * S::kWeightBytes; i += kLineBytes)
    __builtin_prefetch(weights + kStreamBytes + i, 0, 2);
}

// Whether all pixels of a tile lie outside the image in this segment, and a pixel outside the image
// multiplies zeros: such a segment adds nothing. Up to a tenth of a 3x3 kernel's work on the small images at
// the end of a network.
template <int MR>
inline bool AllPadding(const uint8_t* const* rows, const uint8_t* zero_row) {
  bool all = true;
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) all &= rows[r] == zero_row;
  return all;
}

inline int32_t LoadGroup(const uint8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

// Codes that rise from the zero point on (requantize_rows.h), of accumulators that hold the bits of 2^23 as well.
template <class S, int MR, int NV, bool kPartial>
inline __attribute__((always_inline)) void StoreRisingCodes(const TileOutput& out, size_t pixel,
                                                            size_t channel, size_t count,
                                                            const typename S::I (&acc)[MR][NV]) {
  const EpilogueView& e = *out.epilogue;
  const size_t pitch = out.pixel_step * e.channels;
  const float *scale = e.scale + channel, *offset = e.rising_offset + channel;
  uint8_t* y = static_cast<uint8_t*>(out.y) + out.first_pixel * e.channels + pixel * pitch + channel;
  StorePacked<S, MR, NV, kPartial>(count, y, pitch, [&](int i) __attribute__((always_inline)) {
    typename S::I codes[4];
    for (int j = 0; j < 4; ++j) {
      const int r = (i + j) / NV, v = (i + j) % NV;
      codes[j] = i + j < MR * NV
                     ? S::RoundToInt(S::FmaF(S::AsFloat(acc[r][v]), S::LoadF(scale + v * S::kLanes),
                                             S::LoadF(offset + v * S::kLanes)))
                     : S::Set(0);
    }
    return S::PackSaturated(codes[0], codes[1], codes[2], codes[3]);
  });
}

// Writes the outputs of a tile whose accumulators are in registers. The common cases stay there.
template <class S, int MR, int NV>
inline __attribute__((always_inline)) void FinishTile(const IgemmBlock& b, const IgemmPanel& panel,
                                                      size_t pixel, typename S::I (&acc)[MR][NV]) {
  if (b.pixel_bias) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      const auto bias = S::Set(b.pixel_bias[pixel + r]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = S::Add(acc[r][v], bias);
    }
  }
  if (b.row_sums) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      const auto sum = S::Set(b.row_sums[panel.group * b.pitch + pixel + r]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        const auto weight = S::Load(b.row_sum_weight + panel.channel + v * S::kLanes);
        acc[r][v] = S::Add(acc[r][v], S::Mul(sum, weight));
      }
    }
  }
  if constexpr (S::kHasFma) {
    if (b.rises) {
      if (panel.count == static_cast<size_t>(NV * S::kLanes))
        return StoreRisingCodes<S, MR, NV, false>(b.output, pixel, panel.channel, panel.count, acc);
      return StoreRisingCodes<S, MR, NV, true>(b.output, pixel, panel.channel, panel.count, acc);
    }
  }
  FinishRegisters<S, MR, NV>(b.output, pixel, panel.channel, panel.count, acc);
}

// 32-bit dot products (vpdpbusd): S::Dot(acc, x, weights) adds four products per lane. group(r): those of x.
template <class S, int MR, int NV, class Group>
inline __attribute__((always_inline)) void AddGroup(const int8_t* w, const Group& group,
                                                    typename S::I (&acc)[MR][NV]) {
  typename S::Weights weights[NV];
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) weights[v] = S::LoadWeights(w + v * S::kWeightBytes);
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) {
    const typename S::Bytes bytes = S::Prepare(group(r));
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[r][v] = S::Dot(acc[r][v], bytes, weights[v]);
  }
}

// The products of a tile whose windows are found by pointers.
template <class S, int MR, int NV, bool kShift>
inline __attribute__((always_inline)) void AddSegments(const TileArgs& t, typename S::I (&acc)[MR][NV]) {
  using I = typename S::I;
  const IgemmBlock& b = *t.block;
  const I shift = S::Set(b.x_shift);
  const int8_t *w = t.panel->weights, *fetch = t.fetch;
  const uint8_t* const* rows = t.rows;
  for (size_t s = 0; s < b.segments; ++s, rows += b.pitch) {
    if (AllPadding<MR>(rows, b.zero_row)) {
      w += b.groups * NV * S::kWeightBytes;
      continue;
    }
    const uint8_t* x[MR];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) x[r] = rows[r] + t.panel->x_offset;
    for (size_t k = 0; k < b.groups * 4; k += 4) {
      FetchAhead<S, NV>(t, w, fetch);
      const auto group = [&](int r) __attribute__((always_inline)) {
        const I bytes = S::Set(LoadGroup(x[r] + k));
        return kShift ? S::AddBytes(bytes, shift) : bytes;
      };
      AddGroup<S, MR, NV>(w, group, acc);
      w += NV * S::kWeightBytes;
    }
  }
}

// Of windows that lie equally far apart: a pointer for three of them, and one loop over all groups.
template <class S, int MR, int NV, bool kShift>
inline __attribute__((always_inline)) void AddRows(const TileArgs& t, typename S::I (&acc)[MR][NV]) {
  using I = typename S::I;
  const IgemmBlock& b = *t.block;
  const I shift = S::Set(b.x_shift);
  const int8_t *w = t.panel->weights, *fetch = t.fetch;
  const size_t apart = b.apart;
  const uint8_t* const first = t.x;
  const uint32_t *offset = b.offsets, *const end = offset + b.segments * b.groups;
  for (; offset < end; ++offset, w += NV * S::kWeightBytes) {
    FetchAhead<S, NV>(t, w, fetch);
    const uint8_t* x[(MR + 2) / 3];
#pragma GCC unroll 4
    for (int i = 0; i < (MR + 2) / 3; ++i) {
      x[i] = (i == 0 ? first + *offset : x[i - 1] + 3 * apart);
      asm("" : "+r"(x[i]));  // or the compiler keeps a pointer for each pixel, more than registers hold
    }
    const auto group = [&](int r) __attribute__((always_inline)) {
      const I bytes = S::Set(LoadGroup(x[r / 3] + static_cast<size_t>(r % 3) * apart));
      return kShift ? S::AddBytes(bytes, shift) : bytes;
    };
    AddGroup<S, MR, NV>(w, group, acc);
  }
}

// One function for all of them: what finishes a tile is most of its code.
template <class S, int MR, int NV>
void DotTile(const TileArgs& t) {
  const IgemmBlock& b = *t.block;
  typename S::I acc[MR][NV];
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
    const auto bias = S::Load(b.bias + t.panel->channel + v * S::kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) acc[r][v] = bias;
  }
  if (b.offsets != nullptr) {
    b.x_shift == 0 ? AddRows<S, MR, NV, false>(t, acc) : AddRows<S, MR, NV, true>(t, acc);
  } else {
    b.x_shift == 0 ? AddSegments<S, MR, NV, false>(t, acc) : AddSegments<S, MR, NV, true>(t, acc);
  }
  FinishTile<S, MR, NV>(b, *t.panel, t.pixel, acc);
}

// 16-bit dot products (vpmaddubsw), flushed into 32-bit sums every `groups_per_flush` k-groups.
template <class S, int MR, int NV, bool kShift>
void NarrowTile(const TileArgs& t) {
  using I = typename S::I;
  const IgemmBlock& b = *t.block;
  alignas(64) int32_t sums[MR * NV * S::kLanes];
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
    const I bias = S::Load(b.bias + t.panel->channel + v * S::kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) S::Store(sums + (r * NV + v) * S::kLanes, bias);
  }
  I acc[MR][NV];
  const auto clear = [&] {
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = S::Set(0);
    }
  };
  const auto flush = [&] {
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        int32_t* sum = sums + (r * NV + v) * S::kLanes;
        S::Store(sum, S::Add(S::Load(sum), S::SumPairs(acc[r][v])));
      }
    }
  };
  clear();
  const I shift = S::Set(b.x_shift);
  const int8_t* w = t.panel->weights;
  const uint8_t* const* rows = t.rows;
  size_t left = b.groups_per_flush;
  for (size_t s = 0; s < b.segments; ++s, rows += b.pitch) {
    if (AllPadding<MR>(rows, b.zero_row)) {
      w += b.groups * NV * S::kWeightBytes;
      continue;
    }
    const uint8_t* x[MR];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) x[r] = rows[r] + t.panel->x_offset;
    for (size_t k = 0; k < b.groups * 4;) {
      const size_t n = left < b.groups - k / 4 ? left : b.groups - k / 4;
      for (const size_t end = k + n * 4; k < end; k += 4) {
        I weights[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) weights[v] = S::Load(w + v * S::kWeightBytes);
        w += NV * S::kWeightBytes;
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
          I group = S::Set(LoadGroup(x[r] + k));
          if constexpr (kShift) group = S::AddBytes(group, shift);
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) acc[r][v] = S::AddWords(acc[r][v], S::DotPairs(group, weights[v]));
        }
      }
      left -= n;
      if (left == 0) {
        flush();
        clear();
        left = b.groups_per_flush;
      }
    }
  }
  flush();
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[r][v] = S::Load(sums + (r * NV + v) * S::kLanes);
  }
  FinishTile<S, MR, NV>(b, *t.panel, t.pixel, acc);
}

using TileFunction = void (*)(const TileArgs&);

// The tile functions of one panel width, for 1..kMax pixels.
template <class S, int NV, int kMax, bool kShift>
struct TileTable {
  TileFunction run[kMax];
  constexpr TileTable() : run() { Fill<1>(); }
  template <int MR>
  constexpr void Fill() {
    if constexpr (S::kNarrow) {
      run[MR - 1] = &NarrowTile<S, MR, NV, kShift>;
    } else {
      run[MR - 1] = &DotTile<S, MR, NV>;
    }
    if constexpr (MR < kMax) Fill<MR + 1>();
  }
};

// Smaller panels come from the caches in time without help. Measured on Zen 5: ResNet-50 as a whole takes
// 0.99 of the time with the prefetches, its 1x1 layers on 7x7 images with cold caches 0.85; with warm caches
// they cost up to 1.02.
constexpr size_t kFetchedPanelBytes = 16 * 1024;

// Panels outside, tiles inside: a panel's weights stay in L1 or L2 while the pixels of the block pass. The
// pixels, or those of a row, are dealt out evenly, so that no tile is left with one or two of them.
template <class S, int NV, bool kShift>
void RunPanel(const IgemmBlock& b, const IgemmPanel& panel) {
  constexpr size_t kMax = S::kTileRows[NV - 1];
  static constexpr TileTable<S, NV, kMax, kShift> kTiles;
  const bool in_rows = b.offsets != nullptr;
  const size_t run = in_rows ? b.columns : b.pixels, runs = b.pixels / run;
  const size_t tiles = (run + kMax - 1) / kMax;
  const size_t shorter = run / tiles, longer = run % tiles;
  TileArgs t{&b, &panel, b.rows, nullptr, 0, panel.weights, 0, false};
  const size_t steps = b.segments * b.groups;
  const bool has_next = &panel + 1 < b.all_panels_end,
             is_fetched = steps * NV * S::kWeightBytes >= kFetchedPanelBytes;
  t.streams = is_fetched && runs * tiles == 1;
  if (has_next && is_fetched) t.fetch_step = NV * S::kWeightBytes / (runs * tiles);
  if (t.fetch_step != 0) t.fetch = panel.weights + steps * NV * S::kWeightBytes;
  for (size_t row = 0; row < runs; ++row) {
    if (in_rows) t.x = b.rows[row];
    for (size_t i = 0; i < tiles; ++i) {
      const size_t n = shorter + (i < longer ? 1 : 0);
      if (!in_rows) t.rows = b.rows + t.pixel;
      kTiles.run[n - 1](t);
      t.pixel += n;
      t.x += n * b.apart;
      t.fetch += t.fetch_step * steps;
    }
  }
}

template <class S, bool kShift>
void RunBlock(const IgemmBlock& b) {
  for (size_t p = 0; p < b.panel_count; ++p) {
    const IgemmPanel& panel = b.panels[p];
    if (panel.vectors == 1) RunPanel<S, 1, kShift>(b, panel);
    if (panel.vectors == 2) RunPanel<S, 2, kShift>(b, panel);
    if constexpr (S::kMaxVectors == 4) {
      if (panel.vectors == 3) RunPanel<S, 3, kShift>(b, panel);
      if (panel.vectors == 4) RunPanel<S, 4, kShift>(b, panel);
    }
  }
}

// A pixel of ones through one panel; 32-bit sums only.
template <class S>
void SumWeights(const int8_t* weights, size_t groups, size_t vectors, int32_t* sums) {
  const typename S::Bytes ones = S::Prepare(S::Set(0x01010101));
  for (size_t v = 0; v < vectors; ++v) {
    typename S::I sum = S::Set(0);
    const int8_t* w = weights + v * S::kWeightBytes;
    for (size_t g = 0; g < groups; ++g, w += vectors * S::kWeightBytes) {
      sum = S::Dot(sum, ones, S::LoadWeights(w));
    }
    S::Store(sums + v * S::kLanes, sum);
  }
}

// Pixels against weights of one, kLanes groups at a time; for weights stored as bytes.
template <class S>
void SumRows(const uint8_t* const* rows, size_t count, size_t bytes, uint8_t x_shift, int32_t* sums) {
  const typename S::I shift = S::Set(static_cast<int32_t>(x_shift * 0x01010101u)), ones = S::Set(0x01010101);
  constexpr size_t kStep = S::kLanes * 4;
  for (size_t r = 0; r < count; ++r) {
    const uint8_t* x = rows[r];
    typename S::I sum = S::Set(0);
    size_t i = 0;
    for (; i + kStep <= bytes; i += kStep) sum = S::Dot(sum, S::AddBytes(S::Load(x + i), shift), ones);
    if (i < bytes) {
      alignas(64) uint8_t rest[kStep];
      std::memset(rest, -x_shift, kStep);  // a byte that the shift makes zero
      std::memcpy(rest, x + i, bytes - i);
      sum = S::Dot(sum, S::AddBytes(S::Load(rest), shift), ones);
    }
    alignas(64) int32_t lanes[S::kLanes];
    S::Store(lanes, sum);
    int32_t total = 0;
    for (int lane = 0; lane < S::kLanes; ++lane) total += lanes[lane];
    sums[r] = total;
  }
}

template <class S>
void Run(const IgemmBlock& block) {
  if constexpr (S::kNarrow) {
    if (block.x_shift != 0) return RunBlock<S, true>(block);
  }
  RunBlock<S, false>(block);
}

}  // namespace
}  // namespace lowbit
