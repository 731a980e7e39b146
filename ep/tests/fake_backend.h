// A back end that checks what the region compiler promises: ranges inside the workspace, no overlap within a
// step, one thread at a time in an instance, no more instances than allowed. Every step fills scratch memory
// with rubbish.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ep/region/backend.h"
#include "ep/region/program.h"
#include "ep/tests/graph_builder.h"

namespace lowbit::ep {

class FakeStep : public Step {
 public:
  // All pointers are valid for the shapes that were planned.
  virtual void Run(std::span<const TensorShape> fed, std::span<const void* const> data, void* y,
                   uint8_t* scratch) const = 0;
  virtual size_t Scratch(std::span<const TensorShape> fed) const = 0;
  virtual bool WritesOutput() const { return true; }
};

struct FakePlan final : StepPlan {
  FakePlan(const FakeStep& of, std::span<const TensorShape> shapes)
      : step(of),
        fed(shapes.begin(), shapes.end()),
        scratch(of.Scratch(shapes)),
        y_bytes(of.WritesOutput() ? Tensor(of.Output(fed)).bytes.size() : 0) {}
  size_t WorkspaceBytes() const override { return scratch; }
  std::string Text() const override { return "fake"; }
  const FakeStep& step;
  std::vector<TensorShape> fed;
  size_t scratch, y_bytes;
};

template <typename Base>
struct Planning : Base {
  std::shared_ptr<const StepPlan> Plan(std::span<const TensorShape> fed) const override {
    return std::make_shared<FakePlan>(*this, fed);
  }
};

struct FakeNodeStep final : Planning<FakeStep> {
  FakeNodeStep(const Graph& graph, const Node& node, std::vector<uint8_t> kept)
      : packed(std::move(kept)), op(graph, node) {}
  TensorShape Output(std::span<const TensorShape> fed) const override {
    return {op.op->OutputType(), op.op->OutputShape(op.Bind(fed, {}))};
  }
  size_t Scratch(std::span<const TensorShape> fed) const override {
    return Tensor(fed[0]).bytes.size() % 300;
  }
  void Run(std::span<const TensorShape> fed, std::span<const void* const> data, void* y,
           uint8_t* scratch) const override {
    if (const size_t bytes = Scratch(fed); bytes > 0) std::memset(scratch, 0x5a, bytes);
    // Apart from `y`, which may lie where an input does.
    Tensor out({op.op->OutputType(), op.op->OutputShape(op.Bind(fed, {}))});
    InlineThreadPool pool;
    op.op->Run(op.Bind(fed, data), out.bytes.data(), pool);
    std::memcpy(y, out.bytes.data(), out.bytes.size());
  }
  std::optional<size_t> Overwrites() const override { return overwrites; }
  std::vector<uint8_t> Packed() const override { return packed; }
  std::optional<size_t> overwrites;
  std::vector<uint8_t> packed;
  NodeOperator op;
};

// Two nodes, the first with one fed tensor; what lies between them is scratch memory, and the `place`th
// tensor that the second is fed.
struct FakePairStep final : Planning<FakeStep> {
  FakePairStep(std::unique_ptr<FakeNodeStep> a, std::unique_ptr<FakeNodeStep> b, size_t between_place)
      : first(std::move(a)), second(std::move(b)), place(between_place) {}
  TensorShape Output(std::span<const TensorShape> fed) const override {
    return second->Output(SecondFed(fed, first->Output(fed.first(1))));
  }
  size_t Scratch(std::span<const TensorShape> fed) const override {
    return 2 * Tensor(fed[0]).bytes.size() + 600;
  }
  void Run(std::span<const TensorShape> fed, std::span<const void* const> data, void* y,
           uint8_t* scratch) const override {
    uint8_t* at = scratch + Scratch(fed) / 2;
    first->Run(fed.first(1), data.first(1), at, scratch);
    second->Run(SecondFed(fed, first->Output(fed.first(1))), SecondFed(data, static_cast<const void*>(at)), y,
                scratch);
  }
  template <typename T>
  std::vector<T> SecondFed(std::span<const T> fed, T between) const {
    std::vector<T> out(fed.begin() + 1, fed.end());
    out.insert(out.begin() + static_cast<std::ptrdiff_t>(place), between);
    return out;
  }
  std::vector<uint8_t> Packed() const override {
    std::vector<uint8_t> both = first->packed;
    both.insert(both.end(), second->packed.begin(), second->packed.end());
    return both;
  }
  std::unique_ptr<FakeNodeStep> first, second;
  size_t place;
};

struct FakeCopyStep final : Planning<FakeStep> {
  TensorShape Output(std::span<const TensorShape> fed) const override { return fed[0]; }
  size_t Scratch(std::span<const TensorShape>) const override { return 0; }
  void Run(std::span<const TensorShape> fed, std::span<const void* const> data, void* y,
           uint8_t*) const override {
    std::memcpy(y, data[0], Tensor(fed[0]).bytes.size());
  }
};

// A part of the output of a Split.
struct FakeCutStep final : Planning<FakeStep> {
  explicit FakeCutStep(SplitOp of) : op(std::move(of)) {}
  TensorShape Output(std::span<const TensorShape> fed) const override {
    return OutputOf(StandardNode(op), fed);
  }
  size_t Scratch(std::span<const TensorShape>) const override { return 0; }
  void Run(std::span<const TensorShape> fed, std::span<const void* const> data, void* y,
           uint8_t*) const override {
    Tensor x(fed[0]), out(Output(fed));
    std::memcpy(x.bytes.data(), data[0], x.bytes.size());
    std::vector<int64_t> begin, perm;
    for (const SliceRange& range : RangesOf(op, fed[0].dims)) {
      perm.push_back(static_cast<int64_t>(perm.size()));
      begin.push_back(range.begin);
    }
    EvaluateMove(x, out, begin, perm);
    std::memcpy(y, out.bytes.data(), out.bytes.size());
  }
  SplitOp op;
};

// A step that stores channels of what another makes elsewhere, too.
struct FakeStoringStep final : Planning<FakeStep> {
  FakeStoringStep(const FakeStep& of, std::span<const ChannelMove> what, bool keeps)
      : base(of), moves(what.begin(), what.end()), keeps_output(keeps) {}
  TensorShape Output(std::span<const TensorShape> fed) const override { return base.Output(Own(fed)); }
  size_t Scratch(std::span<const TensorShape> fed) const override {
    return base.Scratch(Own(fed)) + Tensor(Output(fed)).bytes.size();
  }
  bool WritesOutput() const override { return keeps_output; }
  void Run(std::span<const TensorShape> fed, std::span<const void* const> data, void* y,
           uint8_t* scratch) const override {
    const Tensor out(Output(fed));
    uint8_t* const made = scratch + base.Scratch(Own(fed));
    base.Run(Own(fed), Own(data), made, scratch);
    if (keeps_output) std::memcpy(y, made, out.bytes.size());
    const int64_t channels = out.shape.dims.back();
    for (size_t m = 0; m < moves.size(); ++m) {
      const ChannelMove& move = moves[m];
      auto* const to = static_cast<uint8_t*>(const_cast<void*>(data[Own(data).size() + m]));
      for (int64_t pixel = 0; pixel < static_cast<int64_t>(out.bytes.size()) / channels; ++pixel) {
        for (int64_t c = 0; c < move.count; ++c) {
          const uint8_t code = made[pixel * channels + move.first + c];
          to[pixel * move.channels + move.at + c] = move.table.empty() ? code : move.table[code];
        }
      }
    }
  }
  std::optional<size_t> Overwrites() const override { return base.Overwrites(); }
  template <typename T>
  std::span<T> Own(std::span<T> fed) const {
    return fed.first(fed.size() - moves.size());
  }
  const FakeStep& base;
  std::vector<ChannelMove> moves;
  bool keeps_output;
};

// Two or three steps at once.
struct FakeTogether final : StepPlan {
  std::string Text() const override { return "fake together"; }
};

class FakeBackend : public Backend {
 public:
  std::set<std::string> ops = {"LowBitLookup", "LowBitAdd", "LowBitConcat", "LowBitImage",
                               "Softmax"};  // that it runs
  bool fuses = false;
  bool overwrites = false;   // additions write over their second terms
  bool joins = false;        // runs two steps together
  bool joins_three = false;  // runs three together, and two where the first is fed two tensors
  bool stores = false;       // in up to three other tensors, besides or alone
  int64_t channel_multiple = 1;
  bool takes_float_regions = false;
  size_t max_instances = 3;
  std::string fingerprint = "fake 1";
  std::atomic<size_t> fail_above{SIZE_MAX};  // instances: creating more fails, as if memory ran out
  std::atomic<int> busy_runs{0};             // instances answer Busy while this is above 0
  std::atomic<int> failing_steps{0};         // so many creations of a step fail before the others
  mutable std::atomic<size_t> live{0}, most_live{0}, created{0}, faults{0}, steps_packed{0},
      steps_from_packed{0};

