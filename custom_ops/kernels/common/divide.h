// Division by a constant, over the vector traits of simd_<isa>.h.
#pragma once

#include "kernels/common/inline.h"

namespace lowbit {
namespace {

// x / s, correctly rounded. Levels with fma use Markstein's sequence on y = RN(1/s):
//     q0 = RN(x*y);  r = RN(x - q0*s);  q = RN(q0 + r*y)
// Why that is RN(x/s), for x and s in [1, 2) (powers of two change nothing without underflow or overflow,
// which whoever calls excludes where it could matter: FastIsExact, EpilogueTables). Let u = 2^-24 and
//     y = 1/s + d, |d| <= u/2,  q0 = x/s + e.
// Then r = -e*s when it is representable, and q is x/s - e*s*d rounded, so q is wrong only if a midpoint of
// two floats lies within |e*s*d| of x/s. Such a midpoint m differs from x/s by a multiple, not 0, of
// ulp(m)*ulp(s)/s.
//   x >= s: ulp(q) = 2u, |e| <= x|d| + u < 2u, and r is a multiple of 4u^2 below 4u, hence exact. Near a
//           midpoint |e| is an odd multiple of u up to O(u^2), so |e| = u, and
//           |e*s*d| <= s*u^2/2 < 2u^2/s, the least distance, as s^2 < 4.
//   x < s:  ulp(q) = u, |e| <= x|d| + u/2 < 1.5u. Near a midpoint |e| is an odd multiple of u/2 up to
//           O(u^2): 1.5u needs |d| = u/2 and x >= 2 - 6u, so s is 2 - 4u or 2 - 2u, where |e| = u, no odd
//           multiple. So |e| = u/2, r is exact, and |e*s*d| <= s*u^2/4 < u^2/s, the least distance. Away
//           from midpoints neither e = 1.5u nor the rounding of r (|r| <= 3u, at most 2u^2 off) moves q
//           across one.
template <class S>
LOWBIT_ALWAYS_INLINE inline typename S::F Divide(typename S::F x, typename S::F s,
                                                 [[maybe_unused]] typename S::F inverse) {
  if constexpr (S::kHasFma) {
    const auto q0 = S::MulF(x, inverse);
    return S::FmaF(S::FnmaF(q0, s, x), inverse, q0);
  } else {
    return S::DivF(x, s);
  }
}

}  // namespace
}  // namespace lowbit
