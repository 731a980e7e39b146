// The portable half of the igemm kernels: packing, addressing and the split into tasks. The register tile and
// the algebra of the zero points are in igemm_tile.h.
//
// Addressing. The window of an output pixel is cut into segments, runs of consecutive bytes of x:
//
//   taps  one segment per tap, the channels of one input pixel, read in place. A tap outside the image
//         points at a row of zero points. A segment whose length is no multiple of 4 reads into the next
//         pixel, against zero weights; where that would leave the tensor, the pointer is moved to a copy of
//         the tensor's last bytes.
//   rows  few channels and a wide kernel (the first layer of a network): the rows of x that a block of pixels
//         needs are copied once into a band, with their padding, and a segment is a whole kernel row of
//         kernel_w * channels bytes. Of a window several planes deep, the rows of each plane follow those of
//         the one before. A 7x7 kernel on 3 channels then multiplies 7 * 24 bytes per pixel instead of
//         49 * 4.
//   even  engines that multiply tiles of pixels (IgemmEngine::takes_even): a band for any number of channels,
//         in which the windows of all output pixels begin equally far apart. From the last column of a row to
//         the first one of the next, that means columns that are computed and not stored, 2 of 58 for a 3x3
//         kernel on 56x56. With a vertical stride s every s-th row of x follows the one before:
//
//             output row 0, 1, 2 at stride 2    x rows  0 2 4 6 | 1 3 5
//
//   folded even, for few channels (the first layer of a network again): at stride 2 squares of 2x2 pixels become
//          pixels of 16 channels at stride 1, at stride 1 pixels become such of 4 channels, of which some multiply
//          zeros, while the band is filled, and a kernel row is one step. A 7x7 kernel on 3 channels multiplies
//          4 * 64 bytes per pixel, none of which is copied for it alone.
//
// The windows of a row of pixels lie equally far apart in a band, as they do in the x of a pointwise
// convolution: engines that know (IgemmEngine::takes_rows) need no pointers to each.
//
// Bipolar activations are copied into a band as well, where code q becomes u = 2q with zero point 1:
// 2q - 1 = u - 1. The padding has a code then, 1, and everything else is an ordinary convolution of 2-bit
// codes. The copy costs a byte or two of every pixel against its out_channels * taps / 2 products.
//
// Convolution groups smaller than a vector are packed side by side into one block-diagonal panel, so that the
// outputs of several groups fill a vector.
#include "kernels/x86/igemm.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "core/packed_weights.h"
#include "core/plan_cache.h"
#include "kernels/common/channel_weights.h"
#include "kernels/common/epilogue_tables.h"
#include "kernels/common/workspace.h"
#include "kernels/x86/igemm_block.h"
#include "kernels/x86/igemm_fold.h"

namespace lowbit {
namespace {

enum class Addressing : uint8_t { kTaps, kRows };

// What depends on the node alone.
struct WindowLayout {
  Addressing addressing = Addressing::kTaps;
  bool copied = false;   // the segments lie in a band
  bool even = false;     // in which the pixels are equally far apart
  bool in_rows = false;  // pixels of a row are, and the engine knows
  size_t segments = 0;
  size_t segment_bytes = 0;  // multiplied by weights that are not padding
  size_t groups = 0;         // of four bytes, per segment
  size_t merged = 1;         // convolution groups per panel
  size_t reach = 0;          // readable bytes needed behind a segment pointer
};

// Below this many channels a kernel row is copied: the three or more pointers per row and the channels
// rounded up to a multiple of 4 cost more than the copy.
constexpr int64_t kBandMaxChannels = 16;
// Rows copied for one block of pixels.
constexpr size_t kBandBytes = 96 * 1024;
constexpr size_t kMaxReach = 64 * 1024;
// The same where the windows are even; it is read from L2.
constexpr size_t kEvenBandBytes = 512 * 1024;
// Of the rows of a block two of a 3x3 kernel are copied for the next one again: VGG-16's 64->64 at 224x224 takes 0.95 of the
// time that it takes with blocks of 1024 pixels (Sapphire Rapids).
constexpr size_t kMaxEvenPixels = 2048;
// A band is even where its kernel rows, as whole steps, have at most so many times their bytes.
constexpr double kMaxEvenBytes = 4.0 / 3;
// Pointers of one block of pixels.
constexpr size_t kPointerBytes = 128 * 1024;
constexpr size_t kMinBlockPixels = 12;
// What an engine copies of one block of pixels; it stays in L2.
constexpr size_t kOperandBytes = 320 * 1024;
// What it unpacks of a panel; it stays there too.
constexpr size_t kUnpackedBytes = 256 * 1024;

// Bipolar activations are never multiplied as they are, see above.
bool CopiesAll(const ConvSpec& spec) { return spec.x.encoding == Encoding::kBipolar; }

// What is multiplied of a kernel row whose segments are whole steps.
size_t EvenGroups(const ConvGeometry& g, const IgemmEngine& engine) {
  return RoundUp(DivideUp(static_cast<size_t>(g.kernel_w * g.in_channels), 4), engine.step_groups);
}

// The columns of the band of so many output columns, computed and not stored ones; of a row of outputs.
size_t EvenColumns(const ConvGeometry& g, size_t columns) {
  return columns - 1 + DivideUp(static_cast<size_t>(g.kernel_w), static_cast<size_t>(g.stride_w));
}

size_t BandLimit(const WindowLayout& w) { return w.even ? kEvenBandBytes : kBandBytes; }

// `plain`: pixels have no sums of their own. `is_even`: whether a band is even however few channels it has.
WindowLayout WindowOf(const ConvGeometry& g, const IgemmEngine& engine, bool even, bool plain,
                      bool allow_rows, bool copy_all, bool is_even) {
  WindowLayout w;
  const int64_t span_h = (g.kernel_h - 1) * g.dilation_h + 1;
  const bool has_rows =
      allow_rows && g.group == 1 && g.dilation_w == 1 && g.kernel_w > 1 &&
      g.kernel_d * span_h * g.kernel_w * g.in_channels * 4 <= static_cast<int64_t>(kBandBytes);
  w.even = even && has_rows && plain &&
           (is_even || (g.in_channels >= kBandMaxChannels &&
                        static_cast<double>(EvenGroups(g, engine) * 4) <=
                            kMaxEvenBytes * static_cast<double>(g.kernel_w * g.in_channels)));
  if (has_rows && (w.even || g.in_channels < kBandMaxChannels || copy_all)) {
    w.addressing = Addressing::kRows;
    w.copied = true;
    w.segments = static_cast<size_t>(g.kernel_d * g.kernel_h);
    w.segment_bytes = static_cast<size_t>(g.kernel_w * g.in_channels);
  } else {
    if (plain) w.merged = static_cast<size_t>(std::clamp<int64_t>(engine.lanes / g.GroupOut(), 1, g.group));
    w.copied = copy_all;
    w.segments = static_cast<size_t>(g.Taps());
    w.segment_bytes = w.merged * static_cast<size_t>(g.GroupIn());
  }
  // In x itself only where the last group of a pixel ends with it.
  const bool own_rows = allow_rows && !w.copied && g.group == 1 && g.in_channels % 4 == 0 && IsPointwise(g);
  w.in_rows = engine.takes_rows && (own_rows || (w.addressing == Addressing::kRows && !w.even));
  w.groups = w.even ? EvenGroups(g, engine) : DivideUp(w.segment_bytes, 4);
  const size_t panel_groups = DivideUp(static_cast<size_t>(g.group), w.merged);
  w.reach = (panel_groups - 1) * w.segment_bytes + RoundUp(w.groups, engine.step_groups) * 4;
  return w;
}

// A band's bytes per row of x and its rows of x, for a block of so many output columns or rows.
size_t BandPitch(const ConvGeometry& g, const WindowLayout& w, size_t columns) {
  if (w.even) return EvenColumns(g, columns) * static_cast<size_t>(g.stride_w * g.in_channels);
  const size_t span = static_cast<size_t>((g.kernel_w - 1) * g.dilation_w) + 1;
  const size_t pixels = (columns - 1) * static_cast<size_t>(g.stride_w) + span;
  const size_t channels = static_cast<size_t>(g.in_channels);
  // Behind the last segment pointer, too, `reach` bytes are readable.
  const size_t last = w.addressing == Addressing::kRows ? pixels - span : pixels - 1;
  return RoundUp(std::max(pixels * channels, last * channels + w.reach), 16);
}

// The rows of one plane; a band of a deep window holds those of every plane that it sees.
size_t BandPlaneRows(const ConvGeometry& g, size_t rows) {
  return (rows - 1) * static_cast<size_t>(g.stride_h) + static_cast<size_t>((g.kernel_h - 1) * g.dilation_h) +
         1;
}

// Rows of an even band from one of x to the next one that the same kernel row reads.
size_t EvenStride(const ConvGeometry& g, const WindowLayout& w) {
  return w.even ? static_cast<size_t>(g.stride_h) : 1;
}

size_t BandRows(const ConvGeometry& g, const WindowLayout& w, size_t rows) {
  return static_cast<size_t>(g.kernel_d) * RoundUp(BandPlaneRows(g, rows), EvenStride(g, w));
}

size_t BandBytes(const ConvGeometry& g, const WindowLayout& w, size_t rows, size_t columns) {
  // Of an even band rows end where the next ones begin, and the last segments read on.
  return BandPitch(g, w, columns) * BandRows(g, w, rows) + (w.even ? w.reach : 0);
}

// Whether the band of a single output pixel fits. Its sides are bounded before they are multiplied: a dilated
// window may be as large as the pads around the image, and its bytes then leave 64 bits.
bool BandFits(const ConvGeometry& g, const WindowLayout& w) {
  const int64_t limit = static_cast<int64_t>(BandLimit(w));
  const int64_t span_h = (g.kernel_h - 1) * g.dilation_h + 1, span_w = (g.kernel_w - 1) * g.dilation_w + 1;
  return g.kernel_d <= limit && span_h <= limit && span_w <= limit && g.in_channels <= limit &&
         BandBytes(g, w, 1, 1) <= BandLimit(w);
}

// Where the rows of x lie in a band of so many output rows.
struct BandPlaces {
  int64_t kernel_h, dilation_h, stride, plane_rows;

