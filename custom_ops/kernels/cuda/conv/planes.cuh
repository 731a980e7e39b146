// Codes of few bits to planes of bits (core/bit_planes.h).
#pragma once

#include <cstdint>

#include "core/bit_planes.h"
#include "kernels/cuda/conv/conv_params.h"
#include "kernels/cuda/conv/weight_rows.h"

namespace lowbit::cuda {

// Of 16 codes, those that one thread of four has of 64 channels, of which `codes` has two bits each, the bits of each
// plane, in the low half of a word (BitOfChannel): the gaps of one half are filled from the other.
template <int kBits>
__device__ __forceinline__ void HalvesOfCodes(unsigned codes, unsigned (&halves)[kBits]) {
  static_assert(kBits == 1 || kBits == 2);
#pragma unroll
  for (int plane = 0; plane < kBits; ++plane) {
    const unsigned gapped = codes >> plane & 0x55555555u;
    halves[plane] = gapped | gapped >> 15;
  }
}
// The same of codes below 2^kBits that are bytes: four words of them are added up, since no bits of theirs meet.
template <int kBits>
__device__ __forceinline__ void HalvesOfPlanes(const unsigned (&codes)[4], unsigned (&halves)[kBits]) {
  HalvesOfCodes(codes[0] + codes[1] * 4 + codes[2] * 16 + codes[3] * 64, halves);
}

// A code's two lowest bits become the highest.
__device__ __forceinline__ unsigned ShiftInCode(unsigned codes, unsigned code) {
  return __funnelshift_r(codes, code, 2);
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
