// Integer matrix product with indirection: dense and grouped convolution and Gemm of u8 x s8 codes on x86.
#pragma once

#include <span>

#include "core/cpu/kernel_table.h"

namespace lowbit {

std::span<const KernelRow> IgemmRows();

}  // namespace lowbit
