// From nodes as plain data to their kernels.
#include <algorithm>
#include <numeric>

#include "kernels/cuda/nodes/node_families.h"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

class FunctionPlan final : public NodePlan {
 public:
  FunctionPlan(std::string text, LaunchFunction launch, size_t workspace_bytes)
      : text_(std::move(text)), launch_(std::move(launch)), workspace_bytes_(workspace_bytes) {}
  size_t WorkspaceBytes() const override { return workspace_bytes_; }
  void Launch(Fed fed, void* y, void* workspace, Queue& queue) const override {
    launch_(fed, y, workspace, queue);
  }
  std::string Text() const override { return text_; }

 private:
  std::string text_;
  LaunchFunction launch_;
  size_t workspace_bytes_;
};

class FunctionNode final : public PackedNode {
 public:
  explicit FunctionNode(PlanFunction plan) : plan_(std::move(plan)) {}
  NodePlanPtr Plan(Shapes fed, const TensorShape& y) const override {
    for (const TensorShape& tensor : fed) CountOf(tensor.dims);
    CountOf(y.dims);
    return plan_(fed, y);
  }

 private:
  PlanFunction plan_;
};

// One overload per kind of node, for std::visit.
struct NodePacker {
  using Packed = std::unique_ptr<PackedNode>;
  const Device& device;

  Packed operator()(const MatmulNode&) const { Fail("a matrix product is packed by PackMatmul"); }
  Packed operator()(const AffineNode& node) const { return PackAffine(node.spec, device); }
  Packed operator()(const LookupNode& node) const { return PackLookup(node, device); }
  Packed operator()(const BinaryNode& node) const { return PackBinary(node); }
  Packed operator()(const FedMatmulNode&) const { Fail("LowBitMatMul has no kernel for GPUs yet"); }
  Packed operator()(const MaxPoolNode& node) const { return PackMaxPool(node); }
  Packed operator()(const AveragePoolNode& node) const { return PackAveragePool(node); }
  Packed operator()(const GlobalAveragePoolNode& node) const { return PackGlobalAveragePool(node, device); }
  Packed operator()(const ConcatNode& node) const { return PackConcat(node); }
  Packed operator()(const NormalizationNode&) const {
    Fail("LowBitNormalization has no kernel for GPUs yet");
  }
  Packed operator()(const ResizeNode& node) const { return PackResize(node, device); }
  Packed operator()(const DepthToSpaceNode& node) const { return PackDepthToSpace(node); }
  Packed operator()(const SoftmaxNode&) const { Fail("LowBitSoftmax has no kernel for GPUs yet"); }
  Packed operator()(const QuantizeNode& node) const { return PackQuantize(node, device); }
  Packed operator()(const ThresholdNode& node) const { return PackThreshold(node, device); }
  Packed operator()(const DequantizeNode& node) const { return PackDequantize(node, device); }

  Packed operator()(const ReshapeOp&) const { return PackCopy(device); }
  Packed operator()(const TransposeOp& op) const { return PackTranspose(op); }
  Packed operator()(const SliceOp& op) const { return PackSlice(op); }
  Packed operator()(const PadOp& op) const { return PackPad(op); }
  Packed operator()(const JoinOp& op) const { return PackJoin(op); }
  Packed operator()(const SoftmaxOp& op) const { return PackSoftmax(op); }
  Packed operator()(const UnaryOp& op) const { return PackUnary(op); }
  Packed operator()(const FloatBinaryOp& op) const { return PackFloatBinary(op); }
  Packed operator()(const FloatGemmOp& op) const { return PackFloatGemm(op, device); }
  Packed operator()(const FloatConvOp& op) const { return PackFloatConv(op, device); }
  Packed operator()(const FloatPoolOp& op) const { return PackFloatPool(op); }
};

}  // namespace

NodePlanPtr MakePlan(std::string text, LaunchFunction launch, size_t workspace_bytes) {
  return std::make_shared<FunctionPlan>(std::move(text), std::move(launch), workspace_bytes);
}

std::unique_ptr<PackedNode> MakeNode(PlanFunction plan) {
  return std::make_unique<FunctionNode>(std::move(plan));
}

std::shared_ptr<const DeviceMemory> UploadConstants(const NodeConstants& constants, const Device& device) {
  const DeviceGuard guard(device.ordinal);
  auto memory = std::make_shared<DeviceMemory>();
  memory->Upload(constants.Bytes().data(), constants.Bytes().size());
  return memory;
}

int64_t CountOf(std::span<const int64_t> dims) {
  constexpr int64_t kMaxElements = (int64_t{1} << 31) - 1;
  int64_t count = 1;
  for (const int64_t dim : dims) {
    Require(dim >= 0, "a dim of ", dim, ", expected 0 or more");
    if (dim == 0) return 0;
    Require(dim <= kMaxElements / count, "a tensor of more than ", kMaxElements,
            " elements, the most that the GPU kernels count; run with a smaller batch or image");
    count *= dim;
  }
  return count;
}

std::unique_ptr<PackedNode> PackNode(const NodeSpec& node, const Device& device) {
  return std::visit(NodePacker{device}, node);
}

std::unique_ptr<PackedNode> PackStandard(const StandardNode& node, const Device& device) {
  return std::visit(NodePacker{device}, node);
}

}  // namespace lowbit::cuda
