#include "ep/cpu/cpu_backend.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "core/cpu/isa.h"
#include "core/node_reader.h"
#include "core/packed_weights.h"
#include "core/processors.h"
#include "core/status.h"
#include "ep/cpu/bands.h"
#include "ep/cpu/move.h"
#include "ep/cpu/team.h"
#include "ep/region/lower.h"
#include "ep/region/program.h"
#include "ep/region/step_times.h"

namespace lowbit::ep {
namespace {

using Tensors = std::vector<std::optional<ConstTensor>>;

// A step at given shapes: all of a run but the addresses.
class CpuStepPlan final : public StepPlan {
 public:
  CpuStepPlan(const Operator& op, Tensors inputs, const std::vector<size_t>& fed)
      : op_(&op), inputs_(std::move(inputs)), fed_(fed) {
    const OperatorPlan plan = op.Plan(inputs_);
    text_ = plan.kernel;
    is_measured_ = plan.tuned;
  }
  explicit CpuStepPlan(const TensorShape& copied)
      : inputs_({ConstTensor{copied.type, copied.dims, nullptr}}),
        fed_({0}),
        copied_bytes_(static_cast<size_t>(ElementCount(copied.dims)) * ElementSize(copied.type)),
        text_("copy") {}

  std::string Text() const override { return text_; }
  bool IsMeasured() const override { return is_measured_; }
  // The step's inputs, the fed ones without data, and which of them are fed.
  const Tensors& inputs() const { return inputs_; }
  const std::vector<size_t>& fed() const { return fed_; }
  const Operator* op() const { return op_; }

  void Run(const Tensors& inputs, void* y, ThreadPool& pool) const {
    if (op_ != nullptr) {
      op_->Run(inputs, y, pool);
    } else {
      std::memcpy(y, inputs[0]->data, copied_bytes_);
    }
  }

 private:
  const Operator* op_ = nullptr;  // null: a copy
  Tensors inputs_;
  std::vector<size_t> fed_;
  size_t copied_bytes_ = 0;
  std::string text_;
  bool is_measured_ = false;
};

class OperatorStep final : public Step {
 public:
  OperatorStep(std::unique_ptr<Operator> op, size_t inputs, std::vector<size_t> fed)
      : op_(std::move(op)), inputs_(inputs), fed_(std::move(fed)) {}

  TensorShape Output(std::span<const TensorShape> fed) const override {
    return {op_->OutputType(), op_->OutputShape(Describe(fed))};
  }
  std::shared_ptr<const StepPlan> Plan(std::span<const TensorShape> fed) const override {
    return std::make_shared<const CpuStepPlan>(*op_, Describe(fed), fed_);
  }

 private:
  Tensors Describe(std::span<const TensorShape> fed) const {
    Tensors inputs(inputs_);
    for (size_t i = 0; i < fed.size(); ++i) inputs[fed_[i]] = ConstTensor{fed[i].type, fed[i].dims, nullptr};
    return inputs;
  }

  std::unique_ptr<Operator> op_;
  size_t inputs_;
  std::vector<size_t> fed_;
};

class CopyStep final : public Step {
 public:
  TensorShape Output(std::span<const TensorShape> fed) const override { return fed[0]; }
  std::shared_ptr<const StepPlan> Plan(std::span<const TensorShape> fed) const override {
    return std::make_shared<const CpuStepPlan>(fed[0]);
  }
};

// Counts the loops that a pool shares out.
class CountingPool final : public ThreadPool {
 public:
  CountingPool(ThreadPool& pool, size_t threads) : pool_(pool), threads_(threads) {}
  void ParallelFor(size_t count, const std::function<void(size_t)>& fn) override {
    loops_ += count > 1;
    pool_.ParallelFor(count, fn);
  }
  double TaskCycles() const override { return pool_.TaskCycles(); }
  size_t Threads() const override { return threads_; }
  size_t loops() const { return loops_; }

