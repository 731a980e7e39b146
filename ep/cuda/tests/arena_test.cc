// The arena over host memory that poses as a device's.
#include "ep/cuda/arena.h"

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/status.h"

namespace {

using lowbit::Error;
using lowbit::Require;
using lowbit::ep::Arena;

// A device of `capacity` bytes. Blocks are numbers, not memory.
struct FakeDevice {
  explicit FakeDevice(size_t bytes) : capacity(bytes) {}

  const size_t capacity;
  size_t used = 0;
  uintptr_t next = 4096;
  std::map<void*, size_t> blocks;
  std::mutex mutex;

  Arena::Source Source() {
    return {[this](size_t bytes) -> void* {
              const std::lock_guard lock(mutex);
              if (used + bytes > capacity) return nullptr;
              used += bytes;
              void* const block = reinterpret_cast<void*>(next);
              next += bytes;
              blocks[block] = bytes;
              return block;
            },
            [this](void* block) {
              const std::lock_guard lock(mutex);
              used -= blocks.at(block);
              blocks.erase(block);
            },
            [] { return std::string("some bytes free"); }};
  }
};

void BlocksAreLittleLarger() {
  for (size_t bytes = 0; bytes < 100'000; ++bytes) {
    const size_t block = Arena::BlockBytes(bytes);
    Require(block >= bytes && block % 256 == 0, "the block for ", bytes, " bytes has ", block);
    Require(block <= bytes + bytes / 8 + 256, "the block for ", bytes, " bytes has ", block);
  }
  bool refused = false;
  try {
    Arena::BlockBytes(~size_t{0} - 5);
  } catch (const Error&) {
    refused = true;
  }
  Require(refused, "a size that overflows is refused");
}

void FreedBlocksAreHandedOutAgain() {
  FakeDevice device(1 << 20);
  Arena arena(device.Source(), 1 << 20, "GPU 0");
  void* const first = arena.Allocate(1000);
  Require(arena.BytesInUse() == 1024 && arena.BytesReserved() == 1024, "one block is in use");
  arena.Free(first);
  Require(arena.BytesInUse() == 0 && arena.BytesReserved() == 1024, "one block is reserved");
  Require(arena.Allocate(900) == first, "the block serves again");
  Require(arena.Allocate(900) != first, "but not twice");
  void* const large = arena.Allocate(100'000);
  arena.Free(large);
  Require(arena.Allocate(100) != large, "a large block waits for a large request");
  Require(arena.ReleaseReserve() >= 100'000 && device.blocks.size() == 3, "the reserve goes back");
}

void TheReserveIsBounded() {
  FakeDevice device(1 << 20);
  Arena arena(device.Source(), 4096, "GPU 0");
  std::vector<void*> blocks;
  for (int i = 0; i < 10; ++i) blocks.push_back(arena.Allocate(1024));
  for (void* const block : blocks) arena.Free(block);
  Require(arena.BytesReserved() == 4096 && device.used == 4096, "four blocks of 1024 bytes stay");
}

void OutOfMemoryUsesTheReserveFirst() {
  FakeDevice device(10'240);
  Arena arena(device.Source(), 1 << 20, "GPU 0 (fake)");
  void* const small = arena.Allocate(4096);
  arena.Free(arena.Allocate(4096));
  void* const large = arena.Allocate(6000);
  Require(large != nullptr && device.used == 4096 + 6144, "the reserve made room");
  std::string message;
  try {
    arena.Allocate(5000);
  } catch (const Error& e) {
    message = e.what();
  }
  for (const char* part : {"out of memory", "GPU 0 (fake)", "5000 bytes were asked for", "some bytes free"}) {
    Require(message.find(part) != std::string::npos, "expected '", part, "' in: ", message);
  }
  arena.Free(large);
  arena.Free(small);
  Require(arena.Allocate(5000) != nullptr, "and it goes on");
}

void ThreadsShareAnArena() {
  FakeDevice device(64 << 20);
  Arena arena(device.Source(), 1 << 20, "GPU 0");
  std::mutex mutex;
  std::set<void*> held;
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      for (int i = 0; i < 2000; ++i) {
        void* const block = arena.Allocate(random() % 20'000);
        {
          const std::lock_guard lock(mutex);
          Require(held.insert(block).second, "a block is held twice");
        }
        {
          const std::lock_guard lock(mutex);
          held.erase(block);
        }
        arena.Free(block);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  Require(arena.BytesInUse() == 0 && arena.BytesReserved() <= 1 << 20, "all came back");
}

}  // namespace

int main() {
  try {
    BlocksAreLittleLarger();
    FreedBlocksAreHandedOutAgain();
    TheReserveIsBounded();
    OutOfMemoryUsesTheReserveFirst();
    ThreadsShareAnArena();
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  std::cout << "ok\n";
  return 0;
}