  BandPlaces(const ConvGeometry& g, const WindowLayout& w, size_t rows)
      : kernel_h(g.kernel_h),
        dilation_h(g.dilation_h),
        stride(static_cast<int64_t>(EvenStride(g, w))),
        plane_rows(static_cast<int64_t>(BandRows(g, w, rows)) / g.kernel_d) {}
  // Row r of a plane.
  int64_t Row(int64_t plane, int64_t r) const {
    return plane * plane_rows + r % stride * (plane_rows / stride) + r / stride;
  }
  // The first one that a row of the kernel reads.
  int64_t KernelRow(int64_t row) const { return Row(row / kernel_h, row % kernel_h * dilation_h); }
};

// Where a kernel's outputs lie in y: at rows first_h, first_h + step_h, ... and columns first_w, first_w +
// step_w, ... The default is all of y; the phases of a transposed convolution (below) interleave.
struct OutputGrid {
  int64_t step_h = 1, step_w = 1, first_h = 0, first_w = 0;
  bool interleaved = false;

  // The shape with the outputs of this grid alone.
  ConvShape Own(ConvShape s) const {
    s.out_h = s.out_h <= first_h ? 0 : (s.out_h - first_h - 1) / step_h + 1;
    s.out_w = s.out_w <= first_w ? 0 : (s.out_w - first_w - 1) / step_w + 1;
    return s;
  }
};

WindowLayout PlanWindow(const ConvGeometry& g, const IgemmEngine& engine, bool plain, bool allow_rows,
                        bool copy_all, bool is_even = false) {
  const WindowLayout w = WindowOf(g, engine, engine.takes_even, plain, allow_rows, copy_all, is_even);
  if (!w.even || (BandFits(g, w) && w.reach <= kMaxReach)) return w;
  return WindowOf(g, engine, false, plain, allow_rows, copy_all, false);
}

// Whether an image that is folded at stride 1, whose kernel rows are steps that are mostly zeros, takes less time than
// windows that are copied for each pixel: some 12 cycles for each of their rows (Sapphire Rapids, 3x3, 3->64).
bool FoldsAtStride1(const ConvGeometry& g, const IgemmEngine& engine) {
  constexpr double kRowCycles = 12;
  const ConvGeometry folded = Folded(g);
  const size_t copied = DivideUp(static_cast<size_t>(g.K()), engine.step_groups * 4),
               steps = static_cast<size_t>(g.kernel_h) * EvenGroups(folded, engine) / engine.step_groups;
  const double more = static_cast<double>((steps - copied) * engine.step_groups * 4 * g.out_channels);
  return more / engine.macs_per_cycle < kRowCycles * static_cast<double>(g.kernel_h);
}

bool Folds(const ConvSpec& spec, const IgemmEngine& engine) {
  const ConvGeometry& g = spec.geometry;
  return engine.takes_even && !g.transposed && g.group == 1 && g.IsPlanar() &&
         g.in_channels <= kFoldedPixel && g.stride_h <= kMostFold && g.stride_w == g.stride_h &&
         g.dilation_h == 1 && g.dilation_w == 1 && spec.x.encoding != Encoding::kBipolar &&
         spec.w.encoding != Encoding::kBipolar &&
         std::all_of(spec.channel_values.begin(), spec.channel_values.end(),
                     [](const ChannelValues& v) { return v.lo >= -128 && v.hi <= 127; }) &&
         (g.stride_h > 1 || (g.kernel_w > 1 && FoldsAtStride1(g, engine))) &&
         PlanWindow(Folded(g), engine, true, true, false, g.stride_h == 1).even;
}

// How the output pixels of one shape are cut into blocks. A block is one call of the engine per panel run;
// its pointers, and its copied rows, are prepared once for all panels.
struct BlockGrid {
  size_t blocks = 0;
  size_t pixels = 0;             // per block, at most; those of even bands that are not stored included
  size_t rows = 0, columns = 0;  // band: output rows and columns per block
  size_t row_blocks = 0, column_blocks = 0;
  size_t band_pitch = 0, band_bytes = 0;
};

constexpr size_t kMaxBlockPixels = 256;
// A small layer is cut into more blocks than the pointers require, for the threads; not below this many pixels, a tile of
// AMX or some of the others.
constexpr size_t kMinSharedPixels = 16;

// Bytes that an engine copies of so many pixels.
size_t OperandBytes(const WindowLayout& w, const IgemmEngine& engine, size_t pixels) {
  return engine.OperandBytes(pixels, w.segments, w.groups, w.even);
}

size_t MaxBlockPixels(const WindowLayout& w, const IgemmEngine& engine) {
  if (w.even) return kMaxEvenPixels;
  if (w.in_rows) return kMaxBlockPixels;
  const size_t pixels =
      std::clamp(kPointerBytes / (w.segments * sizeof(void*)), kMinBlockPixels, kMaxBlockPixels);
  const size_t tile = static_cast<size_t>(engine.tile_rows), bytes = OperandBytes(w, engine, tile);
  if (bytes == 0) return pixels;
  if (bytes <= kOperandBytes) return std::min(pixels, kOperandBytes / bytes * tile);
  return std::min(pixels, kOperandBytes / OperandBytes(w, engine, 1));
}

BlockGrid PlanBlocks(const ConvGeometry& g, const WindowLayout& w, const IgemmEngine& engine,
                     const ConvShape& s, bool single_rows, size_t wanted_blocks) {
  BlockGrid grid;
  if (s.OutPixels() == 0) return grid;
  const size_t out_h = static_cast<size_t>(s.out_h), out_w = static_cast<size_t>(s.out_w);
  const size_t limit = MaxBlockPixels(w, engine), total = static_cast<size_t>(s.OutPixels());
  const size_t shared = std::clamp(wanted_blocks, size_t{1}, std::max(size_t{1}, total / kMinSharedPixels));
  if (!single_rows && !w.copied) {
    grid.blocks = DivideUp(total, limit);
    if (shared > grid.blocks) {
      // A block of a tile and a bit would take as long as one of two tiles.
      const size_t tile = static_cast<size_t>(engine.tile_rows), pixels = total / shared;
      const size_t tiles = pixels < 2 * tile ? 1 : DivideUp(pixels, tile);
      grid.blocks = std::max(grid.blocks, DivideUp(total, tiles * tile));
    }
    grid.pixels = DivideUp(total, grid.blocks);
    grid.blocks = DivideUp(total, grid.pixels);
    return grid;
  }
  const auto fits = [&](size_t rows, size_t columns) {
    return !w.copied || BandBytes(g, w, rows, columns) <= BandLimit(w);
  };
  grid.columns = std::min(out_w, limit);
  while (grid.columns > 1 && !fits(1, grid.columns)) grid.columns = DivideUp(grid.columns, 2);
  grid.column_blocks = DivideUp(out_w, grid.columns);
  grid.columns = DivideUp(out_w, grid.column_blocks);
  grid.rows = 1;
  if (grid.column_blocks == 1 && !single_rows) {
    while (grid.rows < out_h && (grid.rows + 1) * out_w <= limit && fits(grid.rows + 1, out_w)) ++grid.rows;
  }
  if (w.even) {
    grid.rows = std::min(grid.rows, DivideUp(out_h, DivideUp(shared, static_cast<size_t>(s.OutPlanes()))));
    grid.rows = DivideUp(out_h, DivideUp(out_h, grid.rows));  // blocks of nearly equal size
  }
  grid.row_blocks = DivideUp(out_h, grid.rows);
  grid.blocks = static_cast<size_t>(s.OutPlanes()) * grid.row_blocks * grid.column_blocks;
  grid.pixels =
      w.even ? (grid.rows - 1) * EvenColumns(g, grid.columns) + grid.columns : grid.rows * grid.columns;
  if (w.copied) {
    grid.band_pitch = BandPitch(g, w, grid.columns);
    grid.band_bytes = BandBytes(g, w, grid.rows, grid.columns);
  }
  return grid;
}

// What a task finds of the block that the thread's last task had, besides its pointers and copies.
struct KeptBlock {
  size_t pixels, operands_of;
};

// The parts of a thread's scratch memory, as offsets.
struct Workspace {
  size_t kept = 0, pad_row = 0, tail = 0, band = 0, rows = 0, offsets = 0, row_sums = 0, operands = 0,
         bytes = 0;
  std::optional<size_t> unpacked;
};

Workspace PlanWorkspace(const WindowLayout& w, const IgemmEngine& engine, const BlockGrid& grid,
                        size_t row_sum_groups) {
  Workspace ws;
  ScratchLayout scratch;
  ws.kept = scratch.Take(sizeof(KeptBlock));
  ws.pad_row = scratch.Take(w.reach);
  ws.tail = scratch.Take(2 * w.reach);
  ws.band = scratch.Take(grid.band_bytes);
  const size_t pointers = w.even      ? w.segments
                          : w.in_rows ? std::max(grid.rows, size_t{1})
                                      : w.segments * grid.pixels;
  ws.rows = scratch.Take(pointers * sizeof(void*));
  if (w.in_rows && w.copied) ws.offsets = scratch.Take(w.segments * w.groups * sizeof(uint32_t));
  ws.row_sums = scratch.Take(row_sum_groups * grid.pixels * sizeof(int32_t));
  ws.operands = scratch.Take(OperandBytes(w, engine, grid.pixels));
  const size_t unpacked = engine.UnpackedBytes(grid.pixels, w.segments * w.groups, kUnpackedBytes);
  if (unpacked != 0) ws.unpacked = scratch.Take(unpacked);
  ws.bytes = scratch.bytes();
  return ws;
}

// Cycles per pixel to set up its segments: a pointer to each, measured on Zen 5; what an engine takes that copies
// them for each of `copies` panels, measured on Sapphire Rapids, to begin with each and for their bytes. A single
// segment is rarely copied. Of a band without such pointers every byte is copied once.
double SetupCycles(const ConvGeometry& g, const WindowLayout& w, const IgemmEngine& engine, size_t copies) {
  constexpr double kPointerCycles = 1.3, kSegmentCycles = 3.0, kBytesPerCycle = 32;
  if (w.in_rows && !w.copied) return 0;
  if (w.even || w.in_rows)
    return static_cast<double>(g.stride_h * g.stride_w * g.in_channels) / kBytesPerCycle;
  const double segments = static_cast<double>(w.segments);
  double cycles = segments * kPointerCycles;
  if (engine.operand_bytes != nullptr && w.segments > 1)
    cycles += static_cast<double>(copies) * segments *
              (kSegmentCycles + static_cast<double>(w.groups * 4) / kBytesPerCycle);
  return cycles;
}

// How a convolution of one shape is dealt out.
struct RunPlan {
  ConvShape shape;
  BlockGrid grid;
  Workspace workspace;
  TaskSplit split;
};

// Weights as a core reads them again for another block.
constexpr double kPanelBytesPerCycle = 32;
// Weights as one core reads them from a cache that it shares: 2 MB of ResNet-50's last layer take 146 us on a core of
// a Xeon at 2.7 GHz.
constexpr double kWeightBytesPerCycle = 5;

class IgemmKernel final : public ConvKernel {
 public:
  // Of a folded image `spec` is Folded, and `whole` the geometry that it has by itself.
  IgemmKernel(const ConvSpec& spec, const IgemmEngine& engine, const OutputGrid& output = {},
              const ConvGeometry* whole = nullptr);

