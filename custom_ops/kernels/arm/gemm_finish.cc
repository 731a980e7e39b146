#include "kernels/arm/gemm_finish.h"

#include <arm_neon.h>

#include "kernels/arm/simd_neon.h"
#include "kernels/common/tile_finish.h"

namespace lowbit {
namespace {

// kVectors vectors of channels, kPixels pixels at a time: enough conversions side by side that none waits for
// another.
template <int kPixels, int kVectors>
void FinishPixels(const TileOutput& output, const GemmSums& s, size_t first) {
  int32x4_t acc[kPixels][kVectors];
#pragma GCC unroll 4
  for (int p = 0; p < kPixels; ++p) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      acc[p][v] = vld1q_s32(s.sums + (first + static_cast<size_t>(p)) * s.pitch + v * 4);
  }
  FinishRegisters<Neon, kPixels, kVectors>(output, s.pixel + first, s.channel, s.count, acc);
}

template <int kPixels, int kVectors>
void Finish(const TileOutput& output, const GemmSums& s) {
  size_t p = 0;
  for (; p + kPixels <= s.pixels; p += kPixels) FinishPixels<kPixels, kVectors>(output, s, p);
  for (; p < s.pixels; ++p) FinishPixels<1, kVectors>(output, s, p);
}

}  // namespace

void AddRowSums(const GemmSums& s, const int32_t* row_sums, const int32_t* weight) {
  for (size_t p = 0; p < s.pixels; ++p) {
    for (size_t c = 0; c < s.pitch; c += 4) {
      int32_t* to = s.sums + p * s.pitch + c;
      vst1q_s32(to, vmlaq_n_s32(vld1q_s32(to), vld1q_s32(weight + c), row_sums[p]));
    }
  }
}

void FinishSums(const TileOutput& output, const GemmSums& s) {
  switch ((s.count + 3) / 4) {
    case 1:
      return Finish<4, 1>(output, s);
    case 2:
      return Finish<4, 2>(output, s);
    case 3:
      return Finish<4, 3>(output, s);
    default:
      return Finish<2, 4>(output, s);
  }
}

}  // namespace lowbit
