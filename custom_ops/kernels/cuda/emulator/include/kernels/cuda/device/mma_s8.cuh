// The emulated GPU's ../../../../../device/mma_s8.cuh.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cuda/emulator/products.h"
#include "kernels/cuda/emulator/shared_memory.h"

namespace lowbit::cuda {

inline void LoadMatrices(uint32_t address, unsigned (&r)[4]) {
  const auto shown = emulator::Exchange(address);
  const int lane = emulator::current->number % emulator::kWarp;
  for (int i = 0; i < 4; ++i)
    std::memcpy(&r[i], emulator::PointerTo(shown[8 * i + lane / 4]) + lane % 4 * 4, sizeof r[i]);
}

template <bool kSigned>
void Multiply(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  emulator::MultiplyFragments(kSigned, c, a, b0, b1);
}

}  // namespace lowbit::cuda