  // args.shape is the whole convolution's, also where the kernel computes only the outputs of its grid.
  void Run(const ConvArgs& args, ThreadPool& pool) const override;
  size_t WorkspaceBytes(const ConvShape& shape) const override {
    return MakePlan({shape, 1, kTaskCycles}).workspace.bytes;  // one thread has the largest blocks
  }
  size_t PackedBytes() const override {
    return weights_->size() + epilogue_.Bytes() + offsets_.size() * sizeof(uint32_t);
  }
  // Rows that are copied may be any: what multiplies x in place looks for the tensor's end.
  bool TakesBands() const override {
    return window_.copied && !output_.interleaved && geometry_.IsPlanar() && !IsPointwise(geometry_);
  }

 private:
  ConvShape Shape(const ConvShape& whole) const {
    if (folded_) return FoldedShape(geometry_, whole);
    return output_.interleaved ? output_.Own(whole) : Flatten(geometry_, whole);
  }
  // The cycles of one core for the products and outputs of so many pixels.
  double SumCycles(double pixels) const {
    return pixels * static_cast<double>(geometry_.out_channels) *
           (static_cast<double>(geometry_.K()) / engine_.macs_per_cycle + 1 / engine_.outputs_per_cycle);
  }
  // The cycles of one core, for all products and outputs; or for all weights, which come from beyond its caches where
  // a few pixels are all that they are for.
  double Cycles(const ConvShape& shape) const {
    return std::max(SumCycles(static_cast<double>(shape.OutPixels())),
                    static_cast<double>(weights_->size()) / kWeightBytesPerCycle);
  }
  // The cycles of one core for a block and a panel.
  double PanelCycles(const BlockGrid& grid) const {
    const size_t pixels = RoundUp(grid.pixels, static_cast<size_t>(engine_.tile_rows));
    return (SumCycles(static_cast<double>(pixels)) +
            static_cast<double>(weights_->size()) / kPanelBytesPerCycle) /
           static_cast<double>(panels_.size());
  }
  RunPlan MakePlan(const RunKey& key) const;
  // Index in y of a pixel of the grid; `row` counts the rows of all images.
  size_t PixelOf(const ConvShape& whole, const ConvShape& own, size_t row, size_t column) const {
    const int64_t image = static_cast<int64_t>(row) / own.out_h, y = static_cast<int64_t>(row) % own.out_h;
    return static_cast<size_t>((image * whole.out_h + y * output_.step_h + output_.first_h) * whole.out_w +
                               static_cast<int64_t>(column) * output_.step_w + output_.first_w);
  }
  void PackWeights(const ConvSpec& spec);
  void LoadWeights(const ConvSpec& spec, size_t channel, int8_t* to) const;
  void PackPanel(const ConvSpec& spec, const IgemmPanel& panel, uint8_t* out) const;
  // Segments of x: half of those of the weights where these are split.
  size_t Taps() const { return window_.segments / (splits_ ? 2 : 1); }
  size_t RowSumGroups() const { return row_sum_weight_.empty() ? 0 : static_cast<size_t>(geometry_.group); }

