// The elementwise kernels, written once over a vector trait S: simd_<isa>.h plus the byte operations that
// elementwise_<isa>.cc or elementwise_bytes.h add. Everything is in an anonymous namespace, so that each
// instruction set keeps its own copy.
//
// Exactness. The definition is clip(rint(v / s) + z, lo, hi) in float32. The kernels here round and convert
// to int32 first and clip bytes after saturating packs: the same number while |v / s| < 2^22 (FastIsExact in
// core/elementwise.h sends other nodes to the reference), because then the conversion is rint, the sum with z
// is exact in float32 too, and saturation to words and to bytes commutes with the clip (ByteOutput).
//
// Signed codes. The bytes of int8 code q, with the top bit flipped, are the unsigned code q + 128. Outputs
// are formed in that biased form (z + 128, lo + 128, hi + 128) and flipped back by one XOR per vector.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/cpu/elementwise_kernels.h"
#include "core/selection.h"
#include "kernels/common/divide.h"
#include "kernels/common/inline.h"

namespace lowbit {
namespace {

// fn.operator()<flags...>() for flags known only at run time.
template <bool... kKnown, class Fn>
inline void Specialize(const Fn& fn) {
  fn.template operator()<kKnown...>();
}
template <bool... kKnown, class Fn, class... Rest>
inline void Specialize(const Fn& fn, bool flag, Rest... rest) {
  if (flag) {
    Specialize<kKnown..., true>(fn, rest...);
  } else {
    Specialize<kKnown..., false>(fn, rest...);
  }
}

inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }

// a * b + c, rounded once where the level has fma.
template <class S>
LOWBIT_ALWAYS_INLINE inline typename S::F MultiplyAdd(typename S::F a, typename S::F b, typename S::F c) {
  if constexpr (S::kHasFma) {
    return S::FmaF(a, b, c);
  } else {
    return S::AddF(S::MulF(a, b), c);
  }
}

// From rounded quotients to bytes. The zero point is added to 16-bit words: the packs saturate, which only
// shortens values that are far outside [lo, hi] with or without their zero point.
template <class S>
struct ByteOutput {
  explicit ByteOutput(const Quantizer& q, int32_t zero_point)
      : bias(q.is_signed ? 128 : 0),
        words(S::SetWords(static_cast<int16_t>(zero_point + bias))),
        lo(S::SetB(static_cast<uint8_t>(q.lo + bias))),
        hi(S::SetB(static_cast<uint8_t>(q.hi + bias))),
        flip(S::SetB(static_cast<uint8_t>(bias))) {}
  int32_t bias;
  typename S::I words, lo, hi, flip;

  // N vectors of int32 to N * kLanes bytes at y; N is 1 or 4.
  template <int N>
  LOWBIT_ALWAYS_INLINE void Store(const typename S::I (&rounded)[N], uint8_t* y) const {
    static_assert(N == 1 || N == 4);
    const auto low = S::AddSaturated16(S::PackWords(rounded[0], rounded[N > 1 ? 1 : 0]), words);
    const auto high = S::AddSaturated16(S::PackWords(rounded[N > 1 ? 2 : 0], rounded[N - 1]), words);
    const auto bytes = S::MinU8(S::MaxU8(S::PackBytes(low, high), lo), hi);
    const auto ordered = S::InOrder(S::Xor(bytes, flip));
    if constexpr (N == 4) {
      S::Store(y, ordered);
    } else {
      S::StoreQuarter(y, ordered);
    }
  }
};

// Quantizer with one grid for all elements. Quantized: writes codes; else the floats themselves.
template <class S, bool kQuantized>
struct UniformOutput {
  explicit UniformOutput(const Quantizer& q)
      : bytes(q, q.zero_point), scale(S::SetF(q.scale)), inverse(S::SetF(1.0f / q.scale)) {}
  ByteOutput<S> bytes;
  typename S::F scale, inverse;

  template <int N>
  LOWBIT_ALWAYS_INLINE void Store(const typename S::F (&v)[N], uint8_t* y) const {
    if constexpr (kQuantized) {
      typename S::I rounded[N];
      for (int i = 0; i < N; ++i) rounded[i] = S::RoundToInt(Divide<S>(v[i], scale, inverse));
      bytes.Store(rounded, y);
    } else {
      for (int i = 0; i < N; ++i) S::StoreF(reinterpret_cast<float*>(y) + i * S::kLanes, v[i]);
    }
  }
};

template <class S, bool kSigned>
inline typename S::I LoadCodes(const uint8_t* x) {
  return kSigned ? S::LoadS8(x) : S::LoadU8(x);
}

// f32(x - zero_point) * scale
template <class S, bool kSigned>
struct Dequantizer {
  Dequantizer(int32_t zero, float s) : zero_point(S::Set(zero)), scale(S::SetF(s)) {}
  typename S::I zero_point;
  typename S::F scale;
  typename S::F operator()(const uint8_t* x) const {
    return S::MulF(S::ToFloat(S::Sub(LoadCodes<S, kSigned>(x), zero_point)), scale);
  }
};

// Runs block<N>(i) over [0, count) in blocks of 4 and 1 vectors; the rest, fewer than kLanes elements, is
// left to rest(i, n). All offsets count elements.
template <class S, class Block, class RestFn>
LOWBIT_ALWAYS_INLINE inline void ForBlocks(int64_t count, const Block& block, const RestFn& rest) {
  int64_t i = 0;
  for (; i + 4 * S::kLanes <= count; i += 4 * S::kLanes) block.template operator()<4>(i);
  for (; i + S::kLanes <= count; i += S::kLanes) block.template operator()<1>(i);
  if (i < count) rest(i, count - i);
}

template <class Word>
LOWBIT_ALWAYS_INLINE inline uint64_t ReadWord(const uint8_t* x) {
  Word word;
  std::memcpy(&word, x, sizeof(word));
  return word;
}

// kLanes bytes, of which the first n >= 1 come from x. They are put together in registers, of two reads that
// overlap: to copy n bytes is a call, whose single writes a read of all of them then waits for.
template <class S>
struct PartialBytes {
  PartialBytes(const uint8_t* x, int64_t n) {
    static_assert(S::kLanes <= 16);
    using Words = uint64_t __attribute__((vector_size(16)));
    Words words = {};
    if (n > 8) {
      words = Words{ReadWord<uint64_t>(x), ReadWord<uint64_t>(x + n - 8) >> (8 * (16 - n))};
    } else if (n >= 4) {
      words[0] = ReadWord<uint32_t>(x) | ReadWord<uint32_t>(x + n - 4) << (8 * (n - 4));
    } else {
      const int64_t middle = n / 2, last = n - 1;
      words[0] = x[0] | uint64_t{x[middle]} << (8 * middle) | uint64_t{x[last]} << (8 * last);
    }
    std::memcpy(bytes, &words, sizeof(bytes));
  }
  uint8_t bytes[S::kLanes];
};

// ---- LowBitAffine, LowBitRequantize, LowBitDequantize ----

// Calls block<N>(from, channel, to) over rows of elements; channel is the one of the first element, 0 where
// one channel's numbers serve all. kSize is the size of an output element.
template <class S, int64_t kSize, class Block>
LOWBIT_ALWAYS_INLINE inline void ForRows(const AffineSpec& spec, const uint8_t* x, uint8_t* y, int64_t rows,
                                         int64_t width, int64_t y_stride, const Block& block) {
  const bool uniform = spec.channels == 1;
  const int64_t run = uniform ? width : spec.period;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t done = 0; done < width; done += run) {
      const uint8_t* from = x + r * width + done;
      uint8_t* to = y + (r * y_stride + done) * kSize;
      ForBlocks<S>(
          Min(run, width - done),
          [&]<int N>(int64_t i) LOWBIT_ALWAYS_INLINE {
            block.template operator()<N>(from + i, uniform ? 0 : i, to + i * kSize);
          },
          [&](int64_t i, int64_t n) LOWBIT_ALWAYS_INLINE {
            const PartialBytes<S> part(from + i, n);
            uint8_t out[S::kLanes * kSize];
            block.template operator()<1>(part.bytes, uniform ? 0 : i, out);
            std::memcpy(to + i * kSize, out, static_cast<size_t>(n * kSize));
          });
    }
  }
}

