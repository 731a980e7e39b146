#include "core/operators/factories.h"
#include "core/operators/matmul.h"
#include "core/status.h"

namespace lowbit {

ConvGeometry ParseConvGeometry(const AttributeReader& attributes, bool transposed) {
  ConvGeometry g;
  const Window window = ReadWindow(attributes, true);
  g.kernel_h = window.kernel[0], g.kernel_w = window.kernel[1];
  g.stride_h = window.stride[0], g.stride_w = window.stride[1];
  g.dilation_h = window.dilation[0], g.dilation_w = window.dilation[1];
  g.pad_top = window.pad_begin[0], g.pad_left = window.pad_begin[1];
  g.pad_bottom = window.pad_end[0], g.pad_right = window.pad_end[1];

  g.in_channels = attributes.Int("in_channels", 1, kMaxAttribute);
  g.out_channels = attributes.Int("out_channels", 1, kMaxAttribute);
  g.group = attributes.Int("group", 1, kMaxAttribute);
  Require(g.in_channels % g.group == 0 && g.out_channels % g.group == 0, attributes.op(), ": group ", g.group,
          " does not divide ", g.in_channels, " input and ", g.out_channels, " output channels");
  g.transposed = transposed;
  return g;
}

LOWBIT_OPERATOR_FACTORY(CreateConv) {
  const NodeReader node(schema, attributes, constants, present);
  const ConvGeometry geometry = ParseConvGeometry(node, false);
  const int spatial = static_cast<int>(node.Ints("kernel_shape").size());
  return CreateMatmul(node, ParseMatmul(node, geometry), {.spatial = spatial}, options);
}

}  // namespace lowbit
