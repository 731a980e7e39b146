// A requantized sum and a residual as one line:
//
//     rint((f32(i) * inner_scale + f32(r - zero) * residual_scale) / y_scale)
//   = rint(fma(i, inner, fma(X, residual, offset)))
//
// for every inner code i, less its zero point, and every code r, after clipping. X is the float whose bits are
// those of `base` and, in the lowest byte, of r without a sign: no conversion makes it. The left side rounds five
// times, the right side three times; they differ only where the real sum is next to a tie, at one or two of the
// 65536 pairs, and numbers a few units in the last place away round those as well.
#pragma once

#include <cstdint>
#include <optional>

#include "core/conv.h"

namespace lowbit {

struct ResidualLine {
  float inner, residual, offset;
  uint32_t base;  // of signed codes with the bit that makes them unsigned, to be flipped
};

// Of requantized codes with a residual; nothing where no such line is found, as where ties are many.
std::optional<ResidualLine> FitResidualLine(const Epilogue& epilogue);

}  // namespace lowbit
