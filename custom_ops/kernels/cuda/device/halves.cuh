// Float16 numbers, two to a word.
#pragma once

namespace lowbit::cuda {

// Both rounded to the nearest float16, half to even; beyond 65504 infinite.
__device__ __forceinline__ unsigned PackHalves(float low, float high) {
  unsigned word;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
  asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
      : "=r"(word)
      : "f"(low), "f"(high));
#endif
  return word;
}

// The same two as float32.
__device__ __forceinline__ float2 UnpackHalves(unsigned word) {
  float2 v;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(word));
  return v;
}

}  // namespace lowbit::cuda