 private:
  ThreadPool& pool_;
  const size_t threads_;
  size_t loops_ = 0;
};

// A region that shares out so many loops is worth a team.
constexpr size_t kTeamLoops = 3;

class CpuInstance final : public Instance {
 public:
  // `threads` run it; 0: not known, at most `most`.
  CpuInstance(const RegionPlan& plan, size_t threads, size_t most, size_t cached_bytes)
      : members_(threads == 0 ? most : threads),
        threads_(threads),
        cached_bytes_(cached_bytes),
        workspace_(plan.workspace_bytes) {
    for (const PlannedStep& planned : plan.steps) AddStep(planned, plan);
    for (size_t i = 0; i < steps_.size(); i += sections_.back().count) AddSection(i);
  }

  void Run(std::span<void* const> externals, const RunContext& context) override {
    for (const Patch& patch : patched_inputs_) {
      steps_[patch.step].inputs[patch.input]->data = externals[patch.external];
    }
    for (const Patch& patch : patched_outputs_) steps_[patch.step].y = externals[patch.external];
    InlineThreadPool inline_pool;
    ThreadPool& pool = context.pool != nullptr ? *context.pool : inline_pool;
    if (members_ > 1 && loops_ >= kTeamLoops) {
      const size_t threads = threads_ == 0 ? most_seen_ : threads_;
      most_seen_ = std::max(most_seen_, Team::Run(pool, members_, threads,
                                                  [&](ThreadPool& team) { RunSteps(team, context.times); }));
    } else {
      CountingPool counting(pool, threads_);
      RunSteps(counting, context.times);
      loops_ = counting.loops();
    }
  }

 private:
  struct BoundStep {
    const PlannedStep* planned = nullptr;
    const CpuStepPlan* plan = nullptr;
    Tensors inputs;
    void* y = nullptr;
  };
  struct Patch {  // where the caller's memory is filled in
    size_t step = 0, input = 0, external = 0;
  };

  void RunSteps(ThreadPool& pool, StepTimes* times) const {
    for (const Section& section : sections_) {
      const BoundStep& first = steps_[section.first];
      const auto begin = times == nullptr ? StepTimes::Clock::time_point() : StepTimes::Clock::now();
      if (section.bands != nullptr) {
        section.bands->Run(first.inputs[first.plan->fed()[0]]->data,
                           steps_[section.first + section.count - 1].y, pool);
      } else {
        first.plan->Run(first.inputs, first.y, pool);
      }
      if (times != nullptr)
        times->Add({first.planned, section.count}, begin, StepTimes::Clock::now() - begin);
    }
  }

  // A tensor of the workspace.
  struct Place {
    size_t begin, end;
    bool Meets(const Place& other) const { return begin < other.end && other.begin < end; }
    bool operator==(const Place&) const = default;
  };
  static std::optional<Place> PlaceOf(const Location& location, const TensorShape& tensor) {
    if (location.kind != Location::Kind::kWorkspace) return std::nullopt;
    const auto bytes = static_cast<size_t>(ElementCount(tensor.dims)) * ElementSize(tensor.type);
    return Place{location.at, location.at + bytes};
  }
  std::optional<Place> MadeBy(size_t i) const {
    const PlannedStep& planned = *steps_[i].planned;
    return PlaceOf(planned.output, planned.step->Output(planned.fed_shapes));
  }
  std::optional<Place> FedTo(size_t i, size_t which) const {
    const PlannedStep& planned = *steps_[i].planned;
    return PlaceOf(planned.fed[which], planned.fed_shapes[which]);
  }
  // Whether step i + 1 alone reads what step i makes, as it is.
  bool IsReadNext(size_t i) const {
    const std::optional<Place> made = MadeBy(i);
    if (!made || i + 1 >= steps_.size() || steps_[i + 1].planned->fed.size() != 1 || FedTo(i + 1, 0) != made)
      return false;
    for (size_t j = i + 2; j < steps_.size(); ++j) {
      const size_t fed = steps_[j].planned->fed.size();
      for (size_t k = 0; k < fed; ++k) {
        if (const std::optional<Place> read = FedTo(j, k); read && read->Meets(*made)) return false;
      }
      // Where memory is written again nobody needs what it held.
      if (const std::optional<Place> written = MadeBy(j); written && written->Meets(*made)) break;
    }
    return true;
  }
  std::optional<RowWindow> RowsOf(size_t i) const {
    const CpuStepPlan& plan = *steps_[i].plan;
    if (plan.op() == nullptr || plan.fed().size() != 1) return std::nullopt;
    return plan.op()->Rows(steps_[i].inputs);
  }