template <class S, bool kSigned, bool kGridPerChannel, bool kHasAffine, bool kQuantized>
void AffineImpl(const AffineSpec& spec, const uint8_t* x, uint8_t* y, int64_t rows, int64_t width,
                int64_t y_stride) {
  const int32_t* x_zero_points = spec.x_zero_point.data();
  const float *x_scales = spec.x_scale.data(), *scales = spec.scale.data(), *shifts = spec.shift.data();
  const float *y_scales = spec.y_scale.data(), *y_inverses = spec.y_inverse.data();
  const int32_t* y_zero_points = spec.y_zero_point.data();

  Quantizer grid = spec.quantizer;
  grid.scale = y_scales[0];
  grid.zero_point = y_zero_points[0];
  const UniformOutput<S, kQuantized> output(grid);
  const ByteOutput<S> biased(grid, 0);  // for zero points per channel, which are added before
  const Dequantizer<S, kSigned> dequantize(x_zero_points[0], x_scales[0]);

  // N vectors of elements whose first is channel c.
  const auto block = [&]<int N>(const uint8_t* from, int64_t c, uint8_t* to) LOWBIT_ALWAYS_INLINE {
    typename S::F v[N];
    for (int i = 0; i < N; ++i) {
      const int64_t k = c + i * S::kLanes;
      if constexpr (kGridPerChannel) {
        const auto centred = S::Sub(LoadCodes<S, kSigned>(from + i * S::kLanes), S::Load(x_zero_points + k));
        v[i] = S::MulF(S::ToFloat(centred), S::LoadF(x_scales + k));
      } else {
        v[i] = dequantize(from + i * S::kLanes);
      }
      if constexpr (kHasAffine) v[i] = S::AddF(S::MulF(v[i], S::LoadF(scales + k)), S::LoadF(shifts + k));
    }
    if constexpr (kGridPerChannel && kQuantized) {
      typename S::I codes[N];
      for (int i = 0; i < N; ++i) {
        const int64_t k = c + i * S::kLanes;
        const auto quotient = Divide<S>(v[i], S::LoadF(y_scales + k), S::LoadF(y_inverses + k));
        codes[i] = S::Add(S::RoundToInt(quotient), S::Load(y_zero_points + k));
      }
      biased.Store(codes, to);
    } else {
      output.Store(v, to);
    }
  };

  ForRows<S, kQuantized ? 1 : 4>(spec, x, y, rows, width, y_stride, block);
}

// The same codes by one multiply-add per element (FitLine).
template <class S, bool kSigned, bool kPerChannel>
void LineImpl(const AffineSpec& spec, const uint8_t* x, uint8_t* y, int64_t rows, int64_t width,
              int64_t y_stride) {
  const float *gains = spec.line_gain.data(), *offsets = spec.line_offset.data();
  const auto gain = S::SetF(gains[0]), offset = S::SetF(offsets[0]);
  const ByteOutput<S> output(spec.quantizer, spec.y_zero_point.data()[0]);

  const auto block = [&]<int N>(const uint8_t* from, int64_t c, uint8_t* to) LOWBIT_ALWAYS_INLINE {
    typename S::I rounded[N];
    for (int i = 0; i < N; ++i) {
      const int64_t k = c + i * S::kLanes;
      const auto v = S::ToFloat(LoadCodes<S, kSigned>(from + i * S::kLanes));
      rounded[i] = S::RoundToInt(MultiplyAdd<S>(v, kPerChannel ? S::LoadF(gains + k) : gain,
                                                kPerChannel ? S::LoadF(offsets + k) : offset));
    }
    output.Store(rounded, to);
  };
  ForRows<S, 1>(spec, x, y, rows, width, y_stride, block);
}

// Whether this build holds an op whose affine map has more to do than LowBitDequantize.
inline constexpr bool kMapsCodes =
    HasOp("LowBitAffine") || HasOp("LowBitRequantize") || HasOp("LowBitConcat");
inline constexpr bool kHasAdd = HasOp("LowBitAdd"), kHasMul = HasOp("LowBitMul");

template <class S>
void Affine(const AffineSpec& spec, const uint8_t* x, void* y, int64_t rows, int64_t width,
            int64_t y_stride) {
  if constexpr (kMapsCodes) {
    if (spec.has_line) {
      Specialize(
          [&]<bool kSigned, bool kPerChannel>() {
            LineImpl<S, kSigned, kPerChannel>(spec, x, static_cast<uint8_t*>(y), rows, width, y_stride);
          },
          spec.x_signed, spec.channels > 1);
      return;
    }
  }
  Specialize(
      [&]<bool kSigned, bool kGridPerChannel, bool kHasAffine, bool kQuantized>() {
        if constexpr (kMapsCodes || !(kHasAffine || kQuantized)) {
          AffineImpl<S, kSigned, kGridPerChannel, kHasAffine, kQuantized>(spec, x, static_cast<uint8_t*>(y),
                                                                          rows, width, y_stride);
        }
      },
      spec.x_signed, spec.grid_per_channel, spec.has_affine, spec.quantizer.quantized);
}

// ---- LowBitAdd, LowBitMul ----

template <class S, bool kMul, bool kASigned, bool kBSigned, bool kBScalar, bool kQuantized>
void BinaryImpl(const BinarySpec& spec, const uint8_t* a, const uint8_t* b, uint8_t* y, int64_t count) {
  const Dequantizer<S, kASigned> da(spec.a_zero_point, spec.a_scale);
  const Dequantizer<S, kBSigned> db(spec.b_zero_point, spec.b_scale);
  const UniformOutput<S, kQuantized> output(spec.quantizer);
  constexpr int64_t kSize = kQuantized ? 1 : 4;
  const int32_t b_code = kBSigned ? static_cast<int8_t>(b[0]) : b[0];
  const auto b_value = S::MulF(S::ToFloat(S::Sub(S::Set(b_code), db.zero_point)), db.scale);

  const auto block = [&]<int N>(const uint8_t* from_a, const uint8_t* from_b, uint8_t* to)
                         LOWBIT_ALWAYS_INLINE {
                           typename S::F v[N];
                           for (int i = 0; i < N; ++i) {
                             const auto va = da(from_a + i * S::kLanes);
                             const auto vb = kBScalar ? b_value : db(from_b + i * S::kLanes);
                             v[i] = kMul ? S::MulF(va, vb) : S::AddF(va, vb);
                           }
                           output.Store(v, to);
                         };
  ForBlocks<S>(
      count,
      [&]<int N>(int64_t i) LOWBIT_ALWAYS_INLINE {
        block.template operator()<N>(a + i, b + (kBScalar ? 0 : i), y + i * kSize);
      },
      [&](int64_t i, int64_t n) LOWBIT_ALWAYS_INLINE {
        const PartialBytes<S> part_a(a + i, n), part_b(b + (kBScalar ? 0 : i), kBScalar ? 1 : n);
        uint8_t out[S::kLanes * kSize];
        block.template operator()<1>(part_a.bytes, part_b.bytes, out);
        std::memcpy(y + i * kSize, out, static_cast<size_t>(n * kSize));
      });
}

