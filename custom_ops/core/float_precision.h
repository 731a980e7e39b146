// How products of float32 tensors are computed where a device has another way than one by one in float32.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace lowbit {

enum class FloatPrecision : uint8_t {
  kFloat32,   // products and sums in float32
  kWinograd,  // the same, of 3x3 windows those of transformed pixels and weights
  k3xTf32,    // operands as two numbers of 11 bits each, their product without that of the lower ones
  kTf32,      // operands rounded to 11 bits
  kFloat16,   // operands rounded to float16
};
inline constexpr FloatPrecision kFloatPrecisions[] = {FloatPrecision::kFloat32, FloatPrecision::kWinograd,
                                                      FloatPrecision::k3xTf32, FloatPrecision::kTf32,
                                                      FloatPrecision::kFloat16};
constexpr bool UsesTensorCores(FloatPrecision precision) {
  return precision != FloatPrecision::kFloat32 && precision != FloatPrecision::kWinograd;
}

inline const char* NameOf(FloatPrecision precision) {
  constexpr const char* kNames[] = {"float32", "winograd", "3xtf32", "tf32", "float16"};
  return kNames[static_cast<int>(precision)];
}

// To 11 bits, half away from zero, as Tensor Cores' conversion does.
inline float RoundToTf32(float v) {
  constexpr uint32_t kDropped = (1u << 13) - 1;
  const auto bits = std::bit_cast<uint32_t>(v);
  return std::isfinite(v) ? std::bit_cast<float>((bits + kDropped / 2 + 1) & ~kDropped) : v;
}

// The bits of the nearest float16 number, of two the even one; infinity from 65520 on.
inline uint16_t ToHalf(float v) {
  constexpr uint32_t kSign = 0x80000000u, kInfinity = 0x7F800000u, kTooLarge = 0x477FF000u,
                     kNormal = 0x38800000u;
  const auto bits = std::bit_cast<uint32_t>(v);
  const uint32_t sign = (bits & kSign) >> 16, size = bits & ~kSign;
  const auto with_sign = [&](uint32_t half) { return static_cast<uint16_t>(sign | half); };
  if (size > kInfinity) return with_sign(0x7E00);
  if (size >= kTooLarge) return with_sign(0x7C00);
  // Neighbours of 0.5 are 2^-24 apart, as float16's smallest numbers are.
  if (size < kNormal)
    return with_sign(std::bit_cast<uint32_t>(std::fabs(v) + 0.5f) - std::bit_cast<uint32_t>(0.5f));
  return with_sign((size + 0xFFF + (size >> 13 & 1) - (kNormal - 0x00800000u)) >> 13);
}
inline float FromHalf(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const float size = exponent == 0    ? std::ldexp(static_cast<float>(mantissa), -24)
                     : exponent == 31 ? (mantissa == 0 ? INFINITY : NAN)
                                      : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  return (half & 0x8000) != 0 ? -size : size;
}

}  // namespace lowbit
