// Every kernel, gathered; a minimal build leaves families out (core/selection.h).
#include <algorithm>
#include <iterator>

#include "core/cpu/elementwise_kernels.h"
#include "core/cpu/fed_matmul_kernel.h"
#include "core/cpu/kernel_table.h"
#include "core/selection.h"
#include "kernels/reference/conv_reference.h"
#if LOWBIT_ARM
#include "kernels/arm/bitserial.h"
#include "kernels/arm/depthwise.h"
#include "kernels/arm/elementwise.h"
#include "kernels/arm/gemm.h"
#include "kernels/arm/winograd.h"
#endif
#if LOWBIT_X86
#include "kernels/x86/bitserial.h"
#include "kernels/x86/depthwise.h"
#include "kernels/x86/elementwise.h"
#include "kernels/x86/fed_matmul.h"
#include "kernels/x86/igemm.h"
#include "kernels/x86/lut.h"
#include "kernels/x86/winograd.h"
#endif

namespace lowbit {
namespace {

std::vector<KernelRow> BuildTable() {
  std::vector<KernelRow> rows;
  const auto add = [&](std::span<const KernelRow> family) {
    // A row that a minimal build leaves out has no name.
    std::copy_if(family.begin(), family.end(), std::back_inserter(rows),
                 [](const KernelRow& row) { return row.name != nullptr; });
  };
  add(ReferenceRows());
#if LOWBIT_X86
  if constexpr (HasKernels("x86/depthwise")) add(DepthwiseRows());
  if constexpr (HasKernels("x86/igemm")) add(IgemmRows());
  if constexpr (HasKernels("x86/winograd")) add(WinogradRows());
  if constexpr (HasKernels("x86/bitserial")) add(BitserialRows());
  if constexpr (HasKernels("x86/lut")) add(LutRows());
#endif
#if LOWBIT_ARM
  if constexpr (HasKernels("arm/depthwise")) add(ArmDepthwiseRows());
  if constexpr (HasKernels("arm/gemm")) add(ArmGemmRows());
  if constexpr (HasKernels("arm/winograd")) add(ArmWinogradRows());
  if constexpr (HasKernels("arm/bitserial")) add(ArmBitserialRows());
#endif
  return rows;
}

}  // namespace

std::span<const KernelRow> ConvKernelTable() {
  static const std::vector<KernelRow> table = BuildTable();
  return table;
}

std::span<const KernelInfo> KernelsElsewhere() {
#if LOWBIT_ARM
  return {};
#else
  static constexpr KernelInfo kArm[] = {
#define LOWBIT_ARM_GEMM(scheme, name, algorithm, isa, x_bits, w_bits, note) \
  {name, "conv", algorithm, isa, x_bits, w_bits, note},
#define LOWBIT_ARM_WINOGRAD LOWBIT_ARM_GEMM
#define LOWBIT_ARM_BITSERIAL(name, algorithm, isa, x_bits, w_bits, note) \
  {name, "conv", algorithm, isa, x_bits, w_bits, note},
#define LOWBIT_ARM_DEPTHWISE LOWBIT_ARM_GEMM
#include "kernels/arm/rows.inc"
  };
  return kArm;
#endif
}

const ElementwiseKernels& ElementwiseFor([[maybe_unused]] Isa isa) {
#if LOWBIT_X86
  if (Runs(isa, Isa::kAvx512Vnni)) return ElementwiseAvx512();
  if (Runs(isa, Isa::kAvx2)) return ElementwiseAvx2();
  if (Runs(isa, Isa::kSse41)) return ElementwiseSse41();
#endif
#if LOWBIT_ARM
  if (Runs(isa, Isa::kNeon)) return ElementwiseNeon();
#endif
  return ElementwiseReference();
}

std::unique_ptr<FedMatmulKernel> FedMatmulFor(const FedMatmulSpec& spec, [[maybe_unused]] Isa isa) {
#if LOWBIT_X86
  if (Runs(isa, Isa::kSse41)) return FedMatmulX86(spec, isa);
#endif
  return FedMatmulReference(spec);
}

}  // namespace lowbit
