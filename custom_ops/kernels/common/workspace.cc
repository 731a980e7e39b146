#include "kernels/common/workspace.h"

#include <memory>

#include "core/packed_weights.h"

namespace lowbit {

uint8_t* ThreadScratch(size_t bytes) {
  thread_local std::unique_ptr<AlignedBytes> buffer;
  if (!buffer || buffer->size() < bytes) buffer = std::make_unique<AlignedBytes>(bytes);
  return buffer->data();
}

ConvShape Flatten(const ConvGeometry& g, const ConvShape& s) {
  const bool pointwise = g.Taps() == 1 && g.IsPlanar() && g.stride_h == 1 && g.stride_w == 1 &&
                         g.pad_top == 0 && g.pad_left == 0 && g.pad_bottom == 0 && g.pad_right == 0;
  if (!pointwise) return s;
  const int64_t pixels = s.batch * s.in_h * s.in_w;
  return {1, 1, pixels, 1, pixels};
}

}  // namespace lowbit
