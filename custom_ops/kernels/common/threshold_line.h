// Thresholds that lie where the roundings of a line do, as that line:
//
//     start + #{acc > t[k]}  =  clip(rint(fma(f32(acc), gain, offset)), lo, hi)
//
// A chain of scales, a bias and a quantizer has such thresholds, whatever its float operations round, and one
// multiply-add takes the place of a comparison per threshold. The line is found by geometry and then tried:
// both sides are monotone in acc, so they are equal everywhere if they are on both sides of every threshold
// and at the ends of what acc can be.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/common/epilogue_tables.h"

namespace lowbit {

struct ThresholdLine {
  std::vector<float> gain, offset;  // [channels]
  int32_t lo = 0, hi = 0;           // of the codes of all channels
};

// Nothing where a channel has no line, or too many thresholds to look for one. The codes of x are those of
// its bits (stated_codes.h), and the line holds for the sums that they make: the converter puts a threshold
// that none of them reaches anywhere beyond.
std::optional<ThresholdLine> FitThresholdLine(const EpilogueView& thresholds, const ConvSpec& spec);

}  // namespace lowbit
