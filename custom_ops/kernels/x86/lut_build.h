// Building the tables of the look-up kernels, templated over the operations B of a vector of two or four
// 128-bit lanes (lut_build_avx512.h, lut_avx2.cc). vpshufb moves bytes inside each lane and gives 0 for index
// 0x80.
//
// Sixteen channels at the end of a convolution group, in every lane, become the tables of four channels each:
// entry i of table t is the sum over bits j of i of channel 4 t + j, four shuffles.
//
// 64 channels become interleaved tables (FirstChannelOf) in two steps, three shuffles per vector of tables:
// first the sums of pairs of channels, eight bytes for each four channels,
//
//     0, x0, x1, x0 + x1, 0, x2, x3, x2 + x3
//
// then entry i is byte i % 4 of the first four plus byte i / 4 of the last four.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/x86/lut_block.h"

namespace lowbit {
namespace {

struct alignas(64) ShuffleBytes {
  uint8_t at[64];
};

// What entry i of the tables of sixteen channels, one table per lane, takes for bit `bit` of i.
constexpr ShuffleBytes EntryBytes(int bit) {
  ShuffleBytes out{};
  for (int i = 0; i < 64; ++i)
    out.at[i] = (i >> bit & 1) != 0 ? static_cast<uint8_t>(i / 16 * 4 + bit) : uint8_t{0x80};
  return out;
}

// One term of the sums of pairs, of the first or second eight channels of each lane.
constexpr ShuffleBytes PairBytes(int half, int term) {
  ShuffleBytes out{};
  for (int i = 0; i < 64; ++i) {
    const int byte = i % 16;
    out.at[i] =
        (byte >> term & 1) != 0 ? static_cast<uint8_t>(8 * half + byte / 4 * 2 + term) : uint8_t{0x80};
  }
  return out;
}

// One term of the entries of a table from such sums, the first or second table of each lane.
constexpr ShuffleBytes TableBytes(int half, int term) {
  ShuffleBytes out{};
  for (int i = 0; i < 64; ++i) {
    const int byte = i % 16;
    out.at[i] = static_cast<uint8_t>(8 * half + (term == 0 ? byte % 4 : 4 + byte / 4));
  }
  return out;
}

constexpr ShuffleBytes kEntryBytes[4] = {EntryBytes(0), EntryBytes(1), EntryBytes(2), EntryBytes(3)};
constexpr ShuffleBytes kPairBytes[2][2] = {{PairBytes(0, 0), PairBytes(0, 1)},
                                           {PairBytes(1, 0), PairBytes(1, 1)}};
constexpr ShuffleBytes kTableBytes[2][2] = {{TableBytes(0, 0), TableBytes(0, 1)},
                                            {TableBytes(1, 0), TableBytes(1, 1)}};

template <class B>
struct TableBuilder {
  using I = typename B::I;
  static constexpr size_t kBytes = B::kBytes;  // of a vector
  static constexpr size_t kBlock = 4 * kQuadChannels;

  static I Sum(I from, const ShuffleBytes (&bytes)[2]) {
    return B::Add(B::Shuffle(from, B::Load(bytes[0].at)), B::Shuffle(from, B::Load(bytes[1].at)));
  }

  // The tables of kBytes channels: kBytes of each of four quads.
  static inline __attribute__((always_inline)) void StoreInterleaved(I x, uint8_t* to) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const I pairs = Sum(x, kPairBytes[half]);
#pragma GCC unroll 2
      for (int table = 0; table < 2; ++table)
        B::Store(to + (2 * half + table) * kQuadBytes, Sum(pairs, kTableBytes[table]));
    }
  }

  // The tables of sixteen channels, which every lane of x holds.
  static inline __attribute__((always_inline)) void StoreQuad(I x, uint8_t* to) {
#pragma GCC unroll 2
    for (size_t at = 0; at < kQuadBytes; at += kBytes) {
      const auto term = [&](int bit) { return B::Shuffle(x, B::Load(kEntryBytes[bit].at + at)); };
      B::Store(to + at, B::Add(B::Add(term(0), term(1)), B::Add(term(2), term(3))));
    }
  }

  template <LutAdjust kAdjust, bool kSums>
  static void Build(const LutBuild& b) {
    const I shift = B::Set(b.shift);
    const auto adjust = [&](I x) {
      if constexpr (kAdjust == LutAdjust::kShift) return B::Add(x, shift);
      if constexpr (kAdjust == LutAdjust::kDouble) return B::Add(x, x);
      return x;
    };
    const uint8_t* x = b.x;
    uint8_t* tables = b.tables;
    for (size_t p = 0; p < b.pixels; ++p, x += b.x_pitch, tables += b.pitch) {
      for (size_t g = 0; g < b.groups; ++g) {
        const uint8_t* from = x + g * b.group_channels;
        uint8_t* to = tables + g * b.group_pitch;
        I sum = B::Set(0);
        size_t left = b.group_channels;
        for (; left >= kBlock; left -= kBlock, from += kBlock, to += 4 * kQuadBytes) {
#pragma GCC unroll 2
          for (size_t at = 0; at < kBlock; at += kBytes) {
            const I codes = adjust(B::Load(from + at));
            if constexpr (kSums) sum = B::AddSums(sum, codes);
            StoreInterleaved(codes, to + at);
          }
        }
        while (left != 0) {
          const size_t count = left < kQuadChannels ? left : kQuadChannels;
          // Padding channels are zero, for the sums; the indices never select them.
          const I codes = B::KeepFirst(adjust(B::LoadQuad(from, count, b.x_end)), count);
          if constexpr (kSums) sum = B::AddSums(sum, B::FirstLane(codes));
          StoreQuad(codes, to);
          left -= count;
          from += count;
          to += kQuadBytes;
        }
        if constexpr (kSums) b.sums[g * b.sums_pitch + p] = B::Total(sum);
      }
    }
  }

  template <LutAdjust kAdjust>
  static void BuildAdjusted(const LutBuild& b) {
    b.sums ? Build<kAdjust, true>(b) : Build<kAdjust, false>(b);
  }

  static void Run(const LutBuild& b) {
    switch (b.adjust) {
      case LutAdjust::kNone:
        return BuildAdjusted<LutAdjust::kNone>(b);
      case LutAdjust::kShift:
        return BuildAdjusted<LutAdjust::kShift>(b);
      case LutAdjust::kDouble:
        return BuildAdjusted<LutAdjust::kDouble>(b);
    }
  }
};

}  // namespace
}  // namespace lowbit
