#include "core/nodes.h"

#include <algorithm>
#include <iterator>
#include <string_view>

#include "core/nodes/matmul_shape.h"
#include "core/nodes/node_kinds.h"
#include "core/selection.h"
#include "core/status.h"

namespace lowbit {
namespace {

using Decoder = NodeSpec (*)(const NodeReader&);

template <auto kDecode>
NodeSpec Decode(const NodeReader& node) {
  return kDecode(node);
}

struct NamedDecoder {
  std::string_view op;
  Decoder decode;
};

// Null where this build does not hold the op.
#define LOWBIT_DECODER(op, decode) \
  NamedDecoder { op, HasOp(op) ? Decode<decode> : nullptr }

constexpr NamedDecoder kDecoders[] = {
    LOWBIT_DECODER("LowBitConv", DecodeConv),
    LOWBIT_DECODER("APConv", DecodeConv),
    LOWBIT_DECODER("LowBitConvTranspose", DecodeConvTranspose),
    LOWBIT_DECODER("LowBitGemm", DecodeGemm),
    LOWBIT_DECODER("APGemm", DecodeGemm),
    LOWBIT_DECODER("LowBitAffine", DecodeAffine),
    LOWBIT_DECODER("LowBitLookup", DecodeLookup),
    LOWBIT_DECODER("LowBitAdd", DecodeAdd),
    LOWBIT_DECODER("LowBitMul", DecodeMul),
    LOWBIT_DECODER("LowBitMatMul", DecodeFedMatmul),
    LOWBIT_DECODER("LowBitMaxPool", DecodeMaxPool),
    LOWBIT_DECODER("LowBitAveragePool", DecodeAveragePool),
    LOWBIT_DECODER("LowBitGlobalAveragePool", DecodeGlobalAveragePool),
    LOWBIT_DECODER("LowBitConcat", DecodeConcat),
    LOWBIT_DECODER("LowBitNormalization", DecodeNormalization),
    LOWBIT_DECODER("LowBitResize", DecodeResize),
    LOWBIT_DECODER("LowBitImage", DecodeImage),
    LOWBIT_DECODER("LowBitDepthToSpace", DecodeDepthToSpace),
    LOWBIT_DECODER("LowBitSoftmax", DecodeSoftmax),
    LOWBIT_DECODER("LowBitRequantize", DecodeRequantize),
    LOWBIT_DECODER("LowBitQuantize", DecodeQuantize),
    LOWBIT_DECODER("LowBitThreshold", DecodeThreshold),
    LOWBIT_DECODER("LowBitDequantize", DecodeDequantize),
};

#undef LOWBIT_DECODER

#if LOWBIT_MINIMAL
consteval bool KnowsSelectedOps() {
  for (const std::string_view selected : kSelectedOps) {
    bool known = !kSelectsOps;
    for (const NamedDecoder& each : kDecoders) known = known || each.op == selected;
    if (!known) return false;
  }
  return true;
}
static_assert(KnowsSelectedOps(),
              "LOWBIT_OPS_CONFIG names an op that this lowbit does not have; build the lowbit that made it");
#endif

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

TensorShape Output(const FedMatmulNode& node, std::span<const FedShape> fed) {
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
  const std::string_view op = schema.name;
  const auto found = std::find_if(std::begin(kDecoders), std::end(kDecoders),
                                  [&](const NamedDecoder& each) { return each.op == op; });
  Require(found != std::end(kDecoders) && found->decode != nullptr, op, ": no implementation");
  return found->decode(NodeReader(schema, attributes, constants, present,
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
