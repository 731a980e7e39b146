// Epilogues whose outputs take few values, as comparisons in 16 bits: for kernels that have a sum A of an
// output in 16 bits, with bias + unit * A the accumulator.
//
// Every epilogue without a residual is monotone in its accumulator: each of its operations is. So a code of
// lo..lo+n is known from n comparisons of A with limits that are found when the node is created, by asking
// the epilogue itself (EpilogueCode), and nothing is left to round. With `count` of A > limit[k] true the
// code is (start + count) ^ flip:
//
//   rising in A   code = lo + count          start = lo, flip = 0
//   falling       code = lo + n - count      start = -(lo + n + 1), flip = -1, for ~x = -x - 1
//
// A residual is added to the code of the inner quantizer, which is one of a few again: what is added for it
// is found in tables by that code (FewSums).
//
// Limits that a channel's sums come near are seldom far apart. Where less than a byte lies between the first and the
// last one of every channel, bytes are compared: u = A - center, saturated to 0..255, with byte_limit[k]. A limit that
// every sum exceeds is part of the start then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/conv.h"
#include "kernels/common/epilogue_tables.h"

namespace lowbit {

struct FewCodesView {
  size_t count;                 // of limits per channel, 1..kMaxFewCodeLimits
  size_t pitch;                 // from one limit of a channel to its next one
  const uint8_t *start, *flip;  // [channels + padding]
  // With a residual; the codes of the limits then begin with 0. Without one null.
  const FewSums* sums;
  // Of bytes, or null: [count][pitch], and [channels + padding] each.
  const uint8_t *byte_limits, *byte_start;
  const int16_t* center;
};

class FewCodes {
 public:
  // A lies within +-kLargestSum.
  static constexpr int32_t kLargestSum = 32767;

  static bool Represents(const Epilogue& epilogue);
  // Represents epilogues with a residual, too.
  static bool RepresentsSums(const Epilogue& epilogue);

  // Represents(epilogue), or RepresentsSums.
  FewCodes(const Epilogue& epilogue, size_t channels, int32_t unit);

  FewCodesView view() const {
    const bool bytes = !center_.empty();
    return {count_,
            pitch_,
            start_.data(),
            flip_.data(),
            sums_ ? &*sums_ : nullptr,
            bytes ? byte_limits_.data() : nullptr,
            bytes ? byte_start_.data() : nullptr,
            bytes ? center_.data() : nullptr};
  }
  // Has the view say these limits in bytes, too, if they can be.
  void NarrowLimits(const std::vector<int16_t>& limits);
  // The limits for accumulators bias[channel] + unit * A: [count][pitch], in ascending order of codes.
  std::vector<int16_t> Limits(const int32_t* bias) const;
  size_t LimitsSize() const { return count_ * pitch_; }
  size_t Bytes() const {
    return start_.size() + flip_.size() + LimitsSize() * sizeof(int16_t) + byte_limits_.size() +
           byte_start_.size() + center_.size() * sizeof(int16_t);
  }

 private:
  int32_t CodeOf(size_t channel, int64_t accumulator) const;
  bool Falls(size_t channel) const { return flip_[channel] != 0; }
  int32_t Least(size_t channel) const;

  Epilogue epilogue_;
  size_t channels_, count_, pitch_;
  int32_t unit_;
  std::vector<uint8_t> start_, flip_, byte_limits_, byte_start_;
  std::vector<int16_t> center_;
  std::optional<FewSums> sums_;
};

}  // namespace lowbit
