// Where a pooling window lies on its image; shared by LowBitMaxPool and LowBitAveragePool.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "core/cpu/elementwise_kernels.h"
#include "core/node_reader.h"

namespace lowbit {

// 1-D images are images of height 1, 2-D ones volumes of depth 1. A `row` is an output row of any plane of
// any image of the batch, counted through.
struct PoolShape {
  PoolShape(const Window& window, std::span<const int64_t> x, std::span<const int64_t> y) : window(window) {
    const size_t width = x.size() - 2;
    batch = x[0];
    if (window.spatial == 3) in_d = x[1], out_d = y[1];
    if (window.spatial >= 2) in_h = x[width - 1], out_h = y[width - 1];
    in_w = x[width];
    out_w = y[width];
    channels = x.back();
  }

  int64_t Rows() const { return batch * out_d * out_h; }

  // Taps read for one row of outputs, an estimate for cutting work: attributes may claim windows far larger
  // than the image, and the product must not overflow.
  int64_t RowWork() const {
    constexpr int64_t kMost = 4096;
    const int64_t taps = std::min(window.kernel[0], in_d) * std::min(window.kernel[1], in_h) *
                         std::min(window.kernel[2], in_w);
    return out_w * channels * std::min(taps, kMost);
  }

  // Taps along one dim that lie inside the image. A dilated window may have none.
  struct Span {
    int64_t first, count;  // first pixel, number of taps
  };
  struct RowSpans {
    Span d, h;
    bool empty() const { return d.count == 0 || h.count == 0; }
  };
  RowSpans RowSpan(int64_t row) const {
    return {Inside(0, row / out_h % out_d, in_d), Inside(1, row % out_h, in_h)};
  }

  // The taps of output pixel `column` in an output row, whose RowSpan is `spans`.
  Taps TapsOf(const uint8_t* image_row, const RowSpans& spans, int64_t column) const {
    const Span w = Inside(2, column, in_w);
    Taps taps;
    taps.planes = spans.d.count;
    taps.rows = w.count == 0 || spans.empty() ? 0 : spans.h.count;
    taps.columns = w.count;
    taps.plane_stride = window.dilation[0] * in_h * in_w * channels;
    taps.row_stride = window.dilation[1] * in_w * channels;
    taps.column_stride = window.dilation[2] * channels;
    taps.channels = channels;
    taps.origin = taps.rows == 0 ? image_row : image_row + w.first * channels;
    return taps;
  }
  // The first image row that the windows of output row `row` see, where `x` begins with row `x_first`.
  const uint8_t* ImageRow(const uint8_t* x, int64_t row, const RowSpans& spans, int64_t x_first = 0) const {
    const int64_t plane = row / out_h / out_d * in_d + spans.d.first;
    return spans.empty() ? x : x + (plane * in_h + spans.h.first - x_first) * in_w * channels;
  }

  // Taps inside the padded image: with ceil_mode the last window may reach beyond even that. No dilation.
  int64_t PaddedTaps(int64_t row, int64_t column) const {
    const auto along = [&](size_t d, int64_t o, int64_t size) {
      const int64_t first = o * window.stride[d] - window.pad_begin[d];
      return std::min(window.kernel[d], size + window.pad_end[d] - first);
    };
    return along(0, row / out_h % out_d, in_d) * along(1, row % out_h, in_h) * along(2, column, in_w);
  }

  const Window& window;
  int64_t batch = 0, in_d = 1, in_h = 1, in_w = 0, out_d = 1, out_h = 1, out_w = 0, channels = 0;

 private:
  Span Inside(size_t d, int64_t o, int64_t size) const {
    const int64_t first = o * window.stride[d] - window.pad_begin[d], step = window.dilation[d];
    if (first >= 0 && first + (window.kernel[d] - 1) * step < size) return {first, window.kernel[d]};
    const int64_t skipped = first < 0 ? (-first + step - 1) / step : 0;  // taps before the image
    const int64_t end = std::min(window.kernel[d], first < size ? (size - 1 - first) / step + 1 : 0);
    return {first + skipped * step, std::max<int64_t>(0, end - skipped)};
  }
};

}  // namespace lowbit
