// Requantization of sums that lie in memory, pixel after pixel: what is constant of the channels stays in registers.
// The codes are those of RequantizeTile (kernels/common/epilogue.h), of which the bounds are proven: no value before
// its last rounding leaves int32, so that clipping bytes is clipping codes. For 64 outputs there are
//
//   rising      an addition, a multiply-add and a conversion for each vector, three packs and a permutation: 16
//               operations. Codes begin at the zero point, as behind a ReLU. To the sum are added its bias and the bits
//               of 2^23, both at once: as a float that is 2^23 + acc. fma(2^23 + acc, scale, -2^23 * scale) is rounded
//               once, and 2^23 * scale is a float: it is acc * scale rounded, the definition's product. Why accumulators
//               outside [0, 2^23) do no harm: EpilogueTables::Rises.
//   products    20: f32(acc) is one more operation
//   sums        of a product and a residual, two roundings. rint(clip(v)) is clip(v + M) - M, with M = 1.5 * 2^23 and
//               M + lo, M + hi as bounds: where v is small M + v is rounded to an integer, half to even as M is even,
//               and larger ones are clipped. A residual's code r without a sign is the bits of 2^23 + r; less
//               2^23 + zero point, as floats, it is r - zero point, exactly.
//   line        of a product and a residual whose second rounding is that of a line (residual_line.h): 52 operations,
//               not 72
//
// and five more where packs do not clip as the codes are clipped.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/divide.h"
#include "kernels/common/tile_output.h"

namespace lowbit {
namespace {

enum class RowForm : uint8_t { kRising, kProducts, kSums, kLine };  // the last two with residuals

// Of channels [channel, channel + count) of y, whose bias is the first one there.
struct RequantizedRows {
  const TileOutput* output;
  size_t channel, count;
  const int32_t* bias;
};

// Pixels [pixel, pixel + rows), whose sums begin `pitch` numbers apart. `residual` is the first pixel's, from one to
// the next residual_pitch bytes; whole vectors are read.
struct StoredRows {
  const int32_t* sums;
  size_t pitch, pixel, rows;
  const uint8_t* residual;
  size_t residual_pitch;
};

// The most ones, at the end, that `value` is not less than.
constexpr int32_t LowBits(uint32_t value) {
  uint32_t bits = 0;
  while (bits * 2 + 1 <= value) bits = bits * 2 + 1;
  return static_cast<int32_t>(bits);
}

// NV vectors a pixel, (NV - 1) * kLanes < count. S::Packed holds four of them: of one pixel, two or four.
template <class S, int NV, RowForm kForm, bool kPacksAll>
void RequantizeRows(const RequantizedRows& channels, const StoredRows& all) {
  using I = typename S::I;
  using F = typename S::F;
  constexpr bool kLine = kForm == RowForm::kLine, kAdds = kForm == RowForm::kSums || kLine;
  constexpr int kGroups = (NV + 3) / 4;  // of four vectors a pixel
  [[maybe_unused]] constexpr int kLast = NV - 4 * (kGroups - 1);
  constexpr int kAtOnce = NV == 1 ? 4 : NV == 2 ? 2 : 1;
  const EpilogueView& e = *channels.output->epilogue;
  const size_t pitch = channels.output->pixel_step * e.channels;
  uint8_t* y = static_cast<uint8_t*>(channels.output->y) + channels.output->first_pixel * e.channels +
               all.pixel * pitch + channels.channel;
  const int32_t* sums = all.sums;
  const uint8_t* residual = all.residual;
  const size_t residual_pitch = all.residual_pitch;
  const typename S::Copy last(channels.count - static_cast<size_t>(4 * (kGroups - 1) * S::kLanes));

  constexpr int32_t kTwo23Bits = 0x4b000000;
  constexpr uint32_t kMagicBits = 0x4b400000;
  constexpr float kTwo23 = 0x1p23f, kMagic = 0x1.8p23f;
  I bias[NV];
  F scale[NV], offset[NV];
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    const size_t at = static_cast<size_t>(v * S::kLanes);
    bias[v] = S::Load(channels.bias + at);
    scale[v] = S::LoadF(e.scale + channels.channel + at);
    offset[v] = scale[v];
    if constexpr (kForm == RowForm::kRising) {
      bias[v] = S::Add(bias[v], S::Set(kTwo23Bits));
      offset[v] = S::LoadF(e.rising_offset + channels.channel + at);
    }
  }
  const typename S::PackRange range(e.pack_zero, e.pack_lo, e.pack_hi, e.pack_flip);
  const F magic = S::SetF(kMagic), lo = S::SetF(kMagic + e.lo), hi = S::SetF(kMagic + e.hi);
  const F inner_scale = S::SetF(e.inner_scale), residual_scale = S::SetF(e.residual_scale);
  const F residual_zero = S::SetF(kTwo23 + static_cast<float>(e.residual_zero));
  const I residual_bits = S::Set(kLine ? static_cast<int32_t>(e.line_base) : kTwo23Bits ^ e.residual_flip);
  const F line_inner = S::SetF(e.line_inner), line_residual = S::SetF(e.line_residual);
  const F line_constant = S::SetF(e.line_constant);
  // Of lo + i, as the sum with `magic`, i are the bits less those of the lowest one; outside of the bounds some of the
  // upper ones are set. Where there are not 2^n codes, the upper ones within the bounds count as outside.
  const I least =
      S::Set(static_cast<int32_t>(kMagicBits + static_cast<uint32_t>(static_cast<int32_t>(e.lo))));
  const I outside = S::Set(~LowBits(static_cast<uint32_t>(static_cast<int32_t>(e.hi - e.lo))));
  const F y_scale = S::SetF(e.y_scale), y_reciprocal = S::SetF(e.y_reciprocal);

