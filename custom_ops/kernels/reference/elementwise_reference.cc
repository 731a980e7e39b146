// The definitions of core/schema.cc as plain loops. Every other kernel must equal these in every element.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/cpu/elementwise_kernels.h"

namespace lowbit {
namespace {

int32_t Code(const uint8_t* x, int64_t i, bool is_signed) {
  return is_signed ? static_cast<int8_t>(x[i]) : x[i];
}

// clip(rint(t) + z, lo, hi) in float, so that huge values and NaN are defined before the conversion to int.
uint8_t RoundAndClip(float t, int32_t zero_point, const Quantizer& q) {
  const float code = std::nearbyint(t) + static_cast<float>(zero_point);
  const float lo = static_cast<float>(q.lo), hi = static_cast<float>(q.hi);
  const float clipped = code > lo ? std::min(code, hi) : lo;  // NaN > lo is false
  return static_cast<uint8_t>(static_cast<int32_t>(clipped));
}

void Store(float v, float scale, int32_t zero_point, const Quantizer& q, void* y, int64_t i) {
  if (q.quantized) {
    static_cast<uint8_t*>(y)[i] = RoundAndClip(v / scale, zero_point, q);
  } else {
    static_cast<float*>(y)[i] = v;
  }
}

void Affine(const AffineSpec& spec, const uint8_t* x, void* y, int64_t rows, int64_t width,
            int64_t y_stride) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < width; ++i) {
      const auto c = static_cast<size_t>(i % spec.channels);
      float v =
          static_cast<float>(Code(x, r * width + i, spec.x_signed) - spec.x_zero_point[c]) * spec.x_scale[c];
      if (spec.has_affine) v = v * spec.scale[c] + spec.shift[c];
      Store(v, spec.y_scale[c], spec.y_zero_point[c], spec.quantizer, y, r * y_stride + i);
    }
  }
}

void CopyRows(const uint8_t* x, uint8_t* y, int64_t rows, int64_t width, int64_t y_stride) {
  for (int64_t r = 0; r < rows; ++r) std::memcpy(y + r * y_stride, x + r * width, static_cast<size_t>(width));
}

void Binary(const BinarySpec& spec, const uint8_t* a, bool a_scalar, const uint8_t* b, bool b_scalar, void* y,
            int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float va =
        static_cast<float>(Code(a, a_scalar ? 0 : i, spec.a_signed) - spec.a_zero_point) * spec.a_scale;
    const int64_t at = b_scalar ? 0 : i;
    const float vb = spec.b_table.empty()
                         ? static_cast<float>(Code(b, at, spec.b_signed) - spec.b_zero_point) * spec.b_scale
                         : spec.b_table[b[at]];
    const float v = spec.kind == BinaryKind::kAdd ? va + vb : va * vb;
    Store(v, spec.quantizer.scale, spec.quantizer.zero_point, spec.quantizer, y, i);
  }
}

void Lookup(const uint8_t* table, const uint8_t* x, uint8_t* y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] = table[x[i]];
}

// Where a row of taps lies, the rows of all planes counted through.
int64_t RowOffset(const Taps& taps, int64_t row) {
  return row / taps.rows * taps.plane_stride + row % taps.rows * taps.row_stride;
}

void MaxTaps(const Taps& taps, bool is_signed, uint8_t* y) {
  for (int64_t c = 0; c < taps.channels; ++c) {
    int32_t largest = is_signed ? -128 : 0;  // also the value of a window without any tap inside the image
    for (int64_t row = 0; row < taps.planes * taps.rows; ++row) {
      for (int64_t column = 0; column < taps.columns; ++column) {
        const int64_t tap = RowOffset(taps, row) + column * taps.column_stride;
        largest = std::max(largest, Code(taps.origin + tap, c, is_signed));
      }
    }
    y[c] = static_cast<uint8_t>(largest);
  }
}

