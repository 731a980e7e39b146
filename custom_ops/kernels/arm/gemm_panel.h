// Panels of weights as a GEMM kernel holds them, and on their way to what a tile reads.
//
// The codes of a panel stand in the order in which the tile takes them (gemm_scheme.h), in the fewest bits
// their values need, 2, 4 or 8: each is its value less the least one of the panel. They are unpacked a chunk
// of K at a time, once for all pixels of a block. Bytes that tiles read as they are stay where they are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/arm/gemm_scheme.h"

namespace lowbit {

// Codes are unpacked in groups of at most so many.
inline constexpr size_t kGemmPanelGroup = 128;

// Bits for the values from lo to hi and for 0, which fills up panels.
int GemmPanelBits(int32_t lo, int32_t hi);

// Bytes of `codes` codes.
constexpr size_t GemmPanelBytes(size_t codes, int bits) {
  return (codes * static_cast<size_t>(bits) + 127) / 128 * 16;
}

// `codes` codes into panel form. Of kPairs, the codes of a pair are k + 1 and k.
void PackGemmPanel(GemmForm form, int bits, const int8_t* from, size_t codes, int32_t least, uint8_t* to);

// The inverse, into what tiles read; whole groups are written, and kGemmOverread behind `panel` is read.
using GemmPanelUnpack = void (*)(const uint8_t* panel, size_t codes, int32_t least, uint8_t* to);
// Null where that is what is held.
GemmPanelUnpack GemmPanelUnpackFor(GemmForm form, int bits);

}  // namespace lowbit
