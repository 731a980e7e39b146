// The emulated GPU's ../../../../../device/halves.cuh.
#pragma once

#include <cstdint>

#include "core/float_precision.h"

namespace lowbit::cuda {

inline unsigned PackHalves(float low, float high) { return ToHalf(low) | uint32_t{ToHalf(high)} << 16; }
inline float2 UnpackHalves(unsigned word) {
  return {FromHalf(static_cast<uint16_t>(word)), FromHalf(static_cast<uint16_t>(word >> 16))};
}

}  // namespace lowbit::cuda
