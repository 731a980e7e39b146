// The portable half of the look-up kernels: packing, addressing and the split
// into tasks. They multiply 1- and 2-bit weights by activations of up to 6 bits
// without a multiplication: four channels of a pixel have only 16 sums of
// subsets, and the bits of four weights of a channel say which one is meant.
//
// Algebra. Let u = x + shift be the unsigned code of an activation (shift =
// 2^(bits-1) for signed codes), zu = zx + shift, and let a weight be v = sum
// over planes p of m_p b_p, + o[c], with bits b_p:
//
//     unsigned  m = 1, 2                o = -zw[c]
//     signed    m = 1, -2 (or -1)       o = -zw[c]
//     bipolar   m = 2                   o = -1
//
//     sum (u - zu) v  =  sum over p of m_p * (sum u b_p)  +  o[c] * (sum u)  -
//     zu * (sum v)
//                              ^ tables                      ^ row sums ^
//                              constant: in the bias
//
// Bipolar activations are 2q - 1, so u = 2q and zu = 1, and a tap in the
// padding, which counts 0, has u = 1. All taps in the padding have u = zu, for
// which the identity above holds too.
//
// Overflow. An entry of a table is at most 4 U, U the largest u: 2^bits - 1,
// or 2. So floor(255 / (4 U)) look-ups fit a byte: one for 6 bits, two for 5,
// four and more up to 4 bits. Codes outside their range wrap: wrong numbers,
// but an index never depends on a code.
//
// Addressing. The tables of a pixel, 4 bytes per channel, are built once and
// serve all its taps and all output channels. A block of output pixels, some
// rows or a part of one, needs the tables of a few input rows; they lie in a
// ring that the blocks of a task, one below the other, share.
#include "kernels/x86/lut.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "core/packed_weights.h"
#include "kernels/x86/epilogue_tables.h"
#include "kernels/x86/lut_block.h"
#include "kernels/x86/workspace.h"

namespace lowbit {
namespace {

constexpr int kMaxXBits = 6, kMaxWBits = 2;
// A block's tables of input rows, pointers and row sums; together with the
// partial sums of a chunk of panels they stay within L2 and kMaxWorkspaceBytes.
constexpr size_t kRingBytes = 256 * 1024;
constexpr size_t kPointerBytes = 96 * 1024;
constexpr size_t kRowSumBytes = 32 * 1024;
constexpr size_t kPartialBytes = 64 * 1024;
// Tables of a register tile that stay in L1 while the panels pass.
constexpr size_t kDepthBytes = 32 * 1024;
// Indices that stay in L2 beside the tables while the tiles of a block pass.
constexpr size_t kChunkBytes = 512 * 1024;
// Few enough columns of output that the ring of one row of them stays in L1
// between building and looking up, but not fewer than this, where the columns
// that neighbours share would cost more.
constexpr size_t kCachedRingBytes = 32 * 1024;
constexpr int64_t kMinColumns = 16;
// A block has about this many pixels where rows are short, so that its last
// tile is rarely a small one.
constexpr int64_t kBlockPixels = 48;

// Largest unsigned code that a table sums.
int32_t LargestCode(const OperandType& x) { return x.encoding == Encoding::kBipolar ? 2 : (1 << x.bits) - 1; }

// The layout of the tables of one pixel, and how many look-ups a segment (a
// tap) of the window takes.
struct TableLayout {
  size_t group_pitch = 0, sums_offset = 0, pitch = 0;
  size_t lookups = 0,
         index_bytes = 0;  // of a unit of output channels, per look-up

