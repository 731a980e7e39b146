#include "core/operators/factories.h"
#include "core/operators/matmul.h"

namespace lowbit {

LOWBIT_OPERATOR_FACTORY(CreateGemm) {
  const NodeReader node(schema, attributes, constants, present);
  ConvGeometry g;  // a 1x1 convolution over images of one pixel
  g.in_channels = node.Int("in_features", 1, kMaxAttribute);
  g.out_channels = node.Int("out_features", 1, kMaxAttribute);
  const int64_t axis = node.Int("axis", -kMaxAttribute, kMaxAttribute);
  return CreateMatmul(node, ParseMatmul(node, g), {.spatial = 0, .is_gemm = true, .axis = axis}, options);
}

}  // namespace lowbit
