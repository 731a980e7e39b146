#include "ep/tests/fake_device/fake_backend.h"

#include <future>
#include <utility>
#include <vector>

#include "core/node_reader.h"
#include "ep/cpu/cpu_backend.h"
#include "ep/region/program.h"
#include "ep/tests/fake_device/fake_stream.h"

namespace lowbit::ep::fake {
namespace {

size_t BytesOf(const TensorShape& shape) {
  return static_cast<size_t>(ElementCount(shape.dims)) * ElementSize(shape.type);
}

class FakeInstance final : public Instance {
 public:
  FakeInstance(std::unique_ptr<Instance> cpu, const RegionPlan& plan, std::shared_ptr<Memory> memory)
      : cpu_(std::move(cpu)), plan_(plan), memory_(std::move(memory)) {}
  ~FakeInstance() override {
    if (last_.valid()) last_.wait();
  }

  void Run(std::span<void* const> externals, const RunContext& context) override {
    std::vector<Memory::Use> uses;
    for (size_t i = 0; i < externals.size(); ++i) uses.push_back(Check(i, externals[i]));
    auto done = std::make_shared<std::promise<void>>();
    const auto task = [this, uses, done, times = context.times,
                       before = std::exchange(last_, done->get_future().share())] {
      if (before.valid()) before.wait();  // this instance runs on one stream at a time
      try {
        RunOnHost(uses, times);
      } catch (...) {
        done->set_value();
        throw;
      }
      done->set_value();
    };
    if (context.stream == nullptr) {
      task();
    } else {
      static_cast<Stream*>(context.stream)->Enqueue(task);
      if (context.times != nullptr) last_.wait();
    }
    stream_ = context.stream;
  }

  bool Busy(const RunContext& context) const override {
    return last_.valid() && context.stream != stream_ &&
           last_.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
  }

 private:
  Memory::Use Check(size_t i, const void* external) {
    const size_t inputs = plan_.inputs.size();
    const size_t bytes = BytesOf(i < inputs ? plan_.inputs[i] : plan_.outputs[i - inputs]);
    return bytes == 0 ? Memory::Use{} : memory_->Check(external, bytes);
  }

  void RunOnHost(const std::vector<Memory::Use>& uses, StepTimes* times) {
    std::vector<void*> touched;
    for (const Memory::Use& use : uses) touched.push_back(use.bytes == 0 ? nullptr : memory_->Touch(use));
    InlineThreadPool pool;
    cpu_->Run(touched, {&pool, nullptr, times});
    for (const Memory::Use& use : uses)
      if (use.bytes != 0) memory_->Touch(use);  // still there?
  }

  const std::unique_ptr<Instance> cpu_;
  const RegionPlan& plan_;
  const std::shared_ptr<Memory> memory_;
  std::shared_future<void> last_;
  void* stream_ = nullptr;
};

class FakeBackend final : public Backend {
 public:
  FakeBackend(std::shared_ptr<Backend> cpu, std::shared_ptr<Memory> memory)
      : cpu_(std::move(cpu)), memory_(std::move(memory)) {}

  std::optional<std::string> Refusal(const Graph& graph, const Node& node) const override {
    return cpu_->Refusal(graph, node);
  }
  bool Fuses(const Graph& graph, std::span<const Node* const> nodes, const Node& next) const override {
    return cpu_->Fuses(graph, nodes, next);
  }
  std::unique_ptr<Step> CreateStep(const Graph& graph, std::span<const Node* const> nodes,
                                   std::span<const uint8_t> packed) override {
    return cpu_->CreateStep(graph, nodes, packed);
  }
  int64_t ChannelMultiple() const override { return 16; }  // as a GPU
  std::unique_ptr<Step> CreateCopy() override { return cpu_->CreateCopy(); }
  std::vector<size_t> PackedInputs(const Graph& graph, const Node& node) const override {
    return cpu_->PackedInputs(graph, node);
  }
  DeviceConstant Upload(const ConstTensor& tensor) override { return cpu_->Upload(tensor); }
  std::unique_ptr<Instance> CreateInstance(const RegionPlan& plan) override {
    return std::make_unique<FakeInstance>(cpu_->CreateInstance(plan), plan, memory_);
  }
  size_t Alignment() const override { return cpu_->Alignment(); }
  size_t MaxInstances() const override { return 3; }  // fewer than the tests' threads
  std::string Fingerprint() const override { return "fake device, " + cpu_->Fingerprint(); }

 private:
  const std::shared_ptr<Backend> cpu_;
  const std::shared_ptr<Memory> memory_;
};

}  // namespace

std::shared_ptr<Backend> CreateFakeBackend(std::shared_ptr<Memory> memory, const EpOptions& options) {
  CpuOptions cpu{options.reference, options.tuning != Tuning::kOff, 1, options.warn};
  return std::make_shared<FakeBackend>(CreateCpuBackend(std::move(cpu)), std::move(memory));
}

}  // namespace lowbit::ep::fake
