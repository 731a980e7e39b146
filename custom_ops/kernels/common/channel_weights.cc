#include "kernels/common/channel_weights.h"

#include <algorithm>
#include <cstdlib>

namespace lowbit {

void ChannelWeights::Load(const ConvSpec& spec, size_t channel) {
  const size_t k = static_cast<size_t>(spec.geometry.K());
  const uint8_t* codes = spec.weights.data() + channel * k;
  const int16_t flip =
      spec.w.encoding == Encoding::kSigned ? 0x80 : 0;  // (code ^ flip) - flip extends the sign
  const bool bipolar = spec.w.encoding == Encoding::kBipolar;
  const int16_t factor = bipolar ? 2 : 1;
  const int16_t minus = bipolar ? int16_t{1} : static_cast<int16_t>(flip + spec.w_zero_point[channel]);
  stored.resize(k);
  int16_t lo = 0, hi = 0;
  int64_t total = 0, absolute = 0;
  constexpr size_t kBlock = size_t{1} << 20;  // sums of 2^20 values within 255 stay inside int32
  for (size_t first = 0; first < k; first += kBlock) {
    const size_t end = std::min(k, first + kBlock);
    int32_t block_total = 0, block_absolute = 0;
    for (size_t i = first; i < end; ++i) {
      const int16_t value = static_cast<int16_t>((codes[i] ^ flip) * factor - minus);
      stored[i] = value;
      lo = std::min(lo, value);
      hi = std::max(hi, value);
      block_total += value;
      block_absolute += std::abs(value);
    }
    total += block_total;
    absolute += block_absolute;
  }
  sum = total;
  magnitude = absolute;
  shift = hi > 127 ? hi - 127 : lo < -128 ? lo + 128 : 0;
  if (shift != 0) {
    for (int16_t& value : stored) value = static_cast<int16_t>(value - shift);
  }
}

}  // namespace lowbit
