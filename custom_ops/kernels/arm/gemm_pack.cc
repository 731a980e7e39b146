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

// A vector of codes, 16 or (words) 8 of them, as x'.
template <GemmForm kForm>
inline uint8x16_t LoadMapped(const uint8_t* from, uint8x16_t flip, uint16x8_t offset) {
  if constexpr (kForm == GemmForm::kWords) {
    const uint8x8_t bytes = veor_u8(vld1_u8(from), vget_low_u8(flip));
    return vreinterpretq_u8_u16(vsubq_u16(vmovl_u8(bytes), offset));
  } else {
    const uint8x16_t bytes = veorq_u8(vld1q_u8(from), flip);
    if constexpr (kForm == GemmForm::kPairs)
      return vreinterpretq_u8_u16(vsubq_u16(vreinterpretq_u16_u8(bytes), offset));
    return vsubq_u8(bytes, vreinterpretq_u8_u16(offset));
  }
}

// The offset in the lanes that LoadMapped subtracts in. A pair (b0 ^ flip) + 256 (b1 ^ flip) becomes
// x0 + 256 x1 by subtracting the offset from both.
template <GemmForm kForm>
inline uint16x8_t OffsetLanes(GemmXMap map) {
  const auto one = uint16_t{map.offset};
  if constexpr (kForm == GemmForm::kWords) return vdupq_n_u16(one);
  return vdupq_n_u16(static_cast<uint16_t>(257u * one));
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

template <int kRows, GemmForm kForm, size_t kUnit>
void Pack(const uint8_t* const* rows, size_t bytes, GemmXMap map, uint8_t* to) {
  constexpr size_t kCodes = kForm == GemmForm::kWords ? 8 : 16;  // of a vector
  constexpr size_t kSize = kUnit * CodeBytes(kForm);             // of a unit, packed
  const uint8x16_t flip = vdupq_n_u8(map.flip);
  const uint16x8_t offset = OffsetLanes<kForm>(map);
  size_t k = 0;
  const auto load = [&](int r) { return LoadMapped<kForm>(rows[r] + k, flip, offset); };
  for (; k + kCodes <= bytes; k += kCodes, to += kRows * 16) {
    if constexpr (kRows == 8) {
      const Zipped<kSize> z0(load(0), load(4)), z1(load(1), load(5)), z2(load(2), load(6)),
          z3(load(3), load(7));
      StoreFour<kSize>(to, z0.low, z1.low, z2.low, z3.low);
      StoreFour<kSize>(to + 64, z0.high, z1.high, z2.high, z3.high);
    } else {
      StoreFour<kSize>(to, load(0), load(1), load(2), load(3));
    }
  }
  // The rest, a unit at a time, by way of a vector.
  for (; k < bytes; k += kUnit) {
    for (int r = 0; r < kRows; ++r, to += kSize) {
      uint8_t unit[16] = {};
      std::memcpy(unit, rows[r] + k, kUnit);
      vst1q_u8(unit, LoadMapped<kForm>(unit, flip, offset));
      std::memcpy(to, unit, kSize);
    }
  }
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
