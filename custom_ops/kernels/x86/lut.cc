// The portable half of the look-up kernels: packing, addressing and the split into tasks. They multiply 1-
// and 2-bit weights by activations of up to 6 bits without a multiplication: four channels of a pixel have
// only 16 sums of subsets, and the bits of four weights of a channel say which one is meant.
//
// Algebra. Let u = x + shift be the unsigned code of an activation (shift = 2^(bits-1) for signed codes), zu
// = zx + shift, and let a weight be v = sum over planes p of m_p b_p, + o[c], with bits b_p:
//
//     unsigned  m = 1, 2                o = -zw[c]
//     signed    m = 1, -2 (or -1)       o = -zw[c]
//     bipolar   m = 2                   o = -1
//
//     sum (u - zu) v  =  sum over p of m_p * (sum u b_p)  +  o[c] * (sum u)  -  zu * (sum v)
//                              ^ tables                      ^ row sums         ^ constant: in the bias
//
// Bipolar activations are 2q - 1, so u = 2q and zu = 1, and a tap in the padding, which counts 0, has u = 1.
// All taps in the padding have u = zu, for which the identity above holds too.
//
// Overflow. An entry of a table is at most 4 U, U the largest u: 2^bits - 1, or 2. So floor(255 / (4 U))
// look-ups fit a byte: one for 6 bits, two for 5, four and more up to 4 bits. Where bytes are widened to 16
// bits first (lut_shuffle.h), LookupsPerWord says how many of them those hold. Codes outside their range
// wrap: wrong numbers, but an index never depends on a code.
//
// Addressing. The tables of a pixel, 4 bytes per channel, are built once and serve all its taps and all
// output channels. A block of output pixels, some rows or a part of one, needs the tables of a few input
// rows; they lie in a ring that the blocks of a task, one below the other, share. Columns outside the image
// are in the ring too, so that the tables under a row of taps are consecutive.
#include "kernels/x86/lut.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "core/packed_weights.h"
#include "kernels/common/bitserial.h"
#include "kernels/common/epilogue_tables.h"
#include "kernels/common/workspace.h"
#include "kernels/x86/bitserial_engines.h"
#include "kernels/x86/few_bit_cycles.h"
#include "kernels/x86/lut_block.h"

namespace lowbit {
namespace {

constexpr int kMaxXBits = 6, kMaxWBits = 2;
// A block's tables of input rows, pointers and row sums; together with the partial sums of a chunk of panels
// they stay within L2 and kMaxWorkspaceBytes.
constexpr size_t kRingBytes = 256 * 1024;
constexpr size_t kPointerBytes = 96 * 1024;
constexpr size_t kRowSumBytes = 32 * 1024;
constexpr size_t kPartialBytes = 64 * 1024;
// Tables of a register tile that stay in L1 while the panels pass.
constexpr size_t kDepthBytes = 32 * 1024;
// Indices that stay in L2 beside the tables while the tiles of a block pass.
constexpr size_t kChunkBytes = 512 * 1024;
// Few enough columns of output that the ring of one row of them stays in L1 between building and looking up,
// but not fewer than this, where the columns that neighbours share would cost more.
constexpr size_t kCachedRingBytes = 24 * 1024;
constexpr int64_t kMinColumns = 16;
// A block has about this many pixels where rows are short, so that its last tile is rarely a small one.
constexpr int64_t kBlockPixels = 24;

// Largest unsigned code that a table sums.
int32_t LargestCode(const OperandType& x) { return x.encoding == Encoding::kBipolar ? 2 : (1 << x.bits) - 1; }

// The tables of one pixel, and the window of an output pixel as segments: runs of consecutive tables.
struct WindowLayout {
  size_t group_pitch = 0, pitch = 0;  // bytes of tables: of a convolution group, of a pixel
  bool merged = false;                // a segment is a row of taps, otherwise one tap
  size_t segments = 0, lookups = 0;   // per segment and unit of output channels
  size_t index_bytes = 0;             // per look-up and unit