// With a table of b's real numbers. A scalar is repeated for as many lanes as a block has.
template <class S, bool kASigned, bool kQuantized>
void AddTableImpl(const BinarySpec& spec, const uint8_t* a, bool a_scalar, const uint8_t* b, bool b_scalar,
                  uint8_t* y, int64_t count) {
  constexpr int64_t kMost = 4 * S::kLanes, kSize = kQuantized ? 1 : 4;
  const Dequantizer<S, kASigned> da(spec.a_zero_point, spec.a_scale);
  const UniformOutput<S, kQuantized> output(spec.quantizer);
  const float* table = spec.b_table.data();
  uint8_t same_a[kMost], same_b[kMost];
  std::memset(same_a, a[0], sizeof(same_a));
  std::memset(same_b, b[0], sizeof(same_b));

  const auto block = [&]<int N>(const uint8_t* from_a, const uint8_t* from_b, uint8_t* to)
                         LOWBIT_ALWAYS_INLINE {
                           float numbers[N * S::kLanes];
                           for (int i = 0; i < N * S::kLanes; ++i) numbers[i] = table[from_b[i]];
                           typename S::F v[N];
                           for (int i = 0; i < N; ++i) {
                             v[i] = S::AddF(da(from_a + i * S::kLanes), S::LoadF(numbers + i * S::kLanes));
                           }
                           output.Store(v, to);
                         };
  ForBlocks<S>(
      count,
      [&]<int N>(int64_t i) LOWBIT_ALWAYS_INLINE {
        block.template operator()<N>(a_scalar ? same_a : a + i, b_scalar ? same_b : b + i, y + i * kSize);
      },
      [&](int64_t i, int64_t n) LOWBIT_ALWAYS_INLINE {
        const PartialBytes<S> part_a(a_scalar ? same_a : a + i, n), part_b(b_scalar ? same_b : b + i, n);
        uint8_t out[S::kLanes * kSize];
        block.template operator()<1>(part_a.bytes, part_b.bytes, out);
        std::memcpy(y + i * kSize, out, static_cast<size_t>(n * kSize));
      });
}

template <class S>
void Binary(const BinarySpec& spec, const uint8_t* a, bool a_scalar, const uint8_t* b, bool b_scalar, void* y,
            int64_t count) {
  if constexpr (kHasAdd) {
    if (!spec.b_table.empty()) {
      Specialize(
          [&]<bool kASigned, bool kQuantized>() {
            AddTableImpl<S, kASigned, kQuantized>(spec, a, a_scalar, b, b_scalar, static_cast<uint8_t*>(y),
                                                  count);
          },
          spec.a_signed, spec.quantizer.quantized);
      return;
    }
  }
  // Both operations commute, also in their rounding: a scalar is always b.
  if (a_scalar && !b_scalar) {
    BinarySpec swapped = spec;
    swapped.a_signed = spec.b_signed;
    swapped.a_zero_point = spec.b_zero_point;
    swapped.a_scale = spec.b_scale;
    swapped.b_signed = spec.a_signed;
    swapped.b_zero_point = spec.a_zero_point;
    swapped.b_scale = spec.a_scale;
    Binary<S>(swapped, b, false, a, true, y, count);
    return;
  }
  if (a_scalar) count = Min(count, 1);
  Specialize(
      [&]<bool kMul, bool kASigned, bool kBSigned, bool kBScalar, bool kQuantized>() {
        if constexpr (kMul ? kHasMul : kHasAdd) {
          BinaryImpl<S, kMul, kASigned, kBSigned, kBScalar, kQuantized>(spec, a, b, static_cast<uint8_t*>(y),
                                                                        count);
        }
      },
      spec.kind == BinaryKind::kMul, spec.a_signed, spec.b_signed, b_scalar, spec.quantizer.quantized);
}

// ---- bytes ----

// Copies n bytes with vectors of kBytes, the last one overlapping its neighbour.
template <class S>
inline void CopyBytes(const uint8_t* x, uint8_t* y, int64_t n) {
  if (n < S::kBytes) {
    std::memcpy(y, x, static_cast<size_t>(n));
    return;
  }
  for (int64_t i = 0; i + S::kBytes <= n; i += S::kBytes) S::Store(y + i, S::Load(x + i));
  S::Store(y + n - S::kBytes, S::Load(x + n - S::kBytes));
}

template <class S>
void CopyRows(const uint8_t* x, uint8_t* y, int64_t rows, int64_t width, int64_t y_stride) {
  if (width == y_stride) {
    std::memcpy(y, x, static_cast<size_t>(rows * width));
    return;
  }
  const auto overlapping = [&]<int kWord>() {
    if (width < kWord || kWord >= S::kBytes) return false;
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* from = x + r * width;
      uint8_t* to = y + r * y_stride;
      std::memcpy(to, from, kWord);
      if (width > kWord) std::memcpy(to + width - kWord, from + width - kWord, kWord);
    }
    return true;
  };
  // Rows shorter than a vector are one or two words; a call of memcpy for each would take most of the time.
  if (width < S::kBytes) {
    static_cast<void>(overlapping.template operator()<32>() || overlapping.template operator()<16>() ||
                      overlapping.template operator()<8>() || overlapping.template operator()<4>() ||
                      overlapping.template operator()<2>() || overlapping.template operator()<1>());
    return;
  }
  for (int64_t r = 0; r < rows; ++r) CopyBytes<S>(x + r * width, y + r * y_stride, width);
}

template <class S>
void Lookup(const uint8_t* table, const uint8_t* x, uint8_t* y, int64_t count) {
  const typename S::ByteTable vector(table);
  int64_t i = 0;
  for (; i + S::kBytes <= count; i += S::kBytes) S::Store(y + i, vector(S::Load(x + i)));
  for (; i < count; ++i) y[i] = table[x[i]];
}

// ---- pooling ----

template <class S, bool kSigned, class Load>
LOWBIT_ALWAYS_INLINE inline typename S::I MaxOfTaps(const Taps& taps, const Load& load) {
  auto largest = S::SetB(kSigned ? 0x80 : 0);
  const auto max = [](typename S::I a, typename S::I b) { return kSigned ? S::MaxS8(a, b) : S::MaxU8(a, b); };
  for (int64_t plane = 0; plane < taps.planes; ++plane) {
    for (int64_t row = 0; row < taps.rows; ++row) {
      const uint8_t* tap = taps.origin + plane * taps.plane_stride + row * taps.row_stride;
      if (taps.columns == 3) {  // the usual 3x3 window: independent of the loop's branches
        const auto pair = max(load(tap), load(tap + taps.column_stride));
        largest = max(largest, max(pair, load(tap + 2 * taps.column_stride)));
        continue;
      }
      for (int64_t column = 0; column < taps.columns; ++column, tap += taps.column_stride) {
        largest = max(largest, load(tap));
      }
    }
  }
  return largest;
}

