// Bits of bytes, for the portable code of the bit-serial kernels.
#pragma once

#include <cstdint>
#include <cstring>

namespace lowbit {

// Bit `bit` of eight bytes, that of the first one in bit 0.
inline uint8_t GatherBit(const uint8_t* eight, int bit) {
  uint64_t bytes;
  std::memcpy(&bytes, eight, sizeof(bytes));
  // The multiplication moves bit 0 of byte i to bit 56 + i.
  return static_cast<uint8_t>((bytes >> bit & 0x0101010101010101) * 0x0102040810204080 >> 56);
}

}  // namespace lowbit
