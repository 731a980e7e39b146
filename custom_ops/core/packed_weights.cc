#include "core/packed_weights.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <utility>

namespace lowbit {
namespace {

constexpr size_t kLargePage = size_t{2} << 20;

std::align_val_t Alignment(size_t size) {
  return std::align_val_t{size >= kLargePage ? kLargePage : AlignedBytes::kAlignment};
}

using Hash = std::pair<uint64_t, uint64_t>;

uint64_t Mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t Load(const uint8_t* p, size_t n) {
  uint64_t word = 0;
  std::memcpy(&word, p, n);
  return word;
}

// Two independent multiply-and-fold lanes. It only has to spread: equality is decided by comparing the bytes.
Hash HashOf(const AlignedBytes& bytes) {
  constexpr uint64_t kA = 0x9e3779b97f4a7c15, kB = 0xc2b2ae3d27d4eb4f;  // odd, bits well mixed
  Hash hash = {bytes.size() ^ kA, bytes.size() ^ kB};
  const uint8_t* p = bytes.data();
  size_t left = bytes.size();
  for (; left >= 16; p += 16, left -= 16) {
    const uint64_t a = Load(p, 8), b = Load(p + 8, 8);
    hash.first = Mix(hash.first ^ a, kA ^ b);
    hash.second = Mix(hash.second ^ b, kB ^ a);
  }
  if (left > 8) {
    hash.first = Mix(hash.first ^ Load(p, 8), kA);
    p += 8, left -= 8;
  }
  hash.second = Mix(hash.second ^ Load(p, left), kB);
  return hash;
}

struct Registry {
  std::mutex mutex;
  std::multimap<Hash, std::weak_ptr<const AlignedBytes>> buffers;
};

// Never destroyed: sessions may outlive static destructors.
Registry& TheRegistry() {
  static Registry* const registry = new Registry;
  return *registry;
}

bool SameBytes(const AlignedBytes& a, const AlignedBytes& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace

void AlignedBytes::Free::operator()(uint8_t* p) const { ::operator delete[](p, alignment); }

// Pages of 2 MB miss the TLB less often and are fewer to be faulted in: with them VGG-16, whose fully connected layers are 120
// of its 138 MB, takes 0.97 of the time on one thread of Zen 5 and its session opens in 0.88 of it; ResNet-50, 1.00 and 0.9.
// Smaller buffers gathered into such pages gained nothing more.
AlignedBytes::AlignedBytes(size_t size) : size_(size), data_(nullptr, {Alignment(size)}) {
  data_.reset(static_cast<uint8_t*>(::operator new[](size, Alignment(size))));
#ifdef MADV_HUGEPAGE
  // A kernel that refuses leaves small pages. The rest of the last page would cost up to 2 MB.
  if (size >= kLargePage) madvise(data_.get(), size / kLargePage * kLargePage, MADV_HUGEPAGE);
#endif
  std::memset(data_.get(), 0, size);
}

PackedWeights ShareWeights(AlignedBytes bytes) {
  const Hash hash = HashOf(bytes);
  Registry& registry = TheRegistry();
  const std::lock_guard lock(registry.mutex);
  std::erase_if(registry.buffers, [](const auto& entry) { return entry.second.expired(); });
  const auto [first, last] = registry.buffers.equal_range(hash);
  for (auto it = first; it != last; ++it) {
    PackedWeights held = it->second.lock();
    if (held != nullptr && SameBytes(*held, bytes)) return held;
  }
  PackedWeights shared = std::make_shared<const AlignedBytes>(std::move(bytes));
  registry.buffers.emplace(hash, shared);
  return shared;
}

size_t SharedWeightsCount() {
  Registry& registry = TheRegistry();
  const std::lock_guard lock(registry.mutex);
  std::erase_if(registry.buffers, [](const auto& entry) { return entry.second.expired(); });
  return registry.buffers.size();
}

}  // namespace lowbit
