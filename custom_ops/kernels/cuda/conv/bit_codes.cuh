// What becomes of counts of bits whose first codes are told by steps: words of planes of codes.
#pragma once

#include "kernels/cuda/conv/bits.h"
#include "kernels/cuda/device/ptx.cuh"

namespace lowbit::cuda {

// Those of four channels: of the first two and the last two, first and second ones, then third ones.
struct FourSteps {
  int4 first;
  int2 last;
  __device__ __forceinline__ int Of(int step, int half) const {
    const int all[3][2] = {{first.x, first.y}, {first.z, first.w}, {last.x, last.y}};
    return all[step][half];
  }
};

// A warpgroup's tile of 64 places and kTileN channels, and what is a thread's own of it.
template <int kTileN, int kBits>
struct BitTile {
  static constexpr int kSums = kTileN / 2;
  // Of all planes; behind a thread's sums of channels those of rows of ones.
  using Counts = int[kSums + kOnesRows / 2];
  // Words of 128 channels, where there is no whole one half of a word.
  static constexpr int kWords = (kTileN + kPlaneChannels - 1) / kPlaneChannels,
                       kHalves = kTileN % kPlaneChannels == 0 ? 2 : 1;
  // Parts of words of codes, of two rows.
  using Codes = unsigned[2][kWords][kBits];

  // First codes of counts as steps tell them (BitSteps). `Layer`: has w_shift, w_lowest and sum_offset of BitsParams.
  // steps(i): of a thread's i-th four channels. Two neighbouring channels' sums are compared at once, and the signs of
  // four are moved at once to where they are in a word (BitOfChannel): of the two halves of the word, else of the two
  // rows.
  template <typename Layer, typename F>
  static __device__ __forceinline__ void CodesOfSteps(const Layer& of, const Counts& counts, const F& steps,
                                                      const unsigned (&falls)[kWords], Codes& codes) {
    constexpr int kSteps = (1 << kBits) - 1,
                  kTogether = kHalves == 2 ? 2 : 1;  // words that are made together
    constexpr unsigned kBoth = 0x10001;
    int of_bit = 1 << of.w_shift;
    KeepInRegister(of_bit);
    const unsigned of_rows[] = {kBoth * (counts[kSums] * of.w_lowest + of.sum_offset),
                                kBoth * (counts[kSums + 2] * of.w_lowest + of.sum_offset)};
    // Of four channels' half.
    const auto sums = [&](int of_tile, int half, int i) {
      const int* const v = counts + 8 * of_tile + 4 * half + 2 * i;
      return __byte_perm(v[0], v[1], 0x5410) * of_bit + of_rows[i];
    };
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      unsigned reached[kTogether][kSteps] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int first = word * kHalves * 4 + j, second = kHalves == 2 ? first + 4 : first;
        const FourSteps of_first = steps(first), of_second = kHalves == 2 ? steps(second) : of_first;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            const unsigned a = sums(first, half, i), b = sums(second, half, kHalves == 2 ? i : 1);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
              reached[i][step] |= SignsOfHalves(a + of_first.Of(step, half), b + of_second.Of(step, half)) &
                                  0x01010101u << (2 * j + half);
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto& r = reached[kHalves == 2 ? i : 0];
        // How many steps it has reached.
        unsigned planes[2] = {r[0], 0};
        if constexpr (kBits == 2) {
          planes[0] = r[0] ^ r[1] ^ r[2];
          planes[1] = r[1];
        }
#pragma unroll
        for (int plane = 0; plane < kBits; ++plane) {
          const unsigned own = kHalves == 2 ? planes[plane] : planes[plane] >> 16 * i;
          codes[i][word][plane] = own ^ falls[word];
        }
      }
    }
  }
};

// Words of codes: of[0 .. 1] are bits of first codes, of[2 .. 3] of residuals (BitsParams::products).
template <int kBits>
__device__ __forceinline__ void CombineBits(const uint32_t (&of_products)[kMostPlanes][kBitProducts],
                                            const unsigned (&of)[4], unsigned (&y)[kBits]) {
  unsigned products[kBitProducts] = {~0u};
#pragma unroll
  for (int plane = 0; plane < kBits; ++plane) y[plane] = of_products[plane][0];
#pragma unroll
  for (int i = 1; i < kBitProducts; ++i) {
    if (kBits == 1 && (i & 0b1010) != 0) continue;
    const int rest = i & (i - 1), last = i - rest;  // a bit of i
    products[i] = products[rest] & of[last == 1 ? 0 : last == 2 ? 1 : last == 4 ? 2 : 3];
#pragma unroll
    for (int plane = 0; plane < kBits; ++plane) y[plane] ^= of_products[plane][i] & products[i];
  }
}

}  // namespace lowbit::cuda
