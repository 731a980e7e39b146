// Small pieces of the portable halves of the kernels: rounding, and the scratch memory of a thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/conv.h"

namespace lowbit {

constexpr size_t RoundUp(size_t value, size_t to) { return (value + to - 1) / to * to; }
constexpr size_t DivideUp(size_t value, size_t by) { return (value + by - 1) / by; }

// The parts of a thread's scratch memory, laid out one behind the other, each at the start of a cache line.
class ScratchLayout {
 public:
  // The offset of a new part.
  size_t Take(size_t bytes) {
    const size_t offset = bytes_;
    bytes_ += RoundUp(bytes, kAlign);
    return offset;
  }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kAlign = 64;
  size_t bytes_ = 0;
};

// Scratch memory of the calling thread, shared by all kernels; valid until its next call.
uint8_t* ThreadScratch(size_t bytes);

// The image as a kernel may see it: a 1x1 convolution without padding and stride is one long row.
ConvShape Flatten(const ConvGeometry& geometry, const ConvShape& shape);

}  // namespace lowbit
