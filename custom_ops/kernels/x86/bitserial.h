// Bit-serial convolution and Gemm of few-bit codes: bit planes, logic and population counts.
#pragma once

#include <span>

#include "core/cpu/kernel_table.h"

namespace lowbit {

std::span<const KernelRow> BitserialRows();

}  // namespace lowbit