  WindowLayout(const LutEngine& engine, const ConvGeometry& g, int planes) {
    const size_t quads = DivideUp(static_cast<size_t>(g.GroupIn()), kQuadChannels);
    group_pitch = quads * kQuadBytes;
    pitch = static_cast<size_t>(g.group) * group_pitch;
    merged = g.group == 1 && (g.dilation_w == 1 || g.kernel_w == 1);
    segments = static_cast<size_t>(merged ? g.kernel_h : g.Taps());
    const size_t tap_quads = quads * (merged ? static_cast<size_t>(g.kernel_w) : 1);
    const size_t bits = static_cast<size_t>(planes);
    if (engine.layout == LutLayout::kPermute) {
      lookups = tap_quads * bits;
      index_bytes = kQuadBytes;
    } else {
      lookups = tap_quads * (kQuadTables / engine.vector_tables);
      index_bytes = engine.vector_tables * kTableEntries * bits;
    }
  }
};

// How the output pixels of one shape are cut into blocks, and what their tables need.
struct BlockGrid {
  size_t blocks = 0, row_blocks = 0, column_blocks = 0;
  int64_t rows = 0, columns = 0;            // of output, per block
  int64_t ring_rows = 0, ring_columns = 0;  // of input with tables
  int64_t column_step = 1;                  // in input columns, from one column of the ring to the next
  size_t Pixels() const { return static_cast<size_t>(rows * columns); }
  size_t RingPixels() const { return static_cast<size_t>(ring_rows * ring_columns); }
  // For so many columns of output.
  int64_t RingColumns(const ConvGeometry& g, int64_t out) const {
    return ((out - 1) * g.stride_w + (g.kernel_w - 1) * g.dilation_w) / column_step + 1;
  }
};

BlockGrid PlanBlocks(const ConvGeometry& g, const WindowLayout& window, const ConvShape& s,
                     size_t tile_pixels) {
  BlockGrid grid;
  if (s.OutPixels() == 0) return grid;
  const auto ring_rows = [&](int64_t rows) {
    return (rows - 1) * g.stride_h + (g.kernel_h - 1) * g.dilation_h + 1;
  };
  // A kernel one column wide reads every stride-th column alone.
  grid.column_step = g.kernel_w == 1 ? g.stride_w : 1;
  const auto ring_columns = [&](int64_t columns) { return grid.RingColumns(g, columns); };
  const auto fits = [&](int64_t rows, int64_t columns) {
    const size_t pixels = static_cast<size_t>(rows * columns);
    const size_t tables = static_cast<size_t>(ring_rows(rows) * ring_columns(columns) + g.kernel_w);
    return tables * window.pitch <= kRingBytes && pixels * window.segments * sizeof(void*) <= kPointerBytes &&
           pixels * static_cast<size_t>(g.group) * sizeof(int32_t) <= kRowSumBytes;
  };
  const int64_t tile = static_cast<int64_t>(tile_pixels);
  const auto cached = [&](int64_t columns) {
    return static_cast<size_t>(ring_rows(1) * ring_columns(columns)) * window.pitch <= kCachedRingBytes;
  };
  const int64_t least = g.Taps() == 1 ? tile : kMinColumns;
  grid.columns = s.out_w;
  if (grid.columns > least && !cached(grid.columns)) {
    grid.columns = least;
    while (cached(grid.columns + tile)) grid.columns += tile;
    const size_t blocks = DivideUp(static_cast<size_t>(s.out_w), static_cast<size_t>(grid.columns));
    grid.columns = static_cast<int64_t>(RoundUp(DivideUp(static_cast<size_t>(s.out_w), blocks), tile_pixels));
  }
  while (grid.columns > 1 && !fits(1, grid.columns)) grid.columns = (grid.columns + 1) / 2;
  grid.column_blocks = DivideUp(static_cast<size_t>(s.out_w), static_cast<size_t>(grid.columns));
  grid.rows = 1;
  if (grid.column_blocks == 1) {
    while (grid.rows < s.out_h && grid.rows * grid.columns < kBlockPixels &&
           fits(grid.rows + 1, grid.columns))
      ++grid.rows;
  }
  grid.row_blocks = DivideUp(static_cast<size_t>(s.out_h), static_cast<size_t>(grid.rows));
  grid.blocks = static_cast<size_t>(s.batch) * grid.column_blocks * grid.row_blocks;
  grid.ring_rows = ring_rows(grid.rows);
  grid.ring_columns = ring_columns(grid.columns);
  return grid;
}

// How many look-ups 16-bit sums hold: of bytes up to 4 U, or of two neighbouring ones weighted by up to 1 and
// 2.
size_t LookupsPerWord(const ConvSpec& spec) {
  const int32_t largest = static_cast<int32_t>(kTableChannels) * LargestCode(spec.x);
  return static_cast<size_t>(spec.w.bits == 1 ? 65535 / largest : 32767 / (3 * largest));
}

// Cuts the window into runs whose tables, for a tile, stay in L1 and whose sums fit 16 bits where the engine
// has such.
std::vector<LutDepth> PlanDepths(const ConvSpec& spec, const LutEngine& engine, const WindowLayout& window) {
  const ConvGeometry& g = spec.geometry;
  size_t tile = engine.max_pixels * window.group_pitch;  // tables of a segment
  if (window.merged) {
    const int64_t shared = std::min(g.stride_w, g.kernel_w);  // columns from one pixel's segment to the next
    tile = static_cast<size_t>((static_cast<int64_t>(engine.max_pixels) - 1) * shared + g.kernel_w) *
           window.pitch;
  }
  // Parts of a segment begin at whole quads and at steps of four look-ups.
  const size_t step = 4 * static_cast<size_t>(spec.w.bits);
  const size_t most =
      engine.layout == LutLayout::kShuffle ? LookupsPerWord(spec) / step * step : SIZE_MAX / 2;
  size_t segments =
      std::clamp(std::min(kDepthBytes / tile, most / window.lookups), size_t{1}, window.segments);
  segments = DivideUp(window.segments, DivideUp(window.segments, segments));
  const size_t parts = std::max(DivideUp(tile, kDepthBytes), DivideUp(window.lookups, most));
  const size_t lookups = RoundUp(DivideUp(window.lookups, parts), step);
  std::vector<LutDepth> depths;
  for (size_t s = 0; s < window.segments; s += segments) {
    for (size_t l = 0; l < window.lookups; l += lookups) {
      depths.push_back(
          {s, std::min(segments, window.segments - s), l, std::min(lookups, window.lookups - l)});
    }
  }
  return depths;
}

// The parts of a thread's scratch memory, as offsets.
struct Workspace {
  size_t ring = 0, ring_sums = 0, tags = 0, pad_row = 0, rows = 0, row_sums = 0, partial = 0, bytes = 0;
};

// Their addresses.
struct Scratch {
  uint8_t* ring;       // tables [ring_rows][ring_columns][pitch]
  int32_t* ring_sums;  // sums of channels [groups][ring_rows][ring_columns]; null where they are not needed
  int64_t* tags;       // [ring_rows] the input row that a row of the ring holds, -1 for none
  uint8_t* pad_row;    // tables of a segment outside the image
  const uint8_t** rows;
  int32_t* row_sums;
};

// The output pixels of a block.
struct BlockPlace {
  int64_t image, y, x, rows, columns;
  int64_t Pixels() const { return rows * columns; }
};

// Building the tables of sixteen channels, measured on Zen 5.
constexpr double kBuildCycles = 2.5;
// The share of a task that may be spent on tables that another task builds too.
constexpr double kRebuilt = 0.06;

// Per output pixel.
double LookupCycles(const LutEngine& engine, const ConvGeometry& g, const WindowLayout& window, bool wide) {
  const size_t units = static_cast<size_t>(g.group) * DivideUp(static_cast<size_t>(g.GroupOut()), kLutUnit);
  const size_t vectors = window.index_bytes / (engine.vector_tables * kTableEntries);
  const double lookup = engine.lookup_cycles + (wide ? engine.wide_cycles : 0.0);
  return static_cast<double>(window.segments * window.lookups * units) *
         (engine.table_cycles + static_cast<double>(vectors) * lookup);
}

class LutKernel final : public ConvKernel {
 public:
  LutKernel(const ConvSpec& spec, const LutEngine& engine);

