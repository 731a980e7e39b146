// Convolutions whose weights and codes have 1 or 2 bits, as population counts on wgmma (sm_90a).
#pragma once

#include <algorithm>

#include "core/bit_planes.h"
#include "kernels/cuda/conv/halo.h"

namespace lowbit::cuda {

struct ConvProblem;
struct WeightBits;
struct WeightLayout;

// How codes of few bits are told by comparisons: two sums without their bias lie in a register, `offset` more each, so
// that they are 0 .. 2^15 - 1, and what is added for a step sets a half's highest bit where a sum has reached the step.
struct BitSteps {
  int count = 0;                // 1 or 3: one less than there may be codes; 0: sums are not as small
  int64_t least = 0, most = 0;  // of sums without a bias
  int offset() const { return static_cast<int>(-least); }
};
BitSteps BitStepsOf(const ConvGeometry& g, int x_bits, const WeightBits& bits);

extern const ConvRow kBitsRow;
extern const WeightLayout kBitWeights;

// Codes of so many channels of a place are a word of each plane (core/bit_planes.h). A step along K multiplies two
// words: of channels or of taps.
inline constexpr int kBitWord = kPlaneChannels, kBitWordBytes = kPlaneWordBytes;
// A step has 32 bytes of each row of B, rows in eights as wgmma reads them without swizzle. Rows of ones follow the
// channels': they count a pixel's own bits.
inline constexpr int kBitRowBytes = 2 * kBitWordBytes, kOnesRows = 16;
// Of a block, steps of each plane of weights.
inline constexpr int kMaxBitWeights = 2 * kMaxHaloWeights;

// Of a code of two bits with a residual of two.
inline constexpr int kBitProducts = 16;

// Rows of up to so many pixels are gathered by as many threads. A copy of a row takes about 35 clocks, however short it
// is: on an H100 512 channels at 7x7, of one plane and of two, took 1 and 1.7 us longer than wider images let expect.
inline constexpr int kGatheredPixels = 8;
// Of pixels that strides set apart, those along both dims.
inline constexpr int kMaxPhases = 16;

// Slabs of bytes on their way to planes, or patches that come as planes.
inline constexpr int kMaxBitSlots = 4;

constexpr int BitStepBytes(int tile_n) { return (tile_n + kOnesRows) * kBitRowBytes; }

// Whether codes become planes in registers.
constexpr bool MakesBits(Finish finish) {
  return finish == Finish::kPlanesSteps || finish == Finish::kPlanesAdding;
}
// Tiles of a patch, one for each warpgroup: as many as registers allow.
// makes_bits: MakesBits (BitsParams::combines).
constexpr int MaxBitTiles(int tile_n, bool makes_bits) { return tile_n <= 64 ? 4 : makes_bits ? 3 : 2; }

// step[i]: of each step, where the first word's place is from that of the tile, and how much further the second
// word's, in places; the one in the low half, the other in the high one. k_tiles: what a block has of weights, steps of
// their planes, those of a pair's other product behind its own.
struct BitsParams : HaloParams {
  int own_steps = 0;
  int x_bits = 1, w_planes = 1;   // of the instance; of weights
  int rows = 0;                   // of B
  int w_shift = 0, w_lowest = 0;  // WeightBits
  int sum_offset = 0;             // BitSteps
  const uint8_t* ones =
      nullptr;                // [steps][w_planes][kOnesRows], as rows of B, then a row of places that are 0
  int words = 0, places = 0;  // of a plane of codes, each phase's; of a word
  // Of a plane of a patch, with those of a pair's other product; where in a patch a product's own begin.
  int patch_words = 0, first_word = 0;
  int pixels = 0;        // of the input, the last row of which may have fewer than in_w
  bool is_line = false;  // outputs are places, in their order
  int columns = 0;       // of a line that are pixels, behind pad_left others
  // Of pixels, of each word of codes in a row (PhaseLine), which strides set apart: the first one's row and column; 0:
  // windows have no stride, and pixels come as whole rows, else one by one.
  int phases = 0;
  uint8_t phase_y[kMaxPhases] = {}, phase_x[kMaxPhases] = {};
  // For slabs of bytes, where there are as many planes for patches as stages; 0: patches come as planes.
  int slots = 0;
  int added_planes = 0;  // of residuals; 0: a byte each
  bool copies = false;   // first codes are the codes, without residuals
  // Codes are made of the bits of a first code and of a residual: each plane is the exclusive or of
  // those products of bits whose word here has all bits. Bit i of a product's number: the code's bit i has part in it, that
  // of the residual those from 2 on. Where not, residuals are added as numbers.
  bool combines = false;
  // First codes are told by EpilogueParams::steps, which stand in the places of the bias and the scale.
  bool has_steps = false;
  uint32_t products[kMostPlanes][kBitProducts] = {};
};

// What a problem of planes gives, whose words lie in a patch from first_word on, but for what depends on how tiles are
// spread over blocks.
BitsParams BitsParamsOf(const ConvProblem& problem, const ConvConfig& config, int first_word = 0);
// What follows from the constants of the node, which `params` has.
void FindConstants(const ConvProblem& problem, BitsParams& params);
// Of a plane of a patch.
int64_t BitWordsOfPatch(const ConvProblem& problem);

// Bytes of codes to planes of bits.
struct PackPlanesParams {
  const uint8_t* x = nullptr;  // [pixels][channels]
  uint8_t* planes = nullptr;
  int pixels = 0, channels = 0, x_bits = 1;  // channels: a multiple of 64
};

cudaError_t LaunchPackPlanes(const PackPlanesParams& params, const LaunchOptions& options);
cudaError_t LaunchBits(const BitsParams& params, const ConvConfig& config, const LaunchOptions& options);

}  // namespace lowbit::cuda
