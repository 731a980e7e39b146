// Division by a constant that kernels know as data.
#pragma once

#include <cstdint>

namespace lowbit::cuda {

// Division by a constant through a multiplication, for 0 <= n < 2^31:
//   n / d = (umulhi(n, multiplier) + n) >> shift,  shift = ceil(log2 d),
//   multiplier = 2^32 (2^shift - d) / d + 1
struct FastDivisor {
  uint32_t divisor = 1, multiplier = 1, shift = 0;
};

inline FastDivisor MakeDivisor(int64_t divisor) {
  FastDivisor d;
  d.divisor = static_cast<uint32_t>(divisor);
  while ((int64_t{1} << d.shift) < divisor) ++d.shift;
  d.multiplier = static_cast<uint32_t>((uint64_t{1} << 32) *
                                           ((uint64_t{1} << d.shift) - static_cast<uint64_t>(divisor)) /
                                           static_cast<uint64_t>(divisor) +
                                       1);
  return d;
}

}  // namespace lowbit::cuda
