// The rows of the bit-serial kernels.
#include "kernels/arm/bitserial.h"

#include "core/selection.h"
#include "kernels/arm/bitserial_engines.h"
#include "kernels/arm/pipeline.h"
#include "kernels/common/bitserial.h"

namespace lowbit {
namespace {

const BitserialEngine& Engine() {
  return MachinePipeline() == Pipeline::kInOrder ? kBitserialInOrder : kBitserialOutOfOrder;
}

std::string Refuse(const ConvSpec& spec) { return BitserialRefusal(spec, Engine()); }
double Cost(const ConvSpec& spec, const ConvShape& shape) { return BitserialCycles(spec, shape, Engine()); }
std::unique_ptr<ConvKernel> Create(const ConvSpec& spec) { return MakeBitserialKernel(spec, Engine()); }

}  // namespace

std::span<const KernelRow> ArmBitserialRows() {
  static const KernelRow kRows[] = {
#define LOWBIT_ARM_BITSERIAL(name, algorithm, isa, x_bits, w_bits, note)                         \
  HasKernels(name)                                                                               \
      ? KernelRow{{name, "conv", algorithm, isa, x_bits, w_bits, note}, &Refuse, &Cost, &Create} \
      : KernelRow{},
#include "kernels/arm/rows.inc"
  };
  return kRows;
}

}  // namespace lowbit
