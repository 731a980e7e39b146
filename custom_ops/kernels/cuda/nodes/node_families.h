// One overload per kind of node, beside its kernels; node.cc dispatches to them.
#pragma once

#include <memory>

#include "kernels/cuda/nodes/cuda_node.h"

namespace lowbit::cuda {

using PackedNodePtr = std::unique_ptr<PackedNode>;

// affine.cu
PackedNodePtr Pack(const AffineNode& node, const Device& device);
PackedNodePtr Pack(const LookupNode& node, const Device& device);
// binary.cu
PackedNodePtr Pack(const BinaryNode& node, const Device& device);
PackedNodePtr Pack(const FloatBinaryOp& op, const Device& device);
// pool.cu
PackedNodePtr Pack(const MaxPoolNode& node, const Device& device);
PackedNodePtr Pack(const AveragePoolNode& node, const Device& device);
PackedNodePtr Pack(const GlobalAveragePoolNode& node, const Device& device);
// concat.cu
PackedNodePtr Pack(const ConcatNode& node, const Device& device);
PackedNodePtr Pack(const JoinOp& op, const Device& device);
// move.cu
PackedNodePtr Pack(const ReshapeOp& op, const Device& device);
PackedNodePtr Pack(const ResizeNode& node, const Device& device);
PackedNodePtr Pack(const DepthToSpaceNode& node, const Device& device);
PackedNodePtr Pack(const TransposeOp& op, const Device& device);
PackedNodePtr Pack(const SliceOp& op, const Device& device);
PackedNodePtr Pack(const PadOp& op, const Device& device);
// quantize.cu
PackedNodePtr Pack(const QuantizeNode& node, const Device& device);
PackedNodePtr Pack(const ThresholdNode& node, const Device& device);
PackedNodePtr Pack(const DequantizeNode& node, const Device& device);
// float_ops.cu
PackedNodePtr Pack(const SoftmaxOp& op, const Device& device);
PackedNodePtr Pack(const UnaryOp& op, const Device& device);
PackedNodePtr Pack(const FloatPoolOp& op, const Device& device);
// float_product.cu
PackedNodePtr Pack(const FloatGemmOp& op, const Device& device);
PackedNodePtr Pack(const FloatConvOp& op, const Device& device);

}  // namespace lowbit::cuda
