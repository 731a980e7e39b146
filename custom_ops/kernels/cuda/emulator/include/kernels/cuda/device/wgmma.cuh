// The emulated GPU's ../../../../../device/wgmma.cuh.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/matrix_descriptors.cuh"
#include "kernels/cuda/emulator/products.h"

namespace lowbit::cuda {

// All of these take the threads of a warp together (.sync.aligned): one that is past the wait may speak for
// the warp.
inline void WgmmaFence() { __syncwarp(); }
inline void WgmmaCommit() { emulator::current->products.Commit(); }
template <int kPending>
void WgmmaWait() {
  emulator::current->products.DoAllBut(kPending);
  __syncwarp();
}
template <int kCount>
void HoldRegisters(int (&)[kCount]) {}
template <int kCount>
void HoldRegisters(float (&)[kCount]) {}

template <int kN, bool kSigned>
struct Wgmma {
  static void Multiply(int (&d)[kN / 2], uint64_t a, uint64_t b) {
    emulator::Multiply({.sums = d, .n = kN, .of = emulator::CodesOf(kSigned), .adds = true, .a = a, .b = b});
  }
};

template <int kN>
struct WgmmaHalves {
  static void Multiply(float (&d)[kN / 2], uint64_t a, uint64_t b) {
    emulator::Multiply({.sums = d, .n = kN, .of = emulator::Elements::kHalves, .adds = true, .a = a, .b = b});
  }
};

namespace emulator {
// `a` in registers.
inline void MultiplyRows(Product product, const unsigned (&a)[4]) {
  product.has_rows = true;
  GatherRows(a, product.rows);
  Multiply(product);
}
}  // namespace emulator

template <bool kSigned, bool kAdds = true, int kCount>
void MultiplyRows(int (&d)[kCount], const unsigned (&a)[4], uint64_t b) {
  emulator::MultiplyRows(
      {.sums = d, .n = 2 * kCount, .of = emulator::CodesOf(kSigned), .adds = kAdds, .a = 0, .b = b}, a);
}

template <bool kHalves, bool kAdds = true, int kCount>
void MultiplyFloatRows(float (&d)[kCount], const unsigned (&a)[4], uint64_t b) {
  using emulator::Elements;
  emulator::MultiplyRows({.sums = d,
                          .n = 2 * kCount,
                          .of = kHalves ? Elements::kHalves : Elements::kTf32,
                          .adds = kAdds,
                          .a = 0,
                          .b = b},
                         a);
}

template <int kN>
void MultiplyBits(int (&d)[kN / 2], uint64_t a, uint64_t b, int adds = 1) {
  emulator::Multiply(
      {.sums = d, .n = kN, .of = emulator::Elements::kBits, .adds = adds != 0, .a = a, .b = b});
}

}  // namespace lowbit::cuda
