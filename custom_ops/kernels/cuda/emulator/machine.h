// A GPU for tests, on the CPU: it runs the kernels' own source, compiled as C++, with the threads of a block
// as fibers. It computes what the machine of the PTX manual computes, in an order that is legal there, and
// knows nothing of time.
//
// The headers under include/ take the place of those of kernels/cuda that hold PTX or name kernels;
// language.h brings what CUDA C++ adds to C++.
//
// What it finds: wrong elements, deadlocks, arrivals that a barrier does not expect, misaligned bulk copies,
// writes beside the dynamic shared memory.
// Asynchronous work (copies, wgmma, stores) is done at the earliest legal moment or at the latest one, launch
// by launch in turn, and the threads take turns in an order that is drawn anew, so that a missing wait shows
// as a wrong element. What it does not find: a missing fence between memory proxies, reads before
// WaitForPredecessors (grids run one after the other), and what nvcc makes of the code. Those need a GPU and
// compute-sanitizer.
#pragma once

#include <vector_types.h>

#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace lowbit::cuda::emulator {

constexpr int kWarp = 32;

struct Block;

// Something to be done once, by whoever comes first.
class Work {
 public:
  explicit Work(std::function<void()> work) : work_(std::move(work)) {}
  void Do() {
    if (const auto work = std::exchange(work_, nullptr)) work();
  }

 private:
  std::function<void()> work_;
};

// Work that was issued and is not waited for yet, oldest first, in groups.
class AsyncGroups {
 public:
  using Group = std::vector<std::shared_ptr<Work>>;

  void Add(std::function<void()> work) { open_.push_back(std::make_shared<Work>(std::move(work))); }
  void Commit() { groups_.push_back(std::exchange(open_, {})); }
  void DoAllBut(size_t pending) {
    while (groups_.size() > pending) {
      for (const auto& work : std::exchange(groups_.front(), {})) work->Do();
      groups_.pop_front();
    }
  }
  // Committed or not.
  Group All() const {
    Group out;
    for (const Group& group : groups_) out.insert(out.end(), group.begin(), group.end());
    out.insert(out.end(), open_.begin(), open_.end());
    return out;
  }

 private:
  Group open_;
  std::deque<Group> groups_;
};

// A thread of a block.
struct Fiber {
  uint3 index = {0, 0, 0};
  int number = 0;  // in the block
  Block* block = nullptr;
  bool done = false;
  // What it waits for: ready(reason). None: nothing.
  bool (*ready)(const void*) = nullptr;
  const void* reason = nullptr;
  const char* waits_for = "";
  AsyncGroups copies, products, stores;
  uint64_t cluster_generation = 0;  // of the cluster's barrier when this thread arrived there last
  bool at_cluster = false;          // it ever did
  std::jmp_buf context;
};

// Threads that wait for each other.
struct Rendezvous {
  int arrived = 0;
  uint64_t generation = 0;
};

struct Cluster;

struct Block {
  static constexpr int kBarriers = 16, kExchangeBytes = 32;
  struct Warp {
    int alive = 0;
    Rendezvous exchange;
    alignas(16) uint8_t slots[2][kWarp][kExchangeBytes];
  };
  uint3 index = {0, 0, 0};
  Cluster* cluster = nullptr;
  uint8_t* window = nullptr;  // what addresses of shared memory are relative to
  uint8_t* shared = nullptr;  // dynamic shared memory
  size_t shared_bytes = 0;
  int alive = 0;
  std::vector<Fiber*> fibers;
  std::vector<Warp> warps;
  Rendezvous barriers[kBarriers];
};

// Blocks that run at the same time.
struct Cluster {
  std::vector<Block> blocks;
  dim3 grid_size, block_size;
  size_t shared_offset = 0;                      // where dynamic shared memory begins, behind other variables
  bool eager = true;                             // asynchronous work is done when it is issued
  std::vector<std::function<void()>> in_flight;  // copies that arrive at some time
  Rendezvous barrier;
};

// The thread that runs.
extern thread_local Fiber* current;

struct Launch {
  dim3 grid, block, cluster;
  size_t shared_bytes = 0;
  std::function<void()> kernel;  // what each thread does
};
// Runs a grid to its end.
void Run(const Launch& launch);

// Asynchronous work of the thread that runs: done now, or when it is waited for.
template <typename Function>
void Issue(AsyncGroups& groups, const Function& work) {
  if (current->block->cluster->eager) {
    work();
  } else {
    groups.Add(work);
  }
}

// Ends the program: the kernel does what the machine forbids.
[[noreturn]] void Fail(const char* what);

void SwitchOut();

// Lets others run until `condition()`, which is asked while no thread is `current`; `what` is said where it
// never comes.
template <typename Condition>
void WaitUntil(const char* what, const Condition& condition) {
  if (condition()) return;
  current->ready = [](const void* reason) { return (*static_cast<const Condition*>(reason))(); };
  current->reason = &condition;
  current->waits_for = what;
  SwitchOut();
}

// Until as many as `count` have come.
void Sync(Rendezvous& at, int count, const char* what);
void SyncNamed(int barrier, int threads);
void SyncBlock();
void ArriveAtCluster();
void WaitForCluster();

// What the threads of a warp showed each other.
template <typename T>
class Shown {
 public:
  explicit Shown(const uint8_t (*slots)[Block::kExchangeBytes]) : slots_(slots) {}
  T operator[](int lane) const {
    T out;
    std::memcpy(&out, slots_[lane], sizeof out);
    return out;
  }

 private:
  const uint8_t (*slots_)[Block::kExchangeBytes];
};

// All threads of the warp that are alive show a value to each other. What they see stays until the next time
// but one: nobody comes there before all have been here again.
template <typename T>
Shown<T> Exchange(const T& value) {
  static_assert(sizeof(T) <= Block::kExchangeBytes);
  Block::Warp& warp = current->block->warps[static_cast<size_t>(current->number / kWarp)];
  const auto* const slots = warp.slots[warp.exchange.generation % 2];
  std::memcpy(warp.slots[warp.exchange.generation % 2][current->number % kWarp], &value, sizeof value);
  Sync(warp.exchange, warp.alive, "the other threads of the warp");
  return Shown<T>(slots);
}

}  // namespace lowbit::cuda::emulator
