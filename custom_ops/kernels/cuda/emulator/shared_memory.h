// Shared memory of the emulated GPU: addresses, mbarrier objects, bulk copies, boxes of tensors.
#pragma once

#include <cstdint>
#include <functional>

namespace lowbit::cuda::emulator {

// The window of a block in which its dynamic shared memory lies begins at this address: behind the KB that
// the system takes, in the middle of what 26 bits can name, since the block's other variables lie before and
// behind the window.
constexpr uint32_t kRankShift = 26, kWindowAddress = (1u << (kRankShift - 1)) + 1024;
// Addresses in matrix descriptors have as many bits.
constexpr int kDescriptorBits = 18;
// What swizzles exchange, in bytes.
constexpr int kChunk = 16;

// Addresses of shared memory as instructions have them: the place relative to the dynamic shared memory of a
// block, and in the highest bits which block of the cluster, 0 for the thread's own.
uint32_t AddressOf(const void* shared);
uint8_t* PointerTo(uint32_t address);
uint32_t AddressIn(uint32_t address, uint32_t rank);

// mbarrier objects, of 8 bytes in shared memory.
void InitMbarrier(uint8_t* barrier, int arrivals);
void ArriveAt(uint8_t* barrier);
void ExpectBytes(uint8_t* barrier, int bytes);
void CountBytes(uint8_t* barrier, int bytes);
void WaitForParity(uint8_t* barrier, uint32_t parity);

// `copy`, then the bytes count at `barrier`; now or later.
void Transfer(std::function<void()> copy, uint8_t* barrier, int bytes);

// What cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col make: dim 0 is counted in bytes.
struct TensorMap {
  uint8_t* base;
  int64_t strides[3];  // of dims 1 to 3
  int sizes[4], box[4], steps[4];
  int lower[2], upper[2];  // of the first pixels of windows (im2col): columns, rows
  int swizzle;             // its span in bytes, 0: none
};
// A box at `at` from the tensor to shared memory, or back.
void LoadBox(const TensorMap& map, const int (&at)[4], uint8_t* shared);
void StoreBox(const TensorMap& map, const int (&at)[4], uint8_t* shared);
// As many first pixels of windows as the map says, from `at` on, and (dx, dy) further.
void LoadWindows(const TensorMap& map, const int (&at)[4], int dx, int dy, uint8_t* shared);

// Where a byte lies: the number of its 16-byte chunk, exchanged by that of its 128-byte line, within `span`
// bytes. Both are bits of the address, which those of the pointer are too.
uint8_t* Swizzled(uint8_t* at, int span);

}  // namespace lowbit::cuda::emulator
