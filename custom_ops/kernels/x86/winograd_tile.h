// The transforms and products of the Winograd kernels, templated over a SIMD trait S and the points P of
// winograd_points.h. Operands are 16-bit words or bytes, sums 32 bits wide, modulo 2^32.
//
// A product is that of igemm_tile.h: two channels of a tile as words, four as bytes, side by side, are broadcast to
// all lanes and multiplied with the weights that every lane's output channel has for them.
//
//   x, tile t    [d0 d1]  ->  broadcast  [d0 d1 | d0 d1 | d0 d1 | ...]
//   weights                   ->         [ ch 0 |  ch 1 |  ch 2 | ...]
//   acc[t][v]                 +=         [sum of 2 products | ...]
//
// vpdpbusd takes bytes of x without a sign: kInputOffset is added to them, and the sums begin at what it adds.
//
// A trait is WordOperands or ByteOperands of one that an instruction set has: SumVectors of a simd_<isa>.h,
// with Dot(acc, x, w), two products of words, or four of bytes, per lane, added. It then has
//
//   Codes, Sums      vectors of operands and of 32 bits, unsigned, so that what overflows wraps
//   kCodeBytes       of an operand;  kInputOffset: what StoreInput adds to it
//   kGroup           tiles multiplied together: kGroup * kPanelVectors sums stay in registers
//   kSliceBytes, kBlockTiles: of winograd_scheme.h
//   LoadBytes(p)     bytes -> Codes;  LoadTap<bits, part>(p): weights of a group (winograd_scheme.h) -> Codes
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/common/inline.h"
#include "kernels/common/tile_finish.h"
#include "kernels/common/winograd_points.h"
#include "kernels/common/winograd_scheme.h"
#include "kernels/common/winograd_transform.h"

namespace lowbit {
namespace {

constexpr int kPanelVectors = 2;
// A group of tiles reads 4 bytes of its transformed inputs a cycle, which L3 delivers as well as L2; what its products
// share, transformed weights, stays in L1.
constexpr size_t kWinogradScratch = 2560 * 1024;

// Factors are small constants: shifts and additions, which take more ports than products.
struct VectorRing {
  template <class V>
  static V Plus(V a, V b) {
    return a + b;
  }
  template <class V>
  static V Minus(V a, V b) {
    return a - b;
  }
  template <int n, class V>
  static V Times(V a) {
    constexpr int kShift = __builtin_ctz(n), kOdd = n >> kShift;
    static_assert(kOdd == 1 || kOdd == 3);
    if constexpr (kOdd == 3) a += a + a;
    return kShift == 0 ? a : a << kShift;
  }
  template <int n, class V>
  static V PlusTimes(V a, V b) {
    return a + Times<n>(b);
  }
  template <int n, class V>
  static V MinusTimes(V a, V b) {
    return a - Times<n>(b);
  }
};

// A typedef, because GCC 12 forgets the attribute of a `using` where it depends on a template's arguments.
template <class T, size_t kBytes>
struct VectorType {
  typedef T Type __attribute__((vector_size(kBytes)));
};
template <class T, size_t kBytes>
using Vector = typename VectorType<T, kBytes>::Type;

template <class Simd, size_t kSlice, int kTiles>
struct SumVectors : Simd {
  using I = typename Simd::I;
  using Sums = Vector<uint32_t, sizeof(I)>;
  static constexpr size_t kSliceBytes = kSlice;
  static constexpr int kGroup = kTiles;

