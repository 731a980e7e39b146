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
#include "kernels/cuda/cuda_node.h"

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

class CudaStep final : public Step {
 public:
  using OutputFunction = std::function<TensorShape(std::span<const TensorShape>)>;
  CudaStep(std::unique_ptr<cuda::PackedNode> node, OutputFunction output)
      : node_(std::move(node)), output_(std::move(output)) {}

  TensorShape Output(std::span<const TensorShape> fed) const override { return output_(fed); }
  std::shared_ptr<const StepPlan> Plan(std::span<const TensorShape> fed) const override {
    return std::make_shared<const CudaStepPlan>(node_->Plan(fed, output_(fed)));
  }
  std::optional<size_t> Overwrites() const override { return node_->Overwrites(); }
  std::vector<uint8_t> Packed() const override { return node_->Packed(); }

 private:
  const std::unique_ptr<cuda::PackedNode> node_;
  const OutputFunction output_;
};

}  // namespace lowbit::ep