  std::optional<std::string> Refusal(const Graph&, const Node& node) const override {
    if (ops.contains(node.op)) return std::nullopt;
    return node.op + " is not for this back end";
  }
  bool Fuses(const Graph&, std::span<const Node* const> nodes, const Node& next) const override {
    return fuses && nodes.size() == 1 && nodes[0]->op == "LowBitLookup" &&
           (next.op == "LowBitLookup" || next.op == "LowBitAdd");
  }
  std::unique_ptr<Step> CreateStep(const Graph& graph, std::span<const Node* const> nodes,
                                   std::span<const uint8_t> packed) override;
  size_t Creators() const override { return 3; }
  int64_t ChannelMultiple() const override { return channel_multiple; }
  bool TakesFloatRegions() const override { return takes_float_regions; }
  std::unique_ptr<Step> CreateCopy() override { return std::make_unique<FakeCopyStep>(); }
  std::shared_ptr<const StepPlan> PlanTogether(std::span<const FedStep> steps) override {
    const bool may = steps.size() == 2 ? joins || (joins_three && steps[0].fed.size() == 2) : joins_three;
    return may ? std::make_shared<const FakeTogether>() : nullptr;
  }
  bool MayStore(const Step&, std::span<const TensorShape>,
                std::span<const ChannelMove> moves) const override {
    return stores && moves.size() <= 3;
  }
  std::unique_ptr<const Step> Storing(const Step& step, std::span<const ChannelMove> moves,
                                      bool keeps_output) const override {
    return std::make_unique<FakeStoringStep>(static_cast<const FakeStep&>(step), moves, keeps_output);
  }
  std::vector<size_t> PackedInputs(const Graph&, const Node& node) const override {
    return node.op == "LowBitLookup" ? std::vector<size_t>{1} : std::vector<size_t>{};
  }
  DeviceConstant Upload(const ConstTensor& tensor) override {
    auto copy = std::make_shared<Tensor>(TensorShape{tensor.type, tensor.shape});
    if (!copy->bytes.empty()) std::memcpy(copy->bytes.data(), tensor.data, copy->bytes.size());
    return {copy, copy->bytes.data()};
  }
  std::unique_ptr<Instance> CreateInstance(const RegionPlan& plan) override;
  size_t Alignment() const override { return 64; }
  size_t MaxInstances() const override { return max_instances; }
  std::string Fingerprint() const override { return fingerprint; }
  std::string TunedChoices() const override { return adopted; }
  void AdoptTunedChoices(const std::string& text) override { adopted = text; }
  std::string adopted = "choices";

