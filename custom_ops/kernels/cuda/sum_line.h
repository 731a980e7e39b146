// The second rounding of a convolution with a residual, in fewer operations. Both codes are bytes, so that
//   clip(rint((q - hi + 256) * inner_gain + (r * residual_gain + offset)), 0, 255) + y_lo,
// hi the largest q, r less its zero point, each multiplication and its addition rounded once, can be held
// against the contract's arithmetic (core/epilogue.cc) in all 65,536 pairs. And so can
//   clip(rint(v * near + v * rest), 0, 255) + y_lo
// of the contract's v, the last product rounded first, where no line has the sums that are ties.
#pragma once

#include <optional>

#include "core/conv.h"

namespace lowbit::cuda {

struct SumLine {
  float inner_gain, residual_gain, offset;
};

// Numbers that give the same code for every pair; none where the output has fewer than 256 codes, or where no
// such numbers were found. The scales are normal numbers.
std::optional<SumLine> FitSum(const Epilogue& e);

// 1 / y_scale in two parts.
struct Inverse {
  float near, rest;
};

// The same of them; none where the zero point is not the lowest of 256 codes, or codes differ.
std::optional<Inverse> InvertScale(const Epilogue& e);

}  // namespace lowbit::cuda
