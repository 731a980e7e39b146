// 128-bit vectors for the templates of kernels/common; the same names as kernels/x86/simd_*.h.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lowbit {
namespace {

struct Neon {
  using I = int32x4_t;
  using F = float32x4_t;
  static constexpr int kLanes = 4;

  static I Load(const void* p) { return vld1q_s32(static_cast<const int32_t*>(p)); }
  static void Store(void* p, I v) { vst1q_s32(static_cast<int32_t*>(p), v); }
  static F LoadF(const float* p) { return vld1q_f32(p); }
  static void StoreF(float* p, F v) { vst1q_f32(p, v); }
  static I Set(int32_t v) { return vdupq_n_s32(v); }
  static F SetF(float v) { return vdupq_n_f32(v); }

  static I Add(I a, I b) { return vaddq_s32(a, b); }
  static I Sub(I a, I b) { return vsubq_s32(a, b); }
  static I Mul(I a, I b) { return vmulq_s32(a, b); }
  static I Xor(I a, I b) { return veorq_s32(a, b); }
  // count + (a > b ? 1 : 0); a comparison gives -1 for true.
  static I CountGreater(I count, I a, I b) {
    return vsubq_s32(count, vreinterpretq_s32_u32(vcgtq_s32(a, b)));
  }

  static F ToFloat(I v) { return vcvtq_f32_s32(v); }
  static I RoundToInt(F v) { return vcvtnq_s32_f32(v); }
  static F Rint(F v) { return vrndnq_f32(v); }
  static F AddF(F a, F b) { return vaddq_f32(a, b); }
  static F SubF(F a, F b) { return vsubq_f32(a, b); }
  static F MulF(F a, F b) { return vmulq_f32(a, b); }
  static F DivF(F a, F b) { return vdivq_f32(a, b); }
  // v * 2^n, a normal number; the low bits of `power` are n.
  static F TimesPowerOf2(F v, F power) {
    return vreinterpretq_f32_s32(
        vaddq_s32(vreinterpretq_s32_f32(v), vshlq_n_s32(vreinterpretq_s32_f32(power), 23)));
  }
  // The second operand where one is NaN or both are zeros, as the templates expect; FMIN and FMAX would
  // return NaN and +0.
  static F MinF(F a, F b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  static F MaxF(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  // The first `count` of `size` bytes; the others are anything.
  static void CopyBytes(uint8_t* to, const uint8_t* from, size_t /*size*/, size_t count) {
    std::memcpy(to, from, count);
  }
  static constexpr bool kHasFma = true, kAddsFewSums = false;
  static F FmaF(F a, F b, F c) { return vfmaq_f32(c, a, b); }   // a * b + c
  static F FnmaF(F a, F b, F c) { return vfmsq_f32(c, a, b); }  // c - a * b

  static I LoadU8(const uint8_t* p) {
    uint32_t bytes;
    std::memcpy(&bytes, p, 4);
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes)))));
  }
  static I LoadS8(const uint8_t* p) {
    uint32_t bytes;
    std::memcpy(&bytes, p, 4);
    return vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(bytes))));
  }
  static void StoreU8(uint8_t* p, I v) {
    const uint8x16_t bytes = vreinterpretq_u8_s32(v);
    const uint8x16_t words = vuzp1q_u8(bytes, bytes);
    const uint32_t low = vgetq_lane_u32(vreinterpretq_u32_u8(vuzp1q_u8(words, words)), 0);
    std::memcpy(p, &low, 4);
  }
  struct PackRange {
    int16x8_t zero;
    uint8x16_t lo, hi, flip;
    PackRange(int16_t zero_value, uint8_t lo_value, uint8_t hi_value, uint8_t flip_value)
        : zero(vdupq_n_s16(zero_value)),
          lo(vdupq_n_u8(lo_value)),
          hi(vdupq_n_u8(hi_value)),
          flip(vdupq_n_u8(flip_value)) {}
  };
  using Packed = uint8x16_t;
  static Packed PackClipped(I v0, I v1, I v2, I v3, const PackRange& range) {
    const int16x8_t low = vqmovn_high_s32(vqmovn_s32(v0), v1), high = vqmovn_high_s32(vqmovn_s32(v2), v3);
    uint8x16_t bytes =
        vqmovun_high_s16(vqmovun_s16(vqaddq_s16(low, range.zero)), vqaddq_s16(high, range.zero));
    bytes = vminq_u8(vmaxq_u8(bytes, range.lo), range.hi);
    return veorq_u8(bytes, range.flip);
  }
  static void StoreAll(uint8_t* p, Packed v) { vst1q_u8(p, v); }
  template <int i>
  static void StorePair(uint8_t* p, Packed v) {
    vst1_u8(p, i == 0 ? vget_low_u8(v) : vget_high_u8(v));
  }
  template <int i>
  static void StoreOne(uint8_t* p, Packed v) {
    const uint32_t bytes = vgetq_lane_u32(vreinterpretq_u32_u8(v), i);
    std::memcpy(p, &bytes, 4);
  }
  template <int i>
  static void StorePart(uint8_t* p, Packed v, size_t count) {
    const uint32_t bytes = vgetq_lane_u32(vreinterpretq_u32_u8(v), i);
    std::memcpy(p, &bytes, count);
  }
};

}  // namespace
}  // namespace lowbit
