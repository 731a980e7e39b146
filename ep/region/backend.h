// What a device must offer so that the region compiler can use it. Two implementations: ep/cpu (the operators
// of the core) and ep/cuda.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/bit_planes.h"
#include "core/channels_last.h"
#include "core/nodes.h"
#include "core/thread_pool.h"
#include "ep/region/graph.h"

namespace lowbit::ep {

struct RegionPlan;
class StepTimes;

// All of a step that depends on the shapes; immutable.
class StepPlan {
 public:
  virtual ~StepPlan() = default;
  virtual size_t WorkspaceBytes() const { return 0; }
  virtual std::string Text() const = 0;  // the kernel, for the printed plan
  // Whether it serves a CPU because it was measured, not by its estimate.
  virtual bool IsMeasured() const { return false; }
};

// One operation with its constants on the device; immutable, shared by all shapes and threads.
class Step {
 public:
  virtual ~Step() = default;
  // `fed`: the node's inputs that are no constants of it, in order; any may have no elements. Both throw
  // Error. Plans are made only where the output has elements.
  virtual TensorShape Output(std::span<const TensorShape> fed) const = 0;
  virtual std::shared_ptr<const StepPlan> Plan(std::span<const TensorShape> fed) const = 0;
  // A fed tensor in whose place the output may be written where both are of one size: who writes an element
  // has read that one's before, and nobody else reads it.
  virtual std::optional<size_t> Overwrites() const { return std::nullopt; }
  // What a compiled model keeps so that CreateStep need not pack again; empty: nothing.
  virtual std::vector<uint8_t> Packed() const { return {}; }
};

// A step and what it is fed.
struct FedStep {
  const Step& step;
  std::span<const TensorShape> fed;
};

// What a run brings along. The CPU uses the pool, a GPU the stream.
struct RunContext {
  ThreadPool* pool = nullptr;
  void* stream = nullptr;
  // Hears of the steps, where somebody listens. A run on a GPU is complete then when it returns.
  StepTimes* times = nullptr;
};

// Memory and everything else that one run of a plan needs for itself. Used by one thread at a time; on a GPU
// the run may still be under way when Run has returned, and the next one is ordered behind it.
class Instance {
 public:
  virtual ~Instance() = default;  // waits for a run that is still under way
  // `externals[i]` is the memory of plan.externals[i].
  virtual void Run(std::span<void* const> externals, const RunContext& context) = 0;
  // Whether a run that was started here is still under way where a run in `context` would have to wait for
  // it; another instance would start at once. (A GPU's, on another stream: on the same one they follow each
  // other anyway.)
  virtual bool Busy(const RunContext& context) const {
    (void)context;
    return false;
  }
  // Whether this instance last ran with these externals: running it again needs no patching.
  virtual bool Holds(std::span<void* const> externals) const {
    (void)externals;
    return true;
  }
};

// A constant on the device, alive as long as the pointer.
using DeviceConstant = std::shared_ptr<const void>;

// Which tensors lie in planes of bits (core/bit_planes.h), of those that may: none; where that is estimated to take no
// longer; all that kernels can read and make so.
enum class PlaneUse { kNone, kWhereFaster, kWherever };

class Backend {
 public:
  virtual ~Backend() = default;
  // Why the node cannot run here; nullopt where it can. Reads attributes, types, ranks and constants of
  // `graph`. Never throws. Nodes that only give their input other dims (Reshape and its kin, see decode.h) are
  // not asked about: they become no step at all.
  virtual std::optional<std::string> Refusal(const Graph& graph, const Node& node) const = 0;
  // Whether regions are made of standard nodes alone, too.
  virtual bool TakesFloatRegions() const { return false; }
  // Whether `nodes` in the graph's order and `next`, the only node that reads what the last of them makes,
  // and once, may become one step. They are one, or several that Fuses accepted before; or two such groups,
  // of which `next` has become one step with the other already.
  virtual bool Fuses(const Graph& graph, std::span<const Node* const> nodes, const Node& next) const {
    (void)graph, (void)nodes, (void)next;
    return false;
  }
  // One step of one node, or of several that Fuses accepted: it is fed what the first is fed, then what else
  // each other one is. `packed` is what Step::Packed of the same nodes gave, or empty; the constants that it
  // replaces may then be without data. Throws Error, without the node's name.
  virtual std::unique_ptr<Step> CreateStep(const Graph& graph, std::span<const Node* const> nodes,
                                           std::span<const uint8_t> packed) = 0;
  // How many threads may be in CreateStep at once, and are worth it.
  virtual size_t Creators() const { return 1; }
  // Whether the steps of matrix products look at the codes of an x that is not known to have the stated bits
  // (Node::x_has_stated_bits). Where they do not, a table stands before them.
  virtual bool LooksAtCodes() const { return false; }
  // Steps are fastest where tensors have a multiple of so many channels (ep/region/channels.h).
  virtual int64_t ChannelMultiple() const { return 1; }
  // A step that copies the one tensor it is fed.
  virtual std::unique_ptr<Step> CreateCopy() = 0;
  // Two or three steps in a row, the last of which is fed what the one before makes and nothing else, as one launch with
  // two outputs, those of the last two; nullptr where they are not, or better apart. Of three the second is fed what the
  // first makes before all else. Throws Error.
  virtual std::shared_ptr<const StepPlan> PlanTogether(std::span<const FedStep> steps) {
    (void)steps;
    return nullptr;
  }
  // Residual blocks in a row as one launch, three steps each: the first is fed what the block before makes, each other one
  // what the one before makes, and the last what the first is fed besides. Nobody else reads what they make, but for the
  // last of all, which alone is written, maybe where what the first is fed lies. nullptr where they are not, or better apart.
  // Throws Error.
  virtual std::shared_ptr<const StepPlan> PlanBlocks(std::span<const FedStep> steps) {
    (void)steps;
    return nullptr;
  }
  // Whether the step, fed `fed`, can store channels of what it makes in other tensors besides, or there alone.
  virtual bool MayStore(const Step& step, std::span<const TensorShape> fed,
                        std::span<const ChannelMove> moves) const {
    (void)step, (void)fed, (void)moves;
    return false;
  }
  // The step that does, where MayStore says so; it is fed the tensors behind its own. Where it does not keep its output,
  // that is not written. Throws Error.
  virtual std::unique_ptr<const Step> Storing(const Step& step, std::span<const ChannelMove> moves,
                                              bool keeps_output) const {
    (void)step, (void)moves, (void)keeps_output;
    return nullptr;
  }
  // In how many planes (core/bit_planes.h) the step may read the first tensor that it is fed; 0: in none.
  virtual int PlanesRead(const Step& step) const {
    (void)step;
    return 0;
  }
  // Whether it may read the second tensor that it is fed, which it adds or multiplies, in so many.
  virtual bool AddsPlanes(const Step& step, int planes) const {
    (void)step, (void)planes;
    return false;
  }
  // Whether it makes planes of planes, as many as there are.
  virtual bool KeepsPlanes(const Step& step) const {
    (void)step;
    return false;
  }
  // The estimated time of the step, fed `fed`; nullopt where it is not known, or no kernel reads and makes such planes.
  virtual std::optional<double> Microseconds(const Step& step, std::span<const TensorShape> fed,
                                             const TensorPlanes& planes) const {
    (void)step, (void)fed, (void)planes;
    return std::nullopt;
  }
  // The step that does, where there is an estimate.
  virtual std::unique_ptr<const Step> InPlanes(const Step& step, const TensorPlanes& planes) const {
    (void)step, (void)planes;
    return nullptr;
  }
  // Whether number i of the tensors that the step is fed, and what it makes, may lie with the channels last
  // (core/channels_last.h).
  virtual bool MayReadChannelsLast(const Step& step, std::span<const TensorShape> fed, size_t i) const {
    (void)step, (void)fed, (void)i;
    return false;
  }
  virtual bool MayMakeChannelsLast(const Step& step, std::span<const TensorShape> fed) const {
    (void)step, (void)fed;
    return false;
  }
  // Whether the step's float tensors have the channels last as ONNX has them, so that they lie otherwise as float16 alone.
  virtual bool KeepsOrder(const Step& step) const {
    (void)step;
    return false;
  }
  // Whether the step turns that tensor itself where it lies as ONNX has it, with the same results.
  virtual bool TurnsChannelsLast(const Step& step, std::span<const TensorShape> fed, size_t i) const {
    (void)step, (void)fed, (void)i;
    return false;
  }
  // A step that turns the one float tensor that it is fed.
  virtual std::unique_ptr<Step> CreateTurn() { return nullptr; }
  // The bytes of a number there: 2 of float16.
  virtual size_t BytesOfChannelsLast() const { return sizeof(float); }
  // The step whose tensors do.
  virtual std::unique_ptr<const Step> InChannelsLast(const Step& step, const ChannelsLast& last) const {
    (void)step, (void)last;
    return nullptr;
  }
  // Which inputs of `node` packed bytes make superfluous (its weights); compiled models leave their data out.
  virtual std::vector<size_t> PackedInputs(const Graph& graph, const Node& node) const {
    (void)graph, (void)node;
    return {};
  }
  virtual DeviceConstant Upload(const ConstTensor& tensor) = 0;
  // `plan` outlives the instance. Throws Error, also where the memory does not suffice: other instances then
  // serve.
  virtual std::unique_ptr<Instance> CreateInstance(const RegionPlan& plan) = 0;
  // Called with a plan that was just made: may give its steps faster plans of the same nodes, which take no
  // more scratch memory, and other plans of those that PlanTogether put together, or none. Does not throw.
  virtual void Tune(RegionPlan& plan) { (void)plan; }
  // Called with a tuned plan some of whose tensors lie in planes, where that is estimated to be faster: becomes another one
  // that `make` makes, tuned, where that is known to be faster.
  virtual void ChooseLayout(RegionPlan& plan, const std::function<RegionPlan(PlaneUse)>& make) {
    (void)plan, (void)make;
  }
  // Alignment of tensors inside a region, a power of 2.
  virtual size_t Alignment() const = 0;
  // Instances of one plan that may exist at once.
  virtual size_t MaxInstances() const = 0;

  // Name and version of everything that packed bytes and tuned choices depend on ("cuda sm_90, lowbit 0.1.0
  // kernels 1f0a..."). A compiled model of another fingerprint is refused.
  virtual std::string Fingerprint() const = 0;
  // Measured choices as text, for compiled models; empty: none.
  virtual std::string TunedChoices() const { return {}; }
  virtual void AdoptTunedChoices(const std::string& text) { (void)text; }
};

}  // namespace lowbit::ep
