// The region compiler: memory plans, partitions, lowering, programs and the instances that run them.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <map>
#include <string_view>
#include <thread>

#include "ep/cpu/cpu_backend.h"
#include "ep/cpu/team.h"
#include "ep/region/channels.h"
#include "ep/region/channels_last.h"
#include "ep/region/codes.h"
#include "ep/region/compiled_model.h"
#include "ep/region/memory_plan.h"
#include "ep/region/partition.h"
#include "ep/region/planes.h"
#include "ep/region/step_times.h"
#include "ep/region/tune_region.h"
#include "ep/tests/fake_backend.h"
#include "ep/tests/graph_builder.h"
#include "python/std_thread_pool.h"

namespace lowbit::ep {
namespace {

// Under a sanitizer every tenth of many rounds of one kind is run: nothing is optimized and every access is
// checked, and what it finds in one round it finds in most.
#ifdef LOWBIT_SANITIZED
constexpr size_t kSparse = 10;
#else
constexpr size_t kSparse = 1;
#endif

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

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

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

std::vector<Tensor> RunProgram(Program& program, const std::vector<Tensor>& inputs,
                               ThreadPool* pool = nullptr) {
  const auto plan = program.PlanFor(ShapesOf(inputs));
  std::vector<Tensor> outputs;
  std::vector<void*> externals;
  for (const Tensor& input : inputs) externals.push_back(const_cast<uint8_t*>(input.bytes.data()));
  for (const TensorShape& shape : plan->outputs) outputs.emplace_back(shape);
  for (Tensor& output : outputs) externals.push_back(output.bytes.data());
  program.Run(plan, externals, {pool, nullptr});
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

  // Of as many rows as the input has.
  ValueId Sum() { return builder.Add(builder.graph.inputs[0], Pick()); }

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
        wide_.push_back(builder.Lookup(builder.Concat({builder.graph.inputs[0], Sum()}), 3));
        wide_.push_back(builder.Concat({Sum(), Sum()}, 0.25f));
        for (const ValueId part : builder.Split(wide_.back(), -1, {kChannels, kChannels}))
          values_.push_back(part);
    }
  }

  std::mt19937& random_;
  std::vector<ValueId> values_, wide_;
};

