// A LowBitAffine from codes to codes as a line for each channel, which a convolution that alone reads it climbs
// by itself (fused/affine_conv.h).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/elementwise.h"

namespace lowbit::cuda {

// clip(rint(fma(gain[c], code, offset[c])), 0, hi - lo) are the node's codes less the lowest one, for every code.
struct AffineLines {
  std::vector<float> gain, offset;  // by channel; one where all have the same
  bool x_signed = false, y_signed = false;
  int32_t lo = 0, hi = 255;  // 256 codes, or 128 from -128, 0 or 128 on
};
// Whether to look for them, which takes some microseconds a channel.
bool MayHaveLines(const AffineSpec& spec);
// Nothing where a channel has no line, or other codes are made.
std::optional<AffineLines> AffineLinesOf(const AffineSpec& spec);

}  // namespace lowbit::cuda
