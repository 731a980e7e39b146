// What distinguishes the Winograd kernels. winograd.cc drives them.
//
// F(m x m, 3x3) computes m x m outputs of a channel from n x n inputs, n = m + 2, with n^2 products instead
// of 9 m^2: both operands are polynomials, multiplied by their values at n points. In one dimension, for
// inputs d, taps g and outputs y,
//
//   scale * y[j] = sum over the points i of A[j][i] (G g)[i] (B d)[i],         j = 0 .. m - 1
//
// in two dimensions the transforms act on rows and columns, and the scale is squared. Here B, G and A hold
// integers, and everything is computed modulo 2^k, k the width of the sums: the equation holds in every
// commutative ring, so nothing is rounded, overflows wrap as they should, and
//
//   scale^2 = odd * 2^s
//
// lets y be recovered from scale^2 y modulo 2^k by the inverse of the odd factor and a shift, as long as y is
// known to lie among 2^(k - s) successive integers. That is made true: the input channels are cut into chunks
// whose sums of products, with the weights at hand, span less than that, and what is recovered of each chunk
// is added in 32 bits. An offset added to the sums of a chunk puts their range around zero.
//
// Activations are taken as the bytes they are stored in, u = code - shift modulo 256, padding as the zero
// point's byte zu. The sum of u w is that of (u - zu) w plus zu sum w, a constant of the output channel.
//
// Three steps for a block of tiles: the inputs of every tile, transformed; per point, a matrix product with
// the transformed weights over the input channels; the outputs of every tile, transformed and finished.
//
// Transformed weights are larger than the weights, 8 times where 36 values of 16 bits stand for 9 bytes. They
// are computed for every block of tiles, a slice of the input channels of a panel at a time, in scratch
// memory; what a kernel holds are the weights, in 4 or 8 bits. To hold them transformed costs memory and time. On
// Zen 3 with AVX2, reading them takes .035 ms of a 64 x 64 layer at 56 x 56, .06 of 128 x 128 at 28 x 28, .26 of
// 256 x 256 at 14 x 14 and 1.5 of 512 x 512 at 7 x 7, computing them .03, .04, .1 and .4. On Zen 5 with AVX-512
// whole networks that hold them, fetched ahead of their products, take 1.14 (VGG-16, 118 MB of them), 1.20
// (ResNet-18, 19 MB) and 1.10 times (ResNet-50, 28 MB) what they take so; with neither computing nor reading them it
// would be .94, .95 and .97. A factor that all values at a point have in common is left to A, so that G holds small
// powers of two and its products are few additions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/epilogue_tables.h"
#include "kernels/common/tile_output.h"

