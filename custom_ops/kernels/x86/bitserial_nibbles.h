// Bit-serial tiles by byte shuffles, templated over the vectors V of bitserial_<isa>.cc: 32 output channels x
// 8 bits of K per 256-bit vector.
//
// A byte shuffle counts the bits of a nibble by looking them up. The usual kernel forms w & x first, splits
// the result into nibbles and looks up both, eight instructions for 256 products. Here the table depends on
// the nibble of x instead,
//
//     table[x][w] = popc(w & x)    or    popc(w ^ x),
//
// one of 16 constant tables, so that a shuffle by the nibbles of 32 channels' weights does the logic and the
// count at once, and splitting the weights is shared by all pixels of a tile: two shuffles and two additions
// for 256 products. Nothing but the size of the tables (4 KiB, in L1) keeps one from serving two planes of x,
//
//     table[x1 x0][w] = popc(w & x0) + 2 popc(w & x1),
//
// so a digit of x is two planes: for four codes one byte, the bits of plane 0 in the low nibble, those of
// plane 1 in the high one. A digit of a single plane has its bits in the high nibble: the byte is the place of the
// table, which saves an instruction a table (a w1a1 ResNet-50 takes 0.94 of the time).
//
// Counts are added up in bytes, these in words of 16 bits, and these in 32 bits. With B bytes to a vector,
// channel (B / 4) m + i is kept in byte 4 i + m, so that widening by masks and shifts restores the order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/x86/bitserial_tile.h"

namespace lowbit {
namespace {

struct CountTables {
  alignas(16) uint8_t count[256][16];
  constexpr explicit CountTables(bool exclusive, int upper_weight) : count() {
    for (int x = 0; x < 256; ++x) {
      for (int w = 0; w < 16; ++w) {
        int sum = 0;
        for (int bit = 0; bit < 4; ++bit) {
          const int w_bit = w >> bit & 1, low = x >> bit & 1, high = x >> (bit + 4) & 1;
          sum += exclusive ? w_bit ^ low : w_bit & low;
          sum += upper_weight * (exclusive ? w_bit ^ high : w_bit & high);
        }
        count[x][w] = static_cast<uint8_t>(sum);
      }
    }
  }
};

// For digits of one plane 16 tables, where the high nibble of x is 0, and counts nothing.
constexpr CountTables kAndTables(false, 2), kXorTables(true, 2), kXorOneTables(true, 0);

template <class V>
struct Nibbles {
  using I = typename V::I;
  static constexpr int kMaxVectors = 2;
  static constexpr int kParts = 4;  // vectors of int32 per vector of channels
  static constexpr size_t kVectorBytes = kParts * V::kLanes;
  static constexpr const int (&kTileRows)[kMaxVectors] = V::kTileRows;

  // What a unit, two look-ups, adds at most to a byte, and how many fill one. That is 248 at most, so a word,
  // which Factors reads as a signed number, holds 128 such bytes.
  static constexpr size_t UnitsPerByte(int digit_planes) { return 255 / (digit_planes == 1 ? 8 : 24); }
  static constexpr size_t kBytesPerWord = 128;

  static const uint8_t* TablesOf(BitOp op, int digit_planes) {
    if (op == BitOp::kAnd) return kAndTables.count[0];
    return digit_planes == 1 ? kXorOneTables.count[0] : kXorTables.count[0];
  }