  template <int n>
  static I ShiftRight(I v) {
    using Signed = Vector<int32_t, sizeof(I)>;
    return __builtin_bit_cast(I, __builtin_bit_cast(Signed, v) >> n);
  }
};

template <class V>
V LoadVector(const uint8_t* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Operands of two bytes.
template <class S>
struct WordOperands : S {
  static constexpr size_t kWords = sizeof(typename S::I) / 2;
  using Codes = Vector<uint16_t, 2 * kWords>;
  static constexpr size_t kCodeBytes = 2, kBlockTiles = 80;
  static constexpr int kInputOffset = 0;

  static Codes LoadBytes(const uint8_t* p, uint8_t shift) {
    const auto bytes = LoadVector<Vector<uint8_t, kWords>>(p) - shift;
    return __builtin_bit_cast(Codes, S::WordsOfU8(__builtin_bit_cast(typename S::Half, bytes)));
  }
  static void StoreCodes(uint8_t* to, Codes v) { std::memcpy(to, &v, sizeof v); }
  static void StoreInput(uint8_t* to, Codes v) { StoreCodes(to, v); }
  template <int kBits, int kPart>
  static Codes LoadTap(const uint8_t* p) {
    if constexpr (kBits == 8)
      return __builtin_bit_cast(Codes, S::WordsOfS8(LoadVector<typename S::Half>(p + kWords * kPart)));
    // 16 bytes: the low halves of all, then the high ones.
    using Bytes = Vector<int16_t, 32>;
    const auto bytes = __builtin_bit_cast(Bytes, _mm256_cvtepi8_epi16(LoadVector<__m128i>(p)));
    if constexpr (kWords == 16) {
      return __builtin_bit_cast(Codes, kPart == 0 ? bytes << 12 >> 12 : bytes >> 4);
    } else {
      const auto low = _mm512_castsi256_si512(__builtin_bit_cast(__m256i, bytes << 12));
      const auto both = _mm512_inserti64x4(low, __builtin_bit_cast(__m256i, bytes << 8), 1);
      return __builtin_bit_cast(Codes, _mm512_srai_epi16(both, 12));
    }
  }
};

// Operands of one byte for the trait S of an instruction set with vpdpbusd. Its activations have 6 bits at most, codes
// around zero, which F(2x2) takes to signed bytes.
template <class S>
struct ByteOperands : S {
  using Codes = uint8_t __attribute__((vector_size(32)));
  static constexpr size_t kCodeBytes = 1, kBlockTiles = 160;
  static constexpr int kInputOffset = 128;

  static Codes LoadBytes(const uint8_t* p, uint8_t shift) { return LoadVector<Codes>(p) - shift; }
  static void StoreCodes(uint8_t* to, Codes v) { std::memcpy(to, &v, sizeof v); }
  static void StoreInput(uint8_t* to, Codes v) { StoreCodes(to, v + static_cast<uint8_t>(kInputOffset)); }
  template <int kBits, int kPart>
  static Codes LoadTap(const uint8_t* p) {
    if constexpr (kBits == 8) return LoadVector<Codes>(p);
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(low), _mm_srli_epi16(low, 4), 1);
    const Codes codes = __builtin_bit_cast(Codes, _mm256_and_si256(both, _mm256_set1_epi8(15)));
    return (codes ^ uint8_t{8}) - uint8_t{8};  // from 4 bits to a signed byte
  }
};

// Of two rows of points, so that values stay in registers and what comes of a slice in L1.
constexpr int kPassRows = 2;
template <class S, class P, int kBits, int kPass>
void TransformRows(const WinogradWeights& weights) {
  constexpr size_t kTapBytes = kWinogradGroup * kBits / 8, kVector = sizeof(typename S::Codes);
  constexpr size_t kParts = S::kCodeBytes * kWinogradGroup / kVector;
  const uint8_t* taps = weights.taps;
  uint8_t* to = weights.to;
  const auto store = [](uint8_t* at, typename S::Codes v) LOWBIT_ALWAYS_INLINE { S::StoreCodes(at, v); };
  const auto transform = [&]<size_t part>() LOWBIT_ALWAYS_INLINE {
    const auto tap = [&](size_t i) LOWBIT_ALWAYS_INLINE {
      return S::template LoadTap<kBits, part>(taps + i * kTapBytes);
    };
    TransformTaps<P, kPass * kPassRows, kPassRows>(tap, to + part * kVector, weights.point_pitch, store);
  };
  for (size_t group = 0; group < weights.groups; ++group, taps += 9 * kTapBytes, to += kParts * kVector) {
    transform.template operator()<0>();
    if constexpr (kParts == 2) transform.template operator()<1>();
  }
}

template <class S, class P, int kBits>
void TransformWeights(const WinogradWeights& weights) {
  if (weights.pass == 0) return TransformRows<S, P, kBits, 0>(weights);
  if (weights.pass == 1) return TransformRows<S, P, kBits, 1>(weights);
  if constexpr (P::kTile == 4) return TransformRows<S, P, kBits, 2>(weights);
}

template <class S, class P>
void TransformPixels(const WinogradInput& in) {
  using Codes = typename S::Codes;
  constexpr size_t kChannels = sizeof(Codes) / S::kCodeBytes;
  for (size_t block = 0; block < in.blocks; ++block) {
    const auto load = [&](int i) LOWBIT_ALWAYS_INLINE {
      return S::LoadBytes(in.pixels[i] + block * kChannels, in.shift);
    };
    TransformInputs<P, Codes>(load, in.to + block * in.block_pitch, in.point_pitch,
                              [](uint8_t* at, Codes value)
                                  LOWBIT_ALWAYS_INLINE { S::StoreInput(at, value); });
  }
}

template <class S, int kTiles>
void ProductOf(const WinogradProduct& p) {
  using I = typename S::I;
  constexpr size_t kBlock = sizeof(typename S::Codes), kPairs = kBlock / 4;
  const uint8_t *x_item = p.x, *w_item = p.w;
  uint8_t* to = p.to;
  const int32_t* start = p.start;
  for (size_t item = 0; item < p.count; ++item, x_item += p.x_step, w_item += p.w_step, to += p.to_step) {
    I first[kPanelVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v)
      first[v] = S::kInputOffset == 0 || p.adds ? S::Set(0) : S::Load(start + v * S::kLanes);
    start += p.start_step;
    I acc[kTiles][kPanelVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kTiles * kPanelVectors; ++i)
      acc[i / kPanelVectors][i % kPanelVectors] =
          p.adds ? S::Load(to + i * sizeof(I)) : first[i % kPanelVectors];
    const uint8_t *x = x_item, *w = w_item;
    for (size_t block = 0; block < p.blocks; ++block, x += kTiles * kBlock) {
#pragma GCC unroll 4
      for (size_t pair = 0; pair < kPairs; ++pair, w += kPanelVectors * sizeof(I)) {
        I weights[kPanelVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kPanelVectors; ++v) weights[v] = S::Load(w + v * sizeof(I));
#pragma GCC unroll 8
        for (int t = 0; t < kTiles; ++t) {
          int32_t channels;
          std::memcpy(&channels, x + t * kBlock + pair * 4, 4);
          const I both = S::Set(channels);
#pragma GCC unroll 2
          for (int v = 0; v < kPanelVectors; ++v) acc[t][v] = S::Dot(acc[t][v], both, weights[v]);
        }
      }
    }
    StoreTile<S, kTiles, kPanelVectors>(reinterpret_cast<int32_t*>(to), acc);
  }
}

template <class S>
void Product(const WinogradProduct& p) {
  const auto run = [&]<int kTiles>(const auto& smaller) {
    if (p.tiles == kTiles) return ProductOf<S, kTiles>(p);
    if constexpr (kTiles > 1) smaller.template operator()<kTiles - 1>(smaller);
  };
  run.template operator()<S::kGroup>(run);
}

template <class S, class P, bool kDirect, bool kAdds>
void OutputTiles(const WinogradOutput& out) {
  using I = typename S::I;
  using V = typename S::Sums;
  constexpr int kT = P::kTile;
  constexpr size_t kChannels = kPanelVectors * S::kLanes;
  V offset[kPanelVectors];
  I base[kPanelVectors];
  for (int v = 0; v < kPanelVectors; ++v) {
    const I added = S::Mul(S::Load(out.offset + v * S::kLanes), S::Set(P::kScale / P::kOneFactor));
    offset[v] = __builtin_bit_cast(V, added);
    base[v] = kAdds ? S::Set(0) : S::Load(out.base + v * S::kLanes);
  }
  const EpilogueView& e = *out.epilogue;
  const float* scale = kDirect ? e.scale + out.channel : nullptr;
  for (size_t tile = 0; tile < out.tiles; ++tile) {
    const uint8_t* products = out.products + tile * kChannels * sizeof(int32_t);
    const auto load = [&](int point, int v) LOWBIT_ALWAYS_INLINE {
      return __builtin_bit_cast(
          V, S::Load(products + static_cast<size_t>(point) * out.point_pitch + v * sizeof(I)));
    };
    int32_t* sums = out.sums + tile * kT * kChannels;
    WinogradDirect direct{};
    if (kDirect) direct = out.direct[tile];
    const auto finish = [&](int row, const V(&y)[kPanelVectors][kT]) LOWBIT_ALWAYS_INLINE {
      if (kDirect && static_cast<size_t>(row) >= direct.rows) return;
      I sum[kT][kPanelVectors];
#pragma GCC unroll 8
      for (int i = 0; i < kT * kPanelVectors; ++i) {
        const int x = i / kPanelVectors, v = i % kPanelVectors;
        I value = __builtin_bit_cast(I, y[v][x]);
        if constexpr (P::kOdd != 1) value = S::Mul(value, S::Set(static_cast<int32_t>(P::kOdd)));
        const I before = kAdds ? S::Load(sums + i * S::kLanes) : base[v];
        sum[x][v] = S::Add(before, S::template ShiftRight<P::kShift>(value));
      }
      if constexpr (!kDirect) {
        StoreTile<S, kT, kPanelVectors>(sums, sum);
      } else {
        // Outputs beside the image have no place in y.
        uint8_t part[kT * kChannels];
        const bool whole = direct.columns == kT;
        RequantizeTile<S, kT, kPanelVectors, false, false>(
            e, sum, scale, kChannels, {}, whole ? direct.y : part, whole ? e.channels : kChannels);
        for (size_t x = 0; !whole && x < direct.columns; ++x)
          std::memcpy(direct.y + x * e.channels, part + x * kChannels, kChannels);
        direct.y += out.y_row_pitch;
      }
      sums += out.row_pitch;
    };
    TransformOutputs<P, kPanelVectors>(load, offset, finish);
  }
}

template <class S, class P, bool kDirect>
void OutputBase(const WinogradOutput& out) {
  return out.base != nullptr ? OutputTiles<S, P, kDirect, false>(out) : OutputTiles<S, P, kDirect, true>(out);
}

template <class S, class P>
void Output(const WinogradOutput& out) {
  return out.direct != nullptr ? OutputBase<S, P, true>(out) : OutputBase<S, P, false>(out);
}

template <class S, int kPixels, int kVectors>
void FinishPixels(const TileOutput& output, const TileSums& s, size_t first) {
  typename S::I acc[kPixels][kVectors];
#pragma GCC unroll 4
  for (int p = 0; p < kPixels; ++p) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v)
      acc[p][v] = S::Load(s.sums + (first + static_cast<size_t>(p)) * s.pitch + v * S::kLanes);
  }
  FinishRegisters<S, kPixels, kVectors>(output, s.pixel + first, s.channel, s.count, acc);
}

