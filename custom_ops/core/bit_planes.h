// Tensors of few bits as planes of bits, which kernels of a region may exchange: the NPHWC of APNN-TC in words of
// 128 channels.
//   [plane][word][image][row][column] of 16 bytes
// Plane i has bit i of each code. A word is an image of its own, whose pixels have 16 bytes; channels behind the last one
// are 0. Which bit of its word a channel is concerns kernels alone.
#pragma once

#include <cstdint>
#include <span>

namespace lowbit {

inline constexpr int kPlaneChannels = 128, kPlaneWordBytes = kPlaneChannels / 8;

// Planes in which a step reads the first tensor it is fed, in which it makes its output, and in which it reads the second
// tensor it is fed, whose codes it adds; 0: a byte a code.
struct TensorPlanes {
  int x = 0, y = 0, added = 0;
  bool operator==(const TensorPlanes&) const = default;
};

// Of a tensor whose channels are its last dim.
inline int64_t PlaneBytes(std::span<const int64_t> dims, int planes) {
  int64_t pixels = 1;
  for (const int64_t dim : dims.first(dims.size() - 1)) pixels *= dim;
  return planes * ((dims.back() + kPlaneChannels - 1) / kPlaneChannels) * pixels * kPlaneWordBytes;
}

}  // namespace lowbit
