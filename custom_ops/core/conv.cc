#include "core/conv.h"

#include <algorithm>
#include <cstdlib>

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

// Of codes as unsigned bytes: the least and the largest, their sum, that of their distances from `zero`, and
// whether that is among them.
struct CodeSums {
  uint8_t lo, hi;
  bool has_zero;
  int64_t sum, distance;
};

// In loops that compilers vectorize: every weight is read when a session is created.
CodeSums SumCodes(const uint8_t* codes, size_t count, uint8_t flip, uint8_t zero) {
  CodeSums sums{0xff, 0, false, 0, 0};
  constexpr size_t kBlock = size_t{1} << 20;  // sums of so many bytes stay inside int32
  uint8_t lo = 0xff, hi = 0, zeros = 0;
  for (size_t first = 0; first < count; first += kBlock) {
    const size_t end = std::min(count, first + kBlock);
    int32_t sum = 0, distance = 0;
    for (size_t i = first; i < end; ++i) {
      const uint8_t code = codes[i] ^ flip;
      lo = std::min(lo, code);
      hi = std::max(hi, code);
      zeros |= code == zero ? 1 : 0;
      sum += code;
      distance += std::abs(code - zero);
    }
    sums.sum += sum;
    sums.distance += distance;
  }
  sums.lo = lo;
  sums.hi = hi;
  sums.has_zero = zeros != 0;
  return sums;
}

}  // namespace

void ReadWeightValues(ConvSpec& spec) {
  const bool bipolar = spec.w.encoding == Encoding::kBipolar;
  const uint8_t flip = spec.w.encoding == Encoding::kSigned ? 0x80 : 0;  // orders signed codes as bytes
  const size_t k = static_cast<size_t>(spec.geometry.K());
  spec.weight_values = {};
  spec.channel_values.clear();
  spec.channel_values.reserve(static_cast<size_t>(spec.geometry.out_channels));
  for (size_t c = 0; c < static_cast<size_t>(spec.geometry.out_channels); ++c) {
    const auto zero = static_cast<uint8_t>(spec.w_zero_point[c] + flip);
    const CodeSums codes = SumCodes(spec.weights.data() + c * k, k, flip, zero);
    const auto count = static_cast<int64_t>(k);
    const ChannelValues values =
        bipolar ? ChannelValues{2 * codes.lo - 1, 2 * codes.hi - 1, 2 * codes.sum - count, count}
                : ChannelValues{codes.lo - zero, codes.hi - zero, codes.sum - count * zero, codes.distance};
    ValueRange& range = spec.weight_values;
    range.lo = std::min(range.lo, values.lo);
    range.hi = std::max(range.hi, values.hi);
    range.has_zero |= !bipolar && codes.has_zero;
    spec.channel_values.push_back(values);
  }
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
