#include "ep/region/program.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <thread>
#include <utility>

#include "core/plan_output.h"
#include "core/status.h"
#include "ep/region/instance_pool.h"
#include "ep/region/lower.h"
#include "ep/region/region_plan.h"

namespace lowbit::ep {
namespace {

struct InputShapes {
  explicit InputShapes(std::span<const TensorShape> from) : shapes(from.begin(), from.end()) {}
  friend bool operator==(const InputShapes& a, std::span<const TensorShape> b) {
    return std::equal(a.shapes.begin(), a.shapes.end(), b.begin(), b.end());
  }
  std::vector<TensorShape> shapes;
};

// What PlanFor hands out: instances live as long as somebody holds the plan.
struct ReadyPlan : RegionPlan {
  ReadyPlan(RegionPlan plan, Backend& backend) : RegionPlan(std::move(plan)), instances(backend, *this) {}
  mutable InstancePool instances;
};

// Whether tensors may lie in planes: several steps together may gain by them where none does alone.
bool MayHavePlanes(const CompiledRegion& region) {
  return std::any_of(region.ops.begin(), region.ops.end(), [&](const CompiledRegion::Op& op) {
    return op.step != nullptr && region.backend->PlanesRead(*op.step) > 0;
  });
}

void Print(const RegionPlan& plan) {
  const PlanOutput asked = AskedPlanOutput();
  if (asked == PlanOutput::kNone) return;
  const std::string text = asked == PlanOutput::kJson ? plan.Json() : "lowbit: " + plan.Text();
  std::fputs(text.c_str(), stderr);  // at once: runs may plan in several threads
}

class CompiledProgram final : public Program {
 public:
  explicit CompiledProgram(std::shared_ptr<const CompiledRegion> region) : region_(std::move(region)) {}

  std::shared_ptr<const RegionPlan> PlanFor(std::span<const TensorShape> inputs) override {
    return *plans_.Get(inputs, [&] {
      const auto make = [&](PlaneUse planes) {
        RegionPlan plan = MakePlan(region_, inputs, planes);
        region_->backend->Tune(plan);
        return plan;
      };
      RegionPlan made = make(PlaneUse::kWhereFaster);
      if (MayHavePlanes(*region_)) region_->backend->ChooseLayout(made, make);
      auto plan = std::make_shared<const ReadyPlan>(std::move(made), *region_->backend);
      Print(*plan);
      return plan;
    });
  }

  void Run(const std::shared_ptr<const RegionPlan>& plan, std::span<void* const> externals,
           const RunContext& context) override {
    const size_t expected = plan->inputs.size() + plan->outputs.size();
    Require(externals.size() == expected, "the region has ", expected, " inputs and outputs, got ",
            externals.size());
    if (plan->steps.empty()) return;
    const InstancePool::Lease instance = Acquire(static_cast<const ReadyPlan&>(*plan), externals, context);
    instance->Run(externals, context);
  }

  std::vector<std::vector<uint8_t>> Packed() const override {
    std::vector<std::vector<uint8_t>> packed;
    for (const CompiledRegion::Op& op : region_->ops) {
      if (op.step != nullptr) packed.push_back(op.step->Packed());
    }
    return packed;
  }

 private:
  // Where no instance can be made, those of other shapes may hold the memory.
  InstancePool::Lease Acquire(const ReadyPlan& plan, std::span<void* const> externals,
                              const RunContext& context) {
    try {
      return plan.instances.Acquire(externals, context);
    } catch (const Error&) {
      plans_.DropIf([&](const std::shared_ptr<const ReadyPlan>& other) { return other.get() != &plan; });
      return plan.instances.Acquire(externals, context);
    }
  }

  std::shared_ptr<const CompiledRegion> region_;
  PlanCache<InputShapes, std::shared_ptr<const ReadyPlan>> plans_;
};

std::string NameOf(const LoweredOp& op) {
  std::string name = Where(*op.nodes[0]);
  for (size_t i = 1; i < op.nodes.size(); ++i) name += " and " + Where(*op.nodes[i]);
  return name;
}

// The output of a node that no step runs.
std::function<TensorShape(std::span<const TensorShape>)> ShapeFunction(const Graph& graph, const Node& node) {
  if (node.domain != kDomain) {
    return
        [spec = ReadStandard(graph, node)](std::span<const TensorShape> fed) { return OutputOf(spec, fed); };
  }
  NodeSpec spec = DecodeLowBit(graph, node);
  if (auto* const matmul = std::get_if<MatmulNode>(&spec)) std::vector<uint8_t>().swap(matmul->conv.weights);
  return [spec = std::move(spec)](std::span<const TensorShape> fed) { return OutputOf(spec, fed); };
}

class Compiler {
 public:
  Compiler(const Graph& graph, std::shared_ptr<Backend> backend,
           std::span<const std::span<const uint8_t>> packed)
      : graph_(graph), packed_(packed), uploaded_(graph.values.size()) {
    region_->backend = std::move(backend);
  }

