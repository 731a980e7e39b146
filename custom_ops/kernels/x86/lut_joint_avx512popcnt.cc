// Look-ups with vpermb of three 2-bit activations and three 2-bit weights at once, 512 bits: tiles of up to 4 pixels x
// 128 channels. The algebra is in bitserial.cc (joint units), which also drives it.
//
// Three activations choose one of 64 rows of a table that stays in L1, 64 bytes: what they give with each of the 64
// triples of weights. One vpermb reads that row for 64 output channels, whose bytes are the places in it: 192 products.
// Nothing is built for a pixel but the offsets of its rows.
//
//   x     a0 a1 a2                  ->  row of the table, 64 sums
//   w     64 channels, a byte each  ->  vpermb  [ch 0 | ch 1 | ... | ch 63]
//   acc   bytes                     +=          as many as a byte holds, then words
//
// Channel c is kept in byte 2 c, those from 32 on in byte 2 (c - 32) + 1, so that words are in order. Until the last look-up
// the lower ones are whole words, modulo 2^16, from which 256 times the upper ones are then taken: three instructions
// instead of four whenever bytes are widened (0.96 of the time of a layer).
#include "kernels/common/inline.h"
#include "kernels/x86/few_codes_avx512.h"

namespace lowbit {
namespace {

struct Joint512 {
  using S = Avx512;
  using I = Avx512::I;
  static constexpr int kMaxVectors = 2, kVectorBytes = 64;
  // 32 registers hold the sums, three for each vector of a pixel, the places of the weights, a row and a mask.
  static constexpr int kTileRows[kMaxVectors] = {6, 4};

  template <int MR, int NV>
  static inline __attribute__((always_inline)) void LookUp(const BitserialTile& t,
                                                           Words512 (&words)[MR][NV]) {
    const BitserialBlock& b = *t.block;
    const uint8_t* x[MR];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) x[r] = t.pixels[r] + t.panel->x_offset;
    const uint8_t *w = t.panel->weights, *table = b.table;
    I bytes[MR][NV];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) {
        words[r][v] = {S::Set(0), S::Set(0)};
        bytes[r][v] = S::Set(0);
      }
    }
    const auto widen = [&]() LOWBIT_ALWAYS_INLINE {
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) {
          words[r][v].lower = _mm512_add_epi16(words[r][v].lower, bytes[r][v]);
          words[r][v].upper = _mm512_add_epi16(words[r][v].upper, _mm512_srli_epi16(bytes[r][v], 8));
          bytes[r][v] = S::Set(0);
        }
      }
    };
    size_t room = b.units_per_byte;
    for (size_t segment = 0; segment < b.units; segment += b.segment_units) {
      size_t at = b.offsets[segment];
      for (size_t left = b.segment_units; left != 0; at += kJointStep * sizeof(uint16_t)) {
        if (room < kJointStep) {
          widen();
          room = b.units_per_byte;
        }
        room -= kJointStep;
        // Four rows of a pixel with one load: two loads a cycle are what limits this loop.
        uint64_t rows[MR];
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) std::memcpy(&rows[r], x[r] + at, sizeof rows[r]);
        const auto add = [&]() LOWBIT_ALWAYS_INLINE {
          I places[NV];
#pragma GCC unroll 2
          for (int v = 0; v < NV; ++v) places[v] = S::Load(w + v * kVectorBytes);
          w += NV * kVectorBytes;
#pragma GCC unroll 8
          for (int r = 0; r < MR; ++r) {
            const I sums = S::Load(table + (rows[r] & 0xffff));
            rows[r] >>= 16;
#pragma GCC unroll 2
            for (int v = 0; v < NV; ++v) {
              const I found = _mm512_permutexvar_epi8(places[v], sums);
              // GCC adds in the register of what was found, and moves the sum back.
              __asm__("vpaddb %1, %0, %0" : "+v"(bytes[r][v]) : "v"(found));
            }
          }
        };
        if (left >= kJointStep) {
#pragma GCC unroll 4
          for (size_t i = 0; i < kJointStep; ++i) add();
          left -= kJointStep;
        } else {
          for (; left != 0; --left) add();
        }
      }
    }
    widen();
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v)
        words[r][v].lower = _mm512_sub_epi16(words[r][v].lower, _mm512_slli_epi16(words[r][v].upper, 8));
    }
  }

  template <int MR, int NV>
  static inline __attribute__((always_inline)) void FinishCodes(const BitserialTile& t,
                                                                const Words512 (&words)[MR][NV]) {
#pragma GCC unroll 2
    for (size_t v = 0; v < NV; ++v)
      FinishFewCodes<MR>(t, v * kVectorBytes, [&](int r) LOWBIT_ALWAYS_INLINE { return words[r][v]; });
  }

  // 64 channels of a pixel.
  static void FinishSums(const BitserialTile& t, const Words512& words, size_t row, size_t v) {
    const BitserialBlock& b = *t.block;
    const size_t channel = t.panel->channel + v * kVectorBytes, left = t.panel->count - v * kVectorBytes;
    const size_t count = left < kVectorBytes ? left : kVectorBytes;
    const auto low = [](I v) { return _mm512_cvtepu16_epi32(_mm512_castsi512_si256(v)); };
    const auto high = [](I v) { return _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1)); };
    I acc[1][4] = {{low(words.lower), high(words.lower), low(words.upper), high(words.upper)}};
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part)
      acc[0][part] = S::Add(acc[0][part], S::Load(b.bias + channel + part * S::kLanes));
    FinishPanel<S, 1, 4>(b.output, t.pixel + row, channel, count, acc);
  }

  template <int MR, int NV>
  static void Tile(const BitserialTile& t) {
    if (t.block->few_codes != nullptr) FetchOutputs<MR, 2>(t);
    Words512 words[MR][NV];
    LookUp<MR, NV>(t, words);
    if (t.block->few_codes != nullptr) return FinishCodes<MR, NV>(t, words);
#pragma GCC unroll 8
    for (size_t r = 0; r < MR; ++r) {
#pragma GCC unroll 2
      for (size_t v = 0; v < NV; ++v) FinishSums(t, words[r][v], r, v);
    }
  }
};

