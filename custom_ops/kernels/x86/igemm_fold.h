// First layers whose squares of pixels become pixels of their own (igemm.cc, addressing "folded").
#pragma once

#include <cstdint>

#include "core/conv.h"

namespace lowbit {

// Squares of pixels as pixels, four bytes for each. Their sides are the strides.
inline constexpr int64_t kMostFold = 2, kFoldedPixel = 4;

// Of the folded image, which holds the pads.
ConvGeometry Folded(ConvGeometry g);
ConvSpec Folded(const ConvSpec& whole);
ConvShape FoldedShape(const ConvGeometry& folded, ConvShape shape);

// Row `row` of a folded image, columns [column, column + count). `x_end` is the tensor's: pixels are read as
// four bytes, of which those that are no channels of theirs may be anything, but for the tensor's last ones.
// `image` begins with row `first` of the image.
void FoldRow(const ConvGeometry& whole, const ConvShape& shape, const uint8_t* image, int64_t first,
             const uint8_t* x_end, uint8_t pad, int64_t row, int64_t column, int64_t count, uint8_t* to);

}  // namespace lowbit