  void Run(const ConvArgs& args, ThreadPool& pool) const override;
  size_t WorkspaceBytes(const ConvShape& shape) const override {
    return Plan(Grid(Flatten(geometry_, shape))).bytes;
  }
  size_t PackedBytes() const override { return weights_->size() + epilogue_.Bytes(); }

 private:
  BlockGrid Grid(const ConvShape& shape) const {
    return PlanBlocks(geometry_, window_, shape, engine_.max_pixels);
  }
  Workspace Plan(const BlockGrid& grid) const;
  bool NeedsSums() const { return !row_sum_weight_.empty(); }
  // The sum over the channels of a pixel in the padding, in one group.
  int32_t PaddingSum() const { return static_cast<int32_t>(geometry_.GroupIn()) * pad_value_; }
  // The row of input that tap row `ky` reads for output row `oy`; -1: none.
  int64_t InputRow(const ConvShape& shape, int64_t oy, int64_t ky) const {
    const int64_t iy = oy * geometry_.stride_h - geometry_.pad_top + ky * geometry_.dilation_h;
    return iy >= 0 && iy < shape.in_h ? iy : -1;
  }
  // Accumulators of one tile.
  size_t PartialBytes() const { return engine_.max_pixels * engine_.max_units * kLutUnit * sizeof(int32_t); }
  void LoadChannels(const ConvSpec& spec);
  void PackWeights(const ConvSpec& spec);
  void PackPanel(const ConvSpec& spec, const LutPanel& panel, uint8_t* out) const;
  void BuildPadding(uint8_t* tables) const;
  void BuildRows(const ConvArgs& args, const ConvShape& shape, const BlockGrid& grid, const BlockPlace& place,
                 const Scratch& scratch) const;
  void PointAtTables(const ConvShape& shape, const BlockGrid& grid, const BlockPlace& place,
                     const Scratch& scratch) const;
  void SumRows(const ConvShape& shape, const BlockGrid& grid, const BlockPlace& place,
               const Scratch& scratch) const;

