#include "kernels/arm/pipeline.h"

#if !defined(__APPLE__)
#include <sys/auxv.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#endif

namespace lowbit {
namespace {

#if defined(__APPLE__)

Pipeline Detect() { return Pipeline::kOutOfOrder; }

#else

// The main identification register of a core: implementer in bits 31..24, part in bits 15..4.
bool InOrder(uint64_t midr) {
  struct Part {
    uint32_t implementer, part;
  };
  constexpr std::array<Part, 9> kParts = {{
      {0x41, 0xd02},  // Cortex-A34
      {0x41, 0xd03},  // A53
      {0x41, 0xd04},  // A35
      {0x41, 0xd05},  // A55
      {0x41, 0xd46},  // A510
      {0x41, 0xd80},  // A520
      {0x51, 0x801},  // Kryo 2xx Silver, an A53
      {0x51, 0x803},  // Kryo 3xx Silver, an A55
      {0x51, 0x805},  // Kryo 4xx Silver, an A55
  }};
  return std::any_of(kParts.begin(), kParts.end(), [midr](const Part& p) {
    return p.implementer == (midr >> 24 & 0xff) && p.part == (midr >> 4 & 0xfff);
  });
}

// The identification (MIDR) of core `index`, as Linux tells it; 0 where it does not.
uint64_t ListedMidr(int index) {
  const std::string path =
      "/sys/devices/system/cpu/cpu" + std::to_string(index) + "/regs/identification/midr_el1";
  std::FILE* file = std::fopen(path.c_str(), "r");
  if (file == nullptr) return 0;
  unsigned long long midr = 0;
  if (std::fscanf(file, "%llx", &midr) != 1) midr = 0;
  std::fclose(file);
  return midr;
}

// The identification of the core that runs this; Linux emulates the read, and says so in HWCAP_CPUID.
uint64_t OwnMidr() {
  if ((getauxval(AT_HWCAP) >> 11 & 1) == 0) return 0;
  uint64_t midr = 0;
  asm("mrs %0, midr_el1" : "=r"(midr));
  return midr;
}

Pipeline Detect() {
  bool listed = false;
  for (int index = 0;; ++index) {
    const uint64_t midr = ListedMidr(index);
    if (midr == 0) break;
    listed = true;
    if (!InOrder(midr)) return Pipeline::kOutOfOrder;
  }
  return listed || InOrder(OwnMidr()) ? Pipeline::kInOrder : Pipeline::kOutOfOrder;
}

#endif

}  // namespace

Pipeline MachinePipeline() {
  static const Pipeline pipeline = Detect();
  return pipeline;
}

}  // namespace lowbit
