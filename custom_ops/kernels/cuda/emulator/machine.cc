#include "kernels/cuda/emulator/machine.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <numeric>
#include <random>
#include <semaphore>
#include <string>
#include <thread>

namespace lowbit::cuda::emulator {

thread_local Fiber* current = nullptr;

namespace {

constexpr size_t kStackBytes = size_t{256} << 10;  // touched only as far as a kernel needs it
constexpr int kSharedBytes = 228 << 10, kSharedAlignment = 128, kLargestPattern = 1024;
constexpr uint8_t kPoison = 0xA5;

// One for each thread of the program, which run the blocks of a cluster: the kernels' own shared variables
// are thread_local too.
alignas(kLargestPattern) thread_local uint8_t shared_window[kSharedBytes + kLargestPattern];

thread_local std::jmp_buf scheduler;
thread_local const std::function<void()>* kernel_of_fibers = nullptr;

// A fiber's stack lives as long as the program: the next block's threads run on it.
struct Stack {
  Stack()
      : memory(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                    -1, 0)) {
    if (memory == MAP_FAILED) Fail("no memory for the stack of a thread");
  }
  void* memory;
  Fiber fiber;
  ucontext_t entry;
  bool entered = false;
};

// Opens a barrier that expects `count`.
void OpenIfFull(Rendezvous& barrier, int count) {
  if (barrier.arrived == 0 || barrier.arrived < count) return;
  barrier.arrived = 0;
  ++barrier.generation;
}

int AliveIn(const Cluster& cluster) {
  int alive = 0;
  for (const Block& block : cluster.blocks) alive += block.alive;
  return alive;
}

// Barriers of all threads of a warp, a block, a cluster expect no more of one that has ended.
void Retire(Fiber& fiber) {
  fiber.copies.Commit();
  fiber.copies.DoAllBut(0);
  fiber.stores.DoAllBut(0);
  Block& block = *fiber.block;
  fiber.done = true;
  --block.alive;
  OpenIfFull(block.barriers[0], block.alive);
  Cluster& cluster = *block.cluster;
  if (fiber.at_cluster && fiber.cluster_generation == cluster.barrier.generation) --cluster.barrier.arrived;
  OpenIfFull(cluster.barrier, AliveIn(cluster));
  Block::Warp& warp = block.warps[static_cast<size_t>(fiber.number / kWarp)];
  --warp.alive;
  OpenIfFull(warp.exchange, warp.alive);
}

// A fiber's life: the kernel, as often as its stack is taken for a new thread.
void Live() {
  for (;;) {
    (*kernel_of_fibers)();
    Retire(*current);
    SwitchOut();
  }
}

void SwitchTo(Stack& stack) {
  current = &stack.fiber;
  if (_setjmp(scheduler) == 0) {
    if (stack.entered) _longjmp(stack.fiber.context, 1);
    stack.entered = true;
    setcontext(&stack.entry);
  }
  current = nullptr;
}

Stack& StackOf(size_t i) {
  thread_local std::vector<std::unique_ptr<Stack>> stacks;
  while (stacks.size() <= i) {
    stacks.push_back(std::make_unique<Stack>());
    Stack& stack = *stacks.back();
    getcontext(&stack.entry);
    stack.entry.uc_stack.ss_sp = stack.memory;
    stack.entry.uc_stack.ss_size = kStackBytes;
    stack.entry.uc_link = nullptr;
    makecontext(&stack.entry, Live, 0);
  }
  return *stacks[i];
}

std::mt19937& Random() {
  static std::mt19937 random(1);
  return random;
}

// Makes a block's threads; on the thread of the program that runs them.
void Prepare(Block& block, const Launch& launch) {
  block.window = shared_window;
  block.shared = shared_window + block.cluster->shared_offset;
  block.shared_bytes = launch.shared_bytes;
  std::memset(shared_window, kPoison, sizeof shared_window);
  const unsigned threads = launch.block.x * launch.block.y * launch.block.z;
  block.alive = static_cast<int>(threads);
  block.warps.resize((threads + kWarp - 1) / kWarp);
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = StackOf(i).fiber;
    fiber.index = {i % launch.block.x, i / launch.block.x % launch.block.y,
                   i / launch.block.x / launch.block.y};
    fiber.number = static_cast<int>(i);
    fiber.block = &block;
    fiber.done = false;
    fiber.ready = nullptr;
    fiber.at_cluster = false;
    block.fibers.push_back(&fiber);
    ++block.warps[i / kWarp].alive;
  }
}

