// A vector of 16 bytes holds 8 / bits vectors of codes: byte i the codes i, 16 + i, 32 + i ... of a group,
// from its low bits on, so that a shift and a mask bring out 16 codes in their order.
#include "kernels/arm/gemm_panel.h"

#include <arm_neon.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/common/inline.h"

namespace lowbit {
namespace {

constexpr size_t kVector = 16;

// Codes [16 part, 16 part + 16) of a group.
template <int kBits, int kPart>
inline LOWBIT_ALWAYS_INLINE uint8x16_t Part(uint8x16_t group) {
  constexpr int kShift = kBits * kPart;
  uint8x16_t codes = group;
  if constexpr (kShift > 0) codes = vshrq_n_u8(codes, kShift);
  if constexpr (kShift + kBits < 8) codes = vandq_u8(codes, vdupq_n_u8((1 << kBits) - 1));
  return codes;
}

// Adds `least` to the codes of a vector, and stores them.
template <GemmForm kForm, int kBits>
inline LOWBIT_ALWAYS_INLINE void Store(uint8x16_t codes, int8x16_t least, uint8_t* to) {
  if constexpr (kForm == GemmForm::kPairs) {
    // A pair is the sum of its halves: a negative low one borrows from the high one.
    vst1q_u16(reinterpret_cast<uint16_t*>(to),
              vaddq_u16(vreinterpretq_u16_u8(codes), vreinterpretq_u16_s8(least)));
    return;
  }
  int8x16_t values = vreinterpretq_s8_u8(codes);
  if constexpr (kBits < 8) values = vaddq_s8(values, least);
  if constexpr (kForm == GemmForm::kWords) {
    auto* words = reinterpret_cast<int16_t*>(to);
    vst1q_s16(words, vmovl_s8(vget_low_s8(values)));
    vst1q_s16(words + 8, vmovl_high_s8(values));
  } else {
    vst1q_s8(reinterpret_cast<int8_t*>(to), values);
  }
}

template <GemmForm kForm, int kBits>
void Unpack(const uint8_t* panel, size_t codes, int32_t least, uint8_t* to) {
  // Some vectors at a time, which hide each other's latencies.
  constexpr int kVectors = kBits == 8 ? 4 : 2;
  constexpr size_t kCodes = kVector * 8 / kBits;  // of a vector
  static_assert(kVectors * kCodes <= kGemmPanelGroup && kVectors * kVector <= kGemmOverread);
  const auto offset = kForm == GemmForm::kPairs
                          ? vreinterpretq_s8_s16(vdupq_n_s16(static_cast<int16_t>(257 * least)))
                          : vdupq_n_s8(static_cast<int8_t>(least));
  for (size_t done = 0; done < codes; done += kVectors * kCodes) {
    uint8x16_t v[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i, panel += kVector) v[i] = vld1q_u8(panel);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i, to += kCodes * CodeBytes(kForm)) {
      [&]<int... kPart>(std::integer_sequence<int, kPart...>) LOWBIT_ALWAYS_INLINE {
        (Store<kForm, kBits>(Part<kBits, kPart>(v[i]), offset, to + kPart * kVector * CodeBytes(kForm)), ...);
      }(std::make_integer_sequence<int, 8 / kBits>());
    }
  }
}

template <GemmForm kForm>
GemmPanelUnpack UnpackOf(int bits) {
  if (bits == 2) return &Unpack<kForm, 2>;
  if (bits == 4) return &Unpack<kForm, 4>;
  if constexpr (kForm == GemmForm::kWords) return &Unpack<kForm, 8>;
  return nullptr;
}

}  // namespace

int GemmPanelBits(int32_t lo, int32_t hi) {
  const int32_t range = std::max(hi, 0) - std::min(lo, 0);
  return range < 4 ? 2 : range < 16 ? 4 : 8;
}

void PackGemmPanel(GemmForm form, int bits, const int8_t* from, size_t codes, int32_t least, uint8_t* to) {
  if (bits == 8) {
    std::memcpy(to, from, codes);
    if (form != GemmForm::kPairs) return;
    for (size_t i = 0; i + 1 < codes; i += 2) {
      const auto pair = static_cast<uint16_t>(from[i] + 256 * from[i + 1]);
      std::memcpy(to + i, &pair, 2);
    }
    return;
  }
  const auto width = static_cast<size_t>(bits);
  const size_t group = kVector * 8 / width;
  std::memset(to, 0, GemmPanelBytes(codes, bits));
  for (size_t i = 0; i < codes; ++i) {
    const size_t in_group = i % group;
    to[i / group * kVector + in_group % kVector] |=
        static_cast<uint8_t>((from[i] - least) << (in_group / kVector * width));
  }
}

GemmPanelUnpack GemmPanelUnpackFor(GemmForm form, int bits) {
  switch (form) {
    case GemmForm::kBytes:
      return UnpackOf<GemmForm::kBytes>(bits);
    case GemmForm::kWords:
      return UnpackOf<GemmForm::kWords>(bits);
    default:
      return UnpackOf<GemmForm::kPairs>(bits);
  }
}

}  // namespace lowbit
