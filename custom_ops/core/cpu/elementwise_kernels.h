// Who computes the ops that are not matrix products on CPUs: a table of kernels per instruction-set level. The
// operators (core/cpu/operators) cut tensors into rows; a kernel works on rows of contiguous codes, channels
// last, and knows neither shapes nor ONNX.
#pragma once

#include <cstdint>

#include "core/cpu/isa.h"
#include "core/elementwise.h"

namespace lowbit {

// Repeats the arrays until they are long enough that a vector loop seldom meets their end (a 3-channel image
// would otherwise work in groups of 3), pads them so that a vector load at any channel stays inside, and
// decides fast_is_exact.
void PrepareAffine(AffineSpec& spec);

// Lays the numbers of `spec` out for the kernels.
void PrepareThresholds(ThresholdSpec& spec);

// The part of a pooling window that lies inside the image: `planes` x `rows` x `columns` taps of `channels`
// codes each.
struct Taps {
  const uint8_t* origin = nullptr;
  int64_t planes = 1, rows = 0, columns = 0;
  int64_t plane_stride = 0, row_stride = 0, column_stride = 0;  // bytes
  int64_t channels = 0;
};

// Pixel p of a row is made of count[p] pixels from first[p] on, with the weights from weights[p * stride] on.
struct PixelTaps {
  const int32_t *first = nullptr, *count = nullptr, *weights = nullptr;
  int64_t stride = 0;
};

// The kernels of one level. Codes are passed as bytes whatever their sign. Every function is exact under the
// conditions of its spec's fast_is_exact; the reference table has no conditions.
struct ElementwiseKernels {
  const char* name;  // suffix of the kernel's name in plans: reference, sse41, ...

  // `rows` rows of `width` elements, each beginning with channel 0; rows of y are written y_stride elements
  // apart.
  void (*affine)(const AffineSpec& spec, const uint8_t* x, void* y, int64_t rows, int64_t width,
                 int64_t y_stride);
  // `rows` rows of `width` bytes, written `y_stride` bytes apart.
  void (*copy_rows)(const uint8_t* x, uint8_t* y, int64_t rows, int64_t width, int64_t y_stride);
  // a_scalar: one code of a serves every element.
  void (*binary)(const BinarySpec& spec, const uint8_t* a, bool a_scalar, const uint8_t* b, bool b_scalar,
                 void* y, int64_t count);
  void (*lookup)(const uint8_t* table, const uint8_t* x, uint8_t* y, int64_t count);
  void (*max_taps)(const Taps& taps, bool is_signed, uint8_t* y);
  void (*average_taps)(const AverageSpec& spec, const Taps& taps, int64_t divisor, void* y);
  // sums[c] = sum over pixels of the code (not minus the zero point); at most kMaxSumPixels pixels.
  void (*sum_pixels)(const uint8_t* x, bool is_signed, int64_t pixels, int64_t pixel_stride, int64_t channels,
                     int32_t* sums);
  // |sums[c] * multiplier| < 2^22 or the reference.
  void (*scale_sums)(const GlobalAverageSpec& spec, const int32_t* sums, float multiplier, void* y,
                     int64_t count);
  // x: `channels` planes of `pixels` floats, plane_stride floats apart. y: `pixels` rows of `channels` codes,
  // y_stride bytes apart. Any float is allowed, NaN and infinity included.
  void (*quantize_planes)(const Quantizer& quantizer, const float* x, int64_t plane_stride, int64_t channels,
                          int64_t pixels, uint8_t* y, int64_t y_stride);
  // The other way round: y = f32(x - x_zero_point) * x_scale.
  void (*dequantize_planes)(bool x_signed, int32_t x_zero_point, float x_scale, const uint8_t* x,
                            int64_t x_stride, int64_t channels, int64_t pixels, float* y,
                            int64_t plane_stride);
  // As quantize_planes; plane i is channel first_channel + i (channel 0 where one channel serves all).
  void (*threshold_planes)(const ThresholdSpec& spec, int64_t first_channel, const float* x,
                           int64_t plane_stride, int64_t channels, int64_t pixels, uint8_t* y,
                           int64_t y_stride);
  // `rows` pixels of spec.channels contiguous floats.
  void (*threshold_rows)(const ThresholdSpec& spec, const float* x, int64_t rows, uint8_t* y);

  // LowBitResize: weighted sums, the first of `taps` (1, 2 or 4) first. Every array of floats has room for
  // kBlendPadding more than are said, which may be read and overwritten.
  // y[i] = sum over k of weights[k] * f32(rows[k][i] - x_zero_point).
  void (*blend_codes)(bool x_signed, int32_t x_zero_point, const uint8_t* const* rows, const float* weights,
                      int taps, int64_t count, float* y);
  // y[i] = sum over k of weights[k] * rows[k][i].
  void (*blend_rows)(const float* const* rows, const float* weights, int taps, int64_t count, float* y);
  // The same for pixels of `channels` floats: tap k of pixel p begins at x + places[p * taps + k].
  void (*blend_pixels)(const float* x, const int64_t* places, const float* weights, int taps, int64_t pixels,
                       int64_t channels, float* y);
  // |x[i] * multiplier| < 2^22 or the reference: clip(rint(x * multiplier) + zero_point, lo, hi).
  void (*scale_floats)(const Quantizer& quantizer, const float* x, float multiplier, int64_t count,
                       uint8_t* y);
  // LowBitImage: weighted sums of pixels, in 22 bits behind the point, rounded half up and clipped to bytes.
  // y[p] of `channels` (1 or 3) bytes is the sum of the pixels that `taps` says.
  void (*resample_row)(const PixelTaps& taps, const uint8_t* x, int64_t channels, int64_t pixels, uint8_t* y);
  // y[i] = sum over k of weights[k] * rows[k][i].
  void (*resample_column)(const uint8_t* const* rows, const int32_t* weights, int64_t taps, int64_t count,
                          uint8_t* y);
  // The sum of codes and of their squares; at most kMaxNormalized of them.
  void (*sum_squares)(const uint8_t* x, bool is_signed, int64_t count, int64_t* sum, int64_t* square);
  // The same down every channel of `pixels` rows.
  void (*sum_pixel_squares)(const uint8_t* x, bool is_signed, int64_t pixels, int64_t pixel_stride,
                            int64_t channels, int64_t* sums, int64_t* squares);
  // mean and gain are one number each where `uniform`, else one per element, as gamma and beta; a vector may
  // be loaded at any element of them.
  void (*normalize)(const NormalizationSpec& spec, const uint8_t* x, const float* mean, const float* gain,
                    bool uniform, const float* gamma, const float* beta, void* y, int64_t count);
};

inline constexpr int64_t kBlendPadding = 16;  // the lanes of the widest vectors

// A chain of six float operations on an 8-bit code, rounded to a code, is a staircase that a single
// multiply-add can climb as well, given the right two numbers. FitLine looks for them, channel by channel,
// and keeps them only if the kernel in `kernels` gives the same code for every one of the 256 inputs of every
// channel: the result is exact by trial, not by analysis. Call it after PrepareAffine, with the table that
// will run the node.
void FitLine(AffineSpec& spec, const ElementwiseKernels& kernels);

const ElementwiseKernels& ElementwiseReference();
// The best table that `isa` includes.
const ElementwiseKernels& ElementwiseFor(Isa isa);

}  // namespace lowbit