void TestRandomGraphs() {
  std::mt19937 random(2);
  for (size_t round = 0; round < 200 / kSparse; ++round) {
    RandomGraph random_graph(random);
    const Graph& graph = random_graph.builder.graph;
    auto fake = std::make_shared<FakeBackend>();
    fake->fuses = round % 2 == 0;
    fake->overwrites = round % 4 < 2;
    fake->stores = round % 3 > 0;
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

// Sizes that add up to `total`, 0 among them.
std::vector<int64_t> DrawParts(int64_t total, std::mt19937& random) {
  std::vector<int64_t> sizes;
  for (size_t i = random() % 4; i > 0; --i) {
    sizes.push_back(static_cast<int64_t>(random()) % (total + 1));
    total -= sizes.back();
  }
  sizes.push_back(total);
  return sizes;
}

// Random dims, cut along a random axis; parts are read, joined again, transposed, left unread, cut again or
// leave the region.
void TestParts() {
  std::mt19937 random(11);
  const auto draw = [&](int64_t most) { return 1 + static_cast<int64_t>(random()) % most; };
  for (int round = 0; round < 300; ++round) {
    GraphBuilder builder;
    const std::vector<int64_t> dims = {draw(3), draw(20), draw(3) * (random() % 2 == 0 ? 16 : draw(12))};
    ValueId x = builder.AddInput();
    if (random() % 4 != 0) x = builder.Lookup(x, 1);
    if (random() % 3 == 0) x = builder.Reshape(x, {-1, dims[1], dims[2]});
    const size_t axis = 1 + random() % 2;
    const std::vector<int64_t> sizes = DrawParts(dims[axis], random);
    const int64_t stated = static_cast<int64_t>(axis) - (random() % 2 == 0 ? 3 : 0);
    const std::vector<ValueId> parts = builder.Split(x, stated, sizes);
    std::vector<ValueId>& outputs = builder.graph.outputs;
    for (size_t i = 0; i < parts.size(); ++i) {
      switch (random() % 6) {
        case 0:
          outputs.push_back(parts[i]);
          break;
        case 1:
          break;
        case 2:
          outputs.push_back(builder.Lookup(builder.Transpose(parts[i], {0, 2, 1}), 3));
          break;
        case 3:
          for (const ValueId inner : builder.Split(parts[i], stated, DrawParts(sizes[i], random))) {
            outputs.push_back(builder.Lookup(inner, 4));
          }
          break;
        case 4: {
          const std::vector<int64_t> own =
              axis == 2 ? std::vector{dims[1], sizes[i]} : std::vector{sizes[i], dims[2]};
          const ValueId flat =
              own[0] * own[1] == 0 ? parts[i] : builder.Reshape(parts[i], {-1, own[0] * own[1]});
          outputs.push_back(flat == parts[i] ? flat : builder.Reshape(flat, {-1, own[0], own[1]}));
          break;
        }
        default:
          outputs.push_back(builder.Concat({parts[i], builder.Lookup(parts[i], 5)}));
      }
    }
    if (outputs.empty()) outputs.push_back(builder.Lookup(x, 6));
    if (random() % 5 == 0) outputs.push_back(x);
    const auto program = Program::Compile(builder.graph, CreateCpuBackend({}));
    for (const int64_t batch : {dims[0], int64_t{1}, int64_t{0}, int64_t{4}}) {
      const std::vector<Tensor> inputs = {RandomTensor({batch, dims[1], dims[2]}, random)};
      Expect(Equal(RunProgram(*program, inputs), Evaluate(builder.graph, inputs)),
             "parts of a Split, round " + std::to_string(round));
    }
    const auto backend = CreateCpuBackend({});
    const std::vector<uint8_t> kept =
        SaveCompiled(builder.graph, *Program::Compile(builder.graph, backend), *backend);
    const std::vector<Tensor> inputs = {RandomTensor(dims, random)};
    Expect(Equal(RunProgram(*LoadCompiled(kept, backend), inputs), Evaluate(builder.graph, inputs)),
           "a compiled model keeps which part is which");
  }
}

// Parts along the first dim that is not 1 lie in the whole: no step.
void TestPartsInPlace() {
  std::mt19937 random(12);
  GraphBuilder builder;
  const ValueId x = builder.Lookup(builder.AddInput(), 1);
  for (const ValueId part : builder.Split(x, 1, {2, 3}))
    builder.graph.outputs.push_back(builder.Lookup(part, 2));
  const auto program = Program::Compile(builder.graph, CreateCpuBackend({}));
  const auto steps = [&](const std::vector<int64_t>& dims) {
    const std::vector<Tensor> inputs = {RandomTensor(dims, random)};
    Expect(Equal(RunProgram(*program, inputs), Evaluate(builder.graph, inputs)), "parts in the whole");
    return program->PlanFor(ShapesOf(inputs))->steps.size();
  };
  Expect(steps({1, 5, 16}) == 3, "parts that lie in one piece are no steps");
  Expect(steps({2, 5, 16}) == 5, "parts that lie in two pieces are copied");
  Expect(steps({1, 5, 6}) == 4, "a part that is not aligned is copied");
  const std::string error = ErrorOf([&] { steps({1, 6, 16}); });
  Expect(Contains(error, "Split") && Contains(error, "have the sizes [2, 3]"),
         "parts that are not all: " + error);
}

// A block of YOLO: what its convolutions make lies in the tensor that joins it, and where they read a part of it.
void TestStoredChannels() {
  std::mt19937 random(13);
  GraphBuilder builder;
  const ValueId x = builder.AddInput(), whole = builder.Add(x, x);
  const std::vector<ValueId> parts = builder.Split(whole, -1, {2, 4});
  const ValueId sum = builder.Add(parts[1], parts[1]), last = builder.Add(sum, sum);
  builder.graph.outputs = {builder.Add(last, last), builder.Concat({whole, sum, last, last}, 0.25f)};
  const std::vector<Tensor> inputs = {RandomTensor({3, 6}, random)};
  for (const bool stores : {false, true}) {
    auto fake = std::make_shared<FakeBackend>();
    fake->stores = stores;
    const auto program = Program::Compile(builder.graph, fake);
    const auto plan = program->PlanFor(ShapesOf(inputs));
    Expect(plan->steps.size() == (stores ? 4 : 6), "what moves channels alone is no step");
    Expect(Equal(RunProgram(*program, inputs), Evaluate(builder.graph, inputs)),
           "channels are where they belong");
    Expect(fake->faults == 0, "no step writes where another tensor of it lies");
    const std::string text = plan->Json();
    Expect(Contains(text, "\"stores\"") == stores, "a plan says what is stored besides");
    if (!stores) continue;
    Expect(plan->steps[0].stores == 2 && plan->steps[0].output.at == plan->steps[1].fed[0].at,
           "a tensor that nobody reads is not stored by itself");
    Expect(plan->steps[1].stores == 1 && plan->steps[1].output.at == plan->steps[2].fed[0].at,
           "one that is read is");
  }
  auto few = std::make_shared<FakeBackend>();
  few->stores = true;
  builder.graph.outputs.push_back(builder.Concat({last, last}));  // four places of one tensor
  Expect(Equal(RunProgram(*Program::Compile(builder.graph, few), inputs), Evaluate(builder.graph, inputs)) &&
             few->faults == 0,
         "more places than a step has");
}

// Steps that read codes of so many bits, or, with 0, keep what they are fed.
class PlaneBackend final : public FakeBackend {
 public:
  std::map<const Step*, int> bits;
  double of_planes = 0.5;       // the time of a tensor in planes, where one of bytes has 1
  const Step* adder = nullptr;  // of two planes; where it reads bytes it adds none quickly

  int PlanesRead(const Step& step) const override { return bits.at(&step); }
  bool KeepsPlanes(const Step& step) const override { return bits.at(&step) == 0; }
  std::optional<double> Microseconds(const Step& step, std::span<const TensorShape>,
                                     const TensorPlanes& planes) const override {
    if (KeepsPlanes(step) && planes.x != planes.y) return std::nullopt;
    const double of_added = &step != adder ? 0 : planes.added == 0 ? 1 : planes.x > 0 ? of_planes : 4;
    return (planes.x > 0 ? of_planes : 1) + (planes.y > 0 ? of_planes : 1) + of_added;
  }
  bool AddsPlanes(const Step& step, int planes) const override { return &step == adder && planes == 2; }
};

// 0 -> a -> 1 -> pool -> 2 -> b -> 3 -> c -> 4
void TestPlanes() {
  const FakeCopyStep a, pool, b, c;
  const TensorShape shape{ElementType::kUInt8, {2, 3, 3, 64}};
  PlaneBackend backend;
  backend.bits = {{&a, 2}, {&pool, 0}, {&b, 2}, {&c, 1}};
  std::vector<bool> may = {false, true, true, true, false};
  std::vector<StepTensors> steps = {
      {&a, {shape}, {0}, 1}, {&pool, {shape}, {1}, 2}, {&b, {shape}, {2}, 3}, {&c, {shape}, {3}, 4}};
  const auto chosen = [&] { return ChoosePlanes(backend, steps, may); };
  Expect(chosen() == std::vector<int>{0, 2, 2, 1, 0}, "each tensor has the planes that its readers read");
  backend.of_planes = 2;
  Expect(chosen() == std::vector<int>(5), "planes that take longer");
  backend.of_planes = 0.5;
  steps[3].reads.push_back(2);  // residuals
  Expect(chosen() == std::vector<int>{0, 0, 0, 1, 0}, "residuals and what is pooled into them are bytes");
  backend.adder = &c;
  Expect(chosen() == std::vector<int>{0, 2, 2, 1, 0}, "unless they are added as planes, beside others");
  may[3] = false;
  Expect(chosen() == std::vector<int>(5), "which are none");
  may[3] = true;
  backend.adder = nullptr;
  steps[3].reads = {2};
  Expect(chosen() == std::vector<int>(5), "readers of different bits, and a tensor without any");
}

// Steps that read tensors with the channels last, those that make them.
class LastBackend final : public FakeBackend {
 public:
  std::set<const Step*> readers, makers, keepers, turners;

  bool MayReadChannelsLast(const Step& step, std::span<const TensorShape>, size_t) const override {
    return readers.count(&step) > 0;
  }
  bool MayMakeChannelsLast(const Step& step, std::span<const TensorShape>) const override {
    return makers.count(&step) > 0;
  }
  bool KeepsOrder(const Step& step) const override { return keepers.count(&step) > 0; }
  bool TurnsChannelsLast(const Step& step, std::span<const TensorShape>, size_t i) const override {
    return turners.count(&step) > 0 && i == 0;
  }
};

// 0 -> a -> 1 -> b -> 2 -> c -> 3, and 1 -> c.
void TestChannelsLast() {
  const FakeCopyStep a, b, c;
  const TensorShape shape{ElementType::kFloat, {2, 16, 3, 3}};
  LastBackend backend;
  backend.readers = {&b, &c};
  backend.makers = {&a, &b, &c};
  const std::vector<StepTensors> steps = {
      {&a, {shape}, {0}, 1}, {&b, {shape}, {1}, 2}, {&c, {shape, shape}, {2, 1}, 3}};
  std::vector<bool> may(4, true);
  using Chosen = std::vector<bool>;
  const auto chosen = [&] { return ChooseChannelsLast(backend, steps, may); };
  Expect(chosen() == Chosen{false, true, true, false}, "what is made and read by such steps alone");
  may[2] = false;
  Expect(chosen() == Chosen{false, true, false, false}, "but what may not");
  may[2] = true;
  backend.readers = {&b};
  Expect(chosen() == Chosen(4), "and not what one of its readers cannot read");
  backend.readers = {&b, &c};
  backend.makers = {&b};
  Expect(chosen() == Chosen{false, false, true, false}, "nor what its maker cannot make");
  backend.makers = {&a, &b, &c};
  backend.keepers = {&a, &b};
  Expect(chosen() == Chosen(4), "nor what a reader has in another order than its maker");
  backend.keepers = {&a, &b, &c};
  Expect(chosen() == Chosen{false, true, true, false}, "where all keep the order that ONNX has");
  backend.keepers = {&c};
  Expect(chosen() == Chosen(4), "a reader that keeps it");

  const std::vector<StepTensors> both = {{&a, {shape}, {0}, 1}, {&b, {shape}, {0}, 2}, {&c, {shape}, {1}, 3}};
  const auto turned = [&] { return ChooseTurned(backend, both, Chosen(4)); };
  backend.turners = {&a, &c};
  Expect(turned() == Chosen(4), "what one step alone would turn");
  backend.turners = {&a, &b, &c};
  Expect(turned() == Chosen{true, false, false, false}, "what two would turn is turned once");
}

// Blocks with a shortcut around each: the sums lie where the shortcuts did.
void TestOverwriting() {
  std::mt19937 random(3);
  GraphBuilder builder;
  ValueId sum = builder.Lookup(builder.AddInput(), 1);
  for (int i = 0; i < 3; ++i) sum = builder.Add(builder.Lookup(sum, 2), sum);
  const ValueId read_later = builder.Lookup(sum, 3);
  builder.graph.outputs = {builder.Add(builder.Add(builder.Lookup(sum, 4), read_later), read_later)};
  const std::vector<Tensor> inputs = {RandomTensor({64, kChannels}, random)};
  const std::vector<Tensor> expected = Evaluate(builder.graph, inputs);
  for (const bool overwrites : {false, true}) {
    auto fake = std::make_shared<FakeBackend>();
    fake->overwrites = overwrites;
    const auto program = Program::Compile(builder.graph, fake);
    Expect(Equal(RunProgram(*program, inputs), expected), "sums in the place of a term");
    const auto plan = program->PlanFor(ShapesOf(inputs));
    const auto over = std::count_if(plan->steps.begin(), plan->steps.end(), [](const PlannedStep& step) {
      return step.fed.size() == 2 && step.output.kind == Location::Kind::kWorkspace &&
             step.fed[1].kind == Location::Kind::kWorkspace && step.output.at == step.fed[1].at;
    });
    // Not the last two: a term that is read again, and an output of the region.
    Expect(over == (overwrites ? 3 : 0), "where a term is read for the last time, its place is taken");
    Expect(fake->faults == 0, "no step writes where another tensor of it lies");
  }
}

// Steps that one launch does share no memory but what the one hands to the other.
void TestStepsTogether() {
  std::mt19937 random(5);
  GraphBuilder builder;
  ValueId value = builder.Lookup(builder.AddInput(), 1);
  for (uint8_t i = 0; i < 5; ++i) {  // a block: its sum is read by the next one's lookup and its sum
    const ValueId inner = builder.Lookup(builder.Lookup(value, i), 2);
    value = builder.Add(inner, value);
  }
  builder.graph.outputs = {builder.Lookup(value, 7), value};
  const std::vector<Tensor> inputs = {RandomTensor({64, kChannels}, random)};
  const std::vector<Tensor> expected = Evaluate(builder.graph, inputs);
  for (const bool joins : {false, true}) {
    for (const bool overwrites : {false, true}) {
      auto fake = std::make_shared<FakeBackend>();
      fake->joins = joins;
      fake->overwrites = overwrites;
      const auto program = Program::Compile(builder.graph, fake);
      Expect(Equal(RunProgram(*program, inputs), expected), "steps in one launch");
      const auto plan = program->PlanFor(ShapesOf(inputs));
      size_t together = 0;
      for (size_t i = 0; i < plan->steps.size(); ++i) {
        if (plan->steps[i].with_next == nullptr) continue;
        ++together;
        Expect(plan->steps[i + 1].fed.size() == 1 && plan->steps[i + 1].with_next == nullptr,
               "the second of two is fed by the first alone, and goes with no third");
      }
      // Two lookups, then a sum and the lookup behind it, and so on.
      Expect(together == (joins ? 6 : 0), "every pair that can go together does");
      Expect(joins == (plan->Text().find("fake together with the last") != std::string::npos),
             "the plan says so");
      Expect(fake->faults == 0, "no launch writes where another tensor of it lies");
    }
  }
}

// The same of three, where nobody else reads what the first one makes.
void TestStepsInThrees() {
  std::mt19937 random(6);
  GraphBuilder builder;
  ValueId value = builder.Lookup(builder.AddInput(), 1);
  std::vector<ValueId> leaving;
  constexpr uint8_t kBlocks = 8;
  for (uint8_t i = 0; i < kBlocks; ++i) {
    // Of every second block the sum adds what the step before it reads.
    const ValueId before = i % 2 == 0 ? builder.Lookup(value, i) : value;
    const ValueId inner = builder.Lookup(before, 2);
    if (i == 4) leaving.push_back(inner);  // somebody else reads it
    value = builder.Lookup(builder.Add(inner, value), 3);
  }
  leaving.push_back(value);
  builder.graph.outputs = leaving;
  const std::vector<Tensor> inputs = {RandomTensor({64, kChannels}, random)};
  const std::vector<Tensor> expected = Evaluate(builder.graph, inputs);
  for (const bool overwrites : {false, true}) {
    auto fake = std::make_shared<FakeBackend>();
    fake->joins_three = true;
    fake->overwrites = overwrites;
    const auto program = Program::Compile(builder.graph, fake);
    Expect(Equal(RunProgram(*program, inputs), expected), "three steps in one launch");
    const auto plan = program->PlanFor(ShapesOf(inputs));
    size_t threes = 0;
    for (size_t i = 0; i < plan->steps.size(); ++i) {
      const PlannedStep& step = plan->steps[i];
      if (step.with_next == nullptr) continue;
      const bool is_three = step.together == 3;
      threes += is_three ? 1 : 0;
      Expect(LauncherOf(plan->steps, i) == (i > 0 && plan->steps[i - 1].together == 3 ? i - 1 : i),
             "two steps count for nothing where three have one launch");
      if (is_three)
        Expect(LauncherOf(plan->steps, i + 1) == i && LauncherOf(plan->steps, i + 2) == i, "one launch");
    }
    // Where the sum takes the place of what the first one reads they are apart.
    Expect(threes == (overwrites ? kBlocks / 2 - 1 : kBlocks - 1), "every three that can go together does");
    Expect(plan->Text().find("fake together with the next two") != std::string::npos, "the plan says so");
    Expect(fake->faults == 0, "no launch writes where another tensor of it lies");
  }
}

// y = Lookup(x), two lookups more behind it.
struct Chain {
  GraphBuilder builder;
  Chain() {
    ValueId value = builder.AddInput();
    for (uint8_t i = 0; i < 3; ++i) value = builder.Lookup(value, i);
    builder.graph.outputs = {value};
  }
};

void TestErrorsNameTheNode() {
  GraphBuilder builder;
  const ValueId a = builder.AddInput(), b = builder.AddInput();
  builder.graph.outputs = {builder.Add(a, b)};
  const auto program = Program::Compile(builder.graph, CreateCpuBackend({}));
  const auto plan = [&](std::vector<TensorShape> shapes) {
    return ErrorOf([&] { program->PlanFor(shapes); });
  };
  const TensorShape sound = {ElementType::kUInt8, {2, 3}};
  Expect(plan({sound, sound}).empty(), "shapes that fit");
  Expect(Contains(plan({sound, {ElementType::kUInt8, {2, 4}}}), "node 'LowBitAdd_0' (LowBitAdd)"),
         "another shape");
  Expect(Contains(plan({sound, {ElementType::kFloat, {2, 3}}}), "LowBitAdd_0"), "another element type");
  Expect(Contains(plan({sound}), "2 inputs"), "too few inputs");
  Expect(!plan({sound, {ElementType::kUInt8, {2, -3}}}).empty(), "a negative dim");
  constexpr int64_t kHuge = int64_t{1} << 61;
  Expect(!plan({sound, {ElementType::kFloat, {kHuge}}}).empty(), "more bytes than int64 counts");

  builder.graph.values[static_cast<size_t>(builder.graph.outputs[0])].type = ElementType::kFloat;
  const auto wrong = Program::Compile(builder.graph, CreateCpuBackend({}));
  const std::vector<TensorShape> shapes = {sound, sound};
  Expect(Contains(ErrorOf([&] { wrong->PlanFor(shapes); }), "declares an output of type float32"),
         "ONNX Runtime would allocate the output by the type that the model declares");
}

void TestDamagedGraphs() {
  const auto compile = [](const Graph& graph) {
    return ErrorOf([&] { Program::Compile(graph, CreateCpuBackend({})); });
  };
  const Chain chain;
  Expect(compile(chain.builder.graph).empty(), "a sound graph");
  Graph graph = chain.builder.graph;
  graph.nodes[1].inputs[0] = 1000;
  Expect(!compile(graph).empty(), "an input that is no value");
  graph = chain.builder.graph;
  std::swap(graph.nodes[0], graph.nodes[1]);
  Expect(Contains(compile(graph), "before anything makes it"), "nodes out of order");
  graph = chain.builder.graph;
  graph.nodes[1].outputs = graph.nodes[0].outputs;
  Expect(!compile(graph).empty(), "a value that two nodes make");
  graph = chain.builder.graph;
  graph.nodes[0].inputs = {kAbsent, graph.nodes[0].inputs[1]};
  Expect(Contains(compile(graph), "is missing"), "a missing input");
  graph = chain.builder.graph;
  graph.nodes[0].inputs = {graph.nodes[0].inputs[1]};
  Expect(!compile(graph).empty(), "too few inputs");
  graph = chain.builder.graph;
  graph.nodes[0].attributes["needs_version"] = int64_t{99};
  Expect(Contains(compile(graph), "update lowbit"), "a node of a newer lowbit");
  graph.nodes[0].attributes["needs_version"] = std::string("1");
  Expect(Contains(compile(graph), "is not an int"), "a version that is no number");
  graph = chain.builder.graph;
  graph.nodes[0].attributes["hint"] = int64_t{99};
  Expect(compile(graph).empty(), "an attribute that only a newer lowbit knows");
  graph = chain.builder.graph;
  graph.outputs.push_back(kAbsent);
  Expect(!compile(graph).empty(), "an output that is no value");
  graph = chain.builder.graph;
  graph.inputs.clear();
  graph.values[static_cast<size_t>(graph.nodes[0].inputs[0])].is_outer = true;
  Expect(Contains(compile(graph), "is no input of the region"), "a node that reads what nobody gives");
}

void TestFusion() {
  const Chain chain;
  auto fake = std::make_shared<FakeBackend>();
  fake->fuses = true;
  const auto program = Program::Compile(chain.builder.graph, fake);
  std::mt19937 random(3);
  const std::vector<Tensor> inputs = {RandomTensor({4, 100}, random)};
  Expect(program->PlanFor(ShapesOf(inputs))->steps.size() == 2, "two of three lookups become one step");
  Expect(Equal(RunProgram(*program, inputs), Evaluate(chain.builder.graph, inputs)), "a fused pair");

  Graph graph = chain.builder.graph;
  graph.outputs.push_back(graph.nodes[0].outputs[0]);
  const auto shared = Program::Compile(graph, fake);
  Expect(Contains(shared->PlanFor(ShapesOf(inputs))->Text(), "node 'LowBitLookup_1' (LowBitLookup) and node"),
         "what is read elsewhere is made, the next two are fused");
  Expect(Equal(RunProgram(*shared, inputs), Evaluate(graph, inputs)), "a pair behind an output");
}

// ---- instances

struct FusesAll final : FakeBackend {
  bool Fuses(const Graph&, std::span<const Node* const> nodes, const Node&) const override {
    return nodes.size() < most;
  }
  size_t most = 2;  // nodes of a step
};

void TestFusionOfSeveral() {
  const Chain chain;
  Graph graph = chain.builder.graph;
  FusesAll backend;
  for (const size_t most : {1, 2, 3, 4}) {
    backend.most = most;
    const std::vector<LoweredOp> ops = Lower(graph, backend);
    const size_t nodes = graph.nodes.size();
    Expect(ops.size() == (nodes + most - 1) / most, "as many nodes a step as the back end fuses");
    size_t next = 0;
    for (const LoweredOp& op : ops) {
      Expect(op.fed == std::vector<ValueId>{graph.nodes[next].inputs[0]}, "fed what its first node is");
      for (const Node* const node : op.nodes) Expect(node == &graph.nodes[next++], "in order");
      Expect(op.output == graph.nodes[next - 1].outputs[0], "makes what its last node does");
    }
  }
  graph.outputs.push_back(graph.nodes[1].outputs[0]);
  Expect(Lower(graph, backend).front().nodes.size() == 2, "what is read elsewhere is made");
}

void TestFusionThroughAnyInput() {
  std::mt19937 random(5);
  for (const bool is_first : {true, false}) {
    GraphBuilder builder;
    const ValueId a = builder.AddInput(), b = builder.AddInput(), made = builder.Lookup(a, 1),
                  other = builder.Concat({b});
    builder.graph.outputs = {is_first ? builder.Add(made, other) : builder.Add(other, made)};
    const std::vector<LoweredOp> ops = Lower(builder.graph, FusesAll());
    Expect(ops.size() == 2 && ops.front().output == other, "a pair stands where its second node does");
    Expect(ops.back().fed == std::vector<ValueId>{a, other}, "fed what its first node is, then the rest");

    auto fake = std::make_shared<FakeBackend>();
    fake->fuses = true;
    const std::vector<Tensor> inputs = {RandomTensor({3, 7}, random), RandomTensor({3, 7}, random)};
    Expect(Equal(RunProgram(*Program::Compile(builder.graph, fake), inputs), Evaluate(builder.graph, inputs)),
           "a pair that is fed through either input");
  }
  GraphBuilder builder;
  const ValueId a = builder.AddInput(), made = builder.Lookup(a, 1);
  builder.graph.outputs = {builder.Add(made, made)};
  Expect(Lower(builder.graph, FusesAll()).size() == 2, "what is read twice is made");
}

void TestFusionOfBothInputs() {
  for (const bool is_first : {true, false}) {
    GraphBuilder builder;
    const ValueId a = builder.AddInput(), b = builder.AddInput(), of_a = builder.Lookup(a, 1),
                  of_b = builder.Lookup(builder.Lookup(b, 2), 3);
    const ValueId sum = is_first ? builder.Add(of_a, of_b) : builder.Add(of_b, of_a);
    builder.graph.outputs = {sum};
    FusesAll backend;
    for (const size_t most : {2, 3, 4}) {
      backend.most = most;
      const std::vector<LoweredOp> ops = Lower(builder.graph, backend);
      Expect(ops.size() == (most < 4 ? 2 : 1) && ops.back().output == sum,
             "two groups join if both fit a step");
      for (const LoweredOp& op : ops) {
        Expect(op.nodes.size() == builder.graph.nodes.size() / ops.size(), "none is left out");
        Expect(std::is_sorted(op.nodes.begin(), op.nodes.end()), "in the graph's order");
      }
    }
    Expect(Lower(builder.graph, backend).front().fed == std::vector<ValueId>{a, b},
           "fed what both groups are");
  }
}

void TestPlansAreBounded() {
  const Chain chain;
  auto fake = std::make_shared<FakeBackend>();
  const auto program = Program::Compile(chain.builder.graph, fake);
  std::mt19937 random(4);
  for (int round = 0; round < 3; ++round) {
    for (int64_t batch = 1; batch <= 50; ++batch) RunProgram(*program, {RandomTensor({batch, 10}, random)});
  }
  Expect(fake->live == 16 && fake->most_live <= 17, "50 shapes hold the instances of 16");
  const std::vector<Tensor> inputs = {RandomTensor({1, 10}, random)};
  const size_t before = fake->created;
  for (int i = 0; i < 100; ++i) RunProgram(*program, inputs);
  Expect(fake->created == before + 1, "new buffers need no new instance");
  std::weak_ptr<const RegionPlan> dropped = program->PlanFor(ShapesOf(inputs));
  const auto held = dropped.lock();
  for (int64_t batch = 2; batch <= 50; ++batch) RunProgram(*program, {RandomTensor({batch, 10}, random)});
  Expect(fake->live == 17, "a plan that is held keeps its instance");
}

// A plan that stands for one of several configurations of a step.
struct ChoicePlan final : StepPlan {
  ChoicePlan(size_t of, size_t bytes) : choice(of), scratch(bytes) {}
  size_t WorkspaceBytes() const override { return scratch; }
  std::string Text() const override { return std::to_string(choice); }
  size_t choice, scratch;
};

// Five steps in three groups. A second configuration is worth 1, but step 1 loses more than that by it where
// step 0 has its second one; of a third one not every step of a group has the scratch memory that it wants; a
// fourth is fast in every other look only.
void TestTuning() {
  const auto plan_of = [] {
    RegionPlan plan;
    for (size_t i = 0; i < 5; ++i)
      plan.steps.emplace_back().plan = std::make_shared<ChoicePlan>(0, size_t{64});
    return plan;
  };
  const auto groups_of = [] { return std::vector<TunedSteps>{{{0, 3}, 3}, {{1}, 4}, {{2, 4}, 4}}; };
  const auto choice_of = [](const RegionPlan& plan, size_t step) {
    return static_cast<const ChoicePlan&>(*plan.steps[step].plan).choice;
  };
  const auto plan_again = [](const TunedSteps&, size_t step, size_t choice) {
    return std::make_shared<const ChoicePlan>(choice, choice == 2 && step > 0 ? size_t{65} : size_t{64});
  };
  int timed = 0;
  const auto time = [&](const RegionPlan& plan) {
    ++timed;
    const double times[] = {10, 9, 1, timed % 2 == 0 ? 9.99 : 2.0};
    double sum = 0;
    for (size_t i = 0; i < plan.steps.size(); ++i) sum += times[choice_of(plan, i)];
    return sum + (choice_of(plan, 0) == 1 && choice_of(plan, 1) == 1 ? 1.6 : 0);
  };
  RegionPlan plan = plan_of();
  std::vector<TunedSteps> groups = groups_of();
  TuneRegion(plan, groups, plan_again, time, std::chrono::seconds(60));
  Expect(groups[0].chosen == 1 && groups[1].chosen == 0 && groups[2].chosen == 1, "what pays for the whole");
  Expect(groups[0].tried > 0 && groups[2].tried > 0, "that it was tried is said");
  for (const TunedSteps& group : groups) {
    for (const size_t step : group.steps)
      Expect(choice_of(plan, step) == group.chosen, "the steps of a group follow it");
  }

  plan = plan_of();
  groups = groups_of();
  timed = 0;
  TuneRegion(plan, groups, plan_again, time, std::chrono::seconds(0));
  Expect(timed == 1 && choice_of(plan, 0) == 0 && groups[0].chosen == 0 && groups[0].tried == 0,
         "no patience, nothing tried");

  plan = plan_of();
  groups = groups_of();
  bool thrown = false;
  try {
    TuneRegion(
        plan, groups, plan_again,
        [&](const RegionPlan& trial) {
          Require(choice_of(trial, 1) == 0, "out of memory");
          return time(trial);
        },
        std::chrono::seconds(60));
  } catch (const Error&) {
    thrown = true;
  }
  Expect(thrown && choice_of(plan, 0) == 0, "what fails leaves the plan as it was");

  // Together is faster for the first two steps, with the second of two ways.
  plan = plan_of();
  std::vector<TunedSteps> pairs = {{{0}, 3, 0, true}, {{2}, 2, 0, true}};
  TuneRegion(
      plan, pairs,
      [](const TunedSteps&, size_t, size_t choice) {
        return choice == 0 ? nullptr : std::make_shared<const ChoicePlan>(choice, size_t{0});
      },
      [](const RegionPlan& trial) {
        const StepPlan* const first = trial.steps[0].with_next.get();
        const double gain = first == nullptr ? 0 : static_cast<const ChoicePlan*>(first)->choice;
        return 10.0 - gain + (trial.steps[2].with_next != nullptr ? 1 : 0);
      },
      std::chrono::seconds(60));
  Expect(pairs[0].chosen == 2 && pairs[1].chosen == 0 && plan.steps[0].with_next != nullptr &&
             plan.steps[2].with_next == nullptr,
         "steps that are faster together go together");

  // 0.2 % are too little for each, not for all; the last one is slower together.
  const auto together_of = [](const TunedSteps&, size_t, size_t choice) {
    return choice == 0 ? nullptr : std::make_shared<const ChoicePlan>(choice, size_t{0});
  };
  const auto time_of_all = [](const RegionPlan& trial) {
    double sum = 1000;
    for (size_t i = 0; i < 5; ++i) {
      if (trial.steps[i].with_next != nullptr) sum += i == 4 ? 4 : -2;
    }
    return sum;
  };
  const auto many_of = [](size_t estimated) {
    std::vector<TunedSteps> groups;
    for (size_t i = 0; i < 5; ++i) groups.push_back({{i}, 2, 0, true, 0, estimated});
    return groups;
  };
  plan = plan_of();
  std::vector<TunedSteps> many = many_of(1);
  TuneRegion(plan, many, together_of, time_of_all, std::chrono::seconds(60));
  for (size_t i = 0; i < 5; ++i) {
    Expect(many[i].chosen == (i < 4 ? 1 : 0) && (plan.steps[i].with_next != nullptr) == (i < 4) &&
               many[i].tried > 0,
           "what is estimated is tried for all at once");
  }
  plan = plan_of();
  many = many_of(0);
  TuneRegion(plan, many, together_of, time_of_all, std::chrono::seconds(60));
  Expect(many[0].chosen == 0 && plan.steps[0].with_next == nullptr, "what is not estimated is tried alone");
}

void TestProgramMayDieBeforeItsPlans() {
  auto fake = std::make_shared<FakeBackend>();
  std::shared_ptr<const RegionPlan> plan;
  {
    const Chain chain;
    const auto program = Program::Compile(chain.builder.graph, fake);
    std::mt19937 random(5);
    const std::vector<Tensor> inputs = {RandomTensor({4, 4}, random)};
    plan = program->PlanFor(ShapesOf(inputs));
    RunProgram(*program, inputs);
  }
  Expect(fake->live == 1 && !plan->Text().empty(), "a plan owns what it refers to");
  plan.reset();
  Expect(fake->live == 0, "the last one frees the instance");
}

// Several are created at once; one that lacked memory beside the others does not alone.
void TestStepsThatFailBesideOthers() {
  std::mt19937 random(31);
  GraphBuilder builder;
  ValueId value = builder.AddInput();
  constexpr int kSteps = 12;
  for (int i = 0; i < kSteps; ++i) value = builder.Lookup(value, i);
  builder.graph.outputs.push_back(value);
  const auto backend = std::make_shared<FakeBackend>();
  backend->failing_steps = 1;
  const auto program = Program::Compile(builder.graph, backend);
  const std::vector<Tensor> inputs = {RandomTensor({3, kChannels}, random)};
  Expect(Equal(RunProgram(*program, inputs), Evaluate(builder.graph, inputs)), "all steps are there");
  backend->failing_steps = 2 * kSteps;
  const std::string error = ErrorOf([&] { Program::Compile(builder.graph, backend); });
  Expect(Contains(error, "out of memory") && Contains(error, builder.graph.nodes[0].name),
         "the first step that fails is named: " + error);
}

void TestInstanceOrder() {
  const Chain chain;
  auto fake = std::make_shared<FakeBackend>();
  const auto program = Program::Compile(chain.builder.graph, fake);
  std::mt19937 random(6);
  const std::vector<Tensor> inputs = {RandomTensor({3, 3}, random)};
  RunProgram(*program, inputs);
  RunProgram(*program, inputs);
  Expect(fake->created == 1, "an idle instance serves again");
  fake->busy_runs = 1;
  for (int i = 0; i < 10; ++i) RunProgram(*program, inputs);
  Expect(fake->created == 3, "while they are busy, instances are added up to the bound, then queued on");
}

void TestInstancesThatCannotBeCreated() {
  const Chain chain;
  auto fake = std::make_shared<FakeBackend>();
  fake->fail_above = 0;
  const auto program = Program::Compile(chain.builder.graph, fake);
  std::mt19937 random(7);
  const std::vector<Tensor> inputs = {RandomTensor({3, 3}, random)};
  Expect(ErrorOf([&] { RunProgram(*program, inputs); }) == "out of memory",
         "the first instance must be there");
  fake->fail_above = 1;
  const std::vector<Tensor> expected = Evaluate(chain.builder.graph, inputs);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) wrong += Equal(RunProgram(*program, inputs), expected) ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  Expect(wrong == 0 && fake->faults == 0 && fake->live == 1, "threads share what the memory allows");
}

void TestMemoryOfOtherShapes() {
  const Chain chain;
  auto fake = std::make_shared<FakeBackend>();
  fake->fail_above = 2;
  const auto program = Program::Compile(chain.builder.graph, fake);
  std::mt19937 random(14);
  for (int64_t batch = 1; batch <= 3; ++batch) {
    const std::vector<Tensor> inputs = {RandomTensor({batch, 3}, random)};
    Expect(Equal(RunProgram(*program, inputs), Evaluate(chain.builder.graph, inputs)),
           "a new shape finds memory");
  }
  Expect(fake->live == 1, "the instances of other shapes made room");
  RunProgram(*program, {RandomTensor({3, 3}, random)});
  Expect(fake->created == 3, "the plan that needed it stays");
}

void TestConcurrentRuns() {
  std::mt19937 random(8);
  RandomGraph random_graph(random);
  const Graph& graph = random_graph.builder.graph;
  auto fake = std::make_shared<FakeBackend>();
  const auto on_fake = Program::Compile(graph, fake), on_cpu = Program::Compile(graph, CreateCpuBackend({}));
  std::vector<std::vector<Tensor>> inputs, expected;
  for (int64_t batch = 1; batch <= 20; ++batch) {
    std::vector<Tensor> tensors;
    for (size_t i = 0; i < graph.inputs.size(); ++i)
      tensors.push_back(RandomTensor({batch, kChannels}, random));
    expected.push_back(Evaluate(graph, tensors));
    inputs.push_back(std::move(tensors));
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < 300; ++i) {
        const size_t at = t % 2 == 0 ? (i * (t + 1)) % inputs.size() : i % 3;
        Program& program = i % 2 == 0 ? *on_fake : *on_cpu;
        wrong += Equal(RunProgram(program, inputs[at]), expected[at]) ? 0 : 1;
        if (i % 50 == t) ++fake->busy_runs;
        if (i % 50 == t + 10) --fake->busy_runs;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Expect(wrong == 0, "runs of many threads and shapes");
  Expect(fake->faults == 0, "no two runs share an instance");
}

// ---- teams. Of fewer threads than members each is several members, one after the other.

void TestTeam() {
  std::mt19937 random(15);
  for (const size_t threads : {1, 2, 3, 8}) {
    for (const size_t members : {1, 2, 8, 40}) {
      // None are thought to come, fewer than do, or more.
      const size_t told = random() % 3 == 0 ? 0 : 1 + random() % 12;
      StdThreadPool pool(threads);
      size_t runs = 0;
      bool all_once = true;
      Team::Run(pool, members, told, [&](ThreadPool& team) {
        ++runs;
        for (size_t round = 0; round < 300 / kSparse; ++round) {
          // Each item of a loop reads what the loop before made.
          const size_t count = random() % (round % 10 == 0 ? 2000 : 12);
          std::vector<size_t> before(count, round), made(count);
          team.ParallelFor(count, [&](size_t i) { before[i] += i; });
          team.ParallelFor(count, [&](size_t i) { made[i] += before[count - 1 - i]; });
          for (size_t i = 0; i < count; ++i) all_once = all_once && made[i] == round + count - 1 - i;
          // Others fall asleep meanwhile.
          if (round % 100 == 50) std::this_thread::sleep_for(std::chrono::milliseconds(3));
        }
      });
      Expect(runs == 1, "one member leads");
      Expect(all_once, "every item of a loop runs once, before the next loop");
    }
  }
}

// Whoever is held up in an item leaves the rest of its share to the others, the leader too.
void TestSharesOfOthers() {
  constexpr size_t kMembers = 4, kItems = 40;
  StdThreadPool pool(kMembers);
  for (size_t held = 0; held < kItems; held += kItems / kMembers) {
    const size_t came = Team::Run(pool, kMembers, 0, [&](ThreadPool& team) {
      std::atomic<size_t> done{0};
      team.ParallelFor(kItems, [&](size_t i) {
        while (i == held && done.load() != kItems - 1) std::this_thread::yield();
        ++done;
      });
    });
    Expect(came > 1 && came <= kMembers, "members are counted");
  }
  InlineThreadPool alone;
  const size_t came =
      Team::Run(alone, kMembers, 0, [&](ThreadPool& team) { team.ParallelFor(9, [](size_t) {}); });
  Expect(came == 1, "who finds the region over does not count");
}

void TestFailuresInTeams() {
  StdThreadPool pool(3);
  std::atomic<size_t> called{0};
  const auto fails = [&](size_t count, size_t at) {
    return ErrorOf([&] {
      Team::Run(pool, 4, 0, [&](ThreadPool& team) {
        team.ParallelFor(count, [&](size_t i) {
          ++called;
          Require(i != at, "item ", i);
        });
        team.ParallelFor(count, [&](size_t) { called += 1000; });
      });
    });
  };
  for (const size_t count : {1, 2, 50}) {
    for (size_t at = 0; at < count; ++at) {
      called = 0;
      Expect(Contains(fails(count, at), "item " + std::to_string(at)),
             "the leader throws what an item threw");
      Expect(called >= 1 && called <= count, "nothing runs behind a failed loop");
    }
  }
  Expect(fails(50, 50).empty(), "a failure leaves nothing behind");
  Expect(ErrorOf([&] { Team::Run(pool, 4, 0, [](ThreadPool&) { Require(false, "body"); }); }) == "body",
         "what a body throws ends the team");
}

// The second run of a region is a team's.
void TestRunsInTeams() {
  GraphBuilder builder;
  const ValueId x = builder.AddInput();
  ValueId y = x;
  for (int32_t i = 0; i < 6; ++i) y = builder.Add(builder.Lookup(y, i), x);
  builder.graph.outputs = {y};
  const auto program = Program::Compile(builder.graph, CreateCpuBackend({.threads = 4}));
  std::mt19937 random(16);
  StdThreadPool pool(3);
  for (int round = 0; round < 8; ++round) {
    const std::vector<Tensor> inputs = {RandomTensor({20000, kChannels}, random)};
    Expect(Equal(RunProgram(*program, inputs, &pool), Evaluate(builder.graph, inputs)), "a region in a team");
  }
}

// ---- compiled models

void TestCompiledModels() {
  std::mt19937 random(9);
  for (int round = 0; round < 50; ++round) {
    RandomGraph random_graph(random);
    const Graph& graph = random_graph.builder.graph;
    auto saving = std::make_shared<FakeBackend>(), loading = std::make_shared<FakeBackend>();
    saving->fuses = loading->fuses = round % 2 == 0;
    loading->adopted.clear();
    const auto program = Program::Compile(graph, saving);
    std::vector<uint8_t> bytes = SaveCompiled(graph, *program, *saving);
    bytes.insert(bytes.begin(), 0);  // at an odd address
    const auto loaded = LoadCompiled(std::span(bytes).subspan(1), loading);
    Expect(loading->steps_packed == 0 && loading->steps_from_packed == saving->steps_packed,
           "what was packed is not packed again");
    Expect(loading->adopted == "choices", "measured choices travel along");
    std::vector<Tensor> inputs;
    for (size_t i = 0; i < graph.inputs.size(); ++i) inputs.push_back(RandomTensor({3, kChannels}, random));
    Expect(Equal(RunProgram(*loaded, inputs), Evaluate(graph, inputs)), "a compiled model computes the same");
    Expect(SaveCompiled(graph, *loaded, *loading) == std::vector(bytes.begin() + 1, bytes.end()),
           "a loaded program is saved as it was");

    const auto on_cpu = CreateCpuBackend({});
    const auto cpu_bytes = SaveCompiled(graph, *Program::Compile(graph, on_cpu), *on_cpu);
    Expect(Equal(RunProgram(*LoadCompiled(cpu_bytes, on_cpu), inputs), Evaluate(graph, inputs)),
           "the same on the CPU");
  }
}

std::vector<ConstTensor> ConstantsOf(const Graph& graph) {
  std::vector<ConstTensor> constants;
  for (const ValueId id : WeightsOf(graph))
    constants.push_back(*graph.values[static_cast<size_t>(id)].constant);
  return constants;
}

void TestWeightlessModels() {
  std::mt19937 random(19);
  for (int round = 0; round < 20; ++round) {
    RandomGraph random_graph(random);
    const Graph& graph = random_graph.builder.graph;
    std::vector<Tensor> inputs;
    for (size_t i = 0; i < graph.inputs.size(); ++i) inputs.push_back(RandomTensor({3, kChannels}, random));
    const auto fake = std::make_shared<FakeBackend>();
    for (const std::shared_ptr<Backend>& backend : {std::shared_ptr<Backend>(fake), CreateCpuBackend({})}) {
      const auto loaded = LoadCompiled(SaveWeightless(graph, *backend), backend, ConstantsOf(graph));
      Expect(Equal(RunProgram(*loaded, inputs), Evaluate(graph, inputs)),
             "a weightless model computes the same");
    }
    Expect(fake->steps_from_packed == 0, "a weightless model holds nothing packed");
  }

  GraphBuilder builder;
  builder.graph.outputs = {builder.Lookup(builder.AddInput(), 1)};
  const auto backend = std::make_shared<FakeBackend>();
  const auto bytes = SaveWeightless(builder.graph, *backend);
  const auto load = [&](const std::vector<ConstTensor>& weights) {
    return ErrorOf([&] { LoadCompiled(bytes, backend, weights); });
  };
  const std::vector<ConstTensor> weights = ConstantsOf(builder.graph);
  Expect(load(weights).empty(), "its own weights");
  Expect(Contains(load({}), "brings 0 weights"), "no weights");
  Expect(Contains(load({weights[0], weights[0]}), "1 weights more"), "too many weights");
  std::vector<uint8_t> table(256, 7);
  Expect(Contains(load({{ElementType::kUInt8, {256}, table.data()}}), "was changed"), "other weights");
  Expect(Contains(load({{ElementType::kUInt8, {16, 16}, weights[0].data}}), "was changed"), "another shape");
  Expect(Contains(load({{ElementType::kInt8, {256}, weights[0].data}}), "was changed"), "another type");
}

void TestForeignCompiledModels() {
  const Chain chain;
  auto fake = std::make_shared<FakeBackend>();
  const auto bytes = SaveCompiled(chain.builder.graph, *Program::Compile(chain.builder.graph, fake), *fake);
  const auto load = [&](std::span<const uint8_t> what) { return ErrorOf([&] { LoadCompiled(what, fake); }); };
  Expect(load(bytes).empty(), "its own fingerprint");
  fake->fingerprint = "fake 2";
  const std::string error = load(bytes);
  Expect(Contains(error, "'fake 1'") && Contains(error, "'fake 2'") && Contains(error, "again"),
         "another fingerprint");
  Expect(WhyUnfit("cuda sm_90, lowbit 0.1.0, kernels 1f", "cuda sm_90, lowbit 0.1.0, kernels 1f").empty(),
         "nothing differs");
  for (const auto& [compiled, what] :
       {std::pair{"cuda sm_80, lowbit 0.1.0, kernels 1f", "(another kind of device)"},
        {"cuda sm_90, lowbit 0.2.0, kernels 1f", "(another release of lowbit)"},
        {"cuda sm_90, lowbit 0.1.0, kernels 2f", "(another build of the kernels"},
        {"cuda sm_90, lowbit 0.1.0, kernels 1f, reference",
         "(another build of the kernels, or another option"},
        {"cpu, lowbit 0.2.0", "(another kind of device, another release of lowbit, another build"},
        {"", "(another kind of device, another release of lowbit, another build"}})
    Expect(Contains(WhyUnfit(compiled, "cuda sm_90, lowbit 0.1.0, kernels 1f"), what), what);
  std::vector<uint8_t> newer = bytes;
  newer[8] = 2;
  Expect(Contains(load(newer), "version 2"), "another version of the format");
  Expect(Contains(load({}), "no compiled region"), "no bytes at all");
}

// ---- nodes that nobody needs, codes and the bits that are stated for them

void TestUnneededNodes() {
  GraphBuilder builder;
  const ValueId x = builder.AddInput(), y = builder.AddInput(), looked_up = builder.Lookup(x, 1);
  builder.Add(builder.Lookup(looked_up, 2), y);  // nobody reads it
  builder.graph.outputs = {looked_up};
  const auto backend = std::make_shared<FakeBackend>();
  const auto program = Program::Compile(builder.graph, backend);
  const auto bytes = SaveCompiled(builder.graph, *program, *backend);
  const auto loaded = LoadCompiled(bytes, backend);
  const TensorShape fits{ElementType::kUInt8, {2, 3}}, odd{ElementType::kUInt8, {2, 4}};
  for (const auto& each : {program, loaded}) {
    Expect(each->Packed().size() == 1 && each->PlanFor(std::array{fits, fits})->steps.size() == 1,
           "what nobody needs makes no step");
    Expect(Contains(ErrorOf([&] { each->PlanFor(std::array{fits, odd}); }), "(LowBitAdd)"),
           "it is refused all the same where it could not run");
  }
}

// x, in `made` bits where that is not 0, into a product that reads `read` bits.
GraphBuilder GraphOfCodes(int64_t made, int64_t read) {
  GraphBuilder builder;
  const ValueId scale = builder.AddConstant(ElementType::kFloat, std::vector<float>{1}, {}),
                zero = builder.AddConstant(ElementType::kInt32, std::vector<int32_t>{0}, {}),
                weights = builder.AddConstant(ElementType::kUInt8, std::vector<uint8_t>{1, 2, 3, 4}, {4});
  ValueId x = builder.AddInput();
  if (made != 0) {
    x = builder.AddNode("LowBitRequantize", kDomain, {x, scale, zero, scale, zero}, {{"y_bits", made}});
  }
  const AttributeMap product = {{"x_bits", read}, {"in_features", int64_t{4}}, {"out_features", int64_t{1}}};
  const std::vector<ValueId> inputs = {x, weights, scale, zero, scale, zero, kAbsent, scale, zero};
  builder.graph.outputs = {builder.AddNode("LowBitGemm", kDomain, inputs, product)};
  return builder;
}

// Adds a convolution of 3x3, or the one of 3x3 for each channel.
ValueId AddConv(GraphBuilder& builder, ValueId x, int64_t in, int64_t out, bool depthwise = false) {
  const int64_t k = 9 * (depthwise ? 1 : in);
  const ValueId scale = builder.AddConstant(ElementType::kFloat, std::vector<float>{1}, {}),
                zero = builder.AddConstant(ElementType::kInt32, std::vector<int32_t>{0}, {}),
                weights = builder.AddConstant(
                    ElementType::kUInt8, std::vector<uint8_t>(static_cast<size_t>(out * k), 1), {out * k});
  const AttributeMap attributes = {{"kernel_shape", std::vector<int64_t>{3, 3}},
                                   {"in_channels", in},
                                   {"out_channels", out},
                                   {"group", depthwise ? in : 1}};
  return builder.AddNode("LowBitConv", kDomain, {x, weights, scale, zero, scale, zero, kAbsent, scale, zero},
                         attributes);
}

// Convolutions and poolings of images one after the other, of any sizes that fit.
struct ImageChain {
  GraphBuilder builder;
  Tensor x;

  explicit ImageChain(std::mt19937& random) : random_(random) {
    const std::vector<int64_t> dims = {random() % 8 == 0 ? 2 : 1, Draw(1, 40), Draw(1, 30), Draw(1, 6)};
    x = RandomTensor(dims, random);
    rows_ = dims[1], columns_ = dims[2], channels_ = dims[3];
    ValueId value = builder.AddInput();
    for (int64_t i = Draw(1, 5); i > 0; --i) {
      const ValueId before = value;
      value = random() % 16 == 0 ? builder.Lookup(value, 1) : Window(value, random() % 3 == 0);
      // Sometimes somebody else reads what is made between.
      if (random() % 12 == 0) builder.graph.outputs.push_back(before);
    }
    builder.graph.outputs.push_back(value);
  }

 private:
  int64_t Draw(int64_t least, int64_t most) {
    return least + static_cast<int64_t>(random_() % static_cast<uint32_t>(most - least + 1));
  }

  ValueId Window(ValueId value, bool is_pool) {
    std::vector<int64_t> kernel, strides, begins, ends, dilations;
    for (int64_t* size : {&rows_, &columns_}) {
      const int64_t dilation = kernel.empty() ? Draw(1, 2) : 1, most = std::min<int64_t>(5, *size);
      const int64_t k = (most - 1) / dilation + 1;
      kernel.push_back(Draw(std::min<int64_t>(2, k), k));
      dilations.push_back(dilation);
      strides.push_back(Draw(1, 3));
      begins.push_back(Draw(0, kernel.back() - 1));
      ends.push_back(Draw(0, kernel.back() - 1));
      *size = (*size + begins.back() + ends.back() - (kernel.back() - 1) * dilation - 1) / strides.back() + 1;
    }
    std::vector<int64_t> pads = begins;
    pads.insert(pads.end(), ends.begin(), ends.end());
    AttributeMap attributes = {
        {"kernel_shape", kernel}, {"strides", strides}, {"pads", pads}, {"dilations", dilations}};
    if (is_pool) return builder.AddNode("LowBitMaxPool", kDomain, {value}, attributes);
    const int64_t in = channels_, out = channels_ = random_() % 4 == 0 ? Draw(1, 40) : Draw(1, 15);
    attributes["in_channels"] = in;
    attributes["out_channels"] = out;
    const auto scalar = [&](float number) {
      return builder.AddConstant(ElementType::kFloat, std::vector<float>{number}, {});
    };
    const ValueId zero = builder.AddConstant(ElementType::kInt32, std::vector<int32_t>{100}, {});
    const ValueId weights = builder.AddConstant(RandomTensor({out * in * kernel[0] * kernel[1]}, random_));
    const ValueId inputs[] = {value, weights, scalar(1), zero, scalar(1), zero, kAbsent, scalar(4e3f), zero};
    return builder.AddNode("LowBitConv", kDomain, {std::begin(inputs), std::end(inputs)}, attributes);
  }

  std::mt19937& random_;
  int64_t rows_, columns_, channels_;
};

class StepCounter final : public StepTimes {
 public:
  size_t steps = 0, launches = 0;
  void Add(std::span<const PlannedStep> launched, Clock::time_point, Clock::duration) override {
    steps += launched.size();
    ++launches;
  }
};

void TestBandsOfRows() {
  std::mt19937 random(31);
  size_t together = 0;
  for (size_t round = 0; round < 400 / kSparse; ++round) {
    ImageChain chain(random);
    const size_t threads = 1 + random() % 3;
    StdThreadPool pool(threads);
    CpuOptions options;
    options.threads = static_cast<int>(threads);
    options.cached_bytes = random() % 1000;
    const auto program = Program::Compile(chain.builder.graph, CreateCpuBackend(options));
    const std::vector<Tensor> expected = Evaluate(chain.builder.graph, {chain.x});
    const auto plan = program->PlanFor(ShapesOf({chain.x}));
    for (int run = 0; run < 2; ++run) {
      std::vector<Tensor> outputs;
      std::vector<void*> externals = {chain.x.bytes.data()};
      for (const TensorShape& shape : plan->outputs) outputs.emplace_back(shape);
      for (Tensor& output : outputs) externals.push_back(output.bytes.data());
      StepCounter counter;
      program->Run(plan, externals, {&pool, nullptr, &counter});
      Expect(Equal(outputs, expected), "bands of rows, round " + std::to_string(round));
      Expect(counter.steps == plan->steps.size(), "every step is heard of");
      together += counter.steps - counter.launches;
    }
  }
  Expect(together > 0, "some steps run in bands");
}

ValueId AddBinary(GraphBuilder& builder, const std::string& op, ValueId a, ValueId b) {
  const ValueId scale = builder.AddConstant(ElementType::kFloat, std::vector<float>{1}, {}),
                zero = builder.AddConstant(ElementType::kInt32, std::vector<int32_t>{0}, {});
  return builder.AddNode(op, kDomain, {a, scale, zero, b, scale, zero, scale, zero});
}

void TestPaddedChannels() {
  FakeBackend backend;
  using Paddings = std::vector<std::pair<int64_t, int64_t>>;
  const auto paddings = [&](const Graph& graph) {
    Paddings out;
    for (const Node& node : WithPaddedChannels(graph, backend).nodes)
      out.emplace_back(node.x_padding, node.y_padding);
    return out;
  };
  GraphBuilder plain;
  ValueId x = AddConv(plain, plain.AddInput(), 20, 24);
  x = AddConv(plain, AddConv(plain, x, 24, 24, true), 24, 20);
  plain.graph.outputs = {x};
  Expect(paddings(plain.graph) == Paddings{{0, 0}, {0, 0}, {0, 0}}, "no back end of one channel gets more");
  backend.channel_multiple = 16;
  Expect(paddings(plain.graph) == Paddings{{0, 8}, {8, 8}, {8, 0}},
         "all but what the region is fed and gives");
  NodeSpec spec = DecodeLowBit(WithPaddedChannels(plain.graph, backend),
                               WithPaddedChannels(plain.graph, backend).nodes[1]);
  const ConvSpec& conv = std::get<MatmulNode>(spec).conv;
  Expect(conv.geometry.IsDepthwise() && conv.geometry.group == 32 && conv.weights.size() == 32 * 9 &&
             conv.epilogue.multiplier.size() == 32 && conv.weights.back() == 0,
         "channels of zeros");

  GraphBuilder few;
  few.graph.outputs = {AddConv(few, AddConv(few, few.AddInput(), 16, 7), 7, 16)};
  Expect(paddings(few.graph) == Paddings{{0, 0}, {0, 0}}, "not more than twice as many");

  // What is multiplied by one channel could not tell the ones that were added.
  for (const int64_t gates : {24, 1}) {
    GraphBuilder gated;
    const ValueId in = gated.AddInput(), a = AddConv(gated, in, 16, 24), b = AddConv(gated, in, 16, gates);
    gated.graph.outputs = {AddConv(gated, AddBinary(gated, "LowBitMul", a, b), 24, 16)};
    const int64_t more = gates == 1 ? 0 : 8;
    Expect(paddings(gated.graph) == Paddings{{0, more}, {0, more}, {more, more}, {more, 0}},
           "factors of " + std::to_string(gates) + " channels");
  }

  GraphBuilder moved;  // by an op that is none of lowbit's
  const ValueId y = AddConv(moved, moved.AddInput(), 16, 24);
  moved.graph.outputs = {AddConv(moved, moved.AddNode("Transpose", "", {y}), 24, 16)};
  Expect(paddings(moved.graph) == Paddings{{0, 0}, {0, 0}, {0, 0}}, "an op that moves channels");
}

void TestStatedCodes() {
  FakeBackend backend;
  const auto nodes = [&](const Graph& graph) { return WithStatedCodes(graph, backend).nodes; };
  const GraphBuilder proven = GraphOfCodes(2, 3), open = GraphOfCodes(0, 3), bytes = GraphOfCodes(0, 8),
                     wide = GraphOfCodes(4, 3);
  Expect(nodes(proven.graph).size() == 2 && nodes(proven.graph)[1].x_has_stated_bits,
         "fewer bits than are read");
  Expect(nodes(bytes.graph).size() == 1, "every byte is an 8-bit code");

  const Graph limited = WithStatedCodes(open.graph, backend);
  Expect(limited.nodes.size() == 2 && limited.nodes[0].op == "LowBitLookup" &&
             limited.nodes[1].inputs[0] == limited.nodes[0].outputs[0],
         "a table before what is fed");
  const Graph again = WithStatedCodes(limited, backend);
  Expect(again.nodes.size() == 2 && again.nodes[1].x_has_stated_bits, "a second time changes nothing");

  Expect(
      Contains(ErrorOf([&] { nodes(wide.graph); }), "(LowBitGemm): LowBitGemm: the node that makes x states"),
      "more bits than are read");
  Expect(CodesFault(wide.graph) == ErrorOf([&] { nodes(wide.graph); }) && CodesFault(open.graph).empty(),
         "the same reason");

  Graph damaged = open.graph;
  damaged.nodes[0].inputs[0] = 99;
  Expect(!ErrorOf([&] { nodes(damaged); }).empty(), "ids of no value");

  const auto cpu = CreateCpuBackend({});
  const std::vector<uint8_t> wild = {255, 8, 7, 129};
  Tensor x({ElementType::kUInt8, {1, 4}});
  x.bytes = wild;
  const auto y = RunProgram(*Program::Compile(open.graph, cpu), {x});
  Expect(y.at(0).bytes.at(0) == 7 * 1 + 0 * 2 + 7 * 3 + 1 * 4, "low bits are read");
}

// A small graph with every kind of thing that the format holds.
GraphBuilder GraphOfAllKinds() {
  GraphBuilder builder;
  const ValueId x = builder.AddInput();
  const ValueId joined = builder.Lookup(builder.Concat({builder.Lookup(x, 1), x}), 2);
  builder.Add(x, x);  // nobody reads it
  builder.graph.nodes[0].attributes = {{"x_encoding", std::string("unsigned")}};
  const ValueId resized = builder.AddNode("LowBitResize", kDomain, {builder.Reshape(joined, {0, 1, 2, 3})},
                                          {{"scales", std::vector<float>{2.0f, 1.0f}}});
  builder.graph.outputs = {builder.Reshape(resized, {0, 12}), x};
  return builder;
}

// Whatever the bytes are, they are refused with an Error or make a program that runs within its memory (which
// AddressSanitizer sees). Returns the error.
std::string UseCompiled(std::span<const uint8_t> bytes, const std::shared_ptr<Backend>& backend,
                        std::span<const ConstTensor> weights = {}) {
  return ErrorOf([&] {
    std::mt19937 random(13);
    const auto program = LoadCompiled(bytes, backend, weights);
    RunProgram(*program, {RandomTensor({2, 3}, random)});
  });
}

void DamageCompiledModel(const std::vector<uint8_t>& bytes, std::span<const ConstTensor> weights,
                         const std::shared_ptr<Backend>& backend) {
  Expect(UseCompiled(bytes, backend, weights).empty(), "sound bytes");
  for (size_t size = 0; size < bytes.size(); size += kSparse) {
    Expect(!UseCompiled(std::span(bytes).first(size), backend, weights).empty(),
           "bytes that end too early are refused");
    std::vector<uint8_t> sealed(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    SealCompiled(sealed);
    Expect(!UseCompiled(sealed, backend, weights).empty(), "so are they behind a checksum that holds");
  }
  // Odd steps: every place in a byte has its turn.
  for (size_t bit = 0; bit < 8 * bytes.size(); bit += kSparse | 1) {
    std::vector<uint8_t> flipped = bytes;
    flipped[bit / 8] = static_cast<uint8_t>(flipped[bit / 8] ^ (1u << (bit % 8)));
    Expect(!UseCompiled(flipped, backend, weights).empty(), "a flipped bit is found");
    SealCompiled(flipped);
    UseCompiled(flipped, backend, weights);
  }
  std::mt19937 random(10);
  for (size_t round = 0; round < 2000 / kSparse; ++round) {
    std::vector<uint8_t> damaged = bytes;
    for (size_t i = 0; i < 1 + random() % 4; ++i)
      damaged[random() % damaged.size()] = static_cast<uint8_t>(random());
    SealCompiled(damaged);
    UseCompiled(damaged, backend, weights);
  }
}

void DamageCompiledModels(const std::shared_ptr<Backend>& backend) {
  const GraphBuilder builder = GraphOfAllKinds();
  DamageCompiledModel(SaveCompiled(builder.graph, *Program::Compile(builder.graph, backend), *backend), {},
                      backend);
  DamageCompiledModel(SaveWeightless(builder.graph, *backend), ConstantsOf(builder.graph), backend);
}

// Which back end reads a stated size is its own affair; whether a region is sound is not.
void RefuseLargeDims(const std::shared_ptr<Backend>& backend) {
  GraphBuilder builder = GraphOfAllKinds();
  const auto program = Program::Compile(builder.graph, backend);
  for (const int64_t dim : {int64_t{1} << 31, int64_t{-2}}) {
    builder.graph.values[static_cast<size_t>(builder.graph.inputs[0])].dims = {{2, dim}};
    const auto bytes = SaveCompiled(builder.graph, *program, *backend);
    Expect(Contains(UseCompiled(bytes, backend), "has a dim of " + std::to_string(dim)),
           "a dim out of range");
  }
}

void TestDamagedCompiledModels() {
  const auto fake = std::make_shared<FakeBackend>();
  fake->ops.insert("LowBitResize");
  DamageCompiledModels(fake);
  Expect(fake->faults == 0, "damaged models plan their memory as sound ones do");
  DamageCompiledModels(CreateCpuBackend({}));
  RefuseLargeDims(fake);
  RefuseLargeDims(CreateCpuBackend({}));
}

// ---- partitions

// No path leaves a region and comes back, not even through other regions: with every region as one node the
// graph has no cycle.
bool IsAcyclic(const Graph& graph, const Partition& partition) {
  std::vector<size_t> set(graph.nodes.size());
  for (size_t n = 0; n < set.size(); ++n) set[n] = partition.regions.size() + n;
  for (size_t r = 0; r < partition.regions.size(); ++r) {
    for (const size_t n : partition.regions[r]) set[n] = r;
  }
  const std::vector<int64_t> producers = ProducersOf(graph);
  std::vector<std::set<size_t>> before(partition.regions.size() + graph.nodes.size());
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    for (const ValueId id : graph.nodes[n].inputs) {
      const int64_t producer = id == kAbsent ? -1 : producers[static_cast<size_t>(id)];
      if (producer >= 0 && set[static_cast<size_t>(producer)] != set[n])
        before[set[n]].insert(set[static_cast<size_t>(producer)]);
    }
  }
  std::vector<bool> done(before.size());
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t s = 0; s < before.size(); ++s) {
      const bool ready = std::all_of(before[s].begin(), before[s].end(), [&](size_t b) { return done[b]; });
      if (done[s] || !ready) continue;
      done[s] = moved = true;
    }
  }
  return std::find(done.begin(), done.end(), false) == done.end();
}

