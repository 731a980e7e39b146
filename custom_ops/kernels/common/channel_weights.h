// The weights of one output channel on their way into a packed form of signed bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/conv.h"

namespace lowbit {

// What is taken off the values of a channel that are no signed bytes, codes less a zero point that need 9
// bits; else 0.
int32_t ByteShift(const ChannelValues& values);

// to[K]: weight values less `shift`, which are signed bytes.
void LoadChannel(const ConvSpec& spec, size_t channel, int32_t shift, int8_t* to);

}  // namespace lowbit
