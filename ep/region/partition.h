// Which nodes of a model become regions.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ep/region/backend.h"
#include "ep/region/graph.h"

namespace lowbit::ep {

struct Partition {
  std::vector<std::vector<size_t>> regions;  // indices of nodes, topologically sorted
  struct Left {
    size_t node;
    std::string reason;
  };
  std::vector<Left> left;  // nodes that stay with ONNX Runtime
};

// Maximal regions of nodes that `backend` runs, each with at least one node of domain ai.lowbit unless the
// back end takes float regions. A region is convex: no path leaves it and comes back (ONNX Runtime would have
// to run it before and after what lies between).
Partition PartitionGraph(const Graph& graph, const Backend& backend);

}  // namespace lowbit::ep