  // Residuals are read before the codes of the pixels in front of theirs are written (why: RequantizeTile).
  I ahead[kAtOnce * NV];
  const auto read_ahead = [&](int count) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i)
      ahead[i] = kAdds ? S::LoadU8(residual + i / NV * residual_pitch + i % NV * S::kLanes) : S::Set(0);
  };
  size_t rows = all.rows;
  const auto pixels = [&]<int kPixels>() __attribute__((always_inline)) {
    constexpr int kVectors = kPixels * NV;
    const auto code = [&](int i, [[maybe_unused]] I other) __attribute__((always_inline)) {
      const int v = i % NV;
      const I sum = S::Add(S::Load(sums + i / NV * all.pitch + v * S::kLanes), bias[v]);
      if constexpr (kForm == RowForm::kRising)
        return S::RoundToInt(S::FmaF(S::AsFloat(sum), scale[v], offset[v]));
      const F product = S::MulF(S::ToFloat(sum), scale[v]);
      if constexpr (!kAdds) return S::RoundToInt(product);
      // NaN becomes the lower bound, as the second operand.
      const F inner = S::SubF(S::MinF(S::MaxF(S::AddF(product, magic), lo), hi), magic);
      const F term = S::SubF(S::AsFloat(S::Xor(other, residual_bits)), residual_zero);
      const F value = S::AddF(S::MulF(inner, inner_scale), S::MulF(term, residual_scale));
      return S::RoundToInt(Divide<S>(value, y_scale, y_reciprocal));
    };
    // Four codes at a time by a line, or as many as are left. Inner codes are rarely clipped: whether one is the
    // integer units see, while the tiles leave those for floats half of their time.
    const auto line = [&]<int kFour>(int g, const I* four, I* codes) __attribute__((always_inline)) {
      F inner[kFour];
      I beyond = S::Set(0);
#pragma GCC unroll 4
      for (int j = 0; j < kFour; ++j) {
        const int v = (g + j) % NV;
        const I sum = S::Add(S::Load(sums + (g + j) / NV * all.pitch + v * S::kLanes), bias[v]);
        inner[j] = S::AddF(S::MulF(S::ToFloat(sum), scale[v]), magic);
        beyond = S::Or(beyond, S::Sub(S::AsInt(inner[j]), least));
      }
      if (S::HasBits(beyond, outside)) {
#pragma GCC unroll 4
        for (int j = 0; j < kFour; ++j) inner[j] = S::MinF(S::MaxF(inner[j], lo), hi);
      }
#pragma GCC unroll 4
      for (int j = 0; j < kFour; ++j) {
        const F other = S::FmaF(S::AsFloat(S::Xor(four[j], residual_bits)), line_residual, line_constant);
        codes[j] = S::RoundToInt(S::FmaF(S::SubF(inner[j], magic), line_inner, other));
      }
    };
    I others[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) others[i] = ahead[i];
    residual += kPixels * residual_pitch;
    rows -= kPixels;
    if (rows >= kPixels) read_ahead(kVectors);
#pragma GCC unroll 8
    for (int g = 0; g < kVectors; g += 4) {
      I codes[4] = {S::Set(0), S::Set(0), S::Set(0), S::Set(0)};
      if constexpr (kLine) {
        constexpr int kRest = kVectors % 4;
        if (kRest != 0 && g + 4 > kVectors) {
          line.template operator()<kRest == 0 ? 4 : kRest>(g, others + g, codes);
        } else {
          line.template operator()<4>(g, others + g, codes);
        }
      }
#pragma GCC unroll 4
      for (int j = 0; j < 4 && !kLine; ++j)
        codes[j] = g + j < kVectors ? code(g + j, others[g + j < kVectors ? g + j : 0]) : S::Set(0);
      const typename S::Packed packed = kPacksAll
                                            ? S::PackSaturated(codes[0], codes[1], codes[2], codes[3])
                                            : S::PackClipped(codes[0], codes[1], codes[2], codes[3], range);
      if constexpr (NV > 2) {
        if (g + 4 >= NV) {
          S::template StoreFirst<kLast, 0>(y + g * S::kLanes, packed, last);
        } else {
          S::StoreAll(y + g * S::kLanes, packed);
        }
      } else {
        S::template StoreFirst<NV, 0>(y, packed, last);
        if constexpr (kPixels > 1) S::template StoreFirst<NV, NV>(y + pitch, packed, last);
        if constexpr (kPixels > 2) S::template StoreFirst<NV, 2 * NV>(y + 2 * pitch, packed, last);
        if constexpr (kPixels > 2) S::template StoreFirst<NV, 3 * NV>(y + 3 * pitch, packed, last);
      }
    }
    sums += kPixels * all.pitch;
    y += kPixels * pitch;
  };
  if (rows >= kAtOnce) read_ahead(kAtOnce * NV);
  while (rows >= kAtOnce) pixels.template operator()<kAtOnce>();
  if constexpr (kAtOnce > 1) {
    if (rows > 0) read_ahead(NV);
    while (rows > 0) pixels.template operator()<1>();
  }
}

}  // namespace
}  // namespace lowbit
