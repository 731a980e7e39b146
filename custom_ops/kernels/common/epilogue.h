// From int32 accumulators to output bytes, templated over the vector traits of simd_<isa>.h. The results
// equal the scalar definition (docs/numerics.md) bit for bit: the same float32 operations in the same order.
//
// Clipping. The definition is clip(rint(v) + z, lo, hi). Here v is clipped to [lo - z, hi - z] first: the
// bounds are integers, rint is monotone and leaves integers alone, so rint and clip commute; and a huge or
// infinite v never reaches the conversion to int32. maxps returns its second operand when one is NaN, so NaN
// becomes lo.
//
// Division. x / s with a constant s costs three multiply-adds when y, the correctly rounded 1/s, is at hand
// (Markstein):
//     q0 = x * y;  r = fma(-q0, s, x);  q = fma(r, y, q0)
// is the correctly rounded quotient; divide.h holds the proof. It assumes that nothing overflows or
// underflows: EpilogueTables checks the range of s; a quotient so small that bits are lost rounds to 0 either
// way; q0 is clamped to +-2^20, beyond every code, so that r stays finite where x is and the result is
// clipped as it should be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/activation.h"
#include "kernels/common/divide.h"
#include "kernels/common/epilogue_tables.h"

namespace lowbit {
namespace {

// x / y_scale for a result that is then clipped to codes.
template <class S>
inline typename S::F DivideByYScale(const EpilogueView& e, typename S::F x) {
  if constexpr (S::kHasFma) {
    if (e.reciprocal_is_safe) {
      const auto y = S::SetF(e.y_reciprocal);
      const auto q0 = S::MinF(S::MaxF(S::MulF(x, y), S::SetF(-0x1p20f)), S::SetF(0x1p20f));
      return S::FmaF(S::FnmaF(q0, S::SetF(e.y_scale), x), y, q0);
    }
  }
  return S::DivF(x, S::SetF(e.y_scale));
}

// rint(clip(v)) + zero point, as int32.
template <class S>
inline typename S::I Quantize(typename S::F v, float lo, float hi, int32_t zero_point) {
  const auto clipped = S::MinF(S::MaxF(v, S::SetF(lo)), S::SetF(hi));
  return S::Add(S::RoundToInt(clipped), S::Set(zero_point));
}

// Of a vector of bytes.
template <class S>
inline typename S::F ResidualTerm(const EpilogueView& e, typename S::I residual) {
  const auto code = S::Sub(S::Xor(residual, S::Set(e.residual_flip)), S::Set(e.residual_zero));
  return S::MulF(S::ToFloat(code), S::SetF(e.residual_scale));
}

template <class S>
inline typename S::I RequantizeResidual(const EpilogueView& e, typename S::I acc, size_t c,
                                        const uint8_t* residual) {
  const auto v = S::MulF(S::ToFloat(acc), S::LoadF(e.scale + c));
  const auto inner =
      S::Rint(S::MinF(S::MaxF(v, S::SetF(e.lo)), S::SetF(e.hi)));  // q - zero point, an integer
  const auto sum = S::AddF(S::MulF(inner, S::SetF(e.inner_scale)), ResidualTerm<S>(e, S::LoadU8(residual)));
  return Quantize<S>(DivideByYScale<S>(e, sum), e.y_lo, e.y_hi, e.y_zero_point);
}

template <class S>
inline typename S::F TailValue(const EpilogueView& e, typename S::I acc, size_t c, const uint8_t* residual) {
  auto v = S::MulF(S::ToFloat(acc), S::LoadF(e.scale + c));
  for (size_t i = 0; i < e.tail_count; ++i) {
    switch (e.tail[i]) {
      case TailStep::kBias:
        v = S::AddF(v, S::LoadF(e.tail_bias + c));
        break;
      case TailStep::kAffine:
        v = S::AddF(S::MulF(v, S::LoadF(e.tail_scale + c)), S::LoadF(e.tail_shift + c));
        break;
      case TailStep::kResidual:
        v = S::AddF(v, ResidualTerm<S>(e, S::LoadU8(residual)));
        break;
      case TailStep::kRelu:
        v = S::MaxF(S::SetF(0), v);  // v last: NaN stays NaN until the quantizer
        break;
      case TailStep::kClip:
        v = S::MinF(S::SetF(e.clip_max), S::MaxF(S::SetF(e.clip_min), v));
        break;
      case TailStep::kSilu:
        v = Silu<S>(v);
        break;
      case TailStep::kHardSwish:
        v = HardSwish<S>(v);
        break;
    }
  }
  return v;
}

// How thresholds are counted is explained at EpilogueView::thresholds.
template <class S>
inline typename S::I ThresholdCodes(const EpilogueView& e, typename S::I acc, size_t c) {
  auto code = S::Load(e.start + c);
  for (size_t k = 0; k < e.threshold_count; ++k) {
    code = S::CountGreater(code, acc, S::Load(e.thresholds + k * e.threshold_pitch + c));
  }
  return S::Xor(code, S::Load(e.flip + c));
}

// One vector of accumulators: channels [c, c + kLanes) of one output pixel, element `index` = pixel *
// channels + c of y and of the residual. Reads and writes kLanes elements there.
template <class S>
inline void FinishVector(const EpilogueView& e, typename S::I acc, size_t c, const uint8_t* residual,
                         void* y) {
  uint8_t* bytes = static_cast<uint8_t*>(y);
  switch (e.kind) {
    case EpilogueKind::kRequantize:
      S::StoreU8(bytes, e.has_residual ? RequantizeResidual<S>(e, acc, c, residual)
                                       : Quantize<S>(S::MulF(S::ToFloat(acc), S::LoadF(e.scale + c)), e.lo,
                                                     e.hi, e.zero_point));
      break;
    case EpilogueKind::kFloat:
      S::StoreF(static_cast<float*>(y), S::MulF(S::ToFloat(acc), S::LoadF(e.scale + c)));
      break;
    case EpilogueKind::kThresholds:
      S::StoreU8(bytes, ThresholdCodes<S>(e, acc, c));
      break;
    case EpilogueKind::kTail: {
      const auto v = TailValue<S>(e, acc, c, residual);
      if (e.quantized_output) {
        S::StoreU8(bytes, Quantize<S>(DivideByYScale<S>(e, v), e.y_lo, e.y_hi, e.y_zero_point));
      } else {
        S::StoreF(static_cast<float*>(y), v);
      }
      break;
    }
  }
}

// `count` accumulators (readable up to the next multiple of kLanes) of one pixel, for channels [c, c +
// count). `index` is the element of y and of the residual that belongs to channel c.
template <class S>
inline void FinishChannels(const EpilogueView& e, const int32_t* acc, size_t c, size_t count, size_t index,
                           const uint8_t* residual, void* y) {
  const size_t size = e.quantized_output ? 1 : 4;
  uint8_t* out = static_cast<uint8_t*>(y) + index * size;
  const uint8_t* r = residual ? residual + index : nullptr;
  size_t i = 0;
  for (; i + S::kLanes <= count; i += S::kLanes) {
    FinishVector<S>(e, S::Load(acc + i), c + i, r ? r + i : nullptr, out + i * size);
  }
  if (i < count) {
    uint8_t r_part[S::kLanes] = {}, y_part[S::kLanes * 4];
    if (r) std::memcpy(r_part, r + i, count - i);
    FinishVector<S>(e, S::Load(acc + i), c + i, r_part, y_part);
    std::memcpy(out + i * size, y_part, (count - i) * size);
  }
}

// Accumulators of MR pixels x NV vectors, acc[r][v], are an array in registers, or anything else that reads so: the
// sums of tiles that stay in memory (igemm_amx.cc).
//
// MR pixels x NV vectors of codes -> bytes of y. Four vectors are packed at a time, whichever pixels they
// belong to: packed_of(i) are the bytes of the vectors i..i+3, counted through the tile; beyond its end
// anything. `y` belongs to the first channel of the first pixel, `pitch` elements before that of the next.
// kPartial: only `count` > (NV - 1) * kLanes channels exist.
template <class S, int MR, int NV, bool kPartial, class PackedOf>
inline __attribute__((always_inline)) void StorePacked(size_t count, uint8_t* y, size_t pitch,
                                                       const PackedOf& packed_of) {
  const auto store_one = [&]<int i>(int first, typename S::Packed packed) __attribute__((always_inline)) {
    if (first + i >= MR * NV) return;
    const int r = (first + i) / NV, v = (first + i) % NV;
    uint8_t* to = y + r * pitch + v * S::kLanes;
    if (kPartial && v == NV - 1) {
      S::template StorePart<i>(to, packed, count - (NV - 1) * S::kLanes);
    } else {
      S::template StoreOne<i>(to, packed);
    }
  };
#pragma GCC unroll 16
  for (int i = 0; i < MR * NV; i += 4) {
    const typename S::Packed packed = packed_of(i);
    if constexpr (NV == 4 && !kPartial) {
      S::StoreAll(y + i / 4 * pitch, packed);
    } else if constexpr (NV == 2 && !kPartial) {
      S::template StorePair<0>(y + i / 2 * pitch, packed);
      if (i + 2 < MR * NV) S::template StorePair<2>(y + (i / 2 + 1) * pitch, packed);
    } else {
      store_one.template operator()<0>(i, packed);
      store_one.template operator()<1>(i, packed);
      store_one.template operator()<2>(i, packed);
      store_one.template operator()<3>(i, packed);
    }
  }
}

// The same of four(i, codes), which computes the codes of such vectors.
//
// Signed codes travel as code + 128 and get their top bit flipped back. The saturations to int16 and to bytes
// on the way are monotone and wider than [lo, hi], so clipping bytes is clipping codes as long as no value
// has left int32.
template <class S, int MR, int NV, bool kPartial, class Four>
inline __attribute__((always_inline)) void StoreCodes(const EpilogueView& e, size_t count, uint8_t* y,
                                                      size_t pitch, const Four& four) {
  const typename S::PackRange range(e.pack_zero, e.pack_lo, e.pack_hi, e.pack_flip);
  StorePacked<S, MR, NV, kPartial>(count, y, pitch, [&](int i) __attribute__((always_inline)) {
    typename S::I codes[4];
    four(i, codes);
    return S::PackClipped(codes[0], codes[1], codes[2], codes[3], range);
  });
}

// The residual of a tile: of its first channel and pixel, and from a pixel to the next one.
struct ResidualRows {
  const uint8_t* first = nullptr;
  size_t pitch = 0;
};

// Requantize, clipped after the packing: four times fewer operations than clipping floats.
// EpilogueTables::LimitAccumulators proves that no value leaves int32 and sets pack_clips. `scale` belongs to
// the first channel; of the residual whole vectors are read.
template <class S, int MR, int NV, bool kResidual, bool kPartial, class Sums>
inline __attribute__((always_inline)) void RequantizeTile(const EpilogueView& e, const Sums& acc,
                                                          const float* scale, size_t count,
                                                          const ResidualRows& residual, uint8_t* y,
                                                          size_t pitch) {
  // A local copy: the stores to y could change e, as far as the compiler knows.
  const EpilogueView view = e;
  const auto residual_of = [&](int i) __attribute__((always_inline)) {
    if (!kResidual || i >= MR * NV) return S::Set(0);
    return S::LoadU8(residual.first + i / NV * residual.pitch + i % NV * S::kLanes);
  };
  const auto code = [&](int i, typename S::I other) __attribute__((always_inline)) {
    if (i >= MR * NV) return S::Set(0);
    const int r = i / NV, v = i % NV;
    auto value = S::MulF(S::ToFloat(acc[r][v]), S::LoadF(scale + v * S::kLanes));
    if constexpr (kResidual) {
      const auto inner = S::Rint(S::MinF(S::MaxF(value, S::SetF(view.lo)), S::SetF(view.hi)));
      const auto sum = S::AddF(S::MulF(inner, S::SetF(view.inner_scale)), ResidualTerm<S>(view, other));
      value = Divide<S>(sum, S::SetF(view.y_scale), S::SetF(view.y_reciprocal));
    }
    return S::RoundToInt(value);
  };
  // Residuals are read before the codes of the vectors in front of them are written. y often begins 256 bytes behind
  // a residual and a whole number of pages (ONNX Runtime puts as much between two tensors), and with 256 channels a
  // pixel's residual then has the last address bits of the code written before, for which it would have to wait: on
  // Sapphire Rapids a layer 1x1 64->256 @56 took 620 us there, 300 elsewhere.
  typename S::I ahead[4] = {residual_of(0), residual_of(1), residual_of(2), residual_of(3)};
  StoreCodes<S, MR, NV, kPartial>(view, count, y, pitch,
                                  [&](int i, typename S::I(&codes)[4]) __attribute__((always_inline)) {
                                    const typename S::I others[4] = {ahead[0], ahead[1], ahead[2], ahead[3]};
                                    for (int j = 0; j < 4; ++j) ahead[j] = residual_of(i + 4 + j);
                                    for (int j = 0; j < 4; ++j) codes[j] = code(i + j, others[j]);
                                  });
}

// y of inner codes and of residuals, a byte for each.
template <class S>
inline __attribute__((always_inline)) typename S::Packed AddFewSums(const FewSums& sums,
                                                                    typename S::Packed inner,
                                                                    typename S::Packed residual) {
  const auto other = S::Xor(residual, S::SetBytes(sums.flip));
  auto y = S::Shuffle(S::Table(sums.least), inner);
  for (size_t k = 0; k < sums.count; ++k)
    y = S::CountGreaterBytes(y, other, S::Shuffle(S::Table(sums.limits[k]), inner));
  return y;
}

// Requantize and add a residual where few codes come of it: inner codes are packed as those of RequantizeTile without
// one, and what is added is looked up, in bytes.
template <class S, int MR, int NV, class Sums>
inline __attribute__((always_inline)) void FewSumsTile(const EpilogueView& e, const Sums& acc,
                                                       const float* scale, const ResidualRows& residual,
                                                       uint8_t* y, size_t pitch) {
  const FewSums* const sums = e.few_sums;
  const typename S::PackRange range(sums->inner_zero, 0, sums->inner_last, 0);
  const auto residual_of = [&](int i) __attribute__((always_inline)) {
    const auto at = [&](int k) __attribute__((always_inline)) {
      return residual.first + (k < MR * NV ? k / NV * residual.pitch + k % NV * S::kLanes : 0);
    };
    if constexpr (NV == 4) return S::Load(at(i));
    if constexpr (NV == 2) return S::LoadPairs(at(i), at(i + 2));
    alignas(64) uint8_t bytes[4 * S::kLanes];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) std::memcpy(bytes + j * S::kLanes, at(i + j), S::kLanes);
    return S::Load(bytes);
  };
  auto ahead = residual_of(0);  // why ahead: RequantizeTile
  StorePacked<S, MR, NV, false>(NV * S::kLanes, y, pitch, [&](int i) __attribute__((always_inline)) {
    const auto other = ahead;
    ahead = residual_of(i + 4);
    typename S::I codes[4];
    for (int j = 0; j < 4; ++j) {
      const int r = (i + j) / NV, v = (i + j) % NV;
      codes[j] = i + j < MR * NV
                     ? S::RoundToInt(S::MulF(S::ToFloat(acc[r][v]), S::LoadF(scale + v * S::kLanes)))
                     : S::Set(0);
    }
    return AddFewSums<S>(*sums, S::PackClipped(codes[0], codes[1], codes[2], codes[3], range), other);
  });
}

// A tail. Each step runs over the whole tile before the next one, so that the tile stays in registers and no
// step is looked up twice. The codes are clipped as floats: of a tail no bound on its values is known.
template <class S, int MR, int NV, bool kPartial, class Sums>
inline __attribute__((always_inline)) void TailTile(const EpilogueView& e, const Sums& acc, size_t channel,
                                                    size_t count, const ResidualRows& residual, uint8_t* y,
                                                    size_t pitch) {
  const EpilogueView view = e;
  typename S::F values[MR * NV];
  const auto for_all = [&](const auto& step) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v)
        step(values[r * NV + v], r, channel + static_cast<size_t>(v) * S::kLanes, v);
    }
  };
  for_all([&](auto& value, int r, size_t c, int v) __attribute__((always_inline)) {
    value = S::MulF(S::ToFloat(acc[r][v]), S::LoadF(view.scale + c));
  });
  for (size_t i = 0; i < view.tail_count; ++i) {
    switch (view.tail[i]) {
      case TailStep::kBias:
        for_all([&](auto& value, int, size_t c, int)
                    __attribute__((always_inline)) { value = S::AddF(value, S::LoadF(view.tail_bias + c)); });
        break;
      case TailStep::kAffine:
        for_all([&](auto& value, int, size_t c, int) __attribute__((always_inline)) {
          value = S::AddF(S::MulF(value, S::LoadF(view.tail_scale + c)), S::LoadF(view.tail_shift + c));
        });
        break;
      case TailStep::kResidual:
        if constexpr (!kPartial) {  // a partial tile has none: whole vectors of it are read
          for_all([&](auto& value, int r, size_t, int v) __attribute__((always_inline)) {
            const auto codes = S::LoadU8(residual.first + r * residual.pitch + v * S::kLanes);
            value = S::AddF(value, ResidualTerm<S>(view, codes));
          });
        }
        break;
      case TailStep::kRelu:
        for_all([&](auto& value, int, size_t, int)
                    __attribute__((always_inline)) { value = S::MaxF(S::SetF(0), value); });
        break;
      case TailStep::kClip:
        for_all([&](auto& value, int, size_t, int) __attribute__((always_inline)) {
          value = S::MinF(S::SetF(view.clip_max), S::MaxF(S::SetF(view.clip_min), value));
        });
        break;
      case TailStep::kSilu:
        for_all([&](auto& value, int, size_t, int)
                    __attribute__((always_inline)) { value = Silu<S>(value); });
        break;
      case TailStep::kHardSwish:
        for_all([&](auto& value, int, size_t, int)
                    __attribute__((always_inline)) { value = HardSwish<S>(value); });
        break;
    }
  }
  StoreCodes<S, MR, NV, kPartial>(
      view, count, y, pitch, [&](int i, typename S::I(&codes)[4]) __attribute__((always_inline)) {
        for (int j = 0; j < 4; ++j) {
          const auto value = values[i + j < MR * NV ? i + j : 0];
          codes[j] = S::RoundToInt(
              S::MinF(S::MaxF(DivideByYScale<S>(view, value), S::SetF(view.y_lo)), S::SetF(view.y_hi)));
        }
      });
}

