#include "core/operators/factories.h"
#include "core/operators/matmul.h"
#include "core/status.h"

namespace lowbit {
namespace {

// ONNX: the extra pixels at the end of a dimension stay below its stride or its dilation.
int64_t OutputPadding(const AttributeReader& attributes, size_t i, int64_t stride, int64_t dilation) {
  const int64_t value = attributes.Ints("output_padding")[i];
  Require(value >= 0 && (value < stride || value < dilation), attributes.op(),
          ": attribute 'output_padding' holds ", value, ", expected 0.. below the stride ", stride,
          " or the dilation ", dilation);
  return value;
}

}  // namespace

LOWBIT_OPERATOR_FACTORY(CreateConvTranspose) {
  const NodeReader node(schema, attributes, constants, present);
  ConvGeometry g = ParseConvGeometry(node, true);
  const size_t spatial = node.Ints("kernel_shape").size(), given = node.Ints("output_padding").size();
  Require(given == 0 || given == spatial, node.op(), ": attribute 'output_padding' has ", given,
          " numbers, expected ", spatial);
  if (given == 2) g.output_pad_h = OutputPadding(node, 0, g.stride_h, g.dilation_h);
  if (given != 0) g.output_pad_w = OutputPadding(node, given - 1, g.stride_w, g.dilation_w);
  return CreateMatmul(node, ParseMatmul(node, g), {.spatial = static_cast<int>(spatial)}, options);
}

}  // namespace lowbit
