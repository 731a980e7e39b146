// What CUDA C++ adds to C++, for the emulated GPU; included before each source of a kernel.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/cuda/emulator/machine.h"

#define __CUDACC__
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL
#undef __shared__
#define __shared__ static thread_local
#undef __grid_constant__
#define __grid_constant__
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __forceinline__
#define __forceinline__ inline
#define __builtin_assume(condition) static_cast<void>(0)

#define threadIdx (::lowbit::cuda::emulator::current->index)
#define blockIdx (::lowbit::cuda::emulator::current->block->index)
#define blockDim (::lowbit::cuda::emulator::current->block->cluster->block_size)
#define gridDim (::lowbit::cuda::emulator::current->block->cluster->grid_size)

// Kernels may use all the shared memory there is, in clusters of any size.
template <typename... Params>
cudaError_t cudaFuncSetAttribute(void (*)(Params...), cudaFuncAttribute, int) {
  return cudaSuccess;
}

using std::max;
using std::min;

inline void __syncthreads() { ::lowbit::cuda::emulator::SyncBlock(); }
inline void __syncwarp(unsigned = ~0u) { ::lowbit::cuda::emulator::Exchange(0); }
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return ::lowbit::cuda::emulator::Exchange(value)[lane % 32];
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return ::lowbit::cuda::emulator::Exchange(value)[(::lowbit::cuda::emulator::current->number % 32) ^ mask];
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int delta) {
  const int lane = ::lowbit::cuda::emulator::current->number % 32;
  return ::lowbit::cuda::emulator::Exchange(value)[lane >= delta ? lane - delta : lane];
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float v) { return 1.0f / v; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __float2int_rn(float v) {  // clips; of NaN 0
  if (std::isnan(v)) return 0;
  if (v >= 2147483648.0f) return INT32_MAX;
  if (v <= -2147483648.0f) return INT32_MIN;
  return static_cast<int>(std::nearbyint(v));
}
inline int __float_as_int(float v) { return std::bit_cast<int>(v); }
inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
inline float __int_as_float(int v) { return std::bit_cast<float>(v); }
inline float __uint_as_float(unsigned v) { return std::bit_cast<float>(v); }
inline int __clz(int v) { return std::countl_zero(static_cast<unsigned>(v)); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i)
    out |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  return out;
}
inline unsigned __vadd4(unsigned a, unsigned b) {
  unsigned out = 0;
  for (int i = 0; i < 32; i += 8) out |= ((a >> i) + (b >> i) & 255) << i;
  return out;
}
template <typename T>
unsigned LargerHalves(unsigned a, unsigned b) {
  unsigned out = 0;
  for (int i = 0; i < 32; i += 16)
    out |= static_cast<unsigned>(static_cast<uint16_t>(max(static_cast<T>(a >> i), static_cast<T>(b >> i))))
           << i;
  return out;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) { return LargerHalves<uint16_t>(a, b); }
inline unsigned __vmaxs2(unsigned a, unsigned b) { return LargerHalves<int16_t>(a, b); }
// By halves: the sum, wrapped, no more than c, no less than 0.
inline unsigned __viaddmin_s16x2_relu(unsigned a, unsigned b, unsigned c) {
  unsigned out = 0;
  for (int i = 0; i < 32; i += 16) {
    const int sum = static_cast<int16_t>((a >> i) + (b >> i)), most = static_cast<int16_t>(c >> i);
    out |= static_cast<unsigned>(max(min(sum, most), 0)) << i;
  }
  return out;
}
inline int __vimax3_s32(int a, int b, int c) { return max(max(a, b), c); }
