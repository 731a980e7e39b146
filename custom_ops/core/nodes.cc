#include "core/nodes.h"

#include <map>
#include <string_view>

#include "core/nodes/matmul_shape.h"
#include "core/nodes/node_kinds.h"
#include "core/status.h"

namespace lowbit {
namespace {

using Decoder = NodeSpec (*)(const NodeReader&);

template <auto kDecode>
NodeSpec Decode(const NodeReader& node) {
  return kDecode(node);
}

const std::map<std::string_view, Decoder>& Decoders() {
  static const std::map<std::string_view, Decoder> decoders = {
      {"LowBitConv", Decode<DecodeConv>},
      {"APConv", Decode<DecodeConv>},
      {"LowBitConvTranspose", Decode<DecodeConvTranspose>},
      {"LowBitGemm", Decode<DecodeGemm>},
      {"APGemm", Decode<DecodeGemm>},
      {"LowBitAffine", Decode<DecodeAffine>},
      {"LowBitLookup", Decode<DecodeLookup>},
      {"LowBitAdd", Decode<DecodeAdd>},
      {"LowBitMul", Decode<DecodeMul>},
      {"LowBitMaxPool", Decode<DecodeMaxPool>},
      {"LowBitAveragePool", Decode<DecodeAveragePool>},
      {"LowBitGlobalAveragePool", Decode<DecodeGlobalAveragePool>},
      {"LowBitConcat", Decode<DecodeConcat>},
      {"LowBitResize", Decode<DecodeResize>},
      {"LowBitDepthToSpace", Decode<DecodeDepthToSpace>},
      {"LowBitRequantize", Decode<DecodeRequantize>},
      {"LowBitQuantize", Decode<DecodeQuantize>},
      {"LowBitThreshold", Decode<DecodeThreshold>},
      {"LowBitDequantize", Decode<DecodeDequantize>},
  };
  return decoders;
}

const FedShape* At(std::span<const FedShape> fed, size_t index) {
  return index < fed.size() ? &fed[index] : nullptr;
}

const FedShape& Needed(std::span<const FedShape> fed, size_t index, std::string_view what) {
  Require(index < fed.size(), "input '", what, "' is missing");
  return fed[index];
}

// Every kind of node but those below has x alone.
template <typename Node>
TensorShape Output(const Node& node, std::span<const FedShape> fed) {
  return {OutputTypeOf(node), OutputDims(node, Needed(fed, 0, "x"))};
}

TensorShape Output(const MatmulNode& node, std::span<const FedShape> fed) {
  const MatmulShape shape(node);
  const ConvShape images = shape.Images(At(fed, 0), At(fed, 1));
  return {shape.OutputType(), shape.OutputDims(fed[0].dims, images)};
}

TensorShape Output(const BinaryNode& node, std::span<const FedShape> fed) {
  return {OutputTypeOf(node), OutputDims(node, Needed(fed, 0, "a"), Needed(fed, 1, "b"))};
}

TensorShape Output(const ConcatNode& node, std::span<const FedShape> fed) {
  return {OutputTypeOf(node), OutputDims(node, fed)};
}

std::vector<FedShape> Shapes(std::span<const TensorShape> fed) {
  std::vector<FedShape> shapes;
  for (const TensorShape& tensor : fed) shapes.push_back({tensor.type, tensor.dims});
  return shapes;
}

}  // namespace

NodeSpec DecodeNode(const OpSchema& schema, const AttributeMap& attributes,
                    std::span<const std::optional<ConstTensor>> constants, const std::vector<bool>& present,
                    Weights weights) {
  const auto decoder = Decoders().find(schema.name);
  Require(decoder != Decoders().end(), schema.name, ": no implementation");
  return decoder->second(NodeReader(schema, attributes, constants, present,
                                    weights == Weights::kMayBeMissing ? "w" : std::string_view()));
}

TensorShape OutputOf(const NodeSpec& node, std::span<const TensorShape> fed) {
  const std::vector<FedShape> shapes = Shapes(fed);
  return std::visit([&](const auto& each) { return Output(each, shapes); }, node);
}

ConvShape ImagesOf(const MatmulNode& node, std::span<const TensorShape> fed) {
  const std::vector<FedShape> shapes = Shapes(fed);
  return MatmulShape(node).Images(At(shapes, 0), At(shapes, 1));
}

}  // namespace lowbit
