// Weights in the orders in which kernels read them.
#pragma once

#include <cstdint>
#include <vector>

#include "core/conv.h"

namespace lowbit::cuda {

// Weights as int8 and the zero points that stay outside of them.
struct Int8Weights {
  std::vector<int8_t> values;  // logical order of ConvSpec::weights
  std::vector<int32_t> zero;   // [out_channels]
  std::vector<int64_t> sum;    // [out_channels]
  std::vector<int64_t> above;  // [out_channels], of those above 0
};

Int8Weights ToInt8(const ConvSpec& spec);

// Along n: whole blocks of the widest image kernel.
inline constexpr int64_t kImageColumns = 64;

// `out` comes filled with 0, which stays where a layout has room for more than the weights. `channels`: bytes
// of a tap, as the input has them.

// [out_channels][taps][channels]
void PackRows(const ConvGeometry& g, const Int8Weights& w, int64_t channels, uint8_t* out);
// [group][k / 128][n_padded][128], the 16-byte chunk c of row r at position c ^ (r % 8).
void PackTiles(const ConvGeometry& g, const Int8Weights& w, int64_t channels, int64_t n_padded, uint8_t* out);
// [kernel_h][channels in eights][lane][8]: lane 4 r + t has row r of the eight (InterleavedRow), the four
// channels of tap t and of tap 4 + t.
void PackImage(const ConvGeometry& g, const Int8Weights& w, uint8_t* out);
// [channels in tiles][order][half of its slots][step of k32][B], B being blocks of eight rows of 16 bytes,
// for the first and the second half of k. Thread t of four multiplies the cells of column t of a window: the
// words of a half's two slots one after the other, each step one from the first half of k and one from the
// second.
void PackCells(const ConvGeometry& g, const Int8Weights& w, uint8_t* out);
// [kernel_h][taps of a row in fours][channels][4]
void PackDepthwise(const ConvGeometry& g, const Int8Weights& w, uint8_t* out);

}  // namespace lowbit::cuda
