// Allocations that fail, for tests: preloaded, it stands before the C library's malloc and its kin. A caller is known
// by its return address, so that only the libraries that a test watches meet no memory: their operator new among
// them, since they hold a copy of the C++ runtime. Python and ONNX Runtime never do.
//
// It also knows which blocks of the watched libraries are still alive, and fills those that it frees, so that who
// reads one afterwards reads nonsense.
#include <link.h>
#include <malloc.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>

// What glibc calls its own functions.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* block, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void* block);
}

namespace {

struct Range {
  uintptr_t begin, end;
};
constexpr size_t kMostRanges = 16;
Range g_ranges[kMostRanges];
std::atomic<size_t> g_range_count{0};

bool IsWatched(const void* caller) {
  const auto address = reinterpret_cast<uintptr_t>(caller);
  const size_t count = g_range_count.load(std::memory_order_acquire);
  for (size_t i = 0; i < count; ++i)
    if (address >= g_ranges[i].begin && address < g_ranges[i].end) return true;
  return false;
}

// ---- which allocation fails

std::atomic<int64_t> g_made{0};      // by the watched libraries, since they were armed
std::atomic<int64_t> g_fails_at{0};  // 0: none does
std::atomic<bool> g_and_later{false};

bool Fails() {
  const int64_t number = g_made.fetch_add(1) + 1;
  const int64_t at = g_fails_at.load();
  return at != 0 && (number == at || (number > at && g_and_later.load()));
}

// ---- which blocks are alive: a hash table, since an own one may not allocate

constexpr size_t kSlots = size_t{1} << 21;
void* g_blocks[kSlots];  // null where never used, the table itself where a block was freed
std::mutex g_blocks_mutex;
std::atomic<int64_t> g_alive{0};

size_t SlotOf(const void* block) {
  return (reinterpret_cast<uintptr_t>(block) >> 4) * 0x9E3779B97F4A7C15u % kSlots;
}

void Remember(void* block) {
  if (block == nullptr) return;
  const std::lock_guard lock(g_blocks_mutex);
  size_t slot = SlotOf(block);
  while (g_blocks[slot] != nullptr && g_blocks[slot] != g_blocks) slot = (slot + 1) % kSlots;
  g_blocks[slot] = block;
  ++g_alive;
}

// Whether it was a watched library's.
bool Forget(const void* block) {
  if (block == nullptr || g_range_count.load(std::memory_order_acquire) == 0) return false;
  const std::lock_guard lock(g_blocks_mutex);
  for (size_t slot = SlotOf(block); g_blocks[slot] != nullptr; slot = (slot + 1) % kSlots) {
    if (g_blocks[slot] != block) continue;
    g_blocks[slot] = g_blocks;
    --g_alive;
    return true;
  }
  return false;
}

void* NoMemory() {
  errno = ENOMEM;
  return nullptr;
}

constexpr int kFresh = 0xCD, kFreed = 0xDD;

template <typename Allocate>
void* Allocated(const void* caller, Allocate allocate) {
  const bool is_watched = IsWatched(caller);
  if (is_watched && Fails()) return NoMemory();
  void* block = allocate();
  if (is_watched) Remember(block);
  return block;
}

void* Filled(void* block, const void* caller) {
  if (block != nullptr && IsWatched(caller)) std::memset(block, kFresh, malloc_usable_size(block));
  return block;
}

}  // namespace

extern "C" {

void* malloc(size_t bytes) noexcept {
  const void* caller = __builtin_return_address(0);
  return Filled(Allocated(caller, [&] { return __libc_malloc(bytes); }), caller);
}

void* calloc(size_t count, size_t bytes) noexcept {
  return Allocated(__builtin_return_address(0), [&] { return __libc_calloc(count, bytes); });
}

void* memalign(size_t alignment, size_t bytes) noexcept {
  const void* caller = __builtin_return_address(0);
  return Filled(Allocated(caller, [&] { return __libc_memalign(alignment, bytes); }), caller);
}

void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  const void* caller = __builtin_return_address(0);
  return Filled(Allocated(caller, [&] { return __libc_memalign(alignment, bytes); }), caller);
}

int posix_memalign(void** block, size_t alignment, size_t bytes) noexcept {
  void* made = Allocated(__builtin_return_address(0), [&] { return __libc_memalign(alignment, bytes); });
  if (made == nullptr) return ENOMEM;
  *block = made;
  return 0;
}

void free(void* block) noexcept {
  if (Forget(block)) std::memset(block, kFreed, malloc_usable_size(block));
  __libc_free(block);
}

void* realloc(void* block, size_t bytes) noexcept {
  if (IsWatched(__builtin_return_address(0)) && Fails()) return NoMemory();
  const bool was_watched = Forget(block);
  void* moved = __libc_realloc(block, bytes);
  if (was_watched) Remember(moved == nullptr && bytes != 0 ? block : moved);
  return moved;
}

// Watches the loaded libraries whose path ends with `ending`; returns how many pieces of code they have.
int LowBitFaultsWatch(const char* ending) {
  struct Wanted {
    const char* ending;
    int found;
  } wanted{ending, 0};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& its = *static_cast<Wanted*>(data);
        const size_t length = std::strlen(info->dlpi_name), end = std::strlen(its.ending);
        if (length < end || std::strcmp(info->dlpi_name + length - end, its.ending) != 0) return 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const ElfW(Phdr) & part = info->dlpi_phdr[i];
          const size_t at = g_range_count.load();
          if (part.p_type != PT_LOAD || (part.p_flags & PF_X) == 0 || at == kMostRanges) continue;
          const uintptr_t begin = info->dlpi_addr + part.p_vaddr;
          g_ranges[at] = {begin, begin + part.p_memsz};
          g_range_count.store(at + 1, std::memory_order_release);
          ++its.found;
        }
        return 0;
      },
      &wanted);
  return wanted.found;
}

// From here on allocations are counted; the `at`th fails (0: none), and later ones too where `and_later` is set.
void LowBitFaultsArm(int64_t at, int and_later) {
  g_and_later.store(and_later != 0);
  g_made.store(0);
  g_fails_at.store(at);
}

// No allocation fails any more; returns how many were made since they were armed.
int64_t LowBitFaultsDisarm() {
  g_fails_at.store(0);
  return g_made.load();
}

// Blocks of the watched libraries that are alive.
int64_t LowBitFaultsAlive() { return g_alive.load(); }

}  // extern "C"
