#include "core/cpu/isa.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/status.h"

#if LOWBIT_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif LOWBIT_ARM && defined(__APPLE__)
#include <sys/sysctl.h>
#elif LOWBIT_ARM
#include <sys/auxv.h>

#include <fstream>
#include <set>
#endif

namespace lowbit {
namespace {

enum class Architecture : uint8_t { kAny, kX86, kArm };

struct Level {
  const char* name;
  Architecture architecture;
};

constexpr size_t kLevelCount = static_cast<size_t>(Isa::kI8mm) + 1;
// In the order of Isa.
constexpr std::array<Level, kLevelCount> kLevels = {{
    {"scalar", Architecture::kAny},
    {"sse41", Architecture::kX86},
    {"avx2", Architecture::kX86},
    {"avxvnni", Architecture::kX86},
    {"avx512vnni", Architecture::kX86},
    {"avx512popcnt", Architecture::kX86},
    {"amx", Architecture::kX86},
    {"neon", Architecture::kArm},
    {"dotprod", Architecture::kArm},
    {"i8mm", Architecture::kArm},
}};

constexpr Architecture kOurs = LOWBIT_X86   ? Architecture::kX86
                               : LOWBIT_ARM ? Architecture::kArm
                                            : Architecture::kAny;

const Level& LevelOf(Isa isa) { return kLevels[static_cast<size_t>(isa)]; }

bool IsOurs(const Level& level) {
  return level.architecture == Architecture::kAny || level.architecture == kOurs;
}

class Detected {
 public:
  Detected() { Set(Isa::kScalar, true); }
  void Set(Isa isa, bool has) { has_[static_cast<size_t>(isa)] = has; }
  bool Has(Isa isa) const { return has_[static_cast<size_t>(isa)]; }

