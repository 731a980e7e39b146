#include "core/operator.h"

#include <utility>
#include <variant>

#include "core/operators/factories.h"

namespace lowbit {

std::unique_ptr<Operator> CreateOperator(const OpSchema& schema, const AttributeMap& attributes,
                                         std::span<const std::optional<ConstTensor>> constants,
                                         const std::vector<bool>& present, const OperatorOptions& options) {
  return CreateOperator(DecodeNode(schema, attributes, constants, present), options);
}

std::unique_ptr<Operator> CreateOperator(NodeSpec node, const OperatorOptions& options) {
  return std::visit([&](auto&& each) { return MakeOperator(std::forward<decltype(each)>(each), options); },
                    std::move(node));
}

}  // namespace lowbit
