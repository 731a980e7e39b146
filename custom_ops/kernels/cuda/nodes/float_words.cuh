// Operands of Tensor Cores in words along k: two float16 numbers or one in TF32. Of 3xtf32 a number is two words, the
// upper part and what it leaves.
#pragma once

#include <bit>
#include <cstdint>

#include "core/float_precision.h"
#include "kernels/cuda/device/mma_float.cuh"

namespace lowbit::cuda {

inline constexpr int kStepWords = 8;  // along k, of one instruction

template <FloatPrecision kPrecision>
struct Words {
  static constexpr bool kHalves = kPrecision == FloatPrecision::kFloat16;
  static constexpr int kPerWord = kHalves ? 2 : 1;
  static constexpr int kParts = kPrecision == FloatPrecision::k3xTf32 ? 2 : 1;  // words to an operand
  static constexpr int kElements = kStepWords * kPerWord;                       // of a step
};

// A word of `low`, and of `high` where words hold two; in upper and lower parts where there are two.
template <FloatPrecision kPrecision>
__device__ __forceinline__ void Split(float low, [[maybe_unused]] float high,
                                      unsigned (&parts)[Words<kPrecision>::kParts]) {
  if constexpr (Words<kPrecision>::kHalves) {
    parts[0] = PackHalves(low, high);
  } else {
    parts[0] = ToTf32(low);
    if constexpr (Words<kPrecision>::kParts == 2)
      parts[1] = ToTf32(__fsub_rn(low, __uint_as_float(parts[0])));
  }
}

// The same on the host, one part of them.
template <FloatPrecision kPrecision>
uint32_t WordOf(int part, float low, float high) {
  if (Words<kPrecision>::kHalves) return ToHalf(low) | uint32_t{ToHalf(high)} << 16;
  const float upper = RoundToTf32(low);
  return std::bit_cast<uint32_t>(part == 0 ? upper : RoundToTf32(low - upper));
}

}  // namespace lowbit::cuda
