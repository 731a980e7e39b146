// Instruction-set levels. The level is an argument everywhere, so that every path is tested on one machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lowbit {

// Those of one architecture are ordered: a level includes every level before it, with one exception that
// selection knows (a CPU with AVX-512 VNNI but without AVX-VNNI runs an avxvnni row only if its flags say
// so). kScalar belongs to every architecture.
//
//   x86   kAvx512Popcnt is what Ice Lake and Zen 4 brought beside VNNI: VPOPCNTDQ, BITALG and VBMI (vpermb)
//         kAmx is AMX-INT8 beside all of that (Sapphire Rapids), where the operating system lets this process
//         use the tile registers
//   ARM   kNeon is the base of AArch64 (ARMv8.0: Cortex-A53, A72), kDotprod has SDOT (Cortex-A55, A76), kI8mm
//         SMMLA (Neoverse V1, Cortex-A510)
enum class Isa : uint8_t {
  kScalar,
  kSse41,
  kAvx2,
  kAvxVnni,
  kAvx512Vnni,
  kAvx512Popcnt,
  kAmx,
  kNeon,
  kDotprod,
  kI8mm,
};

const char* IsaName(Isa isa);
// Knows the levels of the architecture this is built for; the others' names are unknown.
std::optional<Isa> IsaFromName(std::string_view name);
// Their names, as a list for messages.
std::string IsaNames();

// Whether a CPU or a cap of level `isa` allows what needs `needed`.
bool Includes(Isa isa, Isa needed);

// What this machine can run, detected once (x86: CPUID and XCR0; ARM: the operating system's list); not
// capped.
bool MachineHas(Isa isa);
// Includes, and this machine has it. (Levels of one machine may have gaps: AVX-VNNI below AVX-512, everything below an emulated AMX.)
bool Runs(Isa cap, Isa needed);
std::vector<Isa> MachineIsaLevels();

// Linux gives a process the 8 KB of tile registers only when it asks (arch_prctl), once for all of its threads,
// and not where it cannot: kernels before 5.16, filters of system calls, sandboxes that have a kernel of their
// own, a thread whose alternate signal stack is too small for them. `arch_prctl` is the system call, 0 for
// success.
bool GetsTileRegisters(long (*arch_prctl)(int code, unsigned long argument));

// The CPU's own name with family, model and stepping (a virtual machine's name alone says little); on ARM the
// numbers of every kind of core. One line of printable ASCII. Measurements are valid for CPUs of equal text.
std::string CpuModel();

// The best level of this machine, capped by the environment variable LOWBIT_ISA (read once). An unknown name
// in LOWBIT_ISA is an error that lists the known ones.
Isa DefaultIsa();

}  // namespace lowbit