  void PointAtTaps(const ConvArgs& args, const ConvShape& shape, size_t first, size_t count, size_t pitch,
                   const uint8_t* pad_row, uint8_t* tail, const uint8_t** rows) const;
  size_t CopyBand(const ConvArgs& args, const ConvShape& shape, const BlockGrid& grid, size_t block,
                  uint8_t* band, const uint8_t** rows) const;
  void ListOffsets(const BlockGrid& grid, uint32_t* offsets) const;
  void SumRows(const IgemmBlock& block, int32_t* sums) const;

  const ConvGeometry geometry_;
  const IgemmEngine& engine_;
  const OutputGrid output_;
  const std::optional<ConvGeometry> folded_;  // what it was
  mutable PlanCache<RunKey, RunPlan> plans_;
  WindowLayout window_;
  EpilogueTables epilogue_;
  const bool doubles_;     // bipolar activations: the band holds twice the codes
  uint8_t x_shift_ = 0;    // added to every byte of x: makes signed codes unsigned
  bool x_signed_ = false;  // or they are multiplied as they are
  size_t groups_per_flush_ = 0;
  bool rises_ = false;    // codes rise from the zero point on, and the bias holds 2^23
  bool splits_ = false;   // weight values of 9 bits are two weights each (LoadWeights)
  uint8_t pad_byte_ = 0;  // the code of a tap outside the image, as stored in x
  PackedWeights weights_;
  std::vector<IgemmPanel> panels_;
  std::vector<uint32_t> offsets_;        // IgemmBlock::offsets where rows lie in x itself
  std::vector<int32_t> bias_;            // [out_channels + padding]
  std::vector<int32_t> row_sum_weight_;  // [out_channels + padding], empty when all are 0
  std::vector<int32_t> weight_shift_;    // IgemmBlock::weight_shift
};

// The activations that are multiplied: of bipolar ones the 2-bit codes that the band holds.
struct InputCodes {
  OperandType type;
  int32_t zero_point;

