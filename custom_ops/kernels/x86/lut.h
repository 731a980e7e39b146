// Convolution and Gemm with 1- and 2-bit weights by look-ups in tables of activation sums.
#pragma once

#include <span>

#include "core/cpu/kernel_table.h"

namespace lowbit {

std::span<const KernelRow> LutRows();

}  // namespace lowbit
