// The depthwise kernels, written once over a vector trait S: simd_<isa>.h plus what depthwise_simd.h adds.
// The order of channels inside vectors is explained in depthwise_block.h.
#pragma once

#include "kernels/common/inline.h"
#include "kernels/common/tile_finish.h"
#include "kernels/x86/depthwise_block.h"

namespace lowbit {
namespace {

// The codes of four taps of one block, interleaved for the dot products.
template <class S, bool kWide>
struct Quad {
  static constexpr int kVectors = kWide ? 8 : 4;
  typename S::I v[kVectors];
};

template <class S, bool kWide, bool kFlip>
LOWBIT_ALWAYS_INLINE inline Quad<S, kWide> MakeQuad(typename S::I t0, typename S::I t1, typename S::I t2,
                                                    typename S::I t3) {
  if constexpr (kFlip) {
    const auto top = S::SetBytes(0x80);
    t0 = S::Xor(t0, top);
    t1 = S::Xor(t1, top);
    t2 = S::Xor(t2, top);
    t3 = S::Xor(t3, top);
  }
  const auto a_low = S::UnpackLow8(t0, t1), a_high = S::UnpackHigh8(t0, t1);
  const auto b_low = S::UnpackLow8(t2, t3), b_high = S::UnpackHigh8(t2, t3);
  const typename S::I quads[4] = {S::UnpackLow16(a_low, b_low), S::UnpackHigh16(a_low, b_low),
                                  S::UnpackLow16(a_high, b_high), S::UnpackHigh16(a_high, b_high)};
  Quad<S, kWide> out;
  for (int j = 0; j < 4; ++j) {
    if constexpr (kWide) {
      out.v[2 * j] = S::And(quads[j], S::Set(0x00ff00ff));
      out.v[2 * j + 1] = S::ShiftRight16(quads[j]);
    } else {
      out.v[j] = quads[j];
    }
  }
  return out;
}

template <class S, bool kWide>
LOWBIT_ALWAYS_INLINE inline void AddQuad(typename S::I (&acc)[4], const Quad<S, kWide>& x,
                                         const typename S::I* w) {
  for (int j = 0; j < 4; ++j) {
    if constexpr (kWide) {
      acc[j] = S::Add(acc[j], S::Add(S::MultiplyAdd16(x.v[2 * j], w[2 * j]),
                                     S::MultiplyAdd16(x.v[2 * j + 1], w[2 * j + 1])));
    } else {
      acc[j] = S::Dot(acc[j], x.v[j], w[j]);
    }
  }
}

// The plain requantize epilogue. The products stay inside int32 (depthwise.cc checks that), so clipping can
// wait until the codes are bytes: the saturating packs and additions only shorten values that lie outside
// [lo, hi] anyway.
template <class S>
struct PlainEpilogue {
  explicit PlainEpilogue(const DepthwiseBlock& b)
      : zero_point(S::SetWords(b.zero_point)),
        lo(S::SetBytes(b.lo)),
        hi(S::SetBytes(b.hi)),
        flip(S::SetBytes(b.flip)) {
    for (int j = 0; j < 4; ++j)
      scale[j] = b.scale != nullptr ? S::LoadF(b.scale + j * S::kLanes) : S::SetF(0);
  }
  typename S::F scale[4];
  typename S::I zero_point, lo, hi, flip;

