// How regions are found.
//
// 1. Nodes that the back end runs, and reshapes, are "claimed". (One that has to be a region of its own
//    counts as not claimed in 1 and 2.) Every claimed node gets a depth: how many times a path that leads to it has
//    to leave the claimed nodes and come back. Along a path the depth never falls, and it rises on the way
//    through a node that is not claimed. So no path leaves a set of claimed nodes of equal depth and comes
//    back, and those that hang together are convex regions.
// 2. That may cut where no cut is needed (a short branch gets a depth before the node that joins it with a
//    long one). Neighbours are merged wherever no other path leads from one to the other.
// 3. Regions without a lowbit node are given up unless the back end wants them, and regions that nobody reads from.
// 4. Regions that read the same tensor are merged, too, wherever no path leads from one to the other: a run is then
//    one launch of a graph instead of several, and what they all need of that tensor is made once.
// 5. Reshapes at a region's rim which would cost a copy there are given up.
#include "ep/region/partition.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/status.h"
#include "ep/region/lower.h"

namespace lowbit::ep {
namespace {

size_t At(ValueId id) { return static_cast<size_t>(id); }

// Who makes and who reads the values of a graph, by node.
class Edges {
 public:
  explicit Edges(const Graph& graph)
      : producers_(ProducersOf(graph)), readers_(graph.values.size()), leaves_(graph.values.size()) {
    for (size_t n = 0; n < graph.nodes.size(); ++n) {
      for (const ValueId id : graph.nodes[n].inputs) {
        if (id != kAbsent && producers_[At(id)] >= 0) readers_[At(id)].push_back(n);
      }
    }
    for (const ValueId id : graph.outputs) leaves_[At(id)] = true;
  }

  template <typename Visit>  // of nodes
  void ForPredecessors(const Node& node, Visit&& visit) const {
    for (const ValueId id : node.inputs) {
      if (id != kAbsent && producers_[At(id)] >= 0) visit(static_cast<size_t>(producers_[At(id)]));
    }
  }
  template <typename Visit>
  void ForSuccessors(const Node& node, Visit&& visit) const {
    for (const ValueId id : node.outputs) {
      if (id != kAbsent) std::for_each(readers_[At(id)].begin(), readers_[At(id)].end(), visit);
    }
  }
  const std::vector<size_t>& readers(ValueId id) const { return readers_[At(id)]; }
  int64_t producer(ValueId id) const { return producers_[At(id)]; }
  bool IsGraphOutput(ValueId id) const { return leaves_[At(id)]; }

 private:
  std::vector<int64_t> producers_;
  std::vector<std::vector<size_t>> readers_;
  std::vector<bool> leaves_;
};

// Sets of nodes: a region each, or a single node that is not claimed.
class NodeSets {
 public:
  explicit NodeSets(size_t nodes) : parent_(nodes), members_(nodes) {
    std::iota(parent_.begin(), parent_.end(), size_t{0});
    for (size_t n = 0; n < nodes; ++n) members_[n] = {n};
  }

  size_t Of(size_t node) {
    while (parent_[node] != node) node = parent_[node] = parent_[parent_[node]];
    return node;
  }
  // The nodes of a set, in no order.
  const std::vector<size_t>& Members(size_t set) const { return members_[set]; }
  void Join(size_t a, size_t b) {
    a = Of(a), b = Of(b);
    if (a == b) return;
    if (members_[a].size() < members_[b].size()) std::swap(a, b);
    parent_[b] = a;
    members_[a].insert(members_[a].end(), members_[b].begin(), members_[b].end());
    std::vector<size_t>().swap(members_[b]);
  }

 private:
  std::vector<size_t> parent_;
  std::vector<std::vector<size_t>> members_;
};

class Partitioner {
 public:
  Partitioner(const Graph& graph, const Backend& backend)
      : graph_(graph),
        backend_(backend),
        edges_(graph),
        sets_(graph.nodes.size()),
        reasons_(graph.nodes.size()),
        depths_(graph.nodes.size()),
        seen_(graph.nodes.size()),
        budget_(kVisitsPerNode * graph.nodes.size()) {}

  Partition Run() {
    for (size_t n = 0; n < graph_.nodes.size(); ++n) reasons_[n] = Refusal(graph_.nodes[n]);
    JoinEqualDepths();
    OrderSets();
    while (Spend(graph_.nodes.size()) && MergeNeighbours()) {
    }
    if (!backend_.TakesFloatRegions()) GiveUpRegionsWithoutLowBit();
    GiveUpUnreadRegions();
    MergeSiblings();
    TrimRims();
    return Collect();
  }

 private:
  // Merging looks for other paths, but visits no more nodes than this, so that it stays linear. Where that
  // does not suffice, regions stay smaller than they could be.
  static constexpr size_t kVisitsPerNode = 64;
  static constexpr size_t kNone = static_cast<size_t>(-1);

