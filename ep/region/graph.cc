#include "ep/region/graph.h"

#include "core/status.h"

namespace lowbit::ep {
namespace {

void CheckIds(const Graph& graph, const std::vector<ValueId>& ids, bool may_be_absent, const char* of) {
  for (const ValueId id : ids) {
    Require((may_be_absent && id == kAbsent) || (id >= 0 && static_cast<size_t>(id) < graph.values.size()),
            of, ": there is no value ", id, " among ", graph.values.size());
  }
}

}  // namespace

std::string Where(const Node& node) { return "node '" + node.name + "' (" + node.op + ")"; }

std::vector<int64_t> ProducersOf(const Graph& graph) {
  constexpr int64_t kNone = -1;
  CheckIds(graph, graph.inputs, false, "the region's inputs");
  CheckIds(graph, graph.outputs, false, "the region's outputs");
  std::vector<int64_t> producers(graph.values.size(), kNone);
  std::vector<bool> known(graph.values.size());
  for (const ValueId id : graph.inputs) {
    Require(!known[static_cast<size_t>(id)], "value ", id, " is an input of the region twice");
    known[static_cast<size_t>(id)] = true;
  }
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    CheckIds(graph, node.inputs, true, node.name.c_str());
    CheckIds(graph, node.outputs, true, node.name.c_str());
    for (const ValueId id : node.inputs) {
      if (id == kAbsent) continue;
      const Value& value = graph.values[static_cast<size_t>(id)];
      Require(known[static_cast<size_t>(id)] || value.IsGiven(), Where(node), ": input '", value.name,
              "' is read before anything makes it");
    }
    for (const ValueId id : node.outputs) {
      if (id == kAbsent) continue;
      const Value& value = graph.values[static_cast<size_t>(id)];
      Require(!known[static_cast<size_t>(id)] && !value.IsGiven(), Where(node), ": output '", value.name,
              "' exists already");
      known[static_cast<size_t>(id)] = true;
      producers[static_cast<size_t>(id)] = static_cast<int64_t>(n);
    }
  }
  for (const ValueId id : graph.outputs) {
    const Value& value = graph.values[static_cast<size_t>(id)];
    Require(known[static_cast<size_t>(id)] || value.IsGiven(), "nothing makes output '", value.name,
            "' of the region");
  }
  return producers;
}

}  // namespace lowbit::ep
