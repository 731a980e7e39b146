// The region compiler: memory plans, partitions, lowering, programs and the instances that run them.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <thread>

#include "ep/cpu/cpu_backend.h"
#include "ep/region/memory_plan.h"
#include "ep/region/partition.h"
#include "ep/tests/fake_backend.h"
#include "ep/tests/graph_builder.h"

namespace lowbit::ep {
namespace {

int g_failures = 0;

void Expect(bool condition, const std::string& what) {
  if (condition) return;
  ++g_failures;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
}

template <typename Call>
std::string ErrorOf(Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

bool Holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// ---- memory plans

size_t RoundedUp(size_t bytes, size_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

void TestRandomMemoryPlans() {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const size_t alignment = size_t{1} << (random() % 9);
    std::vector<Lifetime> lives(random() % 40);
    size_t sum = 0;
    std::vector<size_t> alive(64);
    for (Lifetime& life : lives) {
      life.bytes = random() % 5 == 0 ? 0 : random() % 1000;
      life.first = static_cast<int>(random() % 40);
      life.last = life.first + static_cast<int>(random() % 10);
      sum += RoundedUp(life.bytes, alignment);
      for (int t = life.first; t <= life.last; ++t) {
        alive[static_cast<size_t>(t)] += RoundedUp(life.bytes, alignment);
      }
    }
    const MemoryPlan plan = PlanMemory(lives, alignment);
    const size_t peak = *std::max_element(alive.begin(), alive.end());
    Expect(plan.total <= sum && plan.total >= peak, "a memory plan lies between the peak and the sum");
    for (size_t i = 0; i < lives.size(); ++i) {
      Expect(plan.offsets[i] % alignment == 0 && plan.offsets[i] + lives[i].bytes <= plan.total,
             "tensors are aligned and inside the workspace");
      for (size_t j = 0; j < i; ++j) {
        const bool meet = lives[i].first <= lives[j].last && lives[j].first <= lives[i].last;
        const bool overlap = plan.offsets[i] < plan.offsets[j] + lives[j].bytes &&
                             plan.offsets[j] < plan.offsets[i] + lives[i].bytes;
        Expect(!meet || !overlap, "tensors that are alive together do not overlap");
      }
    }
  }
}

void TestMemoryPlanOfChain() {
  std::vector<Lifetime> lives;
  for (int i = 0; i < 1000; ++i) lives.push_back({100, i, i + 1});
  Expect(PlanMemory(lives, 4).total == 200, "a chain alternates between two buffers");
}

void TestMemoryPlanOverflow() {
  constexpr size_t kMost = std::numeric_limits<size_t>::max();
  const std::vector<Lifetime> one = {{kMost - 3, 0, 0}}, two = {{kMost / 2 + 9, 0, 0}, {kMost / 2 + 9, 1, 1}};
  Expect(!ErrorOf([&] { PlanMemory(one, 256); }).empty(), "a size that overflows is refused");
  Expect(!ErrorOf([&] { PlanMemory(two, 256); }).empty(), "a sum that overflows is refused");
}

// ---- programs

std::vector<TensorShape> ShapesOf(const std::vector<Tensor>& tensors) {
  std::vector<TensorShape> shapes;
  for (const Tensor& tensor : tensors) shapes.push_back(tensor.shape);
  return shapes;
}

std::vector<Tensor> RunProgram(Program& program, const std::vector<Tensor>& inputs) {
  const auto plan = program.PlanFor(ShapesOf(inputs));
  std::vector<Tensor> outputs;
  std::vector<void*> externals;
  for (const Tensor& input : inputs) externals.push_back(const_cast<uint8_t*>(input.bytes.data()));
  for (const TensorShape& shape : plan->outputs) outputs.emplace_back(shape);
  for (Tensor& output : outputs) externals.push_back(output.bytes.data());
  program.Run(plan, externals, {});
  return outputs;
}

bool Equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Tensor& x, const Tensor& y) {
    return x.shape == y.shape && x.bytes == y.bytes;
  });
}

constexpr int64_t kChannels = 6;

// Values of shape [N, 6], a constant that broadcasts to it, and [N, 12] where two of them were joined.
struct RandomGraph {
  explicit RandomGraph(std::mt19937& random) : random_(random) {
    for (size_t i = 0; i < 1 + random() % 3; ++i) values_.push_back(builder.AddInput());
    values_.push_back(builder.AddConstant(RandomTensor({1, kChannels}, random)));
    for (size_t i = 0; i < 3 + random() % 30; ++i) AddNode();
    for (size_t i = 0; i < 1 + random() % 4; ++i) builder.graph.outputs.push_back(Pick());
    if (!wide_.empty() && random() % 2 == 0) builder.graph.outputs.push_back(wide_.back());
    if (random() % 4 == 0) builder.graph.outputs.push_back(builder.graph.inputs[0]);
    if (random() % 4 == 0) builder.graph.outputs.push_back(builder.graph.outputs[0]);
  }

  GraphBuilder builder;

 private:
  // One of the latest, so that most values are read.
  ValueId Pick() { return values_[values_.size() - 1 - random_() % std::min<size_t>(values_.size(), 6)]; }

  void AddNode() {
    switch (random_() % 6) {
      case 0:
        values_.push_back(builder.Lookup(Pick(), static_cast<uint8_t>(random_())));
        break;
      case 1:
        values_.push_back(builder.Lookup(builder.Lookup(Pick(), 1), 2));
        break;
      case 2:
      case 3:
        values_.push_back(builder.Add(Pick(), Pick()));
        break;
      case 4:
        values_.push_back(builder.Reshape(builder.Reshape(Pick(), {0, 2, 3}), {-1, kChannels}));
        break;
      default:
        wide_.push_back(builder.Lookup(
            builder.Concat({builder.graph.inputs[0], builder.Add(builder.graph.inputs[0], Pick())}), 3));
    }
  }

  std::mt19937& random_;
  std::vector<ValueId> values_, wide_;
};

void TestRandomGraphs() {
  std::mt19937 random(2);
  for (int round = 0; round < 200; ++round) {
    RandomGraph random_graph(random);
    const Graph& graph = random_graph.builder.graph;
    auto fake = std::make_shared<FakeBackend>();
    fake->fuses = round % 2 == 0;
    const auto on_fake = Program::Compile(graph, fake),
               on_cpu = Program::Compile(graph, CreateCpuBackend({}));
    for (const int64_t batch : {2, 1, 0, 5, 2}) {
      std::vector<Tensor> inputs;
      for (size_t i = 0; i < graph.inputs.size(); ++i)
        inputs.push_back(RandomTensor({batch, kChannels}, random));
      const std::vector<Tensor> expected = Evaluate(graph, inputs);
      Expect(Equal(RunProgram(*on_fake, inputs), expected), "a random graph, round " + std::to_string(round));
      Expect(Equal(RunProgram(*on_cpu, inputs), expected),
             "the same on the CPU, round " + std::to_string(round));
    }
    Expect(fake->faults == 0, "no step writes where another tensor of it lies");
  }
}

}  // namespace
}  // namespace lowbit::ep

int main() {
  using namespace lowbit::ep;
  TestRandomMemoryPlans();
  TestMemoryPlanOfChain();
  TestMemoryPlanOverflow();
  TestRandomGraphs();
  if (g_failures == 0) std::puts("ok");
  return g_failures == 0 ? 0 : 1;
}
