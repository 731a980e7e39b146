// One factory per kind of node, each defined in its own file of this folder. CreateOperator chooses among
// them.
#pragma once

#include <memory>

#include "core/cpu/operator.h"
#include "core/nodes.h"

namespace lowbit {

std::unique_ptr<Operator> MakeOperator(const MatmulNode& node, const OperatorOptions& options);
std::unique_ptr<Operator> MakeOperator(AffineNode node, const OperatorOptions& options);
std::unique_ptr<Operator> MakeOperator(LookupNode node, const OperatorOptions& options);
std::unique_ptr<Operator> MakeOperator(BinaryNode node, const OperatorOptions& options);
std::unique_ptr<Operator> MakeOperator(FedMatmulNode node, const OperatorOptions& options);
std::unique_ptr<Operator> MakeOperator(MaxPoolNode node, const OperatorOptions& options);
std::unique_ptr<Operator> MakeOperator(AveragePoolNode node, const OperatorOptions& options);
std::unique_ptr<Operator> MakeOperator(GlobalAveragePoolNode node, const OperatorOptions& options);
std::unique_ptr<Operator> MakeOperator(ConcatNode node, const OperatorOptions& options);
std::unique_ptr<Operator> MakeOperator(NormalizationNode node, const OperatorOptions& options);
std::unique_ptr<Operator> MakeOperator(ResizeNode node, const OperatorOptions& options);
std::unique_ptr<Operator> MakeOperator(ImageNode node, const OperatorOptions& options);
std::unique_ptr<Operator> MakeOperator(DepthToSpaceNode node, const OperatorOptions& options);
std::unique_ptr<Operator> MakeOperator(SoftmaxNode node, const OperatorOptions& options);
std::unique_ptr<Operator> MakeOperator(QuantizeNode node, const OperatorOptions& options);
std::unique_ptr<Operator> MakeOperator(ThresholdNode node, const OperatorOptions& options);
std::unique_ptr<Operator> MakeOperator(DequantizeNode node, const OperatorOptions& options);

}  // namespace lowbit
