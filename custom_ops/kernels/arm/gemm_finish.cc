#include "kernels/arm/gemm_finish.h"

#include <arm_neon.h>

#include <algorithm>
#include <type_traits>

#include "kernels/arm/requantize8.h"
#include "kernels/arm/simd_neon.h"
#include "kernels/common/inline.h"
#include "kernels/common/tile_finish.h"

namespace lowbit {
namespace {

// Any epilogue: kVectors vectors of channels, kPixels pixels at a time.
template <int kPixels, int kVectors>
void FinishPixels(const TileOutput& output, const TileSums& s, size_t first) {
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
void Finish(const TileOutput& output, const TileSums& s) {
  size_t p = 0;
  for (; p + kPixels <= s.pixels; p += kPixels) FinishPixels<kPixels, kVectors>(output, s, p);
  for (; p < s.pixels; ++p) FinishPixels<1, kVectors>(output, s, p);
}

// 8 channels by Requantize8 or RequantizeResidual8, kMost pixels at a time. kPitch: of the sums where it is
// known, which spares the addresses, else 0.
template <class Requantize, int kMost, size_t kPitch>
void FinishRequantize8(const TileOutput& output, const TileSums& s, size_t channel) {
  const EpilogueView& e = *output.epilogue;
  const Requantize requantize(e, e.scale + s.channel + channel);
  const size_t pitch = output.pixel_step * e.channels;
  const size_t index = output.first_pixel * e.channels + s.pixel * pitch + s.channel + channel;
  const size_t sums_pitch = kPitch != 0 ? kPitch : s.pitch;
  const int32_t* sums = s.sums + channel;
  uint8_t* y = static_cast<uint8_t*>(output.y) + index;
  const uint8_t* residual = e.has_residual ? output.residual + index : nullptr;
  const auto finish = [&]<int kPixels>() LOWBIT_ALWAYS_INLINE {
    int32x4_t acc[kPixels][2];
#pragma GCC unroll 8
    for (int p = 0; p < kPixels; ++p) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) acc[p][v] = vld1q_s32(sums + static_cast<size_t>(p) * sums_pitch + v * 4);
    }
    if constexpr (std::is_same_v<Requantize, Requantize8>) {
      requantize.template Store<kPixels>(acc, y, pitch);
    } else {
      requantize.template Store<kPixels>(acc, residual, y, pitch);
      residual += kPixels * pitch;
    }
    sums += kPixels * sums_pitch;
    y += kPixels * pitch;
  };
  size_t left = s.pixels;
  for (; left >= kMost; left -= kMost) finish.template operator()<kMost>();
  if constexpr (kMost > 4) {
    if (left >= 4) {
      finish.template operator()<4>();
      left -= 4;
    }
  }
  for (; left > 0; --left) finish.template operator()<1>();
}

template <class Requantize, int kMost>
void FinishRequantize(const TileOutput& output, const TileSums& s) {
  for (size_t c = 0; c < s.count; c += 8) {
    switch (s.pitch) {
      case 8:
        FinishRequantize8<Requantize, kMost, 8>(output, s, c);
        break;
      case 16:
        FinishRequantize8<Requantize, kMost, 16>(output, s, c);
        break;
      case 32:
        FinishRequantize8<Requantize, kMost, 32>(output, s, c);
        break;
      default:
        FinishRequantize8<Requantize, kMost, 0>(output, s, c);
        break;
    }
  }
}

constexpr size_t kMaxChannels = 16;

void FinishAny(const TileOutput& output, const TileSums& s) {
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

}  // namespace

void AddRowSums(const TileSums& s, const int32_t* row_sums, const int32_t* weight) {
  for (size_t p = 0; p < s.pixels; ++p) {
    for (size_t c = 0; c < s.pitch; c += 4) {
      int32_t* to = s.sums + p * s.pitch + c;
      vst1q_s32(to, vmlaq_n_s32(vld1q_s32(to), vld1q_s32(weight + c), row_sums[p]));
    }
  }
}

void FinishSums(const TileOutput& output, const TileSums& s) {
  const EpilogueView& e = *output.epilogue;
  if (s.count % 8 == 0) {
    if (e.pack_clips && !e.has_residual) return FinishRequantize<Requantize8, 8>(output, s);
    if (RequantizeResidual8::Takes(e)) return FinishRequantize<RequantizeResidual8, 4>(output, s);
  }
  for (size_t c = 0; c < s.count; c += kMaxChannels) {
    TileSums part = s;
    part.sums += c;
    part.channel += c;
    part.count = std::min(s.count - c, kMaxChannels);
    FinishAny(output, part);
  }
}

}  // namespace lowbit
