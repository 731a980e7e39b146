#include "ep/tests/fake_device/fake_runtime.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/status.h"
#include "ep/tests/fake_device/fake_stream.h"

namespace lowbit::ep::fake {
namespace {

size_t Setting(const char* name, size_t fallback) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? fallback : std::strtoull(text, nullptr, 10);
}

// Recording makes a new one, since streams may still wait for what was recorded before, and the owner may
// destroy an event that a stream has still to pass.
using SharedEvent = std::shared_ptr<Event>;

// In memory that it shares with whoever made it.
using Semaphore = std::atomic<uint64_t>;

}  // namespace

FakeRuntime::FakeRuntime(MakeBackend make_backend)
    : make_backend_(std::move(make_backend)), delay_(Setting("LOWBIT_FAKE_DELAY_US", 200)) {
  const size_t count = Setting("LOWBIT_FAKE_DEVICES", 2);
  for (size_t i = 0; i < count; ++i)
    memories_.push_back(std::make_shared<Memory>(Setting("LOWBIT_FAKE_BYTES", size_t{1} << 30)));
}

void FakeRuntime::CheckAlive() const { Require(!lost_, "the device was lost; restart the process"); }

void* FakeRuntime::Allocate(int device, size_t bytes) {
  CheckAlive();
  return memory(device).Allocate(bytes);
}

void FakeRuntime::Copy(void* to, Place to_place, const void* from, Place from_place, size_t bytes, int device,
                       void* stream) {
  CheckAlive();
  Memory& its_memory = memory(device);
  const auto use = [&](const void* address, Place place) {
    if (place == Place::kDevice) return its_memory.Check(address, bytes);
    its_memory.CheckHost(address);
    return Memory::Use{const_cast<void*>(address), 0, 0};
  };
  const Memory::Use target = use(to, to_place), source = use(from, from_place);
  const auto task = [&its_memory, target, source, bytes] {
    const auto touch = [&](const Memory::Use& side) {
      return side.bytes == 0 ? side.address : its_memory.Touch(side);
    };
    std::memcpy(touch(target), touch(source), bytes);
  };
  if (stream == nullptr) return task();
  auto* queue = static_cast<Stream*>(stream);
  queue->Enqueue(task);
  if (to_place == Place::kHost || from_place == Place::kHost) queue->Synchronize();
}

void FakeRuntime::CopyAcross(void* to, int to_device, const void* from, int from_device, size_t bytes) {
  CheckAlive();
  Memory &target = memory(to_device), &source = memory(from_device);
  const Memory::Use written = target.Check(to, bytes), read = source.Check(from, bytes);
  std::memcpy(target.Touch(written), source.Touch(read), bytes);
}

void* FakeRuntime::CreateStream(int) {
  CheckAlive();
  return new Stream(delay_);
}

void FakeRuntime::DestroyStream(int, void* stream) noexcept { delete static_cast<Stream*>(stream); }

void FakeRuntime::Synchronize(int, void* stream) {
  CheckAlive();
  if (stream != nullptr) static_cast<Stream*>(stream)->Synchronize();
}

void* FakeRuntime::CreateEvent(int) {
  auto never_recorded = std::make_shared<Event>();
  never_recorded->Set();
  return new SharedEvent(std::move(never_recorded));
}

void FakeRuntime::DestroyEvent(int, void* event) noexcept { delete static_cast<SharedEvent*>(event); }

void FakeRuntime::RecordEvent(int, void* event, void* stream) {
  auto recorded = std::make_shared<Event>();
  static_cast<Stream*>(stream)->Enqueue([recorded] { recorded->Set(); });
  *static_cast<SharedEvent*>(event) = recorded;  // as on a GPU, one that cannot be recorded stays what it was
}

void FakeRuntime::WaitEvent(int, void* event, void* stream) {
  static_cast<Stream*>(stream)->Enqueue([waited = *static_cast<SharedEvent*>(event)] { waited->Wait(); });
}

void FakeRuntime::SynchronizeEvent(int, void* event) { (*static_cast<SharedEvent*>(event))->Wait(); }

DeviceRuntime::ImportedMemory FakeRuntime::ImportMemory(int device, int descriptor, size_t bytes) {
  CheckAlive();
  ImportedMemory imported{nullptr, nullptr, bytes};
  imported.handle = memory(device).Map(descriptor, bytes, &imported.data);
  close(descriptor);
  return imported;
}

void FakeRuntime::ReleaseMemory(int device, const ImportedMemory& imported) noexcept {
  memory(device).Unmap(imported.handle, imported.data, imported.bytes);
}

void* FakeRuntime::ImportSemaphore(int, int descriptor) {
  CheckAlive();
  void* shared = mmap(nullptr, sizeof(Semaphore), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  Require(shared != MAP_FAILED, "descriptor ", descriptor, " is no semaphore");
  close(descriptor);
  return shared;
}

void FakeRuntime::ReleaseSemaphore(int, void* semaphore) noexcept { munmap(semaphore, sizeof(Semaphore)); }

void FakeRuntime::WaitSemaphore(int, void* semaphore, uint64_t value, void* stream) {
  CheckAlive();
  static_cast<Stream*>(stream)->Enqueue([waited = static_cast<Semaphore*>(semaphore), value] {
    while (*waited < value) std::this_thread::sleep_for(std::chrono::microseconds(100));
  });
}

void FakeRuntime::SignalSemaphore(int, void* semaphore, uint64_t value, void* stream) {
  CheckAlive();
  static_cast<Stream*>(stream)->Enqueue(
      [signalled = static_cast<Semaphore*>(semaphore), value] { *signalled = value; });
}

std::shared_ptr<Backend> FakeRuntime::CreateBackend(int device, const EpOptions& options) {
  CheckAlive();
  return make_backend_(memories_.at(static_cast<size_t>(device)), options);
}

}  // namespace lowbit::ep::fake