void AverageTaps(const AverageSpec& spec, const Taps& taps, int64_t divisor, void* y) {
  for (int64_t c = 0; c < taps.channels; ++c) {
    float sum = 0;
    for (int64_t column = 0; column < taps.columns; ++column) {
      float column_sum = 0;
      for (int64_t row = 0; row < taps.planes * taps.rows; ++row) {
        const int64_t tap = RowOffset(taps, row) + column * taps.column_stride;
        const int32_t code = Code(taps.origin + tap, c, spec.x_signed);
        column_sum += static_cast<float>(code - spec.x_zero_point) * spec.x_scale;
      }
      sum += column_sum;
    }
    Store(sum / static_cast<float>(divisor), spec.quantizer.scale, spec.quantizer.zero_point, spec.quantizer,
          y, c);
  }
}

void SumPixels(const uint8_t* x, bool is_signed, int64_t pixels, int64_t pixel_stride, int64_t channels,
               int32_t* sums) {
  std::fill(sums, sums + channels, 0);
  for (int64_t p = 0; p < pixels; ++p) {
    for (int64_t c = 0; c < channels; ++c) sums[c] += Code(x + p * pixel_stride, c, is_signed);
  }
}

void ScaleSums(const GlobalAverageSpec& spec, const int32_t* sums, float multiplier, void* y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float v = static_cast<float>(sums[i]) * multiplier;
    if (spec.quantizer.quantized) {
      static_cast<uint8_t*>(y)[i] = RoundAndClip(v, spec.quantizer.zero_point, spec.quantizer);
    } else {
      static_cast<float*>(y)[i] = v;
    }
  }
}

void QuantizePlanes(const Quantizer& quantizer, const float* x, int64_t plane_stride, int64_t channels,
                    int64_t pixels, uint8_t* y, int64_t y_stride) {
  for (int64_t p = 0; p < pixels; ++p) {
    for (int64_t c = 0; c < channels; ++c) {
      y[p * y_stride + c] =
          RoundAndClip(x[c * plane_stride + p] / quantizer.scale, quantizer.zero_point, quantizer);
    }
  }
}

void DequantizePlanes(bool x_signed, int32_t x_zero_point, float x_scale, const uint8_t* x, int64_t x_stride,
                      int64_t channels, int64_t pixels, float* y, int64_t plane_stride) {
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t p = 0; p < pixels; ++p) {
      y[c * plane_stride + p] =
          static_cast<float>(Code(x + p * x_stride, c, x_signed) - x_zero_point) * x_scale;
    }
  }
}

uint8_t CountThresholds(const ThresholdSpec& spec, int64_t channel, float x) {
  const auto c = static_cast<size_t>(channel);
  const float directed = spec.dir[c] * x;
  int32_t code = spec.base[c];
  for (int64_t k = 0; k < spec.count; ++k) {
    code += directed >= spec.thresholds[c * static_cast<size_t>(spec.count) + static_cast<size_t>(k)];
  }
  return static_cast<uint8_t>(code);
}

void ThresholdPlanes(const ThresholdSpec& spec, int64_t first_channel, const float* x, int64_t plane_stride,
                     int64_t channels, int64_t pixels, uint8_t* y, int64_t y_stride) {
  for (int64_t p = 0; p < pixels; ++p) {
    for (int64_t c = 0; c < channels; ++c) {
      y[p * y_stride + c] =
          CountThresholds(spec, spec.channels == 1 ? 0 : first_channel + c, x[c * plane_stride + p]);
    }
  }
}

void ThresholdRows(const ThresholdSpec& spec, const float* x, int64_t rows, uint8_t* y) {
  for (int64_t i = 0; i < rows * spec.channels; ++i) y[i] = CountThresholds(spec, i % spec.channels, x[i]);
}

template <class Number>
float Blend(const float* weights, int taps, const Number& number) {
  float sum = weights[0] * number(0);
  for (int k = 1; k < taps; ++k) sum += weights[k] * number(k);
  return sum;
}