// Every node is in one region or left with a reason; regions run and hold a lowbit node.
void CheckPartition(const Graph& graph, const FakeBackend& backend, const Partition& partition) {
  std::vector<int> seen(graph.nodes.size());
  for (const std::vector<size_t>& region : partition.regions) {
    Expect(std::is_sorted(region.begin(), region.end()), "the nodes of a region are sorted");
    bool has_lowbit = false;
    for (const size_t n : region) {
      ++seen[n];
      has_lowbit = has_lowbit || graph.nodes[n].domain == kDomain;
      Expect(NamesReshape(graph, graph.nodes[n]) || !backend.Refusal(graph, graph.nodes[n]),
             "a region holds what can run");
    }
    Expect(has_lowbit || backend.takes_float_regions, "a region has a lowbit node");
  }
  for (const Partition::Left& left : partition.left) {
    ++seen[left.node];
    Expect(!left.reason.empty(), "a node that is left has a reason");
  }
  Expect(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }),
         "every node has one place");
  Expect(IsAcyclic(graph, partition), "regions are convex");
}

Partition PartitionOf(const Graph& graph) {
  const FakeBackend backend;
  Partition partition = PartitionGraph(graph, backend);
  CheckPartition(graph, backend, partition);
  return partition;
}

using Regions = std::vector<std::vector<size_t>>;

