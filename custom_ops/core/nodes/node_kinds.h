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
FedMatmulNode DecodeFedMatmul(const NodeReader& node);
MaxPoolNode DecodeMaxPool(const NodeReader& node);
AveragePoolNode DecodeAveragePool(const NodeReader& node);
GlobalAveragePoolNode DecodeGlobalAveragePool(const NodeReader& node);
ConcatNode DecodeConcat(const NodeReader& node);
NormalizationNode DecodeNormalization(const NodeReader& node);
ResizeNode DecodeResize(const NodeReader& node);
// What a Resize, lowbit's or ONNX's, says by these names; and its scales or sizes. Throws Error.
ResizeNode::Coordinates ResizeCoordinates(std::string_view op, std::string_view name);
ResizeNode::Nearest ResizeNearest(std::string_view op, std::string_view name);
void CheckResizing(std::string_view op, const ResizeNode& node);
ImageNode DecodeImage(const NodeReader& node);
// Without what is behind the resizing: as much as says the size of the output. Throws Error.
ImageNode ReadImageSizes(const AttributeReader& node);
DepthToSpaceNode DecodeDepthToSpace(const NodeReader& node);
SoftmaxNode DecodeSoftmax(const NodeReader& node);
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
std::vector<int64_t> OutputDims(const FedMatmulNode& node, const FedShape& a, const FedShape& b);
// The same, and the product in strides; its batches are empty where y is.
std::vector<int64_t> ProductOf(const FedMatmulNode& node, const FedShape& a, const FedShape& b,
                               FedMatmulShape* product);
// The same of float32 tensors of these dims.
std::vector<int64_t> FloatProductOf(std::span<const int64_t> a, std::span<const int64_t> b,
                                    FedMatmulShape* product);
std::vector<int64_t> OutputDims(const MaxPoolNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const AveragePoolNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const GlobalAveragePoolNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const ConcatNode& node, std::span<const FedShape> x);
std::vector<int64_t> OutputDims(const NormalizationNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const ResizeNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const ImageNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const DepthToSpaceNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const SoftmaxNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const QuantizeNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const ThresholdNode& node, const FedShape& x);
std::vector<int64_t> OutputDims(const DequantizeNode& node, const FedShape& x);

inline ElementType OutputTypeOf(const AffineNode& node) { return OutputTypeOf(node.spec.quantizer); }
inline ElementType OutputTypeOf(const LookupNode& node) { return CodeType(node.y_signed); }
inline ElementType OutputTypeOf(const BinaryNode& node) { return OutputTypeOf(node.spec.quantizer); }
inline ElementType OutputTypeOf(const FedMatmulNode& node) { return OutputTypeOf(node.spec.quantizer); }
inline ElementType OutputTypeOf(const MaxPoolNode& node) { return CodeType(node.is_signed); }
inline ElementType OutputTypeOf(const AveragePoolNode& node) { return OutputTypeOf(node.spec.quantizer); }
inline ElementType OutputTypeOf(const GlobalAveragePoolNode& node) {
  return OutputTypeOf(node.spec.quantizer);
}
inline ElementType OutputTypeOf(const ConcatNode& node) { return OutputTypeOf(node.quantizer); }
inline ElementType OutputTypeOf(const NormalizationNode& node) { return OutputTypeOf(node.spec.quantizer); }
inline ElementType OutputTypeOf(const ResizeNode& node) {
  return CodeType(node.mode == ResizeNode::Mode::kNearest ? node.is_signed : node.quantizer.is_signed);
}
inline ElementType OutputTypeOf(const ImageNode& node) { return CodeType(node.y_signed); }
inline ElementType OutputTypeOf(const DepthToSpaceNode& node) { return CodeType(node.is_signed); }
inline ElementType OutputTypeOf(const SoftmaxNode& node) { return OutputTypeOf(node.quantizer); }
inline ElementType OutputTypeOf(const QuantizeNode& node) { return OutputTypeOf(node.grids.front()); }
inline ElementType OutputTypeOf(const ThresholdNode& node) { return CodeType(node.spec.y_signed); }
inline ElementType OutputTypeOf(const DequantizeNode&) { return ElementType::kFloat; }

// How a LowBitNormalization cuts x: `outer` times `elements` normalized together, `channels` the last dim.
// Both are 0 where x is empty. Throws where x does not fit the node.
struct NormalizationShape {
  NormalizationShape(const NormalizationNode& node, const FedShape& x);
  int64_t outer = 0, elements = 0, channels = 0;
};

}  // namespace lowbit
