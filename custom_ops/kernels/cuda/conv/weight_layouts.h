// Weights in the orders in which kernels read them.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "core/conv.h"
#include "kernels/cuda/device/device.h"

namespace lowbit::cuda {

// Weights as int8 and the zero points that stay outside of them.
struct Int8Weights {
  std::vector<int8_t> values;  // logical order of ConvSpec::weights
  std::vector<int32_t> zero;   // [out_channels]
  std::vector<int64_t> sum;    // [out_channels], of the weights less zero points
  std::vector<int64_t> above;  // [out_channels], of those of them that are above 0
};

Int8Weights ToInt8(const ConvSpec& spec);

// Weights of few values as bits: w = lowest + 2^shift * b, b below 2^fit.
struct WeightBits {
  // Up to kMostWeightPlanes, or 0: there are more values, or zero points stay outside of them.
  int fit = 0;
  int shift = 0;
  int32_t lowest = 0;
};

inline constexpr int kMostWeightPlanes = 2;

WeightBits BitsOf(const Int8Weights& weights);

// Everything that kernels count is below.
inline constexpr int64_t kMaxBytes = std::numeric_limits<int32_t>::max();

inline int64_t RoundUp(int64_t value, int64_t step) { return (value + step - 1) / step * step; }
// Rows of weights in tiles.
inline int64_t PaddedColumns(int64_t channels) { return RoundUp(channels, 32); }

// Weights in the order of a family of kernels, packed besides those that the tile kernels read wherever it
// applies.
struct WeightLayout {
  bool (*applies)(const ConvGeometry& g, const OperandType& x, const WeightBits& bits, const Device& device);
  int64_t (*bytes)(const ConvGeometry& g, const WeightBits& bits);
  // `out` comes filled with 0, which stays where the layout has room for more than the weights.
  void (*pack)(const ConvGeometry& g, const Int8Weights& w, const WeightBits& bits, uint8_t* out);
};

// The same of the orders that all nodes have one of. `channels`: bytes of a tap, as the input has them.

// [out_channels][taps][channels]
void PackRows(const ConvGeometry& g, const Int8Weights& w, int64_t channels, uint8_t* out);
// [group][k / 128][n_padded][128], the 16-byte chunk c of row r at position c ^ (r % 8).
void PackTiles(const ConvGeometry& g, const Int8Weights& w, int64_t channels, int64_t n_padded, uint8_t* out);

}  // namespace lowbit::cuda