template <class S, bool kSigned>
void MaxTapsImpl(const Taps& taps, uint8_t* y) {
  const int64_t channels = taps.channels;
  const auto whole = [&](int64_t c) LOWBIT_ALWAYS_INLINE {
    S::Store(y + c, MaxOfTaps<S, kSigned>(
                        taps, [c](const uint8_t* tap) LOWBIT_ALWAYS_INLINE { return S::Load(tap + c); }));
  };
  if (channels >= S::kBytes) {
    int64_t c = 0;
    for (; c + S::kBytes <= channels; c += S::kBytes) whole(c);
    if (c < channels) whole(channels - S::kBytes);
    return;
  }
  using H = typename S::Half;  // the next narrower vectors; the narrowest name themselves
  if constexpr (H::kBytes < S::kBytes) {
    MaxTapsImpl<H, kSigned>(taps, y);
  } else {
    uint8_t out[S::kBytes];
    S::Store(out, MaxOfTaps<S, kSigned>(taps, [channels](const uint8_t* tap) {
               uint8_t bytes[S::kBytes] = {};
               std::memcpy(bytes, tap, static_cast<size_t>(channels));
               return S::Load(bytes);
             }));
    std::memcpy(y, out, static_cast<size_t>(channels));
  }
}

template <class S>
void MaxTaps(const Taps& taps, bool is_signed, uint8_t* y) {
  if (is_signed) {
    MaxTapsImpl<S, true>(taps, y);
  } else {
    MaxTapsImpl<S, false>(taps, y);
  }
}

template <class S, bool kSigned, bool kQuantized>
void AverageTapsImpl(const AverageSpec& spec, const Taps& taps, int64_t divisor, uint8_t* y) {
  const Dequantizer<S, kSigned> dequantize(spec.x_zero_point, spec.x_scale);
  const UniformOutput<S, kQuantized> output(spec.quantizer);
  const float n = static_cast<float>(divisor);
  const auto count = S::SetF(n), inverse = S::SetF(1.0f / n);
  constexpr int64_t kSize = kQuantized ? 1 : 4;

  // The order of the additions is part of the definition: columns from the top, of the
  // first plane first, then columns from the left.
  const auto block = [&]<int N>(const auto& load, uint8_t* to) LOWBIT_ALWAYS_INLINE {
    typename S::F sum[N];
    for (int i = 0; i < N; ++i) sum[i] = S::SetF(0);
    for (int64_t column = 0; column < taps.columns; ++column) {
      typename S::F column_sum[N];
      for (int i = 0; i < N; ++i) column_sum[i] = S::SetF(0);
      for (int64_t plane = 0; plane < taps.planes; ++plane) {
        const uint8_t* tap = taps.origin + plane * taps.plane_stride + column * taps.column_stride;
        for (int64_t row = 0; row < taps.rows; ++row, tap += taps.row_stride) {
          for (int i = 0; i < N; ++i) column_sum[i] = S::AddF(column_sum[i], load(tap, i * S::kLanes));
        }
      }
      for (int i = 0; i < N; ++i) sum[i] = S::AddF(sum[i], column_sum[i]);
    }
    for (int i = 0; i < N; ++i) sum[i] = Divide<S>(sum[i], count, inverse);
    output.Store(sum, to);
  };
  ForBlocks<S>(
      taps.channels,
      [&]<int N>(int64_t c) LOWBIT_ALWAYS_INLINE {
        block.template operator()<N>([&](const uint8_t* tap, int64_t i)
                                         LOWBIT_ALWAYS_INLINE { return dequantize(tap + c + i); },
                                     y + c * kSize);
      },
      [&](int64_t c, int64_t rest) LOWBIT_ALWAYS_INLINE {
        if (c > 0) {  // the last channels once more, some of them for the second time
          c = taps.channels - S::kLanes;
          block.template operator()<1>([&](const uint8_t* tap, int64_t)
                                           LOWBIT_ALWAYS_INLINE { return dequantize(tap + c); },
                                       y + c * kSize);
          return;
        }
        uint8_t out[S::kLanes * kSize];
        block.template operator()<1>(
            [&](const uint8_t* tap, int64_t)
                LOWBIT_ALWAYS_INLINE { return dequantize(PartialBytes<S>(tap + c, rest).bytes); },
            out);
        std::memcpy(y + c * kSize, out, static_cast<size_t>(rest * kSize));
      });
}

template <class S>
void AverageTaps(const AverageSpec& spec, const Taps& taps, int64_t divisor, void* y) {
  Specialize(
      [&]<bool kSigned, bool kQuantized>() {
        AverageTapsImpl<S, kSigned, kQuantized>(spec, taps, divisor, static_cast<uint8_t*>(y));
      },
      spec.x_signed, spec.quantizer.quantized);
}

// Sums 16-bit first: 255 codes of at most 255 (or between -128 and 127) fit a uint16 (an int16).
inline constexpr int64_t kFlushInterval = 255;

template <class S, bool kSigned>
void SumPixelsImpl(const uint8_t* x, int64_t pixels, int64_t pixel_stride, int64_t channels, int32_t* sums) {
  constexpr int64_t kWords = 2 * S::kLanes;
  for (int64_t c = 0; c < channels; ++c) sums[c] = 0;
  for (int64_t first = 0; first < pixels; first += kFlushInterval) {
    const uint8_t* block = x + first * pixel_stride;
    const int64_t count = Min(kFlushInterval, pixels - first);
    int64_t c = 0;
    for (; c + kWords <= channels; c += kWords) {
      auto sum = S::Set(0);
      for (int64_t p = 0; p < count; ++p) {
        const uint8_t* from = block + p * pixel_stride + c;
        sum = S::Add16(sum, kSigned ? S::LoadS8As16(from) : S::LoadU8As16(from));
      }
      int16_t words[kWords];
      S::Store(words, sum);
      for (int64_t i = 0; i < kWords; ++i) {
        sums[c + i] += kSigned ? words[i] : static_cast<int32_t>(static_cast<uint16_t>(words[i]));
      }
    }
    for (; c < channels; ++c) {
      for (int64_t p = 0; p < count; ++p) {
        const uint8_t byte = block[p * pixel_stride + c];
        sums[c] += kSigned ? static_cast<int8_t>(byte) : byte;
      }
    }
  }
}

template <class S>
void SumPixels(const uint8_t* x, bool is_signed, int64_t pixels, int64_t pixel_stride, int64_t channels,
               int32_t* sums) {
  if (is_signed) {
    SumPixelsImpl<S, true>(x, pixels, pixel_stride, channels, sums);
  } else {
    SumPixelsImpl<S, false>(x, pixels, pixel_stride, channels, sums);
  }
}

template <class S>
void ScaleSums(const GlobalAverageSpec& spec, const int32_t* sums, float multiplier, void* y, int64_t count) {
  const ByteOutput<S> output(spec.quantizer, spec.quantizer.zero_point);
  const auto m = S::SetF(multiplier);
  const bool quantized = spec.quantizer.quantized;
  const int64_t size = quantized ? 1 : 4;
  uint8_t* out = static_cast<uint8_t*>(y);
  const auto vector = [&](const int32_t* from, uint8_t* to) LOWBIT_ALWAYS_INLINE {
    const auto v = S::MulF(S::ToFloat(S::Load(from)), m);
    if (quantized) {
      const typename S::I rounded[1] = {S::RoundToInt(v)};
      output.Store(rounded, to);
    } else {
      S::StoreF(reinterpret_cast<float*>(to), v);
    }
  };
  int64_t i = 0;
  for (; i + S::kLanes <= count; i += S::kLanes) vector(sums + i, out + i * size);
  if (i < count) {
    int32_t part[S::kLanes] = {};
    uint8_t bytes[S::kLanes * 4];
    std::memcpy(part, sums + i, static_cast<size_t>(count - i) * 4);
    vector(part, bytes);
    std::memcpy(out + i * size, bytes, static_cast<size_t>((count - i) * size));
  }
}

