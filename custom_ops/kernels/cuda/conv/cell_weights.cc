#include "kernels/cuda/conv/cell_weights.h"

#include "kernels/cuda/conv/image.h"
#include "kernels/cuda/conv/weight_rows.h"

namespace lowbit::cuda {

bool FitsCells(const ConvGeometry& g, const OperandType& x) {
  constexpr int64_t kPixels = 2 * kCellTaps;
  return FitsImage(g, x) && g.stride_h == 2 && g.stride_w == 2 && g.kernel_h + g.pad_top % 2 <= kPixels &&
         g.kernel_w + g.pad_left % 2 <= kPixels && g.out_channels % 16 == 0;
}

namespace {

bool Applies(const ConvGeometry& g, const OperandType& x, const WeightBits&, const Device& device) {
  return device.capability == 90 && FitsCells(g, x);
}

int64_t WeightBytes(const ConvGeometry& g, const WeightBits&) {
  return RoundUp(g.out_channels, kCellTileN) / kCellTileN * g.in_channels * kCellChannelBytes;
}

// [channels in tiles][order][half of its slots][step of k32][B], B being blocks of eight rows of 16 bytes,
// for the first and the second half of k. Thread t of four multiplies the cells of column t of a window: the
// words of a half's two slots one after the other, each step one from the first half of k and one from the
// second.
void PackCells(const ConvGeometry& g, const Int8Weights& w, const WeightBits&, uint8_t* out) {
  const int64_t channels = g.in_channels, tile_bytes = channels * kCellChannelBytes;
  for (int64_t c = 0; c < g.out_channels; ++c) {
    const int64_t row = RowOfNeighbours<kCellTileN>(static_cast<int>(c % kCellTileN));
    for (int64_t tap = 0; tap < g.Taps(); ++tap) {
      const int64_t y = tap / g.kernel_w + g.pad_top % 2, x = tap % g.kernel_w + g.pad_left % 2;
      for (int order = 0; order < kCellOrders; ++order) {
        const int64_t slot = (y / 2 + order) % kCellTaps;
        for (int64_t i = 0; i < channels; ++i) {
          const int64_t byte = (y % 2 * 2 + x % 2) * channels + i, word = slot % 2 * channels + byte / 4;
          const int64_t step = (order * 2 + slot / 2) * channels + word / 2;
          out[c / kCellTileN * tile_bytes + step * kCellMatrixBytes + row / 8 * 256 + word % 2 * 128 +
              row % 8 * 16 + x / 2 * 4 + byte % 4] =
              static_cast<uint8_t>(w.values[static_cast<size_t>((c * g.Taps() + tap) * channels + i)]);
        }
      }
    }
  }
}

}  // namespace

const WeightLayout kCellWeights = {Applies, WeightBytes, PackCells};

}  // namespace lowbit::cuda
