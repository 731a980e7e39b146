// What Python cannot reach: sharing of packed weights, the plan cache, the order of CPU levels. And the
// parser of the tune cache, byte by byte, which is too slow there.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/cpu/isa.h"
#include "core/cpu/tune_cache.h"
#include "core/epilogue.h"
#include "core/guarded_body.h"
#include "core/packed_weights.h"
#include "core/packing.h"
#include "core/plan_cache.h"
#include "core/status.h"
#include "kernels/common/residual_line.h"
#include "tests/expect.h"

namespace lowbit {
namespace {

AlignedBytes Filled(size_t size, uint8_t value) {
  AlignedBytes bytes(size);
  std::memset(bytes.data(), value, size);
  return bytes;
}

void TestSharedWeights() {
  const size_t before = SharedWeightsCount();
  {
    const PackedWeights a = ShareWeights(Filled(1001, 7)), b = ShareWeights(Filled(1001, 7));
    const PackedWeights c = ShareWeights(Filled(1001, 8)), d = ShareWeights(Filled(1000, 7));
    Expect(a == b, "equal contents are shared");
    Expect(a != c && a != d && c != d, "other contents are not");
    Expect(reinterpret_cast<uintptr_t>(a->data()) % AlignedBytes::kAlignment == 0, "buffers are aligned");
    Expect(SharedWeightsCount() == before + 3, "three buffers live");
  }
  Expect(SharedWeightsCount() == before, "the last owner frees");
}

void TestSharedWeightsFromThreads() {
  std::vector<PackedWeights> shared(8);
  std::vector<std::thread> threads;
  for (PackedWeights& slot : shared) threads.emplace_back([&slot] { slot = ShareWeights(Filled(4096, 3)); });
  for (std::thread& thread : threads) thread.join();
  for (const PackedWeights& slot : shared) Expect(slot == shared[0], "threads share one buffer");
}

void TestPlanCache() {
  PlanCache<int, int> cache(2);
  int made = 0;
  const auto get = [&](int key) { return *cache.Get(key, [&] { return ++made, 10 * key; }); };
  Expect(get(1) == 10 && get(2) == 20 && get(1) == 10 && made == 2, "a known shape is not planned again");
  Expect(get(3) == 30 && made == 3, "a third shape evicts");
  Expect(get(1) == 10 && made == 3, "what was used last stays");
  Expect(get(2) == 20 && made == 4, "what was used longest ago went");
  const auto held = cache.Get(4, [] { return 40; });
  get(5), get(6), get(7);
  Expect(*held == 40, "an evicted plan lives while it is held");
}

void TestPlanCacheFromThreads() {
  PlanCache<int, int> cache(4);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 1000; ++i) {
        const int key = (i * (t + 1)) % 7;
        if (*cache.Get(key, [&] { return key * 3; }) != key * 3) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Expect(wrong == 0, "threads get the plan of their shape");
}

void TestGuardedBody() {
  std::atomic<int> calls{0};
  const std::function<void(size_t)> body = [&](size_t i) {
    ++calls;
    if (i == 3) throw std::runtime_error("three");
  };
  GuardedBody guarded(body);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 8; ++i) threads.emplace_back([&guarded, i] { guarded(i); });
  for (std::thread& thread : threads) thread.join();
  bool thrown = false;
  try {
    guarded.Rethrow();
  } catch (const std::runtime_error& e) {
    thrown = std::strcmp(e.what(), "three") == 0;
  }
  Expect(thrown, "the waiting thread gets what a thread threw");
  const int before = calls;
  guarded(5);
  Expect(calls == before, "nothing is called after a failure");
  GuardedBody sound(body);
  sound(1);
  sound.Rethrow();
}

void TestUnpacking() {
  for (int bits = 1; bits <= 8; ++bits) {
    for (int64_t k = 0; k < 40; ++k) {
      std::vector<uint8_t> codes(static_cast<size_t>(3 * k)), back(codes.size());
      for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>((i * 37 + 11) % (1u << bits));
      std::vector<uint8_t> packed(static_cast<size_t>(3 * PackedRowBytes(k, bits)));
      PackRows(codes, 3, k, bits, packed);
      UnpackRows(packed, 3, k, bits, false, back);
      Expect(back == codes, "packing and unpacking gives the codes");
      UnpackRows(packed, 3, k, bits, true, back);
      const uint8_t sign = static_cast<uint8_t>(1u << (bits - 1));
      for (uint8_t& code : codes) code = static_cast<uint8_t>((code & sign) != 0 ? code - 2 * sign : code);
      Expect(back == codes, "signed codes are sign-extended");
    }
  }
}

void TestPackingRefusesSizes() {
  std::vector<uint8_t> codes(10), packed(5);
  Expect(!Throws([&] { PackRows(codes, 1, 10, 4, packed); }), "sizes that fit");
  Expect(Throws([&] { PackRows(codes, 1, 10, 5, packed); }), "too short a buffer");
  Expect(Throws([&] { UnpackRows(packed, 1, 11, 4, false, codes); }), "too few codes");
  Expect(Throws([&] { PackRows(codes, 1, 10, 9, packed); }), "nine bits");
}

void TestIsa() {
  for (const Isa isa : MachineIsaLevels()) Expect(IsaFromName(IsaName(isa)) == isa, "names lead back");
  Expect(MachineHas(Isa::kScalar), "every machine has scalar");
  Expect(!IsaFromName("avx1024"), "unknown names are unknown");
  Expect(!IsaFromName(MachineHas(Isa::kNeon) ? "sse41" : "neon"), "and those of another architecture");
  Expect(Includes(Isa::kAvx2, Isa::kSse41) && !Includes(Isa::kSse41, Isa::kAvx2), "levels are ordered");
  Expect(Includes(Isa::kNeon, Isa::kScalar) && !Includes(Isa::kI8mm, Isa::kSse41), "within an architecture");
  Expect(GetsTileRegisters(
             [](int code, unsigned long what) -> long { return code == 0x1023 && what == 18 ? 0 : -1; }),
         "tile registers are asked for");
  // EINVAL of an older kernel, EPERM or ENOSYS of a filter, ENOSPC of a small signal stack: -1 from the call.
  Expect(!GetsTileRegisters([](int, unsigned long) -> long { return -1; }),
         "and not used where they are refused");
}

bool IsRefused(const std::string& text) {
  return Throws([&] { ParseTuneCache(text); });
}

void TestTuneCache() {
  const TuneEntries entries = {{{"conv a", 1}, "kernel_a"}, {{"conv b", 16}, "kernel_b"}};
  const std::string text = FormatTuneCache(entries);
  Expect(ParseTuneCache(text) == entries, "what is written is read");
  for (size_t i = 0; i < text.size(); ++i) {
    Expect(IsRefused(text.substr(0, i)), "a file cut short is refused");
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = text;
      flipped[i] = static_cast<char>(flipped[i] ^ (1 << bit));
      Expect(IsRefused(flipped), "a file with a flipped bit is refused");
    }
  }
  Expect(IsRefused(text + text) && IsRefused(std::string(1 << 16, '\xff')), "other texts are refused");
}

