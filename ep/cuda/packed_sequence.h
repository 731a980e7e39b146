// Two nodes, the second of which alone reads the first, as one step of two launches: what stands in where a
// sequence that is fused as a rule has constants for which no kernel does both.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/nodes.h"
#include "kernels/cuda/nodes/cuda_node.h"

namespace lowbit::ep {

class PackedSequence final : public cuda::PackedNode {
 public:
  // `between`: the output of the first node, which has one fed tensor. It is the first that the second node
  // is fed.
  PackedSequence(std::unique_ptr<cuda::PackedNode> first, std::unique_ptr<cuda::PackedNode> second,
                 std::function<TensorShape(const TensorShape&)> between)
      : first_(std::move(first)), second_(std::move(second)), between_(std::move(between)) {}

  std::shared_ptr<const cuda::NodePlan> Plan(std::span<const TensorShape> fed,
                                             const TensorShape& y) const override;
  // One of the two packs something.
  std::vector<uint8_t> Packed() const override {
    std::vector<uint8_t> packed = first_->Packed();
    return packed.empty() ? second_->Packed() : packed;
  }

 private:
  const std::unique_ptr<cuda::PackedNode> first_, second_;
  const std::function<TensorShape(const TensorShape&)> between_;
};

}  // namespace lowbit::ep