  static InputCodes Of(const ConvSpec& spec) {
    if (CopiesAll(spec)) return {{2, Encoding::kUnsigned}, 1};
    return {spec.x, spec.x_zero_point};
  }
  // What makes them unsigned.
  int32_t Shift() const { return type.encoding == Encoding::kSigned ? 1 << (type.bits - 1) : 0; }
};

// How many k-groups 16-bit accumulators hold. A lane of vpmaddubsw is x0 w0 + x1 w1 with 0 <= x <= 2^bits - 1
// (after InputCodes::Shift), so it lies between -(2^bits - 1) * n and (2^bits - 1) * p, where p and n are the
// sums of the pair's positive weights and of its negative ones' magnitudes. With L the largest of these
// bounds over all pairs of the packed weights, floor(32767 / L) of them can be added; 0 means that not even
// one is safe from saturation.
constexpr int32_t kMaxSum = 32767;
// With fewer groups per flush the widening costs more than what 16-bit accumulators save.
constexpr int32_t kMinGroupsPerFlush = 2;

size_t GroupsPerFlush(const ConvSpec& spec, const WindowLayout& window) {
  const ConvGeometry& g = spec.geometry;
  const int32_t x_max = (1 << InputCodes::Of(spec).type.bits) - 1;
  // Bytes that are consecutive in x; pairs do not reach across. In a block-diagonal panel a group may begin
  // at an odd byte, which pairs its channels the other way: both pairings are counted then.
  const size_t run =
      window.addressing == Addressing::kRows ? window.segment_bytes : static_cast<size_t>(g.GroupIn());
  const size_t k = static_cast<size_t>(g.K());
  const size_t step = window.merged > 1 && run % 2 != 0 ? 1 : 2;
  int32_t largest = 1;
  std::vector<int8_t> weights(k);
  for (size_t c = 0; c < static_cast<size_t>(g.out_channels); ++c) {
    LoadChannel(spec, c, ByteShift(spec.channel_values[c]), weights.data());
    for (size_t begin = 0; begin < k; begin += run) {
      const int8_t* w = weights.data() + begin;
      for (size_t i = 0; i < run; i += step) {
        const int32_t a = w[i], b = i + 1 < run ? w[i + 1] : 0;
        const int32_t positive = std::max(a, 0) + std::max(b, 0), negative = -std::min(a, 0) - std::min(b, 0);
        largest = std::max(largest, x_max * std::max(positive, negative));
      }
    }
    if (kMaxSum / largest < kMinGroupsPerFlush) break;
  }
  return static_cast<size_t>(kMaxSum / largest);
}

IgemmKernel::IgemmKernel(const ConvSpec& spec, const IgemmEngine& engine, const OutputGrid& output,
                         const ConvGeometry* whole)
    : geometry_(spec.geometry),
      engine_(engine),
      output_(output),
      folded_(whole == nullptr ? std::nullopt : std::optional(*whole)),
      epilogue_(spec),
      doubles_(CopiesAll(spec)) {
  PackWeights(spec);
}

void IgemmKernel::PackWeights(const ConvSpec& spec) {
  const ConvGeometry& g = geometry_;
  const size_t channels = static_cast<size_t>(g.out_channels);

  const InputCodes x = InputCodes::Of(spec);
  x_signed_ = engine_.multiplies_signed && x.type.encoding == Encoding::kSigned;
  x_shift_ = x_signed_ ? uint8_t{0} : static_cast<uint8_t>(x.Shift());
  pad_byte_ = static_cast<uint8_t>(x.zero_point);
  // Group merging needs weights without row sums, so the shifts must be known before the panels.
  // bias - zx * sum (w - zw), which wraps like the accumulators do.
  const int64_t zero = x.zero_point + x_shift_;
  bias_.assign(channels + kEpiloguePadding, 0);
  std::vector<int32_t> shift(channels);
  std::vector<int64_t> largest(channels);
  for (size_t c = 0; c < channels; ++c) {
    const ChannelValues& values = spec.channel_values[c];
    shift[c] = ByteShift(values);
    largest[c] = 256 * values.magnitude + std::abs(static_cast<int64_t>(spec.bias[c]));  // |x - zx| < 256
    bias_[c] = static_cast<int32_t>(static_cast<uint32_t>(spec.bias[c] - zero * values.sum));
  }
  epilogue_.LimitAccumulators(largest);
  if (engine_.adds_by_line) epilogue_.AddByLine(spec.epilogue);
  rises_ = engine_.takes_rising && epilogue_.view().rising_offset != nullptr && epilogue_.view().packs_all;
  if (rises_) {
    for (size_t c = 0; c < channels; ++c)
      bias_[c] = static_cast<int32_t>(static_cast<uint32_t>(bias_[c]) + std::bit_cast<uint32_t>(0x1p23f));
  }
  const bool bytes_do = std::all_of(shift.begin(), shift.end(), [](int32_t s) { return s == 0; });
  if (!bytes_do && engine_.unpacked_bytes != 0) {
    weight_shift_.assign(channels + kEpiloguePadding, 0);
    for (size_t c = 0; c < channels; ++c) weight_shift_[c] = shift[c] * 0x10000 + (shift[c] & 0xffff);
  } else if (!bytes_do) {
    // 255, the one value that is no sum of two signed bytes, has a shift of 128.
    splits_ = g.group > 1 && !engine_.narrow && *std::max_element(shift.begin(), shift.end()) < 128;
    if (!splits_) {
      row_sum_weight_ = shift;
      row_sum_weight_.resize(channels + kEpiloguePadding);
    }
  }
  window_ = PlanWindow(g, engine_, row_sum_weight_.empty(), !output_.interleaved, doubles_,
                       folded_ && folded_->stride_h == 1);
  if (splits_) window_.segments *= 2;
  if (engine_.narrow) groups_per_flush_ = GroupsPerFlush(spec, window_);
  if (window_.in_rows && !window_.copied) {
    for (size_t k = 0; k < window_.groups; ++k) offsets_.push_back(static_cast<uint32_t>(4 * k));
  }

  // Panels: the channels of each (merged) group in runs of nearly equal width, which are dealt out to threads; where
  // there is little to multiply, as wide as they may be, because codes of three vectors have no store of their own
  // (Zen 5: 1x1 16->96 takes .88 of the time of two such panels).
  constexpr size_t kFewGroups = 16;
  const bool widest = window_.segments * window_.groups <= kFewGroups;
  const size_t lanes = static_cast<size_t>(engine_.lanes);
  const size_t group_out = static_cast<size_t>(g.GroupOut()), group_in = static_cast<size_t>(g.GroupIn());
  const size_t vector_bytes = RoundUp(window_.segments * window_.groups, engine_.step_groups) * lanes * 4;
  const size_t most = static_cast<size_t>(engine_.max_vectors);
  const size_t max_vectors = most * vector_bytes > engine_.panel_bytes ? most / 2 : most;
  std::vector<size_t> offsets;
  size_t bytes = 0;
  for (size_t group = 0; group < static_cast<size_t>(g.group); group += window_.merged) {
    const size_t merged = std::min(window_.merged, static_cast<size_t>(g.group) - group);
    const size_t vectors = DivideUp(merged * group_out, lanes);
    const size_t count = DivideUp(vectors, max_vectors);
    size_t vector = 0;
    for (size_t i = 0; i < count; ++i) {
      const size_t even = vectors / count + (i < vectors % count ? 1 : 0);
      const size_t width = widest ? std::min(max_vectors, vectors - vector) : even;
      IgemmPanel panel{};
      panel.channel = group * group_out + vector * lanes;
      panel.count = std::min(width * lanes, merged * group_out - vector * lanes);
      panel.x_offset = group * group_in;
      panel.group = group;
      panel.vectors = static_cast<int>(width);
      panels_.push_back(panel);
      offsets.push_back(bytes);
      bytes += vector_bytes * width;
      vector += width;
    }
  }

  AlignedBytes packed(bytes);
  for (size_t p = 0; p < panels_.size(); ++p) PackPanel(spec, panels_[p], packed.data() + offsets[p]);
  weights_ = ShareWeights(std::move(packed));
  for (size_t p = 0; p < panels_.size(); ++p) {
    panels_[p].weights = reinterpret_cast<const int8_t*>(weights_->data()) + offsets[p];
  }
}

// Weight values, codes less their zero point, need 9 bits at times. Bytes hold v - shift. An engine that unpacks adds
// the shift to every word, else shift * (sum of the pixel's x) is added to the sums; but in a panel of several
// convolution groups that sum differs by channel. There v is a + b, a the nearest byte, and K is twice as
// long: the bytes of x are multiplied by all a, then again by all b.
void IgemmKernel::LoadWeights(const ConvSpec& spec, size_t channel, int8_t* to) const {
  const int32_t shift = ByteShift(spec.channel_values[channel]);
  LoadChannel(spec, channel, shift, to);
  if (!splits_) return;
  const size_t k = static_cast<size_t>(geometry_.K());
  for (size_t i = 0; i < k; ++i) {
    const int32_t value = to[i] + shift, nearest = std::clamp(value, -128, 127);
    to[i] = static_cast<int8_t>(nearest);
    to[k + i] = static_cast<int8_t>(value - nearest);
  }
}

// Some groups of all channels at a time, whose places stay in L1: those of a channel are far apart.
void IgemmKernel::PackPanel(const ConvSpec& spec, const IgemmPanel& panel, uint8_t* out) const {
  const size_t group_in = static_cast<size_t>(geometry_.GroupIn());
  const size_t segment_bytes = window_.addressing == Addressing::kRows ? window_.segment_bytes : group_in;
  const size_t channel_bytes = window_.segments * segment_bytes;
  const size_t vectors = static_cast<size_t>(panel.vectors), lanes = static_cast<size_t>(engine_.lanes);
  const size_t step = engine_.step_groups, vector_bytes = lanes * 4;
  // Where four values of a channel lie: group after group of all vectors, or step after step of groups, of which
  // those of a vector are one behind the other.
  const auto place_of = [&](size_t group, size_t lane) {
    const size_t vector = (group / step * vectors + lane / lanes) * step + group % step;
    return out + vector * vector_bytes + lane % lanes * 4;
  };
  std::vector<int8_t> weights(panel.count * channel_bytes);
  for (size_t lane = 0; lane < panel.count; ++lane) {
    LoadWeights(spec, panel.channel + lane, weights.data() + lane * channel_bytes);
    if (weight_shift_.empty()) continue;
    const int32_t shift = ByteShift(spec.channel_values[panel.channel + lane]);
    for (size_t g = 0; g < window_.segments * window_.groups; ++g)  // bytes that pad the channel become zero
      std::memset(place_of(g, lane), -shift, 4);
  }
  constexpr size_t kStepBytes = 64;
  for (size_t segment = 0; segment < window_.segments; ++segment) {
    for (size_t first = 0; first < segment_bytes; first += kStepBytes) {
      const size_t count = std::min(kStepBytes, segment_bytes - first);
      for (size_t lane = 0; lane < panel.count; ++lane) {
        const int8_t* from = weights.data() + lane * channel_bytes + segment * segment_bytes + first;
        // Where the channels of this convolution group begin inside a segment.
        const size_t start =
            ((panel.channel + lane) / static_cast<size_t>(geometry_.GroupOut()) - panel.group) * group_in;
        const size_t group = segment * window_.groups + (start + first) / 4;
        size_t i = 0;
        if (start % 4 == 0) {  // nearly every layer: whole groups at a time
          uint8_t* place = place_of(group, lane);
          for (size_t in_step = group % step; i + 4 <= count; i += 4, place += vector_bytes) {
            std::memcpy(place, from + i, 4);
            if (++in_step < step) continue;
            in_step = 0;
            place += (vectors - 1) * step * vector_bytes;
          }
        }
        for (; i < count; ++i) {
          const size_t at = start + first + i;
          place_of(segment * window_.groups + at / 4, lane)[at % 4] = static_cast<uint8_t>(from[i]);
        }
      }
    }
  }
}

void IgemmKernel::PointAtTaps(const ConvArgs& args, const ConvShape& shape, size_t first, size_t count,
                              size_t pitch, const uint8_t* pad_row, uint8_t* tail,
                              const uint8_t** rows) const {
  const ConvGeometry& g = geometry_;
  const uint8_t* x = static_cast<const uint8_t*>(args.x);
  const int64_t channels = g.in_channels, step = g.stride_w * channels;
  for (size_t p = 0; p < count;) {
    const int64_t pixel = static_cast<int64_t>(first + p);
    const int64_t ox = pixel % shape.out_w, oy = pixel / shape.out_w % shape.out_h;
    const int64_t plane = pixel / shape.out_w / shape.out_h;
    const int64_t run = std::min(shape.out_w - ox, static_cast<int64_t>(count - p));
    const uint8_t** out = rows + p;
    const int64_t volume = plane / shape.out_d, top = oy * g.stride_h - g.pad_top;
    const int64_t front = plane % shape.out_d * g.stride_d - g.pad_front;
    for (int64_t kz = 0; kz < g.kernel_d; ++kz) {
      const int64_t iz = front + kz * g.dilation_d;
      for (int64_t ky = 0; ky < g.kernel_h; ++ky) {
        const int64_t iy = top + ky * g.dilation_h;
        const bool inside = iz >= 0 && iz < shape.in_d && iy >= 0 && iy < shape.in_h;
        const int64_t in_row = (volume * shape.in_d + iz) * shape.in_h + iy;
        for (int64_t kx = 0; kx < g.kernel_w; ++kx, out += pitch) {
          // ix = (ox + i) * stride - pad + kx * dilation lies in [0, in_w) for i in [begin, end).
          const int64_t ix = ox * g.stride_w - g.pad_left + kx * g.dilation_w;
          int64_t begin = 0, end = 0;
          if (inside) {
            if (ix < 0) begin = std::min(run, (-ix + g.stride_w - 1) / g.stride_w);
            if (ix < shape.in_w) end = std::min(run, (shape.in_w - 1 - ix) / g.stride_w + 1);
            end = std::max(begin, end);
          }
          for (int64_t i = 0; i < begin; ++i) out[i] = pad_row;
          if (begin < end) {
            const uint8_t* from = x + (in_row * shape.in_w + ix + begin * g.stride_w) * channels;
            for (int64_t i = begin; i < end; ++i) out[i] = from + (i - begin) * step;
          }
          for (int64_t i = end; i < run; ++i) out[i] = pad_row;
        }
      }
    }
    p += static_cast<size_t>(run);
  }

  // Over-reads behind the tensor: such pointers lie in its last `reach` bytes, of which `tail` gets a copy.
  if (window_.reach <= static_cast<size_t>(channels)) return;
  const size_t size = static_cast<size_t>(shape.batch * shape.in_d * shape.in_h * shape.in_w * channels);
  const size_t copied = std::min(size, window_.reach);
  const uintptr_t end = reinterpret_cast<uintptr_t>(x) + size,
                  last_safe = end - std::min(size, window_.reach);
  bool have_tail = false;
  for (size_t i = 0; i < Taps(); ++i) {
    for (size_t p = 0; p < count; ++p) {
      const uintptr_t address = reinterpret_cast<uintptr_t>(rows[i * pitch + p]);
      if (address >= end || address < last_safe || address + window_.reach <= end) continue;
      if (!have_tail) {
        std::memcpy(tail, x + size - copied, copied);
        std::memset(tail + copied, 0, window_.reach);
        have_tail = true;
      }
      rows[i * pitch + p] = tail + (address - (end - copied));
    }
  }
}

// Returns the number of pixels of the block.
size_t IgemmKernel::CopyBand(const ConvArgs& args, const ConvShape& shape, const BlockGrid& grid,
                             size_t block, uint8_t* band, const uint8_t** rows) const {
  const ConvGeometry& g = geometry_;
  const size_t column_block = block % grid.column_blocks,
               row_block = block / grid.column_blocks % grid.row_blocks;
  const int64_t plane = static_cast<int64_t>(block / grid.column_blocks / grid.row_blocks);
  const int64_t oy = static_cast<int64_t>(row_block * grid.rows),
                ox = static_cast<int64_t>(column_block * grid.columns);
  const int64_t out_rows = std::min(static_cast<int64_t>(grid.rows), shape.out_h - oy);
  const int64_t out_columns = std::min(static_cast<int64_t>(grid.columns), shape.out_w - ox);
  const int64_t channels = g.in_channels;

  const RowBand band_of = args.band.value_or(RowBand{});
  const int64_t iy = (band_of.rows.begin + oy) * g.stride_h - g.pad_top, ix = ox * g.stride_w - g.pad_left;
  const int64_t in_rows = (out_rows - 1) * g.stride_h + (g.kernel_h - 1) * g.dilation_h + 1;
  const int64_t in_columns = (out_columns - 1) * g.stride_w + (g.kernel_w - 1) * g.dilation_w + 1;
  const int64_t begin =
      std::clamp<int64_t>(-ix, 0, in_columns);  // columns [begin, end) of the band are in the image
  const int64_t end = std::clamp<int64_t>(shape.in_w - ix, begin, in_columns);
  const BandPlaces places(g, window_, grid.rows);
  const uint8_t* x = static_cast<const uint8_t*>(args.x) +
                     plane / shape.out_d * shape.in_d * shape.in_h * shape.in_w * channels;
  for (int64_t i = 0; i < g.kernel_d * in_rows; ++i) {
    const int64_t kz = i / in_rows, r = i % in_rows;
    const int64_t iz = plane % shape.out_d * g.stride_d - g.pad_front + kz * g.dilation_d;
    uint8_t* to = band + static_cast<size_t>(places.Row(kz, r)) * grid.band_pitch;
    if (folded_) {
      const int64_t image_bytes = args.shape.in_h * args.shape.in_w * folded_->in_channels;
      const uint8_t* all = static_cast<const uint8_t*>(args.x);
      const int64_t end_bytes =
          shape.OutPlanes() * image_bytes - band_of.x_first * args.shape.in_w * folded_->in_channels;
      FoldRow(*folded_, args.shape, all + plane * image_bytes, band_of.x_first, all + end_bytes, pad_byte_,
              iy + r, ix, in_columns, to);
      continue;
    }
    if (iz < 0 || iz >= shape.in_d || iy + r < 0 || iy + r >= shape.in_h || begin == end) {
      std::memset(to, pad_byte_, static_cast<size_t>(in_columns * channels));
      continue;
    }
    std::memset(to, pad_byte_, static_cast<size_t>(begin * channels));
    const int64_t in_row = iz * shape.in_h + iy + r - band_of.x_first;
    const uint8_t* from = x + (in_row * shape.in_w + ix + begin) * channels;
    const int64_t bytes = (end - begin) * channels;
    if (doubles_) {
      for (int64_t b = 0; b < bytes; ++b) to[begin * channels + b] = static_cast<uint8_t>(2 * from[b]);
    } else {
      std::memcpy(to + begin * channels, from, static_cast<size_t>(bytes));
    }
    std::memset(to + end * channels, pad_byte_, static_cast<size_t>((in_columns - end) * channels));
  }
  if (window_.even) {
    for (int64_t row = 0; row < g.kernel_d * g.kernel_h; ++row)
      rows[row] = band + static_cast<size_t>(places.KernelRow(row)) * grid.band_pitch;
    return static_cast<size_t>(out_rows - 1) * EvenColumns(g, grid.columns) +
           static_cast<size_t>(out_columns);
  }
  if (window_.in_rows) {
    for (int64_t r = 0; r < out_rows; ++r)
      rows[r] = band + static_cast<size_t>(r * g.stride_h) * grid.band_pitch;
    return static_cast<size_t>(out_rows * out_columns);
  }
  const int64_t segments_per_row = window_.addressing == Addressing::kRows ? 1 : g.kernel_w;
  for (int64_t row = 0; row < g.kernel_d * g.kernel_h; ++row) {
    const int64_t first = places.KernelRow(row);
    for (int64_t kx = 0; kx < segments_per_row; ++kx) {
      const uint8_t** out = rows + static_cast<size_t>(row * segments_per_row + kx) * grid.pixels;
      for (int64_t r = 0; r < out_rows; ++r) {
        const uint8_t* from = band + static_cast<size_t>(first + r * g.stride_h) * grid.band_pitch +
                              kx * g.dilation_w * channels;
        for (int64_t c = 0; c < out_columns; ++c) *out++ = from + c * g.stride_w * channels;
      }
    }
  }
  return static_cast<size_t>(out_rows * out_columns);
}

// IgemmBlock::offsets in a band.
void IgemmKernel::ListOffsets(const BlockGrid& grid, uint32_t* offsets) const {
  const BandPlaces places(geometry_, window_, grid.rows);
  for (size_t s = 0; s < window_.segments; ++s) {
    const size_t first = static_cast<size_t>(places.KernelRow(static_cast<int64_t>(s))) * grid.band_pitch;
    for (size_t k = 0; k < window_.groups; ++k) *offsets++ = static_cast<uint32_t>(first + 4 * k);
  }
}

void IgemmKernel::SumRows(const IgemmBlock& block, int32_t* sums) const {
  const size_t bytes = window_.segment_bytes;
  const auto segment_of = [&](size_t s, size_t p) {
    if (block.offsets == nullptr) return block.rows[s * block.pitch + p];
    return block.rows[p / block.columns] + p % block.columns * block.apart + block.offsets[s * block.groups];
  };
  for (size_t group = 0; group < RowSumGroups(); ++group) {
    for (size_t p = 0; p < block.pixels; ++p) {
      uint32_t sum = 0;
      for (size_t s = 0; s < block.segments; ++s) {
        const uint8_t* x = segment_of(s, p) + group * bytes;
        for (size_t i = 0; i < bytes; ++i) {
          sum += x_signed_ ? static_cast<uint32_t>(static_cast<int8_t>(x[i]))
                           : static_cast<uint8_t>(x[i] + x_shift_);
        }
      }
      sums[group * block.pitch + p] = static_cast<int32_t>(sum);
    }
  }
}

// What a block of pixels costs beside its products: what it sets up, and that its weights are read again.
RunPlan IgemmKernel::MakePlan(const RunKey& key) const {
  RunPlan plan;
  plan.shape = Shape(key.shape);
  if (plan.shape.OutPixels() > 0) {
    std::tie(plan.grid, plan.split) = DealOut(
        key, Cycles(plan.shape), panels_.size(),
        [&](size_t wanted) {
          return PlanBlocks(geometry_, window_, engine_, plan.shape, output_.interleaved, wanted);
        },
        [&](const BlockGrid& grid, size_t wide) {
          const double setup = static_cast<double>(grid.pixels) * SetupCycles(geometry_, window_, engine_, 1);
          return setup + static_cast<double>(wide) * PanelCycles(grid);
        });
  }
  plan.workspace = PlanWorkspace(window_, engine_, plan.grid, RowSumGroups());
  return plan;
}

void IgemmKernel::Run(const ConvArgs& args, ThreadPool& pool) const {
  RunKey key{args.shape, pool.Threads(), pool.TaskCycles()};
  size_t before = 0;  // pixels of y between where its memory begins and a band
  if (args.band) {
    key.shape.out_h = args.band->rows.count();
    before = static_cast<size_t>((args.band->rows.begin - args.band->y_first) * args.shape.out_w);
  }
  if (Shape(key.shape).OutPixels() == 0) return;
  const auto plan = plans_.Get(key, [&] { return MakePlan(key); });
  const ConvShape& shape = plan->shape;
  const BlockGrid& grid = plan->grid;
  const Workspace& ws = plan->workspace;
  const TaskSplit& split = plan->split;
  // Engines that copy pixels find them again where the thread had the block before.
  const bool keeps = engine_.operand_bytes != nullptr;
  const uint64_t tickets = keeps && split.panel_tasks > 1 ? NewTickets(grid.blocks) : 0;
  pool.ParallelFor(split.tasks(), [&](size_t task) {
    const auto [first_block, end_block, first_panel, end_panel] = split[task];

    // The ticket is that of the task's last block.
    const auto [scratch, has_last] = ThreadScratch(ws.bytes, tickets == 0 ? 0 : tickets + end_block - 1);
    if (!has_last) std::memset(scratch + ws.pad_row, pad_byte_, window_.reach);
    const uint8_t** rows = reinterpret_cast<const uint8_t**>(scratch + ws.rows);
    KeptBlock* const last = reinterpret_cast<KeptBlock*>(scratch + ws.kept);

    IgemmBlock block{};
    block.rows = rows;
    block.pitch = window_.even ? 1 : grid.pixels;
    if (window_.even || window_.in_rows)
      block.apart = static_cast<size_t>(geometry_.stride_w * geometry_.in_channels);
    if (window_.even) block.column_pitch = EvenColumns(geometry_, grid.columns);
    if (window_.in_rows) {
      auto* const offsets = reinterpret_cast<uint32_t*>(scratch + ws.offsets);
      if (window_.copied) ListOffsets(grid, offsets);
      block.offsets = window_.copied ? offsets : offsets_.data();
    }
    block.segments = window_.segments;
    block.groups = window_.groups;
    block.zero_row = static_cast<uint8_t>(pad_byte_ + x_shift_) == 0 ? scratch + ws.pad_row : nullptr;
    block.panels = panels_.data() + first_panel;
    block.panel_count = end_panel - first_panel;
    block.all_panels_end = panels_.data() + panels_.size();
    block.bias = bias_.data();
    block.rises = rises_;
    block.x_shift = static_cast<int32_t>(x_shift_ * 0x01010101u);
    block.x_signed = x_signed_;
    if (!weight_shift_.empty()) block.weight_shift = weight_shift_.data();
    block.operands = scratch + ws.operands;
    block.unpacked = ws.unpacked ? scratch + *ws.unpacked : nullptr;
    block.operands_of = &last->operands_of;
    block.groups_per_flush = groups_per_flush_;
    block.output = {&epilogue_.view(), 0, 1, static_cast<const uint8_t*>(args.residual), args.y};
    for (size_t i = first_block; i < end_block; ++i) {
      // Blocks of whole rows or parts of rows, else runs of pixels.
      size_t first = i * grid.pixels;
      if (grid.columns != 0) {
        const size_t out_w = static_cast<size_t>(shape.out_w), out_h = static_cast<size_t>(shape.out_h);
        const size_t column = i % grid.column_blocks * grid.columns, row_block = i / grid.column_blocks;
        const size_t row = row_block / grid.row_blocks * out_h + row_block % grid.row_blocks * grid.rows;
        first = row * out_w + column;
        block.output.first_pixel = before + PixelOf(args.shape, shape, row, column);
        block.output.pixel_step = static_cast<size_t>(output_.step_w);
        block.pixels = block.columns = std::min(grid.columns, out_w - column);
      } else {
        block.output.first_pixel = first;
        block.pixels = std::min(grid.pixels, static_cast<size_t>(shape.OutPixels()) - first);
      }
      const bool is_kept = has_last && first_block + 1 == end_block;
      if (is_kept) {
        block.pixels = last->pixels;
      } else if (window_.copied) {
        block.pixels = CopyBand(args, shape, grid, i, scratch + ws.band, rows);
      } else if (window_.in_rows) {
        rows[0] = static_cast<const uint8_t*>(args.x) + first * block.apart;
        block.columns = block.pixels;
      } else {
        PointAtTaps(args, shape, first, block.pixels, grid.pixels, scratch + ws.pad_row, scratch + ws.tail,
                    rows);
      }
      if (!is_kept) *last = {block.pixels, 0};
      if (splits_ && !is_kept) std::copy_n(rows, Taps() * grid.pixels, rows + Taps() * grid.pixels);
      if (!row_sum_weight_.empty()) {
        int32_t* sums = reinterpret_cast<int32_t*>(scratch + ws.row_sums);
        if (!is_kept) SumRows(block, sums);
        block.row_sums = sums;
        block.row_sum_weight = row_sum_weight_.data();
      }
      engine_.run(block);
    }
  });
}

// Whether kMinGroupsPerFlush holds, without a look at the weights where their bits alone say so.
bool FitsNarrow(const ConvSpec& spec, const WindowLayout& window) {
  const int32_t x_max = (1 << InputCodes::Of(spec).type.bits) - 1,
                w_max = (1 << spec.w.bits) - 1;  // |code - zero point| <= w_max
  if (x_max * w_max * 2 <= kMaxSum / kMinGroupsPerFlush) return true;
  return GroupsPerFlush(spec, window) >= kMinGroupsPerFlush;
}

// Transposed convolution. Output o takes tap t where o + pad - t * dilation is a multiple of the stride, so
// the outputs of one phase o % stride = f share their taps: t = first, first + every, ... with every = stride
// / gcd(stride, dilation). For o = f + stride * a such a tap reads input
//
//   (o + pad - t * dilation) / stride = a + (f + pad - first * dilation) / stride - j * (every * dilation /
//   stride),
//
// j = 0, 1, ...: in reverse order of j an ordinary convolution of stride 1. A transposed convolution of
// stride 2 x 2 is four of them whose outputs interleave, and none multiplies the zeros between the pixels.
struct Phase {
  int64_t first = 0, every = 1, taps = 0;  // taps of the transposed kernel
  int64_t dilation = 1, pad = 0;           // of the ordinary convolution; pad may be negative
};

Phase PhaseOf(int64_t f, int64_t kernel, int64_t stride, int64_t dilation, int64_t pad) {
  Phase phase;
  phase.every = stride / std::gcd(stride, dilation);
  while (phase.first < kernel && (f + pad - phase.first * dilation) % stride != 0) ++phase.first;
  if (phase.first >= kernel) return phase;
  phase.taps = (kernel - 1 - phase.first) / phase.every + 1;
  phase.dilation = phase.every * dilation / stride;
  phase.pad = (phase.taps - 1) * phase.dilation - (f + pad - phase.first * dilation) / stride;
  return phase;
}

// The phase of a transposed convolution as a node of its own. Without taps the accumulator is the bias alone:
// one tap whose weights are zero.
ConvSpec PhaseSpec(const ConvSpec& whole, const Phase& h, const Phase& w) {
  ConvSpec spec = whole;
  ConvGeometry& g = spec.geometry;
  const bool empty = h.taps == 0 || w.taps == 0;
  g.transposed = false;
  g.stride_h = g.stride_w = 1;
  g.kernel_h = empty ? 1 : h.taps;
  g.kernel_w = empty ? 1 : w.taps;
  g.dilation_h = h.dilation;
  g.dilation_w = w.dilation;
  g.pad_top = h.pad;
  g.pad_left = w.pad;
  g.output_pad_h = g.output_pad_w = 0;
  const int64_t in = g.GroupIn();
  spec.weights.clear();
  if (empty) {
    spec.w = {8, Encoding::kSigned};
    std::fill(spec.w_zero_point.begin(), spec.w_zero_point.end(), 0);
    spec.weights.resize(static_cast<size_t>(g.out_channels * in));
    ReadWeightValues(spec);
    return spec;
  }
  for (int64_t c = 0; c < g.out_channels; ++c) {
    for (int64_t y = h.taps - 1; y >= 0; --y) {
      for (int64_t x = w.taps - 1; x >= 0; --x) {
        const int64_t tap = (h.first + y * h.every) * whole.geometry.kernel_w + w.first + x * w.every;
        const auto from = whole.weights.begin() + (c * whole.geometry.Taps() + tap) * in;
        spec.weights.insert(spec.weights.end(), from, from + in);
      }
    }
  }
  ReadWeightValues(spec);
  return spec;
}

class TransposedIgemm final : public ConvKernel {
 public:
  TransposedIgemm(const ConvSpec& spec, const IgemmEngine& engine) {
    const ConvGeometry& g = spec.geometry;
    for (int64_t fh = 0; fh < g.stride_h; ++fh) {
      const Phase h = PhaseOf(fh, g.kernel_h, g.stride_h, g.dilation_h, g.pad_top);
      for (int64_t fw = 0; fw < g.stride_w; ++fw) {
        const Phase w = PhaseOf(fw, g.kernel_w, g.stride_w, g.dilation_w, g.pad_left);
        const OutputGrid grid{g.stride_h, g.stride_w, fh, fw, true};
        phases_.push_back(std::make_unique<IgemmKernel>(PhaseSpec(spec, h, w), engine, grid));
      }
    }
  }