 private:
  std::unique_ptr<FakeNodeStep> CreateNodeStep(const Graph& graph, const Node& node,
                                               std::span<const uint8_t> packed);
};

class FakeInstance final : public Instance {
 public:
  FakeInstance(const FakeBackend& backend, const RegionPlan& plan)
      : backend_(backend), plan_(plan), workspace_(plan.workspace_bytes) {
    const size_t live = backend_.live;
    ++backend_.created;
    for (size_t most = backend_.most_live;
         live > most && !backend_.most_live.compare_exchange_weak(most, live);) {
    }
    for (size_t i = 0; i < plan.steps.size(); ++i) CheckStep(i);
  }
  ~FakeInstance() override { --backend_.live; }

  void Run(std::span<void* const> externals, const RunContext&) override {
    if (running_.exchange(true)) ++backend_.faults;
    held_.assign(externals.begin(), externals.end());
    for (size_t i = 0; i < plan_.steps.size(); ++i) {
      const PlannedStep& step = plan_.steps[i];
      const auto& plan = static_cast<const FakePlan&>(*step.plan);
      // Which writes the outputs of those behind while it reads this one's input.
      const bool launches = step.with_next != nullptr && LauncherOf(plan_.steps, i) == i;
      for (size_t behind = 1; launches && behind < step.together; ++behind) {
        const PlannedStep& next = plan_.steps[i + behind];
        const auto& of_next = static_cast<const FakePlan&>(*next.plan);
        // But where a later one overwrites what it reads itself.
        const bool over = behind + 1 < step.together && next.step->Overwrites();
        if (of_next.y_bytes > 0 && !over) std::memset(At(next.output, externals), 0x5a, of_next.y_bytes);
      }
      std::vector<const void*> fed;
      for (const Location& place : step.fed) fed.push_back(At(place, externals));
      plan.step.Run(plan.fed, fed, At(step.output, externals), workspace_.data() + step.workspace_at);
    }
    running_ = false;
  }
  bool Busy(const RunContext&) const override { return backend_.busy_runs > 0; }
  bool Holds(std::span<void* const> externals) const override {
    return std::equal(held_.begin(), held_.end(), externals.begin(), externals.end());
  }

 private:
  struct Range {
    size_t begin, end;
  };

