// Rows of codes, one per output pixel, into the interleaved form that a tile reads (gemm_scheme.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/arm/gemm_scheme.h"

namespace lowbit {

// x' of a byte: (byte ^ flip) - offset, flip 0 or 0x80.
struct GemmXMap {
  uint8_t flip, offset;
};

// `bytes` bytes, a multiple of the unit, of each of the rows; nothing beyond them is read.
using GemmPackFunction = void (*)(const uint8_t* const* rows, size_t bytes, GemmXMap map, uint8_t* to);

// For 8 and for 4 rows.
struct GemmPacker {
  GemmPackFunction rows8, rows4;
};
GemmPacker GemmPackerFor(GemmForm form, size_t unit);

}  // namespace lowbit
