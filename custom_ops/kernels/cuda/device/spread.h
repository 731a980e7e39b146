// How blocks of a kernel are kept from crowding on few multiprocessors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernels/cuda/device/device.h"

namespace lowbit::cuda {

// How many blocks find room in clusters of so many, one to a multiprocessor. A cluster lies within one of a GPU's parts, of
// which no two GPUs have equally many multiprocessors: measured on an H100 of 132.
inline int RoomForClusters(int cluster, int multiprocessors) {
  constexpr int kMeasured = 132;
  constexpr std::pair<int, int> kRooms[] = {{2, 132}, {3, 117}, {4, 120}, {6, 102}, {8, 120}, {12, 84}};
  constexpr int kRoomOfLargest = 112;
  for (const auto [size, room] : kRooms) {
    if (cluster <= size) return multiprocessors * room / kMeasured;
  }
  return multiprocessors * kRoomOfLargest / kMeasured;
}

// Dynamic shared memory of blocks that need `bytes` of it: so much that a multiprocessor holds no more of them than it must
// for all to run at once. Blocks that start while the kernel before them still runs would go where that leaves room,
// several to one multiprocessor, while others stay idle from that kernel's end on: a kernel with a block for each then
// takes up to twice its time (ResNet-50 in float32 on an H100, batch 1: 570 us, 446 with this).
inline int SpreadBytes(int bytes, int64_t blocks, int cluster, const Device& device) {
  constexpr int kFirstOverlapping = 90, kReserved = 1 << 10;
  if (device.capability < kFirstOverlapping) return bytes;
  const int all = device.shared_bytes + 5 * 1024;  // of a multiprocessor; each block reserves kReserved
  const int room = RoomForClusters(cluster, device.multiprocessors);
  for (int at_once = 1; at_once * (bytes + kReserved) <= all; ++at_once) {
    if (blocks <= int64_t{at_once} * room) return std::max(bytes, all / (at_once + 1) - kReserved + 128);
  }
  return bytes;
}

}  // namespace lowbit::cuda
