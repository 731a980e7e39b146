#include "core/operator.h"

#include <map>
#include <string_view>

#include "core/operators/factories.h"
#include "core/status.h"

namespace lowbit {
namespace {

const std::map<std::string_view, OperatorFactory>& Factories() {
  static const std::map<std::string_view, OperatorFactory> factories = {
      {"LowBitConv", CreateConv},
      {"APConv", CreateConv},
      {"LowBitConvTranspose", CreateConvTranspose},
      {"LowBitGemm", CreateGemm},
      {"APGemm", CreateGemm},
      {"LowBitAffine", CreateAffine},
      {"LowBitLookup", CreateLookup},
      {"LowBitAdd", CreateAdd},
      {"LowBitMul", CreateMul},
      {"LowBitMaxPool", CreateMaxPool},
      {"LowBitAveragePool", CreateAveragePool},
      {"LowBitGlobalAveragePool", CreateGlobalAveragePool},
      {"LowBitConcat", CreateConcat},
      {"LowBitResize", CreateResize},
      {"LowBitDepthToSpace", CreateDepthToSpace},
      {"LowBitRequantize", CreateRequantize},
      {"LowBitQuantize", CreateQuantize},
      {"LowBitThreshold", CreateThreshold},
      {"LowBitDequantize", CreateDequantize},
  };
  return factories;
}

}  // namespace

std::unique_ptr<Operator> CreateOperator(const OpSchema& schema, const AttributeMap& attributes,
                                         std::span<const std::optional<ConstTensor>> constants,
                                         const std::vector<bool>& present, const OperatorOptions& options) {
  const auto factory = Factories().find(schema.name);
  Require(factory != Factories().end(), schema.name, ": no implementation");
  return factory->second(schema, attributes, constants, present, options);
}

}  // namespace lowbit
