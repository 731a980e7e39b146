// The part of a compiled region that no shape changes, and the plans that are made of it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/nodes/standard_nodes.h"
#include "ep/region/backend.h"
#include "ep/region/graph.h"
#include "ep/region/lower.h"
#include "ep/region/program.h"

namespace lowbit::ep {

// Immutable once it is made.
struct CompiledRegion {
  struct Op {
    std::string name;                  // "node 'name' (Op)"
    std::vector<std::string> nodes;    // the names alone
    std::optional<ReshapeOp> reshape;  // no step: `output` lies where fed[0] does
    std::unique_ptr<Step> step;
    // Set where the step takes a part of fed[0]: it need not run where that lies in one piece.
    CutFunction cut;
    // Set where the step only moves channels: it need not run where who makes them stores them there.
    MoveFunction moves;
    // No step and no reshape: nobody needs the output, whose shape only says whether the node could run.
    std::function<TensorShape(std::span<const TensorShape>)> shape;
    std::vector<ValueId> fed;
    ValueId output = kAbsent;
    std::optional<ElementType> output_type;  // as the model declares it
  };
  struct Constant {
    ValueId value = kAbsent;
    TensorShape shape;
    DeviceConstant data;
  };
  struct Output {
    ValueId value = kAbsent;
    std::string name;
    std::optional<ElementType> type;  // as the model declares it
  };

  std::shared_ptr<Backend> backend;  // outlives the steps
  std::vector<Op> ops;
  std::unique_ptr<Step> copy;
  std::vector<Constant> constants;
  std::vector<std::pair<ValueId, TensorShape>> described;  // constants that only shapes need
  std::vector<ValueId> inputs;
  std::vector<Output> outputs;
  size_t values = 0;
};

// Throws Error, naming the node.
RegionPlan MakePlan(std::shared_ptr<const CompiledRegion> region, std::span<const TensorShape> inputs,
                    PlaneUse planes = PlaneUse::kWhereFaster);

}  // namespace lowbit::ep