  const ConvGeometry geometry_;
  const LutEngine& engine_;
  const int planes_;
  EpilogueTables epilogue_;
  LutAdjust adjust_ = LutAdjust::kNone;
  uint8_t shift_ = 0;
  uint8_t pad_value_ = 0;  // u of a tap outside the image
  int per_flush_ = 1;
  int32_t slot_weights_ = 0;
  std::vector<int32_t> bias_;            // [out_channels + padding]
  std::vector<int32_t> row_sum_weight_;  // [out_channels + padding], empty when all are 0
  bool uniform_row_sums_ = false;        // all are -1
  const WindowLayout window_;
  std::vector<LutDepth> depths_;
  PackedWeights weights_;
  std::vector<LutPanel> panels_;
  size_t panels_per_chunk_ = 1;
};

LutKernel::LutKernel(const ConvSpec& spec, const LutEngine& engine)
    : geometry_(spec.geometry),
      engine_(engine),
      planes_(spec.w.bits),
      epilogue_(spec),
      window_(engine, spec.geometry, spec.w.bits) {
  if (spec.x.encoding == Encoding::kSigned) {
    adjust_ = LutAdjust::kShift;
    shift_ = static_cast<uint8_t>(1 << (spec.x.bits - 1));
  }
  if (spec.x.encoding == Encoding::kBipolar) adjust_ = LutAdjust::kDouble;
  pad_value_ = static_cast<uint8_t>(spec.x.encoding == Encoding::kBipolar ? 1 : spec.x_zero_point + shift_);
  const int32_t fit = 255 / (static_cast<int32_t>(kTableChannels) * LargestCode(spec.x));
  per_flush_ = fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
  LoadChannels(spec);
  depths_ = PlanDepths(spec, engine_, window_);
  PackWeights(spec);
}

void LutKernel::LoadChannels(const ConvSpec& spec) {
  const size_t channels = static_cast<size_t>(geometry_.out_channels), k = static_cast<size_t>(geometry_.K());
  bias_.assign(channels + kEpiloguePadding, 0);
  row_sum_weight_.assign(channels + kEpiloguePadding, 0);
  std::vector<int64_t> largest(channels);
  const uint32_t mask = (1u << planes_) - 1;
  for (size_t c = 0; c < channels; ++c) {
    int64_t count[1 << kMaxWBits] = {};
    for (size_t i = 0; i < k; ++i) ++count[spec.weights[c * k + i] & mask];
    int64_t sum = 0, magnitude = 0;
    for (uint32_t bits = 0; bits <= mask; ++bits) {
      const bool negative = spec.w.encoding == Encoding::kSigned && (bits >> (planes_ - 1) & 1) != 0;
      const int32_t code = static_cast<int32_t>(bits) - (negative ? 1 << planes_ : 0);
      const int64_t value =
          spec.w.encoding == Encoding::kBipolar ? 2 * code - 1 : code - spec.w_zero_point[c];
      sum += count[bits] * value;
      magnitude += count[bits] * std::abs(value);
    }
    largest[c] = 256 * magnitude + std::abs(static_cast<int64_t>(spec.bias[c]));
    bias_[c] = static_cast<int32_t>(static_cast<uint32_t>(spec.bias[c] - pad_value_ * sum));
    row_sum_weight_[c] = spec.w.encoding == Encoding::kBipolar ? -1 : -spec.w_zero_point[c];
  }
  epilogue_.LimitAccumulators(largest);
  const auto all_are = [&](int32_t value) {
    return std::all_of(row_sum_weight_.begin(), row_sum_weight_.begin() + static_cast<ptrdiff_t>(channels),
                       [=](int32_t w) { return w == value; });
  };
  uniform_row_sums_ = all_are(-1);
  if (all_are(0)) row_sum_weight_.clear();

  int32_t of_plane[kMaxWBits] = {1, 2};
  if (spec.w.encoding == Encoding::kBipolar) of_plane[0] = 2;
  if (spec.w.encoding == Encoding::kSigned) of_plane[planes_ - 1] *= -1;
  for (int slot = 0; slot < 4; ++slot) {
    const uint8_t weight = static_cast<uint8_t>(of_plane[slot % planes_]);
    slot_weights_ =
        static_cast<int32_t>(static_cast<uint32_t>(slot_weights_) | uint32_t{weight} << (8 * slot));
  }
}

void LutKernel::PackWeights(const ConvSpec& spec) {
  const size_t group_out = static_cast<size_t>(geometry_.GroupOut());
  const size_t unit_bytes = window_.segments * window_.lookups * window_.index_bytes;
  std::vector<size_t> offsets;
  size_t bytes = 0;
  for (size_t group = 0; group < static_cast<size_t>(geometry_.group); ++group) {
    for (size_t first = 0; first < group_out;) {
      LutPanel panel{};
      panel.channel = group * group_out + first;
      panel.count = std::min(engine_.max_units * kLutUnit, group_out - first);
      panel.group = group;
      panel.units = DivideUp(panel.count, kLutUnit);
      panels_.push_back(panel);
      offsets.push_back(bytes);
      bytes += unit_bytes * panel.units;
      first += panel.count;
    }
  }
  AlignedBytes packed(bytes);
  for (size_t p = 0; p < panels_.size(); ++p) PackPanel(spec, panels_[p], packed.data() + offsets[p]);
  weights_ = ShareWeights(std::move(packed));
  for (size_t p = 0; p < panels_.size(); ++p) panels_[p].indices = weights_->data() + offsets[p];
  const size_t chunks =
      std::max(DivideUp(bytes, kChunkBytes), DivideUp(panels_.size() * PartialBytes(), kPartialBytes));
  panels_per_chunk_ = DivideUp(panels_.size(), chunks);
}

void LutKernel::PackPanel(const ConvSpec& spec, const LutPanel& panel, uint8_t* out) const {
  const size_t taps = static_cast<size_t>(geometry_.Taps()), in = static_cast<size_t>(geometry_.GroupIn());
  const size_t planes = static_cast<size_t>(planes_), lanes = engine_.vector_tables;
  const size_t lookups = window_.segments * window_.lookups / taps;  // of a tap
  const bool permute = engine_.layout == LutLayout::kPermute;
  for (size_t tap = 0; tap < taps; ++tap) {
    // Bit j: the bit of a plane in the weight of the table's channel j.
    const auto index = [&](size_t channel, size_t table, size_t plane) {
      if (channel >= panel.count) return 0u;
      const uint8_t* codes = spec.weights.data() + ((panel.channel + channel) * taps + tap) * in;
      const size_t first = FirstChannelOf(table, in), end = std::min(first + kTableChannels, in);
      uint32_t bits = 0;
      for (size_t i = first; i < end; ++i) bits |= (codes[i] >> plane & 1u) << (i - first);
      return bits;
    };
    for (size_t l = 0; l < lookups; ++l) {
      for (size_t unit = 0; unit < panel.units * kLutUnit; unit += kLutUnit) {
        for (size_t byte = 0; byte < window_.index_bytes; ++byte, ++out) {
          if (permute) {
            const size_t slot = byte % 4, table = (l * 4 + slot) / planes;
            const uint32_t bits = index(unit + byte / 4, table, slot % planes);
            *out = static_cast<uint8_t>(table % kQuadTables * kTableEntries + bits);
          } else {
            const size_t lane = byte / kTableEntries, half = lane / lanes;
            const size_t channel = (half * kTableEntries + byte % kTableEntries) / planes;
            *out = static_cast<uint8_t>(index(unit + channel, l * lanes + lane % lanes, byte % planes));
          }
        }
      }
    }
  }
}

Workspace LutKernel::Plan(const BlockGrid& grid) const {
  const size_t groups = static_cast<size_t>(geometry_.group);
  Workspace ws;
  ScratchLayout scratch;
  ws.ring = scratch.Take(grid.RingPixels() * window_.pitch);
  ws.tags = scratch.Take(static_cast<size_t>(grid.ring_rows) * sizeof(int64_t));
  ws.pad_row = scratch.Take(static_cast<size_t>(geometry_.kernel_w) * window_.pitch);
  ws.rows = scratch.Take(grid.Pixels() * window_.segments * sizeof(void*));
  if (NeedsSums()) {
    ws.ring_sums = scratch.Take(grid.RingPixels() * groups * sizeof(int32_t));
    ws.row_sums = scratch.Take(grid.Pixels() * groups * sizeof(int32_t));
  }
  if (depths_.size() > 1) ws.partial = scratch.Take(panels_per_chunk_ * PartialBytes());
  ws.bytes = scratch.bytes();
  return ws;
}

// The tables of a row of taps outside the image, whose channels all are pad_value_.
void LutKernel::BuildPadding(uint8_t* tables) const {
  const size_t in = static_cast<size_t>(geometry_.GroupIn());
  uint8_t codes[kQuadChannels];
  std::memset(codes, pad_value_, sizeof(codes));
  for (size_t channel = 0; channel < in; channel += kQuadChannels) {
    LutBuild build{};
    build.x = codes;
    build.x_end = codes + sizeof(codes);
    build.pixels = build.groups = 1;
    build.group_channels = std::min(in - channel, kQuadChannels);
    build.tables = tables + channel / kQuadChannels * kQuadBytes;
    engine_.build(build);
  }
  const size_t copies = static_cast<size_t>(geometry_.group * geometry_.kernel_w);
  for (size_t i = 1; i < copies; ++i)
    std::memcpy(tables + i * window_.group_pitch, tables, window_.group_pitch);
}

// Builds the tables of the input rows that a block needs and that the ring does not hold yet. Column j of the
// ring is input column x * stride - pad + j * step; columns outside the image hold padding.
void LutKernel::BuildRows(const ConvArgs& args, const ConvShape& shape, const BlockGrid& grid,
                          const BlockPlace& place, const Scratch& scratch) const {
  const ConvGeometry& g = geometry_;
  const uint8_t* x = static_cast<const uint8_t*>(args.x);
  const int64_t first = place.x * g.stride_w - g.pad_left, step = grid.column_step;
  const int64_t wanted = grid.RingColumns(g, place.columns);
  // Columns [begin, end) of the ring are in the image.
  const int64_t begin = first >= 0 ? 0 : std::min(wanted, (-first + step - 1) / step);
  const int64_t end =
      first >= shape.in_w ? begin : std::clamp((shape.in_w - 1 - first) / step + 1, begin, wanted);
  const size_t ring_pixels = grid.RingPixels();
  LutBuild build{};
  build.x_end = x + shape.batch * shape.in_h * shape.in_w * g.in_channels;
  build.pixels = static_cast<size_t>(end - begin);
  build.x_pitch = static_cast<size_t>(step * g.in_channels);
  build.groups = static_cast<size_t>(g.group);
  build.group_channels = static_cast<size_t>(g.GroupIn());
  build.pitch = window_.pitch;
  build.group_pitch = window_.group_pitch;
  build.sums_pitch = ring_pixels;
  build.adjust = adjust_;
  build.shift = shift_;
  for (int64_t r = 0; r < place.rows; ++r) {
    for (int64_t ky = 0; ky < g.kernel_h; ++ky) {
      const int64_t iy = InputRow(shape, place.y + r, ky);
      const int64_t slot = iy % grid.ring_rows;
      if (iy < 0 || scratch.tags[slot] == iy) continue;
      scratch.tags[slot] = iy;
      const size_t row = static_cast<size_t>(slot * grid.ring_columns);
      const auto pad = [&](int64_t from, int64_t to) {
        for (int64_t c = from; c < to; ++c) {
          const size_t pixel = row + static_cast<size_t>(c);
          std::memcpy(scratch.ring + pixel * window_.pitch, scratch.pad_row, window_.pitch);
          if (!NeedsSums()) continue;
          for (size_t group = 0; group < build.groups; ++group)
            scratch.ring_sums[group * ring_pixels + pixel] = PaddingSum();
        }
      };
      pad(0, begin);
      pad(end, wanted);
      if (begin == end) continue;
      const size_t pixel = row + static_cast<size_t>(begin);
      build.x = x + ((place.image * shape.in_h + iy) * shape.in_w + first + begin * step) * g.in_channels;
      build.tables = scratch.ring + pixel * window_.pitch;
      if (NeedsSums()) build.sums = scratch.ring_sums + pixel;
      engine_.build(build);
    }
  }
}

void LutKernel::PointAtTables(const ConvShape& shape, const BlockGrid& grid, const BlockPlace& place,
                              const Scratch& scratch) const {
  const ConvGeometry& g = geometry_;
  const size_t advance = static_cast<size_t>(g.stride_w / grid.column_step) * window_.pitch;
  const uint8_t** out = scratch.rows;
  for (int64_t ky = 0; ky < g.kernel_h; ++ky) {
    for (int64_t kx = 0; kx < (window_.merged ? 1 : g.kernel_w); ++kx, out += grid.Pixels()) {
      const uint8_t** to = out;
      for (int64_t r = 0; r < place.rows; ++r, to += place.columns) {
        const int64_t iy = InputRow(shape, place.y + r, ky);
        if (iy < 0) {
          std::fill_n(to, place.columns, scratch.pad_row);
          continue;
        }
        const int64_t pixel = iy % grid.ring_rows * grid.ring_columns + kx * g.dilation_w;
        const uint8_t* from = scratch.ring + static_cast<size_t>(pixel) * window_.pitch;
        for (int64_t c = 0; c < place.columns; ++c, from += advance) to[c] = from;
      }
    }
  }
}

// The sums of the codes under each window, from those of the pixels.
void LutKernel::SumRows(const ConvShape& shape, const BlockGrid& grid, const BlockPlace& place,
                        const Scratch& scratch) const {
  const ConvGeometry& g = geometry_;
  const int64_t advance = g.stride_w / grid.column_step;
  for (size_t group = 0; group < static_cast<size_t>(g.group); ++group) {
    int32_t* sums = scratch.row_sums + group * grid.Pixels();
    std::fill_n(sums, place.Pixels(), 0);
    for (int64_t r = 0; r < place.rows; ++r, sums += place.columns) {
      for (int64_t ky = 0; ky < g.kernel_h; ++ky) {
        const int64_t iy = InputRow(shape, place.y + r, ky);
        if (iy < 0) {
          for (int64_t c = 0; c < place.columns; ++c)
            sums[c] += static_cast<int32_t>(g.kernel_w) * PaddingSum();
          continue;
        }
        const size_t row = static_cast<size_t>(iy % grid.ring_rows * grid.ring_columns);
        const int32_t* from = scratch.ring_sums + group * grid.RingPixels() + row;
        for (int64_t kx = 0; kx < g.kernel_w; ++kx, from += g.dilation_w) {
          if (advance == 1) {  // what a compiler turns into vectors
            for (int64_t c = 0; c < place.columns; ++c) sums[c] += from[c];
          } else {
            for (int64_t c = 0; c < place.columns; ++c) sums[c] += from[c * advance];
          }
        }
      }
    }
  }
}

void LutKernel::Run(const ConvArgs& args, ThreadPool& pool) const {
  const ConvShape shape = Flatten(geometry_, args.shape);
  if (shape.OutPixels() == 0) return;
  const BlockGrid grid = Grid(shape);
  const Workspace ws = Plan(grid);

  // A task that begins in the middle of an image builds the tables of rows that its neighbour builds too, one
  // that computes a part of the panels builds those of another: tasks are so large that this costs little.
  const double pixels = static_cast<double>(shape.OutPixels());
  const double per_pixel = LookupCycles(engine_, geometry_, window_, per_flush_ == 1);
  const double build = static_cast<double>(window_.pitch / kQuadBytes) * kBuildCycles *
                       static_cast<double>(grid.ring_columns) / static_cast<double>(grid.columns);
  const double cycles = pixels * per_pixel, blocks = static_cast<double>(grid.blocks);
  const double overlap =
      static_cast<double>(grid.ring_rows) - static_cast<double>(grid.rows * geometry_.stride_h);
  const double repeated = std::max(overlap, 0.0) * build * static_cast<double>(grid.columns);
  const size_t pixel_tasks =
      static_cast<size_t>(std::clamp(cycles / std::max(kTaskCycles, repeated / kRebuilt), 1.0, blocks));
  const double block_tables = build * pixels / blocks;
  const double panel_cycles = std::max(kTaskCycles, block_tables / kRebuilt);
  const auto panel_limit =
      static_cast<double>(std::min(DivideUp(FewTasks(pool), pixel_tasks), panels_.size()));
  const size_t panel_tasks =
      static_cast<size_t>(std::clamp(cycles / blocks / panel_cycles, 1.0, panel_limit));

  const TaskSplit split = {grid.blocks, pixel_tasks, panels_.size(), panel_tasks};
  pool.ParallelFor(split.tasks(), [&](size_t task) {
    const auto [first_block, end_block, first_panel, end_panel] = split[task];

    uint8_t* memory = ThreadScratch(ws.bytes);
    const Scratch scratch = {memory + ws.ring,
                             reinterpret_cast<int32_t*>(memory + ws.ring_sums),
                             reinterpret_cast<int64_t*>(memory + ws.tags),
                             memory + ws.pad_row,
                             reinterpret_cast<const uint8_t**>(memory + ws.rows),
                             reinterpret_cast<int32_t*>(memory + ws.row_sums)};
    BuildPadding(scratch.pad_row);

    LutBlock block{};
    block.rows = scratch.rows;
    block.pitch = grid.Pixels();
    block.zero_row = pad_value_ == 0 ? scratch.pad_row : nullptr;
    block.group_pitch = window_.group_pitch;
    block.planes = planes_;
    block.per_flush = per_flush_;
    block.slot_weights = slot_weights_;
    block.depths = depths_.data();
    block.depth_count = depths_.size();
    block.lookups = window_.lookups;
    block.panels = panels_.data() + first_panel;
    block.panel_count = end_panel - first_panel;
    block.panels_per_chunk = panels_per_chunk_;
    block.bias = bias_.data();
    block.partial = reinterpret_cast<int32_t*>(memory + ws.partial);
    block.output = {&epilogue_.view(), 0, 1, static_cast<const uint8_t*>(args.residual), args.y};
    size_t ring_of = SIZE_MAX;  // the run of row blocks whose tables the ring holds
    for (size_t i = first_block; i < end_block; ++i) {
      const size_t row_block = i % grid.row_blocks, run = i / grid.row_blocks;
      BlockPlace place{};
      place.image = static_cast<int64_t>(run / grid.column_blocks);
      place.y = static_cast<int64_t>(row_block) * grid.rows;
      place.x = static_cast<int64_t>(run % grid.column_blocks) * grid.columns;
      place.rows = std::min(grid.rows, shape.out_h - place.y);
      place.columns = std::min(grid.columns, shape.out_w - place.x);
      if (run != ring_of) std::fill_n(scratch.tags, grid.ring_rows, int64_t{-1});
      ring_of = run;
      BuildRows(args, shape, grid, place, scratch);
      PointAtTables(shape, grid, place, scratch);
      block.output.first_pixel =
          static_cast<size_t>((place.image * shape.out_h + place.y) * shape.out_w + place.x);
      block.pixels = static_cast<size_t>(place.Pixels());
      if (NeedsSums()) {
        SumRows(shape, grid, place, scratch);
        block.row_sums = scratch.row_sums;
        block.row_sum_weight = uniform_row_sums_ ? nullptr : row_sum_weight_.data();
      }
      engine_.run(block);
    }
  });
}

template <const LutEngine& kEngine>
std::string Refuse(const ConvSpec& spec) {
  const ConvGeometry& g = spec.geometry;
  if (g.IsDepthwise()) return "depthwise: a table serves four channels of one output";
  const WindowLayout window(kEngine, g, spec.w.bits);
  // In doubles: a large dilation may leave int64 behind.
  const double height = static_cast<double>(g.kernel_h - 1) * static_cast<double>(g.dilation_h) + 1;
  const double width =
      g.kernel_w == 1 ? 1 : static_cast<double>(g.kernel_w - 1) * static_cast<double>(g.dilation_w) + 1;
  const double tables =
      (height * width + static_cast<double>(g.kernel_w)) * static_cast<double>(window.pitch);
  if (tables > static_cast<double>(kRingBytes)) return "the tables of one window exceed the workspace";
  if (window.segments * sizeof(void*) > kPointerBytes ||
      static_cast<size_t>(g.group) * sizeof(int32_t) > kRowSumBytes)
    return "kernel window or groups exceed the workspace";
  return {};
}

// Measured on Zen 5: what a call takes beside its tiles; setting up the pointers to a row of taps; and how
// many pixels a tile takes as long as where it has fewer, waiting for its weights.
constexpr double kCallCycles = 580, kPointerCycles = 10;
constexpr int64_t kLeastPixels = 4;
// A byte of indices costs this inside a network, where other layers have taken its place in L2 (Zen 5: w1a2 layers of
// ResNet-50 on 7x7 images take 1.7 times as long there as by themselves; bit planes are half as many bytes).
constexpr double kIndexByteCycles = 0.2;

template <const LutEngine& kEngine>
double Cost(const ConvSpec& spec, const ConvShape& shape) {
  const ConvGeometry& g = spec.geometry;
  const WindowLayout window(kEngine, g, spec.w.bits);
  const size_t units = static_cast<size_t>(g.group) * DivideUp(static_cast<size_t>(g.GroupOut()), kLutUnit);
  const int64_t inputs = std::min(g.stride_h, g.kernel_h) * std::min(g.stride_w, g.kernel_w);  // per output
  const int64_t pixels = shape.OutPixels(), tile = static_cast<int64_t>(kEngine.max_pixels),
                rest = pixels % tile;
  const int64_t computed = pixels - rest + (rest == 0 ? 0 : std::max(rest, std::min(kLeastPixels, tile / 2)));
  const size_t index_bytes = units * window.segments * window.lookups * window.index_bytes;
  return FewBitCycles(kCallCycles + static_cast<double>(index_bytes) * kIndexByteCycles +
                      static_cast<double>(computed) * LookupCycles(kEngine, g, window, spec.x.bits >= 6) +
                      static_cast<double>(pixels) * (static_cast<double>(units) * kEngine.unit_cycles +
                                                     static_cast<double>(window.pitch / kQuadBytes) *
                                                         static_cast<double>(inputs) * kBuildCycles +
                                                     static_cast<double>(g.kernel_h) * kPointerCycles));
}

template <const LutEngine& kEngine>
std::unique_ptr<ConvKernel> Create(const ConvSpec& spec) {
  return std::make_unique<LutKernel>(spec, kEngine);
}

template <const LutEngine& kEngine>
KernelRow Row(const char* name, Isa isa, const char* note) {
  return {{name, "conv", "lut", isa, kMaxXBits, kMaxWBits, note},
          &Refuse<kEngine>,
          &Cost<kEngine>,
          &Create<kEngine>};
}

}  // namespace

std::span<const KernelRow> LutRows() {
  static const KernelRow kRows[] = {
      Row<kLutAvx2>("lut_u6w2_4x16_avx2", Isa::kAvx2,
                    "1- and 2-bit weights: vpshufb in tables of activation sums"),
      Row<kLutAvx512Vnni>("lut_u6w2_8x16_avx512vnni", Isa::kAvx512Vnni,
                          "1- and 2-bit weights: vpshufb in tables of activation sums"),
      Row<kLutAvx512Popcnt>("lut_u6w2_8x32_avx512popcnt", Isa::kAvx512Popcnt,
                            "1- and 2-bit weights: vpermb in tables of activation sums"),
      {{"lut_u2w2_4x128_avx512popcnt", "conv", "lut", Isa::kAvx512Popcnt, 2, kFewWeightBits,
        "activations and weights of 2 bits: vpermb in a table of all sums of three products"},
       [](const ConvSpec& spec) { return BitserialRefusal(spec, kLutJointAvx512Popcnt); },
       [](const ConvSpec& spec, const ConvShape& shape) {
         return FewBitCycles(BitserialCycles(spec, shape, kLutJointAvx512Popcnt));
       },
       [](const ConvSpec& spec) { return MakeBitserialKernel(spec, kLutJointAvx512Popcnt); }},
  };
  return kRows;
}

}  // namespace lowbit
