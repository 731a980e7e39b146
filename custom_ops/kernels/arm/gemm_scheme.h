// What a way of multiplying few bits has to say to become a kernel. gemm.cc is the portable rest: addressing,
// packing, zero points, threads, epilogue.
//
//   A tile     4, 8 or 12 output pixels times `channels` output channels, over all products of a window (K).
//              Lanes of vectors are channels, because y is NHWC; the values of a pixel are broadcast or
//              selected by element.
//   Operands   x' and w' are small signed integers with  x - zx = x' + x_offset - zx  and  w - zw = w' + s
//              (s = 0 unless w - zw leaves int8). A tile adds sum x' w' to int32 sums that begin at the
//              bias, into which everything else is folded:
//                sum (x - zx)(w - zw) = sum x' w'  +  s * sum x'  +  (x_offset - zx) * sum (w - zw)
//                                       ^ tile        ^ row sums     ^ constant: in the bias
//   Calls      Tiles of one size that lie side by side are one call. Their sums begin at the bias, or go on
//              where K is multiplied in chunks.
//   Packing    `unit` consecutive products k are stored together, and of each unit the rows of a tile:
//                x' [K / unit][8 pixels][unit], behind it [K / unit][4 pixels][unit] for tiles of 4 and 12
//                w' [K / unit][channels][unit]
//              K is rounded up to k_multiple; x' and w' behind the end are 0. A tile may read, but not use,
//              kGemmOverread bytes behind either, so that loads can run one step ahead.
//   Flushes    Narrow accumulators are widened every `flush` steps. A scheme computes that number from the
//              values that really meet (GemmOperands), with a proof, and refuses the node with 0.
//
// A new scheme is a file gemm_<name>[_dotprod|_i8mm].cc that defines a GemmScheme, and a row in rows.inc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/arm/pipeline.h"

namespace lowbit {

// How the codes of one unit are stored.
enum class GemmForm : uint8_t {
  kBytes,  // int8
  kWords,  // int16
  kPairs,  // two k in 16 bits, modulo 2^16: x'[k] + 256 x'[k+1], and crosswise w'[k+1] + 256 w'[k]
};

inline constexpr size_t kGemmOverread = 64;

constexpr size_t CodeBytes(GemmForm form) { return form == GemmForm::kWords ? 2 : 1; }

// The values that are multiplied.
struct GemmOperands {
  int32_t x_lo, x_hi;  // of x', padding included
  int32_t w_lo, w_hi;  // of w'
  // w', [channels][k]; null while only their range is known (selection does not read the weights).
  const int8_t* weights;
  size_t channels, k;
};

// The largest n such that the sum of any n (or fewer) successive products x'[k] w'[k] of k, k + stride, k + 2
// stride, ... of one channel stays inside [lo, hi] whatever the x' are; at most `most`.
size_t LongestSafeRun(const GemmOperands& operands, size_t stride, int64_t lo, int64_t hi, size_t most);

// One call: sums[pixel * channels + channel] = bias[channel] + sum x' w'. x' of the next tile follow that of
// the last, and so do its sums.
struct GemmTile {
  const uint8_t* x;
  const uint8_t* w;
  size_t steps;         // K / unit
  size_t flush;         // steps between two flushes, at least 1
  const int32_t* bias;  // null: the products are added to `sums`
  int32_t* sums;
  size_t count;   // of tiles, at least 1
  size_t pixels;  // that exist; sums of others, at the end of the last tile, may be left out
};

using GemmTileFunction = void (*)(const GemmTile& tile);

// Calls kTile, which computes one tile, for each of them. kStepBytes: x' of a pixel and step.
template <size_t kChannels, size_t kPixels, size_t kStepBytes, GemmTileFunction kTile>
void EachTile(const GemmTile& tiles) {
  GemmTile tile = tiles;
  tile.count = 1;
  for (size_t i = 0; i < tiles.count; ++i) {
    const size_t left = tiles.pixels - i * kPixels;
    tile.pixels = left < kPixels ? left : kPixels;
    kTile(tile);
    tile.x += kPixels * kStepBytes * tile.steps;
    tile.sums += kPixels * kChannels;
  }
}

// Where the sums of a tile begin: of the next pixel `pitch` bytes behind.
struct GemmBegin {
  const int32_t* from;
  ptrdiff_t pitch;
  // What was added up so far goes on.
  GemmBegin(const int32_t* sums, size_t channels)
      : from(sums), pitch(static_cast<ptrdiff_t>(channels * sizeof(int32_t))) {}
  GemmBegin(const GemmTile& t, size_t channels) : GemmBegin(t.sums, channels) {
    if (t.bias == nullptr) return;
    from = t.bias;
    pitch = 0;
  }
  const int32_t* Of(size_t pixel) const {
    return from + static_cast<ptrdiff_t>(pixel) * pitch / static_cast<ptrdiff_t>(sizeof(int32_t));
  }
};

inline constexpr int kGemmTileSizes = 3;
constexpr size_t GemmTilePixels(int size) { return 4 * (static_cast<size_t>(size) + 1); }

struct GemmScheme {
  size_t channels;    // of a panel: 8, 16 or 32
  size_t unit;        // 1, 2, 4 or 8
  size_t k_multiple;  // a multiple of unit
  GemmForm form;
  // Steps between flushes that cannot overflow; 0: not even one is safe. Any number where nothing overflows.
  size_t (*flush)(const GemmOperands& operands);
  // Sustained products per cycle at that interval, modelled; for the cost function.
  double (*macs_per_cycle)(Pipeline pipeline, size_t flush);
  // For 4, 8 and 12 pixels; null where there is none. x' of 12 pixels are those of 8 followed by those of 4.
  GemmTileFunction tile[kGemmTileSizes];
};

// Defined in gemm_<name>.cc.
extern const GemmScheme kGemmSmull8, kGemmSmull16, kGemmSmlal, kGemmMlaPairs, kGemmMlaBytes16,
    kGemmMlaBytes32, kGemmMlaWords, kGemmSdot, kGemmSmmla;

}  // namespace lowbit
