#include "core/elementwise.h"

#include <algorithm>
#include <cmath>

namespace lowbit {
namespace {

constexpr double kMinScale = 0x1p-60, kMaxScale = 0x1p60;
constexpr double kMaxQuotient = 0x1p22;

bool InRange(double scale) { return scale >= kMinScale && scale <= kMaxScale; }

}  // namespace

bool FastIsExact(const Quantizer& quantizer, double max_abs, double x_scale) {
  if (!InRange(x_scale)) return false;
  if (!quantizer.quantized) return true;
  return InRange(quantizer.scale) && max_abs < kMaxQuotient * static_cast<double>(quantizer.scale);
}

double MostOf(const BinarySpec& spec) {
  // |code - zero_point| <= 255; 256 covers the roundings.
  const double a = 256.0 * static_cast<double>(spec.a_scale);
  double b = 256.0 * static_cast<double>(spec.b_scale);
  if (!spec.b_table.empty()) b = 0;
  for (const float value : spec.b_table) b = std::max(b, std::fabs(static_cast<double>(value)) * 1.01);
  return spec.kind == BinaryKind::kAdd ? a + b : a * b;
}

bool FastIsExact(const AffineSpec& spec) {
  for (size_t c = 0; c < static_cast<size_t>(spec.channels); ++c) {
    const auto x_scale = static_cast<double>(spec.x_scale[c]);
    double max_abs = 256.0 * x_scale;
    if (spec.has_affine) {
      max_abs = max_abs * std::fabs(static_cast<double>(spec.scale[c])) +
                std::fabs(static_cast<double>(spec.shift[c]));
    }
    Quantizer quantizer = spec.quantizer;
    quantizer.scale = spec.y_scale[c];
    if (!FastIsExact(quantizer, max_abs, x_scale)) return false;
  }
  return true;
}

}  // namespace lowbit
