// The end of a register tile: MR output pixels x NV vectors of int32 accumulators become bytes or floats of
// y.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/epilogue.h"
#include "kernels/common/tile_output.h"

namespace lowbit {
namespace {

template <class S, int MR, int NV, class Sums>
inline __attribute__((always_inline)) void StoreTile(int32_t* to, const Sums& acc) {
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) S::Store(to + (r * NV + v) * S::kLanes, acc[r][v]);
  }
}

// Any epilogue, any number of channels. `sums` holds `rows` pixels of `vectors` vectors of accumulators:
// channels [channel, channel + count) of the pixels from `pixel` on.
template <class S>
__attribute__((noinline)) void FinishMemory(const TileOutput& out, size_t pixel, size_t channel, size_t count,
                                            const int32_t* sums, size_t rows, size_t vectors) {
  const EpilogueView& e = *out.epilogue;
  for (size_t r = 0; r < rows; ++r) {
    FinishChannels<S>(e, sums + r * vectors * S::kLanes, channel, count,
                      (out.first_pixel + (pixel + r) * out.pixel_step) * e.channels + channel, out.residual,
                      out.y);
  }
}

// The same for accumulators acc[r][v] (epilogue.h); the common cases stay in registers. (NV - 1) * kLanes < count.
// `copied`: a copy of the tile's residuals, NV vectors of them for each pixel, or none.
template <class S, int MR, int NV, class Sums>
inline __attribute__((always_inline)) void FinishRegisters(const TileOutput& out, size_t pixel,
                                                           size_t channel, size_t count, const Sums& acc,
                                                           const uint8_t* copied = nullptr) {
  const EpilogueView& e = *out.epilogue;
  const size_t pitch = out.pixel_step * e.channels;
  const size_t index = out.first_pixel * e.channels + pixel * pitch + channel;
  // Where y holds bytes: of the floats of other epilogues FinishMemory finds the place itself.
  uint8_t* y = static_cast<uint8_t*>(out.y) + index;
  const bool partial = count < static_cast<size_t>(NV * S::kLanes);
  ResidualRows residual;
  if (e.has_residual) residual = {out.residual + index, pitch};
  if (copied != nullptr) residual = {copied, NV * S::kLanes};
  if (e.kind == EpilogueKind::kThresholds) {
    if constexpr (S::kHasFma) {
      if (e.line_gain != nullptr) {
        if (!partial) return LineTile<S, MR, NV, false>(e, acc, channel, count, y, pitch);
        return LineTile<S, MR, NV, true>(e, acc, channel, count, y, pitch);
      }
    }
    if (!partial) return ThresholdTile<S, MR, NV, false>(e, acc, channel, count, y, pitch);
    return ThresholdTile<S, MR, NV, true>(e, acc, channel, count, y, pitch);
  }
  if (e.kind == EpilogueKind::kTail && e.quantized_output) {
    if (!partial) return TailTile<S, MR, NV, false>(e, acc, channel, count, residual, y, pitch);
    if (!e.has_residual) return TailTile<S, MR, NV, true>(e, acc, channel, count, {}, y, pitch);
  }
  if constexpr (S::kAddsFewSums) {
    if (e.few_sums != nullptr && !partial)
      return FewSumsTile<S, MR, NV>(e, acc, e.scale + channel, residual, y, pitch);
  }
  if (e.pack_clips) {
    const float* scale = e.scale + channel;
    if (!e.has_residual) {
      if (!partial) return RequantizeTile<S, MR, NV, false, false>(e, acc, scale, count, {}, y, pitch);
      return RequantizeTile<S, MR, NV, false, true>(e, acc, scale, count, {}, y, pitch);
    }
    if (!partial) return RequantizeTile<S, MR, NV, true, false>(e, acc, scale, count, residual, y, pitch);
    if constexpr (S::kLanes > 1) {
      alignas(64) uint8_t rows[MR * NV * S::kLanes];
      if (copied == nullptr) {  // whole vectors are read, which residuals need not hold
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r)
          S::CopyBytes(rows + r * NV * S::kLanes, residual.first + r * pitch, NV * S::kLanes, count);
        residual = {rows, NV * S::kLanes};
      }
      return RequantizeTile<S, MR, NV, true, true>(e, acc, scale, count, residual, y, pitch);
    }
  }
  alignas(64) int32_t sums[MR * NV * S::kLanes];
  StoreTile<S, MR, NV>(sums, acc);
  FinishMemory<S>(out, pixel, channel, count, sums, MR, NV);
}

// The same for channels that may be fewer than all vectors but the last hold.
template <class S, int MR, int NV, class Sums>
inline __attribute__((always_inline)) void FinishPanel(const TileOutput& out, size_t pixel, size_t channel,
                                                       size_t count, const Sums& acc) {
  if (count > static_cast<size_t>((NV - 1) * S::kLanes))
    return FinishRegisters<S, MR, NV>(out, pixel, channel, count, acc);
  alignas(64) int32_t sums[MR * NV * S::kLanes];
  StoreTile<S, MR, NV>(sums, acc);
  FinishMemory<S>(out, pixel, channel, count, sums, MR, NV);
}

}  // namespace
}  // namespace lowbit
