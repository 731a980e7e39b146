// Every op that is not a matrix product, as plain data: what is computed (specs) and by whom (a table of
// kernels per instruction-set level). The operators (core/operators) decode and validate nodes into specs and
// cut tensors into rows; a kernel works on rows of contiguous codes, channels last, and knows neither shapes
// nor ONNX.
#pragma once

#include <cstdint>
#include <vector>

#include "core/isa.h"

namespace lowbit {

// The last step of every op here, in float32, each operation rounded once:
//   q = clip(rint(v / scale) + zero_point, lo, hi), NaN counts as lo; or v itself (`quantized` false).
struct Quantizer {
  bool quantized = true;
  float scale = 1;
  int32_t zero_point = 0, lo = 0, hi = 255;
  bool is_signed = false;  // codes are stored as int8
};

// True when the fast kernels compute `quantizer` exactly for every |v| <= max_abs, and every value `x_scale`
// scales. They differ from the definition in two ways, which this predicate makes harmless:
// - They clip after the conversion to int32. The conversion is exact while |v / scale| < 2^22, and v is never
// NaN.
// - Levels with fma replace v / scale by Markstein's sequence (kernels/common/elementwise_impl.h), which is
// the correctly
//   rounded quotient unless something overflows or a subnormal number loses bits. Scales within 2^-60..2^60
//   exclude that: a value so small that it would lose bits is far below scale / 2, and rounds to zero either
//   way.
bool FastIsExact(const Quantizer& quantizer, double max_abs, double x_scale);

// v = f32(x - x_zero_point[c]) * x_scale[c], with has_affine v = f32(v * scale[c]) + shift[c]; then the
// quantizer with scale y_scale[c] and zero point y_zero_point[c]. Channels are the innermost dimension. This
// is LowBitAffine, LowBitRequantize, LowBitDequantize and one input of LowBitConcat.
struct AffineSpec {
  bool x_signed = false;
  int64_t channels = 1;  // length of the arrays below; 1: the same numbers for every element
  std::vector<int32_t> x_zero_point;
  std::vector<float> x_scale;
  bool has_affine = false;
  std::vector<float> scale, shift;
  std::vector<float> y_scale;
  std::vector<int32_t> y_zero_point;
  Quantizer quantizer;  // its scale and zero point are ignored

  // Filled by PrepareAffine.
  bool grid_per_channel = false;  // x_zero_point, x_scale, y_scale or y_zero_point differ between channels
  int64_t period = 0;             // a multiple of channels: the arrays' length after repetition
  std::vector<float> y_inverse;   // f32(1 / y_scale)
  bool fast_is_exact = false;

  // Filled by FitLine: y = clip(rint(gain[c] * x + offset[c]) + y_zero_point[0], lo, hi) gives the same
  // codes.
  bool has_line = false;
  std::vector<float> line_gain, line_offset;
};

// Repeats the arrays until they are long enough that a vector loop seldom meets their end (a 3-channel image
// would otherwise work in groups of 3), pads them so that a vector load at any channel stays inside, and
// decides fast_is_exact.
void PrepareAffine(AffineSpec& spec);

enum class BinaryKind : uint8_t { kAdd, kMul };

// v = f32(a - a_zero_point) * a_scale (+ or *) f32(b - b_zero_point) * b_scale.
struct BinarySpec {
  BinaryKind kind = BinaryKind::kAdd;
  bool a_signed = false, b_signed = false;
  int32_t a_zero_point = 0, b_zero_point = 0;
  float a_scale = 1, b_scale = 1;
  Quantizer quantizer;
  bool fast_is_exact = false;
};

// LowBitAveragePool: v = (sum of columns) / f32(divisor), columns as in Taps.
struct AverageSpec {
  bool x_signed = false;
  int32_t x_zero_point = 0;
  float x_scale = 1;
  Quantizer quantizer;
  bool fast_is_exact = false;  // holds for divisors up to kMaxFastDivisor
};
inline constexpr int64_t kMaxFastDivisor = 4096;

// The part of a pooling window that lies inside the image: `planes` x `rows` x `columns` taps of `channels`
// codes each.
struct Taps {
  const uint8_t* origin = nullptr;
  int64_t planes = 1, rows = 0, columns = 0;
  int64_t plane_stride = 0, row_stride = 0, column_stride = 0;  // bytes
  int64_t channels = 0;
};

// LowBitGlobalAveragePool: v = f32(sum) * multiplier, where the multiplier already holds y_scale; then
// clip(rint(v) + zero_point, lo, hi), or v itself.
struct GlobalAverageSpec {
  bool x_signed = false;
  Quantizer quantizer;  // its scale is ignored
};

// LowBitNormalization: v = f32(f32(f32(f32(x - x_zero_point) - mean) * gain) * gamma) + beta.
struct NormalizationSpec {
  bool x_signed = false;
  int32_t x_zero_point = 0;
  Quantizer quantizer;
  bool fast_is_exact = false;
};
// Elements to a mean: n * (sum of squares) then fits int64.
inline constexpr int64_t kMaxNormalized = int64_t{1} << 23;

// LowBitThreshold: y = base[c] + #{k : dir[c] * x >= thresholds[c][k]}.
struct ThresholdSpec {
  int64_t count = 0;              // thresholds of a channel
  int64_t channels = 1;           // 1: the same numbers for every element
  bool y_signed = false;          // codes are stored as int8
  std::vector<float> thresholds;  // [channels, count], multiplied by dir: every row ascends
  std::vector<int32_t> base;      // [channels]
  std::vector<float> dir;         // [channels], +1 or -1

  // PrepareThresholds repeats base and dir, pads them, and fills the rest.
  int64_t period = 0;  // a multiple of channels: the arrays' length after repetition
  // Few thresholds are compared one after the other: [count, period + padding].
  std::vector<float> by_rank;
  int64_t row_stride() const { return period + kPadding; }
  // Among many a binary search of `steps` comparisons finds the place: [channels, 2^steps], rows filled up
  // with NaN, which nothing reaches.
  int steps = 0;
  std::vector<float> search;
  std::vector<int32_t> place;              // [period + padding]: where the channel's row begins in `search`
  static constexpr int64_t kPadding = 64;  // lanes that a vector load may read past the period
  // Measured on Zen 5: the search, whose steps gather, takes as long as 95 comparisons at 512 bits, 65 at 256
  // and 50 at 128.
  static constexpr int64_t kMaxLinear = 63;
};

// Lays the numbers of `spec` out for the kernels.
void PrepareThresholds(ThresholdSpec& spec);

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

inline constexpr int64_t kBlendPadding = 16;                // the lanes of the widest vectors
inline constexpr int64_t kMaxSumPixels = int64_t{1} << 23;  // 255 * 2^23 < 2^31

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