// ---- layouts ----

// Vectors of 16 bytes, whatever the level: the narrow end of S.
template <class S>
using Bytes16 = typename S::Half::Half;

// 16 rows of 16 bytes, transposed in place by four rounds of interleaving row i with row i + 8: each round
// moves one bit of the row index into the column index and one bit of the column index out.
template <class B>
inline void Transpose16x16(typename B::I (&rows)[16]) {
  for (int round = 0; round < 4; ++round) {
    typename B::I next[16];
    for (int i = 0; i < 8; ++i) {
      next[2 * i] = B::UnpackLow8(rows[i], rows[i + 8]);
      next[2 * i + 1] = B::UnpackHigh8(rows[i], rows[i + 8]);
    }
    for (int i = 0; i < 16; ++i) rows[i] = next[i];
  }
}

// n floats to n codes. x is clipped to +-1024 scales first, so that no infinity or huge quotient reaches the
// conversion: every code lies within 512 of its zero point. The clip maps NaN to the lower bound (maxps
// returns its second operand then), which ends as lo.
template <class S>
void QuantizeRun(const UniformOutput<S, true>& output, const float* x, int64_t n, uint8_t* y) {
  const auto top = S::MulF(output.scale, S::SetF(1024)), bottom = S::SubF(S::SetF(0), top);
  const auto block = [&]<int N>(const float* from, uint8_t* to) LOWBIT_ALWAYS_INLINE {
    typename S::F v[N];
    for (int i = 0; i < N; ++i) v[i] = S::MinF(S::MaxF(S::LoadF(from + i * S::kLanes), bottom), top);
    output.Store(v, to);
  };
  ForBlocks<S>(
      n, [&]<int N>(int64_t i) LOWBIT_ALWAYS_INLINE { block.template operator()<N>(x + i, y + i); },
      [&](int64_t i, int64_t rest) LOWBIT_ALWAYS_INLINE {
        float part[S::kLanes] = {};
        uint8_t out[S::kLanes];
        std::memcpy(part, x + i, static_cast<size_t>(rest) * 4);
        block.template operator()<1>(part, out);
        std::memcpy(y + i, out, static_cast<size_t>(rest));
      });
}

inline constexpr int64_t kTilePixels = 64;
// Floats of each plane that are on their way: read in turns, planes are no streams that the hardware fetches ahead.
// (Zen 5, a 224x224 image: from memory 23 us instead of 62, from L3 17, from L2 15.7 instead of 15.)
inline constexpr int64_t kFetched = 512;

// `channels` planes of floats to pixels of codes: run(channel, from, n, to) makes n codes of one plane.
template <class S, class Run>
LOWBIT_ALWAYS_INLINE inline void PlanesToPixels(const float* x, int64_t plane_stride, int64_t channels,
                                                int64_t pixels, uint8_t* y, int64_t y_stride,
                                                const Run& run) {
  using B = Bytes16<S>;
  if (channels == 1 && y_stride == 1) {
    run(0, x, pixels, y);
    return;
  }
  for (int64_t p = 0; p < pixels; p += kTilePixels) {
    const int64_t width = Min(kTilePixels, pixels - p);
    for (int64_t c = 0; c < channels; c += 16) {
      const int64_t height = Min(16, channels - c);
      alignas(64) uint8_t tile[16][kTilePixels];
      for (int64_t i = 0; i < height; ++i) {
        const float* from = x + (c + i) * plane_stride + p;
        for (int64_t line = 0; line < kTilePixels; line += 16) __builtin_prefetch(from + kFetched + line);
        run(c + i, from, width, tile[i]);
      }
      uint8_t* out = y + p * y_stride + c;
      if (channels == 3 && y_stride == 3) {
        int64_t q = 0;
        for (; q + 16 <= width; q += 16)
          B::StoreInterleaved3(tile[0] + q, tile[1] + q, tile[2] + q, out + 3 * q);
        for (; q < width; ++q) {
          for (int64_t i = 0; i < 3; ++i) out[3 * q + i] = tile[i][q];
        }
        continue;
      }
      for (int64_t q = 0; q < width; q += 16) {
        typename B::I rows[16];
        for (int i = 0; i < 16; ++i) rows[i] = i < height ? B::Load(tile[i] + q) : B::SetB(0);
        Transpose16x16<B>(rows);
        for (int64_t i = 0; i < Min(16, width - q); ++i) {
          uint8_t* pixel = out + (q + i) * y_stride;
          if (height == 16) {
            B::Store(pixel, rows[i]);
          } else {
            uint8_t bytes[16];
            B::Store(bytes, rows[i]);
            std::memcpy(pixel, bytes, static_cast<size_t>(height));
          }
        }
      }
    }
  }
}

template <class S>
void QuantizePlanes(const Quantizer& quantizer, const float* x, int64_t plane_stride, int64_t channels,
                    int64_t pixels, uint8_t* y, int64_t y_stride) {
  const UniformOutput<S, true> output(quantizer);
  PlanesToPixels<S>(
      x, plane_stride, channels, pixels, y, y_stride,
      [&](int64_t, const float* from, int64_t n, uint8_t* to) { QuantizeRun<S>(output, from, n, to); });
}

// ---- LowBitThreshold ----

// Calls block<N>(i, from, to) over n floats.
template <class S, class Block>
LOWBIT_ALWAYS_INLINE inline void ForFloats(const float* x, int64_t n, uint8_t* y, const Block& block) {
  ForBlocks<S>(
      n, [&]<int N>(int64_t i) LOWBIT_ALWAYS_INLINE { block.template operator()<N>(i, x + i, y + i); },
      [&](int64_t i, int64_t rest) LOWBIT_ALWAYS_INLINE {
        float part[S::kLanes] = {};
        uint8_t out[S::kLanes];
        std::memcpy(part, x + i, static_cast<size_t>(rest) * 4);
        block.template operator()<1>(i, part, out);
        std::memcpy(y + i, out, static_cast<size_t>(rest));
      });
}

// codes += the thresholds that each lane of x reaches. rows: the place of each lane's row in spec.search.
template <class S, int N>
LOWBIT_ALWAYS_INLINE inline void SearchThresholds(const ThresholdSpec& spec, const typename S::I (&rows)[N],
                                                  const typename S::F (&x)[N], typename S::I (&codes)[N]) {
  // All below `place` are reached. Of the rest 2 * half - 1 are open, and each step asks the one in the
  // middle.
  typename S::I place[N];
  for (int i = 0; i < N; ++i) place[i] = rows[i];
  for (int64_t half = int64_t{1} << (spec.steps - 1); half > 0; half /= 2) {
    const auto step = S::Set(static_cast<int32_t>(half));
    const float* table = spec.search.data() + half - 1;
    for (int i = 0; i < N; ++i) place[i] = S::StepGeF(place[i], step, x[i], S::Gather(table, place[i]));
  }
  for (int i = 0; i < N; ++i) codes[i] = S::Add(codes[i], S::Sub(place[i], rows[i]));
}

