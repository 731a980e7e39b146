// wgmma on int8, on bits and on floats for the tile widths in use: d[64 x kN] += a[64 x 32] * b[kN x 32]^T by a
// warpgroup, both operands in shared memory in 128-byte swizzled rows of k, or a in registers; 32 bytes of bits are 256
// of them, 32 bytes of floats 16 float16 numbers or 8 in TF32. Thread t holds d[4 j + {0, 1}] = row
// t / 32 * 16 + t % 32 / 4, columns 8 j + t % 4 * 2 + {0, 1}, and d[4 j + {2, 3}] eight rows below: the
// fragment of mma.sync. Only for sm_90a.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/matrix_descriptors.cuh"

namespace lowbit::cuda {

__device__ __forceinline__ void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The sums belong to the asynchronous wgmma between two of these: no move of registers across.
template <int kCount>
__device__ __forceinline__ void HoldRegisters(int (&sums)[kCount]) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) asm volatile("" : "+r"(sums[j])::"memory");
}
template <int kCount>
__device__ __forceinline__ void HoldRegisters(float (&sums)[kCount]) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) asm volatile("" : "+f"(sums[j])::"memory");
}
#define LOWBIT_SUMS_4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define LOWBIT_SUMS_8(i) LOWBIT_SUMS_4(i), LOWBIT_SUMS_4(i + 4)
#define LOWBIT_SUMS_16(i) LOWBIT_SUMS_4(i), LOWBIT_SUMS_4(i + 4), LOWBIT_SUMS_4(i + 8), LOWBIT_SUMS_4(i + 12)
#define LOWBIT_SUMS_64(i) \
  LOWBIT_SUMS_16(i), LOWBIT_SUMS_16(i + 16), LOWBIT_SUMS_16(i + 32), LOWBIT_SUMS_16(i + 48)
#define LOWBIT_FLOATS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LOWBIT_FLOATS_16(i) \
  LOWBIT_FLOATS_4(i), LOWBIT_FLOATS_4(i + 4), LOWBIT_FLOATS_4(i + 8), LOWBIT_FLOATS_4(i + 12)
// As many operands of an instruction.
#define LOWBIT_OPERANDS_12 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"
#define LOWBIT_OPERANDS_16 LOWBIT_OPERANDS_12 ", %12, %13, %14, %15"
#define LOWBIT_OPERANDS_24 LOWBIT_OPERANDS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define LOWBIT_OPERANDS_32 \
  LOWBIT_OPERANDS_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LOWBIT_OPERANDS_40 LOWBIT_OPERANDS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define LOWBIT_OPERANDS_64                                                             \
  LOWBIT_OPERANDS_32                                                                   \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LOWBIT_OPERANDS_72 LOWBIT_OPERANDS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define LOWBIT_OPERANDS_128                                                                      \
  LOWBIT_OPERANDS_64                                                                             \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "           \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// d += a * b^T: the operands of a, b and what scales d follow those of d, `sums`; then what they are.
#define LOWBIT_WGMMA(n, sums, operands, ...)                                                      \
  if constexpr (kSigned) {                                                                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" sums "}, " operands ";" \
                 : __VA_ARGS__);                                                                  \
  } else {                                                                                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.u8.s8 {" sums "}, " operands ";" \
                 : __VA_ARGS__);                                                                  \
  }

template <int kN, bool kSigned>
struct Wgmma {
  static __device__ __forceinline__ void Multiply(int (&d)[kN / 2], uint64_t a, uint64_t b) {
    if constexpr (kN == 32) {
      LOWBIT_WGMMA(32, LOWBIT_OPERANDS_16, "%16, %17, 1", LOWBIT_SUMS_16(0) : "l"(a), "l"(b))
    } else if constexpr (kN == 64) {
      LOWBIT_WGMMA(64, LOWBIT_OPERANDS_32, "%32, %33, 1", LOWBIT_SUMS_16(0), LOWBIT_SUMS_16(16) : "l"(a),
                   "l"(b))
    } else if constexpr (kN == 128) {
      LOWBIT_WGMMA(128, LOWBIT_OPERANDS_64, "%64, %65, 1", LOWBIT_SUMS_64(0) : "l"(a), "l"(b))
    } else {
      static_assert(kN == 256);
      LOWBIT_WGMMA(256, LOWBIT_OPERANDS_128, "%128, %129, 1", LOWBIT_SUMS_64(0), LOWBIT_SUMS_64(64) : "l"(a),
                   "l"(b))
    }
  }
};

