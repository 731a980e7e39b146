// Where wgmma finds its operands in shared memory.
#pragma once

#include <cstdint>

namespace lowbit::cuda {

// The low half of a descriptor, which moves with the address: 1 for 16 bytes.
__device__ __forceinline__ uint32_t MatrixPart(uint32_t shared) { return (shared & 0x3FFFF) >> 4 | 1u << 16; }

// The descriptor of rows of kBytes bytes, swizzled in 128 or 64 bytes. The first row may lie anywhere in the
// pattern, which follows from the addresses.
template <int kBytes>
__device__ __forceinline__ uint64_t SlabDescriptor(uint32_t part) {
  static_assert(kBytes == 128 || kBytes == 64);
  constexpr uint32_t kHigh = (kBytes * 8 >> 4) | (kBytes == 128 ? 1u : 2u) << 30;
  return static_cast<uint64_t>(kHigh) << 32 | part;
}

// Matrix descriptor of rows of 128 bytes: start address, 1024 bytes from eight rows to the next eight,
// 128-byte swizzle. Adding 2 moves 32 bytes along k.
__device__ __forceinline__ uint64_t MatrixDescriptor(uint32_t shared) {
  return SlabDescriptor<128>(MatrixPart(shared));
}

// A of bits without swizzle: eight places of 16 bytes in a row lie together, any of them is the first; the next eight
// follow. `part`: where the first half of k begins, and how much further the second, both in 16 bytes, the one in the
// low half of the word, the other in the high one.
__device__ __forceinline__ uint64_t PlacesDescriptor(uint32_t part) {
  return static_cast<uint64_t>(128 >> 4) << 32 | part;
}

// B without swizzle: 8 rows of 16 bytes lie together, 128 bytes further the next 16 bytes of k, `eight_bytes` further
// the next eight rows.
__device__ __forceinline__ uint64_t PlainDescriptor(uint32_t shared, int eight_bytes = 256) {
  return (static_cast<uint64_t>(shared & 0x3FFFF) >> 4) | uint64_t{128 >> 4} << 16 |
         static_cast<uint64_t>(eight_bytes >> 4) << 32;
}

}  // namespace lowbit::cuda
