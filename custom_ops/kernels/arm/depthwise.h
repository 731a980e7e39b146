// The depthwise kernels of ARM.
#pragma once

#include <span>

#include "core/cpu/kernel_table.h"

namespace lowbit {

std::span<const KernelRow> ArmDepthwiseRows();

}  // namespace lowbit