// The codes' range needs no clip: the operator checked that every count gives a code.
template <class S>
ByteOutput<S> ThresholdOutput(const ThresholdSpec& spec) {
  Quantizer range;
  range.is_signed = spec.y_signed;
  range.lo = spec.y_signed ? -128 : 0;
  range.hi = spec.y_signed ? 127 : 255;
  return ByteOutput<S>(range, 0);
}

template <class S>
void ThresholdPlanes(const ThresholdSpec& spec, int64_t first_channel, const float* x, int64_t plane_stride,
                     int64_t channels, int64_t pixels, uint8_t* y, int64_t y_stride) {
  const ByteOutput<S> output = ThresholdOutput<S>(spec);
  const auto run = [&](int64_t plane, const float* from, int64_t n, uint8_t* to) {
    const int64_t c = spec.channels == 1 ? 0 : first_channel + plane;
    const auto dir = S::SetF(spec.dir.data()[c]);
    const auto base = S::Set(spec.base.data()[c]);
    const float* thresholds = spec.thresholds.data() + c * spec.count;
    const auto row = S::Set(static_cast<int32_t>(c << spec.steps));
    ForFloats<S>(from, n, to, [&]<int N>(int64_t, const float* in, uint8_t* out) LOWBIT_ALWAYS_INLINE {
      typename S::F v[N];
      typename S::I codes[N];
      for (int i = 0; i < N; ++i) {
        v[i] = S::MulF(S::LoadF(in + i * S::kLanes), dir);
        codes[i] = base;
      }
      if (spec.count <= ThresholdSpec::kMaxLinear) {
        for (int64_t k = 0; k < spec.count; ++k) {
          const auto threshold = S::SetF(thresholds[k]);
          for (int i = 0; i < N; ++i) codes[i] = S::CountGeF(codes[i], v[i], threshold);
        }
      } else {
        typename S::I rows[N];
        for (int i = 0; i < N; ++i) rows[i] = row;
        SearchThresholds<S>(spec, rows, v, codes);
      }
      output.Store(codes, out);
    });
  };
  PlanesToPixels<S>(x, plane_stride, channels, pixels, y, y_stride, run);
}

template <class S>
void ThresholdRows(const ThresholdSpec& spec, const float* x, int64_t rows, uint8_t* y) {
  if (spec.channels == 1) {
    ThresholdPlanes<S>(spec, 0, x, 0, 1, rows, y, 1);
    return;
  }
  const ByteOutput<S> output = ThresholdOutput<S>(spec);
  const float *dirs = spec.dir.data(), *by_rank = spec.by_rank.data();
  const int32_t *bases = spec.base.data(), *places = spec.place.data();
  const int64_t width = rows * spec.channels, stride = spec.row_stride();
  for (int64_t done = 0; done < width; done += spec.period) {
    ForFloats<S>(x + done, Min(spec.period, width - done), y + done,
                 [&]<int N>(int64_t c, const float* in, uint8_t* out) LOWBIT_ALWAYS_INLINE {
                   typename S::F v[N];
                   typename S::I codes[N];
                   for (int i = 0; i < N; ++i) {
                     v[i] = S::MulF(S::LoadF(in + i * S::kLanes), S::LoadF(dirs + c + i * S::kLanes));
                     codes[i] = S::Load(bases + c + i * S::kLanes);
                   }
                   if (spec.count <= ThresholdSpec::kMaxLinear) {
                     for (int64_t k = 0; k < spec.count; ++k) {
                       const float* thresholds = by_rank + k * stride + c;
                       for (int i = 0; i < N; ++i) {
                         codes[i] = S::CountGeF(codes[i], v[i], S::LoadF(thresholds + i * S::kLanes));
                       }
                     }
                   } else {
                     typename S::I place[N];
                     for (int i = 0; i < N; ++i) place[i] = S::Load(places + c + i * S::kLanes);
                     SearchThresholds<S>(spec, place, v, codes);
                   }
                   output.Store(codes, out);
                 });
  }
}

template <class S, bool kSigned>
void DequantizePlanesImpl(int32_t x_zero_point, float x_scale, const uint8_t* x, int64_t x_stride,
                          int64_t channels, int64_t pixels, float* y, int64_t plane_stride) {
  using B = Bytes16<S>;
  const Dequantizer<S, kSigned> dequantize(x_zero_point, x_scale);
  const auto store16 = [&](const uint8_t* codes, int64_t width, float* out) LOWBIT_ALWAYS_INLINE {
    if (width == 16) {
      for (int k = 0; k < 16; k += S::kLanes) S::StoreF(out + k, dequantize(codes + k));
      return;
    }
    float values[16];
    for (int k = 0; k < 16; k += S::kLanes) S::StoreF(values + k, dequantize(codes + k));
    std::memcpy(out, values, static_cast<size_t>(width) * 4);
  };
  if (channels == 1 && x_stride == 1) {  // a plane already
    int64_t p = 0;
    for (; p + 16 <= pixels; p += 16) store16(x + p, 16, y + p);
    if (p < pixels) {
      uint8_t bytes[16] = {};
      std::memcpy(bytes, x + p, static_cast<size_t>(pixels - p));
      store16(bytes, pixels - p, y + p);
    }
    return;
  }
  const uint8_t* end = x + (pixels - 1) * x_stride + channels;
  for (int64_t c = 0; c < channels; c += 16) {
    const int64_t height = Min(16, channels - c);
    for (int64_t p = 0; p < pixels; p += 16) {
      const int64_t width = Min(16, pixels - p);
      typename B::I rows[16];
      for (int64_t i = 0; i < 16; ++i) {
        // Of fewer than 16 channels the next pixels' codes come along, as planes that nobody stores.
        const uint8_t* pixel = x + (p + i) * x_stride + c;
        if (i < width && end - pixel >= 16) {
          rows[i] = B::Load(pixel);
          continue;
        }
        uint8_t bytes[16] = {};
        if (i < width) std::memcpy(bytes, pixel, static_cast<size_t>(height));
        rows[i] = B::Load(bytes);
      }
      Transpose16x16<B>(rows);
      for (int64_t i = 0; i < height; ++i) {
        uint8_t codes[16];
        B::Store(codes, rows[i]);
        store16(codes, width, y + (c + i) * plane_stride + p);
      }
    }
  }
}

template <class S>
void DequantizePlanes(bool x_signed, int32_t x_zero_point, float x_scale, const uint8_t* x, int64_t x_stride,
                      int64_t channels, int64_t pixels, float* y, int64_t plane_stride) {
  if (x_signed) {
    DequantizePlanesImpl<S, true>(x_zero_point, x_scale, x, x_stride, channels, pixels, y, plane_stride);
  } else {
    DequantizePlanesImpl<S, false>(x_zero_point, x_scale, x, x_stride, channels, pixels, y, plane_stride);
  }
}

// ---- LowBitResize ----

// fn.operator()<taps>()
template <class Fn>
inline void SpecializeTaps(int taps, const Fn& fn) {
  if (taps == 1) return fn.template operator()<1>();
  if (taps == 2) return fn.template operator()<2>();
  fn.template operator()<4>();
}

// The products and sums of one vector; number(k) is that of tap k. No multiply-add: each rounds once.
template <class S, int kTaps, class Number>
LOWBIT_ALWAYS_INLINE inline typename S::F BlendTaps(const typename S::F (&weights)[kTaps],
                                                    const Number& number) {
  auto sum = S::MulF(weights[0], number(0));
  for (int k = 1; k < kTaps; ++k) sum = S::AddF(sum, S::MulF(weights[k], number(k)));
  return sum;
}