// As Wgmma::Multiply, a in registers: the fragment of mma.sync. Without kAdds, d need not be set before.
template <bool kSigned, bool kAdds = true, int kSums>
__device__ __forceinline__ void MultiplyRows(int (&d)[kSums], const unsigned (&a)[4], uint64_t b) {
  if constexpr (kSums == 16) {
    LOWBIT_WGMMA(32, LOWBIT_OPERANDS_16, "{%16, %17, %18, %19}, %20, %21", LOWBIT_SUMS_16(0) : "r"(a[0]),
                 "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0))
  } else {
    static_assert(kSums == 32);
    LOWBIT_WGMMA(64, LOWBIT_OPERANDS_32, "{%32, %33, %34, %35}, %36, %37", LOWBIT_SUMS_16(0),
                 LOWBIT_SUMS_16(16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0))
  }
}

// As Wgmma, of float16 numbers.
template <int kN>
struct WgmmaHalves {
  static __device__ __forceinline__ void Multiply(float (&d)[kN / 2], uint64_t a, uint64_t b) {
#define LOWBIT_WGMMA_HALVES(n, sums, operands, ...)                                           \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" sums "}, " operands \
               ", 1, 1, 1, 0, 0;"                                                             \
               : __VA_ARGS__                                                                  \
               : "l"(a), "l"(b))
    if constexpr (kN == 64) {
      LOWBIT_WGMMA_HALVES(64, LOWBIT_OPERANDS_32, "%32, %33", LOWBIT_FLOATS_16(0), LOWBIT_FLOATS_16(16));
    } else {
      static_assert(kN == 128);
      LOWBIT_WGMMA_HALVES(128, LOWBIT_OPERANDS_64, "%64, %65", LOWBIT_FLOATS_16(0), LOWBIT_FLOATS_16(16),
                          LOWBIT_FLOATS_16(32), LOWBIT_FLOATS_16(48));
    }
#undef LOWBIT_WGMMA_HALVES
  }
};

// As Wgmma::Multiply, of bits: d[64 x kN] += the population counts of a AND b. Where it does not add, d need not be set
// before.
template <int kN>
__device__ __forceinline__ void MultiplyBits(int (&d)[kN / 2], uint64_t a, uint64_t b, int adds = 1) {
#define LOWBIT_WGMMA_BITS(n, sums, operands, flag, ...)                                               \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " flag                                         \
               ", 0;\n"                                                                               \
               "wgmma.mma_async.sync.aligned.m64n" #n "k256.s32.b1.b1.and.popc {" sums "}, " operands \
               ", adds;\n}"                                                                           \
               : __VA_ARGS__                                                                          \
               : "l"(a), "l"(b), "r"(adds))
  if constexpr (kN == 24) {
    LOWBIT_WGMMA_BITS(24, LOWBIT_OPERANDS_12, "%12, %13", "%14", LOWBIT_SUMS_8(0), LOWBIT_SUMS_4(8));
  } else if constexpr (kN == 48) {
    LOWBIT_WGMMA_BITS(48, LOWBIT_OPERANDS_24, "%24, %25", "%26", LOWBIT_SUMS_16(0), LOWBIT_SUMS_8(16));
  } else if constexpr (kN == 80) {
    LOWBIT_WGMMA_BITS(80, LOWBIT_OPERANDS_40, "%40, %41", "%42", LOWBIT_SUMS_16(0), LOWBIT_SUMS_16(16),
                      LOWBIT_SUMS_8(32));
  } else {
    static_assert(kN == 144);
    LOWBIT_WGMMA_BITS(144, LOWBIT_OPERANDS_72, "%72, %73", "%74", LOWBIT_SUMS_64(0), LOWBIT_SUMS_8(64));
  }
#undef LOWBIT_WGMMA_BITS
}

// As MultiplyRows, of floats: float16 numbers or such in TF32.
template <bool kHalves, bool kAdds = true, int kSums>
__device__ __forceinline__ void MultiplyFloatRows(float (&d)[kSums], const unsigned (&a)[4], uint64_t b) {
#define LOWBIT_WGMMA_FLOATS(n, sums, operands, ...)                                                          \
  if constexpr (kHalves) {                                                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" sums "}, " operands ", 1, 1, 0;" \
                 : __VA_ARGS__                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0));                  \
  } else {                                                                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k8.f32.tf32.tf32 {" sums "}, " operands ", 1, 1;"   \
                 : __VA_ARGS__                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0));                  \
  }
  if constexpr (kSums == 32) {
    LOWBIT_WGMMA_FLOATS(64, LOWBIT_OPERANDS_32, "{%32, %33, %34, %35}, %36, %37", LOWBIT_FLOATS_16(0),
                        LOWBIT_FLOATS_16(16))
  } else {
    static_assert(kSums == 64);
    LOWBIT_WGMMA_FLOATS(128, LOWBIT_OPERANDS_64, "{%64, %65, %66, %67}, %68, %69", LOWBIT_FLOATS_16(0),
                        LOWBIT_FLOATS_16(16), LOWBIT_FLOATS_16(32), LOWBIT_FLOATS_16(48))
  }
#undef LOWBIT_WGMMA_FLOATS
}

#undef LOWBIT_WGMMA
#undef LOWBIT_OPERANDS_128
#undef LOWBIT_OPERANDS_72
#undef LOWBIT_OPERANDS_40
#undef LOWBIT_OPERANDS_64
#undef LOWBIT_OPERANDS_32
#undef LOWBIT_OPERANDS_24
#undef LOWBIT_OPERANDS_16
#undef LOWBIT_OPERANDS_12
#undef LOWBIT_FLOATS_16
#undef LOWBIT_FLOATS_4
#undef LOWBIT_SUMS_64
#undef LOWBIT_SUMS_16
#undef LOWBIT_SUMS_8
#undef LOWBIT_SUMS_4

}  // namespace lowbit::cuda
