// Float tensors [N, C, H, W] whose numbers lie as [N, H, W, C], which kernels of a region may exchange; as
// float16 where float_precision is that.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lowbit {

// Which of the tensors that a step is fed, and whether what it makes, lie so.
struct ChannelsLast {
  uint32_t fed = 0;  // a bit each
  bool y = false;

  bool Has(size_t i) const { return i < 32 && (fed >> i & 1) != 0; }
  void Add(size_t i) { fed |= i < 32 ? uint32_t{1} << i : 0; }
  bool operator==(const ChannelsLast&) const = default;
};

}  // namespace lowbit
