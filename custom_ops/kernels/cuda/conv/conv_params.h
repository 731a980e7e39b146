// What a kernel receives: plain data, passed by value, so that the whole node reads from constant memory.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/fast_divisor.h"

namespace lowbit::cuda {

inline constexpr int kMaxTailSteps = 8;
// Bytes of a tile along K.
inline constexpr int kTileK = 128;
// Tiles of weights may be read, never used, past the last channel.
inline constexpr int kWeightSlackRows = 256;

// How codes that are not yet rounded become bytes: 256 of them from the zero point on, where the conversion
// to bytes clips by itself; any number, where none of them is as large as 2^15 before it is clipped; any
// others. And of kWords in instances that are made for them, codes that are capped
// (EpilogueParams::is_capped), or lie on lines, which have clipped them.
enum class Rounding : int { kAny, kBytes, kWords, kCapped, kClipped };

// How residuals are added: where two multiplications and one rounding give the same (FitSum); where a
// multiplication by 1 / y_scale in two parts does (InvertScale), the zero points of codes and residuals being
// the lowest of 256 codes or not; any others, by a division. kInTail: before anything is rounded to a code,
// as the last step of a tail (EpilogueParams::in_tail). kOfValues: residuals are added to the number that a table has for
// the node's own code, or multiplied with it.
enum class Addition : int { kAny, kInverse, kInverseFromLowest, kOnLine, kInTail, kOfValues };

// A function of a tail (core/activation.h).
enum class TailFunction : int { kNone, kSilu, kHardSwish };

// What a sum of products is once the bias is in it: an integer; or the bits of a float, 1.5 * 2^23 + sum, or
// 2^23 + sum where sums below 0 are clipped to it. Floats of that size count one by one, so that the bits are
// those of the number plus the sum, and nothing but the bias has to begin there (PackedConv::SumFormOf).
enum class SumForm : int { kInteger, kFloat, kFloatFromZero };

// How an instance of a kernel finishes its sums.
//
// An instance for each, not a branch: a multiprocessor that runs another kernel than before fetches its instructions
// anew, the branches not taken too. With branches that took 0.8 to 1.4 us of each kernel of a network on an H200; with
// instances unlike kernels cost each other 0.12 us on an H100 (benchmarks/results/cuda_turns.md).
enum class Finish : int {
  kAny,            // as the node says
  kThroughMemory,  // not in registers (SumsParams::in_registers)
  kOfZeros,        // the same, of weights whose zero points stay outside of them (ZeroPoints)
  // The same by the blocks of a cluster, which add up their sums, to codes that are stored as they are: multiplied, to 256
  // of them from the zero point on; to any number; of a tail that is on lines. A kernel for one of them has a sixth of the
  // instructions of kThroughMemory: with them 48 convolutions of a ResNet-50, 12 of them in clusters, take 4 to 5 % less
  // on an H100 at batch 1.
  kBytesOfCluster,
  kWordsOfCluster,
  kTailOfCluster,
  kIntegers,
  kIntegersInTail,  // EpilogueParams::in_tail, or what stands for codes (table, values)
  kFloatsFromZero,  // kFloatFromZero to 256 codes
  // kFloat; residuals are added to 256 codes as Addition has it.
  kFloatsOnLine,
  kFloatsInverse,
  // The same to codes that are capped (EpilogueParams::is_capped). A tail is all that is on lines, each
  // channel on one, or but for some; kCappedInTail: residuals are added by the tail.
  kCappedFromZero,
  kCappedOnLine,
  kCappedTailOnLine,
  kCappedLackingOnLine,
  kCappedInTail,
  // kFloat to any number of codes, multiplied alone: what makes residuals for the next product.
  kWordsMultiplied,
  // To any number of codes. kBorderTail: what borders add comes to the sums first.
  kTail,
  kLackingTail,
  kBorderTail,
  kWordsTailOnLine,
  kPlanesTail,    // to planes of bits
  kPlanesAdding,  // the same with residuals that come as planes, found from bits
  kPlanesSteps,   // the same, first codes being told by steps, with or without such residuals
  // Any floats to any codes; with residuals.
  kFloats,
  kFloatsAdding,
  kFloatsOfValues,  // residuals meet what a table has for the codes (EpilogueParams::values)
  // Of kernels that are not made for one finish: sums on lines, whatever the input's sign, to any codes; to
  // capped ones alone.
  kIntegersOfTail,
  kCappedIntegersOfTail
};

template <Finish kFinish>
inline constexpr bool kIsOfCluster = kFinish == Finish::kBytesOfCluster ||
                                     kFinish == Finish::kWordsOfCluster || kFinish == Finish::kTailOfCluster;
template <Finish kFinish>
inline constexpr bool kLeavesRegisters =
    kFinish == Finish::kThroughMemory || kFinish == Finish::kOfZeros || kIsOfCluster<kFinish>;

// Where codes of some channels are stored besides: in pixels of another tensor (StoreInPlaces). Or the codes that the
// node's float results become.
struct PlaceParams {
  uint8_t* y = nullptr;            // where the first pixel has the first of them
  int pixel_bytes = 0;             // from pixel to pixel
  int first = 0, last = 0;         // which ones, the last excluded; multiples of 16
  const uint8_t* table = nullptr;  // [256], what is stored for the byte of a code; null: the code itself
  float scale = 1;                 // of float results, as what is below
  int zero_point = 0, lo = 0, hi = 0;
  // 1 / scale where a division by Markstein's sequence gives the same codes, else 0. Beyond +-limit every number has the
  // same code as there.
  float inverse = 0, limit = 0;
};
inline constexpr int kMostPlaces = 3;
inline constexpr int kMostPlanes = 2;

struct EpilogueParams {
  int kind = 0;  // EpilogueKind
  bool quantized_output = true;
  bool has_residual = false, residual_signed = false;
  int out_channels = 0;
  const int32_t* bias = nullptr;     // [out_channels], the constant part of the zero points folded in
  SumForm sums = SumForm::kInteger;  // else the bits are in the bias, too
  // [out_channels]: multiplier or acc_scale, and of kFloatFromZero -2^23 * multiplier. Where codes are
  // rounded in registers behind a tail, the gains and offsets of the lines that codes before any residual lie
  // on, and the factors of four channels, [out_channels / 4] (channel_lines.h); the bits of 1.5 * 2^23 and
  // the shifts are in the bias then. Of four channels that have one without a line, and of a tail that adds
  // residuals, acc_scale and what the tail adds, the factor negative.
  const float *scale = nullptr, *start = nullptr, *factor = nullptr;
  // What the product of lines is added to, and what that is of the highest code (LineBaseOf; 1.5 * 2^23 more
  // where residuals are added to codes); what turns signed codes to bytes.
  float line_base = 0, line_top = 0;
  uint32_t line_flip = 0;
  // What the tail of channels without a line divides by, which is inverted, and what makes its codes, less the
  // zero point and 1.5 * 2^23 more, what lines have.
  float first_scale = 1, first_inverse = 1, line_shift = 0;
  bool on_lines = false;     // not multiplied alone: a tail, thresholds, floats that become few codes
  bool lacks_lines = false;  // some channels have none
  // Of codes before any residual that are told by comparisons (BitSteps): [out_channels], of each four channels what is
  // added to the first two's sums and to the last two's, a half of the word each, for their first step and for their
  // second; in the second array for their third. As words of a plane (core/bit_planes.h), whether codes fall with sums.
  // Null: there are none.
  const int32_t *steps = nullptr, *last_steps = nullptr;
  const uint8_t* step_flips = nullptr;
  bool adds_behind_tail = false;  // Epilogue::adds_behind_tail
  // A tail that is computed step by step: acc_scale, what it adds (`start`), a function, residuals, and a
  // multiplication by 1 / y_scale in two parts (InvertTailScale).
  bool in_tail = false;
  TailFunction function = TailFunction::kNone;
  Rounding rounding = Rounding::kAny;
  // Of Rounding::kWords and of the codes of sums: twice the zero point less the lowest code, twice the number
  // of codes less 1, the lowest code.
  unsigned word_shift = 0, word_top = 0;
  int word_lowest = 0;
  // Of codes that are 128 from 0 on, or 256 from -128 or 0 on, and come to be rounded less the lowest one
  // (CappedBytes): what bytes are taken, of 128 codes those of signs of theirs, else all those of the lowest one.
  bool is_capped = false;
  uint32_t cap_select = 0, cap_flip = 0;
  const int32_t* w_zero =
      nullptr;  // [out_channels], what stays outside of weights (Int8Weights); null when all are 0
  int zero_point = 0, lo = 0, hi = 0;
  const int32_t *thresholds = nullptr, *base = nullptr, *dir = nullptr;
  int threshold_count = 0;
  int tail_count = 0;
  uint8_t tail[kMaxTailSteps] = {};  // TailStep
  const float *tail_bias = nullptr, *tail_scale = nullptr, *tail_shift = nullptr;
  float clip_min = 0, clip_max = 0;
  float residual_scale = 1, inner_scale = 1, y_scale = 1;
  // For residuals added four at a time: 1 / y_scale; 2^23 and the zero point of the codes as they lie in the
  // low bits of a float.
  float y_inverse = 1, residual_offset = 0;
  // 2^23 as a float. Not in the code: the instruction that puts a byte below it takes one immediate operand,
  // which the place of the byte then is; else four places were to be kept in registers.
  uint32_t high_bytes = 0x4B000000u;
  // Addition::kInverse, kInverseFromLowest, kInTail: what y_inverse lacks; 2^23 times residual_scale,
  // negative.
  float y_inverse_rest = 0, residual_start = 0;
  // Inner codes as RoundedUnit has them: what takes rounded sums there, the unit of lo, the code less the
  // zero point that a unit of 0 is.
  float unit_offset = 0, unit_lo = 0, unit_zero = 0;
  Addition addition = Addition::kAny;
  // Addition::kOnLine. residual_bits: the bytes that make a float of a residual.
  float unit_gain = 0, residual_gain = 0, sum_offset = 0;
  uint32_t residual_bits = 0;
  int residual_zero_point = 0;
  int y_zero_point = 0, y_lo = 0, y_hi = 0;
  // [classes][border_pitch], what is added to the sums of windows that reach out of the image, where what lies
  // there is read as 0, which is not its code (BorderParams); null: nothing.
  const int32_t* border = nullptr;
  int border_pitch = 0;
  const uint8_t* table = nullptr;  // [256], what is stored for the byte of a code; null: the code itself
  // [256], the number for the byte of a code to which residuals are added, or with which they are multiplied, as
  // Addition::kOfValues has it. Null where they are added to the node's own codes, or by its tail.
  const float* values = nullptr;
  bool multiplies = false;
  PlaceParams places[kMostPlaces];
  int place_count = 0;
  // To float results the numbers of another tensor are added, the sums cut off at these limits.
  bool adds_floats = false;
  float sum_min = 0, sum_max = 0;
  // Float results are rounded to float16 and lie as that; what is added to them does.
  bool makes_halves = false, adds_halves = false;
  int plane_count = 0;  // in which the codes leave (core/bit_planes.h); 0: as bytes
  // The codes leave as float32.
  bool dequantizes = false, output_signed = false;
  float output_scale = 1;
  int output_zero_point = 0;
};

// Whether sums without residuals may be finished as kWordsMultiplied has it.
inline bool AreWordsMultiplied(const EpilogueParams& e) {
  return e.sums == SumForm::kFloat && !e.on_lines && !e.in_tail && e.table == nullptr &&
         e.values == nullptr && e.border == nullptr;
}

// How sums are finished in registers.
inline Finish FinishOf(const EpilogueParams& e) {
  const bool has_numbers = e.in_tail || e.values != nullptr || e.table != nullptr;
  if (e.sums == SumForm::kInteger) return has_numbers ? Finish::kIntegersInTail : Finish::kIntegers;
  if (e.values != nullptr) return Finish::kFloatsOfValues;
  const bool are_on_lines = e.on_lines && !e.lacks_lines, moves = e.table != nullptr || e.place_count > 0;
  if (are_on_lines && !e.has_residual && !moves) {
    if (e.plane_count > 0) return Finish::kPlanesTail;
    return e.border != nullptr ? Finish::kBorderTail : Finish::kTail;
  }
  // Instances for any floats alone do more to a sum.
  if (moves || e.border != nullptr || e.plane_count > 0)
    return e.has_residual ? Finish::kFloatsAdding : Finish::kFloats;
  if (!e.has_residual) {
    const bool from_zero = e.sums == SumForm::kFloatFromZero;
    if (from_zero && e.rounding == Rounding::kBytes) return Finish::kFloatsFromZero;
    if (from_zero) return e.is_capped ? Finish::kCappedFromZero : Finish::kFloats;
    return e.on_lines ? Finish::kLackingTail : Finish::kFloats;
  }
  const bool is_bytes = !e.on_lines && !e.residual_signed && e.y_lo == 0 && e.y_hi == 255;
  if (is_bytes && e.addition == Addition::kOnLine) return Finish::kFloatsOnLine;
  if (is_bytes && e.addition == Addition::kInverseFromLowest && e.y_zero_point == 0)
    return Finish::kFloatsInverse;
  if (e.addition == Addition::kInTail) return e.is_capped ? Finish::kCappedInTail : Finish::kFloatsAdding;
  if (e.addition != Addition::kOnLine) return Finish::kFloatsAdding;
  if (!e.on_lines) return e.is_capped ? Finish::kCappedOnLine : Finish::kFloatsAdding;
  if (e.lacks_lines) return e.is_capped ? Finish::kCappedLackingOnLine : Finish::kFloatsAdding;
  return e.is_capped ? Finish::kCappedTailOnLine : Finish::kWordsTailOnLine;
}

inline constexpr int kMaxImageChannels = 4;

// The quantizer of float pixels, by channel.
struct PixelRounding {
  float scale[kMaxImageChannels] = {}, inverse[kMaxImageChannels] = {};
  float low[kMaxImageChannels] = {}, high[kMaxImageChannels] = {};  // clip bounds as floats
  // What turns a rounded float's bits into its code, 128 more where codes are signed; four of them are
  // flipped back at once.
  uint32_t add[kMaxImageChannels] = {}, flip = 0;
  bool fast_division = false;  // of all channels
};

// What every kernel receives: its tensors, the product [m, k] x [k, n] of bytes that a group is, and what
// becomes of the sums. Families add what they read besides: their own structures, made of the parts below.
struct ConvParams {
  const uint8_t* x = nullptr;        // codes, or the repacked input in the workspace
  const uint8_t* weights = nullptr;  // as the family reads them
  const void* residual = nullptr;
  void* y = nullptr;                    // null where places alone get the codes
  int m = 0, n = 0, k = 0, groups = 1;  // k: bytes of one row, n: channels of one group
  EpilogueParams epilogue;
};

// Sizes of the images, and where windows begin.
struct WindowParams {
  int in_h = 0, in_w = 0, out_h = 0, out_w = 0, stride_h = 1, stride_w = 1, pad_top = 0, pad_left = 0;
};

// What a window consists of.
struct TapParams {
  int kernel_h = 1, kernel_w = 1, dilation_h = 1, dilation_w = 1;
};

// From outputs to the pixels that their windows begin with.
struct PixelParams : WindowParams {
  bool flat = false;    // the input's pixels are the output's, one by one
  int pixel_bytes = 0;  // from pixel to pixel
  FastDivisor by_image = {}, by_row = {};
};

// From columns of k to taps and their channels.
struct ColumnParams : TapParams {
  int channels = 0;  // bytes per tap: the channels of a group as stored
  FastDivisor by_channels = {}, by_kernel_w = {};
};

// By how many taps a window reaches out of the image, before and behind it. Those along both dims, times the steps, are
// the number of the window's class; that of windows inside is 0.
struct OutsideTaps {
  int before = 0, behind = 0;
};
struct BorderParams : TapParams {
  OutsideTaps step_h = {}, step_w = {};
  int classes = 1;
};

// Blocks sum tiles of outputs. Weights: [group][k / 128][n_padded][128], swizzled.
struct TileParams : ConvParams {
  BorderParams border = {};
  int n_padded = 0, n_tiles = 0, k_tiles = 0;
  int stages = 0;
  int staging_offset = 0;  // where finished codes wait in dynamic shared memory
};

// Sums may leave the registers, or be of parts of K (FinishTile).
struct SumsParams {
  bool in_registers = false;       // the epilogue runs on the sums in registers
  bool requantizes_fours = false;  // else the same on four sums from shared memory, else one at a time
  int splits = 1, split_shift = 0;
  int exchange_offset = 0;  // where the blocks of a cluster meet in dynamic shared memory
  int sharing = 1;  // 1 or 2 blocks of a cluster that have the same pixels, and fetch each once for all
  int32_t* partial = nullptr;  // [splits][groups][m][n], Split::kWorkspace
};

// Tiles of pixels are boxes, which the tensor memory accelerator fetches.
struct BoxParams : TileParams, PixelParams, ColumnParams {};

struct BoxTileParams : BoxParams, SumsParams {};

// Whether a base ends in no padding. A derived structure's first member would stand there, and nvcc 13.0 has then looked for
// members of a base (SumsParams, of GatherParams) in other places than the host has them.
template <typename Base>
constexpr bool EndsInMember() {
  struct Derived : Base {
    char last;
  };
  return sizeof(Derived) > sizeof(Base);
}
static_assert(EndsInMember<ConvParams>() && EndsInMember<WindowParams>() && EndsInMember<TapParams>() &&
              EndsInMember<PixelParams>() && EndsInMember<ColumnParams>() && EndsInMember<TileParams>() &&
              EndsInMember<SumsParams>() && EndsInMember<BoxTileParams>());

// What gathers tiles of pixels walks along k by steps.
struct GatherParams : BoxTileParams {
  // Of an offset: to the next tap past this one's last channel, besides to the next row of taps past this
  // one's last; that of the position with the latter.
  int tap_step = 0, tap_row_step = 0, tap_row_position = 0;
  bool all_inside = false;    // no tap of any pixel is outside the image
  int32_t last_position = 0;  // 65536 * (in_h - 1) + in_w - 1
  uint32_t fill = 0;          // four times the code that stands for real zero
};

// How blocks share the tiles of a line, neighbours each: as many as the others, or one more.
struct TileShares {
  int blocks = 1, tiles = 0, longer = 0;  // tiles of each; how many of the first blocks have one more
};

inline TileShares ShareTiles(int tiles, int blocks) { return {blocks, tiles / blocks, tiles % blocks}; }

inline Finish FinishOf(const EpilogueParams& e, const SumsParams& sums) {
  if (e.w_zero != nullptr) return Finish::kOfZeros;
  return sums.in_registers ? FinishOf(e) : Finish::kThroughMemory;
}

// Whether codes are made of sums and nothing else, and stored as they are.
inline bool StoresCodesAlone(const EpilogueParams& e) {
  return !e.has_residual && !e.in_tail && e.values == nullptr && e.border == nullptr && e.place_count == 0 &&
         e.plane_count == 0;
}

// Of kernels that have instances for what clusters add up.
inline Finish FinishWithClusters(const EpilogueParams& e, const SumsParams& sums, bool is_cluster) {
  const Finish finish = FinishOf(e, sums);
  if (finish != Finish::kThroughMemory || !is_cluster || !sums.requantizes_fours || e.table != nullptr ||
      !StoresCodesAlone(e)) {
    return finish;
  }
  if (e.on_lines) return Finish::kTailOfCluster;
  if (e.rounding == Rounding::kAny) return finish;
  return e.rounding == Rounding::kBytes ? Finish::kBytesOfCluster : Finish::kWordsOfCluster;
}

}  // namespace lowbit::cuda
