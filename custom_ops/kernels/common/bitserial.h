// Bit-serial convolution and Gemm of few-bit codes: bit planes, logic and population counts. What an
// architecture's rows of the kernel table are made of.
#pragma once

#include <memory>
#include <string>

#include "core/cpu/kernel_table.h"
#include "kernels/common/bitserial_block.h"

namespace lowbit {

// As in KernelRow.
std::string BitserialRefusal(const ConvSpec& spec, const BitserialEngine& engine);
double BitserialCycles(const ConvSpec& spec, const ConvShape& shape, const BitserialEngine& engine);
std::unique_ptr<ConvKernel> MakeBitserialKernel(const ConvSpec& spec, const BitserialEngine& engine);

}  // namespace lowbit
