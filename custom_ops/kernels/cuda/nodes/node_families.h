// One factory per kind of node, beside its kernels; node.cc dispatches to them.
#pragma once

#include <memory>

#include "kernels/cuda/nodes/cuda_node.h"

namespace lowbit::cuda {

// affine.cu
std::unique_ptr<PackedNode> PackAffine(const AffineSpec& spec, const Device& device);
std::unique_ptr<PackedNode> PackLookup(const LookupNode& node, const Device& device);
// binary.cu
std::unique_ptr<PackedNode> PackBinary(const BinaryNode& node);
std::unique_ptr<PackedNode> PackFloatBinary(const FloatBinaryOp& op);
// pool.cu
std::unique_ptr<PackedNode> PackMaxPool(const MaxPoolNode& node);
std::unique_ptr<PackedNode> PackAveragePool(const AveragePoolNode& node);
std::unique_ptr<PackedNode> PackGlobalAveragePool(const GlobalAveragePoolNode& node, const Device& device);
// concat.cu
std::unique_ptr<PackedNode> PackConcat(const ConcatNode& node);
std::unique_ptr<PackedNode> PackJoin(const JoinOp& op);
// move.cu
std::unique_ptr<PackedNode> PackResize(const ResizeNode& node, const Device& device);
std::unique_ptr<PackedNode> PackDepthToSpace(const DepthToSpaceNode& node);
std::unique_ptr<PackedNode> PackTranspose(const TransposeOp& op);
std::unique_ptr<PackedNode> PackSlice(const SliceOp& op);
std::unique_ptr<PackedNode> PackPad(const PadOp& op);
// quantize.cu
std::unique_ptr<PackedNode> PackQuantize(const QuantizeNode& node, const Device& device);
std::unique_ptr<PackedNode> PackThreshold(const ThresholdNode& node, const Device& device);
std::unique_ptr<PackedNode> PackDequantize(const DequantizeNode& node, const Device& device);
// float_ops.cu
std::unique_ptr<PackedNode> PackSoftmax(const SoftmaxOp& op);
std::unique_ptr<PackedNode> PackUnary(const UnaryOp& op);
std::unique_ptr<PackedNode> PackFloatPool(const FloatPoolOp& op);
// float_product.cu
std::unique_ptr<PackedNode> PackFloatGemm(const FloatGemmOp& op, const Device& device);
std::unique_ptr<PackedNode> PackFloatConv(const FloatConvOp& op, const Device& device);

}  // namespace lowbit::cuda
