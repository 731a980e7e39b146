// The memory and the streams that ONNX Runtime gets (ep/ort/device.h), on the fake device and without ONNX
// Runtime. Meant for LOWBIT_SANITIZE=thread too.
#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "ep/ort/device.h"
#include "ep/ort/stream.h"
#include "ep/tests/fake_device/fake_runtime.h"
#include "ep/tests/fake_device/fake_stream.h"
#include "tests/expect.h"

namespace lowbit::ep {
namespace {

// As much of ONNX Runtime as a device needs to come to life.
OrtStatus* MakeMemoryInfo(const char*, OrtMemoryInfoDeviceType, uint32_t, int32_t, OrtDeviceMemoryType,
                          size_t, OrtAllocatorType, OrtMemoryInfo** out) noexcept {
  *out = reinterpret_cast<OrtMemoryInfo*>(new int);
  return nullptr;
}

void AttachToNothing() {
  static OrtApi api{};
  api.CreateMemoryInfo_V2 = MakeMemoryInfo;
  api.CreateStatus = [](OrtErrorCode, const char*) noexcept { return reinterpret_cast<OrtStatus*>(new int); };
  api.ReleaseStatus = [](OrtStatus* status) noexcept { delete reinterpret_cast<int*>(status); };
  api.ReleaseMemoryInfo = [](OrtMemoryInfo* info) noexcept { delete reinterpret_cast<int*>(info); };
  static const OrtApiBase base{[](uint32_t) noexcept -> const OrtApi* { return &api; },
                               []() noexcept { return "1.27.1"; }};
  Expect(ort::Attach(&base) == nullptr, "the library attaches to an ONNX Runtime");
  Expect(ort::RuntimeApiVersion() == 27, "release 1.27.1 has API 27");
}

class Bench {
 public:
  Bench() : runtime_(std::make_shared<fake::FakeRuntime>(nullptr)), device_(runtime_, 0) {}
  ~Bench() {
    for (void* stream : streams_) device_.DestroyStream(stream);
    Expect(memory().faults() == 0, "no memory was misused");
    Expect(memory().blocks() == 0, "no memory is left");
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  Device& device() { return device_; }
  fake::Memory& memory() { return runtime_->memory(0); }
  void* Stream() { return streams_.emplace_back(device_.CreateStream(this)); }
  // Work that uses the block: writes it, takes its time, and finds what it wrote. `meanwhile`: what other
  // threads do before it is enqueued.
  void Work(void* stream, void* block, size_t bytes, int value, const std::function<void()>& meanwhile = {}) {
    const fake::Memory::Use use = memory().Check(block, bytes);
    const Device::Enqueuing enqueuing(device_, stream);
    if (meanwhile) meanwhile();
    static_cast<fake::Stream*>(stream)->Enqueue([this, use, value] {
      auto* data = static_cast<uint8_t*>(memory().Touch(use));
      std::memset(data, value, use.bytes);
      std::this_thread::yield();
      Require(std::all_of(data, data + use.bytes, [value](uint8_t byte) { return byte == value; }),
              "somebody else wrote a block in use");
    });
  }

 private:
  std::shared_ptr<fake::FakeRuntime> runtime_;
  Device device_;
  std::vector<void*> streams_;
};

void TestABlockServesItsStreamAtOnce() {
  Bench bench;
  void *first = bench.Stream(), *second = bench.Stream();
  void* block = bench.device().Allocate(1000, first);
  bench.Work(first, block, 1000, 1);
  bench.device().Free(block);
  void* other = bench.device().Allocate(1000, second);
  Expect(other != block, "another stream gets no block that is in use");
  void* same = bench.device().Allocate(900, first);
  Expect(same == block, "the same stream gets its block back at once");
  void* small = bench.device().Allocate(10, first);
  Expect(small != block, "a block is used once at a time");
  for (void* held : {other, same, small}) bench.device().Free(held);
}

void TestSynchronizationFreesForAll() {
  Bench bench;
  void *first = bench.Stream(), *second = bench.Stream();
  void* streamed = bench.device().Allocate(500, first);
  void* plain = bench.device().Allocate(500, nullptr);
  bench.Work(first, streamed, 500, 2);
  bench.Work(second, plain, 500, 3);
  bench.device().Free(streamed);
  bench.device().Free(plain);
  Expect(bench.memory().blocks() == 2, "blocks stay while work may use them");
  bench.device().Synchronize(first);
  Expect(bench.memory().blocks() == 1, "a stream's own blocks go when it is done");
  bench.device().Synchronize(second);
  Expect(bench.memory().blocks() == 0, "other blocks go when all streams of their time are done");
}

void TestSynchronizationThatComesBeforeTheWork() {
  Bench bench;
  void* stream = bench.Stream();
  void* block = bench.device().Allocate(500, stream);
  bench.Work(stream, block, 500, 5, [&] { bench.device().SynchronizeAll(&bench); });
  bench.device().Free(block);
  Expect(bench.memory().blocks() == 1, "a block stays for work that was enqueued after the synchronization");
  bench.device().SynchronizeRun(&bench);
  Expect(bench.memory().blocks() == 0, "the run waits for its work all the same");
}

void TestMemoryThatIsKeptIsFoundBeforeGivingUp() {
  Bench bench;
  void *first = bench.Stream(), *second = bench.Stream();
  const size_t most = bench.memory().reserved() / 4 * 3;
  void* block = bench.device().Allocate(most, first);
  bench.Work(first, block, 64, 4);
  bench.device().Free(block);
  void* again = bench.device().Allocate(most, second);
  Expect(Throws([&] { bench.device().Allocate(most, second); }), "more than there is cannot be had");
  bench.device().Free(again);
}

void TestEventsOrderStreams() {
  Bench bench;
  void *first = bench.Stream(), *second = bench.Stream();
  DeviceRuntime& runtime = bench.device().runtime();
  void* block = bench.device().Allocate(256, first);
  void* event = runtime.CreateEvent(0);
  for (int i = 0; i < 20; ++i) {
    bench.Work(i % 2 == 0 ? first : second, block, 256, i);
    runtime.RecordEvent(0, event, i % 2 == 0 ? first : second);
    runtime.WaitEvent(0, event, i % 2 == 0 ? second : first);
  }
  bench.device().SynchronizeAll(&bench);
  runtime.DestroyEvent(0, event);
  bench.device().Free(block);
}

// A device that has no memory left for what records an event.
struct RuntimeWithoutEvents : fake::FakeRuntime {
  RuntimeWithoutEvents() : FakeRuntime(nullptr) {}
  void RecordEvent(int, void*, void*) override { Fail("an event cannot be recorded"); }
};

// ONNX Runtime waits for a notification though it was told that this could not be activated.
void TestWhatCannotBeRecordedIsWaitedForWhole() {
  Device device(std::make_shared<RuntimeWithoutEvents>(), 0);
  OrtSyncStreamImpl* stream = CreateDeviceStream(device, nullptr);
  OrtSyncNotificationImpl* notification = nullptr;
  Expect(stream->CreateNotification(stream, &notification) == nullptr, "a stream notifies");
  bool done = false;
  {
    const Device::Enqueuing enqueuing(device, stream->GetHandle(stream));
    static_cast<fake::Stream*>(stream->GetHandle(stream))->Enqueue([&done] { done = true; });
  }
  OrtStatus* status = notification->Activate(notification);
  Expect(status != nullptr, "what cannot be recorded is told");
  Api().ReleaseStatus(status);
  Expect(notification->WaitOnHost(notification) == nullptr && done, "the host waits for all of the stream");
  notification->Release(notification);
  stream->Release(stream);
}

void TestThreadsShareADevice() {
  Bench bench;
  constexpr int kThreads = 8, kSteps = 150;
  std::vector<void*> streams;
  for (int i = 0; i < kThreads; ++i) streams.push_back(bench.Stream());
  const auto run = [&](int index) {
    std::mt19937 random(static_cast<unsigned>(index));
    void* stream = streams[static_cast<size_t>(index)];
    for (int step = 0; step < kSteps; ++step) {
      const size_t bytes = 1 + random() % 5000;
      void* block = bench.device().Allocate(bytes, random() % 4 == 0 ? nullptr : stream);
      bench.Work(stream, block, bytes, index);
      bench.device().Free(block);  // as ONNX Runtime does, when the work is enqueued
      if (random() % 8 == 0) bench.device().SynchronizeRun(&bench);
    }
    Expect(ErrorOf([&] { bench.device().Synchronize(stream); }).empty(), "no thread's work is disturbed");
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(run, i);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace lowbit::ep

int main() {
  using namespace lowbit::ep;
  AttachToNothing();
  TestABlockServesItsStreamAtOnce();
  TestSynchronizationFreesForAll();
  TestSynchronizationThatComesBeforeTheWork();
  TestMemoryThatIsKeptIsFoundBeforeGivingUp();
  TestEventsOrderStreams();
  TestWhatCannotBeRecordedIsWaitedForWhole();
  TestThreadsShareADevice();
  return lowbit::ReportFailures();
}
