// One lane in plain C++; the names of simd_avx512.h that epilogue.h needs for accumulators in memory.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lowbit {
namespace {

struct Scalar {
  using I = int32_t;
  using F = float;
  static constexpr int kLanes = 1;
  static constexpr bool kHasFma = false, kAddsFewSums = false;

  static I Load(const void* p) {
    I v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static F LoadF(const float* p) { return *p; }
  static void StoreF(float* p, F v) { *p = v; }
  static I Set(int32_t v) { return v; }
  static F SetF(float v) { return v; }

  static I Add(I a, I b) { return static_cast<I>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b)); }
  static I Sub(I a, I b) { return static_cast<I>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b)); }
  static I Xor(I a, I b) { return a ^ b; }
  static I CountGreater(I count, I a, I b) { return count + (a > b ? 1 : 0); }

  static F ToFloat(I v) { return static_cast<float>(v); }
  static I RoundToInt(F v) { return static_cast<int32_t>(std::rint(v)); }
  static F Rint(F v) { return std::rint(v); }
  static F AddF(F a, F b) { return a + b; }
  static F MulF(F a, F b) { return a * b; }
  static F DivF(F a, F b) { return a / b; }
  // v * 2^n, a normal number; the low bits of `power` are n.
  static F TimesPowerOf2(F v, F power) {
    return std::bit_cast<float>(std::bit_cast<uint32_t>(v) + (std::bit_cast<uint32_t>(power) << 23));
  }
  // The second operand when either is NaN, as the instructions.
  static F MinF(F a, F b) { return a < b ? a : b; }
  static F MaxF(F a, F b) { return a > b ? a : b; }

  static I LoadU8(const uint8_t* p) { return *p; }
  static I LoadS8(const uint8_t* p) { return static_cast<int8_t>(*p); }
  static void StoreU8(uint8_t* p, I v) { *p = static_cast<uint8_t>(v); }
};

}  // namespace
}  // namespace lowbit
