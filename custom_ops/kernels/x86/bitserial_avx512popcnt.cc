// Bit-serial tiles on VPOPCNTDQ, 512 bits: 16 output channels x 32 bits of K per vector.
//
// A step of the tile loads the 32 bits of each channel of a panel, broadcasts the same 32 bits of K of each
// pixel, and spends a logic operation, a population count and an addition on 512 one-bit products. Zen 5
// issues four such instructions a cycle, so 683 products a cycle are the bound; the loop reaches 98 % of it.
// Two things were tried and left out (Zen 5, whole loop in registers):
//   - carry-save adders in front of the counts (Harley and Seal): three vpternlogd for every second count and
//     addition, but with three different sources they issue only about twice a cycle: 0.75 of the speed.
//   - vpopcntb + vpdpbusd, which would scale each plane for free: count and dot product share two of the four
//     pipes: 0.9 of the speed.
#include "kernels/x86/bitserial_tile.h"
#include "kernels/x86/simd_avx512.h"

namespace lowbit {
namespace {

struct Popcnt512 {
  using S = Avx512;
  using I = Avx512::I;
  static constexpr int kMaxVectors = 4;
  static constexpr int kVectorBytes = 64;
  // Pixels per tile, by vectors per panel. 32 registers hold the sums, the weights of a step, a broadcast and
  // a product.
  static constexpr int kTileRows[kMaxVectors] = {12, 12, 8, 6};

  template <BitOp kOp>
  static I Count(I x, I w, const uint8_t* mask) {
    if constexpr (kOp == BitOp::kAnd) return _mm512_popcnt_epi32(S::And(x, w));
    if constexpr (kOp == BitOp::kXor) return _mm512_popcnt_epi32(S::Xor(x, w));
    return _mm512_popcnt_epi32(S::And(S::Xor(x, w), S::Load(mask)));
  }

  // Adds the counts of one unit; the first one of all sets the sums.
  template <BitOp kOp, int MR, int NV, bool kFirst>
  static inline __attribute__((always_inline)) void CountUnit(const uint8_t* const (&x)[MR], uint32_t offset,
                                                              const uint8_t* w, I (&sum)[MR][NV]) {
    I weights[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) weights[v] = S::Load(w + v * kVectorBytes);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      const I bits = S::Set(static_cast<int32_t>(LoadUnit32(x[r] + offset)));
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        const I count = Count<kOp>(bits, weights[v], w + (NV + v) * kVectorBytes);
        sum[r][v] = kFirst ? count : S::Add(sum[r][v], count);
      }
    }
  }

