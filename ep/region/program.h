// A compiled region: steps with their constants on the device, plans per shape, instances per plan.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/plan_cache.h"
#include "ep/region/backend.h"
#include "ep/region/graph.h"

namespace lowbit::ep {

// Where a tensor of a run lies.
struct Location {
  enum class Kind : uint8_t { kExternal, kWorkspace, kConstant };
  Kind kind = Kind::kWorkspace;
  size_t at = 0;   // index of the external, offset in the workspace, or index of the constant
  int planes = 0;  // of bits (core/bit_planes.h) that the tensor lies in; 0: as its type says
  size_t number_bytes =
      0;  // of a float tensor whose channels lie last (core/channels_last.h); 0: as ONNX has it
};

struct PlannedStep {
  std::string_view name;               // "node 'name' (Op)", as errors begin
  std::span<const std::string> nodes;  // the names alone; none where an output of the region is copied
  const Step* step = nullptr;
  std::shared_ptr<const StepPlan> plan;
  std::vector<Location> fed;
  std::vector<TensorShape> fed_shapes;  // what `plan` was made for
  Location output;          // that of the first of `stores` where those alone get what the step makes
  size_t stores = 0;        // how many of `fed`, the last ones, are written, too
  size_t workspace_at = 0;  // offset of the step's scratch memory in the workspace
  // Where it is set, one launch does this step and the next one, whose output shares no memory with what this
  // one reads. It takes no scratch memory. Or it does the next two: nobody but the next one reads what this one makes,
  // which is not written then, and what the next two write shares no memory with what this one reads. Or it does whole
  // residual blocks (Backend::PlanBlocks), of which only the last step's output is written.
  std::shared_ptr<const StepPlan> with_next;
  size_t together = 2;  // how many steps it does
};

// The step whose launch does step i: itself, or one before it. What two of three steps are in one launch does not count
// where one does all three.
size_t LauncherOf(std::span<const PlannedStep> steps, size_t i);

// A region at given input shapes. Externals are the region's inputs, then its outputs.
struct RegionPlan {
  // Steps and back end, which everything below refers to; so it goes last.
  std::shared_ptr<const void> owner;
  std::vector<TensorShape> inputs, outputs;
  std::vector<PlannedStep> steps;
  std::vector<std::shared_ptr<const Step>>
      variants;  // steps that Backend::Storing, InPlanes and InChannelsLast made
  size_t workspace_bytes = 0;
  std::vector<DeviceConstant> constants;
  std::string Text() const;  // a line per step
  std::string Json() const;  // one line, an object
};

class Program {
 public:
  // Lowers `graph`: reshapes vanish, nodes fuse where the backend can, everything else becomes a step;
  // constants are packed and uploaded. `packed[i]` as CreateStep takes it, by step, or empty. Throws Error
  // naming the node.
  static std::shared_ptr<Program> Compile(const Graph& graph, std::shared_ptr<Backend> backend,
                                          std::span<const std::span<const uint8_t>> packed = {});

  // The plan for these inputs; cached for the shapes used last. Throws Error.
  virtual std::shared_ptr<const RegionPlan> PlanFor(std::span<const TensorShape> inputs) = 0;
  // Runs it once; `externals` as in the plan. Safe to call from many threads.
  virtual void Run(const std::shared_ptr<const RegionPlan>& plan, std::span<void* const> externals,
                   const RunContext& context) = 0;
  // What a compiled model keeps, by step.
  virtual std::vector<std::vector<uint8_t>> Packed() const = 0;
  virtual ~Program() = default;
};

}  // namespace lowbit::ep
