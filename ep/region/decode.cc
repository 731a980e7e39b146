#include "ep/region/decode.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "core/status.h"
#include "ep/region/padding.h"

namespace lowbit::ep {
namespace {

const Value* ValueAt(const Graph& graph, const std::vector<ValueId>& ids, size_t i) {
  return i < ids.size() && ids[i] != kAbsent ? &graph.values[static_cast<size_t>(ids[i])] : nullptr;
}

void RequireOneOutput(const Node& node) {
  const auto given =
      std::count_if(node.outputs.begin(), node.outputs.end(), [](ValueId id) { return id != kAbsent; });
  Require(given == 1 && node.outputs[0] != kAbsent, "it has ", given,
          " outputs that are used, expected the first alone");
}

}  // namespace

bool IsSplit(const Node& node) { return node.domain.empty() && node.op == "Split"; }

size_t GivenOutput(const Node& node) {
  const auto given =
      std::find_if(node.outputs.begin(), node.outputs.end(), [](ValueId id) { return id != kAbsent; });
  Require(given != node.outputs.end(), "it has no outputs");
  return static_cast<size_t>(given - node.outputs.begin());
}

LowBitInputs ReadLowBit(const Graph& graph, const Node& node) {
  LowBitInputs out;
  out.schema = FindOpSchema(node.op);
  Require(node.domain == kDomain && out.schema != nullptr, "domain ", kDomain, " has no op ", node.op,
          "; update lowbit if the file is newer");
  RequireOneOutput(node);
  out.attributes = node.attributes;

  const std::vector<InputSchema>& inputs = out.schema->inputs;
  Require(node.inputs.size() <= inputs.size() || inputs.back().variadic, "it has ", node.inputs.size(),
          " inputs, expected at most ", inputs.size());
  const size_t count = std::max(node.inputs.size(), inputs.size());
  out.constants.resize(count);
  out.present.resize(count);
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const Value* value = ValueAt(graph, node.inputs, i);
    if (value == nullptr) continue;
    out.present[i] = true;
    if (inputs[std::min(i, inputs.size() - 1)].constant) {
      out.constants[i] = value->constant;
    } else {
      out.fed.push_back(i);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    const InputSchema& input = inputs[std::min(i, inputs.size() - 1)];
    Require(out.present[i] || input.optional || (input.variadic && i >= inputs.size()), "input '", input.name,
            "' is missing");
    Require(!out.present[i] || !input.constant || out.constants[i], "input '", input.name,
            "' is computed by the model or has a type that no lowbit op knows, expected a constant of it");
  }
  return out;
}

NodeSpec DecodeLowBit(const Graph& graph, const Node& node, Weights weights) {
  LowBitInputs inputs = ReadLowBit(graph, node);
  if (weights == Weights::kMayBeMissing) {
    for (std::optional<ConstTensor>& constant : inputs.constants) {
      if (constant && constant->data == nullptr) constant.reset();
    }
  }
  NodeSpec spec = DecodeNode(*inputs.schema, inputs.attributes, inputs.constants, inputs.present, weights);
  PadChannels(spec, node.x_padding, node.y_padding);
  return spec;
}

std::optional<NodeSpec> DecodeWithoutWeights(const Graph& graph, const Node& node) {
  if (node.domain != kDomain) return std::nullopt;
  try {
    LowBitInputs inputs = ReadLowBit(graph, node);
    for (size_t i = 0; i < inputs.schema->inputs.size(); ++i) {
      if (std::string_view(inputs.schema->inputs[i].name) == "w") inputs.constants[i].reset();
    }
    return DecodeNode(*inputs.schema, inputs.attributes, inputs.constants, inputs.present,
                      Weights::kMayBeMissing);
  } catch (const Error&) {
    return std::nullopt;
  }
}

StandardNode ReadStandard(const Graph& graph, const Node& node) {
  Require(node.domain.empty(), "lowbit has no ops of domain ", node.domain);
  StandardOutputs outputs;
  if (IsSplit(node)) {
    outputs = {node.outputs.size(), GivenOutput(node)};
  } else {
    RequireOneOutput(node);
  }
  std::vector<StandardInput> inputs(node.inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Value* value = ValueAt(graph, node.inputs, i);
    if (value == nullptr) continue;
    inputs[i] = {true, value->type, value->dims, value->constant, value->constant_ints};
  }
  return DecodeStandard(node.op, node.since_version, node.attributes, inputs, outputs);
}

bool NamesReshape(const Graph& graph, const Node& node) {
  static constexpr std::array<std::string_view, 6> kNames = {"Reshape",   "Flatten",  "Squeeze",
                                                             "Unsqueeze", "Identity", "Dropout"};
  if (!node.domain.empty()) return false;
  if (std::find(kNames.begin(), kNames.end(), node.op) != kNames.end()) return true;
  if (node.op != "Cast" || node.inputs.empty() || node.outputs.empty()) return false;
  const Value *const x = ValueAt(graph, node.inputs, 0), *const y = ValueAt(graph, node.outputs, 0);
  return x != nullptr && y != nullptr && x->type == y->type;
}

}  // namespace lowbit::ep
