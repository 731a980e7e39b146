// Codes of few bits as planes, for products of bits. With the codes q = sum of 2^i q_i and the weights
// w = lowest + 2^shift * (sum of 2^j w_j),
//   sum of q w = 2^shift * (sum over i, j of 2^(i + j) * popcount(q_i AND w_j)) + lowest * (sum of q).
// Products of one power of two share sums, and ones in the place of weights count the bits of q_i for the last
// term.
#pragma once

#include <cstdint>

namespace lowbit::cuda {

// Bits of a and b, those of a where `mask` has them.
__device__ __forceinline__ unsigned Select(unsigned mask, unsigned a, unsigned b) {
  return (a & mask) | (b & ~mask);
}

// The planes of 32 codes below 2^kBits, a byte each in eight words, which are added up before they are taken
// apart, since no bits of theirs meet: bit 8 j + k of a plane is of byte j of word k / 2 + k % 2 * 4
// (BitOfChannel).
template <int kBits>
__device__ __forceinline__ void SliceCodes(const uint4& low, const uint4& high, unsigned (&planes)[kBits]) {
  if constexpr (kBits == 1) {
    const unsigned even = low.x + low.y * 4 + low.z * 16 + low.w * 64,
                   odd = high.x + high.y * 4 + high.z * 16 + high.w * 64;
    planes[0] = even + 2 * odd;
  } else if constexpr (kBits == 2) {
    const unsigned even = low.x + low.y * 4 + low.z * 16 + low.w * 64,
                   odd = high.x + high.y * 4 + high.z * 16 + high.w * 64;
    planes[0] = Select(0x55555555u, even, odd << 1);
    planes[1] = Select(0x55555555u, even >> 1, odd);
  } else {
    static_assert(kBits == 4);
    const unsigned a = low.x + low.z * 16, b = high.x + high.z * 16, c = low.y + low.w * 16,
                   d = high.y + high.w * 16;
    const unsigned first[] = {Select(0x55555555u, a, b << 1), Select(0x55555555u, a >> 1, b)},
                   second[] = {Select(0x55555555u, c, d << 1), Select(0x55555555u, c >> 1, d)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      planes[i] = Select(0x33333333u, first[i], second[i] << 2);
      planes[i + 2] = Select(0x33333333u, first[i] >> 2, second[i]);
    }
  }
}

// The sum of 2^i * counts[i][at] for i < kCount.
template <int kCount, int kPowers, int kSums>
__device__ __forceinline__ int SumOfPowers(const int (&counts)[kPowers][kSums], int at) {
  int sum = counts[kCount - 1][at];
#pragma unroll
  for (int i = kCount - 2; i >= 0; --i) sum = 2 * sum + counts[i][at];
  return sum;
}

}  // namespace lowbit::cuda
