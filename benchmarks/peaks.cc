// What one core can do at most: the inner loops of the kernels, in registers, without loads or stores. Prints
// one line per loop, `name GHz operations_per_second`, best of several tries; what the CPU lacks is left out.
// benchmarks/peaks.py compiles and runs it.
//
// The loops are assembly, so that a compiler can neither drop nor spill anything: ten accumulators hide the
// latency, registers 14 and 15 are the operands, 12 and 13 hold what is in between.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>

namespace {

constexpr int kTries = 20;
constexpr uint64_t kSteps = 20000;
constexpr int kChains = 10;

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

#define TEN(chain)                                                                                   \
  chain("0") chain("1") chain("2") chain("3") chain("4") chain("5") chain("6") chain("7") chain("8") \
      chain("9")

#define LOOP(name, chain)                                                                                \
  void name() {                                                                                          \
    uint64_t steps = kSteps;                                                                             \
    asm volatile("1:\n" TEN(chain) "dec %0\n jnz 1b\n vzeroupper\n"                                      \
                 : "+r"(steps)                                                                           \
                 :                                                                                       \
                 : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", \
                   "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");                                \
  }

#define VNNI_512(i) "vpdpbusd %%zmm14, %%zmm15, %%zmm" i "\n"
#define POPCOUNT_512(i)                \
  "vpandq %%zmm14, %%zmm15, %%zmm12\n" \
  "vpopcntq %%zmm12, %%zmm13\n"        \
  "vpaddq %%zmm13, %%zmm" i ", %%zmm" i "\n"
#define SHUFFLE_512(i)                  \
  "vpshufb %%zmm14, %%zmm15, %%zmm12\n" \
  "vpaddb %%zmm12, %%zmm" i ", %%zmm" i "\n"
#define MULTIPLY_8(i)                      \
  "vpmaddubsw %%ymm14, %%ymm15, %%ymm12\n" \
  "vpaddw %%ymm12, %%ymm" i ", %%ymm" i "\n"
#define MULTIPLY_16(i)                   \
  "vpmaddwd %%ymm14, %%ymm15, %%ymm12\n" \
  "vpaddd %%ymm12, %%ymm" i ", %%ymm" i "\n"
#define SHUFFLE_256(i)                  \
  "vpshufb %%ymm14, %%ymm15, %%ymm12\n" \
  "vpaddb %%ymm12, %%ymm" i ", %%ymm" i "\n"

LOOP(Vnni512, VNNI_512)
LOOP(Popcount512, POPCOUNT_512)
LOOP(Shuffle512, SHUFFLE_512)
LOOP(Multiply8Avx2, MULTIPLY_8)
LOOP(Multiply16Avx2, MULTIPLY_16)
LOOP(ShuffleAvx2, SHUFFLE_256)

// A chain of dependent additions: one a cycle.
void Additions() {
  uint64_t steps = kSteps, x = 1;
  asm volatile(
      "1:\n add %2, %1\n add %2, %1\n add %2, %1\n add %2, %1\n add %2, %1\n"
      "add %2, %1\n add %2, %1\n add %2, %1\n add %2, %1\n add %2, %1\n dec %0\n jnz 1b\n"
      : "+r"(steps), "+r"(x)
      : "r"(uint64_t{3})
      : "cc");
}

double BestSeconds(void (*loop)()) {
  double best = 1e9;
  for (int attempt = 0; attempt < kTries; ++attempt) {
    const double start = Seconds();
    loop();
    best = std::min(best, Seconds() - start);
  }
  return best;
}

void Report(const char* name, double operations, void (*loop)()) {
  const double hz = 10.0 * kSteps / BestSeconds(Additions);
  std::printf("%s %.4g %.6g\n", name, hz / 1e9, operations * kChains * kSteps / BestSeconds(loop));
}

}  // namespace

int main() {
  const bool avx512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512vnni")) Report("vpdpbusd_zmm", 64, Vnni512);
  if (avx512 && __builtin_cpu_supports("avx512vpopcntdq")) Report("vpopcntq_zmm", 512, Popcount512);
  if (avx512) Report("vpshufb_zmm", 64, Shuffle512);
  if (__builtin_cpu_supports("avx2")) {
    Report("vpmaddubsw_ymm", 32, Multiply8Avx2);
    Report("vpmaddwd_ymm", 16, Multiply16Avx2);
    Report("vpshufb_ymm", 32, ShuffleAvx2);
  }
}
