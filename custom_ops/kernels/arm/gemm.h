// Rows of the kernel table: dense and grouped convolutions and matrix products on ARM.
#pragma once

#include <span>

#include "core/cpu/kernel_table.h"

namespace lowbit {

std::span<const KernelRow> ArmGemmRows();

}  // namespace lowbit
