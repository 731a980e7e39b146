#include "ep/region/channels.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "ep/region/decode.h"

namespace lowbit::ep {
namespace {

constexpr int64_t kFewestChannels = 8;  // tensors of fewer grow too much

// Tensors that have their channels from each other, as sets.
class ChannelSets {
 public:
  explicit ChannelSets(size_t values) : parents_(values), counts_(values), is_fixed_(values) {
    std::iota(parents_.begin(), parents_.end(), size_t{0});
  }

  void Join(ValueId a, ValueId b) {
    const size_t from = Root(a), to = Root(b);
    if (from == to) return;
    parents_[from] = to;
    is_fixed_[to] = is_fixed_[to] || is_fixed_[from];
    if (counts_[from] != 0) State(to, counts_[from]);
  }
  void State(ValueId id, int64_t channels) { State(Root(id), channels); }
  // They stay as the model has them.
  void Fix(ValueId id) { is_fixed_[Root(id)] = true; }

  int64_t Padding(ValueId id, int64_t multiple) {
    const size_t root = Root(id);
    const int64_t count = counts_[root], padding = (multiple - count % multiple) % multiple;
    return is_fixed_[root] || count < kFewestChannels || padding > count ? 0 : padding;
  }

 private:
  size_t Root(ValueId id) {
    auto at = static_cast<size_t>(id);
    while (parents_[at] != at) at = parents_[at] = parents_[parents_[at]];
    return at;
  }
  // A set of two numbers is of a node that broadcasts channels.
  void State(size_t root, int64_t channels) {
    is_fixed_[root] = is_fixed_[root] || (counts_[root] != 0 && counts_[root] != channels);
    counts_[root] = channels;
  }

  std::vector<size_t> parents_;
  std::vector<int64_t> counts_;  // of roots; 0: nobody said
  std::vector<bool> is_fixed_;   // of roots
};

bool MayGrow(const MatmulNode& node) {
  const ConvSpec& conv = node.conv;
  return !node.layout.is_gemm && node.layout.spatial <= 2 && !conv.geometry.transposed &&
         (conv.geometry.group == 1 || conv.geometry.IsDepthwise()) && conv.epilogue.quantized_output &&
         conv.x.encoding != Encoding::kBipolar && conv.w.encoding != Encoding::kBipolar;
}

// Joins what the node reads and makes; false where it may be no node of more channels.
bool JoinChannels(const NodeSpec& spec, const std::vector<ValueId>& fed, ValueId y, ChannelSets& sets) {
  const auto join_all = [&] {
    for (const ValueId id : fed) sets.Join(id, y);
    return true;
  };
  return std::visit(
      [&](const auto& node) {
        using Spec = std::decay_t<decltype(node)>;
        if constexpr (std::is_same_v<Spec, MatmulNode>) {
          if (!MayGrow(node)) return false;
          const ConvGeometry& g = node.conv.geometry;
          sets.State(fed[0], g.in_channels);
          sets.State(y, g.out_channels);
          if (g.IsDepthwise()) sets.Join(fed[0], y);
          for (size_t i = 1; i < fed.size(); ++i) sets.Join(fed[i], y);
          return true;
        } else if constexpr (std::is_same_v<Spec, LookupNode>) {
          if (node.channels > 1) sets.State(y, node.channels);
          return join_all();
        } else if constexpr (std::is_same_v<Spec, AffineNode>) {
          return node.spec.channels == 1 && join_all();
        } else if constexpr (std::is_same_v<Spec, BinaryNode> || std::is_same_v<Spec, MaxPoolNode> ||
                             std::is_same_v<Spec, AveragePoolNode> ||
                             std::is_same_v<Spec, GlobalAveragePoolNode> ||
                             std::is_same_v<Spec, ResizeNode>) {
          return join_all();
        } else {
          return false;
        }
      },
      spec);
}

}  // namespace

Graph WithPaddedChannels(Graph graph, const Backend& backend) {
  const int64_t multiple = backend.ChannelMultiple();
  if (multiple <= 1) return graph;
  static_cast<void>(ProducersOf(graph));  // which checks every id
  ChannelSets sets(graph.values.size());
  for (size_t i = 0; i < graph.values.size(); ++i) {
    if (graph.values[i].IsGiven()) sets.Fix(static_cast<ValueId>(i));
  }
  for (const auto* const ids : {&graph.inputs, &graph.outputs}) {
    for (const ValueId id : *ids) sets.Fix(id);
  }
  for (const Node& node : graph.nodes) {
    const std::optional<NodeSpec> spec = DecodeWithoutWeights(graph, node);
    if (spec) {
      std::vector<ValueId> fed;
      for (const size_t i : ReadLowBit(graph, node).fed) fed.push_back(node.inputs[i]);
      if (!fed.empty() && JoinChannels(*spec, fed, node.outputs[0], sets)) continue;
    }
    for (const auto* const ids : {&node.inputs, &node.outputs}) {
      for (const ValueId id : *ids) {
        if (id != kAbsent) sets.Fix(id);
      }
    }
  }
  for (Node& node : graph.nodes) {
    if (node.domain != kDomain || node.inputs.empty() || node.outputs.empty() || node.inputs[0] == kAbsent ||
        node.outputs[0] == kAbsent)
      continue;
    node.x_padding = sets.Padding(node.inputs[0], multiple);
    node.y_padding = sets.Padding(node.outputs[0], multiple);
  }
  return graph;
}

}  // namespace lowbit::ep
