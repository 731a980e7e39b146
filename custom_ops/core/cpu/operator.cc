#include "core/cpu/operator.h"

#include <type_traits>
#include <utility>
#include <variant>

#include "core/cpu/operators/factories.h"
#include "core/selection.h"
#include "core/status.h"

namespace lowbit {
namespace {

// Whether this build holds an op that is decoded into a kind of node.
consteval bool HasNode(MatmulNode*) {
  return HasOp("LowBitConv") || HasOp("APConv") || HasOp("LowBitConvTranspose") || HasOp("LowBitGemm") ||
         HasOp("APGemm");
}
consteval bool HasNode(AffineNode*) { return HasOp("LowBitAffine") || HasOp("LowBitRequantize"); }
consteval bool HasNode(LookupNode*) { return HasOp("LowBitLookup"); }
consteval bool HasNode(BinaryNode*) { return HasOp("LowBitAdd") || HasOp("LowBitMul"); }
consteval bool HasNode(FedMatmulNode*) { return HasOp("LowBitMatMul"); }
consteval bool HasNode(MaxPoolNode*) { return HasOp("LowBitMaxPool"); }
consteval bool HasNode(AveragePoolNode*) { return HasOp("LowBitAveragePool"); }
consteval bool HasNode(GlobalAveragePoolNode*) { return HasOp("LowBitGlobalAveragePool"); }
consteval bool HasNode(ConcatNode*) { return HasOp("LowBitConcat"); }
consteval bool HasNode(NormalizationNode*) { return HasOp("LowBitNormalization"); }
consteval bool HasNode(ResizeNode*) { return HasOp("LowBitResize"); }
consteval bool HasNode(ImageNode*) { return HasOp("LowBitImage"); }
consteval bool HasNode(DepthToSpaceNode*) { return HasOp("LowBitDepthToSpace"); }
consteval bool HasNode(SoftmaxNode*) { return HasOp("LowBitSoftmax"); }
consteval bool HasNode(QuantizeNode*) { return HasOp("LowBitQuantize"); }
consteval bool HasNode(ThresholdNode*) { return HasOp("LowBitThreshold"); }
consteval bool HasNode(DequantizeNode*) { return HasOp("LowBitDequantize"); }

}  // namespace

std::unique_ptr<Operator> CreateOperator(const OpSchema& schema, const AttributeMap& attributes,
                                         std::span<const std::optional<ConstTensor>> constants,
                                         const std::vector<bool>& present, const OperatorOptions& options) {
  return CreateOperator(DecodeNode(schema, attributes, constants, present), options);
}

std::unique_ptr<Operator> CreateOperator(NodeSpec node, const OperatorOptions& options) {
  return std::visit(
      [&]<typename Node>(Node&& each) -> std::unique_ptr<Operator> {
        if constexpr (HasNode(static_cast<std::decay_t<Node>*>(nullptr))) {
          return MakeOperator(std::forward<Node>(each), options);
        } else {
          Fail("this build of lowbit leaves the op out");
        }
      },
      std::move(node));
}

}  // namespace lowbit