  bool IsClaimed(size_t n) const { return !reasons_[n].has_value(); }

  std::optional<std::string> Refusal(const Node& node) const {
    if (node.barred) return node.barred;
    if (!NamesReshape(graph_, node)) return backend_.Refusal(graph_, node);
    try {
      Require(std::holds_alternative<ReshapeOp>(ReadStandard(graph_, node)), "it does more than a reshape");
      Require(graph_.values[At(node.inputs[0])].type.has_value(),
              "its input has an element type that no lowbit op knows");
      return std::nullopt;
    } catch (const Error& e) {
      return e.what();
    }
  }

  // Whether a node may share a region. One that is fed pictures of ever new sizes, of which it makes some of
  // one size, is a region of its own: a new size is then planned for it alone, and not for the whole network.
  bool IsJoined(size_t n) const { return IsClaimed(n) && graph_.nodes[n].op != "LowBitImage"; }

  void JoinEqualDepths() {
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      const size_t leaving = IsJoined(n) ? 0 : 1;  // from a node that is joined to one that is not
      edges_.ForPredecessors(graph_.nodes[n], [&](size_t p) {
        depths_[n] = std::max(depths_[n], depths_[p] + (IsJoined(p) ? leaving : 0));
      });
      if (!IsJoined(n)) continue;
      edges_.ForPredecessors(graph_.nodes[n], [&](size_t p) {
        if (IsJoined(p) && depths_[p] == depths_[n]) sets_.Join(p, n);
      });
    }
  }

  // The sets in an order in which they could run: by depth, and at equal depth what is not joined first.
  void OrderSets() {
    std::vector<size_t> nodes(graph_.nodes.size());
    std::iota(nodes.begin(), nodes.end(), size_t{0});
    std::stable_sort(nodes.begin(), nodes.end(), [&](size_t a, size_t b) {
      return std::pair(depths_[a], IsJoined(a)) < std::pair(depths_[b], IsJoined(b));
    });
    places_.assign(nodes.size(), kNone);
    for (const size_t n : nodes) {
      const size_t set = sets_.Of(n);
      if (places_[set] != kNone) continue;
      places_[set] = order_.size();
      order_.push_back(set);
    }
  }

  bool MergeNeighbours() {
    bool merged = false;
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      if (!IsJoined(n)) continue;
      edges_.ForPredecessors(graph_.nodes[n], [&](size_t p) {
        const size_t from = sets_.Of(p), to = sets_.Of(n);
        if (!IsJoined(p) || from == to || HaveOtherPath(from, to)) return;
        Merge(from, to);
        merged = true;
      });
    }
    return merged;
  }