template <class S, bool kSigned, int kTaps>
void BlendCodesImpl(int32_t x_zero_point, const uint8_t* const* rows, const float* weights, int64_t count,
                    float* y) {
  const auto zero_point = S::Set(x_zero_point);
  typename S::F w[kTaps];
  for (int k = 0; k < kTaps; ++k) w[k] = S::SetF(weights[k]);
  const auto number = [&](const uint8_t* x) LOWBIT_ALWAYS_INLINE {
    return S::ToFloat(S::Sub(LoadCodes<S, kSigned>(x), zero_point));
  };
  int64_t i = 0;
  for (; i + S::kLanes <= count; i += S::kLanes) {
    S::StoreF(y + i, BlendTaps<S>(w, [&](int k) LOWBIT_ALWAYS_INLINE { return number(rows[k] + i); }));
  }
  if (i == count) return;
  S::StoreF(y + i, BlendTaps<S>(w, [&](int k) LOWBIT_ALWAYS_INLINE {
              return number(PartialBytes<S>(rows[k] + i, count - i).bytes);
            }));
}

template <class S>
void BlendCodes(bool x_signed, int32_t x_zero_point, const uint8_t* const* rows, const float* weights,
                int taps, int64_t count, float* y) {
  SpecializeTaps(taps, [&]<int kTaps>() {
    if (x_signed) {
      BlendCodesImpl<S, true, kTaps>(x_zero_point, rows, weights, count, y);
    } else {
      BlendCodesImpl<S, false, kTaps>(x_zero_point, rows, weights, count, y);
    }
  });
}

template <class S>
void BlendRows(const float* const* rows, const float* weights, int taps, int64_t count, float* y) {
  SpecializeTaps(taps, [&]<int kTaps>() {
    typename S::F w[kTaps];
    for (int k = 0; k < kTaps; ++k) w[k] = S::SetF(weights[k]);
    for (int64_t i = 0; i < count; i += S::kLanes) {
      S::StoreF(y + i, BlendTaps<S>(w, [&](int k) LOWBIT_ALWAYS_INLINE { return S::LoadF(rows[k] + i); }));
    }
  });
}

// What a pixel's last vector writes too much, the next pixel writes again. For one or two channels single
// floats are faster than vectors that are mostly thrown away.
template <class S>
void BlendPixels(const float* x, const int64_t* places, const float* weights, int taps, int64_t pixels,
                 int64_t channels, float* y) {
  SpecializeTaps(taps, [&]<int kTaps>() {
    if (channels <= 2) {
      for (int64_t p = 0; p < pixels; ++p, places += kTaps, weights += kTaps) {
        for (int64_t c = 0; c < channels; ++c) {
          float sum = weights[0] * x[places[0] + c];
          for (int k = 1; k < kTaps; ++k) sum += weights[k] * x[places[k] + c];
          *y++ = sum;
        }
      }
      return;
    }
    for (int64_t p = 0; p < pixels; ++p, places += kTaps, weights += kTaps, y += channels) {
      typename S::F w[kTaps];
      for (int k = 0; k < kTaps; ++k) w[k] = S::SetF(weights[k]);
      for (int64_t c = 0; c < channels; c += S::kLanes) {
        S::StoreF(y + c,
                  BlendTaps<S>(w, [&](int k) LOWBIT_ALWAYS_INLINE { return S::LoadF(x + places[k] + c); }));
      }
    }
  });
}

template <class S>
void ScaleFloats(const Quantizer& quantizer, const float* x, float multiplier, int64_t count, uint8_t* y) {
  const ByteOutput<S> output(quantizer, quantizer.zero_point);
  const auto m = S::SetF(multiplier);
  ForFloats<S>(x, count, y, [&]<int N>(int64_t, const float* from, uint8_t* to) LOWBIT_ALWAYS_INLINE {
    typename S::I rounded[N];
    for (int i = 0; i < N; ++i) rounded[i] = S::RoundToInt(S::MulF(S::LoadF(from + i * S::kLanes), m));
    output.Store(rounded, to);
  });
}

// ---- LowBitNormalization ----

// Squares of codes are at most 2^16: so many of them fit 32 bits. The loops are left to the compiler, which
// has the flags of this level.
inline constexpr int64_t kSquaresInWord = 1 << 15;

template <class Code>
void SumSquaresOf(const uint8_t* bytes, int64_t count, int64_t* sum, int64_t* square) {
  const Code* x = reinterpret_cast<const Code*>(bytes);
  int64_t sums = 0, squares = 0;
  for (int64_t begin = 0; begin < count; begin += kSquaresInWord) {
    const int64_t end = Min(begin + kSquaresInWord, count);
    int32_t part = 0;
    uint32_t square_part = 0;
    for (int64_t i = begin; i < end; ++i) {
      const int32_t code = x[i];
      part += code;
      square_part += static_cast<uint32_t>(code * code);
    }
    sums += part;
    squares += square_part;
  }
  *sum = sums;
  *square = squares;
}

template <class S>
void SumSquares(const uint8_t* x, bool is_signed, int64_t count, int64_t* sum, int64_t* square) {
  if (is_signed) {
    SumSquaresOf<int8_t>(x, count, sum, square);
  } else {
    SumSquaresOf<uint8_t>(x, count, sum, square);
  }
}

template <class Code>
void SumPixelSquaresOf(const uint8_t* bytes, int64_t pixels, int64_t pixel_stride, int64_t channels,
                       int64_t* sums, int64_t* squares) {
  constexpr int64_t kBlock = 64;
  for (int64_t first = 0; first < channels; first += kBlock) {
    const int64_t width = Min(kBlock, channels - first);
    for (int64_t c = 0; c < width; ++c) sums[first + c] = squares[first + c] = 0;
    for (int64_t begin = 0; begin < pixels; begin += kSquaresInWord) {
      const int64_t end = Min(begin + kSquaresInWord, pixels);
      int32_t part[kBlock] = {};
      uint32_t square_part[kBlock] = {};
      const auto add = [&](const Code* x, int64_t count) LOWBIT_ALWAYS_INLINE {
        for (int64_t c = 0; c < count; ++c) {
          const int32_t code = x[c];
          part[c] += code;
          square_part[c] += static_cast<uint32_t>(code * code);
        }
      };
      const Code* x = reinterpret_cast<const Code*>(bytes) + begin * pixel_stride + first;
      if (width == kBlock) {
        for (int64_t p = begin; p < end; ++p, x += pixel_stride) add(x, kBlock);
      } else {
        for (int64_t p = begin; p < end; ++p, x += pixel_stride) add(x, width);
      }
      for (int64_t c = 0; c < width; ++c) {
        sums[first + c] += part[c];
        squares[first + c] += square_part[c];
      }
    }
  }
}

template <class S>
void SumPixelSquares(const uint8_t* x, bool is_signed, int64_t pixels, int64_t pixel_stride, int64_t channels,
                     int64_t* sums, int64_t* squares) {
  if (is_signed) {
    SumPixelSquaresOf<int8_t>(x, pixels, pixel_stride, channels, sums, squares);
  } else {
    SumPixelSquaresOf<uint8_t>(x, pixels, pixel_stride, channels, sums, squares);
  }
}