void TestSmallPartitions() {
  {
    GraphBuilder g;  // 0 -> foreign 1 -> 3 and 0 -> 2 -> 3: the short branch joins either end
    const ValueId a = g.Lookup(g.AddInput(), 0), f = g.Foreign({a}), b = g.Lookup(a, 1);
    g.graph.outputs = {g.Add(f, b)};
    Expect(PartitionOf(g.graph).regions == Regions{{0, 2}, {3}}, "a diamond with a foreign side is cut");
  }
  {
    GraphBuilder g;  // foreign 0 comes from the inputs alone
    const ValueId x = g.AddInput(), f = g.Foreign({x}), a = g.Lookup(x, 0);
    g.graph.outputs = {g.Add(a, f)};
    Expect(PartitionOf(g.graph).regions == Regions{{1, 2}}, "a foreign node before all cuts nothing");
  }
  {
    GraphBuilder g;  // 0 -> foreign 1 -> 2, and 3 -> 4 which joins 2: nodes 2, 3, 4 belong together
    const ValueId x = g.AddInput(), late = g.Lookup(g.Foreign({g.Lookup(x, 0)}), 1);
    g.graph.outputs = {g.Add(g.Lookup(x, 2), late)};
    Expect(PartitionOf(g.graph).regions == Regions{{0}, {2, 3, 4}}, "a branch that begins early is merged");
  }
  {
    GraphBuilder g;  // 0 -> picture 1 -> 3 and 0 -> 2 -> 3
    const ValueId a = g.Lookup(g.AddInput(), 0), b = g.AddNode("LowBitImage", kDomain, {a});
    g.graph.outputs = {g.Add(b, g.Lookup(a, 1))};
    Expect(PartitionOf(g.graph).regions == Regions{{0, 2}, {1}, {3}}, "a picture is a region of its own");
  }
  {
    GraphBuilder g;
    const ValueId x = g.AddInput();
    g.graph.outputs = {g.Lookup(x, 0), g.Lookup(x, 1), g.AddNode("Softmax", "", {g.Foreign({x})})};
    const Partition partition = PartitionOf(g.graph);
    Expect(partition.regions == Regions{{0, 1}}, "what reads one input is together");
    Expect(Contains(partition.left[0].reason, "not for this back end") &&
               Contains(partition.left[1].reason, "no node of ai.lowbit"),
           "reasons of the nodes that are left");
  }
  {
    GraphBuilder g;  // 0 -> foreign 1 -> 2, and 2 reads what 0 does
    const ValueId x = g.AddInput();
    g.graph.outputs = {g.Add(x, g.Foreign({g.Lookup(x, 0)}))};
    Expect(PartitionOf(g.graph).regions == Regions{{0}, {2}},
           "readers of one input with a path between them");
  }
  {
    GraphBuilder g;  // two inputs
    g.graph.outputs = {g.Lookup(g.AddInput(), 0), g.Lookup(g.AddInput(), 1)};
    Expect(PartitionOf(g.graph).regions == Regions{{0}, {1}}, "what has nothing in common is apart");
  }
  {
    GraphBuilder g;
    const ValueId x = g.AddInput(), zero = g.AddConstant(Tensor({ElementType::kUInt8, {1}}));
    g.graph.outputs = {g.Lookup(x, 0)};
    g.Lookup(g.Lookup(zero, 1), 2);
    const Partition partition = PartitionOf(g.graph);
    Expect(partition.regions == Regions{{0}}, "a region that nobody reads from would never run");
    Expect(Contains(partition.left.at(0).reason, "nobody reads"), "the reason says so");
    g.Foreign({g.graph.nodes.back().outputs[0]});
    Expect(PartitionOf(g.graph).regions == Regions{{0}, {1, 2}}, "a reader counts whatever reads it");
  }
  {
    GraphBuilder g;
    const ValueId y = g.AddNode("Softmax", "", {g.Lookup(g.AddInput(), 0)});
    g.graph.outputs = {y};
    Expect(PartitionOf(g.graph).regions == Regions{{0, 1}}, "standard nodes beside a lowbit node are taken");
    g.graph.nodes[0].barred = "it has a subgraph";
    const Partition partition = PartitionOf(g.graph);
    Expect(partition.regions.empty() && partition.left[0].reason == "it has a subgraph", "a barred node");
    FakeBackend backend;
    backend.takes_float_regions = true;
    const Partition floats = PartitionGraph(g.graph, backend);
    CheckPartition(g.graph, backend, floats);
    Expect(floats.regions == Regions{{1}}, "a back end may take standard nodes alone");
  }
}

