// The interleaving is left to ST4: of four vectors it stores the first elements, then the second ones, and so
// on. Of 8 rows, row r is zipped with row r + 4 before:
//
//   zip1(row 0, row 4) = r0 k0 | r4 k0 | r0 k1 | r4 k1 ...      ST4 of the zips of rows 0, 1, 2, 3:
//   zip1(row 1, row 5) = r1 k0 | r5 k0 | ...                     r0 k0 r1 k0 r2 k0 r3 k0 r4 k0 r5 k0 ...
#include "kernels/arm/gemm_pack.h"

#include <arm_neon.h>

#include <cstring>

namespace lowbit {
namespace {

// What LoadMapped subtracts in all lanes: from bytes, or (pairs) from halfwords.
template <GemmForm kForm>
inline uint8x16_t OffsetLanes(GemmXMap map) {
  // A pair (b0 ^ flip) + 256 (b1 ^ flip) becomes x0 + 256 x1 when the offset is subtracted from both.
  if constexpr (kForm == GemmForm::kPairs)
    return vreinterpretq_u8_u16(vdupq_n_u16(static_cast<uint16_t>(257u * map.offset)));
  // b ^ 0x80 = b - 0x80 modulo 2^8.
  return vdupq_n_u8(static_cast<uint8_t>(map.offset + map.flip));
}

// 16 codes as x', words still as bytes.
template <GemmForm kForm>
inline uint8x16_t LoadMapped(const uint8_t* from, uint8x16_t flip, uint8x16_t offset) {
  const uint8x16_t bytes = vld1q_u8(from);
  if constexpr (kForm == GemmForm::kPairs)
    return vreinterpretq_u8_u16(
        vsubq_u16(vreinterpretq_u16_u8(veorq_u8(bytes, flip)), vreinterpretq_u16_u8(offset)));
  return vsubq_u8(bytes, offset);
}

// Four vectors whose elements of kSize bytes take turns.
template <size_t kSize>
inline void StoreFour(uint8_t* to, uint8x16_t a, uint8x16_t b, uint8x16_t c, uint8x16_t d) {
  if constexpr (kSize == 1) {
    vst4q_u8(to, {{a, b, c, d}});
  } else if constexpr (kSize == 2) {
    vst4q_u16(reinterpret_cast<uint16_t*>(to), {{vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b),
                                                 vreinterpretq_u16_u8(c), vreinterpretq_u16_u8(d)}});
  } else if constexpr (kSize == 4) {
    vst4q_u32(reinterpret_cast<uint32_t*>(to), {{vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b),
                                                 vreinterpretq_u32_u8(c), vreinterpretq_u32_u8(d)}});
  } else {
    vst4q_u64(reinterpret_cast<uint64_t*>(to), {{vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b),
                                                 vreinterpretq_u64_u8(c), vreinterpretq_u64_u8(d)}});
  }
}

// The same of bytes that become words.
inline void StoreFourWords(uint8_t* to, uint8x16_t a, uint8x16_t b, uint8x16_t c, uint8x16_t d) {
  auto* words = reinterpret_cast<int16_t*>(to);
  const int8x16_t v[4] = {vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b), vreinterpretq_s8_u8(c),
                          vreinterpretq_s8_u8(d)};
  vst4q_s16(words, {{vmovl_s8(vget_low_s8(v[0])), vmovl_s8(vget_low_s8(v[1])), vmovl_s8(vget_low_s8(v[2])),
                     vmovl_s8(vget_low_s8(v[3]))}});
  vst4q_s16(words + 32,
            {{vmovl_high_s8(v[0]), vmovl_high_s8(v[1]), vmovl_high_s8(v[2]), vmovl_high_s8(v[3])}});
}

template <size_t kSize>
struct Zipped {
  uint8x16_t low, high;
  Zipped(uint8x16_t a, uint8x16_t b) {
    if constexpr (kSize == 1) {
      low = vzip1q_u8(a, b);
      high = vzip2q_u8(a, b);
    } else if constexpr (kSize == 2) {
      low = vreinterpretq_u8_u16(vzip1q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
      high = vreinterpretq_u8_u16(vzip2q_u16(vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b)));
    } else if constexpr (kSize == 4) {
      low = vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
      high = vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
    } else {
      low = vreinterpretq_u8_u64(vzip1q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
      high = vreinterpretq_u8_u64(vzip2q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
    }
  }
};

template <GemmForm kForm, size_t kUnit>
inline void Store(uint8_t* to, uint8x16_t a, uint8x16_t b, uint8x16_t c, uint8x16_t d) {
  if constexpr (kForm == GemmForm::kWords) {
    StoreFourWords(to, a, b, c, d);
  } else {
    StoreFour<kUnit>(to, a, b, c, d);
  }
}

template <int kRows, GemmForm kForm, size_t kUnit>
void Pack(const uint8_t* const* rows, size_t bytes, GemmXMap map, uint8_t* to) {
  constexpr size_t kCodes = 16, kPacked = kRows * kCodes * CodeBytes(kForm);
  const uint8x16_t flip = vdupq_n_u8(map.flip), offset = OffsetLanes<kForm>(map);
  // Copies: the compiler would read `rows` again after every store.
  const uint8_t* from[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) from[r] = rows[r];

  const auto pack = [flip, offset](const uint8_t* const(&row)[kRows], size_t k, uint8_t* packed) {
    const auto load = [&](int r) { return LoadMapped<kForm>(row[r] + k, flip, offset); };
    if constexpr (kRows == 8) {
      const Zipped<kUnit> z0(load(0), load(4)), z1(load(1), load(5)), z2(load(2), load(6)),
          z3(load(3), load(7));
      Store<kForm, kUnit>(packed, z0.low, z1.low, z2.low, z3.low);
      Store<kForm, kUnit>(packed + kPacked / 2, z0.high, z1.high, z2.high, z3.high);
    } else {
      Store<kForm, kUnit>(packed, load(0), load(1), load(2), load(3));
    }
  };
  size_t k = 0;
  for (; k + kCodes <= bytes; k += kCodes, to += kPacked) pack(from, k, to);
  if (k == bytes) return;
  // The rest by way of whole vectors.
  uint8_t rest[kRows][kCodes] = {}, packed[kPacked];
  const uint8_t* of_rest[kRows];
  for (int r = 0; r < kRows; ++r) {
    std::memcpy(rest[r], from[r] + k, bytes - k);
    of_rest[r] = rest[r];
  }
  pack(of_rest, 0, packed);
  std::memcpy(to, packed, kPacked / kCodes * (bytes - k));
}

template <GemmForm kForm, size_t kUnit>
constexpr GemmPacker PackerOf() {
  return {&Pack<8, kForm, kUnit>, &Pack<4, kForm, kUnit>};
}

}  // namespace

GemmPacker GemmPackerFor(GemmForm form, size_t unit) {
  if (form == GemmForm::kWords) return PackerOf<GemmForm::kWords, 1>();
  if (form == GemmForm::kPairs) return PackerOf<GemmForm::kPairs, 2>();
  if (unit == 1) return PackerOf<GemmForm::kBytes, 1>();
  if (unit == 2) return PackerOf<GemmForm::kBytes, 2>();
  if (unit == 4) return PackerOf<GemmForm::kBytes, 4>();
  return PackerOf<GemmForm::kBytes, 8>();
}

}  // namespace lowbit
