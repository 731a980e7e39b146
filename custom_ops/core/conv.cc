#include "core/conv.h"

#include "core/node_reader.h"
#include "core/status.h"

namespace lowbit {
namespace {

// One tensor never holds more elements than this, so that a malformed shape fails here with a reason and not
// in an allocation of terabytes.
constexpr int64_t kMaxElements = (int64_t{1} << 31) - 1;

Window WindowOf(const ConvGeometry& g) {
  Window window;
  window.kernel = {g.kernel_h, g.kernel_w};
  window.stride = {g.stride_h, g.stride_w};
  window.dilation = {g.dilation_h, g.dilation_w};
  window.pad_begin = {g.pad_top, g.pad_left};
  window.pad_end = {g.pad_bottom, g.pad_right};
  return window;
}

}  // namespace

ConvShape InferConvShape(const ConvGeometry& g, int64_t batch, int64_t in_h, int64_t in_w) {
  Require(batch >= 0 && in_h >= 1 && in_w >= 1, "x is ", batch, " images of ", in_h, " x ", in_w,
          " pixels, expected at least one pixel");
  const Window window = WindowOf(g);
  ConvShape shape{batch, in_h, in_w, 0, 0};
  shape.out_h = g.transposed ? TransposedOutputSize(window, 0, in_h, g.output_pad_h)
                             : WindowOutputSize(window, 0, in_h, false);
  shape.out_w = g.transposed ? TransposedOutputSize(window, 1, in_w, g.output_pad_w)
                             : WindowOutputSize(window, 1, in_w, false);
  const int64_t dims[] = {batch, shape.out_h, shape.out_w, g.out_channels};
  Require(ElementCount(dims) <= kMaxElements, "the output ", ShapeText(dims), " has more than ", kMaxElements,
          " elements");
  return shape;
}

}  // namespace lowbit