void TestTuneFile() {
  namespace fs = std::filesystem;
  const fs::path folder =
      fs::temp_directory_path() / ("lowbit_tune_file_" + std::to_string(std::random_device{}()));
  const TuneOrigin origin{"machine A", "build 1"};
  const std::string path = TuneFilePath(origin, (folder / "deep").string());
  Expect(path != TuneFilePath({"machine B", "build 1"}, (folder / "deep").string()),
         "every machine has its file");

  TuneFile first(origin), second(origin);
  std::vector<std::string> warnings;
  const auto warn = [&](const std::string& warning) { warnings.push_back(warning); };
  Expect(first.Read(path, warn)->empty() && warnings.empty(), "a file that is not there is empty");
  first.Add(path, {{{"conv a", 1}, "kernel_a"}});
  second.Add(path, {{{"conv b", 1}, "kernel_b"}});
  first.Add(path, {{{"conv a", 1}, "kernel_c"}});
  const TuneEntries expected = {{{"conv a", 1}, "kernel_c"}, {{"conv b", 1}, "kernel_b"}};
  Expect(*first.Read(path, warn) == expected && *second.Read(path, warn) == expected,
         "writers add to the file");
  Expect(std::distance(fs::directory_iterator(folder / "deep"), {}) == 1, "no temporary file stays");

  std::ofstream(path, std::ios::app) << "1\tconv c\tkernel_d\n";
  Expect(first.Read(path, warn)->empty() && first.Read(path, warn)->empty(),
         "a damaged file counts for nothing");
  Expect(warnings.size() == 1, "and is warned of once");
  first.Add(path, {{{"conv a", 1}, "kernel_a"}});
  Expect(second.Read(path, warn)->size() == 1 && warnings.size() == 1, "what is measured next replaces it");
  Expect(Throws([&] { first.Add("/proc/no/such/folder/file", {{{"conv a", 1}, "kernel_a"}}); }),
         "a file that cannot be written is an error");
  fs::remove_all(folder);
}

