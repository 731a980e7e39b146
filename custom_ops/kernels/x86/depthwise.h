// Depthwise convolution on x86: one filter per channel.
#pragma once

#include <span>

#include "core/cpu/kernel_table.h"

namespace lowbit {

std::span<const KernelRow> DepthwiseRows();

}  // namespace lowbit
