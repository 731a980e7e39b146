// The epilogue of a convolution in the form that the vector kernels read: plain pointers, per-channel arrays
// padded so that a full vector may be loaded at any channel.
//
//   EpilogueTables   owns the arrays; built once per kernel in portable code
//   EpilogueView     what a kernel reads; no std:: types, because files compiled for one ISA must not
//                    instantiate inline library functions that the linker could then use on other
//                    machines
//   epilogue.h       the arithmetic, templated over the vector width
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/conv.h"
#include "core/packed_weights.h"

namespace lowbit {

// Entries behind the last channel of every array, all zero: the widest vector of channels is 64
// (bitserial_nibbles.h), and every vector of a panel begins at a channel that exists.
inline constexpr size_t kEpiloguePadding = 64;

// Above this many comparisons the general epilogue takes less. (Modelled Cortex-A53: 2 vectors of 8 sums and
// a comparison are about 5 cycles, requantizing the 16 outputs about 30.)
inline constexpr int32_t kMaxFewCodeLimits = 3;
inline constexpr int32_t kMaxFewInner = 16;  // entries of a table that a byte shuffle reads

// y as a function of the inner code i, less the least one there is, and of a residual's byte r:
//
//   y = least[i] + #{k : s > limits[k][i]}    with s = r ^ flip as a signed number
//
// Scales are positive, so y rises with the residual and is known from comparisons, whatever bits a residual has.
//
// Of at most four inner codes y is an entry of one table if the limits of all of them lie together: what is above the
// lowest limit, at most kFewSteps, is the place, besides i.
inline constexpr int32_t kFewSteps = 15;
struct FewSums {
  int16_t inner_zero;  // of inner codes that begin with 0
  uint8_t inner_last;  // the largest of them, at most kMaxFewInner - 1
  uint8_t flip;        // 0x80 for residuals without a sign: s is in their order then
  uint8_t count;       // of limits, at most kMaxFewCodeLimits
  alignas(16) uint8_t least[kMaxFewInner];
  alignas(16) uint8_t limits[kMaxFewCodeLimits][kMaxFewInner];  // bytes of signed numbers
  // y = table[16 i + min(max(s - lowest, 0), kFewSteps)], s and the lowest limit 128 higher, as numbers without a sign.
  bool has_table;
  uint8_t lowest;
  alignas(64) uint8_t table[4 * (kFewSteps + 1)];
};

// Whether an epilogue has a residual, and few enough codes for these tables.
bool HasFewSums(const Epilogue& epilogue);
// Of such an epilogue.
FewSums FewSumsOf(const Epilogue& epilogue);

struct EpilogueView {
  EpilogueKind kind = EpilogueKind::kRequantize;
  bool quantized_output = true;
  bool has_residual = false;
  // Requantize, and no value before its last rounding leaves int32 (RequantizeTile); of sums with a residual also
  // reciprocal_is_safe.
  bool pack_clips = false;
  // y_scale may be divided by through its reciprocal (see epilogue.h).
  bool reciprocal_is_safe = false;
  // Where pack_clips, and the bounds are those of a byte without a sign and its zero point 0: nothing is left to do
  // behind packs that saturate.
  bool packs_all = false;
  size_t channels = 0;  // of y: the distance of two pixels in y and in the residual

  // requantize: multiplier; float and tail: x_scale * w_scale
  const float* scale = nullptr;
  float lo = 0, hi = 0;  // bounds of the first quantizer minus its zero point
  // -2^23 * scale where codes rise from the zero point on (requantize_rows.h), else null.
  const float* rising_offset = nullptr;
  int32_t zero_point = 0;  // of the first quantizer
  float inner_scale = 1, residual_scale = 1;
  // The code of byte r, less its zero point, is (r ^ flip) - zero, r without a sign: of signed residuals the top bit is
  // flipped, which costs less than a branch at every vector.
  int32_t residual_flip = 0, residual_zero = 0;

  // Where pack_clips: the last quantizer's codes are those of a line (residual_line.h), if AddByLine found one.
  bool adds_by_line = false;
  float line_inner = 0, line_residual = 0, line_constant = 0;
  uint32_t line_base = 0;

  // Where the sums of few codes come from tables, or null.
  const FewSums* few_sums = nullptr;

  // The last quantizer where it is not the first: bounds minus its zero point.
  float y_scale = 1, y_reciprocal = 1, y_lo = 0, y_hi = 0;
  int32_t y_zero_point = 0;

  // pack_clips, thresholds and tails: zero point and bounds of y, 128 higher where y is signed (flip is then
  // 0x80).
  int16_t pack_zero = 0;
  uint8_t pack_lo = 0, pack_hi = 255, pack_flip = 0;

  // Every comparison is acc > thresholds[k * pitch + c], whatever the channel's direction; with `count` of
  // them true the code is (start[c] + count) ^ flip[c], flip 0 or -1:
  //   dir +1   base + #{acc >= T} = base + #{acc > T - 1}
  //   dir -1   base + #{acc <= T} = base + n - #{acc > T} = ~(-(base + n + 1) + #{acc > T})
  // T - 1 stays inside int32: an accumulator is never its smallest number, so T = that + 1 is reached as
  // well.
  const int32_t* thresholds = nullptr;
  const int32_t *start = nullptr, *flip = nullptr;
  size_t threshold_count = 0, threshold_pitch = 0;
  // The same codes as a line (threshold_line.h), for kernels with a multiply-add: clip(rint(fma(acc, gain,
  // offset)), pack_lo, pack_hi). Null where they are none.
  const float *line_gain = nullptr, *line_offset = nullptr;

  const TailStep* tail = nullptr;
  size_t tail_count = 0;
  const float *tail_bias = nullptr, *tail_scale = nullptr, *tail_shift = nullptr;
  float clip_min = 0, clip_max = 0;
};

class EpilogueTables {
 public:
  EpilogueTables(const Epilogue& epilogue, size_t channels);
  // Where it is known what accumulators come from, a line may do what thresholds do.
  explicit EpilogueTables(const ConvSpec& spec);
  EpilogueTables(const EpilogueTables&) = delete;
  EpilogueTables& operator=(const EpilogueTables&) = delete;

  // `largest[c]` bounds |accumulator| of channel c; allows the faster epilogues: clips after packing, rising codes.
  void LimitAccumulators(const std::vector<int64_t>& largest);

  // Behind LimitAccumulators, for kernels that add residuals by a line. It usually takes half a millisecond to find.
  void AddByLine(const Epilogue& epilogue);

  const EpilogueView& view() const { return view_; }
  size_t Bytes() const;

 private:
  template <class T>
  const T* Padded(const std::vector<T>& values, size_t channels);
  bool Rises(const std::vector<int64_t>& largest) const;

  EpilogueView view_;
  std::vector<AlignedBytes> tables_;
  std::vector<TailStep> tail_;
  std::optional<FewSums> few_sums_;
};

}  // namespace lowbit