  // A step of the Horner scheme.
  template <int MR, int NV>
  static inline __attribute__((always_inline)) void Scale(I (&sum)[MR][NV], const BitserialPass& pass) {
    if (pass.shift != 0) {
      const __m128i shift = _mm_cvtsi32_si128(pass.shift);
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[r][v] = _mm512_sll_epi32(sum[r][v], shift);
      }
    }
    if (pass.negate) {
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[r][v] = S::Sub(S::Set(0), sum[r][v]);
      }
    }
  }

  // All passes. Returns the last one of the list, which counts nothing.
  template <BitOp kOp, int MR, int NV>
  static inline __attribute__((always_inline)) const BitserialPass* CountPasses(const BitserialTile& t,
                                                                                I (&sum)[MR][NV]) {
    constexpr size_t kStepBytes = (kOp == BitOp::kMasked ? 2 : 1) * NV * kVectorBytes;
    const BitserialBlock& b = *t.block;
    const uint8_t* x[MR];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) x[r] = t.pixels[r] + t.panel->x_offset;
    const size_t units = b.units;
    const BitserialPass* pass = b.passes;
    const uint8_t* w = t.panel->weights + pass->weight_plane * units * kStepBytes;
    const uint32_t* offsets = b.offsets + pass->digit * units;
    CountUnit<kOp, MR, NV, true>(x, offsets[0], w, sum);
    for (size_t k = 1;; k = 0) {
      for (; k < units; ++k) CountUnit<kOp, MR, NV, false>(x, offsets[k], w + k * kStepBytes, sum);
      if (++pass == b.passes + b.pass_count) return pass;
      Scale<MR, NV>(sum, *pass);
      w = t.panel->weights + pass->weight_plane * units * kStepBytes;
      offsets = b.offsets + pass->digit * units;
    }
  }

  // Of 64 channels, in the order in which sums are packed: 4 words of each vector in turn.
  struct Words {
    I lower, upper;
    static I InOrder(const int16_t* p) {
      return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), S::Load(p));
    }
    static Words Load(const int16_t* p) { return {InOrder(p), InOrder(p + 32)}; }
    __mmask64 Exceed(const Words& limits) const {
      return _mm512_kunpackd(_mm512_cmpgt_epi16_mask(upper, limits.upper),
                             _mm512_cmpgt_epi16_mask(lower, limits.lower));
    }
  };

  // Codes by comparisons (few_codes.h), 64 channels of a pixel at a time: a comparison is a bit of a mask.
  template <int MR, int NV, bool kOneLimit>
  static inline __attribute__((always_inline)) void FinishFewCodes(const BitserialTile& t,
                                                                   const I (&sum)[MR][NV]) {
    const BitserialBlock& b = *t.block;
    const FewCodesView few = *b.few_codes;
    const FewSums* const sums = few.sums;
    const size_t channel = t.panel->channel, index = IndexOf(t), last = kOneLimit ? 1 : few.count;
    const size_t pitch = b.output.pixel_step * b.output.epilogue->channels;
    const __mmask64 valid = ~__mmask64{0} >> (64 - t.panel->count);
    const I start = S::Load(few.start + channel), flip = S::Load(few.flip + channel),
            one = _mm512_set1_epi8(1);
    const I order = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    uint8_t* y = static_cast<uint8_t*>(b.output.y) + index;
    const uint8_t* residual = b.output.residual + index;
    I ahead = sums != nullptr ? _mm512_maskz_loadu_epi8(valid, residual) : start;
    Words limits[kOneLimit ? 1 : kMaxFewCodeLimits];
    const auto load_limits = [&](const int16_t* from) __attribute__((always_inline)) {
      for (size_t k = 0; k < last; ++k) limits[k] = Words::Load(from + k * few.pitch + channel);
    };
    if (b.limit_rows == nullptr) load_limits(b.limits);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r, y += pitch) {
      if (b.limit_rows != nullptr) load_limits(b.limit_rows[t.pixel + static_cast<size_t>(r)]);
      const auto vector = [&](int v)
                              __attribute__((always_inline)) { return v < NV ? sum[r][v] : S::Set(0); };
      const Words words = {_mm512_packs_epi32(vector(0), vector(1)),
                           _mm512_packs_epi32(vector(2), vector(3))};
      I exceeded = _mm512_maskz_mov_epi8(words.Exceed(limits[0]), one);
      for (size_t k = 1; k < last; ++k)
        exceeded = _mm512_mask_add_epi8(exceeded, words.Exceed(limits[k]), exceeded, one);
      I codes = S::Xor(S::AddBytes(start, _mm512_permutexvar_epi32(order, exceeded)), flip);
      if (sums != nullptr) {
        const I other = ahead;
        // Read before codes are written that may have the same last bits of their address (RequantizeTile).
        residual += pitch;
        if (r + 1 < MR) ahead = _mm512_maskz_loadu_epi8(valid, residual);
        codes = AddFewSums<S>(*sums, codes, other);
      }
      _mm512_mask_storeu_epi8(y, valid, codes);
    }
  }

  template <int MR, int NV>
  static void Tile(const BitserialTile& t) {
    const BitserialBlock& b = *t.block;
    if (b.few_codes != nullptr) FetchOutputs<MR, 1>(t);
    I sum[MR][NV];
    const BitserialPass* pass = nullptr;
    switch (b.op) {
      case BitOp::kAnd:
        pass = CountPasses<BitOp::kAnd, MR, NV>(t, sum);
        break;
      case BitOp::kXor:
        pass = CountPasses<BitOp::kXor, MR, NV>(t, sum);
        break;
      case BitOp::kMasked:
        pass = CountPasses<BitOp::kMasked, MR, NV>(t, sum);
        break;
    }

    if (b.few_codes != nullptr) {
      return b.few_codes->count == 1 ? FinishFewCodes<MR, NV, true>(t, sum)
                                     : FinishFewCodes<MR, NV, false>(t, sum);
    }

    const size_t channel = t.panel->channel;
    if (b.sums_fit_words && !b.bias_rows) {
      // bias + factor * sum as one multiply-add of 16-bit numbers, the upper ones with 0.
      const I factor = S::Set((pass->negate ? -1 : 1) * (1 << pass->shift) & 0xffff);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        const I bias = S::Load(b.bias + channel + v * S::kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) sum[r][v] = _mm512_dpwssd_epi32(bias, sum[r][v], factor);
      }
    } else {
      Scale<MR, NV>(sum, *pass);
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        const int32_t* bias = BiasOf(b, t.pixel + static_cast<size_t>(r)) + channel;
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[r][v] = S::Add(S::Load(bias + v * S::kLanes), sum[r][v]);
      }
    }
    FinishRegisters<S, MR, NV>(b.output, t.pixel, channel, t.panel->count, sum);
  }
};

