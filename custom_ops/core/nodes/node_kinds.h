// One decoder and one shape function per kind of node, each defined in its own file of this folder.
// core/nodes.cc chooses among them; the CPU operators call the shape functions of their kind.
#pragma once

#include <span>
#include <vector>

#include "core/nodes.h"
#include "core/nodes/node_common.h"

namespace lowbit {

MatmulNode DecodeConv(const NodeReader& node);
MatmulNode DecodeConvTranspose(const NodeReader& node);
MatmulNode DecodeGemm(const NodeReader& node);
AffineNode DecodeAffine(const NodeReader& node);
AffineNode DecodeRequantize(const NodeReader& node);
LookupNode DecodeLookup(const NodeReader& node);
BinaryNode DecodeAdd(const NodeReader& node);
BinaryNode DecodeMul(const NodeReader& node);
MaxPoolNode DecodeMaxPool(const NodeReader& node);
AveragePoolNode DecodeAveragePool(const NodeReader& node);
GlobalAveragePoolNode DecodeGlobalAveragePool(const NodeReader& node);
ConcatNode DecodeConcat(const NodeReader& node);
ResizeNode DecodeResize(const NodeReader& node);
DepthToSpaceNode DecodeDepthToSpace(const NodeReader& node);
QuantizeNode DecodeQuantize(const NodeReader& node);
ThresholdNode DecodeThreshold(const NodeReader& node);
DequantizeNode DecodeDequantize(const NodeReader& node);

// From grids that were validated; one entry per channel, or one for all.
QuantizeNode MakeQuantizeNode(std::vector<Quantizer> grids, bool to_channels_last);
DequantizeNode MakeDequantizeNode(bool x_signed, std::vector<float> scales, std::vector<int32_t> zero_points,
                                  bool to_channels_first);

// Validated dims of the output. (A matmul's: core/nodes/matmul_shape.h.)
std::vector<int64_t> OutputDims(const AffineNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const LookupNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const BinaryNode& node, const FedShape& a, const FedShape& b);
std::vector<int64_t> OutputDims(const MaxPoolNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const AveragePoolNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const GlobalAveragePoolNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const ConcatNode& node, std::span<const FedShape> x);
std::vector<int64_t> OutputDims(const ResizeNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const DepthToSpaceNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const QuantizeNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const ThresholdNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const DequantizeNode& node, const FedShape& x);

inline ElementType OutputTypeOf(const AffineNode& node) { return OutputTypeOf(node.spec.quantizer); }
inline ElementType OutputTypeOf(const LookupNode& node) { return CodeType(node.y_signed); }
inline ElementType OutputTypeOf(const BinaryNode& node) { return OutputTypeOf(node.spec.quantizer); }
inline ElementType OutputTypeOf(const MaxPoolNode& node) { return CodeType(node.is_signed); }
inline ElementType OutputTypeOf(const AveragePoolNode& node) { return OutputTypeOf(node.spec.quantizer); }
inline ElementType OutputTypeOf(const GlobalAveragePoolNode& node) {
  return OutputTypeOf(node.spec.quantizer);
}
inline ElementType OutputTypeOf(const ConcatNode& node) { return OutputTypeOf(node.quantizer); }
inline ElementType OutputTypeOf(const ResizeNode& node) { return CodeType(node.is_signed); }
inline ElementType OutputTypeOf(const DepthToSpaceNode& node) { return CodeType(node.is_signed); }
inline ElementType OutputTypeOf(const QuantizeNode& node) { return OutputTypeOf(node.grids.front()); }
inline ElementType OutputTypeOf(const ThresholdNode& node) { return CodeType(node.spec.y_signed); }
inline ElementType OutputTypeOf(const DequantizeNode&) { return ElementType::kFloat; }

}  // namespace lowbit
