// x86 instruction-set levels. The level is an argument everywhere, so that every path is tested on one
// machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lowbit {

// Ordered: a level includes every level before it, with one exception that selection knows (a CPU with
// AVX-512 VNNI but without AVX-VNNI runs an avxvnni row only if its flags say so).
// kAvx512Popcnt is what Ice Lake and Zen 4 brought beside VNNI: VPOPCNTDQ, BITALG and VBMI (vpermb).
enum class Isa : uint8_t { kScalar, kSse41, kAvx2, kAvxVnni, kAvx512Vnni, kAvx512Popcnt };

const char* IsaName(Isa isa);
std::optional<Isa> IsaFromName(std::string_view name);

// What this machine can run, detected once (CPUID and XCR0); not capped.
bool MachineHas(Isa isa);
std::vector<Isa> MachineIsaLevels();

// The CPU's own name with family, model and stepping (a virtual machine's name alone says little), as one
// line of printable ASCII. Measurements are valid for CPUs of equal text.
std::string CpuModel();

// The best level of this machine, capped by the environment variable LOWBIT_ISA (read once). An unknown name
// in LOWBIT_ISA is an error that lists the known ones.
Isa DefaultIsa();

}  // namespace lowbit