  // Adds the counts of `units` units, few enough for bytes. The table of a byte of x lies kStep bytes from that of the
  // next one.
  template <int MR, int NV, size_t kStep>
  static void CountBytes(const uint8_t* const (&x)[MR], const uint8_t* w, const uint32_t* offset,
                         size_t units, const uint8_t* tables, I (&count)[MR][NV]) {
    const I low_nibbles = V::Set(0x0f0f0f0f);
    for (const uint32_t* end = offset + units; offset < end; ++offset, w += NV * kVectorBytes) {
      // One half after the other, to need fewer registers.
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        I nibbles[NV];
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) {
          const I weights = V::Load(w + v * kVectorBytes);
          nibbles[v] = V::And(half == 0 ? weights : V::ShiftRightWords(weights, 4), low_nibbles);
        }
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
          const I table = V::Table(tables + size_t{x[r][*offset + static_cast<uint32_t>(half)]} * kStep);
#pragma GCC unroll 2
          for (int v = 0; v < NV; ++v) {
            count[r][v] = V::AddBytes(count[r][v], V::Shuffle(table, nibbles[v]));
            // Added at once: left alone, GCC adds both halves first, keeps them all, and spills the counts.
            asm("" : "+v"(count[r][v]));
          }
        }
      }
    }
  }

  // Counts in words of 16 bits: those of the even bytes of a vector of counts, then those of its odd bytes.
  // What follows keeps them in memory, behind function calls: compilers would move them into registers that
  // the loop above needs.
  static constexpr size_t kWordsBytes = 2 * kVectorBytes;

  // Counts `units` units, few enough for words, into words[MR][NV], or adds their counts to what is there.
  template <int MR, int NV>
  __attribute__((noinline)) static void CountWords(const uint8_t* const (&x)[MR], const uint8_t* w,
                                                   const uint32_t* offset, size_t units, BitOp op,
                                                   int digit_planes, bool add, uint8_t* words) {
    const size_t units_per_byte = UnitsPerByte(digit_planes);
    const uint8_t* tables = TablesOf(op, digit_planes);
    for (size_t i = 0; i < units; i += units_per_byte) {
      const size_t n = units - i < units_per_byte ? units - i : units_per_byte;
      I count[MR][NV];
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) count[r][v] = V::Set(0);
      }
      if (digit_planes == 1) {
        CountBytes<MR, NV, 1>(x, w + i * NV * kVectorBytes, offset + i, n, tables, count);
      } else {
        CountBytes<MR, NV, 16>(x, w + i * NV * kVectorBytes, offset + i, n, tables, count);
      }
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) {
          uint8_t* to = words + static_cast<size_t>(r * NV + v) * kWordsBytes;
          I even = V::And(count[r][v], V::Set(0x00ff00ff)), odd = V::ShiftRightWords(count[r][v], 8);
          if (add || i != 0) {
            even = V::AddWords(even, V::Load(to));
            odd = V::AddWords(odd, V::Load(to + kVectorBytes));
          }
          V::Store(to, even);
          V::Store(to + kVectorBytes, odd);
        }
      }
    }
  }

  // Vector `part` of the words times the factor of their pass, as 32-bit numbers: a multiply-add of 16-bit
  // numbers that meets the odd or the even ones with 0.
  struct Factors {
    I even, odd;
    explicit Factors(int32_t factor) : even(V::Set(factor & 0xffff)), odd(V::ShiftLeft(V::Set(factor), 16)) {}
    I Part(const uint8_t* words, int part) const {
      return V::MultiplyAdd16(V::Load(words + static_cast<size_t>(part % 2) * kVectorBytes),
                              part < 2 ? even : odd);
    }
  };

  // What the words of vector v of pixel r are added to: sums of earlier words or, before there are any, the
  // bias.
  template <int NV>
  static const int32_t* SumsOf(const BitserialTile& t, const int32_t* sums, size_t r, size_t v) {
    if (sums) return sums + (r * NV + v) * kVectorBytes;
    return BiasOf(*t.block, t.pixel + r) + t.panel->channel + v * kVectorBytes;
  }

  // Takes words into the sums, before the next ones.
  template <int MR, int NV>
  __attribute__((noinline)) static void AddWords(const BitserialTile& t, const uint8_t* words, int32_t factor,
                                                 const int32_t* before, int32_t* sums) {
    const Factors factors(factor);
    for (size_t r = 0; r < MR; ++r) {
      for (size_t v = 0; v < NV; ++v, words += kWordsBytes, sums += kVectorBytes) {
        const int32_t* from = SumsOf<NV>(t, before, r, v);
        for (int part = 0; part < kParts; ++part)
          V::Store(sums + part * V::kLanes,
                   V::Add(V::Load(from + part * V::kLanes), factors.Part(words, part)));
      }
    }
  }

  // After the last words.
  template <int MR, int NV>
  __attribute__((noinline)) static void Finish(const BitserialTile& t, const uint8_t* words, int32_t factor,
                                               const int32_t* before) {
    const Factors factors(factor);
    const TileOutput& output = t.block->output;
    for (size_t v = 0; v < NV; ++v) {
      const size_t channel = t.panel->channel + v * kVectorBytes, left = t.panel->count - v * kVectorBytes;
      const size_t count = left < kVectorBytes ? left : kVectorBytes;
      I acc[MR][kParts];
#pragma GCC unroll 16
      for (size_t r = 0; r < MR; ++r) {
        const int32_t* from = SumsOf<NV>(t, before, r, v);
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
          acc[r][part] = V::Add(V::Load(from + part * V::kLanes),
                                factors.Part(words + (r * NV + v) * kWordsBytes, part));
        }
      }
      FinishPanel<V, MR, kParts>(output, t.pixel, channel, count, acc);
    }
  }

  // ---- few codes (few_codes.h): the sums of all passes are words

  // A step of the Horner scheme.
  __attribute__((noinline)) static void ScaleWords(const BitserialPass& pass, uint8_t* words, size_t bytes) {
    for (const uint8_t* end = words + bytes; words < end; words += kVectorBytes) {
      const I scaled = V::ShiftLeftWords(V::Load(words), pass.shift);
      V::Store(words, pass.negate ? V::SubWords(V::Set(0), scaled) : scaled);
    }
  }

  // The first `count` bytes of a vector, or all where there are more.
  static I LoadChannels(const uint8_t* from, size_t count) {
    if (count >= kVectorBytes) return V::Load(from);
    alignas(64) uint8_t part[kVectorBytes] = {};
    std::memcpy(part, from, count);
    return V::Load(part);
  }
  static void StoreChannels(uint8_t* to, I v, size_t count) {
    if (count >= kVectorBytes) return V::Store(to, v);
    alignas(64) uint8_t part[kVectorBytes];
    V::Store(part, v);
    std::memcpy(to, part, count);
  }

  // The limits of a vector of channels, in the order of its words.
  static void OrderLimits(const FewCodesView& few, const int16_t* limits,
                          uint8_t (&ordered)[kMaxFewCodeLimits][kWordsBytes]) {
    for (size_t k = 0; k < few.count; ++k, limits += few.pitch) {
      const I lower = V::LoadQuarters(limits), upper = V::LoadQuarters(limits + kVectorBytes / 2);
      V::Store(ordered[k], V::UnpackLowWords(lower, upper));
      V::Store(ordered[k] + kVectorBytes, V::UnpackHighWords(lower, upper));
    }
  }

  template <bool kOneLimit, bool kResidual>
  __attribute__((noinline)) static void FinishFewCodes(const BitserialTile& t, size_t rows, size_t vectors,
                                                       const uint8_t* words) {
    const BitserialBlock& b = *t.block;
    const FewCodesView few = *b.few_codes;
    const I order = V::Table(kWordOrder);
    alignas(64) uint8_t limits[kMaxFewCodeLimits][kWordsBytes];
    for (size_t v = 0; v < vectors; ++v) {
      const size_t skipped = v * kVectorBytes, channel = t.panel->channel + skipped;
      const size_t left = t.panel->count - skipped;
      const auto load = [&](const uint8_t* p) LOWBIT_ALWAYS_INLINE { return LoadChannels(p, left); };
      const auto store = [&](uint8_t* p, I codes) LOWBIT_ALWAYS_INLINE { StoreChannels(p, codes, left); };
      FewCodesRows<V> codes(t, skipped, kResidual ? few.sums : nullptr, load);
      if (b.limit_rows == nullptr) OrderLimits(few, b.limits + channel, limits);
      const uint8_t* from = words + v * kWordsBytes;
      for (size_t r = 0; r < rows; ++r, from += vectors * kWordsBytes) {
        if (b.limit_rows != nullptr) OrderLimits(few, b.limit_rows[t.pixel + r] + channel, limits);
        const I even = V::Load(from), odd = V::Load(from + kVectorBytes);
        // Minus the number of limits that are exceeded.
        I evens = V::GreaterWords(even, V::Load(limits[0]));
        I odds = V::GreaterWords(odd, V::Load(limits[0] + kVectorBytes));
        for (size_t k = 1; !kOneLimit && k < few.count; ++k) {
          evens = V::AddWords(evens, V::GreaterWords(even, V::Load(limits[k])));
          odds = V::AddWords(odds, V::GreaterWords(odd, V::Load(limits[k] + kVectorBytes)));
        }
        const I exceeded = V::LanesSideBySide(V::Shuffle(V::PackWords(evens, odds), order));
        codes.Write(V::SubBytes(codes.start(), exceeded), r + 1 < rows, load, store);
      }
    }
  }

  template <int MR, int NV>
  static void FewCodesTile(const BitserialTile& t, const uint8_t* const (&x)[MR]) {
    const BitserialBlock& b = *t.block;
    FetchOutputs<MR>(t);
    alignas(64) uint8_t words[MR * NV * kWordsBytes];
    for (const BitserialPass* pass = b.passes; pass < b.passes + b.pass_count; ++pass) {
      if (pass->shift != 0 || pass->negate) ScaleWords(*pass, words, sizeof(words));
      CountWords<MR, NV>(x, t.panel->weights + pass->weight_plane * b.units * NV * kVectorBytes,
                         b.offsets + pass->digit * b.units, b.units, b.op, pass->digit_planes,
                         pass != b.passes, words);
    }
    const bool one = b.few_codes->count == 1;
    if (b.few_codes->sums != nullptr) {
      one ? FinishFewCodes<true, true>(t, MR, NV, words) : FinishFewCodes<false, true>(t, MR, NV, words);
    } else {
      one ? FinishFewCodes<true, false>(t, MR, NV, words) : FinishFewCodes<false, false>(t, MR, NV, words);
    }
  }

  template <int MR, int NV>
  static void Tile(const BitserialTile& t) {
    const BitserialBlock& b = *t.block;
    const uint8_t* x[MR];
    for (int r = 0; r < MR; ++r) x[r] = t.pixels[r] + t.panel->x_offset;
    if (b.few_codes != nullptr) return FewCodesTile<MR, NV>(t, x);

    alignas(64) uint8_t words[MR * NV * kWordsBytes];
    alignas(64) int32_t sums[MR * NV * kVectorBytes];
    const int32_t* before = nullptr;
    for (const BitserialPass* pass = b.passes;; ++pass) {
      const size_t per_word = kBytesPerWord * UnitsPerByte(pass->digit_planes);
      const uint8_t* w = t.panel->weights + pass->weight_plane * b.units * NV * kVectorBytes;
      const uint32_t* offsets = b.offsets + pass->digit * b.units;
      for (size_t i = 0; i < b.units; i += per_word) {
        const size_t n = b.units - i < per_word ? b.units - i : per_word;
        CountWords<MR, NV>(x, w + i * NV * kVectorBytes, offsets + i, n, b.op, pass->digit_planes, false,
                           words);
        if (i + n == b.units && pass + 1 == b.passes + b.pass_count)
          return Finish<MR, NV>(t, words, pass->factor, before);
        AddWords<MR, NV>(t, words, pass->factor, before, sums);
        before = sums;
      }
    }
  }

  // One byte for four codes, as 32-bit numbers: their two bits from `shift` on are moved to bits 0 and 4 (by
  // a shuffle; a single one to bit 4), and multiply-adds count code i of the four 2^i times. kPlain: unsigned codes of
  // one digit.
  template <bool kPlain>
  static I GatherBits(const uint8_t* x, I flip, int shift, I spread) {
    I codes = V::Load(x);
    if constexpr (!kPlain) codes = V::And(V::ShiftRightWords(V::Xor(codes, flip), shift), V::Set(0x03030303));
    const I bits = V::Shuffle(spread, codes);
    return V::MultiplyAdd16(V::MultiplyAddBytes(bits, V::Set(0x08040201)), V::SetWords(1));
  }

  // One digit of one run.
  template <bool kPlain>
  static void PackDigit(const uint8_t* x, size_t left, uint8_t* to, size_t bytes, uint8_t flip_byte,
                        int shift, bool single) {
    static constexpr size_t kDigitBytes = V::kLanes;
    const I flip = V::SetBytes(flip_byte), spread = V::Table(kSpread[single]);
    for (; left >= 4 * kVectorBytes; left -= 4 * kVectorBytes, bytes -= 4 * kDigitBytes) {
      const I lower = V::PackIntegers(GatherBits<kPlain>(x, flip, shift, spread),
                                      GatherBits<kPlain>(x + kVectorBytes, flip, shift, spread));
      const I upper = V::PackIntegers(GatherBits<kPlain>(x + 2 * kVectorBytes, flip, shift, spread),
                                      GatherBits<kPlain>(x + 3 * kVectorBytes, flip, shift, spread));
      V::Store(to, V::LanesSideBySide(V::PackUnsignedWords(lower, upper)));
      x += 4 * kVectorBytes;
      to += 4 * kDigitBytes;
    }
    for (; left >= kVectorBytes; left -= kVectorBytes, bytes -= kDigitBytes) {
      V::StoreU8(to, GatherBits<kPlain>(x, flip, shift, spread));
      x += kVectorBytes;
      to += kDigitBytes;
    }
    if (bytes == 0) return;
    uint8_t part[kVectorBytes], packed[kDigitBytes];
    std::memset(part, flip_byte, sizeof(part));  // becomes 0
    std::memcpy(part, x, left);
    V::StoreU8(packed, GatherBits<kPlain>(part, flip, shift, spread));
    std::memcpy(to, packed, bytes);
  }

  // Bit 0 of four bytes.
  static uint32_t FirstBits(uint32_t bytes) {
    // The multiplication moves that of byte i to bit 24 + i.
    return (bytes & 0x01010101) * 0x01020408 >> 24 & 15;
  }

  // Runs of so few codes that one byte holds a digit of them, as the pixels of an image (a ResNet-50's, by itself
  // 0.04 of the time at w1a1).
  template <size_t kCodes>
  static void PackFew(const DigitPacking& p) {
    const uint32_t flip = p.flip * (0x01010101u >> 8 * (4 - kCodes));
    for (size_t row = 0; row < p.rows; ++row) {
      uint32_t codes = 0;
      std::memcpy(&codes, p.x + row * p.x_pitch, kCodes);
      codes ^= flip;
      uint8_t* to = p.digits + row * p.pitch;
      for (int shift = 0; shift < p.planes; shift += 2, to += p.digit_pitch) {
        const uint32_t low = FirstBits(codes >> shift), high = FirstBits(codes >> (shift + 1));
        to[0] = static_cast<uint8_t>(shift + 1 < p.planes ? low | high << 4 : low << 4);
        for (size_t i = 1; i < p.digit_bytes; ++i) to[i] = 0;
      }
    }
  }

  static void Pack(const DigitPacking& p) {
    switch (p.digit_bytes == 0 ? 0 : p.codes) {
      case 1:
        return PackFew<1>(p);
      case 2:
        return PackFew<2>(p);
      case 3:
        return PackFew<3>(p);
      case 4:
        return PackFew<4>(p);
      default:
        break;
    }
    for (size_t row = 0; row < p.rows; ++row) {
      uint8_t* to = p.digits + row * p.pitch;
      if (p.planes <= 2 && p.flip == 0) {
        PackDigit<true>(p.x + row * p.x_pitch, p.codes, to, p.digit_bytes, 0, 0, p.planes == 1);
        continue;
      }
      for (int shift = 0; shift < p.planes; shift += 2, to += p.digit_pitch)
        PackDigit<false>(p.x + row * p.x_pitch, p.codes, to, p.digit_bytes, p.flip, shift,
                         shift + 1 == p.planes);
    }
  }
  alignas(16) static constexpr uint8_t kSpread[2][16] = {{0, 1, 16, 17}, {0, 16, 0, 16}};
  // Of a lane with the bytes of even words, then those of odd ones: byte m of every four, for m = 0..3.
  alignas(16) static constexpr uint8_t kWordOrder[16] = {0, 2, 4, 6, 8, 10, 12, 14,
                                                         1, 3, 5, 7, 9, 11, 13, 15};
};

}  // namespace
}  // namespace lowbit
