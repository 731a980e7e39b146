// The two-dimensional transforms of the Winograd schemes around their one-dimensional steps (winograd_points.h):
// columns first, then rows. How values are loaded and stored is the caller's; Points is
//
//   Points::kTile           outputs, m
//   Points::Weights(w, r)   taps -> values at the points
//   Points::Inputs(d, r)    inputs -> values at the points
//   Points::Outputs(t, y)   values at the points -> outputs
//   Points::kOne            the point 1, whose column of A is constant: kOneFactor, where that is not 1
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/inline.h"

namespace lowbit {
namespace {

// tap(i): the weights at tap i. store(to, value) at the points of the kRows rows from kFirst on in turn, point_pitch
// bytes apart.
template <class Points, int kFirst, int kRows, class Tap, class Store>
inline LOWBIT_ALWAYS_INLINE void TransformTaps(const Tap& tap, uint8_t* to, size_t point_pitch,
                                               const Store& store) {
  using V = decltype(tap(0));
  constexpr int kN = Points::kTile + 2;
  asm("" : "+r"(point_pitch));  // or the compiler keeps the addresses of all points, more than registers hold
  V columns[kN][3];
#pragma GCC unroll 3
  for (int x = 0; x < 3; ++x) {
    V r[kN];
    Points::Weights({tap(x), tap(3 + x), tap(6 + x)}, r);
#pragma GCC unroll 6
    for (int i = 0; i < kN; ++i) columns[i][x] = r[i];
  }
#pragma GCC unroll 6
  for (int i = kFirst; i < kFirst + kRows; ++i) {
    V r[kN];
    Points::Weights(columns[i], r);
#pragma GCC unroll 6
    for (int j = 0; j < kN; ++j, to += point_pitch) store(to, r[j]);
  }
}

// load(i): the channels of pixel i of the window. V: of the values at the points, perhaps wider.
template <class Points, class V, class Load, class Store>
inline LOWBIT_ALWAYS_INLINE void TransformInputs(const Load& load, uint8_t* to, size_t point_pitch,
                                                 const Store& store) {
  using D = decltype(load(0));
  constexpr int kN = Points::kTile + 2;
  V columns[kN][kN];
#pragma GCC unroll 6
  for (int x = 0; x < kN; ++x) {
    D d[kN];
    V r[kN];
#pragma GCC unroll 6
    for (int y = 0; y < kN; ++y) d[y] = load(y * kN + x);
    Points::Inputs(d, r);
#pragma GCC unroll 6
    for (int y = 0; y < kN; ++y) columns[y][x] = r[y];
  }
#pragma GCC unroll 6
  for (int y = 0; y < kN; ++y) {
    V r[kN];
    Points::Inputs(columns[y], r);
#pragma GCC unroll 6
    for (int x = 0; x < kN; ++x, to += point_pitch) store(to, r[x]);
  }
}

// The products of a tile, kVectors vectors each: columns first, then rows. Between the two, `offset` is added
// to the values at the point 1: it reaches every output, times kOneFactor. finish(row, outputs) takes the
// outputs of a row, [vector][pixel].
//
// Loops, because the compiler would not find registers for a whole tile.
template <class Points, int kVectors, class V, class Load, class Finish>
inline LOWBIT_ALWAYS_INLINE void TransformOutputs(const Load& load, const V (&offset)[kVectors],
                                                  const Finish& finish) {
  constexpr int kN = Points::kTile + 2, kT = Points::kTile;
  V rows[kT][kN][kVectors];
#pragma GCC unroll 1
  for (int x = 0; x < kN; ++x) {
    V t[kVectors][kN], y[kVectors][kT];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 6
      for (int i = 0; i < kN; ++i) t[v][i] = load(i * kN + x, v);
    }
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      Points::Outputs(t[v], y[v]);
#pragma GCC unroll 4
      for (int i = 0; i < kT; ++i) rows[i][x][v] = y[v][i];
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
    for (int i = 0; i < kT; ++i) rows[i][Points::kOne][v] += offset[v];
  }
#pragma GCC unroll 1
  for (int i = 0; i < kT; ++i) {
    V t[kVectors][kN], y[kVectors][kT];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 6
      for (int x = 0; x < kN; ++x) t[v][x] = rows[i][x][v];
      Points::Outputs(t[v], y[v]);
    }
    finish(i, y);
  }
}

}  // namespace
}  // namespace lowbit
