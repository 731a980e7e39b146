#include "core/isa.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/status.h"

#if LOWBIT_X86
#include <cpuid.h>
#endif

namespace lowbit {
namespace {

constexpr std::array<const char*, 6> kNames = {"scalar",  "sse41",      "avx2",
                                               "avxvnni", "avx512vnni", "avx512popcnt"};

#if LOWBIT_X86

struct CpuidRegisters {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// All zero where the CPU does not know the leaf.
CpuidRegisters Cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuidRegisters r;
  if (__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return {};
  return r;
}

// XCR0 says which register files the operating system saves: bits 1, 2 for xmm and ymm, bits 5..7 for the
// opmasks, the upper halves of zmm0..15 and zmm16..31. Written as bytes because the intrinsic needs -mxsave.
uint64_t Xcr0() {
  uint32_t low = 0, high = 0;
  __asm__ volatile(".byte 0x0f, 0x01, 0xd0" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

constexpr bool Bit(uint32_t word, int bit) { return (word >> bit & 1) != 0; }

std::array<bool, 6> Detect() {
  constexpr uint64_t kYmmState = 0x6, kZmmState = 0xe6;
  const CpuidRegisters l1 = Cpuid(1, 0), l7 = Cpuid(7, 0), l7s1 = Cpuid(7, 1);
  const bool osxsave = Bit(l1.ecx, 27);
  const uint64_t saved = osxsave ? Xcr0() : 0;
  const bool ymm = (saved & kYmmState) == kYmmState, zmm = (saved & kZmmState) == kZmmState;

  const bool sse41 = Bit(l1.ecx, 19) && Bit(l1.ecx, 9);                                    // SSE4.1, SSSE3
  const bool avx2 = sse41 && ymm && Bit(l1.ecx, 28) && Bit(l1.ecx, 12) && Bit(l7.ebx, 5);  // AVX, FMA, AVX2
  const bool avxvnni = avx2 && Bit(l7s1.eax, 4);
  const bool avx512 = avx2 && zmm && Bit(l7.ebx, 16) && Bit(l7.ebx, 17) && Bit(l7.ebx, 30) && Bit(l7.ebx, 31);
  const bool avx512vnni = avx512 && Bit(l7.ecx, 11);  // on top of F, DQ, BW, VL
  const bool popcnt =
      avx512vnni && Bit(l7.ecx, 1) && Bit(l7.ecx, 12) && Bit(l7.ecx, 14);  // VBMI, BITALG, VPOPCNTDQ
  return {true, sse41, avx2, avxvnni, avx512vnni, popcnt};
}

#else

std::array<bool, 6> Detect() { return {true, false, false, false, false, false}; }

#endif

const std::array<bool, 6>& Detected() {
  static const std::array<bool, 6> detected = Detect();
  return detected;
}

Isa BestLevelUpTo(Isa cap) {
  Isa best = Isa::kScalar;
  for (const Isa isa : MachineIsaLevels()) {
    if (isa <= cap) best = isa;
  }
  return best;
}

Isa ReadDefaultIsa() {
  const char* text = std::getenv("LOWBIT_ISA");
  if (text == nullptr || *text == '\0') return BestLevelUpTo(Isa::kAvx512Popcnt);
  const std::optional<Isa> cap = IsaFromName(text);
  Require(
      cap.has_value(), "LOWBIT_ISA is '", text,
      "', expected one of scalar, sse41, avx2, avxvnni, avx512vnni, avx512popcnt. Unset it to use the best "
      "level of this machine");
  return BestLevelUpTo(*cap);
}

}  // namespace

const char* IsaName(Isa isa) { return kNames[static_cast<size_t>(isa)]; }

std::optional<Isa> IsaFromName(std::string_view name) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<Isa>(i);
  }
  return std::nullopt;
}

bool MachineHas(Isa isa) { return Detected()[static_cast<size_t>(isa)]; }

std::string CpuModel() {
  std::string model = "unknown";
#if LOWBIT_X86
  if (Cpuid(0x80000000, 0).eax >= 0x80000004) {
    char name[49] = {};  // 48 characters of three leaves, padded with zeros or blanks
    for (uint32_t i = 0; i < 3; ++i) {
      const CpuidRegisters r = Cpuid(0x80000002 + i, 0);
      std::memcpy(name + 16 * i, &r, 16);
    }
    model = name;
    std::replace_if(model.begin(), model.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
    model.erase(0, model.find_first_not_of(' '));
    model.erase(model.find_last_not_of(' ') + 1);
  }
  const uint32_t signature = Cpuid(1, 0).eax;
  const uint32_t base = signature >> 8 & 0xf;
  const uint32_t family = base + (base == 0xf ? signature >> 20 & 0xff : 0);
  const uint32_t number = (signature >> 4 & 0xf) | (signature >> 12 & 0xf0);
  model += ", family " + std::to_string(family) + " model " + std::to_string(number) + " stepping " +
           std::to_string(signature & 0xf);
#endif
  return model;
}

std::vector<Isa> MachineIsaLevels() {
  std::vector<Isa> out;
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (Detected()[i]) out.push_back(static_cast<Isa>(i));
  }
  return out;
}

Isa DefaultIsa() {
  static const Isa isa = ReadDefaultIsa();
  return isa;
}

}  // namespace lowbit
