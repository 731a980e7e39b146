// LowBitMatMul on the register tiles of the igemm kernels.
#pragma once

#include <memory>

#include "core/cpu/fed_matmul_kernel.h"

namespace lowbit {

// `isa` includes SSE4.1.
std::unique_ptr<FedMatmulKernel> FedMatmulX86(const FedMatmulSpec& spec, Isa isa);

}  // namespace lowbit
