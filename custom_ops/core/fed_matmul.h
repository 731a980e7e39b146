// The product of two fed tensors of codes (LowBitMatMul) as plain data. The operator resolves shapes,
// permutations and broadcasting into strides; a kernel sees batches of matrices.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "core/elementwise.h"

namespace lowbit {

// acc = sum (a - a_zero_point) * (b - b_zero_point), exact; y = clip(rint(f32(acc) * multiplier) + zero
// point, lo, hi), or f32(acc) * multiplier where the quantizer is not quantized.
struct FedMatmulSpec {
  bool a_signed = false, b_signed = false;
  int32_t a_zero_point = 0, b_zero_point = 0;
  float multiplier = 1;  // f32(f32(a_scale * b_scale) / y_scale), or f32(a_scale * b_scale)
  Quantizer quantizer;   // its scale is in the multiplier
};

// Sums of up to this many products stay inside int32 whatever the codes are.
inline int64_t MaxProducts(const FedMatmulSpec& spec) {
  const auto largest = [](bool is_signed, int32_t zero_point) {
    const int32_t lo = is_signed ? -128 : 0, hi = lo + 255;
    return int64_t{std::max(hi - zero_point, zero_point - lo)};
  };
  return std::numeric_limits<int32_t>::max() /
         (largest(spec.a_signed, spec.a_zero_point) * largest(spec.b_signed, spec.b_zero_point));
}

// One product [m, k] x [k, n] per batch. Strides and offsets count elements, of codes bytes; y is contiguous.
struct FedMatmulShape {
  int64_t m = 0, n = 0, k = 0;
  int64_t a_row = 0, a_k = 0, b_k = 0, b_column = 0;
  std::vector<std::pair<int64_t, int64_t>> batches;  // where the matrices begin in a and in b
  int64_t a_bytes = 0, b_bytes = 0;                  // of the whole tensors of codes
};

}  // namespace lowbit
