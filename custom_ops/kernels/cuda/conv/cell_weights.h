// Windows of stride 2 as cells of the image, and how large their packed weights are.
#pragma once

#include "kernels/cuda/conv/weight_layouts.h"

namespace lowbit::cuda {

// The image is cells of 2 x 2 pixels. With both strides 2, a window begins at the same place of a cell for
// every output, and lies in kCellTaps x kCellTaps cells; weights of pixels that it leaves out are 0. A cell
// is the codes of its pixels, row by row, without gaps: as many words as the image has channels.
inline constexpr int kCellTaps = 4;
// Channels that one block multiplies.
inline constexpr int kCellTileN = 64;
// One step of k32 of a tile's weights, as wgmma reads it without swizzle.
inline constexpr int kCellMatrixBytes = kCellTileN * 32;
// Four rows of cells take turns in the registers of A. For the next row of outputs, one of them is the next
// row of cells instead of the first, so that the weights are in another order: rows of cells 0 1 2 3, 3 0 1
// 2, 2 3 0 1, 1 2 3 0. The latter two are the halves of the former two, exchanged.
inline constexpr int kCellOrders = 2;
// The bytes of a tile's weights, for every channel of the image.
inline constexpr int kCellChannelBytes = kCellOrders * 2 * kCellMatrixBytes;

extern const WeightLayout kCellWeights;
// Whether windows lie in cells.
bool FitsCells(const ConvGeometry& g, const OperandType& x);

}  // namespace lowbit::cuda
