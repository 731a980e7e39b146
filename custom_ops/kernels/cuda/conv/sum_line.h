// The second rounding of a convolution with a residual, in fewer operations. Both codes are bytes, so that
//   y_lo + clip(rint((q - hi + 256) * inner_gain + ((2^15 + low / 256 + r) * residual_gain + offset)), 0, top)
// with hi the largest q, r less the lowest code, each multiplication and its addition rounded once, can be held
// against the contract's arithmetic (core/epilogue.cc) in all 65,536 pairs. What r is added to is a float
// whose second byte is r; its lowest byte takes the place of the bits of `offset`, a number as large as 2^15
// gains, that lie below a float's. And so can
//   y_lo + clip(rint(v * near + v * rest) + zero, 0, top)
// of the contract's v, the last product rounded first, where no line has the sums that are ties. It rises with
// v, so that of any v whatever it is enough to try the first float of every code and the one before.
#pragma once

#include <optional>

#include "core/conv.h"

namespace lowbit::cuda {

struct SumLine {
  float inner_gain, residual_gain, offset;
  int low;  // of 256

  // What stands for the residual 0.
  static constexpr float kResidual = 0x1p15f;
};

// Numbers that give the same code for every pair; none where no such numbers were found. The scales are normal
// numbers. Sums are smaller than 2^14 in size.
std::optional<SumLine> FitSum(const Epilogue& e);

// 1 / y_scale in two parts.
struct Inverse {
  float near, rest;
};

// The same of them; none where codes differ.
std::optional<Inverse> InvertScale(const Epilogue& e);
// Of a tail that is computed step by step (StepsOf), for every float.
std::optional<Inverse> InvertTailScale(const Epilogue& e);

}  // namespace lowbit::cuda