  void* At(const Location& place, std::span<void* const> externals) {
    if (place.kind == Location::Kind::kExternal) return externals[place.at];
    if (place.kind == Location::Kind::kConstant) return const_cast<void*>(plan_.constants[place.at].get());
    return workspace_.data() + place.at;
  }
  void CheckStep(size_t index) const {
    const PlannedStep& step = plan_.steps[index];
    const auto& plan = static_cast<const FakePlan&>(*step.plan);
    std::vector<Range> written = {{step.workspace_at, step.workspace_at + plan.scratch}};
    const auto writes = [&](const PlannedStep& each) {
      if (each.output.kind != Location::Kind::kWorkspace) return;
      written.push_back({each.output.at, each.output.at + static_cast<const FakePlan&>(*each.plan).y_bytes});
    };
    writes(step);
    if (step.with_next != nullptr && LauncherOf(plan_.steps, index) == index) {
      if (index + step.together > plan_.steps.size() ||
          LauncherOf(plan_.steps, index + step.together - 1) != index) {
        ++backend_.faults;
      } else {
        for (size_t behind = 1; behind < step.together; ++behind) writes(plan_.steps[index + behind]);
      }
    }
    std::vector<Range> all = written;
    for (size_t i = 0; i < step.fed.size(); ++i) {
      const size_t at = step.fed[i].at, bytes = Tensor(plan.fed[i]).bytes.size();
      const bool over = step.step->Overwrites() == i && step.output.kind == Location::Kind::kWorkspace &&
                        at == step.output.at && bytes == plan.y_bytes;
      if (step.fed[i].kind == Location::Kind::kWorkspace && !over) all.push_back({at, at + bytes});
    }
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i].end > workspace_.size() || all[i].begin % backend_.Alignment() != 0) ++backend_.faults;
      for (size_t w = 0; w < written.size(); ++w) {
        if (w != i && all[i].begin < written[w].end && written[w].begin < all[i].end) ++backend_.faults;
      }
    }
  }

  const FakeBackend& backend_;
  const RegionPlan& plan_;
  std::vector<uint8_t> workspace_;
  std::vector<void*> held_;
  std::atomic<bool> running_{false};
};

inline std::unique_ptr<FakeNodeStep> FakeBackend::CreateNodeStep(const Graph& graph, const Node& node,
                                                                 std::span<const uint8_t> packed) {
  const std::vector<size_t> kept = PackedInputs(graph, node);
  if (kept.empty()) return std::make_unique<FakeNodeStep>(graph, node, std::vector<uint8_t>());
  const auto id = static_cast<size_t>(node.inputs[kept[0]]);
  Require(!packed.empty() || graph.values[id].constant->data != nullptr, "the table has no data");
  Require(packed.empty() || packed.size() == 256, "packed bytes of another step");
  Require(ElementCount(graph.values[id].constant->shape) == 256, "a table of another size");
  ++(packed.empty() ? steps_packed : steps_from_packed);
  const auto* data =
      packed.empty() ? static_cast<const uint8_t*>(graph.values[id].constant->data) : packed.data();
  std::vector<uint8_t> bytes(data, data + 256);
  // The values are few: a copy of the graph with the packed table in its place.
  Graph with_table{graph.values, {node}, {}, {}};
  with_table.values[id].constant->data = bytes.data();
  return std::make_unique<FakeNodeStep>(with_table, node, bytes);
}

inline std::unique_ptr<Step> FakeBackend::CreateStep(const Graph& graph, std::span<const Node* const> nodes,
                                                     std::span<const uint8_t> packed) {
  if (failing_steps-- > 0) Fail("out of memory");
  if (IsSplit(*nodes[0]))
    return std::make_unique<FakeCutStep>(std::get<SplitOp>(ReadStandard(graph, *nodes[0])));
  if (nodes.size() == 1) {
    auto step = CreateNodeStep(graph, *nodes[0], packed);
    if (overwrites && nodes[0]->op == "LowBitAdd") step->overwrites = 1;
    return step;
  }
  const bool adds = nodes[1]->op == "LowBitAdd";
  const size_t first_bytes = adds ? packed.size() : packed.size() / 2;
  return std::make_unique<FakePairStep>(CreateNodeStep(graph, *nodes[0], packed.first(first_bytes)),
                                        CreateNodeStep(graph, *nodes[1], packed.subspan(first_bytes)),
                                        adds && nodes[1]->inputs[0] != nodes[0]->outputs[0] ? 1 : 0);
}

inline std::unique_ptr<Instance> FakeBackend::CreateInstance(const RegionPlan& plan) {
  // Counted before it is made: two threads must not both take the last place.
  if (++live > fail_above) {
    --live;
    Fail("out of memory");
  }
  return std::make_unique<FakeInstance>(*this, plan);
}

}  // namespace lowbit::ep
