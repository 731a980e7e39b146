#include "ep/region/codes.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/stated_codes.h"
#include "core/status.h"
#include "ep/region/decode.h"

namespace lowbit::ep {
namespace {

using Codes = std::optional<MadeCodes>;

size_t At(ValueId id) { return static_cast<size_t>(id); }

// Standard ops only move codes here; a float becomes codes in QuantizeLinear, 8-bit ones, which nobody
// states.
Codes CodesMadeBy(const StandardNode& node, std::span<const Codes> fed) {
  if (fed.empty()) return std::nullopt;
  const auto unstated = [](Codes codes) {
    if (codes) codes->stated = false;  // as custom ops a session's nodes do not see through ONNX's own
    return codes;
  };
  if (std::holds_alternative<ReshapeOp>(node) || std::holds_alternative<TransposeOp>(node) ||
      std::holds_alternative<SliceOp>(node) || std::holds_alternative<SplitOp>(node) ||
      std::holds_alternative<NearestOp>(node)) {
    return unstated(fed[0]);
  }
  if (!std::holds_alternative<JoinOp>(node)) return std::nullopt;
  Codes joined = fed[0];
  for (const Codes& codes : fed.subspan(1)) joined = Joined(joined, codes);
  return unstated(joined);
}

std::vector<Codes> FedCodes(const Node& node, const std::vector<size_t>& fed,
                            const std::vector<Codes>& codes) {
  std::vector<Codes> out;
  for (const size_t i : fed) {
    const bool is_given = i < node.inputs.size() && node.inputs[i] != kAbsent;
    out.push_back(is_given ? codes[At(node.inputs[i])] : std::nullopt);
  }
  return out;
}

bool StatesFewBits(const Node& node) {
  const auto bits = node.attributes.find("x_bits");
  if (node.domain != kDomain || bits == node.attributes.end()) return false;
  const int64_t* value = std::get_if<int64_t>(&bits->second);
  return value != nullptr && *value < 8;
}

// Calls visit(index, node, whether its x has the stated bits) for every matrix product of few bits, in order.
template <typename Visit>
void ForReaders(const Graph& graph, Visit&& visit) {
  if (std::none_of(graph.nodes.begin(), graph.nodes.end(), StatesFewBits)) return;
  static_cast<void>(ProducersOf(graph));  // which checks every id
  std::vector<Codes> codes(graph.values.size());
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    Codes made;
    if (node.domain == kDomain) {
      const std::optional<NodeSpec> spec = DecodeWithoutWeights(graph, node);
      if (!spec) continue;
      const std::vector<Codes> fed = FedCodes(node, ReadLowBit(graph, node).fed, codes);
      const auto* const matmul = std::get_if<MatmulNode>(&*spec);
      if (matmul != nullptr && matmul->conv.x.bits < 8) {
        try {
          visit(n, *matmul, HoldsStatedBits(*matmul, fed.at(0)));
        } catch (const Error& e) {
          Fail(Where(node), ": ", e.what());
        }
      }
      made = CodesMadeBy(*spec, fed);
    } else if (node.domain.empty()) {
      try {
        const StandardNode standard = ReadStandard(graph, node);
        made = CodesMadeBy(standard, FedCodes(node, FedInputs(standard, node.inputs.size()), codes));
      } catch (const Error&) {
        continue;
      }
    }
    for (const ValueId output : node.outputs) {
      if (output != kAbsent) codes[At(output)] = made;  // several: the parts of a Split
    }
  }
}

constexpr int64_t kTableSize = 256;

// The code of the low bits of every byte. Tables live as long as the process: graphs only point to them.
const uint8_t* LowBitsTable(OperandType type) {
  using Tables = std::array<std::array<std::array<uint8_t, kTableSize>, 9>, 2>;
  static const Tables tables = [] {
    Tables made{};
    for (int bits = 1; bits <= 8; ++bits) {
      for (const Encoding encoding : {Encoding::kUnsigned, Encoding::kSigned}) {
        const LowBits low({bits, encoding});
        auto& table = made[encoding == Encoding::kSigned ? 1 : 0][static_cast<size_t>(bits)];
        for (size_t byte = 0; byte < table.size(); ++byte) table[byte] = low.Of(static_cast<uint8_t>(byte));
      }
    }
    return made;
  }();
  return tables[type.encoding == Encoding::kSigned ? 1 : 0][static_cast<size_t>(type.bits)].data();
}

class Rewriter {
 public:
  explicit Rewriter(Graph graph) : graph_(std::move(graph)) {}

  // A table between node `n` and its x.
  void Limit(size_t n, OperandType type) { limited_.emplace_back(n, type); }

  Graph Run() {
    std::vector<Node> nodes = std::move(graph_.nodes);
    graph_.nodes.clear();
    auto next = limited_.begin();
    for (size_t n = 0; n < nodes.size(); ++n) {
      if (next != limited_.end() && next->first == n) {
        nodes[n].inputs[0] = Limited(nodes[n], next->second);
        ++next;
      }
      graph_.nodes.push_back(std::move(nodes[n]));
    }
    return std::move(graph_);
  }

 private:
  ValueId Add(Value value) {
    graph_.values.push_back(std::move(value));
    return static_cast<ValueId>(graph_.values.size() - 1);
  }

  ValueId Limited(const Node& reader, OperandType type) {
    const bool is_signed = type.encoding == Encoding::kSigned;
    const ValueId x = reader.inputs[0];
    const auto [place, is_new] = made_.try_emplace({x, type.bits, is_signed}, kAbsent);
    if (!is_new) return place->second;
    Value table, y;
    table.name = "the codes of " + std::to_string(type.bits) + " bits";
    table.type = ElementType::kUInt8;
    table.dims = std::vector<int64_t>{kTableSize};
    table.constant = ConstTensor{ElementType::kUInt8, {kTableSize}, LowBitsTable(type)};
    y.name = graph_.values[At(x)].name + " in " + std::to_string(type.bits) + " bits";
    y.type = StorageOf(type.encoding);
    y.dims = graph_.values[At(x)].dims;
    Node node;
    node.name = reader.name;
    node.op = "LowBitLookup";
    node.domain = kDomain;
    node.since_version = 1;
    node.attributes = {{"x_encoding", std::string(is_signed ? "signed" : "unsigned")},
                       {"y_encoding", std::string(is_signed ? "signed" : "unsigned")}};
    node.inputs = {x, Add(std::move(table))};
    place->second = Add(std::move(y));
    node.outputs = {place->second};
    graph_.nodes.push_back(std::move(node));
    return place->second;
  }

  Graph graph_;
  std::vector<std::pair<size_t, OperandType>> limited_;  // in order
  std::map<std::tuple<ValueId, int, bool>, ValueId> made_;
};

}  // namespace

std::string CodesFault(const Graph& graph) {
  try {
    ForReaders(graph, [](size_t, const MatmulNode&, bool) {});
    return {};
  } catch (const Error& e) {
    return e.what();
  }
}

Graph WithStatedCodes(Graph graph, const Backend& backend) {
  std::vector<std::pair<size_t, OperandType>> open;
  std::vector<size_t> proven;
  ForReaders(graph, [&](size_t n, const MatmulNode& node, bool holds) {
    if (holds) {
      proven.push_back(n);
    } else if (!backend.LooksAtCodes()) {
      open.emplace_back(n, node.conv.x);
    }
  });
  for (const size_t n : proven) graph.nodes[n].x_has_stated_bits = true;
  Rewriter rewriter(std::move(graph));
  for (const auto& [n, type] : open) rewriter.Limit(n, type);
  return rewriter.Run();
}

}  // namespace lowbit::ep
