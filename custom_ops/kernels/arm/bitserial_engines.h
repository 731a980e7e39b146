#pragma once

#include "kernels/common/bitserial_block.h"

namespace lowbit {

// Defined in bitserial_neon.cc. The same kernel, with what it takes on cores of either kind.
extern const BitserialEngine kBitserialInOrder, kBitserialOutOfOrder;

}  // namespace lowbit