// Thresholds as a line.
template <class S, int MR, int NV, bool kPartial, class Sums>
inline __attribute__((always_inline)) void LineTile(const EpilogueView& e, const Sums& acc, size_t channel,
                                                    size_t count, uint8_t* y, size_t pitch) {
  const EpilogueView view = e;
  const float *gain = view.line_gain + channel, *offset = view.line_offset + channel;
  StoreCodes<S, MR, NV, kPartial>(
      view, count, y, pitch, [&](int i, typename S::I(&codes)[4]) __attribute__((always_inline)) {
        for (int j = 0; j < 4; ++j) {
          if (i + j >= MR * NV) {
            codes[j] = S::Set(0);
            continue;
          }
          const int r = (i + j) / NV, v = (i + j) % NV;
          codes[j] = S::RoundToInt(S::FmaF(S::ToFloat(acc[r][v]), S::LoadF(gain + v * S::kLanes),
                                           S::LoadF(offset + v * S::kLanes)));
        }
      });
}

// Thresholds. A vector of them is loaded once for all pixels of the tile, whose codes take the place of their
// accumulators.
template <class S, int MR, int NV, bool kPartial, class Sums>
inline __attribute__((always_inline)) void ThresholdTile(const EpilogueView& e, const Sums& acc,
                                                         size_t channel, size_t count, uint8_t* y,
                                                         size_t pitch) {
  const EpilogueView view = e;
  typename S::I codes[MR * NV];
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
    const size_t c = channel + static_cast<size_t>(v) * S::kLanes;
    const int32_t* thresholds = view.thresholds + c;
    const auto start = S::Load(view.start + c), flip = S::Load(view.flip + c);
    typename S::I reached[MR];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) reached[r] = start;
    for (size_t k = 0; k < view.threshold_count; ++k, thresholds += view.threshold_pitch) {
      const auto threshold = S::Load(thresholds);
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) reached[r] = S::CountGreater(reached[r], acc[r][v], threshold);
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) codes[r * NV + v] = S::Xor(reached[r], flip);
  }
  StoreCodes<S, MR, NV, kPartial>(view, count, y, pitch,
                                  [&](int i, typename S::I(&four)[4]) __attribute__((always_inline)) {
                                    for (int j = 0; j < 4; ++j) four[j] = codes[i + j < MR * NV ? i + j : 0];
                                  });
}

}  // namespace
}  // namespace lowbit