  void Run(const ConvArgs& args, ThreadPool& pool) const override {
    for (const auto& phase : phases_) phase->Run(args, pool);
  }
  size_t WorkspaceBytes(const ConvShape& shape) const override {
    size_t bytes = 0;
    for (const auto& phase : phases_) bytes = std::max(bytes, phase->WorkspaceBytes(shape));
    return bytes;
  }
  size_t PackedBytes() const override {
    size_t bytes = 0;
    for (const auto& phase : phases_) bytes += phase->PackedBytes();
    return bytes;
  }

 private:
  std::vector<std::unique_ptr<IgemmKernel>> phases_;
};

// Every phase keeps tables of its own.
constexpr int64_t kMaxPhases = 64;

template <const IgemmEngine& kEngine>
std::string Refuse(const ConvSpec& spec) {
  const ConvGeometry& g = spec.geometry;
  if (g.transposed) {
    if (g.stride_h > kMaxPhases || g.stride_w > kMaxPhases || g.stride_h * g.stride_w > kMaxPhases)
      return "strides of more than 64 phases";
  }
  const WindowLayout w = PlanWindow(g, kEngine, true, !g.transposed, CopiesAll(spec));
  if (w.copied && !BandFits(g, w))
    return "the window of one pixel exceeds the band into which bipolar activations are copied";
  if (w.reach > kMaxReach) return "a row of input channels exceeds the workspace";
  if (w.segments * kMinBlockPixels * sizeof(void*) > kPointerBytes ||
      OperandBytes(w, kEngine, 1) > kOperandBytes)
    return "kernel window exceeds the workspace";
  if (kEngine.narrow && !FitsNarrow(spec, w))
    return "products of these weights overflow 16-bit accumulators too soon";
  return {};
}

// Measured on Zen 5: what a call takes beside its tiles.
constexpr double kCallCycles = 330;

template <const IgemmEngine& kEngine>
double Cost(const ConvSpec& spec, const ConvShape& shape) {
  const bool folds = Folds(spec, kEngine);
  const ConvGeometry g = folds ? Folded(spec.geometry) : spec.geometry;
  const WindowLayout w =
      PlanWindow(g, kEngine, true, !g.transposed, CopiesAll(spec), folds && spec.geometry.stride_h == 1);
  const size_t panel_groups = DivideUp(static_cast<size_t>(g.group), w.merged);
  const size_t lanes = static_cast<size_t>(kEngine.lanes);
  const size_t vectors = DivideUp(w.merged * static_cast<size_t>(g.GroupOut()), lanes);
  const double phases = g.transposed ? static_cast<double>(g.stride_h * g.stride_w) : 1.0;
  const double channels = static_cast<double>(panel_groups * vectors * lanes);
  const double pixels = static_cast<double>(shape.OutPixels());
  const double products =
      static_cast<double>(RoundUp(w.segments * w.groups, kEngine.step_groups) * 4) / phases;
  // The last tile has fewer pixels than the others.
  const double rest = static_cast<double>(shape.OutPixels() % kEngine.tile_rows);
  const double rows = pixels - rest + (rest == 0 ? 0.0 : std::max(rest, kEngine.least_rows));
  return kCallCycles + rows * channels * products / kEngine.macs_per_cycle +
         pixels * (channels / kEngine.outputs_per_cycle + SetupCycles(g, w, kEngine, panel_groups));
}

template <const IgemmEngine& kEngine>
std::unique_ptr<ConvKernel> Create(const ConvSpec& spec) {
  if (spec.geometry.transposed) return std::make_unique<TransposedIgemm>(spec, kEngine);
  if (Folds(spec, kEngine))
    return std::make_unique<IgemmKernel>(Folded(spec), kEngine, OutputGrid{}, &spec.geometry);
  return std::make_unique<IgemmKernel>(spec, kEngine);
}

template <const IgemmEngine& kEngine>
KernelRow Row(const char* name, const char* op, Isa isa, const char* note) {
  return {{name, op, "igemm", isa, 8, 8, note}, &Refuse<kEngine>, &Cost<kEngine>, &Create<kEngine>, true};
}

}  // namespace

std::span<const KernelRow> IgemmRows() {
  static const char* const kPhases = "one stride-1 convolution per phase of the stride";
  static const KernelRow kRows[] = {
      Row<kIgemmSse41Narrow>("igemm_u8s8_acc16_6x8_sse41", "conv", Isa::kSse41,
                             "small weights: pmaddubsw, 16-bit sums"),
      Row<kIgemmSse41Wide>("igemm_u8s16_6x8_sse41", "conv", Isa::kSse41, "any weights: pmaddwd"),
      Row<kIgemmAvx2Narrow>("igemm_u8s8_acc16_6x16_avx2", "conv", Isa::kAvx2,
                            "small weights: vpmaddubsw, 16-bit sums"),
      Row<kIgemmAvx2Wide>("igemm_u8s16_6x16_avx2", "conv", Isa::kAvx2, "any weights: vpmaddwd"),
      Row<kIgemmAvxVnni>("igemm_u8s8_6x16_avxvnni", "conv", Isa::kAvxVnni,
                         "dense and grouped layers: vpdpbusd"),
      Row<kIgemmAvx512Vnni>("igemm_u8s8_6x64_avx512vnni", "conv", Isa::kAvx512Vnni,
                            "dense and grouped layers: vpdpbusd"),
#if LOWBIT_HAS_AMX
      Row<kIgemmAmx>("igemm_s8_32x32_amx", "conv", Isa::kAmx, "dense and grouped layers: tdpbusd, tdpbssd"),
      Row<kIgemmAmx>("igemm_phases_s8_32x32_amx", "conv_transpose", Isa::kAmx, kPhases),
#endif
      Row<kIgemmSse41Narrow>("igemm_phases_u8s8_acc16_6x8_sse41", "conv_transpose", Isa::kSse41, kPhases),
      Row<kIgemmSse41Wide>("igemm_phases_u8s16_6x8_sse41", "conv_transpose", Isa::kSse41, kPhases),
      Row<kIgemmAvx2Narrow>("igemm_phases_u8s8_acc16_6x16_avx2", "conv_transpose", Isa::kAvx2, kPhases),
      Row<kIgemmAvx2Wide>("igemm_phases_u8s16_6x16_avx2", "conv_transpose", Isa::kAvx2, kPhases),
      Row<kIgemmAvxVnni>("igemm_phases_u8s8_6x16_avxvnni", "conv_transpose", Isa::kAvxVnni, kPhases),
      Row<kIgemmAvx512Vnni>("igemm_phases_u8s8_6x64_avx512vnni", "conv_transpose", Isa::kAvx512Vnni, kPhases),
  };
  return kRows;
}

}  // namespace lowbit