void BlendCodes(bool x_signed, int32_t x_zero_point, const uint8_t* const* rows, const float* weights,
                int taps, int64_t count, float* y) {
  for (int64_t i = 0; i < count; ++i) {
    y[i] = Blend(weights, taps,
                 [&](int k) { return static_cast<float>(Code(rows[k], i, x_signed) - x_zero_point); });
  }
}

void BlendRows(const float* const* rows, const float* weights, int taps, int64_t count, float* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = Blend(weights, taps, [&](int k) { return rows[k][i]; });
}

void BlendPixels(const float* x, const int64_t* places, const float* weights, int taps, int64_t pixels,
                 int64_t channels, float* y) {
  for (int64_t p = 0; p < pixels; ++p) {
    for (int64_t c = 0; c < channels; ++c) {
      y[p * channels + c] =
          Blend(weights + p * taps, taps, [&](int k) { return x[places[p * taps + k] + c]; });
    }
  }
}

void ScaleFloats(const Quantizer& quantizer, const float* x, float multiplier, int64_t count, uint8_t* y) {
  for (int64_t i = 0; i < count; ++i) {
    y[i] = RoundAndClip(x[i] * multiplier, quantizer.zero_point, quantizer);
  }
}

constexpr int32_t kHalfWeight = 1 << 21;

uint8_t PixelOf(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> 22, 0, 255)); }

void ResampleRow(const PixelTaps& taps, const uint8_t* x, int64_t channels, int64_t pixels, uint8_t* y) {
  for (int64_t p = 0; p < pixels; ++p) {
    for (int64_t c = 0; c < channels; ++c) {
      int32_t sum = kHalfWeight;
      for (int64_t k = 0; k < taps.count[p]; ++k) {
        sum += taps.weights[p * taps.stride + k] * x[(taps.first[p] + k) * channels + c];
      }
      y[p * channels + c] = PixelOf(sum);
    }
  }
}

void ResampleColumn(const uint8_t* const* rows, const int32_t* weights, int64_t taps, int64_t count,
                    uint8_t* y) {
  for (int64_t i = 0; i < count; ++i) {
    int32_t sum = kHalfWeight;
    for (int64_t k = 0; k < taps; ++k) sum += weights[k] * rows[k][i];
    y[i] = PixelOf(sum);
  }
}

void SumPixelSquares(const uint8_t* x, bool is_signed, int64_t pixels, int64_t pixel_stride, int64_t channels,
                     int64_t* sums, int64_t* squares) {
  std::fill(sums, sums + channels, 0);
  std::fill(squares, squares + channels, 0);
  for (int64_t p = 0; p < pixels; ++p) {
    for (int64_t c = 0; c < channels; ++c) {
      const int64_t code = Code(x + p * pixel_stride, c, is_signed);
      sums[c] += code;
      squares[c] += code * code;
    }
  }
}

void SumSquares(const uint8_t* x, bool is_signed, int64_t count, int64_t* sum, int64_t* square) {
  SumPixelSquares(x, is_signed, count, 1, 1, sum, square);
}

void Normalize(const NormalizationSpec& spec, const uint8_t* x, const float* mean, const float* gain,
               bool uniform, const float* gamma, const float* beta, void* y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t m = uniform ? 0 : i;
    const float centred = static_cast<float>(Code(x, i, spec.x_signed) - spec.x_zero_point) - mean[m];
    const float v = centred * gain[m] * gamma[i] + beta[i];
    Store(v, spec.quantizer.scale, spec.quantizer.zero_point, spec.quantizer, y, i);
  }
}

}  // namespace

const ElementwiseKernels& ElementwiseReference() {
  static constexpr ElementwiseKernels kernels = {
      "reference",    Affine,     CopyRows,        Binary,         Lookup,           MaxTaps,
      AverageTaps,    SumPixels,  ScaleSums,       QuantizePlanes, DequantizePlanes, ThresholdPlanes,
      ThresholdRows,  BlendCodes, BlendRows,       BlendPixels,    ScaleFloats,      ResampleRow,
      ResampleColumn, SumSquares, SumPixelSquares, Normalize};
  return kernels;
}

}  // namespace lowbit