// Lets each thread of a block that can run do so once, in strides of any width. Returns whether any did.
bool RunOnce(Block& block, const std::function<void()>& kernel) {
  kernel_of_fibers = &kernel;
  bool ran = false;
  const size_t count = block.fibers.size(), start = Random()() % count;
  size_t step = Random()() % count;
  while (std::gcd(step, count) != 1) step = (step + 1) % count;
  for (size_t i = 0; i < count; ++i) {
    Fiber& fiber = *block.fibers[(start + i * step) % count];
    if (fiber.done || (fiber.ready != nullptr && !fiber.ready(fiber.reason))) continue;
    fiber.ready = nullptr;
    SwitchTo(StackOf(static_cast<size_t>(fiber.number)));
    ran = true;
  }
  return ran;
}

// Nothing is written beside the dynamic shared memory.
void CheckWindow(const Block& block) {
  const auto is_poison = [](uint8_t byte) { return byte == kPoison; };
  uint8_t* const end = block.window + sizeof shared_window;
  if (!std::all_of(block.window, block.shared, is_poison) ||
      !std::all_of(block.shared + block.shared_bytes, end, is_poison))
    Fail("a block wrote beside its dynamic shared memory");
}

// Some of the copies under way arrive, in any order.
bool Deliver(Cluster& cluster, bool all) {
  if (cluster.in_flight.empty()) return false;
  std::shuffle(cluster.in_flight.begin(), cluster.in_flight.end(), Random());
  const size_t count = cluster.in_flight.size(), kept = all ? 0 : Random()() % (count + 1);
  std::vector<std::function<void()>> arriving(
      std::make_move_iterator(cluster.in_flight.begin() + static_cast<std::ptrdiff_t>(kept)),
      std::make_move_iterator(cluster.in_flight.end()));
  cluster.in_flight.resize(kept);
  for (const auto& copy : arriving) copy();
  return !arriving.empty();
}

[[noreturn]] void ReportDeadlock(const Cluster& cluster) {
  for (const Block& block : cluster.blocks) {
    std::map<std::string, std::pair<int, int>> waiting;  // how many, the first one
    for (const Fiber* const fiber : block.fibers) {
      if (fiber->done) continue;
      auto& [count, first] = waiting.try_emplace(fiber->waits_for, 0, fiber->number).first->second;
      ++count;
    }
    for (const auto& [what, who] : waiting) {
      std::fprintf(stderr, "block %u %u %u: %d threads, the first is %d, wait for %s\n", block.index.x,
                   block.index.y, block.index.z, who.first, who.second, what.c_str());
    }
  }
  Fail("deadlock: no thread can go on");
}

// Runs clusters: a thread of the program for every block, of which one runs at a time.
class Runner {
 public:
  ~Runner() {
    ends_ = true;
    for (const auto& worker : workers_) worker->turn.release();
    for (const auto& worker : workers_) worker->thread.join();
  }

  void Run(Cluster& cluster, const Launch& launch) {
    cluster_ = &cluster;
    launch_ = &launch;
    while (workers_.size() < cluster.blocks.size()) {
      Worker& worker = *workers_.emplace_back(std::make_unique<Worker>());
      worker.thread = std::thread([this, &worker, rank = workers_.size() - 1] { Work(worker, rank); });
    }
    preparing_ = true;
    idle_ = 0;
    Give(0);
    all_ended_.acquire();
    Deliver(cluster, true);
    for (const Block& block : cluster.blocks) CheckWindow(block);
  }

 private:
  struct Worker {
    std::binary_semaphore turn{0};
    std::thread thread;
  };

  void Give(size_t rank) { workers_[rank]->turn.release(); }

