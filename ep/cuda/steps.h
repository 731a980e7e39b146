// Steps of a region as kernels: the nodes of kernels/cuda with their shape inference.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ep/region/backend.h"
#include "kernels/cuda/nodes/cuda_node.h"

namespace lowbit::ep {

class CudaStepPlan final : public StepPlan {
 public:
  explicit CudaStepPlan(std::shared_ptr<const cuda::NodePlan> node) : node_(std::move(node)) {}

  size_t WorkspaceBytes() const override { return node_->WorkspaceBytes(); }
  std::string Text() const override { return node_->Text(); }
  void Launch(std::span<const void* const> fed, void* y, void* workspace, cuda::Queue& queue) const {
    node_->Launch(fed, y, workspace, queue);
  }

 private:
  const std::shared_ptr<const cuda::NodePlan> node_;
};

// Two steps in a row that one launch with two outputs computes, in one of several configurations; or three, the first of
// which makes what nobody else reads, and what is not written.
class TwoSteps {
 public:
  // `fed` is what the first step is fed, then what else the others are.
  using Launcher =
      std::function<void(std::span<const void* const> fed, void* y, void* z, cuda::Queue& queue)>;

  virtual ~TwoSteps() = default;
  // Those worth a trial, the cost model's choice first.
  virtual std::vector<std::string> Candidates() const = 0;
  // Whether the cost model takes that for faster than two launches.
  virtual bool Pay() const = 0;
  virtual Launcher Plan(const std::string& candidate) const = 0;
  // Of the cost model's choice; nullopt where nobody compares it with others than the steps apart.
  virtual std::optional<double> Microseconds() const { return std::nullopt; }
};

class CudaTwoPlan final : public StepPlan {
 public:
  CudaTwoPlan(std::shared_ptr<const TwoSteps> steps, std::string candidate, std::string key, bool is_settled)
      : steps_(std::move(steps)),
        candidate_(std::move(candidate)),
        launch_(steps_->Plan(candidate_)),
        key_(std::move(key)),
        is_settled_(is_settled) {}

  std::string Text() const override { return candidate_; }
  const std::shared_ptr<const TwoSteps>& Steps() const { return steps_; }
  const std::string& Key() const { return key_; }  // of measurements
  bool IsSettled() const { return is_settled_; }   // else it is still to be measured
  void Launch(std::span<const void* const> fed, void* y, void* z, cuda::Queue& queue) const {
    launch_(fed, y, z, queue);
  }

 private:
  const std::shared_ptr<const TwoSteps> steps_;
  const std::string candidate_;
  const TwoSteps::Launcher launch_;
  const std::string key_;
  const bool is_settled_;
};

class CudaStep final : public Step {
 public:
  using OutputFunction = std::function<TensorShape(std::span<const TensorShape>)>;
  // `key` describes the node to the tuner, where that has to know it.
  CudaStep(std::unique_ptr<cuda::PackedNode> node, OutputFunction output, std::string key = {})
      : node_(std::move(node)), output_(std::move(output)), key_(std::move(key)) {}

  TensorShape Output(std::span<const TensorShape> fed) const override { return output_(fed); }
  std::shared_ptr<const StepPlan> Plan(std::span<const TensorShape> fed) const override {
    return std::make_shared<const CudaStepPlan>(node_->Plan(fed, output_(fed)));
  }
  std::optional<size_t> Overwrites() const override { return node_->Overwrites(); }
  std::vector<uint8_t> Packed() const override { return node_->Packed(); }
  // As of Backend::Storing.
  std::unique_ptr<const Step> Storing(std::span<const ChannelMove> moves, bool keeps_output) const {
    return std::make_unique<CudaStep>(
        node_->Storing(moves, keeps_output),
        [output = output_, count = moves.size()](std::span<const TensorShape> fed) {
          return output(fed.first(fed.size() - count));
        },
        key_);
  }
  std::unique_ptr<const Step> InPlanes(const TensorPlanes& planes) const {
    return std::make_unique<CudaStep>(node_->InPlanes(planes), output_, key_);
  }
  std::unique_ptr<const Step> InChannelsLast(const ChannelsLast& last) const {
    return std::make_unique<CudaStep>(node_->InChannelsLast(last), output_, key_);
  }
  const cuda::PackedNode& Node() const { return *node_; }
  const std::string& Key() const { return key_; }

 private:
  const std::unique_ptr<cuda::PackedNode> node_;
  const OutputFunction output_;
  const std::string key_;
};

}  // namespace lowbit::ep
