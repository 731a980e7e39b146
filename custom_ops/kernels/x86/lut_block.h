// What the portable half of the look-up kernels (lut.cc: packing, addressing, threads) hands to the half that
// is compiled once per instruction set (lut_<isa>.cc). Plain data only. The algebra is in lut.cc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/tile_output.h"

namespace lowbit {

// A table serves four channels of one input pixel: entry i, a byte, is the sum of the channels whose bit is
// set in i. Four tables are built at a time, which is one 512-bit vector.
inline constexpr size_t kTableChannels = 4;
inline constexpr size_t kTableEntries = 16;
inline constexpr size_t kQuadTables = 4;
inline constexpr size_t kQuadChannels = kQuadTables * kTableChannels;
inline constexpr size_t kQuadBytes = kQuadTables * kTableEntries;

// How the codes of x become the unsigned bytes that are summed.
enum class LutAdjust : uint8_t {
  kNone,    // x
  kShift,   // x + shift modulo 256: signed codes
  kDouble,  // 2 x: bipolar codes, so that 1 stands for a tap in the padding
};

// Which four channels, from the first of them on, table `table` of a convolution group of `channels` serves.
// The tables of 64 channels at a time are interleaved: quad q has channels 4 q .. 4 q + 3 of each 16 of them,
// so that a 512-bit vector of codes becomes its four quads by shuffles inside 128-bit lanes. Fewer channels
// are in their order.
constexpr size_t FirstChannelOf(size_t table, size_t channels) {
  const size_t block = table / (4 * kQuadTables), quad = table / kQuadTables % 4, lane = table % kQuadTables;
  if ((block + 1) * 4 * kQuadChannels > channels) return table * kTableChannels;
  return (block * 4 + lane) * kQuadChannels + quad * kTableChannels;
}

// The tables of a run of input pixels.
struct LutBuild {
  const uint8_t* x;      // the first pixel's codes
  const uint8_t* x_end;  // of the memory that may be read
  size_t pixels, x_pitch;
  size_t groups, group_channels;  // convolution groups; channels of each
  uint8_t* tables;                // [pixels][groups][quads][kQuadBytes]
  size_t pitch, group_pitch;      // of a pixel, of a group inside a pixel
  int32_t* sums;                  // of the channels [groups][pixels], or null
  size_t sums_pitch;              // of a group
  LutAdjust adjust;
  uint8_t shift;
};

// Consecutive output channels of one convolution group computed together.
struct LutPanel {
  const uint8_t* indices;  // [segments][lookups][units][index bytes of the engine]
  size_t channel, count;   // first output channel, number of channels
  size_t group;
  size_t units;
};

// Consecutive products of all pixels and panels, few enough that the tables of a register tile stay in L1.
// Either whole segments, or a part of one.
struct LutDepth {
  size_t first_segment, segments;
  size_t first_lookup, lookups;  // per segment
};

// A run of output pixels times a run of panels.
struct LutBlock {
  // rows[segment * pitch + pixel]: the tables that this segment of the window of that pixel looks into.
  const uint8_t* const* rows;
  size_t pitch;
  const uint8_t* zero_row;  // the row of a segment outside the image, where that adds nothing; or null
  size_t pixels;
  size_t group_pitch;    // of the tables
  int planes;            // bits of a weight
  int per_flush;         // look-ups whose sum surely fits a byte: 4, 2 or 1
  int32_t slot_weights;  // four int8: what the sums of the four (or two) neighbouring bytes count
  const LutDepth* depths;
  size_t depth_count;
  size_t lookups;  // per segment
  const LutPanel* panels;
  size_t panel_count;
  size_t panels_per_chunk;
  const int32_t* bias;  // [channels + padding], zero points folded in
  // acc += row_sums[group * pitch + pixel] * row_sum_weight[c]. No sums where no channel needs them, no
  // weights where all are -1.
  const int32_t* row_sums;
  const int32_t* row_sum_weight;
  int32_t* partial;  // [panels_per_chunk][accumulators of a tile], between two depths
  TileOutput output;
};

// Output channels are computed in units of this many.
inline constexpr size_t kLutUnit = 16;

// How the indices of a unit are laid out.
enum class LutLayout : uint8_t {
  kPermute,  // 6-bit indices into four tables; four neighbouring bytes belong to one channel
  kShuffle,  // 4-bit indices, each 128-bit lane into a table of its own; one byte per channel and plane
};

// One register-tile family.
struct LutEngine {
  LutLayout layout;
  size_t vector_tables;  // tables in a vector: 2 or 4
  size_t max_units;      // of a panel
  size_t max_pixels;     // of a tile
  // Cycles on Zen 5 (benchmarks/pairs.py), for the cost model.
  double lookup_cycles;  // a look-up of a unit
  double table_cycles;   // a vector of tables for a unit
  double wide_cycles;    // more for a look-up, where few sums of 6-bit activations fit a byte
  double unit_cycles;    // a unit of outputs, started and finished
  void (*build)(const LutBuild& build);
  void (*run)(const LutBlock& block);
};

// Defined in lut_<isa>.cc.
extern const LutEngine kLutAvx2, kLutAvx512Vnni, kLutAvx512Popcnt;

}  // namespace lowbit
