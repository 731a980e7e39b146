#include "core/packing.h"

#include <algorithm>
#include <cstring>

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

// The 8 codes that begin at bit 8 * bits * group of a row lie in exactly `bits` bytes.
uint64_t LoadGroup(const uint8_t* p, size_t bytes) {
  uint64_t word = 0;
  for (size_t i = 0; i < bytes; ++i) word |= uint64_t{p[i]} << (8 * i);
  return word;
}

void UnpackRow(const uint8_t* row, int64_t k, int bits, bool is_signed, uint8_t* codes) {
  const uint32_t mask = (1u << bits) - 1, sign = is_signed ? 1u << (bits - 1) : 0;
  const int64_t row_bytes = PackedRowBytes(k, bits);
  for (int64_t first = 0, byte = 0; first < k; first += 8, byte += bits) {
    uint64_t word = LoadGroup(row + byte, static_cast<size_t>(std::min<int64_t>(bits, row_bytes - byte)));
    const int64_t n = std::min<int64_t>(8, k - first);
    for (int64_t i = 0; i < n; ++i, word >>= bits) {
      // (q ^ sign) - sign copies the sign bit upwards; without a sign bit it is q.
      codes[first + i] = static_cast<uint8_t>(((static_cast<uint32_t>(word) & mask) ^ sign) - sign);
    }
  }
}

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
  if (bits == 8) {  // the stored byte is the code
    if (!packed.empty()) std::memcpy(codes.data(), packed.data(), packed.size());
    return;
  }
  const int64_t row_bytes = PackedRowBytes(k, bits);
  for (int64_t r = 0; r < rows; ++r)
    UnpackRow(packed.data() + r * row_bytes, k, bits, is_signed, codes.data() + r * k);
}

}  // namespace lowbit