template <class S, bool kSigned, bool kUniform, bool kQuantized>
void NormalizeImpl(const NormalizationSpec& spec, const uint8_t* x, const float* mean, const float* gain,
                   const float* gamma, const float* beta, uint8_t* y, int64_t count) {
  const UniformOutput<S, kQuantized> output(spec.quantizer);
  constexpr int64_t kSize = kQuantized ? 1 : 4;
  const auto zero = S::Set(spec.x_zero_point);
  const auto one_mean = S::SetF(mean[0]), one_gain = S::SetF(gain[0]);
  const auto block = [&]<int N>(int64_t at, const uint8_t* from, uint8_t* to) LOWBIT_ALWAYS_INLINE {
    typename S::F v[N];
    for (int i = 0; i < N; ++i) {
      const int64_t k = at + i * S::kLanes;
      const auto code = S::ToFloat(S::Sub(LoadCodes<S, kSigned>(from + i * S::kLanes), zero));
      const auto centred = S::SubF(code, kUniform ? one_mean : S::LoadF(mean + k));
      const auto normal = S::MulF(centred, kUniform ? one_gain : S::LoadF(gain + k));
      v[i] = S::AddF(S::MulF(normal, S::LoadF(gamma + k)), S::LoadF(beta + k));
    }
    output.Store(v, to);
  };
  ForBlocks<S>(
      count,
      [&]<int N>(int64_t i) LOWBIT_ALWAYS_INLINE { block.template operator()<N>(i, x + i, y + i * kSize); },
      [&](int64_t i, int64_t n) LOWBIT_ALWAYS_INLINE {
        const PartialBytes<S> part(x + i, n);
        uint8_t out[S::kLanes * kSize];
        block.template operator()<1>(i, part.bytes, out);
        std::memcpy(y + i * kSize, out, static_cast<size_t>(n * kSize));
      });
}

template <class S>
void Normalize(const NormalizationSpec& spec, const uint8_t* x, const float* mean, const float* gain,
               bool uniform, const float* gamma, const float* beta, void* y, int64_t count) {
  Specialize(
      [&]<bool kSigned, bool kUniform, bool kQuantized>() {
        NormalizeImpl<S, kSigned, kUniform, kQuantized>(spec, x, mean, gain, gamma, beta,
                                                        static_cast<uint8_t*>(y), count);
      },
      spec.x_signed, uniform, spec.quantizer.quantized);
}

inline uint8_t PixelOf(int32_t sum) {
  const int32_t pixel = sum >> 22;
  return static_cast<uint8_t>(pixel < 0 ? 0 : pixel > 255 ? 255 : pixel);
}
constexpr int32_t kHalfWeight = 1 << 21;

// Four taps at a time: of as many as there are the compiler makes vectors that are longer than most sums.
template <int kChannels>
void ResampleRowOf(const PixelTaps& taps, const uint8_t* x, int64_t pixels, uint8_t* y) {
  constexpr int32_t kAtOnce = 4;
  for (int64_t p = 0; p < pixels; ++p, y += kChannels) {
    const uint8_t* from = x + static_cast<int64_t>(taps.first[p]) * kChannels;
    const int32_t* weights = taps.weights + p * taps.stride;
    int32_t sums[kChannels];
    for (int32_t& sum : sums) sum = kHalfWeight;
    const auto add = [&](int32_t count) LOWBIT_ALWAYS_INLINE {
      for (int32_t k = 0; k < count; ++k) {
        for (int c = 0; c < kChannels; ++c) sums[c] += weights[k] * from[k * kChannels + c];
      }
    };
    int32_t left = taps.count[p];
    for (; left >= kAtOnce; left -= kAtOnce, from += kAtOnce * kChannels, weights += kAtOnce) add(kAtOnce);
    add(left);
    for (int c = 0; c < kChannels; ++c) y[c] = PixelOf(sums[c]);
  }
}

template <class S>
void ResampleRow(const PixelTaps& taps, const uint8_t* x, int64_t channels, int64_t pixels, uint8_t* y) {
  if (channels == 1) {
    ResampleRowOf<1>(taps, x, pixels, y);
  } else {
    ResampleRowOf<3>(taps, x, pixels, y);
  }
}

template <class S>
void ResampleColumn(const uint8_t* const* rows, const int32_t* weights, int64_t taps, int64_t count,
                    uint8_t* y) {
  constexpr int64_t kBlock = 64;
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t width = Min(kBlock, count - first);
    int32_t sums[kBlock];
    for (int32_t& sum : sums) sum = kHalfWeight;
    const auto add = [&](int64_t size) LOWBIT_ALWAYS_INLINE {
      for (int64_t k = 0; k < taps; ++k) {
        const uint8_t* const row = rows[k] + first;
        for (int64_t i = 0; i < size; ++i) sums[i] += weights[k] * row[i];
      }
      for (int64_t i = 0; i < size; ++i) y[first + i] = PixelOf(sums[i]);
    };
    if (width == kBlock) {
      add(kBlock);
    } else {
      add(width);
    }
  }
}

// The table of a level. A minimal build has the functions of its ops alone; nobody calls the others.
template <class S>
constexpr ElementwiseKernels MakeKernels(const char* name) {
  ElementwiseKernels kernels = {};
  kernels.name = name;
  if constexpr (HasOp("LowBitAffine") || HasOp("LowBitRequantize") || HasOp("LowBitDequantize") ||
                HasOp("LowBitConcat")) {
    kernels.affine = Affine<S>;
  }
  if constexpr (HasOp("LowBitConcat")) kernels.copy_rows = CopyRows<S>;
  if constexpr (HasOp("LowBitAdd") || HasOp("LowBitMul")) kernels.binary = Binary<S>;
  if constexpr (HasOp("LowBitLookup") || HasOp("LowBitSoftmax") || HasOp("LowBitImage")) {
    kernels.lookup = Lookup<S>;
  }
  if constexpr (HasOp("LowBitMaxPool")) kernels.max_taps = MaxTaps<S>;
  if constexpr (HasOp("LowBitAveragePool")) kernels.average_taps = AverageTaps<S>;
  if constexpr (HasOp("LowBitGlobalAveragePool")) kernels.sum_pixels = SumPixels<S>;
  if constexpr (HasOp("LowBitGlobalAveragePool") || HasOp("LowBitSoftmax")) {
    kernels.scale_sums = ScaleSums<S>;
  }
  if constexpr (HasOp("LowBitResize")) {
    kernels.blend_codes = BlendCodes<S>;
    kernels.blend_rows = BlendRows<S>;
    kernels.blend_pixels = BlendPixels<S>;
  }
  if constexpr (HasOp("LowBitResize") || HasOp("LowBitSoftmax")) kernels.scale_floats = ScaleFloats<S>;
  if constexpr (HasOp("LowBitImage")) {
    kernels.resample_row = ResampleRow<S>;
    kernels.resample_column = ResampleColumn<S>;
  }
  if constexpr (HasOp("LowBitQuantize")) kernels.quantize_planes = QuantizePlanes<S>;
  if constexpr (HasOp("LowBitDequantize")) kernels.dequantize_planes = DequantizePlanes<S>;
  if constexpr (HasOp("LowBitThreshold")) {
    kernels.threshold_planes = ThresholdPlanes<S>;
    kernels.threshold_rows = ThresholdRows<S>;
  }
  if constexpr (HasOp("LowBitNormalization")) {
    kernels.sum_squares = SumSquares<S>;
    kernels.sum_pixel_squares = SumPixelSquares<S>;
    kernels.normalize = Normalize<S>;
  }
  return kernels;
}

}  // namespace
}  // namespace lowbit
