// What depthwise.cc (portable) hands to the vector kernels of depthwise_<isa>.cc: plain pointers and numbers.
//
// Channels are cut into blocks of one vector of bytes (16, 32 or 64 channels; the last block may overlap its
// neighbour, which then computes the same bytes twice). Four taps make a quad: their four vectors of codes
// are interleaved into bytes t0 t1 t2 t3 of one channel after the other, so that one 4-byte dot product
// (vpdpbusd) adds four taps. The interleaving, punpcklbw/punpckhbw and then punpcklwd/punpckhwd, works inside
// 128-bit lanes:
//
//     vector j = 0..3, lane l, dword k  holds  channel 16 l + 4 j + k
//
// Bias, multipliers and weights are stored in that order, and packing the four int32 vectors back to bytes,
// which works inside lanes as well, restores the order of the channels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/epilogue_tables.h"

namespace lowbit {

// One block of channels.
struct DepthwiseBlock {
  const EpilogueView* epilogue = nullptr;
  size_t channel = 0;                // first channel of the block
  const uint8_t* weights = nullptr;  // [quads][4 vectors], as the kernel's dot product wants them
  size_t quads = 0;
  const int32_t* init = nullptr;  // [4 vectors] bias - x_zero_point * (sum of the weight values)
  const float* scale = nullptr;   // [4 vectors] multipliers of the plain requantize epilogue

  // The plain requantize epilogue on bytes (null scale: none of this is used). Codes of signed outputs are
  // formed 128 higher and flipped back.
  int16_t zero_point = 0;
  uint8_t lo = 0, hi = 255, flip = 0;
};

// One row of outputs of a window three columns wide and at most three rows high.
struct DepthwiseRow {
  const uint8_t* rows[3] = {};  // image rows, at the block's first channel
  size_t steps[3] =
      {};           // bytes between two pixels; 0 for a row of padding, which is one pixel of zero points
  uint8_t pad = 0;  // the code of a tap outside the image, as stored in x
  int64_t in_w = 0, out_w = 0, pad_left = 0;
  size_t first_pixel = 0;  // of the output row
  const uint8_t* residual = nullptr;
  void* y = nullptr;
};

// Kernels for one width of block.
struct DepthwiseKernels {
  size_t channels = 0;  // of a block
  // 3 columns, 3 rows, stride 1 or 2 along the row.
  void (*row_stride1)(const DepthwiseBlock& block, const DepthwiseRow& row) = nullptr;
  void (*row_stride2)(const DepthwiseBlock& block, const DepthwiseRow& row) = nullptr;
  // One output pixel of any window: 4 * quads pointers to taps, at channel 0.
  void (*pixel)(const DepthwiseBlock& block, const uint8_t* const* taps, size_t pixel,
                const uint8_t* residual, void* y) = nullptr;
};

// How the products are formed, and with it how the weights are stored.
//   narrow  vpdpbusd: u8 codes times s8 weights, one vector per quad vector
//   wide    vpmaddwd on the even and on the odd bytes: weights are int16, (t0 t2) and (t1 t3), two vectors
enum class DepthwiseProducts : uint8_t { kNarrow, kWide };

// One instruction set: its kernels from wide to narrow blocks, for unsigned and for signed (top bit flipped)
// codes.
struct DepthwiseEngine {
  DepthwiseProducts products = DepthwiseProducts::kWide;
  const DepthwiseKernels* kernels[2][3] = {};  // [x is signed][widest first], null behind the last
};

extern const DepthwiseEngine kDepthwiseSse41, kDepthwiseAvx2, kDepthwiseAvxVnni, kDepthwiseAvx512,
    kDepthwiseAvx512Wide;

}  // namespace lowbit