  std::shared_ptr<const CompiledRegion> Compile() {
    region_->values = graph_.values.size();
    region_->inputs = graph_.inputs;
    std::vector<LoweredOp> ops = Lower(graph_, *region_->backend);
    const auto steps = static_cast<size_t>(std::count_if(
        ops.begin(), ops.end(), [](const LoweredOp& op) { return !op.reshape && op.is_needed; }));
    Require(packed_.empty() || packed_.size() == steps, "the region has ", steps,
            " steps, the compiled model holds packed bytes for ", packed_.size(),
            "; compile it again, with the options of this session");
    CreateSteps(ops);
    for (size_t i = 0; i < ops.size(); ++i) AddOp(ops[i], created_[i]);
    for (const ValueId id : graph_.outputs) {
      const Value& value = graph_.values[static_cast<size_t>(id)];
      Upload(id);
      region_->outputs.push_back({id, value.name, value.type});
    }
    region_->copy = region_->backend->CreateCopy();
    return region_;
  }

 private:
  // A step, or why there is none.
  struct Created {
    std::unique_ptr<Step> step;
    std::exception_ptr error;
  };

  // Packing weights and looking for lines takes most of the time in which a session opens, and no step waits for another.
  void CreateSteps(std::span<const LoweredOp> ops) {
    created_.resize(ops.size());
    std::vector<size_t> steps;
    for (size_t i = 0; i < ops.size(); ++i) {
      if (ops[i].is_needed && !ops[i].reshape) steps.push_back(i);
    }
    const auto create = [&](size_t step) noexcept {
      Created& created = created_[steps[step]];
      created = {};
      try {
        const std::span<const uint8_t> packed = packed_.empty() ? std::span<const uint8_t>() : packed_[step];
        created.step = region_->backend->CreateStep(graph_, ops[steps[step]].nodes, packed);
      } catch (...) {
        created.error = std::current_exception();
      }
      return created.error == nullptr;
    };
    std::atomic<size_t> next{0};
    std::atomic<bool> failed{false};
    const auto create_some = [&]() noexcept {
      for (size_t step = next++; step < steps.size() && !failed; step = next++) {
        if (!create(step)) failed = true;
      }
    };
    const size_t threads = std::min(region_->backend->Creators(), steps.size());
    std::vector<std::thread> helpers;
    helpers.reserve(threads);
    for (bool may_start = true; may_start && helpers.size() + 1 < threads;) {
      try {
        helpers.emplace_back(create_some);
      } catch (const std::exception&) {
        may_start = false;  // no more of them are to be had: fewer do
      }
    }
    create_some();
    for (std::thread& helper : helpers) helper.join();
    // What failed may have lacked the memory that others needed at the same time: alone it does not. The first that fails now
    // is the first of the region that does.
    for (size_t step = 0; step < steps.size(); ++step) {
      if (created_[steps[step]].step == nullptr && !create(step)) return;
    }
  }

  void AddOp(LoweredOp& op, Created& created) {
    const std::string name = NameOf(op);
    try {
      for (const ValueId id : op.fed) {
        if (op.is_needed) {
          Upload(id);
        } else {
          Describe(id);
        }
      }
      CompiledRegion::Op& made = region_->ops.emplace_back();
      made.name = name;
      for (const Node* node : op.nodes) made.nodes.push_back(node->name);
      made.output_type = graph_.values[static_cast<size_t>(op.output)].type;
      if (!op.is_needed) {
        made.shape = ShapeFunction(graph_, *op.nodes[0]);
      } else if (!op.reshape) {
        if (created.error) std::rethrow_exception(created.error);
        made.step = std::move(created.step);
      }
      made.reshape = std::move(op.reshape);
      made.cut = std::move(op.cut);
      made.moves = std::move(op.moves);
      made.fed = std::move(op.fed);
      made.output = op.output;
    } catch (const Error& e) {
      Fail(name, ": ", e.what());
    }
  }

  // What shapes need of a constant.
  void Describe(ValueId id) {
    const Value& value = graph_.values[static_cast<size_t>(id)];
    CheckGiven(value);
    if (value.constant)
      region_->described.emplace_back(id, TensorShape{value.constant->type, value.constant->shape});
  }

  static void CheckGiven(const Value& value) {
    Require(value.constant || !value.IsGiven(), "'", value.name,
            "' is no input of the region, and its value is no initializer of a type that lowbit ops know");
  }

  void Upload(ValueId id) {
    const Value& value = graph_.values[static_cast<size_t>(id)];
    CheckGiven(value);
    if (!value.constant || uploaded_[static_cast<size_t>(id)]) return;
    const ConstTensor& tensor = *value.constant;
    Require(tensor.data != nullptr || ElementCount(tensor.shape) == 0, "initializer '", value.name,
            "' has no data");
    region_->constants.push_back({id, {tensor.type, tensor.shape}, region_->backend->Upload(tensor)});
    uploaded_[static_cast<size_t>(id)] = true;
  }

  const Graph& graph_;
  std::span<const std::span<const uint8_t>> packed_;
  std::shared_ptr<CompiledRegion> region_ = std::make_shared<CompiledRegion>();
  std::vector<bool> uploaded_;    // by value
  std::vector<Created> created_;  // by op
};

}  // namespace

std::shared_ptr<Program> Program::Compile(const Graph& graph, std::shared_ptr<Backend> backend,
                                          std::span<const std::span<const uint8_t>> packed) {
  const Graph prepared = WithOneOutputEach(Prepared(graph, *backend));
  return std::make_shared<CompiledProgram>(Compiler(prepared, std::move(backend), packed).Compile());
}

}  // namespace lowbit::ep