// Every pair of codes, of epilogues of all kinds; of what networks have nearly all have a line.
void TestResidualLines() {
  std::mt19937 random(7);
  const auto between = [&](int32_t lo, int32_t hi) { return std::uniform_int_distribution(lo, hi)(random); };
  int usual = 0, found = 0;
  for (int i = 0; i < 120; ++i) {
    Epilogue e;
    e.has_residual = true;
    const bool ties = i % 4 == 3;
    const auto scale = [&] {
      const float power = std::exp2(static_cast<float>(between(-1, 1)));
      return ties ? power : power * std::uniform_real_distribution<float>(1, 2)(random);
    };
    e.inner_scale = scale(), e.residual_scale = scale(), e.y_scale = scale();
    e.residual_signed = between(0, 1) != 0;
    const int32_t least = e.residual_signed ? -128 : 0;
    const int32_t inner = between(0, 1) * -128, y = between(0, 1) * -128;
    e.lo = inner + between(0, 1) * between(0, 100), e.hi = inner + 255 - between(0, 1) * between(0, 100);
    e.y_lo = y + between(0, 1) * between(0, 100), e.y_hi = y + 255 - between(0, 1) * between(0, 100);
    e.zero_point = inner + between(0, 255), e.y_zero_point = y + between(0, 255);
    e.residual_zero_point = least + between(0, 255);
    const std::optional<ResidualLine> line = FitResidualLine(e);
    usual += ties ? 0 : 1;
    if (!line) continue;
    found += ties ? 0 : 1;
    int wrong = 0;
    for (int32_t q = e.lo; q <= e.hi; ++q) {
      for (int32_t r = least; r < least + 256; ++r) {
        const float x = std::bit_cast<float>(line->base ^ static_cast<uint8_t>(r));
        const float value = std::rint(std::fma(static_cast<float>(q - e.zero_point), line->inner,
                                               std::fma(x, line->residual, line->offset)));
        const float zero = static_cast<float>(e.y_zero_point);
        const float code = std::clamp(value + zero, static_cast<float>(e.y_lo), static_cast<float>(e.y_hi));
        wrong += static_cast<int32_t>(code) != AddResidualCode(e, q, r) ? 1 : 0;
      }
    }
    Expect(wrong == 0, "a line gives the codes of the definition");
  }
  Expect(found * 10 > usual * 9, "usual scales have a line");
  Epilogue e;
  e.has_residual = true;
  e.inner_scale = std::nanf("");
  Expect(!FitResidualLine(e), "scales that are no numbers have none");
}

}  // namespace
}  // namespace lowbit

int main() {
  lowbit::TestSharedWeights();
  lowbit::TestSharedWeightsFromThreads();
  lowbit::TestPlanCache();
  lowbit::TestPlanCacheFromThreads();
  lowbit::TestGuardedBody();
  lowbit::TestUnpacking();
  lowbit::TestPackingRefusesSizes();
  lowbit::TestIsa();
  lowbit::TestResidualLines();
  lowbit::TestTuneCache();
  lowbit::TestTuneFile();
  return lowbit::ReportFailures();
}
