// Tensors of codes as planes of bits (core/bit_planes.h) and back, on the host.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/bit_planes.h"
#include "kernels/cuda/conv/weight_rows.h"

namespace lowbit::cuda {

// f(code's index, byte of the planes, bit of the byte, plane) for each bit of `codes` codes.
template <typename F>
void ForEachBitOfPlanes(int64_t codes, int64_t channels, int planes, const F& f) {
  const int64_t pixels = codes / channels, words = (channels + kPlaneChannels - 1) / kPlaneChannels;
  for (int64_t i = 0; i < codes; ++i) {
    const int64_t channel = i % channels;
    const int bit = BitOfChannel(static_cast<int>(channel % kPlaneChannels));
    for (int plane = 0; plane < planes; ++plane) {
      const int64_t word = (plane * words + channel / kPlaneChannels) * pixels + i / channels;
      f(static_cast<size_t>(i), static_cast<size_t>(word * kPlaneWordBytes + bit / 8), bit % 8, plane);
    }
  }
}

inline std::vector<uint8_t> AsPlanes(std::span<const uint8_t> codes, int64_t channels, int planes) {
  const auto count = static_cast<int64_t>(codes.size());
  const int64_t dims[] = {count / channels, channels};
  std::vector<uint8_t> out(static_cast<size_t>(PlaneBytes(dims, planes)));
  ForEachBitOfPlanes(count, channels, planes, [&](size_t i, size_t byte, int bit, int plane) {
    out[byte] |= static_cast<uint8_t>((codes[i] >> plane & 1) << bit);
  });
  return out;
}

inline std::vector<uint8_t> FromPlanes(std::span<const uint8_t> bits, int64_t codes, int64_t channels,
                                       int planes) {
  std::vector<uint8_t> out(static_cast<size_t>(codes));
  ForEachBitOfPlanes(codes, channels, planes, [&](size_t i, size_t byte, int bit, int plane) {
    out[i] |= static_cast<uint8_t>((bits[byte] >> bit & 1) << plane);
  });
  return out;
}

}  // namespace lowbit::cuda