// 48 codes at a time: three of them beside a zero, then their places in a number, as multiply-adds.
void Pack(const DigitPacking& p) {
  static constexpr size_t kStep = 16 * kJointCodes;
  alignas(64) static constexpr auto kSpread = [] {
    struct {
      uint8_t at[64];
    } spread{};
    for (int i = 0; i < 64; ++i) spread.at[i] = static_cast<uint8_t>(i % 4 < 3 ? i / 4 * 3 + i % 4 : 63);
    return spread;
  }();
  const __m512i order = _mm512_load_si512(kSpread.at), flip = _mm512_set1_epi8(static_cast<char>(p.flip));
  const __m512i code = _mm512_set1_epi8(static_cast<char>((1 << p.planes) - 1));
  const __m512i places = _mm512_set1_epi32(0x00100401), row = _mm512_set1_epi16(kJointRow);
  const auto rows_of = [&](__mmask64 valid, const uint8_t* x) LOWBIT_ALWAYS_INLINE {
    const __m512i plain = _mm512_xor_si512(_mm512_maskz_loadu_epi8(valid, x), flip);
    const __m512i codes = _mm512_maskz_mov_epi8(valid, _mm512_and_si512(plain, code));
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_permutexvar_epi8(order, codes), places);
    return _mm512_cvtepi32_epi16(_mm512_madd_epi16(pairs, row));
  };
  const size_t steps = p.codes / kStep, units = p.digit_bytes / 2 - 16 * steps;
  const __mmask64 all = (uint64_t{1} << kStep) - 1, rest = (uint64_t{1} << (p.codes - steps * kStep)) - 1;
  const auto written = static_cast<__mmask16>((1u << units) - 1);
  for (size_t run = 0; run < p.rows; ++run) {
    const uint8_t* x = p.x + run * p.x_pitch;
    uint8_t* to = p.digits + run * p.pitch;
    for (size_t step = 0; step < steps; ++step, x += kStep, to += 32)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rows_of(all, x));
    if (units != 0) _mm256_mask_storeu_epi16(to, written, rows_of(rest, x));
  }
}

}  // namespace

const BitserialEngine kLutJointAvx512Popcnt = {.lanes = 64,
                                               .lane_step = 2,
                                               .max_vectors = Joint512::kMaxVectors,
                                               .unit_bits = kJointCodes,
                                               .digit_planes = 2,
                                               .codes_per_byte = 1,
                                               .joint = true,
                                               .has_masked = false,
                                               .masks_by_selection = false,
                                               .masked_operations = 1.0,
                                               .few_codes_bits = 2,
                                               .few_sums = true,
                                               .few_bytes = true,
                                               .transposed_codes = 0,
                                               .block_bytes = kBitserialBlockBytes,
                                               .products_per_cycle = 2000.0,
                                               .fetch_cycles = 0.44,
                                               .outputs_per_cycle = 4.5,
                                               .few_codes_per_cycle = 9.0,
                                               .sums_per_cycle = 1e9,
                                               .code_cycles = 0.2,
                                               .digit_cycles = 0.0,
                                               .call_cycles = kBitserialCallCycles,
                                               .tile_rows = 4,
                                               .least_rows = 2,
                                               .digits_are_rows = false,
                                               .pack = &Pack,
                                               .run = &RunBitserial<Joint512>};

}  // namespace lowbit
