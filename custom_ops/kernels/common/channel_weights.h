// The weights of one output channel on their way into a packed form of signed bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/conv.h"

namespace lowbit {

struct ChannelWeights {
  std::vector<int16_t> stored;  // [K]: weight value - shift, within int8
  int32_t shift = 0;            // 0 unless the values, codes minus zero point, need 9 bits
  int64_t sum = 0;              // of the weight values
  int64_t magnitude = 0;        // of the absolute weight values

  void Load(const ConvSpec& spec, size_t channel);
};

}  // namespace lowbit
