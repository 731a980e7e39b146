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
#include "kernels/x86/few_codes_avx512.h"

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
    if (pass.shift == 1) {  // the most frequent one: additions have more pipes than shifts
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[r][v] = S::Add(sum[r][v], sum[r][v]);
      }
    } else if (pass.shift != 0) {
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

  template <int MR, int NV>
  static inline __attribute__((always_inline)) void FinishSums(const BitserialTile& t,
                                                               const I (&sum)[MR][NV]) {
    FinishFewCodes<MR>(t, 0, [&](int r) __attribute__((always_inline)) {
      const auto vector = [&](int v)
                              __attribute__((always_inline)) { return v < NV ? sum[r][v] : S::Set(0); };
      return PackedWords512{
          {_mm512_packs_epi32(vector(0), vector(1)), _mm512_packs_epi32(vector(2), vector(3))}};
    });
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

    if (b.few_codes != nullptr) return FinishSums<MR, NV>(t, sum);

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

// Runs of whole words whose digits lie side by side, close enough that one read has the bits of several, as the kernel
// rows of an image: up to eight are shifted apart at once. (Zen 5: 7x7 windows of a 224x224 image of 1 and 2 bits take
// .8 of the time.)
template <int kPlanes>
bool PackOverlapping(const DigitPacking& p) {
  constexpr size_t kMost = 8;
  if (kPlanes > 2 || p.rows < 2 || p.codes > 32 || p.digit_bytes != 4 || p.pitch != 4 * kPlanes ||
      p.digit_pitch != 4 || p.x_pitch > 64 - p.codes)
    return false;
  const size_t fit = (64 - p.codes) / p.x_pitch + 1, runs = fit < kMost ? fit : kMost;
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(p.flip));
  const __m512i used = _mm512_set1_epi64(static_cast<int64_t>((uint64_t{1} << p.codes) - 1));
  const __m512i places = _mm512_mullo_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7),
                                            _mm512_set1_epi64(static_cast<int64_t>(p.x_pitch)));
  const uint8_t* x = p.x;
  uint8_t* to = p.digits;
  for (size_t left = p.rows; left != 0;) {
    const size_t n = left < runs ? left : runs;
    const __mmask64 valid = ~uint64_t{0} >> (64 - ((n - 1) * p.x_pitch + p.codes));
    const __m512i codes = _mm512_xor_si512(_mm512_maskz_loadu_epi8(valid, x), flip);
    const auto words = [&](int plane) LOWBIT_ALWAYS_INLINE {
      const __mmask64 bits = _mm512_test_epi8_mask(codes, _mm512_set1_epi8(static_cast<char>(1 << plane)));
      const __m512i all = _mm512_set1_epi64(static_cast<int64_t>(bits));
      return _mm512_and_si512(_mm512_srlv_epi64(all, places), used);
    };
    const auto written = static_cast<__mmask8>((1u << n) - 1);
    if constexpr (kPlanes == 2) {
      const __m512i both = _mm512_or_si512(words(0), _mm512_slli_epi64(words(1), 32));
      _mm512_mask_storeu_epi64(to, written, both);
    } else {
      _mm512_mask_cvtepi64_storeu_epi32(to, written, words(0));
    }
    x += n * p.x_pitch;
    to += n * p.pitch;
    left -= n;
  }
  return true;
}

// 64 codes at a time: vptestmb gathers one bit of each in a mask register.
template <int kPlanes>
void PackPlanes(const DigitPacking& p) {
  if (PackOverlapping<kPlanes>(p)) return;
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
                                                .few_bytes = true,
                                                .transposed_codes = 0,
                                                .block_bytes = kBitserialBlockBytes,
                                                .products_per_cycle = 647.0,
                                                .fetch_cycles = 0.0,
                                                .outputs_per_cycle = 5.2,
                                                .few_codes_per_cycle = 14.0,
                                                .sums_per_cycle = 30.0,
                                                .code_cycles = 0.024,
                                                .digit_cycles = 0.0045,
                                                .call_cycles = kBitserialCallCycles,
                                                .tile_rows = 6,
                                                .least_rows = 2,
                                                .digits_are_rows = false,
                                                .pack = &Pack,
                                                .run = &RunBitserial<Popcnt512>};

}  // namespace lowbit
