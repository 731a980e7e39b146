// Bit-serial convolution and Gemm on ARM.
#pragma once

#include <span>

#include "core/cpu/kernel_table.h"

namespace lowbit {

std::span<const KernelRow> ArmBitserialRows();

}  // namespace lowbit
