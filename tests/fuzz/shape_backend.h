// A device that computes nothing: its steps know the shapes of their outputs. Enough to load and to plan a region,
// without any kernel.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"
#include "ep/region/backend.h"
#include "ep/region/compiled_model.h"
#include "ep/region/decode.h"

namespace lowbit::ep {

struct ShapePlan final : StepPlan {
  std::string Text() const override { return "shapes"; }
};

struct ShapeStep : Step {
  std::shared_ptr<const StepPlan> Plan(std::span<const TensorShape>) const override {
    return std::make_shared<ShapePlan>();
  }
};

template <typename Decoded>
struct NodeStep final : ShapeStep {
  explicit NodeStep(Decoded its_node) : node(std::move(its_node)) {}
  TensorShape Output(std::span<const TensorShape> fed) const override { return OutputOf(node, fed); }
  Decoded node;
};

struct CopyStep final : ShapeStep {
  TensorShape Output(std::span<const TensorShape> fed) const override { return fed[0]; }
};

class ShapeBackend final : public Backend {
 public:
  std::optional<std::string> Refusal(const Graph& graph, const Node& node) const override {
    try {
      StepOf(graph, node);
      return std::nullopt;
    } catch (const Error& e) {
      return e.what();
    }
  }
  std::unique_ptr<Step> CreateStep(const Graph& graph, std::span<const Node* const> nodes,
                                   std::span<const uint8_t>) override {
    return StepOf(graph, *nodes[0]);
  }
  std::unique_ptr<Step> CreateCopy() override { return std::make_unique<CopyStep>(); }
  DeviceConstant Upload(const ConstTensor&) override { return std::make_shared<int>(); }
  std::unique_ptr<Instance> CreateInstance(const RegionPlan&) override { Fail("nothing is computed here"); }
  size_t Alignment() const override { return 64; }
  size_t MaxInstances() const override { return 1; }
  std::string Fingerprint() const override { return "shapes"; }

 private:
  static std::unique_ptr<Step> StepOf(const Graph& graph, const Node& node) {
    if (node.domain == kDomain)
      return std::make_unique<NodeStep<NodeSpec>>(DecodeLowBit(graph, node, Weights::kMayBeMissing));
    return std::make_unique<NodeStep<StandardNode>>(ReadStandard(graph, node));
  }
};

}  // namespace lowbit::ep
