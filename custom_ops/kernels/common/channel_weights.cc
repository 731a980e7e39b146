#include "kernels/common/channel_weights.h"

namespace lowbit {

int32_t ByteShift(const ChannelValues& values) {
  return values.hi > 127 ? values.hi - 127 : values.lo < -128 ? values.lo + 128 : 0;
}

void LoadChannel(const ConvSpec& spec, size_t channel, int32_t shift, int8_t* to) {
  const size_t k = static_cast<size_t>(spec.geometry.K());
  const uint8_t* codes = spec.weights.data() + channel * k;
  // Modulo 256, where a code is its byte, signed or not.
  const bool bipolar = spec.w.encoding == Encoding::kBipolar;
  const uint8_t factor = bipolar ? 2 : 1;
  const auto minus = static_cast<uint8_t>((bipolar ? 1 : spec.w_zero_point[channel]) + shift);
  for (size_t i = 0; i < k; ++i) to[i] = static_cast<int8_t>(static_cast<uint8_t>(codes[i] * factor - minus));
}

}  // namespace lowbit