void TestReshapesAtRims() {
  {
    GraphBuilder g;
    g.graph.outputs = {g.Reshape(g.Lookup(g.Reshape(g.AddInput(), {0, 6}), 0), {0, 2, 3})};
    Expect(PartitionOf(g.graph).regions == Regions{{0, 1, 2}}, "reshapes at the rim that cost nothing stay");
  }
  {
    GraphBuilder g;
    const ValueId y = g.Lookup(g.AddInput(), 0);
    g.graph.outputs = {y, g.Reshape(g.Reshape(y, {0, 2, 3}), {-1})};
    Expect(PartitionOf(g.graph).regions == Regions{{0}},
           "a chain that repeats an output under other dims goes");
  }
  {
    GraphBuilder g;
    const ValueId r = g.Reshape(g.Reshape(g.AddInput(), {0, 6}), {0, 6});
    g.graph.outputs = {g.Lookup(r, 0), r};
    Expect(PartitionOf(g.graph).regions == Regions{{2}}, "so does one that repeats an input");
  }
  {
    GraphBuilder g;
    const ValueId x = g.AddInput();
    const ValueId shape = g.AddInput();
    g.graph.outputs = {g.Lookup(g.AddNode("Reshape", "", {g.Lookup(x, 0), shape}), 1)};
    const Partition partition = PartitionOf(g.graph);
    Expect(partition.regions == Regions{{0}, {2}} && !partition.left.empty(),
           "a computed shape ends a region");
  }
}

