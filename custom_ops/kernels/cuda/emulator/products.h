// Products of matrices on the emulated GPU.
#pragma once

#include <cstdint>

#include "kernels/cuda/emulator/machine.h"

namespace lowbit::cuda::emulator {

// What the bytes of operands hold; where those of a are codes, those of b are signed ones.
enum class Elements { kUnsignedCodes, kSignedCodes, kBits, kHalves, kTf32 };
inline Elements CodesOf(bool is_signed) {
  return is_signed ? Elements::kSignedCodes : Elements::kUnsignedCodes;
}

// This thread's part of wgmma's d[64 x n] += a[64 x 32] * b[n x 32]^T; `a` and `b` are descriptors. With
// `rows` it is the thread's two rows of a. Sums are int32, or float32 where the elements are floats: those are rounded
// once, which the GPU does not promise.
struct Product {
  void* sums;
  int n;
  Elements of;
  bool adds;
  uint64_t a, b;
  bool has_rows = false;
  uint8_t rows[2][kWarp] = {};
};
void Multiply(const Product& product);

// A thread's two rows, eight apart, of a[16 x 32], of which each thread of the warp holds four words.
void GatherRows(const unsigned (&a)[4], uint8_t (&rows)[2][kWarp]);

// mma.sync: this thread's part of c[16 x 8] += a[16 x 32] * b[8 x 32]^T.
void MultiplyFragments(bool is_signed, int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

// The same of floats, a[16 x 8 words] * b[8 x 8 words]^T: words of two float16 numbers, or of one in TF32.
void MultiplyFloatFragments(bool halves, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

}  // namespace lowbit::cuda::emulator
