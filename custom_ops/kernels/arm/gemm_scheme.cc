#include "kernels/arm/gemm_scheme.h"

#include <algorithm>

namespace lowbit {
namespace {

// Bounds of one product, 0 among them: a sum of fewer products lies inside as well.
struct Bounds {
  int64_t lo = 0, hi = 0;
};

Bounds ProductBounds(const GemmOperands& o, int64_t w) {
  const int64_t a = w * o.x_lo, b = w * o.x_hi;
  return {std::min({a, b, int64_t{0}}), std::max({a, b, int64_t{0}})};
}

size_t RunOfRange(const GemmOperands& o, int64_t lo, int64_t hi, size_t most) {
  const Bounds a = ProductBounds(o, o.w_lo), b = ProductBounds(o, o.w_hi);
  const int64_t least = std::min(a.lo, b.lo), largest = std::max(a.hi, b.hi);
  if (largest > 0) most = std::min(most, static_cast<size_t>(hi / largest));
  if (least < 0) most = std::min(most, static_cast<size_t>(lo / least));
  return most;
}

// A window slides over the products and is kept as long as its worst sums allow; where it has to shrink, it
// was one too long.
size_t RunOfValues(const GemmOperands& o, const int8_t* w, size_t stride, int64_t lo, int64_t hi,
                   size_t most) {
  size_t first = 0;
  Bounds sum;
  for (size_t k = 0; k < o.k; k += stride) {
    const Bounds added = ProductBounds(o, w[k]);
    sum.lo += added.lo;
    sum.hi += added.hi;
    while (sum.lo < lo || sum.hi > hi) {
      most = std::min(most, (k - first) / stride);
      const Bounds dropped = ProductBounds(o, w[first]);
      sum.lo -= dropped.lo;
      sum.hi -= dropped.hi;
      first += stride;
    }
  }
  return most;
}

}  // namespace

size_t LongestSafeRun(const GemmOperands& o, size_t stride, int64_t lo, int64_t hi, size_t most) {
  if (o.weights == nullptr) return RunOfRange(o, lo, hi, most);
  for (size_t c = 0; c < o.channels; ++c) {
    for (size_t r = 0; r < std::min(stride, o.k); ++r) {
      GemmOperands rest = o;
      rest.k = o.k - r;
      most = RunOfValues(rest, o.weights + c * o.k + r, stride, lo, hi, most);
    }
  }
  return most;
}

}  // namespace lowbit