// A random graph of nodes with up to three inputs, every fourth foreign.
Graph RandomNodes(std::mt19937& random, size_t nodes, size_t reach) {
  GraphBuilder g;
  std::vector<ValueId> values = {g.AddInput(), g.AddInput()};
  for (size_t i = 0; i < nodes; ++i) {
    const auto pick = [&] { return values[values.size() - 1 - random() % std::min(values.size(), reach)]; };
    std::vector<ValueId> inputs(1 + random() % 3);
    std::generate(inputs.begin(), inputs.end(), pick);
    static constexpr const char* kOps[] = {"Foreign", "LowBitLookup", "LowBitAdd", "Softmax", "LowBitImage"};
    const char* op = kOps[random() % 5];
    values.push_back(g.AddNode(op, op[0] == 'L' ? kDomain : "", inputs));
  }
  g.graph.outputs = {values.back()};
  return std::move(g.graph);
}

bool IsPicture(const Graph& graph, const std::vector<size_t>& region) {
  return graph.nodes[region[0]].op == "LowBitImage";
}

// Whether two regions that an edge joins, and that need not stand alone, could be one without a path that
// leaves it and comes back.
bool CanMerge(const Graph& graph, const Partition& partition) {
  for (size_t a = 0; a < partition.regions.size(); ++a) {
    for (size_t b = 0; b < partition.regions.size(); ++b) {
      const std::vector<size_t>&from = partition.regions[a], &to = partition.regions[b];
      if (IsPicture(graph, from) || IsPicture(graph, to)) continue;
      const bool is_edge =
          a != b && std::any_of(to.begin(), to.end(), [&](size_t n) {
            return std::any_of(from.begin(), from.end(), [&](size_t p) {
              const std::vector<ValueId>& inputs = graph.nodes[n].inputs;
              return std::find(inputs.begin(), inputs.end(), graph.nodes[p].outputs[0]) != inputs.end();
            });
          });
      if (!is_edge) continue;
      Partition merged = partition;
      merged.regions[a].insert(merged.regions[a].end(), to.begin(), to.end());
      merged.regions.erase(merged.regions.begin() + static_cast<std::ptrdiff_t>(b));
      if (IsAcyclic(graph, merged)) return true;
    }
  }
  return false;
}

