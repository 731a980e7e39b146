// mma.sync on floats: float16 (sm_75 and later) and TF32 (sm_80 and later), summed in float32.
//
// An operand comes in words: two float16 numbers side by side along k, or one TF32 number. Word by word both kinds
// have one layout: a[16 rows x 8 words], b[8 columns x 8 words]; the thread `lane` of a warp holds of a the words
// lane % 4 of rows lane / 4 and lane / 4 + 8, then words lane % 4 + 4 of the same, of b words lane % 4 and
// lane % 4 + 4 of column lane / 4.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/halves.cuh"

namespace lowbit::cuda {

// Rounded to 11 bits, half away from zero.
__device__ __forceinline__ unsigned ToTf32(float v) {
#if __CUDA_ARCH__ >= 800
  unsigned word;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(v));
  return word;
#else
  return __float_as_uint(v);
#endif
}

// c[16x8] += a * b^T of float16.
__device__ __forceinline__ void MultiplyHalves(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                               unsigned b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  const unsigned b[2] = {b0, b1};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[k]));
  }
#endif
}

// c[16x8] += a * b^T of TF32. Code for GPUs that lack it is never launched.
__device__ __forceinline__ void MultiplyTf32(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

}  // namespace lowbit::cuda
