// What depthwise.cc (portable) hands to the tiles of depthwise_neon.cc: plain pointers and numbers.
//
// A tile is four outputs next to each other in a row, times the channels of a block. The window is cut into
// lines, which lie in one row of the image each and are as wide as the tile knows at compile time: a column
// of x is read once and serves all outputs whose windows hold it, a weight serves all four.
//
//   3x3 or 5x5, stride 1 or 2   a line is a row of the window
//   any other                   a line is a single tap
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/tile_output.h"

namespace lowbit {

inline constexpr int64_t kDepthwisePixels = 4;

// Channels [channel, channel + DepthwiseForm::channels). The last block may overlap its neighbour, which then
// computes the same bytes twice.
struct DepthwiseBlock {
  size_t channel = 0;
  const uint8_t* weights = nullptr;  // [lines][width] vectors of 16 bytes
  const int32_t* init = nullptr;     // [channels] where the sums begin
};

struct DepthwiseLine {
  const uint8_t* row = nullptr;  // row of the image
  int64_t step = 0;              // bytes between two pixels; 0 for padding, which is one pixel of zero points
  int64_t left = 0;              // column that the line's first tap of output 0 lies in
};

struct DepthwiseRow {
  const DepthwiseLine* lines = nullptr;
  size_t line_count = 0;
  int64_t stride = 1;
  int64_t in_w = 0, out_w = 0;
  const uint8_t* pad = nullptr;  // a pixel of zero points, in place of those outside the image
  TileOutput output{};           // its first pixel is the row's
};

using DepthwiseRun = void (*)(const DepthwiseBlock& block, const DepthwiseRow& row);

// How products are formed, and with it how weights are stored. x' = x - offset.
//   words   int16 x, int16 weights, int32 sums: everything
//   bytes   int8 x', int8 weights, int16 sums of a whole window, where they cannot overflow
struct DepthwiseForm {
  size_t channels;
  // Computes a line of `width` taps (1, 3 or 5) at `stride`; width 1 takes any stride.
  DepthwiseRun (*run)(int64_t width, int64_t stride, bool x_signed, bool offset);
};

extern const DepthwiseForm kDepthwiseWords, kDepthwiseBytes;

}  // namespace lowbit