void TestRandomPartitions() {
  std::mt19937 random(11);
  for (size_t round = 0; round < 300 / kSparse; ++round) {
    const Graph small = RandomNodes(random, 4 + random() % 40, 2 + random() % 10);
    Expect(!CanMerge(small, PartitionOf(small)), "regions are maximal, round " + std::to_string(round));
    PartitionOf(RandomNodes(random, 300, 2 + random() % 100));
  }
}

void TestLargePartitions() {
  constexpr size_t kNodes = 10000 / kSparse;
  std::mt19937 random(12);
  for (const size_t reach : {1, 2, 5, 100, 10000}) {
    const Graph graph = RandomNodes(random, kNodes, reach);
    const FakeBackend backend;
    const auto begin = std::chrono::steady_clock::now();
    const Partition partition = PartitionGraph(graph, backend);
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
    std::printf("%zu nodes that reach %zu back: %zu regions in %.0f ms\n", kNodes, reach,
                partition.regions.size(), 1e3 * time.count());
    if (reach <= 100) CheckPartition(graph, backend, partition);
  }
}

// What several threads run, or might.
void TestThreads() {
  TestTuning();
  TestProgramMayDieBeforeItsPlans();
  TestStepsThatFailBesideOthers();
  TestMemoryOfOtherShapes();
  TestConcurrentRuns();
  TestBandsOfRows();
  TestTeam();
  TestSharesOfOthers();
  TestFailuresInTeams();
  TestRunsInTeams();
}