 private:
  std::array<bool, kLevelCount> has_ = {};
};

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

// What the kernels count on: eight tile registers of 16 rows x 64 bytes (palette 1 of leaf 29), and AVX-512. Where
// they are emulated nothing but AVX2 need be there.
bool HasAmx([[maybe_unused]] bool avx2, [[maybe_unused]] bool avx512popcnt) {
#ifdef LOWBIT_EMULATE_AMX
  return avx2;
#elif defined(__linux__) && LOWBIT_HAS_AMX
  constexpr uint64_t kTileState = 0x60000;  // configuration and data
  const CpuidRegisters l7 = Cpuid(7, 0), palette = Cpuid(0x1d, 1);
  const bool instructions = Bit(l7.edx, 24) && Bit(l7.edx, 25);  // AMX-TILE, AMX-INT8
  const bool shape = palette.ebx >> 16 >= 8 && (palette.ebx & 0xffff) >= 64 && (palette.ecx & 0xffff) >= 16;
  return avx512popcnt && instructions && shape && (Xcr0() & kTileState) == kTileState &&
         GetsTileRegisters(
             [](int code, unsigned long argument) { return syscall(SYS_arch_prctl, code, argument); });
#else
  return false;
#endif
}

Detected Detect() {
  constexpr uint64_t kYmmState = 0x6, kZmmState = 0xe6;
  const CpuidRegisters l1 = Cpuid(1, 0), l7 = Cpuid(7, 0), l7s1 = Cpuid(7, 1);
  const bool osxsave = Bit(l1.ecx, 27);
  const uint64_t saved = osxsave ? Xcr0() : 0;
  const bool ymm = (saved & kYmmState) == kYmmState, zmm = (saved & kZmmState) == kZmmState;

  const bool sse41 = Bit(l1.ecx, 19) && Bit(l1.ecx, 9);                                    // SSE4.1, SSSE3
  const bool avx2 = sse41 && ymm && Bit(l1.ecx, 28) && Bit(l1.ecx, 12) && Bit(l7.ebx, 5);  // AVX, FMA, AVX2
  const bool avx512 = avx2 && zmm && Bit(l7.ebx, 16) && Bit(l7.ebx, 17) && Bit(l7.ebx, 30) && Bit(l7.ebx, 31);
  const bool avx512vnni = avx512 && Bit(l7.ecx, 11);  // on top of F, DQ, BW, VL
  Detected detected;
  detected.Set(Isa::kSse41, sse41);
  detected.Set(Isa::kAvx2, avx2);
  detected.Set(Isa::kAvxVnni, avx2 && Bit(l7s1.eax, 4));
  detected.Set(Isa::kAvx512Vnni, avx512vnni);
  const bool avx512popcnt =
      avx512vnni && Bit(l7.ecx, 1) && Bit(l7.ecx, 12) && Bit(l7.ecx, 14);  // VBMI, BITALG, VPOPCNTDQ
  detected.Set(Isa::kAvx512Popcnt, avx512popcnt);
  detected.Set(Isa::kAmx, HasAmx(avx2, avx512popcnt));
  return detected;
}

#elif LOWBIT_ARM

#ifdef __APPLE__

bool HasFeature(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

bool HasDotprod() { return HasFeature("hw.optional.arm.FEAT_DotProd"); }
bool HasI8mm() { return HasFeature("hw.optional.arm.FEAT_I8MM"); }

#else  // Linux, Android

// Bits of the kernel's interface (asm/hwcap.h); older headers do not name the second.
bool HasDotprod() { return (getauxval(AT_HWCAP) >> 20 & 1) != 0; }  // HWCAP_ASIMDDP
bool HasI8mm() { return (getauxval(AT_HWCAP2) >> 13 & 1) != 0; }    // HWCAP2_I8MM

#endif

Detected Detect() {
  Detected detected;
  const bool dotprod = HasDotprod();
  detected.Set(Isa::kNeon, true);
  detected.Set(Isa::kDotprod, dotprod);
  detected.Set(Isa::kI8mm, dotprod && HasI8mm());
  return detected;
}

#else

Detected Detect() { return {}; }

#endif

const Detected& OfThisMachine() {
  static const Detected detected = Detect();
  return detected;
}

Isa BestLevelUpTo(Isa cap) {
  Isa best = Isa::kScalar;
  for (const Isa isa : MachineIsaLevels()) {
    if (Includes(cap, isa)) best = isa;
  }
  return best;
}

Isa ReadDefaultIsa() {
  const char* text = std::getenv("LOWBIT_ISA");
  if (text == nullptr || *text == '\0') return MachineIsaLevels().back();
  const std::optional<Isa> cap = IsaFromName(text);
  Require(cap.has_value(), "LOWBIT_ISA is '", text, "', expected one of ", IsaNames(),
          ". Unset it to use the best level of this machine");
  return BestLevelUpTo(*cap);
}

// What the text of a CPU's name may hold; a build for other processors reads none.
[[maybe_unused]] std::string Printable(std::string text) {
  std::replace_if(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  text.erase(0, text.find_first_not_of(' '));
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

}  // namespace

const char* IsaName(Isa isa) { return LevelOf(isa).name; }

std::optional<Isa> IsaFromName(std::string_view name) {
  for (size_t i = 0; i < kLevelCount; ++i) {
    if (IsOurs(kLevels[i]) && name == kLevels[i].name) return static_cast<Isa>(i);
  }
  return std::nullopt;
}

std::string IsaNames() {
  std::string names;
  for (const Level& level : kLevels) {
    if (IsOurs(level)) names += (names.empty() ? "" : ", ") + std::string(level.name);
  }
  return names;
}

bool Includes(Isa isa, Isa needed) {
  if (needed == Isa::kScalar) return true;
  return LevelOf(isa).architecture == LevelOf(needed).architecture && isa >= needed;
}

bool GetsTileRegisters(long (*arch_prctl)(int code, unsigned long argument)) {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr unsigned long kTileData = 18;     // XFEATURE_XTILEDATA
  return arch_prctl(kRequestPermission, kTileData) == 0;
}

bool MachineHas(Isa isa) { return OfThisMachine().Has(isa); }

bool Runs(Isa cap, Isa needed) { return Includes(cap, needed) && MachineHas(needed); }

std::string CpuModel() {
#if LOWBIT_X86
  std::string model = "unknown";
  if (Cpuid(0x80000000, 0).eax >= 0x80000004) {
    char name[49] = {};  // 48 characters of three leaves, padded with zeros or blanks
    for (uint32_t i = 0; i < 3; ++i) {
      const CpuidRegisters r = Cpuid(0x80000002 + i, 0);
      std::memcpy(name + 16 * i, &r, 16);
    }
    model = Printable(name);
  }
  const uint32_t signature = Cpuid(1, 0).eax;
  const uint32_t base = signature >> 8 & 0xf;
  const uint32_t family = base + (base == 0xf ? signature >> 20 & 0xff : 0);
  const uint32_t number = (signature >> 4 & 0xf) | (signature >> 12 & 0xf0);
  return model + ", family " + std::to_string(family) + " model " + std::to_string(number) + " stepping " +
         std::to_string(signature & 0xf);
#elif LOWBIT_ARM && defined(__APPLE__)
  char name[128] = {};
  size_t size = sizeof name - 1;
  if (sysctlbyname("machdep.cpu.brand_string", name, &size, nullptr, 0) != 0) return "unknown";
  return Printable(name);
#elif LOWBIT_ARM
  // Every core has its own lines; those of one kind are equal. Which kinds there are counts, not in what
  // order or how many.
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> kinds;
  std::string kind;
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    const std::string value = line.substr(colon + 2);
    if (line.starts_with("CPU implementer")) kind = "implementer " + value;
    if (line.starts_with("CPU variant")) kind += " variant " + value;
    if (line.starts_with("CPU part")) kind += " part " + value;
    if (line.starts_with("CPU revision")) kinds.insert(kind + " revision " + value);
  }
  std::string model;
  for (const std::string& each : kinds) model += (model.empty() ? "" : ", ") + each;
  return model.empty() ? "unknown" : Printable(model);
#else
  return "unknown";
#endif
}

std::vector<Isa> MachineIsaLevels() {
  std::vector<Isa> out;
  for (size_t i = 0; i < kLevelCount; ++i) {
    if (MachineHas(static_cast<Isa>(i))) out.push_back(static_cast<Isa>(i));
  }
  return out;
}

Isa DefaultIsa() {
  static const Isa isa = ReadDefaultIsa();
  return isa;
}

}  // namespace lowbit