template <class S, int kVectors>
void FinishVectors(const TileOutput& output, const TileSums& s) {
  size_t p = 0;
  for (; p + 4 <= s.pixels; p += 4) FinishPixels<S, 4, kVectors>(output, s, p);
  for (; p < s.pixels; ++p) FinishPixels<S, 1, kVectors>(output, s, p);
}

template <class S>
void Finish(const TileOutput& output, const TileSums& s) {
  return s.count > S::kLanes ? FinishVectors<S, 2>(output, s) : FinishVectors<S, 1>(output, s);
}

template <class S, template <class> class PointsOf, const WinogradCycles& kCycles>
constexpr WinogradScheme SchemeOf() {
  using P = PointsOf<VectorRing>;
  return {
      .tile = P::kTile,
      .channels = kPanelVectors * S::kLanes,
      .code_bytes = S::kCodeBytes,
      .block = sizeof(typename S::Codes) / S::kCodeBytes,
      .unit = 4 / S::kCodeBytes,
      .sum_bytes = 4,
      .group = S::kGroup,
      .granule = 1,
      .pass_points = kPassRows * (P::kTile + 2),
      .scratch_bytes = kWinogradScratch,
      .slice_bytes = S::kSliceBytes,
      .block_tiles = S::kBlockTiles,
      .signed_inputs = S::kCodeBytes == 1,
      .input_offset = S::kInputOffset,
      .bits = 32 - P::kShift,
      .chunks_per_widening = 1,
      .g = P::kG,
      .weights4 = &TransformWeights<S, P, 4>,
      .weights8 = &TransformWeights<S, P, 8>,
      .input = &TransformPixels<S, P>,
      .product = &Product<S>,
      .output = &Output<S, P>,
      .finish = &Finish<S>,
      .cycles = []() -> const WinogradCycles& { return kCycles; },
  };
}

}  // namespace
}  // namespace lowbit
