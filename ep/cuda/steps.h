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
#include "kernels/cuda/fused/chain.h"
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

// A convolution, or the pair of one and that which makes its residuals, and the convolution that follows run
// as one launch.
class CudaChainPlan final : public StepPlan {
 public:
  CudaChainPlan(cuda::ConvChain chain, const cuda::ChainConfig& config, std::string key, bool is_settled)
      : chain_(std::move(chain)),
        plan_(cuda::PlanChain(chain_, config)),
        key_(std::move(key)),
        is_settled_(is_settled) {}

  std::string Text() const override { return cuda::PlanConfig(*plan_).Text(); }
  const cuda::ConvChain& Chain() const { return chain_; }
  const std::string& Key() const { return key_; }  // of measurements
  bool IsSettled() const { return is_settled_; }   // else it is still to be measured
  // `fed` is what the first step is fed.
  void Launch(std::span<const void* const> fed, void* y, void* z, cuda::Queue& queue) const {
    if (chain_.residuals != nullptr) {
      cuda::LaunchChain(*plan_, fed[1], fed[0], y, z, queue);
    } else {
      cuda::LaunchChain(*plan_, fed[0], fed.size() > 1 ? fed[1] : nullptr, y, z, queue);
    }
  }

 private:
  const cuda::ConvChain chain_;
  const std::shared_ptr<const cuda::ChainPlan> plan_;
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
