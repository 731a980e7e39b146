#include "kernels/x86/igemm_fold.h"

#include <algorithm>
#include <cstring>

namespace lowbit {
namespace {

int64_t FoldedChannels(int64_t fold) { return fold * fold * kFoldedPixel; }

}  // namespace

ConvGeometry Folded(ConvGeometry g) {
  const int64_t fold = g.stride_h;
  g.in_channels = FoldedChannels(fold);
  g.kernel_h = (g.kernel_h + fold - 1) / fold;
  g.kernel_w = (g.kernel_w + fold - 1) / fold;
  g.stride_h = g.stride_w = 1;
  g.pad_top = g.pad_left = g.pad_bottom = g.pad_right = 0;
  return g;
}

ConvSpec Folded(const ConvSpec& whole) {
  ConvSpec spec = whole;
  spec.geometry = Folded(whole.geometry);
  const ConvGeometry &g = spec.geometry, &from = whole.geometry;
  const int64_t fold = from.stride_h;
  spec.w = {8, Encoding::kSigned};
  std::fill(spec.w_zero_point.begin(), spec.w_zero_point.end(), 0);
  spec.weights.assign(static_cast<size_t>(g.out_channels * g.K()), 0);
  for (int64_t o = 0; o < g.out_channels; ++o) {
    for (int64_t y = 0; y < from.kernel_h; ++y) {
      for (int64_t x = 0; x < from.kernel_w; ++x) {
        const int64_t tap = y / fold * g.kernel_w + x / fold, pixel = y % fold * fold + x % fold;
        for (int64_t c = 0; c < from.in_channels; ++c) {
          const int64_t index = (y * from.kernel_w + x) * from.in_channels + c;
          spec.weights[static_cast<size_t>(o * g.K() + tap * g.in_channels + pixel * kFoldedPixel + c)] =
              static_cast<uint8_t>(whole.WeightValue(o, o * from.K() + index));
        }
      }
    }
  }
  ReadWeightValues(spec);
  return spec;
}

ConvShape FoldedShape(const ConvGeometry& folded, ConvShape shape) {
  shape.in_h = (shape.out_h - 1) * folded.stride_h + folded.kernel_h;
  shape.in_w = (shape.out_w - 1) * folded.stride_w + folded.kernel_w;
  return shape;
}

void FoldRow(const ConvGeometry& whole, const ConvShape& shape, const uint8_t* image, int64_t first,
             const uint8_t* x_end, uint8_t pad, int64_t row, int64_t column, int64_t count, uint8_t* to) {
  const int64_t fold = whole.stride_h, folded_channels = FoldedChannels(fold);
  const int64_t channels = whole.in_channels, step = fold * channels;
  for (int64_t part = 0; part < fold * fold; ++part) {
    const int64_t y = row * fold + part / fold - whole.pad_top;
    const int64_t x = column * fold + part % fold - whole.pad_left;  // of the first pixel
    int64_t begin = 0, end = 0;                                      // of those in the image
    if (y >= 0 && y < shape.in_h) {
      begin = std::clamp<int64_t>((-x + fold - 1) / fold, 0, count);
      if (x < shape.in_w) end = std::min(count, (shape.in_w - 1 - x) / fold + 1);
      end = std::max(begin, end);
    }
    uint8_t* const out = to + part * kFoldedPixel;
    for (int64_t i = 0; i < begin; ++i) std::memset(out + i * folded_channels, pad, kFoldedPixel);
    if (begin < end) {
      const uint8_t* const from = image + ((y - first) * shape.in_w + x) * channels;
      int64_t whole_end = end;
      while (whole_end > begin && x_end - (from + (whole_end - 1) * step) < kFoldedPixel) --whole_end;
      for (int64_t i = begin; i < whole_end; ++i)
        std::memcpy(out + i * folded_channels, from + i * step, kFoldedPixel);
      for (int64_t i = whole_end; i < end; ++i)
        std::memcpy(out + i * folded_channels, from + i * step, static_cast<size_t>(channels));
    }
    for (int64_t i = end; i < count; ++i) std::memset(out + i * folded_channels, pad, kFoldedPixel);
  }
}

}  // namespace lowbit