  // One step, or several that run band by band.
  void AddSection(size_t first) {
    std::vector<BandStep> steps;
    for (size_t i = first; i < first + kMostTogether && i < steps_.size(); ++i) {
      const std::optional<RowWindow> rows = threads_ == 0 ? std::nullopt : RowsOf(i);
      if (!rows) break;
      steps.push_back({steps_[i].plan->op(), steps_[i].inputs, steps_[i].plan->fed()[0], *rows});
      const size_t made = rows->out_bytes * static_cast<size_t>(rows->out_rows);
      if (made / threads_ <= cached_bytes_ || !IsReadNext(i)) break;
    }
    // Rows of the last tensor are written before the first one's last row was read.
    const std::optional<Place> read = steps.empty() ? std::nullopt : FedTo(first, 0);
    while (steps.size() > 1 && read) {
      const std::optional<Place> made = MadeBy(first + steps.size() - 1);
      if (!made || !made->Meets(*read)) break;
      steps.pop_back();
    }
    if (steps.size() < 2) {
      sections_.push_back({first, 1, nullptr});
    } else {
      const size_t count = steps.size();
      sections_.push_back({first, count, std::make_unique<Bands>(std::move(steps), threads_, cached_bytes_)});
    }
  }

  void AddStep(const PlannedStep& planned, const RegionPlan& plan) {
    const size_t index = steps_.size();
    const auto* step_plan = static_cast<const CpuStepPlan*>(planned.plan.get());
    BoundStep step{&planned, step_plan, step_plan->inputs(), nullptr};
    for (size_t i = 0; i < planned.fed.size(); ++i) {
      const size_t input = step_plan->fed()[i];
      const Location& place = planned.fed[i];
      if (place.kind == Location::Kind::kExternal) {
        patched_inputs_.push_back({index, input, place.at});
      } else if (place.kind == Location::Kind::kConstant) {
        step.inputs[input]->data = plan.constants[place.at].get();
      } else {
        step.inputs[input]->data = workspace_.data() + place.at;
      }
    }
    if (planned.output.kind == Location::Kind::kExternal) {
      patched_outputs_.push_back({index, 0, planned.output.at});
    } else {
      step.y = workspace_.data() + planned.output.at;
    }
    steps_.push_back(std::move(step));
  }

  // As many as who listens to a run expects at once (StepTimes).
  static constexpr size_t kMostTogether = 3;
  struct Section {
    size_t first, count;
    std::unique_ptr<Bands> bands;
  };

  const size_t members_, threads_, cached_bytes_;
  size_t loops_ = 0;      // of the last run without a team
  size_t most_seen_ = 0;  // members that came to a run
  AlignedBytes workspace_;
  std::vector<BoundStep> steps_;
  std::vector<Section> sections_;
  std::vector<Patch> patched_inputs_, patched_outputs_;
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(CpuOptions options) : options_(std::move(options)) {}

  // Standard ops are left to ONNX Runtime, which runs them with kernels made for this CPU, but for those that
  // move codes: a region need not end there.
  std::optional<std::string> Refusal(const Graph& graph, const Node& node) const override {
    try {
      if (node.domain == kDomain) {
        ReadLowBit(graph, node);
      } else if (MayMoveCodes(node)) {
        CreateStandard(graph, node);
        if (node.op == "Transpose" && LeadsOutside(graph, node)) {
          return "it leads to a node that stays with ONNX Runtime, whose optimizer moves transposes through "
                 "such "
                 "nodes and cancels them";
        }
      } else {
        return "it is not an op of " + std::string(kDomain);
      }
      return std::nullopt;
    } catch (const Error& e) {
      return e.what();
    }
  }

