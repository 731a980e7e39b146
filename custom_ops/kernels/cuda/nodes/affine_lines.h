// A LowBitAffine from codes to codes as a line for each channel, which a convolution that alone reads it climbs
// by itself (fused/affine_conv.h).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/elementwise.h"

namespace lowbit::cuda {

// clip(rint(fma(gain[c], code, offset[c])), 0, 255) are the node's codes less the lowest one, for every code.
struct AffineLines {
  std::vector<float> gain, offset;  // by channel; one where all have the same
  bool x_signed = false, y_signed = false;
};
// Nothing where a channel has no line, or what is made has fewer than 256 codes.
std::optional<AffineLines> AffineLinesOf(const AffineSpec& spec);

}  // namespace lowbit::cuda