void TestPlansAndModels() {
  TestRandomMemoryPlans();
  TestMemoryPlanOfChain();
  TestMemoryPlanOverflow();
  TestRandomGraphs();
  TestParts();
  TestPartsInPlace();
  TestStoredChannels();
  TestPlanes();
  TestChannelsLast();
  TestOverwriting();
  TestStepsTogether();
  TestStepsInThrees();
  TestErrorsNameTheNode();
  TestDamagedGraphs();
  TestFusion();
  TestFusionThroughAnyInput();
  TestFusionOfBothInputs();
  TestFusionOfSeveral();
  TestPlansAreBounded();
  TestInstanceOrder();
  TestInstancesThatCannotBeCreated();
  TestCompiledModels();
  TestWeightlessModels();
  TestForeignCompiledModels();
  TestDamagedCompiledModels();
  TestUnneededNodes();
  TestPaddedChannels();
  TestStatedCodes();
  TestSmallPartitions();
  TestReshapesAtRims();
  TestRandomPartitions();
  TestLargePartitions();
}

}  // namespace
}  // namespace lowbit::ep

// `threads`: only the tests that have several, for ThreadSanitizer.
int main(int count, char** arguments) {
  lowbit::ep::TestThreads();
  if (count < 2 || std::string_view(arguments[1]) != "threads") lowbit::ep::TestPlansAndModels();
  if (lowbit::ep::g_failures == 0) std::puts("ok");
  return lowbit::ep::g_failures == 0 ? 0 : 1;
}
