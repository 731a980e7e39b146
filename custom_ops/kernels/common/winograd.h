// Rows of the kernel table for 3x3 convolutions of stride 1 by Winograd's minimal filtering: what the schemes of
// all architectures (winograd_scheme.h) have in common.
#pragma once

#include <memory>
#include <string>

#include "core/cpu/kernel_table.h"
#include "kernels/common/winograd_scheme.h"

namespace lowbit {

std::string WinogradRefusal(const ConvSpec& spec, const WinogradScheme& scheme);
double WinogradCost(const ConvSpec& spec, const ConvShape& shape, const WinogradScheme& scheme);
std::unique_ptr<ConvKernel> MakeWinograd(const ConvSpec& spec, const WinogradScheme& scheme);

template <const WinogradScheme& kScheme>
KernelRow WinogradRow(const KernelInfo& info) {
  return {info, [](const ConvSpec& spec) { return WinogradRefusal(spec, kScheme); },
          [](const ConvSpec& spec, const ConvShape& shape) { return WinogradCost(spec, shape, kScheme); },
          [](const ConvSpec& spec) { return MakeWinograd(spec, kScheme); }};
}

}  // namespace lowbit
