// Look-ups with vpshufb, for 256- and 512-bit vectors: tiles of several pixels x 16 output channels,
// templated over the operations V of a vector (lut_<isa>.cc).
//
// Each 128-bit lane of a vector of tables is one table, four channels of x, and the lane of the indices below
// it holds 16 of them. The bytes of four look-ups are added, then they are widened, and the lanes are added
// when the depth ends:
//
//     1-bit weights   Byte j of every lane belongs to channel j. The sums are kept as 16-bit words twice:
//                     `odd`, the high bytes, and `all`, the whole words, modulo 2^16; the low bytes are
//                     all - 256 odd.
//     2-bit weights   Bytes 2j and 2j + 1 belong to the two planes of channel j, and vpmaddubsw adds them
//                     with the planes' weights; the channels 8..15 have indices of their own.
//
// LookupsPerWord in lut.cc says how many look-ups the words hold.
#pragma once

#include "kernels/common/inline.h"
#include "kernels/x86/lut_tile.h"

namespace lowbit {
namespace {

template <class V>
struct Shuffle {
  using S = typename V::Vector;
  using I = typename S::I;
  static constexpr int kMaxPixels = V::kTileRows, kMaxUnits = 1;
  static constexpr int kVectors = kLutUnit / S::kLanes;
  static constexpr size_t kBytes = 4 * S::kLanes;
  template <int kPlanes>
  static constexpr size_t kIndexBytes = kBytes * kPlanes;
  template <int kPlanes>
  static constexpr size_t kTableStep = kBytes;

  // Adds the look-ups [0, n) at `at`, n <= kPerFlush, to the two words of each pixel.
  template <int MR, int kPlanes, int n>
  static inline __attribute__((always_inline)) void Step(const uint8_t* const (&x)[MR], size_t at,
                                                         const uint8_t* w, I slots, I (&words)[MR][2]) {
    if constexpr (kPlanes == 1) {
      I index[n];
#pragma GCC unroll 4
      for (int j = 0; j < n; ++j) index[j] = S::Load(w + j * kBytes);
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        I sum = V::Lookup(S::Load(x[r] + at), index[0]);
#pragma GCC unroll 4
        for (int j = 1; j < n; ++j)
          sum = S::AddBytes(sum, V::Lookup(S::Load(x[r] + at + j * kBytes), index[j]));
        words[r][0] = V::AddWords(words[r][0], sum);
        words[r][1] = V::AddWords(words[r][1], V::HighBytes(sum));
      }
    } else {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        I index[n];
#pragma GCC unroll 4
        for (int j = 0; j < n; ++j) index[j] = S::Load(w + (2 * j + half) * kBytes);
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
          I sum = V::Lookup(S::Load(x[r] + at), index[0]);
#pragma GCC unroll 4
          for (int j = 1; j < n; ++j)
            sum = S::AddBytes(sum, V::Lookup(S::Load(x[r] + at + j * kBytes), index[j]));
          words[r][half] = V::AddWords(words[r][half], V::AddPairs(sum, slots));
        }
      }
    }
  }

  template <int MR, int kUnits, int kPlanes>
  static void Tile(const LutTile& t) {
    const I slots = S::Set(t.block->slot_weights);
    I words[MR][2];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) words[r][0] = words[r][1] = S::Set(0);
    WithFlush(t.block->per_flush, [&]<int kPerFlush>() LOWBIT_ALWAYS_INLINE {
      const uint8_t* w = t.indices;
      const uint8_t* const* rows = t.rows;
      for (size_t s = 0; s < t.segments; ++s, rows += t.block->pitch) {
        if (AllPadding<MR>(rows, t.block->zero_row)) {
          w += t.lookups * kIndexBytes<kPlanes>;
          continue;
        }
        const uint8_t* x[MR];
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) x[r] = rows[r] + t.table_offset;
        size_t i = 0, at = 0;
        for (; i + kPerFlush <= t.lookups; i += kPerFlush) {
          Step<MR, kPlanes, kPerFlush>(x, at, w, slots, words);
          at += kPerFlush * kBytes;
          w += kPerFlush * kIndexBytes<kPlanes>;
        }
        for (; i < t.lookups; ++i, at += kBytes, w += kIndexBytes<kPlanes>)
          Step<MR, kPlanes, 1>(x, at, w, slots, words);
      }
    });
    I acc[MR][kVectors];
    StartTile<S, MR, kVectors>(t, acc);
    // The weight of the only plane.
    const I weight = S::Set(static_cast<int8_t>(t.block->slot_weights));
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      I sums[kVectors];
      if constexpr (kPlanes == 1) {
        // Channels 2j and 2j + 1 from the low and high bytes; unpacking brings the channels in order.
        const I odd = words[r][1], even = V::SubWords(words[r][0], V::HighPlaces(odd));
        V::template AddLanes<false>(V::UnpackLow(even, odd), V::UnpackHigh(even, odd), sums);
      } else {
        V::template AddLanes<true>(words[r][0], words[r][1], sums);
      }
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
        acc[r][v] = S::Add(acc[r][v], kPlanes == 1 ? S::Mul(sums[v], weight) : sums[v]);
    }
    EndTile<S, MR, kVectors>(t, acc);
  }
};

}  // namespace
}  // namespace lowbit
