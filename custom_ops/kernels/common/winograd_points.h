// One-dimensional steps of the Winograd schemes (winograd_scheme.h), over the vectors of an instruction set: Ring
// has Plus, Minus, PlusTimes<n>(a, b) = a + n b, MinusTimes<n>(a, b) = a - n b, and Times<n>(a), n a power of two,
// all modulo 2^k.
//
// What the outputs need that an Output recovers: kScale = scale^2 = odd * 2^kShift, kOdd the inverse of odd modulo
// 2^32.
#pragma once

#include <cstdint>

#include "kernels/common/inline.h"

namespace lowbit {
namespace {

// F(4x4, 3x3). The usual points 0, infinity, 1, -1, 2, -2, whose transforms grow the operands least: 68 times a
// byte, 49 times a weight, inside 16 bits. G holds powers of two, A the rest: scale = 24, so 576 y = 9 * 64 y is
// found modulo 2^32, and y modulo 2^26.
//
// With e0 = d2 - d0 and so on to e3 = d5 - d3 the values at the points are
//
//   0        4 d0 - 5 d2 + d4              e2 - 4 e0
//   infinity 4 d1 - 5 d3 + d5              e3 - 4 e1
//   +-1      (d4 - 4 d2) +- (d3 - 4 d1)    (e2 - 3 d2) +- (e1 - 3 d1)
//   +-2      (d4 - d2) +- 2 (d3 - d1)      e2 +- 2 e1
template <class Ring>
struct PointsOfFour {
  static constexpr int kTile = 4, kOne = 2, kOneFactor = -4, kScale = 576, kShift = 6;
  static constexpr uint32_t kOdd = 954437177;
  static_assert(9 * kOdd == 1);
  static constexpr int8_t kG[6][3] = {{1, 0, 0}, {0, 0, 1}, {1, 1, 1}, {1, -1, 1}, {1, 2, 4}, {1, -2, 4}};

  template <class D, class V>
  static inline LOWBIT_ALWAYS_INLINE void Inputs(const D (&d)[6], V (&r)[6]) {
    const V e0 = Ring::Minus(d[2], d[0]), e1 = Ring::Minus(d[3], d[1]);
    const V e2 = Ring::Minus(d[4], d[2]), e3 = Ring::Minus(d[5], d[3]);
    const V even = Ring::template MinusTimes<3>(e2, d[2]), odd = Ring::template MinusTimes<3>(e1, d[1]);
    r[0] = Ring::template MinusTimes<4>(e2, e0);
    r[1] = Ring::template MinusTimes<4>(e3, e1);
    r[2] = Ring::Plus(even, odd);
    r[3] = Ring::Minus(even, odd);
    r[4] = Ring::template PlusTimes<2>(e2, e1);
    r[5] = Ring::template MinusTimes<2>(e2, e1);
  }

  template <class V>
  static inline LOWBIT_ALWAYS_INLINE void Weights(const V (&w)[3], V (&r)[6]) {
    const V s = Ring::Plus(w[0], w[2]), m = Ring::template Times<2>(w[1]);
    const V e = Ring::Plus(w[0], Ring::template Times<4>(w[2]));
    r[0] = w[0];
    r[1] = w[2];
    r[2] = Ring::Plus(s, w[1]);
    r[3] = Ring::Minus(s, w[1]);
    r[4] = Ring::Plus(e, m);
    r[5] = Ring::Minus(e, m);
  }

  // 6 t0, 24 t1, -4 t2, -4 t3, t4 and t5 times the powers of the points.
  template <class V>
  static inline LOWBIT_ALWAYS_INLINE void Outputs(const V (&t)[6], V (&y)[4]) {
    const V s1 = Ring::Plus(t[2], t[3]), d1 = Ring::Minus(t[3], t[2]);
    const V s2 = Ring::Plus(t[4], t[5]), d2 = Ring::Minus(t[4], t[5]);
    y[0] = Ring::template MinusTimes<4>(Ring::template PlusTimes<6>(s2, t[0]), s1);
    y[1] = Ring::template Times<2>(Ring::template PlusTimes<2>(d2, d1));
    y[2] = Ring::template Times<4>(Ring::Minus(s2, s1));
    y[3] = Ring::template Times<4>(Ring::template PlusTimes<6>(Ring::template PlusTimes<2>(d1, d2), t[1]));
  }
};

// F(2x2, 3x3). The points 0, infinity, 1, -1, of G the numerators; scale = 2, and of 4 y modulo 2^32 y is left
// modulo 2^30. The transform takes an input to at most twice its range or four times its largest, a weight to 9
// times its largest.
template <class Ring>
struct PointsOfTwo {
  static constexpr int kTile = 2, kOne = 2, kOneFactor = 1, kScale = 4, kShift = 2;
  static constexpr uint32_t kOdd = 1;
  static constexpr int8_t kG[4][3] = {{1, 0, 0}, {0, 0, 1}, {1, 1, 1}, {1, -1, 1}};

  template <class V>
  static inline LOWBIT_ALWAYS_INLINE void Inputs(const V (&d)[4], V (&r)[4]) {
    r[0] = Ring::Minus(d[0], d[2]);
    r[1] = Ring::Minus(d[1], d[3]);
    r[2] = Ring::Plus(d[1], d[2]);
    r[3] = Ring::Minus(d[2], d[1]);
  }

  template <class V>
  static inline LOWBIT_ALWAYS_INLINE void Weights(const V (&w)[3], V (&r)[4]) {
    const V s = Ring::Plus(w[0], w[2]);
    r[0] = w[0];
    r[1] = w[2];
    r[2] = Ring::Plus(s, w[1]);
    r[3] = Ring::Minus(s, w[1]);
  }

  template <class V>
  static inline LOWBIT_ALWAYS_INLINE void Outputs(const V (&t)[4], V (&y)[2]) {
    y[0] = Ring::template PlusTimes<2>(Ring::Plus(t[2], t[3]), t[0]);
    y[1] = Ring::template MinusTimes<2>(Ring::Minus(t[2], t[3]), t[1]);
  }
};

}  // namespace
}  // namespace lowbit
