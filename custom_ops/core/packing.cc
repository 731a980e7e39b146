#include "core/packing.h"

#include <algorithm>

#include "core/status.h"

namespace lowbit {
namespace {

void CheckSizes(int64_t rows, int64_t k, int bits, size_t codes, size_t packed) {
  Require(bits >= 1 && bits <= 8, "packed codes have 1 to 8 bits, got ", bits);
  Require(codes == static_cast<size_t>(rows * k), "expected ", rows, " x ", k, " codes, got ", codes);
  const int64_t bytes = rows * PackedRowBytes(k, bits);
  Require(packed == static_cast<size_t>(bytes), "expected ", bytes, " bytes for ", rows, " rows of ", k,
          " codes of ", bits, " bits, got ", packed);
}

// Where codes do not cross bytes. The width is a constant, so that the inner loop becomes straight code.
template <int kBits>
void UnpackWholeBytes(const uint8_t* row, int64_t k, uint32_t sign, uint8_t* codes) {
  constexpr int64_t kPerByte = 8 / kBits;
  constexpr uint32_t kMask = (1u << kBits) - 1;
  for (int64_t byte = 0; byte < k / kPerByte; ++byte) {
    for (int64_t i = 0; i < kPerByte; ++i) {
      const uint32_t code = uint32_t{row[byte]} >> (i * kBits) & kMask;
      codes[byte * kPerByte + i] = static_cast<uint8_t>((code ^ sign) - sign);
    }
  }
}

// The 8 codes that begin at bit 8 * kBits * group of a row lie in exactly kBits bytes.
template <int kBits>
void UnpackGroups(const uint8_t* row, int64_t k, uint32_t sign, uint8_t* codes) {
  constexpr uint32_t kMask = (1u << kBits) - 1;
  for (int64_t group = 0; group < k / 8; ++group) {
    uint64_t word = 0;
    for (int i = 0; i < kBits; ++i) word |= uint64_t{row[group * kBits + i]} << (8 * i);
    for (int i = 0; i < 8; ++i) {
      const uint32_t code = static_cast<uint32_t>(word >> (i * kBits)) & kMask;
      codes[group * 8 + i] = static_cast<uint8_t>((code ^ sign) - sign);
    }
  }
}

// (q ^ sign) - sign copies the sign bit upwards; with sign 0 it is q.
template <int kBits>
void UnpackRow(const uint8_t* row, int64_t k, uint32_t sign, uint8_t* codes) {
  if constexpr (8 % kBits == 0) {
    UnpackWholeBytes<kBits>(row, k, sign, codes);
  } else {
    UnpackGroups<kBits>(row, k, sign, codes);
  }
  // What is left of the last byte or group, fewer than 8 codes.
  constexpr int64_t kStep = 8 % kBits == 0 ? 8 / kBits : 8;
  const int64_t row_bytes = PackedRowBytes(k, kBits);
  for (int64_t i = k - k % kStep; i < k; ++i) {
    const int64_t byte = i * kBits / 8;
    const uint32_t high = byte + 1 < row_bytes ? row[byte + 1] : 0;
    const uint32_t code = (row[byte] | high << 8) >> (i * kBits % 8) & ((1u << kBits) - 1);
    codes[i] = static_cast<uint8_t>((code ^ sign) - sign);
  }
}

using RowFunction = void (*)(const uint8_t*, int64_t, uint32_t, uint8_t*);
constexpr RowFunction kUnpackRow[] = {UnpackRow<1>, UnpackRow<2>, UnpackRow<3>, UnpackRow<4>,
                                      UnpackRow<5>, UnpackRow<6>, UnpackRow<7>, UnpackRow<8>};

}  // namespace

void PackRows(std::span<const uint8_t> codes, int64_t rows, int64_t k, int bits, std::span<uint8_t> packed) {
  CheckSizes(rows, k, bits, codes.size(), packed.size());
  const uint32_t mask = (1u << bits) - 1;
  std::fill(packed.begin(), packed.end(), uint8_t{0});
  const int64_t row_bytes = PackedRowBytes(k, bits);
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t* row = packed.data() + r * row_bytes;
    for (int64_t i = 0; i < k; ++i) {
      const uint32_t code = codes[static_cast<size_t>(r * k + i)] & mask;
      const int64_t bit = i * bits;
      const uint32_t shifted = code << (bit % 8);  // at most 15 bits: touches at most two bytes
      row[bit / 8] = static_cast<uint8_t>(row[bit / 8] | shifted);
      if (shifted > 0xff) row[bit / 8 + 1] = static_cast<uint8_t>(row[bit / 8 + 1] | shifted >> 8);
    }
  }
}

void UnpackRows(std::span<const uint8_t> packed, int64_t rows, int64_t k, int bits, bool is_signed,
                std::span<uint8_t> codes) {
  CheckSizes(rows, k, bits, codes.size(), packed.size());
  const RowFunction unpack = kUnpackRow[bits - 1];
  const uint32_t sign = is_signed ? 1u << (bits - 1) : 0;
  const int64_t row_bytes = PackedRowBytes(k, bits);
  for (int64_t r = 0; r < rows; ++r) unpack(packed.data() + r * row_bytes, k, sign, codes.data() + r * k);
}

}  // namespace lowbit
