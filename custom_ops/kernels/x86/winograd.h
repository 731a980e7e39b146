// Rows of the kernel table: 3x3 convolutions of stride 1 on x86 by Winograd's minimal filtering.
#pragma once

#include <span>

#include "core/cpu/kernel_table.h"

namespace lowbit {

std::span<const KernelRow> WinogradRows();

}  // namespace lowbit
