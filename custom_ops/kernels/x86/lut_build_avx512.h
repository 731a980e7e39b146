// The vector operations of lut_build.h, 512 bits.
#pragma once

#include "kernels/x86/lut_build.h"
#include "kernels/x86/simd_avx512.h"

namespace lowbit {
namespace {

struct Bytes512 {
  using I = __m512i;
  static constexpr size_t kBytes = 64;
  static I Load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static void Store(uint8_t* p, I v) { _mm512_store_si512(p, v); }
  static I Set(uint8_t v) { return _mm512_set1_epi8(static_cast<char>(v)); }
  static I Add(I a, I b) { return _mm512_add_epi8(a, b); }
  static I Shuffle(I a, I index) { return _mm512_shuffle_epi8(a, index); }
  // `count` bytes, at most 16, in every lane.
  static I LoadQuad(const uint8_t* p, size_t count, const uint8_t* /*end*/) {
    return _mm512_broadcast_i32x4(_mm_maskz_loadu_epi8(First(count), p));
  }
  static I KeepFirst(I v, size_t count) {
    return _mm512_maskz_mov_epi8(0x0001000100010001u * uint64_t{First(count)}, v);
  }
  static I FirstLane(I v) { return _mm512_maskz_mov_epi32(0xf, v); }
  static I AddSums(I sums, I v) { return _mm512_dpbusd_epi32(sums, v, _mm512_set1_epi8(1)); }
  static int32_t Total(I sums) { return _mm512_reduce_add_epi32(sums); }

 private:
  static __mmask16 First(size_t count) { return static_cast<__mmask16>((1u << count) - 1); }
};

}  // namespace
}  // namespace lowbit