  void Work(Worker& self, size_t rank) {
    for (;;) {
      self.turn.acquire();
      if (ends_) return;
      Block& block = cluster_->blocks[rank];
      if (preparing_) {
        Prepare(block, *launch_);
        preparing_ = &block != &cluster_->blocks.back();
        Give(preparing_ ? rank + 1 : 0);
      } else {
        Advance(block);
        GiveToNext(rank);
      }
    }
  }

  // As far as it comes by itself.
  void Advance(Block& block) {
    while (block.alive > 0) {
      if (RunOnce(block, launch_->kernel)) {
        idle_ = 0;
        Deliver(*cluster_, false);
        continue;
      }
      const auto running = std::count_if(cluster_->blocks.begin(), cluster_->blocks.end(),
                                         [](const Block& other) { return other.alive > 0; });
      if (++idle_ < running) return;
      idle_ = 0;
      if (!Deliver(*cluster_, true)) ReportDeadlock(*cluster_);
    }
  }

  void GiveToNext(size_t rank) {
    const size_t count = cluster_->blocks.size();
    for (size_t i = 1; i <= count; ++i) {
      const size_t next = (rank + i) % count;
      if (cluster_->blocks[next].alive > 0) return Give(next);
    }
    all_ended_.release();
  }

  std::vector<std::unique_ptr<Worker>> workers_;
  std::binary_semaphore all_ended_{0};
  // What the worker whose turn it is reads and writes.
  bool preparing_ = false, ends_ = false;
  std::ptrdiff_t idle_ = 0;  // blocks that could not go on, one after the other
  Cluster* cluster_ = nullptr;
  const Launch* launch_ = nullptr;
};

}  // namespace

void Fail(const char* what) {
  if (current == nullptr) {
    std::fprintf(stderr, "emulated GPU: %s\n", what);
  } else {
    std::fprintf(stderr, "emulated GPU: %s (block %u %u %u, thread %d)\n", what, current->block->index.x,
                 current->block->index.y, current->block->index.z, current->number);
  }
  std::fflush(nullptr);
  std::_Exit(3);
}

void SwitchOut() {
  if (_setjmp(current->context) == 0) _longjmp(scheduler, 1);
}

void Run(const Launch& launch) {
  static Runner runner;
  static bool eager = false;
  eager = !eager;
  const dim3 &grid = launch.grid, &size = launch.cluster;
  const unsigned blocks = size.x * size.y * size.z;
  for (unsigned z = 0; z < grid.z; z += size.z) {
    for (unsigned y = 0; y < grid.y; y += size.y) {
      for (unsigned x = 0; x < grid.x; x += size.x) {
        Cluster cluster;
        cluster.grid_size = grid;
        cluster.block_size = launch.block;
        cluster.eager = eager;
        cluster.shared_offset = Random()() % (kLargestPattern / kSharedAlignment) * kSharedAlignment;
        cluster.blocks.resize(blocks);
        for (unsigned rank = 0; rank < blocks; ++rank) {
          Block& block = cluster.blocks[rank];
          block.index = {x + rank % size.x, y + rank / size.x % size.y, z + rank / size.x / size.y};
          block.cluster = &cluster;
        }
        runner.Run(cluster, launch);
      }
    }
  }
}

void Sync(Rendezvous& at, int count, const char* what) {
  const uint64_t generation = at.generation;
  if (++at.arrived > count) Fail("more threads at a barrier than it counts");
  OpenIfFull(at, count);
  WaitUntil(what, [&] { return at.generation != generation; });
}
void SyncNamed(int barrier, int threads) {
  Sync(current->block->barriers[barrier], threads, barrier == 0 ? "barrier 0" : "a named barrier");
}
void SyncBlock() { SyncNamed(0, current->block->alive); }

void ArriveAtCluster() {
  Rendezvous& b = current->block->cluster->barrier;
  current->cluster_generation = b.generation;
  current->at_cluster = true;
  ++b.arrived;
  OpenIfFull(b, AliveIn(*current->block->cluster));
}
void WaitForCluster() {
  const Rendezvous& b = current->block->cluster->barrier;
  WaitUntil("the cluster's barrier", [&b, own = current->cluster_generation] { return b.generation != own; });
}

}  // namespace lowbit::cuda::emulator
