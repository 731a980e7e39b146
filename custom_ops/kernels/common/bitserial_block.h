// What the portable half of the bit-serial kernels (bitserial.cc: bit planes, addressing, threads) hands to
// the half that is compiled once per instruction set (bitserial_<isa>.cc: packing and the register tile).
// Plain data only. The algebra is in bitserial.cc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/few_codes.h"
#include "kernels/common/tile_output.h"

namespace lowbit {

// The planes of the widest codes.
inline constexpr int kMaxBitPlanes = 4;

// What is counted: the bits of ...
enum class BitOp : uint8_t {
  kAnd,     // w & x
  kXor,     // w ^ x
  kMasked,  // (w ^ x) & m: a plane of weights is two bit matrices, w and m, or w & m and ~w & m (p and n)
};

// Codes of x on their way into digits. A digit is one bit plane, or two neighbouring ones, as the engine
// wants it (BitserialEngine::digit_planes); how the bits of a few codes form the bytes of a digit is up to
// the engine too. The last byte is filled up with zeros.
struct DigitPacking {
  const uint8_t* x;
  size_t rows, x_pitch;  // runs of codes, and their distance
  size_t codes;          // per run
  uint8_t* digits;
  size_t pitch, digit_pitch;  // distance of two packed runs, and of two digits of one
  size_t digit_bytes;         // written per run and digit
  int planes;                 // bits of a code; those above are ignored
  uint8_t flip;               // XORed to every code: makes signed codes unsigned
  bool transposed;            // the order of the codes (BitserialEngine::transposed_codes)
};

// Consecutive output channels computed together: `vectors` SIMD vectors, the last one perhaps not full.
struct BitserialPanel {
  const uint8_t* weights;  // [planes][units][operands of the op][vectors][lanes][unit bytes]
  size_t channel, count;   // first output channel, number of channels
  size_t x_offset;         // of the panel's convolution group inside a pixel's digits
  int vectors;
};

// Of joint units: three codes of up to 2 bits, three weights with four values.
inline constexpr size_t kJointCodes = 3, kJointRow = 64, kJointRows = 64;
inline constexpr size_t kJointStep = 4;  // units that are taken together

// The counts of one plane of weights against one digit of the activations, over the whole window. The upper
// plane of a digit counts twice.
struct BitserialPass {
  size_t weight_plane, digit;
  int digit_planes;
  int32_t factor;  // of the counts: plus or minus a power of two
  // Instead of the factors a Horner scheme: before the counts of this pass are added, what has been summed is
  // shifted left by `shift` and, after that, negated where asked for. The last pass of a list counts nothing.
  int shift;
  bool negate;
};

// A run of output pixels times a run of panels.
struct BitserialBlock {
  BitOp op;
  // The digits of the input pixel at the upper left end of each window; and where the units of K lie from
  // there.
  const uint8_t* const* pixels;  // up to a multiple of BitserialEngine::tile_rows the last one again
  size_t pixel_count;
  const uint32_t* offsets;  // [digits][units]
  // Of an engine with joint units: [codes of x][weights] what a unit adds to a sum, and how many of them a byte holds.
  const uint8_t* table;
  size_t units_per_byte, segment_units;  // and how many lie side by side, from the first of offsets on
  size_t units;
  const BitserialPass* passes;  // [pass_count + 1]
  size_t pass_count;
  bool sums_fit_words;  // the sums before the last pass of the list surely lie within int16
  const BitserialPanel* panels;
  size_t panel_count;
  // What the sums are added to: per pixel, or one for all (then bias_rows is null); [channels + padding]
  // each.
  const int32_t* const* bias_rows;
  const int32_t* bias;
  // Whether the sums of all counts times their factors, in units of the least factor, surely lie within
  // FewCodes::kLargestSum. Then, where the engine and the epilogue have it, the epilogue of such sums, or
  // null. The limits are per pixel or for all, as the biases are, which are not given then.
  bool terms_fit_words;
  const FewCodesView* few_codes;
  const int16_t* const* limit_rows;
  const int16_t* limits;
  TileOutput output;
};

// One register-tile family.
struct BitserialEngine {
  int lanes;         // output channels per vector
  int lane_step;     // neighbouring channels lie this many units apart, wrapping around behind the last one
  int max_vectors;   // of a panel
  size_t unit_bits;  // of K that a lane takes at a time
  int digit_planes;  // 1 or 2
  size_t codes_per_byte;  // of a digit
  // Whether a unit is one number instead: a digit the offset of its codes' row in BitserialBlock::table, 16 bits, and
  // the weights a place in that row, a byte.
  bool joint = false;
  bool has_masked;           // whether BitOp::kMasked is implemented
  bool masks_by_selection;   // as x ? n : p instead of (w ^ x) & m
  double masked_operations;  // what it costs, relative to the others
  int few_codes_bits;        // up to so many bits of x BitserialBlock::few_codes is read; 0: never
  bool few_sums;             // few codes with a residual, too
  bool few_bytes = false;    // limits of bytes, where there are no limit_rows
  // In every so many whole codes of a run, a multiple of 8 or 0, code i has its bit at (i % m) * 8 + i / m
  // with m an eighth of them: packing then shifts vectors instead of bits. The others follow in order.
  size_t transposed_codes;
  size_t block_bytes;  // of packed digits, which all panels read
  // For the cost model, on x86 measured on Zen 5 (benchmarks/pairs.py).
  double products_per_cycle;   // of a plane and a digit
  double fetch_cycles;         // per bit of K, pass, pixel and panel, where fetching the digits shows
  double outputs_per_cycle;    // started and finished
  double few_codes_per_cycle;  // the same where few_codes is read
  double sums_per_cycle;       // outputs scaled between two passes
  double code_cycles;          // packing a code takes these
  double digit_cycles;         // and these for each digit
  double call_cycles;          // beside all that
  // Pixels of the widest tile, and of the least one that is as fast for its size. Where the digits of a pixel
  // are rows of a tile as well: pixels times digits, 3 of which take the rows of 4.
  int tile_rows, least_rows;
  bool digits_are_rows;
  void (*pack)(const DigitPacking& packing);
  void (*run)(const BitserialBlock& block);

  constexpr size_t DigitCount(int x_bits) const {
    return static_cast<size_t>((x_bits + digit_planes - 1) / digit_planes);
  }
  // Whether a unit of a digit is a word of 32 bits, in the order of the codes.
  constexpr bool HasWordUnits() const {
    return !joint && unit_bits == 32 && codes_per_byte == 8 && transposed_codes == 0;
  }
  constexpr size_t UnitWeightBytes() const { return joint ? 1 : unit_bits / 8; }
  constexpr size_t UnitDigitBytes() const { return joint ? 2 : unit_bits / codes_per_byte; }
};

}  // namespace lowbit
