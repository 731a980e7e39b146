#include "kernels/cuda/fused/stem_pool.h"

#include <algorithm>

#include "kernels/cuda/conv/packed_conv.h"
#include "kernels/cuda/fused/stem_pool_params.h"

namespace lowbit::cuda {

namespace {

// Packing left the weights of cells out where there are none for the node, or its codes do not rise.
std::string Refuse(const PooledConv& pooled, const Device&) {
  const ConvShape& s = pooled.shape;
  const ConvGeometry& g = pooled.conv->Geometry();
  // Every window holds an output of the convolution.
  const auto reaches = [&](size_t d, int64_t in, int64_t out) {
    return out > 0 && 2 * (out - 1) - pooled.window.pad_begin[d] < in;
  };
  if (pooled.y_planes > 0 && !pooled.conv->MayStorePlanes(pooled.y_planes))
    return "codes of more bits than there are planes, or channels that are no multiple of 64";
  constexpr int64_t kMostPixels = int64_t{1} << 14;  // of a side
  if (pooled.conv->CellWeights() == nullptr)
    return "needs sm_90a, windows of cells, codes that rise with sums";
  if (!RoundingOf(pooled.quantizer).fast_division)
    return "scales of the quantizer that are no normal numbers";
  if (!pooled.quantizer.planes) return "an image whose channels are last";
  if (std::max(s.in_h, s.in_w) >= kMostPixels ||
      std::max({g.pad_top, g.pad_left, g.pad_bottom, g.pad_right}) >= kMostPixels ||
      s.OutPixels() * g.out_channels > kMaxBytes)
    return "an image or padding of 16384 pixels a side and more, or too large an output";
  const bool all_reach = reaches(1, s.out_h, pooled.pooled_h) && reaches(2, s.out_w, pooled.pooled_w);
  return all_reach ? "" : "a window of the pooling without an output of the convolution";
}

// It is taken wherever it applies.
double Microseconds(const PooledConv&, const Device&) { return 0; }

}  // namespace

const FusedRow<PooledConv> kStemPoolKernel = {
    {"conv_pool", "sm_90a", "a network's first layer from float planes, and the max pooling behind it"},
    Refuse,
    Microseconds};

PoolStrips SplitRows(int rows, int strips) { return {strips, rows / strips, rows % strips}; }

bool FitsPooling(const ConvSpec& conv, const MaxPoolNode& pool, const Device& device) {
  const Window& w = pool.window;
  const auto all = [](const SpatialNumbers& values, int64_t value) {
    return values[1] == value && values[2] == value;
  };
  return device.capability == 90 && FitsCells(conv.geometry, conv.x) && MayRise(conv.epilogue) &&
         pool.is_signed == conv.epilogue.y_signed && w.spatial == 2 && all(w.kernel, 3) && all(w.stride, 2) &&
         all(w.dilation, 1) && w.pad_begin[1] <= 1 && w.pad_begin[2] <= 1;
}

bool Pools(const PooledConv& pooled) { return kStemPoolKernel.Applies(pooled, pooled.conv->On()); }

PoolStrips ChooseStrips(const PooledConv& pooled) {
  const int rows = static_cast<int>(pooled.pooled_h);
  const int64_t columns = (pooled.pooled_w + kPoolTileColumns - 1) / kPoolTileColumns;
  const int64_t tiles =
      pooled.shape.batch * columns * ((pooled.conv->Geometry().out_channels + kCellTileN - 1) / kCellTileN);
  // All blocks at once.
  const int64_t slots =
      int64_t{kPoolBlocks - pooled.conv->Geometry().in_channels / 4} * pooled.conv->On().multiprocessors;
  const int strips = static_cast<int>(std::clamp<int64_t>(slots / std::max<int64_t>(1, tiles), 1, rows));
  return SplitRows(rows, strips);
}

}  // namespace lowbit::cuda
