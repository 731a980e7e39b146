// Codes of few bits to planes of bits (core/bit_planes.h).
#pragma once

#include <cstdint>

#include "core/bit_planes.h"
#include "kernels/cuda/conv/conv_params.h"
#include "kernels/cuda/conv/weight_rows.h"

namespace lowbit::cuda {

// Of 16 codes below 2^kBits, those that one thread of four has of 64 channels, the bits of each plane, in the low
// half of a word (BitOfChannel): four words of codes are added up before they are taken apart, since no bits of
// theirs meet, then the gaps of one half are filled from the other.
template <int kBits>
__device__ __forceinline__ void HalvesOfPlanes(const unsigned (&codes)[4], unsigned (&halves)[kBits]) {
  static_assert(kBits == 1 || kBits == 2);
  const unsigned all = codes[0] + codes[1] * 4 + codes[2] * 16 + codes[3] * 64;
#pragma unroll
  for (int plane = 0; plane < kBits; ++plane) {
    const unsigned gapped = kBits == 1 ? all : all >> plane & 0x55555555u;
    halves[plane] = gapped | gapped >> 15;
  }
}

// A number's sign becomes the lowest bit.
__device__ __forceinline__ unsigned ShiftInSign(unsigned bits, int number) {
  return bits << 1 | static_cast<unsigned>(number) >> 31;
}

// The reverse of two planes: from bit 2 i on, the codes of the i-th word.
__device__ __forceinline__ unsigned CodesOfHalves(unsigned first, unsigned second) {
  const auto gapped = [](unsigned half) { return (half & 0x5555u) | (half & 0xAAAAu) << 15; };
  return gapped(first) | gapped(second) << 1;
}

__device__ __forceinline__ unsigned JoinHalves(unsigned low, unsigned high) {
  return __byte_perm(low, high, 0x5410);
}

}  // namespace lowbit::cuda
