#include "core/elementwise.h"

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

}  // namespace lowbit