  std::unique_ptr<Step> CreateStep(const Graph& graph, std::span<const Node* const> nodes,
                                   std::span<const uint8_t>) override {
    const Node& node = *nodes[0];
    if (node.domain != kDomain) {
      return std::make_unique<OperatorStep>(CreateStandard(graph, node), 1, std::vector<size_t>{0});
    }
    LowBitInputs inputs = ReadLowBit(graph, node);
    OperatorOptions options;
    options.isa = DefaultIsa();
    options.use_reference = options_.reference;
    options.tuned = options_.tuned;
    options.threads = options_.threads;
    options.warn = options_.warn;
    options.x_has_stated_bits = node.x_has_stated_bits;
    if (!inputs.fed.empty()) {
      const auto x = static_cast<size_t>(node.inputs[inputs.fed[0]]);
      options.x_shape = graph.values[x].dims.value_or(std::vector<int64_t>());
      if (!options.x_shape.empty() && options.x_shape.back() > 0) options.x_shape.back() += node.x_padding;
    }
    auto op = CreateOperator(DecodeLowBit(graph, node), options);
    return std::make_unique<OperatorStep>(std::move(op), inputs.present.size(), std::move(inputs.fed));
  }

  bool LooksAtCodes() const override { return true; }
  std::unique_ptr<Step> CreateCopy() override { return std::make_unique<CopyStep>(); }

  DeviceConstant Upload(const ConstTensor& tensor) override {
    const int64_t bytes = CheckedProduct(
        ElementCount(tensor.shape), static_cast<int64_t>(ElementSize(tensor.type)), "the bytes of a tensor");
    auto copy = std::make_shared<AlignedBytes>(static_cast<size_t>(bytes));
    if (bytes > 0) std::memcpy(copy->data(), tensor.data, copy->size());
    return {copy, copy->data()};
  }

  std::unique_ptr<Instance> CreateInstance(const RegionPlan& plan) override {
    const auto threads = static_cast<size_t>(std::max(options_.threads, 0));
    return std::make_unique<CpuInstance>(plan, threads, processors_, options_.cached_bytes);
  }
  size_t Alignment() const override { return AlignedBytes::kAlignment; }
  size_t MaxInstances() const override { return processors_; }
  std::string Fingerprint() const override { return std::string("cpu, lowbit ") + LOWBIT_VERSION; }

 private:
  static bool MayMoveCodes(const Node& node) {
    return node.domain.empty() && (node.op == "Slice" || node.op == "Split" || node.op == "Transpose");
  }

  // Whether what the node reads or makes is made or read by a node that no region takes. (A cubic Resize of
  // codes has a kernel only where ONNX Runtime's optimizer got the Transposes around it out of the way.)
  static bool LeadsOutside(const Graph& graph, const Node& node) {
    const auto shares = [](const std::vector<ValueId>& some, const std::vector<ValueId>& others) {
      return std::any_of(some.begin(), some.end(), [&](ValueId id) {
        return id != kAbsent && std::find(others.begin(), others.end(), id) != others.end();
      });
    };
    return std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const Node& other) {
      const bool stays = other.domain != kDomain && !MayMoveCodes(other) && !NamesReshape(graph, other);
      return stays && (shares(other.inputs, node.outputs) || shares(other.outputs, node.inputs));
    });
  }

  static std::unique_ptr<Operator> CreateStandard(const Graph& graph, const Node& node) {
    StandardNode standard = ReadStandard(graph, node);
    const Value& x = graph.values[static_cast<size_t>(node.inputs[0])];
    return CreateMove(std::move(standard), x.type.value());
  }

  CpuOptions options_;
  const size_t processors_ = UsableProcessors();
};

}  // namespace

std::shared_ptr<Backend> CreateCpuBackend(CpuOptions options) {
  return std::make_shared<CpuBackend>(std::move(options));
}

}  // namespace lowbit::ep
