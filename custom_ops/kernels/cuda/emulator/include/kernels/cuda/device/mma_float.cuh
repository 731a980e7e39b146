// The emulated GPU's ../../../../../device/mma_float.cuh.
#pragma once

#include <bit>
#include <cstdint>

#include "core/float_precision.h"
#include "kernels/cuda/device/halves.cuh"
#include "kernels/cuda/emulator/products.h"

namespace lowbit::cuda {

inline unsigned ToTf32(float v) { return std::bit_cast<uint32_t>(RoundToTf32(v)); }
inline void MultiplyHalves(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  emulator::MultiplyFloatFragments(true, c, a, b0, b1);
}
inline void MultiplyTf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  emulator::MultiplyFloatFragments(false, c, a, b0, b1);
}

}  // namespace lowbit::cuda