  TableLayout(const LutEngine& engine, const ConvGeometry& g, int planes, bool sums) {
    const size_t channels = static_cast<size_t>(g.GroupIn()), groups = static_cast<size_t>(g.group);
    const size_t quads = DivideUp(channels, kQuadChannels);
    group_pitch = quads * kQuadBytes;
    pitch = groups * group_pitch;
    if (sums) {
      sums_offset = pitch;
      pitch += RoundUp(groups * sizeof(int32_t), kQuadBytes);
    }
    const size_t tables = DivideUp(channels, kTableChannels);
    const size_t bits = static_cast<size_t>(planes);
    if (engine.layout == LutLayout::kPermute) {
      lookups = DivideUp(tables * bits, kQuadTables);
      index_bytes = kQuadTables * kTableEntries;
    } else {
      lookups = DivideUp(tables, engine.vector_tables);
      index_bytes = engine.vector_tables * kTableEntries * bits;
    }
  }
};

// How the output pixels of one shape are cut into blocks, and what their tables
// need.
struct BlockGrid {
  size_t blocks = 0, row_blocks = 0, column_blocks = 0;
  int64_t rows = 0, columns = 0;            // of output, per block
  int64_t ring_rows = 0, ring_columns = 0;  // of input with tables
  int64_t column_step = 1;                  // in input columns, from one column of the ring to the next
  size_t Pixels() const { return static_cast<size_t>(rows * columns); }
  size_t RingPixels() const { return static_cast<size_t>(ring_rows * ring_columns); }
};

BlockGrid PlanBlocks(const ConvGeometry& g, const ConvShape& s, size_t table_pitch, size_t tile_pixels) {
  BlockGrid grid;
  if (s.OutPixels() == 0) return grid;
  const auto ring_rows = [&](int64_t rows) {
    return (rows - 1) * g.stride_h + (g.kernel_h - 1) * g.dilation_h + 1;
  };
  // A kernel one column wide reads every stride-th column alone.
  grid.column_step = g.kernel_w == 1 ? g.stride_w : 1;
  const auto ring_columns = [&](int64_t columns) {
    return ((columns - 1) * g.stride_w + (g.kernel_w - 1) * g.dilation_w) / grid.column_step + 1;
  };
  const auto fits = [&](int64_t rows, int64_t columns) {
    const size_t pixels = static_cast<size_t>(rows * columns);
    return (static_cast<size_t>(ring_rows(rows) * ring_columns(columns)) + 1) * table_pitch <= kRingBytes &&
           pixels * static_cast<size_t>(g.Taps()) * sizeof(void*) <= kPointerBytes &&
           pixels * static_cast<size_t>(g.group) * sizeof(int32_t) <= kRowSumBytes;
  };
  const int64_t tile = static_cast<int64_t>(tile_pixels);
  const auto cached = [&](int64_t columns) {
    return static_cast<size_t>(ring_rows(1) * ring_columns(columns)) * table_pitch <= kCachedRingBytes;
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

// How many look-ups 16-bit sums hold: of bytes up to 4 U, or of two
// neighbouring ones weighted by up to 1 and 2.
size_t LookupsPerWord(const ConvSpec& spec) {
  const int32_t largest = static_cast<int32_t>(kTableChannels) * LargestCode(spec.x);
  return static_cast<size_t>(spec.w.bits == 1 ? 65535 / largest : 32767 / (3 * largest));
}

// Cuts the window into runs whose tables, for a tile, stay in L1 and whose sums
// fit 16 bits where the engine has such.
std::vector<LutDepth> PlanDepths(const ConvSpec& spec, const LutEngine& engine, const TableLayout& tables) {
  const ConvGeometry& g = spec.geometry;
  const size_t kernel_w = static_cast<size_t>(g.kernel_w), taps = static_cast<size_t>(g.Taps());
  const size_t shared = std::min(static_cast<size_t>(g.stride_w), kernel_w);
  const size_t kernel_row = ((engine.max_pixels - 1) * shared + kernel_w) * tables.group_pitch;
  const size_t tap = engine.max_pixels * tables.group_pitch;
  // Parts begin at whole quads and at steps of four look-ups.
  const size_t step = 4 * static_cast<size_t>(spec.w.bits);
  const size_t most =
      engine.layout == LutLayout::kShuffle ? LookupsPerWord(spec) / step * step : SIZE_MAX / 2;
  size_t segments = 1, parts = 1;
  if (kernel_row <= kDepthBytes) {
    segments = std::min(kDepthBytes / kernel_row * kernel_w, taps);
  } else if (tap <= kDepthBytes) {
    segments = kDepthBytes / tap;
  } else {
    parts = DivideUp(tap, kDepthBytes);
  }
  segments = std::clamp(most / tables.lookups, size_t{1}, segments);
  parts = std::max(parts, DivideUp(tables.lookups, most));
  segments = DivideUp(taps, DivideUp(taps, segments));
  const size_t lookups = RoundUp(DivideUp(tables.lookups, parts), step);
  std::vector<LutDepth> depths;
  for (size_t s = 0; s < taps; s += segments) {
    for (size_t l = 0; l < tables.lookups; l += lookups) {
      depths.push_back({s, std::min(segments, taps - s), l, std::min(lookups, tables.lookups - l)});
    }
  }
  return depths;
}

struct Workspace {
  size_t ring = 0, tags = 0, pad_row = 0, rows = 0, row_sums = 0, partial = 0, bytes = 0;
};

// Work of one task, about 2 us at 4 GHz.
constexpr double kTaskCycles = 8e3;
// Building the tables of sixteen channels, measured on Zen 5.
constexpr double kBuildCycles = 3.0;
// The share of a task that may be spent on tables that another task builds too.
constexpr double kRebuilt = 0.04;

// Per output pixel.
double LookupCycles(const LutEngine& engine, const ConvGeometry& g, const TableLayout& tables) {
  const size_t units = static_cast<size_t>(g.group) * DivideUp(static_cast<size_t>(g.GroupOut()), kLutUnit);
  const size_t vectors = tables.index_bytes / (engine.vector_tables * kTableEntries);
  return static_cast<double>(static_cast<size_t>(g.Taps()) * tables.lookups * vectors * units) /
         engine.lookups_per_cycle;
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
    return PlanBlocks(geometry_, shape, tables_.pitch, engine_.max_pixels);
  }
  Workspace Plan(const BlockGrid& grid) const;
  // Accumulators of one tile.
  size_t PartialBytes() const { return engine_.max_pixels * engine_.max_units * kLutUnit * sizeof(int32_t); }
  void LoadChannels(const ConvSpec& spec);
  void PackWeights(const ConvSpec& spec);
  void PackPanel(const ConvSpec& spec, const LutPanel& panel, uint8_t* out) const;
  void PadRow(uint8_t* tables) const;
  void BuildRows(const ConvArgs& args, const ConvShape& shape, const BlockGrid& grid, int64_t image,
                 int64_t oy, int64_t ox, int64_t rows, int64_t columns, uint8_t* ring, int64_t* tags) const;
  void PointAtTables(const ConvShape& shape, const BlockGrid& grid, int64_t oy, int64_t ox, int64_t rows,
                     int64_t columns, const uint8_t* ring, const uint8_t* pad_row, const uint8_t** out) const;
  void SumRows(const LutBlock& block, int32_t* sums) const;

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
  TableLayout tables_;
  std::vector<LutDepth> depths_;
  PackedWeights weights_;
  std::vector<LutPanel> panels_;
  size_t panels_per_chunk_ = 1;
};

LutKernel::LutKernel(const ConvSpec& spec, const LutEngine& engine)
    : geometry_(spec.geometry),
      engine_(engine),
      planes_(spec.w.bits),
      epilogue_(spec.epilogue, static_cast<size_t>(spec.geometry.out_channels)),
      tables_(engine, spec.geometry, spec.w.bits, false) {
  if (spec.x.encoding == Encoding::kSigned) {
    adjust_ = LutAdjust::kShift;
    shift_ = static_cast<uint8_t>(1 << (spec.x.bits - 1));
  }
  if (spec.x.encoding == Encoding::kBipolar) adjust_ = LutAdjust::kDouble;
  pad_value_ = static_cast<uint8_t>(spec.x.encoding == Encoding::kBipolar ? 1 : spec.x_zero_point + shift_);
  const int32_t fit = 255 / (static_cast<int32_t>(kTableChannels) * LargestCode(spec.x));
  per_flush_ = fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
  LoadChannels(spec);
  tables_ = TableLayout(engine_, geometry_, planes_, !row_sum_weight_.empty());
  depths_ = PlanDepths(spec, engine_, tables_);
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
  const size_t unit_bytes = static_cast<size_t>(geometry_.Taps()) * tables_.lookups * tables_.index_bytes;
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
  const size_t planes = static_cast<size_t>(planes_);
  const bool permute = engine_.layout == LutLayout::kPermute;
  for (size_t tap = 0; tap < taps; ++tap) {
    // Bit j of the index: the bit of plane `plane` in the weight of channel j
    // of `table`.
    const auto index = [&](size_t channel, size_t table, size_t plane) {
      if (channel >= panel.count) return 0u;
      const uint8_t* codes = spec.weights.data() + ((panel.channel + channel) * taps + tap) * in;
      const size_t first = FirstChannelOf(table, in), end = std::min(first + kTableChannels, in);
      uint32_t bits = 0;
      for (size_t i = first; i < end; ++i) bits |= (codes[i] >> plane & 1u) << (i - first);
      return bits;
    };
    for (size_t l = 0; l < tables_.lookups; ++l) {
      for (size_t unit = 0; unit < panel.units; ++unit) {
        if (permute) {
          for (size_t byte = 0; byte < tables_.index_bytes; ++byte) {
            const size_t channel = byte / 4, slot = byte % 4, table = (l * 4 + slot) / planes;
            const uint32_t bits = index(unit * kLutUnit + channel, table, slot % planes);
            *out++ = static_cast<uint8_t>(table % kQuadTables * kTableEntries + bits);
          }
        } else {
          for (size_t byte = 0; byte < tables_.index_bytes; ++byte) {
            const size_t lane = byte / kTableEntries, part = lane / engine_.vector_tables;
            const size_t channel = (part * kTableEntries + byte % kTableEntries) / planes;
            const size_t table = l * engine_.vector_tables + lane % engine_.vector_tables;
            *out++ = static_cast<uint8_t>(index(unit * kLutUnit + channel, table, byte % planes));
          }
        }
      }
    }
  }
}

Workspace LutKernel::Plan(const BlockGrid& grid) const {
  Workspace ws;
  ScratchLayout scratch;
  ws.ring = scratch.Take(grid.RingPixels() * tables_.pitch);
  ws.tags = scratch.Take(static_cast<size_t>(grid.ring_rows) * sizeof(int64_t));
  ws.pad_row = scratch.Take(tables_.pitch + kQuadChannels);
  ws.rows = scratch.Take(grid.Pixels() * static_cast<size_t>(geometry_.Taps()) * sizeof(void*));
  if (!row_sum_weight_.empty())
    ws.row_sums = scratch.Take(grid.Pixels() * static_cast<size_t>(geometry_.group) * sizeof(int32_t));
  if (depths_.size() > 1) ws.partial = scratch.Take(panels_per_chunk_ * PartialBytes());
  ws.bytes = scratch.bytes();
  return ws;
}

// The tables of a tap outside the image: every channel is pad_value_.
void LutKernel::PadRow(uint8_t* tables) const {
  const size_t in = static_cast<size_t>(geometry_.GroupIn());
  uint8_t codes[kQuadChannels];
  std::memset(codes, pad_value_, sizeof(codes));
  // One quad of one group at a time; all whole quads are alike.
  for (size_t channel = 0; channel < in; channel += kQuadChannels) {
    LutBuild build{};
    build.x = codes;
    build.x_end = codes + sizeof(codes);
    build.pixels = build.groups = 1;
    build.group_channels = std::min(in - channel, kQuadChannels);
    build.tables = tables + channel / kQuadChannels * kQuadBytes;
    engine_.build(build);
  }
  for (int64_t group = 1; group < geometry_.group; ++group)
    std::memcpy(tables + static_cast<size_t>(group) * tables_.group_pitch, tables, tables_.group_pitch);
  if (tables_.sums_offset == 0) return;
  int32_t* sums = reinterpret_cast<int32_t*>(tables + tables_.sums_offset);
  std::fill_n(sums, geometry_.group, static_cast<int32_t>(in) * pad_value_);
}

// Builds the tables of the input rows that output rows [oy, oy + rows) need and
// that the ring does not hold yet. tags[slot] is the row in a slot, -1 for
// none. Column j of the ring is input column ox * stride - pad + j * step.
void LutKernel::BuildRows(const ConvArgs& args, const ConvShape& shape, const BlockGrid& grid, int64_t image,
                          int64_t oy, int64_t ox, int64_t rows, int64_t columns, uint8_t* ring,
                          int64_t* tags) const {
  const ConvGeometry& g = geometry_;
  const uint8_t* x = static_cast<const uint8_t*>(args.x);
  const int64_t first = ox * g.stride_w - g.pad_left, step = grid.column_step;
  const int64_t wanted = ((columns - 1) * g.stride_w + (g.kernel_w - 1) * g.dilation_w) / step + 1;
  // Columns [begin, end) of the ring are in the image.
  const int64_t begin = first >= 0 ? 0 : std::min(wanted, (-first + step - 1) / step);
  const int64_t end =
      first >= shape.in_w ? begin : std::clamp((shape.in_w - 1 - first) / step + 1, begin, wanted);
  if (begin == end) return;
  LutBuild build{};
  build.x_end = x + shape.batch * shape.in_h * shape.in_w * g.in_channels;
  build.pixels = static_cast<size_t>(end - begin);
  build.x_pitch = static_cast<size_t>(step * g.in_channels);
  build.groups = static_cast<size_t>(g.group);
  build.group_channels = static_cast<size_t>(g.GroupIn());
  build.pitch = tables_.pitch;
  build.group_pitch = tables_.group_pitch;
  build.sums_offset = tables_.sums_offset;
  build.adjust = adjust_;
  build.shift = shift_;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t ky = 0; ky < g.kernel_h; ++ky) {
      const int64_t iy = (oy + r) * g.stride_h - g.pad_top + ky * g.dilation_h;
      if (iy < 0 || iy >= shape.in_h) continue;
      const int64_t slot = iy % grid.ring_rows;
      if (tags[slot] == iy) continue;
      tags[slot] = iy;
      build.x = x + ((image * shape.in_h + iy) * shape.in_w + first + begin * step) * g.in_channels;
      build.tables = ring + static_cast<size_t>(slot * grid.ring_columns + begin) * tables_.pitch;
      engine_.build(build);
    }
  }
}

void LutKernel::PointAtTables(const ConvShape& shape, const BlockGrid& grid, int64_t oy, int64_t ox,
                              int64_t rows, int64_t columns, const uint8_t* ring, const uint8_t* pad_row,
                              const uint8_t** out) const {
  const ConvGeometry& g = geometry_;
  const int64_t first = ox * g.stride_w - g.pad_left;
  const int64_t advance = g.stride_w / grid.column_step * static_cast<int64_t>(tables_.pitch);
  for (int64_t ky = 0; ky < g.kernel_h; ++ky) {
    for (int64_t kx = 0; kx < g.kernel_w; ++kx, out += grid.Pixels()) {
      const uint8_t** to = out;
      // The columns whose input column lies in the image.
      const int64_t ix = first + kx * g.dilation_w;
      const int64_t begin = ix >= 0 ? 0 : std::min(columns, (-ix + g.stride_w - 1) / g.stride_w);
      const int64_t end =
          ix >= shape.in_w ? begin : std::clamp((shape.in_w - 1 - ix) / g.stride_w + 1, begin, columns);
      for (int64_t r = 0; r < rows; ++r, to += columns) {
        const int64_t iy = (oy + r) * g.stride_h - g.pad_top + ky * g.dilation_h;
        if (iy < 0 || iy >= shape.in_h) {
          std::fill_n(to, columns, pad_row);
          continue;
        }
        std::fill(to, to + begin, pad_row);
        const int64_t column = (kx * g.dilation_w + begin * g.stride_w) / grid.column_step;
        const uint8_t* from =
            ring + static_cast<size_t>(iy % grid.ring_rows * grid.ring_columns + column) * tables_.pitch;
        for (int64_t c = begin; c < end; ++c, from += advance) to[c] = from;
        std::fill(to + end, to + columns, pad_row);
      }
    }
  }
}

void LutKernel::SumRows(const LutBlock& block, int32_t* sums) const {
  const size_t taps = static_cast<size_t>(geometry_.Taps());
  for (size_t group = 0; group < static_cast<size_t>(geometry_.group); ++group) {
    const size_t offset = tables_.sums_offset + group * sizeof(int32_t);
    for (size_t p = 0; p < block.pixels; ++p) {
      uint32_t sum = 0;
      for (size_t s = 0; s < taps; ++s) {
        int32_t of_pixel;
        std::memcpy(&of_pixel, block.rows[s * block.pitch + p] + offset, sizeof(of_pixel));
        sum += static_cast<uint32_t>(of_pixel);
      }
      sums[group * block.pitch + p] = static_cast<int32_t>(sum);
    }
  }
}

void LutKernel::Run(const ConvArgs& args, ThreadPool& pool) const {
  const ConvShape shape = Flatten(geometry_, args.shape);
  if (shape.OutPixels() == 0) return;
  const BlockGrid grid = Grid(shape);
  const Workspace ws = Plan(grid);

  // A task that begins in the middle of an image builds the tables of rows that
  // its neighbour builds too, one that computes a part of the panels builds
  // those of another: tasks are so large that this costs little.
  const double pixels = static_cast<double>(shape.OutPixels());
  const double per_pixel = LookupCycles(engine_, geometry_, tables_);
  const double build = static_cast<double>(tables_.pitch / kQuadBytes) * kBuildCycles *
                       static_cast<double>(grid.ring_columns) / static_cast<double>(grid.columns);
  const double cycles = pixels * per_pixel, blocks = static_cast<double>(grid.blocks);
  const double overlap =
      static_cast<double>(grid.ring_rows) - static_cast<double>(grid.rows * geometry_.stride_h);
  const double repeated = std::max(overlap, 0.0) * build * static_cast<double>(grid.columns);
  const size_t pixel_tasks =
      static_cast<size_t>(std::clamp(cycles / std::max(kTaskCycles, repeated / kRebuilt), 1.0, blocks));
  const double block_tables = build * pixels / blocks;
  const size_t panel_tasks =
      static_cast<size_t>(std::clamp(cycles / blocks / std::max(kTaskCycles, block_tables / kRebuilt), 1.0,
                                     static_cast<double>(panels_.size())));

  pool.ParallelFor(pixel_tasks * panel_tasks, [&](size_t task) {
    const size_t pixel_task = task / panel_tasks, panel_task = task % panel_tasks;
    const size_t first_block = grid.blocks * pixel_task / pixel_tasks;
    const size_t end_block = grid.blocks * (pixel_task + 1) / pixel_tasks;
    const size_t first_panel = panels_.size() * panel_task / panel_tasks;
    const size_t end_panel = panels_.size() * (panel_task + 1) / panel_tasks;

    uint8_t* scratch = ThreadScratch(ws.bytes);
    uint8_t *ring = scratch + ws.ring, *pad_row = scratch + ws.pad_row;
    int64_t* tags = reinterpret_cast<int64_t*>(scratch + ws.tags);
    const uint8_t** rows = reinterpret_cast<const uint8_t**>(scratch + ws.rows);
    PadRow(pad_row);

    LutBlock block{};
    block.rows = rows;
    block.pitch = grid.Pixels();
    block.zero_row = pad_value_ == 0 ? pad_row : nullptr;
    block.group_pitch = tables_.group_pitch;
    block.planes = planes_;
    block.per_flush = per_flush_;
    block.slot_weights = slot_weights_;
    block.depths = depths_.data();
    block.depth_count = depths_.size();
    block.lookups = tables_.lookups;
    block.panels = panels_.data() + first_panel;
    block.panel_count = end_panel - first_panel;
    block.panels_per_chunk = panels_per_chunk_;
    block.bias = bias_.data();
    block.partial = reinterpret_cast<int32_t*>(scratch + ws.partial);
    block.output = {&epilogue_.view(), 0, 1, static_cast<const uint8_t*>(args.residual), args.y};
    size_t ring_of = SIZE_MAX;  // the run of row blocks whose tables the ring holds
    for (size_t i = first_block; i < end_block; ++i) {
      const size_t row_block = i % grid.row_blocks, run = i / grid.row_blocks;
      const int64_t image = static_cast<int64_t>(run / grid.column_blocks);
      const int64_t oy = static_cast<int64_t>(row_block) * grid.rows;
      const int64_t ox = static_cast<int64_t>(run % grid.column_blocks) * grid.columns;
      const int64_t out_rows = std::min(grid.rows, shape.out_h - oy);
      const int64_t out_columns = std::min(grid.columns, shape.out_w - ox);
      if (run != ring_of) std::fill_n(tags, grid.ring_rows, int64_t{-1});
      ring_of = run;
      BuildRows(args, shape, grid, image, oy, ox, out_rows, out_columns, ring, tags);
      PointAtTables(shape, grid, oy, ox, out_rows, out_columns, ring, pad_row, rows);
      block.output.first_pixel = static_cast<size_t>((image * shape.out_h + oy) * shape.out_w + ox);
      block.pixels = static_cast<size_t>(out_rows * out_columns);
      if (!row_sum_weight_.empty()) {
        int32_t* sums = reinterpret_cast<int32_t*>(scratch + ws.row_sums);
        SumRows(block, sums);
        block.row_sums = sums;
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
  const TableLayout tables(kEngine, g, spec.w.bits, true);
  const int64_t window_h = (g.kernel_h - 1) * g.dilation_h + 1;
  const int64_t window_w = g.kernel_w == 1 ? 1 : (g.kernel_w - 1) * g.dilation_w + 1;
  const double window = static_cast<double>(window_h) * static_cast<double>(window_w);
  if ((window + 1) * static_cast<double>(tables.pitch) > static_cast<double>(kRingBytes))
    return "the tables of one window exceed the workspace";
  if (static_cast<size_t>(g.Taps()) * sizeof(void*) > kPointerBytes ||
      static_cast<size_t>(g.group) * sizeof(int32_t) > kRowSumBytes)
    return "kernel window or groups exceed the workspace";
  return {};
}

// Of the epilogue, per unit of output channels and pixel, measured on Zen 5.
constexpr double kEpilogueCycles = 4;

template <const LutEngine& kEngine>
double Cost(const ConvSpec& spec, const ConvShape& shape) {
  const ConvGeometry& g = spec.geometry;
  const TableLayout tables(kEngine, g, spec.w.bits, false);
  const size_t units = static_cast<size_t>(g.group) * DivideUp(static_cast<size_t>(g.GroupOut()), kLutUnit);
  const int64_t inputs = std::min(g.stride_h, g.kernel_h) * std::min(g.stride_w, g.kernel_w);  // per output
  return static_cast<double>(shape.OutPixels()) *
         (LookupCycles(kEngine, g, tables) + static_cast<double>(units) * kEpilogueCycles +
          static_cast<double>(tables.pitch / kQuadBytes) * static_cast<double>(inputs) * kBuildCycles);
}

template <const LutEngine& kEngine>
std::unique_ptr<ConvKernel> Create(const ConvSpec& spec) {
  return std::make_unique<LutKernel>(spec, kEngine);
}

template <const LutEngine& kEngine>
KernelRow Row(const char* name, Isa isa, const char* note) {
  return {name,           "conv",          "lut", isa, kMaxXBits, kMaxWBits, note, &Refuse<kEngine>,
          &Cost<kEngine>, &Create<kEngine>};
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
  };
  return kRows;
}

}  // namespace lowbit
