// Float tensors as float16 numbers, which kernels of a region may exchange where float_precision is float16: of an image
// [N, C, H, W] they lie as [N, H, W, C].
#pragma once

#include <cstddef>
#include <cstdint>

namespace lowbit {

// Which of the tensors that a step is fed, and whether what it makes, lie so.
struct HalfTensors {
  uint32_t fed = 0;  // a bit each
  bool y = false;

  bool Has(size_t i) const { return i < 32 && (fed >> i & 1) != 0; }
  void Add(size_t i) { fed |= i < 32 ? uint32_t{1} << i : 0; }
  bool operator==(const HalfTensors&) const = default;
};

}  // namespace lowbit
