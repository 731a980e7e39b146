// The rows of the bit-serial kernels.
#include "kernels/x86/bitserial.h"

#include "kernels/common/bitserial.h"
#include "kernels/x86/bitserial_engines.h"
#include "kernels/x86/few_bit_cycles.h"

namespace lowbit {
namespace {

template <const BitserialEngine& kEngine>
std::string Refuse(const ConvSpec& spec) {
  return BitserialRefusal(spec, kEngine);
}

template <const BitserialEngine& kEngine>
double Cost(const ConvSpec& spec, const ConvShape& shape) {
  return FewBitCycles(BitserialCycles(spec, shape, kEngine));
}

template <const BitserialEngine& kEngine>
std::unique_ptr<ConvKernel> Create(const ConvSpec& spec) {
  return MakeBitserialKernel(spec, kEngine);
}

template <const BitserialEngine& kEngine>
KernelRow Row(const char* name, Isa isa, const char* note) {
  return {{name, "conv", "bitserial", isa, kMaxBitPlanes, kMaxBitPlanes, note},
          &Refuse<kEngine>,
          &Cost<kEngine>,
          &Create<kEngine>};
}

}  // namespace

std::span<const KernelRow> BitserialRows() {
  static const char* const kNibbles = "few bits: byte shuffles look up the counts of four products";
  static const KernelRow kRows[] = {
      Row<kBitserialScalar>("bitserial_2x2_scalar", Isa::kScalar,
                            "few bits, in plain C++: popcount of 64-bit words"),
      Row<kBitserialSse41>("bitserial_4x32_sse41", Isa::kSse41, kNibbles),
      Row<kBitserialAvx2>("bitserial_4x64_avx2", Isa::kAvx2, kNibbles),
      Row<kBitserialAvx512Vnni>("bitserial_8x128_avx512vnni", Isa::kAvx512Vnni, kNibbles),
      Row<kBitserialAvx512Popcnt>("bitserial_6x64_avx512popcnt", Isa::kAvx512Popcnt,
                                  "weights and activations of few bits: vpopcntd on bit planes"),
  };
  return kRows;
}

}  // namespace lowbit