// 64 codes at a time: vptestmb gathers one bit of each in a mask register.
template <int kPlanes>
void PackPlanes(const DigitPacking& p) {
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(p.flip));
  const auto bits_of = [](__mmask64 valid, __m512i codes, int plane) {
    return _mm512_mask_test_epi8_mask(valid, codes, _mm512_set1_epi8(static_cast<char>(1 << plane)));
  };
  for (size_t row = 0; row < p.rows; ++row) {
    const uint8_t* x = p.x + row * p.x_pitch;
    uint8_t* to = p.digits + row * p.pitch;
    size_t left = p.codes, bytes = p.digit_bytes;
    for (; left >= 64; left -= 64, bytes -= 8, x += 64, to += 8) {
      const __m512i codes = _mm512_xor_si512(_mm512_loadu_si512(x), flip);
#pragma GCC unroll 4
      for (int plane = 0; plane < kPlanes; ++plane) {
        const uint64_t bits = bits_of(~__mmask64{0}, codes, plane);
        std::memcpy(to + static_cast<size_t>(plane) * p.digit_pitch, &bits, 8);
      }
    }
    if (bytes == 0) continue;
    const __mmask64 valid = (uint64_t{1} << left) - 1;
    const __m512i codes = _mm512_xor_si512(_mm512_maskz_loadu_epi8(valid, x), flip);
#pragma GCC unroll 4
    for (int plane = 0; plane < kPlanes; ++plane) {
      const uint64_t bits = bits_of(valid, codes, plane);
      uint8_t* out = to + static_cast<size_t>(plane) * p.digit_pitch;
      if (bytes == 4) {
        std::memcpy(out, &bits, 4);
      } else {
        std::memcpy(out, &bits, bytes);
      }
    }
  }
}

void Pack(const DigitPacking& p) {
  switch (p.planes) {
    case 1:
      return PackPlanes<1>(p);
    case 2:
      return PackPlanes<2>(p);
    case 3:
      return PackPlanes<3>(p);
    default:
      return PackPlanes<kMaxBitPlanes>(p);
  }
}

}  // namespace

const BitserialEngine kBitserialAvx512Popcnt = {.lanes = 16,
                                                .lane_step = 1,
                                                .max_vectors = Popcnt512::kMaxVectors,
                                                .unit_bits = 32,
                                                .digit_planes = 1,
                                                .codes_per_byte = 8,
                                                .has_masked = true,
                                                .masks_by_selection = false,
                                                .masked_operations = 4.0 / 3.0,
                                                .few_codes_bits = kMaxBitPlanes,
                                                .few_sums = true,
                                                .transposed_codes = 0,
                                                .block_bytes = kBitserialBlockBytes,
                                                .products_per_cycle = 647.0,
                                                .fetch_cycles = 0.0,
                                                .outputs_per_cycle = 5.2,
                                                .few_codes_per_cycle = 7.0,
                                                .sums_per_cycle = 20.5,
                                                .code_cycles = 0.024,
                                                .digit_cycles = 0.0045,
                                                .call_cycles = kBitserialCallCycles,
                                                .tile_rows = 6,
                                                .least_rows = 2,
                                                .digits_are_rows = false,
                                                .pack = &Pack,
                                                .run = &RunBitserial<Popcnt512>};

}  // namespace lowbit
