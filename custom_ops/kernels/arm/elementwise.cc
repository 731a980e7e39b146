#include "kernels/arm/elementwise.h"

#include <arm_neon.h>

#include "kernels/arm/simd_neon.h"
#include "kernels/common/elementwise_impl.h"

namespace lowbit {
namespace {

uint8x16_t U8(int32x4_t v) { return vreinterpretq_u8_s32(v); }
int8x16_t S8(int32x4_t v) { return vreinterpretq_s8_s32(v); }
int16x8_t S16(int32x4_t v) { return vreinterpretq_s16_s32(v); }

// The byte operations that the templates need beside simd_neon.h.
struct NeonBytes : Neon {
  using Half = NeonBytes;  // nothing narrower
  static constexpr int kBytes = 16;

  static I From(uint8x16_t v) { return vreinterpretq_s32_u8(v); }
  static I From(int8x16_t v) { return vreinterpretq_s32_s8(v); }
  static I From(int16x8_t v) { return vreinterpretq_s32_s16(v); }

  static I SetB(uint8_t v) { return From(vdupq_n_u8(v)); }
  static I MaxU8(I a, I b) { return From(vmaxq_u8(U8(a), U8(b))); }
  static I MinU8(I a, I b) { return From(vminq_u8(U8(a), U8(b))); }
  static I MaxS8(I a, I b) { return From(vmaxq_s8(S8(a), S8(b))); }
  static I UnpackLow8(I a, I b) { return From(vzip1q_u8(U8(a), U8(b))); }
  static I UnpackHigh8(I a, I b) { return From(vzip2q_u8(U8(a), U8(b))); }
  // 16 pixels of three planes to a0 b0 c0 a1 b1 c1 ...
  static void StoreInterleaved3(const uint8_t* a, const uint8_t* b, const uint8_t* c, uint8_t* y) {
    vst3q_u8(y, {{vld1q_u8(a), vld1q_u8(b), vld1q_u8(c)}});
  }

  // Four lookups of 64 entries: TBL gives 0 and TBX leaves what is there where the index, which sinks by 64
  // modulo 256, lies outside.
  struct ByteTable {
    explicit ByteTable(const uint8_t* table)
        : quarters{vld1q_u8_x4(table), vld1q_u8_x4(table + 64), vld1q_u8_x4(table + 128),
                   vld1q_u8_x4(table + 192)} {}
    I operator()(I codes) const {
      const uint8x16_t quarter = vdupq_n_u8(64);
      uint8x16_t index = U8(codes);
      uint8x16_t out = vqtbl4q_u8(quarters[0], index);
      for (int i = 1; i < 4; ++i) {
        index = vsubq_u8(index, quarter);
        out = vqtbx4q_u8(out, quarters[i], index);
      }
      return From(out);
    }
    uint8x16x4_t quarters[4];
  };

  // count + (a >= b ? 1 : 0) and count + (a >= b ? step : 0); false for NaN. A true comparison is -1.
  static I CountGeF(I count, F a, F b) { return vsubq_s32(count, vreinterpretq_s32_u32(vcgeq_f32(a, b))); }
  static I StepGeF(I count, I step, F a, F b) {
    return vaddq_s32(count, vandq_s32(step, vreinterpretq_s32_u32(vcgeq_f32(a, b))));
  }
  static F Gather(const float* table, I index) {
    F values = vld1q_dup_f32(table + vgetq_lane_s32(index, 0));
    values = vld1q_lane_f32(table + vgetq_lane_s32(index, 1), values, 1);
    values = vld1q_lane_f32(table + vgetq_lane_s32(index, 2), values, 2);
    return vld1q_lane_f32(table + vgetq_lane_s32(index, 3), values, 3);
  }

  static I Add16(I a, I b) { return From(vaddq_s16(S16(a), S16(b))); }
  static I LoadU8As16(const uint8_t* p) { return From(vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p)))); }
  static I LoadS8As16(const uint8_t* p) { return From(vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)))); }

  static I SetWords(int16_t v) { return From(vdupq_n_s16(v)); }
  static I AddSaturated16(I a, I b) { return From(vqaddq_s16(S16(a), S16(b))); }
  static I PackWords(I a, I b) { return From(vqmovn_high_s32(vqmovn_s32(a), b)); }
  static I PackBytes(I a, I b) { return From(vqmovun_high_s16(vqmovun_s16(S16(a)), S16(b))); }
  static I InOrder(I bytes) { return bytes; }
  // The first kLanes bytes.
  static void StoreQuarter(uint8_t* p, I v) {
    const int32_t bytes = vgetq_lane_s32(v, 0);
    std::memcpy(p, &bytes, 4);
  }
};

}  // namespace

const ElementwiseKernels& ElementwiseNeon() {
  static constexpr ElementwiseKernels kernels = MakeKernels<NeonBytes>("neon");
  return kernels;
}

}  // namespace lowbit