  // After what is given up, which no sibling keeps.
  void MergeSiblings() {
    std::vector<size_t> reader(graph_.values.size(), kNone);  // of each value: the last one seen
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      if (!IsJoined(n)) continue;
      for (const ValueId id : graph_.nodes[n].inputs) {
        if (id == kAbsent || graph_.values[At(id)].IsGiven()) continue;
        const size_t sibling = std::exchange(reader[At(id)], n);
        if (sibling == kNone) continue;
        size_t from = sets_.Of(sibling), to = sets_.Of(n);
        if (places_[from] > places_[to]) std::swap(from, to);
        if (from != to && !HaveOtherPath(from, to)) Merge(from, to);
      }
    }
  }

  // Whether a path leads from set `from` to set `to` through a third one, or whether that took too long to
  // find out. Marks the sets between the two (in order_) to which paths lead from `from`.
  bool HaveOtherPath(size_t from, size_t to) {
    ++search_;
    std::vector<size_t> open = {from};
    while (!open.empty()) {
      const size_t set = open.back();
      open.pop_back();
      for (const size_t n : sets_.Members(set)) {
        bool arrived = false;
        edges_.ForSuccessors(graph_.nodes[n], [&](size_t s) {
          const size_t next = sets_.Of(s);
          arrived = arrived || (next == to && set != from);
          if (next == from || places_[next] >= places_[to] || seen_[next] == search_) return;
          seen_[next] = search_;
          open.push_back(next);
        });
        if (arrived || !Spend(1)) return true;
      }
    }
    return false;
  }

  // After HaveOtherPath(from, to) said no. What it marked moves behind the merged set, everything else
  // between the two before it.
  void Merge(size_t from, size_t to) {
    const size_t begin = places_[from], end = places_[to] + 1;
    std::vector<size_t> before, behind;
    for (size_t place = begin; place < end; ++place) {
      const size_t set = order_[place];
      if (set != kNone && set != from && set != to) (seen_[set] == search_ ? behind : before).push_back(set);
    }
    Spend(end - begin);
    sets_.Join(from, to);
    before.push_back(sets_.Of(from));
    before.insert(before.end(), behind.begin(), behind.end());
    before.resize(end - begin, kNone);
    for (size_t place = begin; place < end; ++place) {
      order_[place] = before[place - begin];
      if (order_[place] != kNone) places_[order_[place]] = place;
    }
  }

  bool Spend(size_t visits) {
    budget_ -= std::min(budget_, visits);
    return budget_ > 0;
  }

  void GiveUpRegionsWithoutLowBit() {
    std::vector<bool> has_lowbit(graph_.nodes.size());
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      if (IsClaimed(n) && graph_.nodes[n].domain == kDomain) has_lowbit[sets_.Of(n)] = true;
    }
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      if (IsClaimed(n) && !has_lowbit[sets_.Of(n)]) {
        reasons_[n] = "no node of " + std::string(kDomain) + " stands beside it";
      }
    }
  }

  bool SameRegion(size_t a, size_t b) { return IsClaimed(a) && IsClaimed(b) && sets_.Of(a) == sets_.Of(b); }

  // Whether something outside of the region of node `n` needs `value`.
  bool IsNeededOutside(ValueId value, size_t n) {
    const std::vector<size_t>& readers = edges_.readers(value);
    return edges_.IsGraphOutput(value) ||
           std::any_of(readers.begin(), readers.end(), [&](size_t reader) { return !SameRegion(reader, n); });
  }

  // ONNX Runtime never runs a node without outputs, so a region that nobody reads from would hide that one of
  // its nodes cannot run.
  void GiveUpUnreadRegions() {
    std::vector<bool> is_read(graph_.nodes.size());
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      const std::vector<ValueId>& made = graph_.nodes[n].outputs;
      if (std::any_of(made.begin(), made.end(),
                      [&](ValueId id) { return id != kAbsent && IsNeededOutside(id, n); })) {
        is_read[sets_.Of(n)] = true;
      }
    }
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      if (IsClaimed(n) && !is_read[sets_.Of(n)]) reasons_[n] = "nobody reads what its region makes";
    }
  }

  // Whether reshape `n` of the region makes something that the region would have to copy, though ONNX Runtime
  // could make it of something that it holds anyway: an input of the region, or an output.
  bool CostsCopy(size_t n) {
    const ValueId y = graph_.nodes[n].outputs[0];
    if (!IsNeededOutside(y, n)) return false;
    const std::vector<size_t>& readers = edges_.readers(y);
    const bool is_last =
        std::none_of(readers.begin(), readers.end(), [&](size_t reader) { return SameRegion(reader, n); });
    for (size_t at = n;;) {
      const ValueId x = graph_.nodes[at].inputs[0];
      const int64_t producer = edges_.producer(x);
      if (producer < 0 || !SameRegion(static_cast<size_t>(producer), n)) return true;
      if (is_last && IsNeededOutside(x, n)) return true;
      at = static_cast<size_t>(producer);
      if (!NamesReshape(graph_, graph_.nodes[at])) return false;
    }
  }

  void TrimRims() {
    std::vector<size_t> open;
    for (size_t n = graph_.nodes.size(); n-- > 0;) open.push_back(n);
    while (!open.empty()) {
      const size_t n = open.back();
      open.pop_back();
      if (!IsClaimed(n) || !NamesReshape(graph_, graph_.nodes[n]) || !CostsCopy(n)) continue;
      reasons_[n] = "it stands at the rim of a region, where its output would have to be copied";
      const auto look_again = [&](size_t neighbour) { open.push_back(neighbour); };
      edges_.ForPredecessors(graph_.nodes[n], look_again);
      edges_.ForSuccessors(graph_.nodes[n], look_again);
    }
  }

  Partition Collect() {
    Partition partition;
    std::vector<size_t> place(graph_.nodes.size(), graph_.nodes.size());  // of a set's region in `partition`
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      if (!IsClaimed(n)) {
        partition.left.push_back({n, *std::move(reasons_[n])});
        continue;
      }
      size_t& region = place[sets_.Of(n)];
      if (region == graph_.nodes.size()) {
        region = partition.regions.size();
        partition.regions.emplace_back();
      }
      partition.regions[region].push_back(n);
    }
    return partition;
  }

  const Graph& graph_;
  const Backend& backend_;
  Edges edges_;
  NodeSets sets_;
  std::vector<std::optional<std::string>> reasons_;  // why a node is not claimed
  std::vector<size_t> depths_;                       // by node
  std::vector<size_t> order_, places_;               // sets in order, and the place of each; kNone: a gap
  std::vector<size_t> seen_;                         // by set: the last search that came there
  size_t search_ = 0;
  size_t budget_;
};

}  // namespace

Partition PartitionGraph(const Graph& graph, const Backend& backend) {
  return Partitioner(graph, backend).Run();
}

}  // namespace lowbit::ep
