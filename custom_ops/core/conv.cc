#include "core/conv.h"

#include <algorithm>

#include "core/node_reader.h"
#include "core/status.h"

namespace lowbit {
namespace {

// One tensor never holds more elements than this, so that a malformed shape fails here with a reason and not
// in an allocation of terabytes.
constexpr int64_t kMaxElements = (int64_t{1} << 31) - 1;

Window WindowOf(const ConvGeometry& g) {
  Window window;
  window.kernel = {g.kernel_d, g.kernel_h, g.kernel_w};
  window.stride = {g.stride_d, g.stride_h, g.stride_w};
  window.dilation = {g.dilation_d, g.dilation_h, g.dilation_w};
  window.pad_begin = {g.pad_front, g.pad_top, g.pad_left};
  window.pad_end = {g.pad_back, g.pad_bottom, g.pad_right};
  return window;
}

}  // namespace

// In loops that compilers vectorize: every weight is read when a session is created.
ValueRange RangeOfWeights(const ConvSpec& spec) {
  ValueRange range;
  const bool bipolar = spec.w.encoding == Encoding::kBipolar;
  const uint8_t flip = spec.w.encoding == Encoding::kSigned ? 0x80 : 0;  // orders signed codes as bytes
  const size_t k = static_cast<size_t>(spec.geometry.K());
  for (size_t c = 0; c < static_cast<size_t>(spec.geometry.out_channels); ++c) {
    const uint8_t* codes = spec.weights.data() + c * k;
    const int32_t zero = spec.w_zero_point[c] + flip;
    uint8_t lo = 0xff, hi = 0, zeros = 0;
    for (size_t i = 0; i < k; ++i) {
      const uint8_t code = codes[i] ^ flip;
      lo = std::min(lo, code);
      hi = std::max(hi, code);
      zeros |= code == zero ? 1 : 0;
    }
    range.lo = std::min(range.lo, bipolar ? 2 * lo - 1 : lo - zero);
    range.hi = std::max(range.hi, bipolar ? 2 * hi - 1 : hi - zero);
    range.has_zero |= !bipolar && zeros != 0;
  }
  return range;
}

ConvShape InferConvShape(const ConvGeometry& g, int64_t batch, int64_t in_h, int64_t in_w, int64_t in_d) {
  Require(batch >= 0 && in_d >= 1 && in_h >= 1 && in_w >= 1, "x is ", batch, " images of ", in_d, " x ", in_h,
          " x ", in_w, " pixels, expected at least one pixel");
  const Window window = WindowOf(g);
  ConvShape shape{batch, in_h, in_w, 0, 0, in_d, 0};
  shape.out_d = WindowOutputSize(window, 0, in_d, false);
  shape.out_h = g.transposed ? TransposedOutputSize(window, 1, in_h, g.output_pad_h)
                             : WindowOutputSize(window, 1, in_h, false);
  shape.out_w = g.transposed ? TransposedOutputSize(window, 2, in_w, g.output_pad_w)
                             : WindowOutputSize(window, 2, in_w, false);
  const int64_t dims[] = {batch, shape.out_d, shape.out_h, shape.out_w, g.out_channels};
  Require(ElementCount(dims) <= kMaxElements, "the output ", ShapeText(dims), " has more than ", kMaxElements,
          " elements");
  return shape;
}

}  // namespace lowbit
