// One factory per op, each defined in its own file of this folder. CreateOperator looks them up by op name.
#pragma once

#include "core/operator.h"

namespace lowbit {

// A macro, so that each signature is written once; `OperatorFactory` in core/operator.h documents the
// parameters.
#define LOWBIT_OPERATOR_FACTORY(name)                                                    \
  std::unique_ptr<Operator> name(const OpSchema& schema, const AttributeMap& attributes, \
                                 std::span<const std::optional<ConstTensor>> constants,  \
                                 const std::vector<bool>& present, const OperatorOptions& options)

LOWBIT_OPERATOR_FACTORY(CreateConv);           // LowBitConv, APConv
LOWBIT_OPERATOR_FACTORY(CreateConvTranspose);  // LowBitConvTranspose
LOWBIT_OPERATOR_FACTORY(CreateGemm);           // LowBitGemm, APGemm
LOWBIT_OPERATOR_FACTORY(CreateAffine);
LOWBIT_OPERATOR_FACTORY(CreateLookup);
LOWBIT_OPERATOR_FACTORY(CreateAdd);
LOWBIT_OPERATOR_FACTORY(CreateMul);
LOWBIT_OPERATOR_FACTORY(CreateMaxPool);
LOWBIT_OPERATOR_FACTORY(CreateAveragePool);
LOWBIT_OPERATOR_FACTORY(CreateGlobalAveragePool);
LOWBIT_OPERATOR_FACTORY(CreateConcat);
LOWBIT_OPERATOR_FACTORY(CreateResize);
LOWBIT_OPERATOR_FACTORY(CreateDepthToSpace);
LOWBIT_OPERATOR_FACTORY(CreateRequantize);
LOWBIT_OPERATOR_FACTORY(CreateQuantize);
LOWBIT_OPERATOR_FACTORY(CreateThreshold);
LOWBIT_OPERATOR_FACTORY(CreateDequantize);

}  // namespace lowbit
