// mma.sync on int8: sm_80 and later m16n8k32, sm_75 the same out of m8n8k16. And on bits, from sm_80 on.
#pragma once

#include <cstdint>

namespace lowbit::cuda {

__device__ __forceinline__ void LoadMatrices(uint32_t address, unsigned (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c[16x8] += a[16x32] * b[8x32]^T, a unsigned or signed, b signed. Sums wrap.
template <bool kSigned>
__device__ __forceinline__ void Multiply(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kSigned) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#else
  // The same fragments: rows 0..7 are a[0], a[2], rows 8..15 a[1], a[3]; k 0..15 comes first in each pair.
  const unsigned b[2] = {b0, b1};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if constexpr (kSigned) {
        asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+r"(c[2 * half]), "+r"(c[2 * half + 1])
                     : "r"(a[2 * k + half]), "r"(b[k]));
      } else {
        asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+r"(c[2 * half]), "+r"(c[2 * half + 1])
                     : "r"(a[2 * k + half]), "r"(b[k]));
      }
    }
  }
#endif
}

}  // namespace lowbit::cuda
