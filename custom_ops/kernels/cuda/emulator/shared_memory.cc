#include "kernels/cuda/emulator/shared_memory.h"

#include <algorithm>
#include <cstring>

#include "kernels/cuda/emulator/machine.h"

namespace lowbit::cuda::emulator {
namespace {

constexpr uint32_t kPlaceMask = (1u << kRankShift) - 1;
constexpr int kBoxAlignment = 128;

// The fields of an mbarrier.
struct Mbarrier {
  uint16_t arrivals, pending;  // of every phase; what this one still expects
  int32_t bytes : 31;          // expected and not counted, or counted too early
  uint32_t parity : 1;
};
static_assert(sizeof(Mbarrier) == 8);

Mbarrier Load(const uint8_t* barrier) {
  if (reinterpret_cast<uintptr_t>(barrier) % sizeof(Mbarrier) != 0) Fail("an mbarrier at no multiple of 8");
  Mbarrier out;
  std::memcpy(&out, barrier, sizeof out);
  return out;
}
void Store(uint8_t* barrier, Mbarrier b) {
  if (b.pending == 0 && b.bytes == 0) {
    b.pending = b.arrivals;
    b.parity ^= 1u;
  }
  std::memcpy(barrier, &b, sizeof b);
}

// f(the line's place in the tensor or null where it lies outside, the line's place in shared memory) for the
// lines of a box.
template <typename F>
void ForEachLine(const TensorMap& map, const int (&at)[4], uint8_t* shared, const F& f) {
  for (int n = 0; n < map.box[3]; ++n) {
    for (int h = 0; h < map.box[2]; ++h) {
      for (int w = 0; w < map.box[1]; ++w, shared += map.box[0]) {
        const int place[] = {at[1] + w, at[2] + h, at[3] + n};
        uint8_t* line = map.base;
        for (int i = 0; i < 3 && line != nullptr; ++i) {
          line = place[i] < 0 || place[i] >= map.sizes[i + 1] ? nullptr : line + place[i] * map.strides[i];
        }
        f(line, shared);
      }
    }
  }
}

// The bytes of a line of a box that lie inside the tensor.
int InsideLine(const TensorMap& map, int first) {
  if (first < 0) Fail("a box begins before the first channel");
  return std::clamp(map.sizes[0] - first, 0, map.box[0]);
}

void LoadLine(const TensorMap& map, const uint8_t* line, int first, uint8_t* shared) {
  const int inside = line == nullptr ? 0 : InsideLine(map, first);
  for (int i = 0; i < map.box[0]; i += kChunk) {
    uint8_t* const to = Swizzled(shared + i, map.swizzle);
    const int count = std::clamp(inside - i, 0, kChunk);
    if (count > 0) std::memcpy(to, line + first + i, static_cast<size_t>(count));
    std::memset(to + count, 0, static_cast<size_t>(kChunk - count));
  }
}

void CheckBox(const uint8_t* shared) {
  if (reinterpret_cast<uintptr_t>(shared) % kBoxAlignment != 0)
    Fail("a box in shared memory at no multiple of 128");
}

}  // namespace

uint8_t* Swizzled(uint8_t* at, int span) {
  if (span == 0) return at;
  const auto address = reinterpret_cast<uintptr_t>(at);
  return reinterpret_cast<uint8_t*>(address ^ (address >> 7 & static_cast<uintptr_t>(span / kChunk - 1))
                                                  << 4);
}

uint32_t AddressOf(const void* shared) {
  const std::ptrdiff_t place = static_cast<const uint8_t*>(shared) - current->block->window;
  if (place < -static_cast<std::ptrdiff_t>(kWindowAddress) ||
      place >= static_cast<std::ptrdiff_t>(kPlaceMask - kWindowAddress))
    Fail("an address that is none of shared memory");
  return static_cast<uint32_t>(place + static_cast<std::ptrdiff_t>(kWindowAddress));
}
uint8_t* PointerTo(uint32_t address) {
  const uint32_t rank = address >> kRankShift;
  const Block& block = rank == 0 ? *current->block : current->block->cluster->blocks[rank - 1];
  return block.window +
         (static_cast<std::ptrdiff_t>(address & kPlaceMask) - static_cast<std::ptrdiff_t>(kWindowAddress));
}
uint32_t AddressIn(uint32_t address, uint32_t rank) {
  if (rank >= current->block->cluster->blocks.size()) Fail("a block that the cluster has not");
  return (address & kPlaceMask) | (rank + 1) << kRankShift;
}

void InitMbarrier(uint8_t* barrier, int arrivals) {
  const auto count = static_cast<uint16_t>(arrivals);
  if (arrivals < 1) Fail("an mbarrier of no arrivals");
  const Mbarrier fresh = {count, count, 0, 0};
  std::memcpy(barrier, &fresh, sizeof fresh);
}
void ArriveAt(uint8_t* barrier) {
  Mbarrier b = Load(barrier);
  if (b.pending == 0) Fail("more arrivals at an mbarrier than it expects");
  --b.pending;
  Store(barrier, b);
}
void ExpectBytes(uint8_t* barrier, int bytes) {
  Mbarrier b = Load(barrier);
  if (b.pending == 0) Fail("an mbarrier expects bytes after its last arrival");
  b.bytes += bytes;
  Store(barrier, b);
}
void CountBytes(uint8_t* barrier, int bytes) {
  Mbarrier b = Load(barrier);
  b.bytes -= bytes;
  Store(barrier, b);
}
void WaitForParity(uint8_t* barrier, uint32_t parity) {
  WaitUntil("an mbarrier", [&] { return Load(barrier).parity != parity; });
}

void Transfer(std::function<void()> copy, uint8_t* barrier, int bytes) {
  Cluster& cluster = *current->block->cluster;
  auto arrive = [copy = std::move(copy), barrier, bytes] {
    copy();
    CountBytes(barrier, bytes);
  };
  if (cluster.eager) {
    arrive();
  } else {
    cluster.in_flight.push_back(std::move(arrive));
  }
}

void LoadBox(const TensorMap& map, const int (&at)[4], uint8_t* shared) {
  CheckBox(shared);
  ForEachLine(map, at, shared, [&](const uint8_t* line, uint8_t* to) { LoadLine(map, line, at[0], to); });
}

void StoreBox(const TensorMap& map, const int (&at)[4], uint8_t* shared) {
  CheckBox(shared);
  const int inside = InsideLine(map, at[0]);
  ForEachLine(map, at, shared, [&](uint8_t* line, uint8_t* from) {
    for (int i = 0; line != nullptr && i < inside; i += kChunk) {
      std::memcpy(line + at[0] + i, Swizzled(from + i, map.swizzle),
                  static_cast<size_t>(std::min(kChunk, inside - i)));
    }
  });
}

void LoadWindows(const TensorMap& map, const int (&at)[4], int dx, int dy, uint8_t* shared) {
  CheckBox(shared);
  int w = at[1], h = at[2], n = at[3];
  for (int pixel = 0; pixel < map.box[1]; ++pixel, shared += map.box[0]) {
    const int x = w + dx, y = h + dy;
    const bool is_inside =
        x >= 0 && x < map.sizes[1] && y >= 0 && y < map.sizes[2] && n >= 0 && n < map.sizes[3];
    LoadLine(map,
             is_inside ? map.base + x * map.strides[0] + y * map.strides[1] + n * map.strides[2] : nullptr,
             at[0], shared);
    w += map.steps[1];
    if (w < map.sizes[1] + map.upper[0]) continue;
    w = map.lower[0];
    h += map.steps[2];
    if (h < map.sizes[2] + map.upper[1]) continue;
    h = map.lower[1];
    ++n;
  }
}

}  // namespace lowbit::cuda::emulator
