// Weight codes in a file: rows of `bits`-bit fields, least significant bit first, every row starting on a
// byte.
#pragma once

#include <cstdint>
#include <span>

namespace lowbit {

// Bytes of one row of k codes.
constexpr int64_t PackedRowBytes(int64_t k, int bits) { return (k * bits + 7) / 8; }

// `codes` are rows * k bytes; the low `bits` bits of each are stored. `packed` has rows * PackedRowBytes(k,
// bits).
void PackRows(std::span<const uint8_t> codes, int64_t rows, int64_t k, int bits, std::span<uint8_t> packed);

// The inverse. Signed codes are sign-extended, so that int8_t(byte) is the code.
void UnpackRows(std::span<const uint8_t> packed, int64_t rows, int64_t k, int bits, bool is_signed,
                std::span<uint8_t> codes);

}  // namespace lowbit