  LOWBIT_ALWAYS_INLINE void Store(const typename S::I (&acc)[4], uint8_t* y) const {
    typename S::I q[4];
    for (int j = 0; j < 4; ++j) q[j] = S::RoundToInt(S::MulF(S::ToFloat(acc[j]), scale[j]));
    const auto low = S::AddSaturated16(S::PackWords(q[0], q[1]), zero_point);
    const auto high = S::AddSaturated16(S::PackWords(q[2], q[3]), zero_point);
    const auto bytes = S::MinU8(S::MaxU8(S::PackBytes(low, high), lo), hi);
    S::Store(y, S::Xor(bytes, flip));
  }
};

// Any other epilogue.
template <class S>
LOWBIT_ALWAYS_INLINE inline void StoreGeneral(const DepthwiseBlock& block, const typename S::I (&acc)[4],
                                              size_t pixel, const uint8_t* residual, void* y) {
  typename S::I ordered[1][4] = {{acc[0], acc[1], acc[2], acc[3]}};
  S::OrderChannels(ordered[0]);
  const TileOutput out = {block.epilogue, 0, 1, residual, y};
  FinishRegisters<S, 1, 4>(out, pixel, block.channel, S::kBytes, ordered);
}

template <class S>
inline void LoadInit(const DepthwiseBlock& block, typename S::I (&init)[4]) {
  for (int j = 0; j < 4; ++j) init[j] = S::Load(block.init + j * S::kLanes);
}

// A row of outputs. A column of the window is one quad (the fourth tap has weight 0), made once and used by
// up to three outputs: at stride 1 each output needs one new column, at stride 2 two. The columns take turns
// in three variables, so that none is ever moved.
template <class S, bool kWide, bool kFlip, int kStride, bool kPlain>
inline void RunRow(const DepthwiseBlock& block, const DepthwiseRow& row) {
  using Column = Quad<S, kWide>;
  using I = typename S::I;
  constexpr int kVectors = Column::kVectors;
  // Local copies: the stores to y could alias the originals as far as the compiler knows.
  I weights[3 * kVectors], init[4];
  for (int i = 0; i < 3 * kVectors; ++i) weights[i] = S::Load(block.weights + i * S::kBytes);
  LoadInit<S>(block, init);
  const uint8_t *r0 = row.rows[0], *r1 = row.rows[1], *r2 = row.rows[2];
  const size_t s0 = row.steps[0], s1 = row.steps[1], s2 = row.steps[2];
  const int64_t in_w = row.in_w, out_w = row.out_w;
  const auto pad = S::SetBytes(row.pad);
  const size_t channels = block.epilogue->channels;
  const PlainEpilogue<S> epilogue(block);
  uint8_t* y = static_cast<uint8_t*>(row.y) + row.first_pixel * channels + block.channel;

  const auto load = [&](int64_t x) LOWBIT_ALWAYS_INLINE {
    if (x < 0 || x >= in_w) return MakeQuad<S, kWide, kFlip>(pad, pad, pad, pad);
    const auto i = static_cast<size_t>(x);
    const auto bottom = S::Load(r2 + i * s2);
    return MakeQuad<S, kWide, kFlip>(S::Load(r0 + i * s0), S::Load(r1 + i * s1), bottom, bottom);
  };
  const auto output = [&](int64_t ox, const Column& a, const Column& b,
                          const Column& c) LOWBIT_ALWAYS_INLINE {
    I acc[4] = {init[0], init[1], init[2], init[3]};
    AddQuad<S, kWide>(acc, a, weights);
    AddQuad<S, kWide>(acc, b, weights + kVectors);
    AddQuad<S, kWide>(acc, c, weights + 2 * kVectors);
    if constexpr (kPlain) {
      epilogue.Store(acc, y + static_cast<size_t>(ox) * channels);
    } else {
      StoreGeneral<S>(block, acc, row.first_pixel + static_cast<size_t>(ox), row.residual, row.y);
    }
  };

  int64_t x = -row.pad_left, ox = 0;
  Column a = load(x), b, c;
  if constexpr (kStride == 1) {
    b = load(x + 1);
    while (true) {
      if (ox == out_w) break;
      c = load(x + 2);
      output(ox, a, b, c);
      if (++ox == out_w) break;
      a = load(x + 3);
      output(ox, b, c, a);
      if (++ox == out_w) break;
      b = load(x + 4);
      output(ox, c, a, b);
      ++ox;
      x += 3;
    }
  } else {
    while (true) {
      if (ox == out_w) break;
      b = load(x + 1);
      c = load(x + 2);
      output(ox, a, b, c);
      if (++ox == out_w) break;
      b = load(x + 3);
      a = load(x + 4);
      output(ox, c, b, a);
      ++ox;
      x += 4;
    }
  }
}

template <class S, bool kWide, bool kFlip, int kStride>
void Row(const DepthwiseBlock& block, const DepthwiseRow& row) {
  if (block.scale != nullptr) {
    RunRow<S, kWide, kFlip, kStride, true>(block, row);
  } else {
    RunRow<S, kWide, kFlip, kStride, false>(block, row);
  }
}

template <class S, bool kWide, bool kFlip>
void Pixel(const DepthwiseBlock& block, const uint8_t* const* taps, size_t pixel, const uint8_t* residual,
           void* y) {
  using I = typename S::I;
  constexpr int kVectors = Quad<S, kWide>::kVectors;
  I acc[4];
  LoadInit<S>(block, acc);
  for (size_t q = 0; q < block.quads; ++q) {
    const uint8_t* const* tap = taps + 4 * q;
    const auto quad =
        MakeQuad<S, kWide, kFlip>(S::Load(tap[0] + block.channel), S::Load(tap[1] + block.channel),
                                  S::Load(tap[2] + block.channel), S::Load(tap[3] + block.channel));
    I weights[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      weights[i] = S::Load(block.weights + (q * kVectors + static_cast<size_t>(i)) * S::kBytes);
    }
    AddQuad<S, kWide>(acc, quad, weights);
  }
  if (block.scale != nullptr) {
    const PlainEpilogue<S> epilogue(block);
    epilogue.Store(acc, static_cast<uint8_t*>(y) + pixel * block.epilogue->channels + block.channel);
  } else {
    StoreGeneral<S>(block, acc, pixel, residual, y);
  }
}

template <class S, bool kWide, bool kFlip>
inline constexpr DepthwiseKernels kKernels = {S::kBytes, Row<S, kWide, kFlip, 1>, Row<S, kWide, kFlip, 2>,
                                              Pixel<S, kWide, kFlip>};

}  // namespace
}  // namespace lowbit
