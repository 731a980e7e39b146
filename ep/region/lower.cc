#include "ep/region/lower.h"

#include <algorithm>
#include <type_traits>

#include "core/status.h"
#include "ep/region/channels.h"
#include "ep/region/codes.h"

namespace lowbit::ep {
namespace {

CutFunction CutOf(const StandardNode& node) {
  return std::visit(
      [](const auto& op) -> CutFunction {
        using Op = std::decay_t<decltype(op)>;
        if constexpr (std::is_same_v<Op, SliceOp> || std::is_same_v<Op, SplitOp>) {
          return [op](std::span<const int64_t> x) { return RangesOf(op, x); };
        } else {
          return nullptr;
        }
      },
      node);
}

// Runs `read`, whose errors do not name the node.
template <typename Read>
auto Named(const Node& node, Read&& read) {
  try {
    return read();
  } catch (const Error& e) {
    Fail(Where(node), ": ", e.what());
  }
}

class Lowering {
 public:
  Lowering(const Graph& graph, const Backend& backend)
      : graph_(graph),
        backend_(backend),
        needed_(graph.values.size()),
        reads_(graph.values.size()),
        reader_(graph.values.size(), kNoNode),
        fused_with_(graph.nodes.size()) {}

  std::vector<LoweredOp> Run() {
    ProducersOf(graph_);
    FindNeeded();
    FindGroups();
    std::vector<LoweredOp> ops;
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      if (taken_[n]) continue;
      ops.push_back(LowerNode(n));
      ops.back().is_needed = IsLive(graph_.nodes[n]);
    }
    return ops;
  }

 private:
  static constexpr size_t kNoNode = static_cast<size_t>(-1);

  bool IsLive(const Node& node) const {
    return std::any_of(node.outputs.begin(), node.outputs.end(),
                       [&](ValueId id) { return id != kAbsent && needed_[static_cast<size_t>(id)]; });
  }

  void FindNeeded() {
    for (const ValueId id : graph_.outputs) {
      needed_[static_cast<size_t>(id)] = true;
      ++reads_[static_cast<size_t>(id)];
    }
    for (size_t n = graph_.nodes.size(); n-- > 0;) {
      const Node& node = graph_.nodes[n];
      const bool is_live = IsLive(node);
      for (const ValueId id : node.inputs) {
        if (id == kAbsent) continue;
        if (is_live) needed_[static_cast<size_t>(id)] = true;
        ++reads_[static_cast<size_t>(id)];
        reader_[static_cast<size_t>(id)] = n;
      }
    }
  }

  void AddMembers(size_t n, std::vector<size_t>& out) const {
    for (const size_t before : fused_with_[n]) AddMembers(before, out);
    out.push_back(n);
  }
  // The nodes that become one step with `n` as its last one so far, in order.
  std::vector<const Node*> GroupOf(size_t n) const {
    std::vector<size_t> members;
    AddMembers(n, members);
    return InOrder(std::move(members));
  }
  std::vector<const Node*> InOrder(std::vector<size_t> members) const {
    std::sort(members.begin(), members.end());
    std::vector<const Node*> nodes;
    nodes.reserve(members.size());
    for (const size_t n : members) nodes.push_back(&graph_.nodes[n]);
    return nodes;
  }
  // Whether those that end in `n` and the reader of what it makes may become one step, with what the reader
  // is already one with.
  bool Joins(size_t n, size_t reader) const {
    std::vector<size_t> members;
    AddMembers(n, members);
    for (const size_t before : fused_with_[reader]) AddMembers(before, members);
    return backend_.Fuses(graph_, InOrder(std::move(members)), graph_.nodes[reader]);
  }

  void FindGroups() {
    taken_.assign(graph_.nodes.size(), false);
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      const Node& node = graph_.nodes[n];
      if (!IsLive(node) || node.outputs.size() != 1) continue;
      const size_t value = static_cast<size_t>(node.outputs[0]), reader = reader_[value];
      if (reads_[value] != 1 || reader == kNoNode) continue;
      if (NamesReshape(graph_, node) || NamesReshape(graph_, graph_.nodes[reader]) || !Joins(n, reader))
        continue;
      fused_with_[reader].push_back(n);
      taken_[n] = true;
    }
  }

  // Appends what a run feeds to the node; it gets the rest from the nodes before it in its group.
  static void AppendFed(const Node& node, std::span<const size_t> fed, LoweredOp& op) {
    const auto is_made = [&](ValueId id) {
      return std::any_of(op.nodes.begin(), op.nodes.end(),
                         [id](const Node* before) { return before->outputs[0] == id; });
    };
    for (const size_t i : fed) {
      Require(i < node.inputs.size() && node.inputs[i] != kAbsent, "input ", i, " is missing");
      if (!is_made(node.inputs[i])) op.fed.push_back(node.inputs[i]);
    }
  }

  void AppendNode(const Node& node, LoweredOp& op) const {
    Named(node, [&] {
      if (node.domain == kDomain) {
        AppendFed(node, ReadLowBit(graph_, node).fed, op);
        // Others do not move channels alone: what they mean need not be decoded for that.
        const bool may_move = node.op == "LowBitConcat" || node.op == "LowBitLookup" ||
                              node.op == "LowBitRequantize" || node.op == "LowBitQuantize";
        if (const auto spec = may_move ? DecodeWithoutWeights(graph_, node) : std::nullopt)
          op.moves = MovesOf(*spec);
        return;
      }
      const StandardNode standard = ReadStandard(graph_, node);
      AppendFed(node, FedInputs(standard, node.inputs.size()), op);
      if (const auto* reshape = std::get_if<ReshapeOp>(&standard)) op.reshape = *reshape;
      op.cut = CutOf(standard);
      op.moves = MovesOf(standard);
    });
    op.nodes.push_back(&node);
    op.output = node.outputs[GivenOutput(node)];
  }

  LoweredOp LowerNode(size_t n) const {
    LoweredOp op;
    for (const Node* const node : GroupOf(n)) AppendNode(*node, op);
    if (op.nodes.size() > 1) op.moves = nullptr;
    return op;
  }

  const Graph& graph_;
  const Backend& backend_;
  std::vector<bool> needed_;    // by value
  std::vector<size_t> reads_;   // by value: how often it is read, by nodes or as output
  std::vector<size_t> reader_;  // by value: one of the nodes that read it
  // By node: those before it whose outputs it alone reads, in the step that it becomes with them.
  std::vector<std::vector<size_t>> fused_with_;
  std::vector<bool> taken_;  // by node: part of the step of a later one
};

}  // namespace

Graph Prepared(const Graph& graph, const Backend& backend) {
  return WithPaddedChannels(WithStatedCodes(graph, backend), backend);
}

Graph WithOneOutputEach(Graph graph) {
  std::vector<Node> nodes;
  nodes.reserve(graph.nodes.size());
  for (Node& node : graph.nodes) {
    if (!IsSplit(node)) {
      nodes.push_back(std::move(node));
      continue;
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      if (node.outputs[i] == kAbsent) continue;
      Node& part = nodes.emplace_back(node);
      std::fill(part.outputs.begin(), part.outputs.end(), kAbsent);
      part.outputs[i] = node.outputs[i];
    }
  }
  graph.nodes = std::move(nodes);
  return graph;
}

std::vector<LoweredOp> Lower(const Graph& graph, const Backend& backend) {
  return Lowering(graph, backend).Run();
}

}  // namespace lowbit::ep
