// What Python cannot reach: sharing of packed weights, the plan cache, the order of CPU levels.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "core/isa.h"
#include "core/packed_weights.h"
#include "core/packing.h"
#include "core/plan_cache.h"
#include "core/status.h"

namespace lowbit {
namespace {

int g_failures = 0;

void Expect(bool condition, const char* what) {
  if (condition) return;
  ++g_failures;
  std::fprintf(stderr, "failed: %s\n", what);
}

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

void TestPackingRefusesSizes() {
  std::vector<uint8_t> codes(10), packed(5);
  const auto throws = [](auto&& call) {
    try {
      call();
    } catch (const Error&) {
      return true;
    }
    return false;
  };
  Expect(!throws([&] { PackRows(codes, 1, 10, 4, packed); }), "sizes that fit");
  Expect(throws([&] { PackRows(codes, 1, 10, 5, packed); }), "too short a buffer");
  Expect(throws([&] { UnpackRows(packed, 1, 11, 4, false, codes); }), "too few codes");
  Expect(throws([&] { PackRows(codes, 1, 10, 9, packed); }), "nine bits");
}

void TestIsa() {
  for (const Isa isa : MachineIsaLevels()) Expect(IsaFromName(IsaName(isa)) == isa, "names lead back");
  Expect(MachineHas(Isa::kScalar), "every machine has scalar");
  Expect(!IsaFromName("avx1024"), "unknown names are unknown");
}

}  // namespace
}  // namespace lowbit

int main() {
  lowbit::TestSharedWeights();
  lowbit::TestSharedWeightsFromThreads();
  lowbit::TestPlanCache();
  lowbit::TestPlanCacheFromThreads();
  lowbit::TestPackingRefusesSizes();
  lowbit::TestIsa();
  if (lowbit::g_failures == 0) std::puts("ok");
  return lowbit::g_failures == 0 ? 0 : 1;
}
