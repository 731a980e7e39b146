#pragma once

#include "kernels/common/bitserial_block.h"

namespace lowbit {

// Defined in bitserial_<isa>.cc.
extern const BitserialEngine kBitserialScalar, kBitserialSse41, kBitserialAvx2, kBitserialAvx512Vnni,
    kBitserialAvx512Popcnt;
// lut_joint_avx512popcnt.cc
extern const BitserialEngine kLutJointAvx512Popcnt;

// Packed digits stay in L2.
inline constexpr size_t kBitserialBlockBytes = 128 * 1024;
// What a call takes beside packing and tiles; Zen 5. A tile of one pixel takes as long as one of two, waiting
// for its weights (least_rows).
inline constexpr double kBitserialCallCycles = 430;

}  // namespace lowbit
