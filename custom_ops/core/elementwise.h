// Every op that is not a matrix product, as plain data: what is computed. Who computes it on CPUs stands in
// core/cpu/elementwise_kernels.h.
#pragma once

#include <cstdint>
#include <vector>

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
// - They clip after the conversion to int32. The conversion is exact while |v / scale| < 2^22, and v is
//   never NaN.
// - Levels with fma replace v / scale by Markstein's sequence (kernels/common/elementwise_impl.h), which is
//   the correctly rounded quotient unless something overflows or a subnormal number loses bits. Scales within
//   2^-60..2^60 exclude that: a value so small that it would lose bits is far below scale / 2, and rounds to
//   zero either way.
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

// FastIsExact for all channels of one.
bool FastIsExact(const AffineSpec& spec);

enum class BinaryKind : uint8_t { kAdd, kMul };

// v = f32(a - a_zero_point) * a_scale (+ or *) f32(b - b_zero_point) * b_scale; or, where there is a table of
// b's real numbers by byte, plus b_table[b].
struct BinarySpec {
  BinaryKind kind = BinaryKind::kAdd;
  bool a_signed = false, b_signed = false;
  int32_t a_zero_point = 0, b_zero_point = 0;
  float a_scale = 1, b_scale = 1;
  std::vector<float> b_table;  // empty, or 256 numbers; of kAdd alone
  Quantizer quantizer;
  bool fast_is_exact = false;
};

// The largest |v|, or more.
double MostOf(const BinarySpec& spec);

// LowBitAveragePool: v = (sum of columns) / f32(divisor); a column of the window sums f32(x - x_zero_point) *
// x_scale from its first row to its last.
struct AverageSpec {
  bool x_signed = false;
  int32_t x_zero_point = 0;
  float x_scale = 1;
  Quantizer quantizer;
  bool fast_is_exact = false;  // holds for divisors up to kMaxFastDivisor
};
inline constexpr int64_t kMaxFastDivisor = 4096;

// LowBitGlobalAveragePool: v = f32(sum) * multiplier, where the multiplier already holds y_scale; then
// clip(rint(v) + zero_point, lo, hi), or v itself.
struct GlobalAverageSpec {
  bool x_signed = false;
  Quantizer quantizer;  // its scale is ignored
};
// Pixels whose codes a sum of int32 holds: 255 * 2^23 < 2^31.
inline constexpr int64_t kMaxSumPixels = int64_t{1} << 23;

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

}  // namespace lowbit
