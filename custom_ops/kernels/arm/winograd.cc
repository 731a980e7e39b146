#include "kernels/arm/winograd.h"

#include "core/selection.h"
#include "kernels/arm/winograd_schemes.h"
#include "kernels/common/winograd.h"

namespace lowbit {

std::span<const KernelRow> ArmWinogradRows() {
  static const KernelRow kRows[] = {
#define LOWBIT_ARM_WINOGRAD(scheme, name, algorithm, isa, x_bits, w_bits, note) \
  HasKernels(name) ? WinogradRow<scheme>({name, "conv", algorithm, isa, x_bits, w_bits, note}) : KernelRow{},
#include "kernels/arm/rows.inc"
  };
  return kRows;
}

}  // namespace lowbit
