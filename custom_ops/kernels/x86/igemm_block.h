// What the portable half of the igemm kernels (igemm.cc: packing, addressing, threads) hands to the half that
// is compiled once per instruction set (igemm_<isa>.cc: the register tile). Plain data only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/tile_output.h"

namespace lowbit {

// Consecutive output channels computed together: `vectors` SIMD vectors, the last one perhaps not full.
struct IgemmPanel {
  // [segments * groups][vectors][lanes][4]; where groups are multiplied in steps,
  // [steps][vectors][step_groups][lanes][4]
  const int8_t* weights;
  size_t channel, count;  // first output channel, number of channels
  size_t x_offset;        // of the panel's convolution group inside a channel row of x
  size_t group;           // the panel's convolution group (row sums differ by group)
  int vectors;
};

// A run of output pixels times a run of panels.
struct IgemmBlock {
  // rows[segment * pitch + pixel]: where the bytes of x begin that segment `segment` of the window of that
  // pixel multiplies; groups * 4 bytes (and x_offset more) are readable there.
  const uint8_t* const* rows;
  size_t pitch, segments, groups;
  // Not 0 where pixels are even (igemm.cc): bytes from the segments of a pixel to those of the next one. `rows` then
  // has those of the first one alone, and of column_pitch pixels the first `columns` are stored.
  size_t apart, columns, column_pitch;
  // Not null where the windows of a row of `columns` pixels lie `apart` bytes from one to the next, as those
  // of engines that take rows do: the groups of a window, [segments * groups], from its first byte on. `rows`
  // then has the first windows of the rows.
  const uint32_t* offsets;
  const uint8_t*
      zero_row;  // the row pointer of a tap outside the image, where that multiplies zeros; or null
  size_t pixels;
  const IgemmPanel* panels;
  size_t panel_count;
  const IgemmPanel* all_panels_end;  // of the node: the next task's panels are fetched ahead too
  const int32_t* bias;               // [channels + padding], zero points folded in
  bool rises;                        // and the bits of 2^23 (StoreRisingCodes)
  // acc += row_sums[group * pitch + pixel] * row_sum_weight[c]; null where no channel needs it
  const int32_t* row_sums;
  const int32_t* row_sum_weight;
  const int32_t* pixel_bias;  // [pixels], added to every accumulator of the pixel; or null
  // [channels + padding]: what is added to each weight of a channel before it is multiplied, as two int16 of one
  // value; null where nothing is. Only engines that unpack have it.
  const int32_t* weight_shift;
  int32_t x_shift;          // added to each byte of x modulo 256 (four times the same byte)
  bool x_signed;            // bytes of x are multiplied as int8; x_shift is 0 then
  size_t groups_per_flush;  // 16-bit accumulators only: groups whose products their sum surely holds
  // Of engines that gather: operand_bytes bytes; and whose x_offset they are for, 1 more than that, 0 before they are
  // made. The next call may have other panels of the same pixels.
  uint8_t* operands;
  size_t* operands_of;
  uint8_t* unpacked;  // room for the weights of one panel; null where they are multiplied as they are packed
  TileOutput output;
};

// One register-tile family.
struct IgemmEngine {
  int lanes;        // int32 per vector
  int max_vectors;  // of a panel; half as many where its weights then have more than panel_bytes
  bool narrow;      // 16-bit accumulators: exact only for small weights
  // Groups are multiplied so many at a time: the weights of a panel, all segments one behind the other, end
  // in groups of zeros.
  size_t step_groups = 1;
  size_t panel_bytes = SIZE_MAX;
  bool takes_even = false;         // IgemmBlock::apart
  bool takes_rows = false;         // IgemmBlock::offsets
  bool multiplies_signed = false;  // takes signed x as it is (IgemmBlock::x_signed)
  bool takes_rising = false;       // IgemmBlock::rises; AMX adds the bits of 2^23 itself
  bool adds_by_line = false;       // EpilogueView::adds_by_line
  // Bytes of IgemmBlock::operands that a block needs; null where it copies nothing.
  size_t (*operand_bytes)(size_t pixels, size_t segments, size_t groups, bool even) = nullptr;
  // Of an engine that unpacks: bytes of a panel's weights as it multiplies them, for each of their groups; it pays for
  // blocks of more than direct_pixels pixels.
  size_t unpacked_bytes = 0;
  size_t direct_pixels = 0;
  // For the cost model, sustained on Zen 5, those of AMX on Sapphire Rapids (benchmarks/pairs.py): products;
  // outputs started and finished; and how many of its `tile_rows` pixels a tile takes as long as where it has
  // fewer, waiting for its weights and for its own sums.
  double macs_per_cycle, outputs_per_cycle;
  int tile_rows;
  double least_rows;
  void (*run)(const IgemmBlock& block);
  // For operands that are only known when the node runs. sums[c] = sum of the packed weights of channel c
  // over `groups` groups of a panel of `vectors` vectors; sums[r] = sum of (x + x_shift) modulo 256 over the
  // `bytes` bytes at rows[r].
  void (*sum_weights)(const int8_t* weights, size_t groups, size_t vectors, int32_t* sums);
  void (*sum_rows)(const uint8_t* const* rows, size_t count, size_t bytes, uint8_t x_shift, int32_t* sums);

  size_t OperandBytes(size_t pixels, size_t segments, size_t groups, bool even) const {
    return operand_bytes == nullptr ? 0 : operand_bytes(pixels, segments, groups, even);
  }
  // What a block of so many pixels unpacks of a panel of so many groups; 0 where that does not pay, or takes more than
  // `most`.
  size_t UnpackedBytes(size_t pixels, size_t groups, size_t most) const {
    const size_t bytes = groups * unpacked_bytes;
    return pixels > direct_pixels && bytes <= most ? bytes : 0;
  }
};

// Defined in igemm_<isa>.cc.
extern const IgemmEngine kIgemmSse41Narrow, kIgemmSse41Wide, kIgemmAvx2Narrow, kIgemmAvx2Wide, kIgemmAvxVnni,
    kIgemmAvx512Vnni, kIgemmAmx;

}  // namespace lowbit