namespace lowbit {

inline constexpr size_t kWinogradMaxPoints = 36;
// Products read this much beyond their operands.
inline constexpr size_t kWinogradOverread = 128;

// n x n pixels -> [point][block][channels].
struct WinogradInput {
  const uint8_t* const* pixels;  // the channels of each, [n][n]
  size_t blocks;
  uint8_t shift;
  uint8_t* to;
  size_t point_pitch, block_pitch;  // in bytes
};

// Weights are held and transformed in groups, cut from [block][channels / unit][panel][unit].
inline constexpr size_t kWinogradGroup = 32;

// [group][9 taps][weights of a group], bytes or halves of them, all low ones first -> [point][group].
struct WinogradWeights {
  const uint8_t* taps;
  size_t groups;
  uint8_t* to;
  size_t point_pitch;  // in bytes
  size_t pass;         // which points
};

// For a group of tiles, [block][tile][channels] times [block][channels][panel] -> [tile][panel], `count` times: of successive
// points, or of successive groups of tiles at one point. The steps lead from one product to the next, in
// bytes.
struct WinogradProduct {
  const uint8_t* x;
  const uint8_t* w;
  uint8_t* to;
  size_t tiles, blocks, count;
  ptrdiff_t x_step, w_step, to_step;
  bool adds;  // to what `to` holds
  // [panel], where sums begin that add to nothing, and elements from product to product; of schemes with an
  // input_offset.
  const int32_t* start;
  size_t start_step;
};

// Where the outputs of a tile go that are inside the image, and the first of its bytes in y.
struct WinogradDirect {
  uint8_t* y;
  size_t rows, columns;
};

// [point][tile][panel] -> [m rows][tile][m pixels][panel], 32 bits, or requantized to y.
struct WinogradOutput {
  const uint8_t* products;
  size_t point_pitch;  // in bytes
  size_t tiles;
  const int32_t* offset;  // [panel], added to every output before it is recovered
  // Outputs are added up in a narrow form first, chunks_per_widening chunks of them: whether these are the
  // first and the last of that sum. (A scheme that adds one has no narrow form.)
  bool first, last;
  void* narrow;
  const int32_t* base;  // [panel], the value of the sums so far; null: what they hold
  int32_t* sums;
  size_t row_pitch;  // of the sums and their narrow form, in elements
  // One per tile, where the last outputs go straight to y: a requantizer that clips bytes
  // (EpilogueView::pack_clips), a whole panel. Null: into the sums.
  const WinogradDirect* direct;
  const EpilogueView* epilogue;
  size_t channel, y_row_pitch;
};

// Cycles of one block's products, for a group of tiles and for each of them; of transforming one block's
// weights, and its inputs of one tile; of one tile's outputs of a chunk, and of finishing them; of the sums of a
// group's product, loaded and stored.
struct WinogradCycles {
  double group, tile, weights, input, output, finish, sums;

  constexpr double Product(size_t tiles) const { return group + static_cast<double>(tiles) * tile; }
};

struct WinogradScheme {
  size_t tile;      // m
  size_t channels;  // of a panel
  // Operands: bytes of a transformed value, signed; channels of a block; and how many of them stand side by
  // side in the weights, [block][channels / unit][panel][unit].
  size_t code_bytes, block, unit;
  size_t sum_bytes;  // of a product's sum
  // Tiles are multiplied in groups of so many; the last group may be smaller, a multiple of `granule`.
  size_t group, granule;
  // Weights are transformed for so many points at a time, a divisor of Points().
  size_t pass_points;
  // Of a thread: all its scratch memory; the transformed weights in it, where one block of input channels is less;
  // tiles of a block.
  size_t scratch_bytes, slice_bytes, block_tiles;
  // Transformed inputs are signed and about symmetric, as the u of the files' derivations, not unsigned.
  bool signed_inputs;
  // Added to the transformed inputs, so that none is negative; what it adds is taken off the sums.
  int32_t input_offset;
  int bits;  // outputs of a chunk are recovered modulo 2^bits
  size_t chunks_per_widening;
  // G, [n][3]. Whether G w G^T fits code_bytes is for the driver to see; the inputs' transforms do for all
  // activations that the row of the kernel table admits.
  const int8_t (*g)[3];
  void (*weights4)(const WinogradWeights& weights);  // of 4 bits each
  void (*weights8)(const WinogradWeights& weights);
  void (*input)(const WinogradInput& input);
  void (*product)(const WinogradProduct& product);
  void (*output)(const WinogradOutput& output);
  void (*finish)(const TileOutput& output, const TileSums& sums);
  const WinogradCycles& (*cycles)();  // of this machine

  constexpr size_t Window() const { return tile + 2; }
  constexpr size_t Points() const { return Window() * Window(); }
  constexpr size_t BlockBytes() const { return block * code_bytes; }      // of a tile's inputs at a point
  constexpr size_t ProductBytes() const { return channels * sum_bytes; }  // of a tile's sums at a point
  constexpr size_t WholeOf(size_t tiles) const { return (tiles + granule - 1) / granule * granule; }
  // Tiles that are multiplied together in a block of `tiles` of them: about as many in every group.
  constexpr size_t GroupOf(size_t tiles) const {
    const size_t groups = (tiles + group - 1) / group;
    return WholeOf((tiles + groups - 1) / groups);
  }
};

}  // namespace lowbit
