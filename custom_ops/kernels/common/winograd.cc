// The portable half of the Winograd kernels: chunks of input channels, packing of the weights, addressing of
// the tiles and the split into tasks, around the algebra of winograd_scheme.h.
//
// The tiles of all images are one sequence, cut into blocks. A block's inputs are transformed into the
// scratch memory of a thread; then the weights of every panel of output channels are, a slice of the input
// channels after the other, multiplied with them point by point, and the products are transformed back and
// finished. Nothing is transformed for more than a block, so that blocks are as large as they can be.
#include "kernels/common/winograd.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "core/packed_weights.h"
#include "core/plan_cache.h"
#include "core/status.h"
#include "kernels/common/channel_weights.h"
#include "kernels/common/epilogue_tables.h"
#include "kernels/common/workspace.h"

namespace lowbit {
namespace {

// Between the arrays of two points, so that 36 of them do not meet in the same sets of a cache.
constexpr size_t kPointPadding = 64;

// Bytes of weights for one block of input channels, at a point.
size_t BlockWeights(const WinogradScheme& scheme) {
  return scheme.block * scheme.channels * scheme.code_bytes;
}

// What the sums of a tile are kept in where they do not go straight to y: int32, and a narrow form.
struct SumBytes {
  size_t wide, narrow;
};
SumBytes MostSumBytes(const WinogradScheme& scheme) {
  const size_t outputs = scheme.tile * scheme.tile * scheme.channels;
  return {outputs * sizeof(int32_t), scheme.chunks_per_widening > 1 ? outputs * sizeof(int16_t) : 0};
}

// Tiles of a block, where the weights of `slice` blocks of input channels are transformed at a time.
size_t LargestBlock(const WinogradScheme& scheme, size_t blocks, size_t slice, const SumBytes& sums) {
  const size_t points = scheme.Points();
  // Besides: a pixel outside the image, the last channels of a window, padding.
  const size_t fixed = blocks * scheme.block + points * (scheme.block + 3 * kPointPadding) +
                       2 * kWinogradOverread + 10 * 64 + scheme.pass_points * slice * BlockWeights(scheme);
  const size_t tile = points * (blocks * scheme.BlockBytes() + scheme.ProductBytes()) + sums.wide +
                      sums.narrow + sizeof(WinogradDirect);
  if (fixed >= scheme.scratch_bytes) return 0;
  return std::min((scheme.scratch_bytes - fixed) / tile / scheme.granule * scheme.granule,
                  scheme.block_tiles);
}

size_t InputBlocks(const ConvGeometry& g, const WinogradScheme& scheme) {
  return DivideUp(static_cast<size_t>(g.GroupIn()), scheme.block);
}

// How the bytes of x stand for its codes: u = code - shift, of which only [lo, hi] are met.
struct InputBytes {
  uint8_t shift;
  int32_t zero, lo, hi;
};
InputBytes InputBytesOf(const ConvSpec& spec, const WinogradScheme& scheme) {
  const bool is_signed = spec.x.encoding == Encoding::kSigned;
  int32_t shift = 0;
  if (is_signed && !scheme.signed_inputs) shift = -128;
  if (!is_signed && scheme.signed_inputs) shift = 1 << (spec.x.bits - 1);
  const int32_t zero = spec.x_zero_point - shift;
  return {static_cast<uint8_t>(shift), zero, std::min(zero, spec.x.MinCode() - shift),
          std::max(zero, spec.x.MaxCode() - shift)};
}

bool WeightsAreBytes(const ConvSpec& spec) {
  return spec.weight_values.lo >= -128 && spec.weight_values.hi <= 127;
}

// Successive blocks of input channels; what is added to the sums of their products, [panel]; and where the products'
// own sums begin, [point][panel], of schemes with an input_offset.
struct Chunk {
  size_t first, end;
  std::vector<int32_t> offset, start;
};

// The sum of u w over some channels lies between these.
struct SumRange {
  int64_t lo = 0, hi = 0;

  // Of the weights, their sum and that of their magnitudes: twice the positive ones' sum, or twice the negative
  // ones', are those added and subtracted.
  static SumRange Of(const InputBytes& x, int64_t sum, int64_t magnitude) {
    const int64_t positive = (magnitude + sum) / 2, negative = (magnitude - sum) / 2;
    return {positive * x.lo - negative * x.hi, positive * x.hi - negative * x.lo};
  }
  SumRange operator+(const SumRange& other) const { return {lo + other.lo, hi + other.hi}; }
};

// Whether some output channels' sums over all input channels fit one chunk.
bool FitOneChunk(const ConvSpec& spec, const WinogradScheme& scheme, size_t channel, size_t count) {
  const InputBytes x = InputBytesOf(spec, scheme);
  return std::all_of(&spec.channel_values[channel], &spec.channel_values[channel] + count,
                     [&](const ChannelValues& values) {
                       const SumRange sums = SumRange::Of(x, values.sum, values.magnitude);
                       return sums.hi - sums.lo < int64_t{1} << scheme.bits;
                     });
}

// The chunks of a panel: each as long as the sums of all its channels allow. None where a single block's sums
// span too much. The weights are read where there is more than one.
std::vector<Chunk> ChunksOf(const ConvSpec& spec, const WinogradScheme& scheme, size_t channel,
                            size_t count) {
  const ConvGeometry& g = spec.geometry;
  const auto inputs = static_cast<size_t>(g.GroupIn()), k = static_cast<size_t>(g.K());
  const size_t blocks = InputBlocks(g, scheme);
  const InputBytes x = InputBytesOf(spec, scheme);
  const int64_t span = int64_t{1} << scheme.bits;
  std::vector<SumRange> sums(count), with(count);
  std::vector<Chunk> chunks;
  const auto close = [&](size_t first, size_t end) {
    Chunk chunk{first, end, std::vector<int32_t>(scheme.channels), {}};
    for (size_t c = 0; c < count; ++c) chunk.offset[c] = static_cast<int32_t>(-span / 2 - sums[c].lo);
    chunks.push_back(std::move(chunk));
  };
  if (FitOneChunk(spec, scheme, channel, count)) {
    for (size_t c = 0; c < count; ++c) {
      const ChannelValues& values = spec.channel_values[channel + c];
      sums[c] = SumRange::Of(x, values.sum, values.magnitude);
    }
    close(0, blocks);
    return chunks;
  }
  std::vector<int8_t> weights(count * k);
  for (size_t c = 0; c < count; ++c) LoadChannel(spec, channel + c, 0, weights.data() + c * k);
  size_t first = 0;
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * scheme.block, end = std::min(begin + scheme.block, inputs);
    bool fits = true;
    std::vector<SumRange> added(count);
    for (size_t c = 0; c < count; ++c) {
      int32_t sum = 0, magnitude = 0;
      for (size_t tap = 0; tap < 9; ++tap) {
        const int8_t* const from = weights.data() + c * k + tap * inputs;
        for (size_t i = begin; i < end; ++i) {
          sum += from[i];
          magnitude += std::abs(from[i]);
        }
      }
      added[c] = SumRange::Of(x, sum, magnitude);
      if (added[c].hi - added[c].lo >= span) return {};
      with[c] = sums[c] + added[c];
      fits = fits && with[c].hi - with[c].lo < span;
    }
    if (!fits) {
      close(first, block);
      first = block;
      with = added;
    }
    std::swap(sums, with);
  }
  close(first, blocks);
  return chunks;
}

// An offset o of the inputs at a point adds o times the sum of the weights there: G applied to the sums of the taps.
std::vector<int32_t> ProductStart(const ConvSpec& spec, const WinogradScheme& scheme, size_t channel,
                                  size_t count, const Chunk& chunk) {
  std::vector<int32_t> start(scheme.Points() * scheme.channels);
  const auto inputs = static_cast<size_t>(spec.geometry.GroupIn());
  const size_t begin = chunk.first * scheme.block, end = std::min(chunk.end * scheme.block, inputs);
  std::vector<int8_t> weights(9 * inputs);
  for (size_t c = 0; c < count; ++c) {
    LoadChannel(spec, channel + c, 0, weights.data());
    int64_t taps[9];
    for (size_t tap = 0; tap < 9; ++tap) {
      const int8_t* const from = weights.data() + tap * inputs;
      taps[tap] = std::accumulate(from + begin, from + end, 0);
    }
    for (size_t point = 0; point < scheme.Points(); ++point) {
      const int8_t *rows = scheme.g[point / scheme.Window()], *columns = scheme.g[point % scheme.Window()];
      int64_t sum = 0;
      for (size_t tap = 0; tap < 9; ++tap) sum += rows[tap / 3] * columns[tap % 3] * taps[tap];
      start[point * scheme.channels + c] =
          static_cast<int32_t>(static_cast<uint32_t>(-scheme.input_offset * sum));
    }
  }
  return start;
}

// Calls `with` for every panel, consecutive output channels of one group, as long as it returns true.
template <class With>
bool ForEachPanel(const ConvGeometry& g, const WinogradScheme& scheme, const With& with) {
  const auto group_out = static_cast<size_t>(g.GroupOut());
  for (size_t group = 0; group < static_cast<size_t>(g.group); ++group) {
    for (size_t c = 0; c < group_out; c += scheme.channels) {
      if (!with(group, group * group_out + c, std::min(scheme.channels, group_out - c))) return false;
    }
  }
  return true;
}

size_t PanelsOf(const ConvGeometry& g, const WinogradScheme& scheme) {
  return static_cast<size_t>(g.group) * DivideUp(static_cast<size_t>(g.GroupOut()), scheme.channels);
}

// The chunks of all panels together; 0 where there is a panel that cannot be cut.
size_t TotalChunks(const ConvSpec& spec, const WinogradScheme& scheme) {
  if (FitOneChunk(spec, scheme, 0, spec.channel_values.size())) return PanelsOf(spec.geometry, scheme);
  size_t chunks = 0;
  const bool all = ForEachPanel(spec.geometry, scheme, [&](size_t, size_t channel, size_t count) {
    const size_t more = ChunksOf(spec, scheme, channel, count).size();
    chunks += more;
    return more != 0;
  });
  return all ? chunks : 0;
}

struct Panel {
  size_t channel, count, group;
  const uint8_t* taps;        // of all blocks, in groups
  std::vector<int32_t> base;  // bias, less what zero points and offsets add to the sums; [panel]
  std::vector<Chunk> chunks;
};

// How the tiles of one shape are cut, and the input channels.
struct TilePlan {
  size_t rows = 0, columns = 0;  // of tiles, in an image
  size_t step = 0, blocks = 0;   // tiles from block to block
  size_t tiles = 0;              // of the largest block, the last
  size_t slice = 0;              // blocks of input channels, whose weights are transformed at a time
};
size_t TilesOf(const WinogradScheme& scheme, const ConvShape& shape) {
  return static_cast<size_t>(shape.batch) * DivideUp(static_cast<size_t>(shape.out_h), scheme.tile) *
         DivideUp(static_cast<size_t>(shape.out_w), scheme.tile);
}
// Blocks of at most `most` tiles. Large slices leave room for few tiles, and for every block of tiles the weights are
// transformed again; for every slice the sums of its products are loaded and stored.
TilePlan PlanTiles(const WinogradScheme& scheme, size_t blocks, const SumBytes& sums, const ConvShape& shape,
                   size_t most) {
  TilePlan plan;
  plan.rows = DivideUp(static_cast<size_t>(shape.out_h), scheme.tile);
  plan.columns = DivideUp(static_cast<size_t>(shape.out_w), scheme.tile);
  const size_t total = std::max(TilesOf(scheme, shape), size_t{1});
  const WinogradCycles& cycles = scheme.cycles();
  double least = 0;
  const size_t largest = std::min({total, scheme.block_tiles, most});
  for (size_t slices = 1, limit = 0; slices <= blocks && limit < largest; ++slices) {
    const size_t slice = DivideUp(blocks, slices);
    if (slice > 1 && scheme.pass_points * slice * BlockWeights(scheme) > scheme.slice_bytes) continue;
    limit = std::min(LargestBlock(scheme, blocks, slice, sums), most);
    if (limit == 0) continue;
    // Blocks of about one size, of whole groups of tiles but for the last.
    const size_t least_blocks = DivideUp(total, limit),
                 even = RoundUp(DivideUp(total, least_blocks), scheme.group);
    const size_t step = total <= limit          ? total
                        : even <= limit         ? even
                        : limit >= scheme.group ? limit / scheme.group * scheme.group
                                                : limit;
    const size_t tile_blocks = DivideUp(total, step);
    const double cost =
        static_cast<double>(tile_blocks * blocks) * cycles.weights +
        static_cast<double>(slices * DivideUp(total, scheme.group) * scheme.Points()) * cycles.sums;
    if (plan.slice != 0 && cost >= least) continue;
    least = cost;
    plan.slice = slice;
    plan.step = step;
    plan.blocks = tile_blocks;
    plan.tiles = RoundUp(std::min(total, step), scheme.granule);
  }
  return plan;
}

// Threads whose number is not known get no smaller blocks: transforming the weights for each costs little then.
constexpr size_t kSharedTiles = 64;

// For such threads, and what the cost model takes blocks to be.
TilePlan PlanTiles(const WinogradScheme& scheme, size_t blocks, const SumBytes& sums,
                   const ConvShape& shape) {
  const size_t shared = RoundUp(DivideUp(TilesOf(scheme, shape), FewTasks()), scheme.group);
  return PlanTiles(scheme, blocks, sums, shape, std::max(shared, kSharedTiles));
}

// Of a panel's products in a block of `tiles`: groups of tiles, and cycles for a point and a block of input channels.
struct BlockProducts {
  double groups, cycles;
};
BlockProducts ProductsOf(const WinogradScheme& scheme, size_t tiles) {
  const WinogradCycles& cycles = scheme.cycles();
  const size_t size = scheme.GroupOf(tiles);
  if (size == 0) return {0, 0};
  const size_t whole = tiles / size, last = scheme.WholeOf(tiles % size);
  const auto groups = static_cast<double>(whole);
  return {groups + (last > 0 ? 1 : 0), groups * cycles.Product(size) + (last > 0 ? cycles.Product(last) : 0)};
}

struct Scratch {
  size_t pad_pixel = 0, last_channels = 0, inputs = 0, weights = 0, products = 0, narrow = 0, sums = 0,
         direct = 0, bytes = 0;
  size_t input_pitch = 0, weight_pitch = 0, product_pitch = 0;  // from point to point
};

class WinogradKernel final : public ConvKernel {
 public:
  WinogradKernel(const ConvSpec& spec, const WinogradScheme& scheme);

  void Run(const ConvArgs& args, ThreadPool& pool) const override;
  size_t WorkspaceBytes(const ConvShape& shape) const override {
    return PlanScratch(PlanTiles(scheme_, blocks_, sums_, shape)).bytes;
  }
  size_t PackedBytes() const override;

 private:
  // What one task works with.
  struct Task {
    const ConvArgs& args;
    const TilePlan& plan;
    const Scratch& layout;
    uint8_t *pad_pixel, *last_channels;
    uint8_t *inputs, *weights, *products;
    void* narrow;
    int32_t* sums;
    WinogradDirect* direct;
  };
  // How a shape is computed by some threads.
  struct RunPlan {
    TilePlan tiles;
    Scratch layout;
    TaskSplit split;
  };
  // A tile's image and the first of its outputs.
  struct Tile {
    int64_t image, y, x;
  };

  void PackTaps(const ConvSpec& spec, const Panel& panel, uint8_t* to) const;
  template <size_t kUnit>
  void PackUnits(const int8_t* weights, size_t count, uint8_t* to) const;
  Scratch PlanScratch(const TilePlan& plan) const;
  double BlockCycles(const TilePlan& plan, size_t panels) const;
  RunPlan MakePlan(const RunKey& key) const;
  Tile TileAt(const TilePlan& plan, size_t index) const;
  void TransformTile(const Task& task, const Tile& tile, size_t group, uint8_t* to, size_t block_pitch) const;
  void TransformBlock(const Task& task, size_t first, size_t count, size_t group) const;
  bool FinishesDirectly(const Panel& panel) const {
    const EpilogueView& e = epilogue_.view();
    return e.pack_clips && !e.has_residual && panel.count == scheme_.channels;
  }
  void ListOutputs(const Task& task, size_t first, size_t count, const Panel& panel) const;
  void MultiplySlice(const Task& task, size_t count, const Panel& panel, const Chunk& chunk, size_t first,
                     size_t end) const;
  void MultiplyBlock(const Task& task, size_t count, const Panel& panel, bool direct) const;
  void FinishBlock(const Task& task, size_t first, size_t count, const Panel& panel) const;

  // Bytes of one block of input channels of a panel, as held.
  size_t BlockTaps() const { return 9 * scheme_.block * scheme_.channels / (four_bits_ ? 2 : 1); }
  // Elements of a row in the sums of a block, [4 rows][tile][4 pixels][panel].
  size_t SumRow(const TilePlan& plan) const { return plan.tiles * scheme_.tile * scheme_.channels; }

  const ConvGeometry geometry_;
  const WinogradScheme& scheme_;
  const size_t blocks_;  // of input channels
  const uint8_t shift_, pad_byte_;
  EpilogueTables epilogue_;
  const bool four_bits_;  // or eight, of a tap
  PackedWeights taps_;
  std::vector<Panel> panels_;
  SumBytes sums_{};
  mutable PlanCache<RunKey, RunPlan> plans_;
};

WinogradKernel::WinogradKernel(const ConvSpec& spec, const WinogradScheme& scheme)
    : geometry_(spec.geometry),
      scheme_(scheme),
      blocks_(InputBlocks(spec.geometry, scheme)),
      shift_(InputBytesOf(spec, scheme).shift),
      pad_byte_(static_cast<uint8_t>(spec.x_zero_point)),
      epilogue_(spec),
      four_bits_(spec.weight_values.lo >= -8 && spec.weight_values.hi <= 7) {
  Require(WeightsAreBytes(spec), "weights outside the range for which this kernel was chosen");
  const ConvGeometry& g = geometry_;
  const InputBytes x = InputBytesOf(spec, scheme);
  std::vector<int64_t> largest(static_cast<size_t>(g.out_channels));
  ForEachPanel(g, scheme, [&](size_t group, size_t channel, size_t count) {
    Panel panel{channel,
                count,
                group,
                nullptr,
                std::vector<int32_t>(scheme.channels),
                ChunksOf(spec, scheme, channel, count)};
    if (scheme.input_offset != 0) {
      for (Chunk& chunk : panel.chunks) chunk.start = ProductStart(spec, scheme, channel, count, chunk);
    }
    for (size_t c = 0; c < count; ++c) {
      const ChannelValues& weights = spec.channel_values[channel + c];
      int64_t base = spec.bias[channel + c] - x.zero * weights.sum;
      for (const Chunk& chunk : panel.chunks) base -= chunk.offset[c];
      panel.base[c] = static_cast<int32_t>(static_cast<uint32_t>(base));
      // |x - zero point| < 256
      largest[channel + c] = 256 * weights.magnitude + std::abs(static_cast<int64_t>(spec.bias[channel + c]));
    }
    panels_.push_back(std::move(panel));
    return true;
  });
  epilogue_.LimitAccumulators(largest);

  const size_t panel_taps = blocks_ * BlockTaps();
  AlignedBytes packed(panels_.size() * panel_taps);
  for (size_t p = 0; p < panels_.size(); ++p) PackTaps(spec, panels_[p], packed.data() + p * panel_taps);
  taps_ = ShareWeights(std::move(packed));
  for (size_t p = 0; p < panels_.size(); ++p) panels_[p].taps = taps_->data() + p * panel_taps;

  // Sums are kept where there are several chunks, or an epilogue that does not store bytes at once.
  const SumBytes most = MostSumBytes(scheme);
  for (const Panel& panel : panels_) {
    if (panel.chunks.size() > 1) sums_.narrow = most.narrow;
    if (panel.chunks.size() > scheme.chunks_per_widening || !FinishesDirectly(panel)) sums_.wide = most.wide;
  }
}

// `to` is zeroed, for the channels that fill up blocks and panels.
void WinogradKernel::PackTaps(const ConvSpec& spec, const Panel& panel, uint8_t* to) const {
  const size_t k = static_cast<size_t>(geometry_.K());
  std::vector<int8_t> weights(panel.count * k);
  for (size_t c = 0; c < panel.count; ++c) LoadChannel(spec, panel.channel + c, 0, weights.data() + c * k);
  if (scheme_.unit == 1) return PackUnits<1>(weights.data(), panel.count, to);
  if (scheme_.unit == 2) return PackUnits<2>(weights.data(), panel.count, to);
  Require(scheme_.unit == 4, "a Winograd scheme has units of ", scheme_.unit, " channels");
  PackUnits<4>(weights.data(), panel.count, to);
}

// Some inputs of all channels at a time, whose places stay in L1.
template <size_t kUnit>
void WinogradKernel::PackUnits(const int8_t* weights, size_t count, uint8_t* to) const {
  constexpr size_t kStep = 64;
  const auto inputs = static_cast<size_t>(geometry_.GroupIn());
  const size_t group_bytes = four_bits_ ? kWinogradGroup / 2 : kWinogradGroup;
  for (size_t first = 0; first < inputs; first += kStep) {
    const size_t end = std::min(first + kStep, inputs);
    for (size_t row = 0; row < count * 9; ++row) {
      const int8_t* const from = weights + row * inputs;
      const size_t channel = row / 9, tap = row % 9;
      for (size_t i = first; i < end; i += kUnit) {
        const size_t at = i * scheme_.channels + channel * kUnit, lane = at % kWinogradGroup;
        uint8_t* const place = to + (at / kWinogradGroup * 9 + tap) * group_bytes + lane % group_bytes;
        uint32_t unit = 0;
        if (i + kUnit <= inputs) {
          std::memcpy(&unit, from + i, kUnit);
        } else {
          std::memcpy(&unit, from + i, inputs - i);
        }
        if (four_bits_) {
          uint32_t both = 0;
          std::memcpy(&both, place, kUnit);
          unit = both | (unit & 0x0f0f0f0f) << (lane / group_bytes * 4);
        }
        std::memcpy(place, &unit, kUnit);
      }
    }
  }
}

size_t WinogradKernel::PackedBytes() const {
  size_t bytes = taps_->size() + epilogue_.Bytes();
  for (const Panel& panel : panels_) {
    bytes += sizeof(Panel) + panel.base.size() * sizeof(int32_t);
    for (const Chunk& chunk : panel.chunks)
      bytes += sizeof(Chunk) + (chunk.offset.size() + chunk.start.size()) * sizeof(int32_t);
  }
  return bytes;
}

Scratch WinogradKernel::PlanScratch(const TilePlan& plan) const {
  Scratch s;
  s.input_pitch = plan.tiles * blocks_ * scheme_.BlockBytes() + kPointPadding;
  s.weight_pitch = plan.slice * BlockWeights(scheme_) + kPointPadding;
  s.product_pitch = plan.tiles * scheme_.ProductBytes() + kPointPadding;
  ScratchLayout layout;
  s.pad_pixel = layout.Take(blocks_ * scheme_.block);
  s.last_channels = layout.Take(scheme_.Points() * scheme_.block);
  s.inputs = layout.Take(scheme_.Points() * s.input_pitch + kWinogradOverread);
  s.weights = layout.Take(scheme_.pass_points * s.weight_pitch + kWinogradOverread);
  s.products = layout.Take(scheme_.Points() * s.product_pitch);
  s.narrow = layout.Take(plan.tiles * sums_.narrow);
  s.sums = layout.Take(plan.tiles * sums_.wide);
  s.direct = layout.Take(plan.tiles * sizeof(WinogradDirect));
  s.bytes = layout.bytes();
  return s;
}

WinogradKernel::Tile WinogradKernel::TileAt(const TilePlan& plan, size_t index) const {
  const size_t column = index % plan.columns, row = index / plan.columns % plan.rows;
  return {static_cast<int64_t>(index / plan.columns / plan.rows), static_cast<int64_t>(row * scheme_.tile),
          static_cast<int64_t>(column * scheme_.tile)};
}

void WinogradKernel::TransformTile(const Task& task, const Tile& tile, size_t group, uint8_t* to,
                                   size_t block_pitch) const {
  const ConvGeometry& g = geometry_;
  const ConvShape& s = task.args.shape;
  const auto channels = static_cast<size_t>(g.GroupIn());
  const uint8_t* image = static_cast<const uint8_t*>(task.args.x) +
                         tile.image * s.in_h * s.in_w * g.in_channels +
                         static_cast<int64_t>(group * channels);
  std::array<const uint8_t*, kWinogradMaxPoints> pixels;
  const auto window = static_cast<int64_t>(scheme_.Window());
  const int64_t first_y = tile.y - g.pad_top, first_x = tile.x - g.pad_left;
  const uint8_t** pixel = pixels.data();
  for (int64_t y = first_y; y < first_y + window; ++y, pixel += window) {
    const bool row_inside = y >= 0 && y < s.in_h;
    const uint8_t* row = image + (row_inside ? y : 0) * s.in_w * g.in_channels;
    if (row_inside && first_x >= 0 && first_x + window <= s.in_w) {
      for (int64_t x = 0; x < window; ++x) pixel[x] = row + (first_x + x) * g.in_channels;
      continue;
    }
    for (int64_t x = 0; x < window; ++x) {
      const bool inside = row_inside && first_x + x >= 0 && first_x + x < s.in_w;
      pixel[x] = inside ? row + (first_x + x) * g.in_channels : task.pad_pixel;
    }
  }
  const size_t whole = channels / scheme_.block, rest = channels % scheme_.block;
  const size_t pitch = task.layout.input_pitch;
  scheme_.input({pixels.data(), whole, shift_, to, pitch, block_pitch});
  if (rest == 0) return;
  for (size_t i = 0; i < scheme_.Points(); ++i) {
    uint8_t* last = task.last_channels + i * scheme_.block;  // beyond the channels anything: weights are 0
    std::memcpy(last, pixels[i] + whole * scheme_.block, rest);
    pixels[i] = last;
  }
  scheme_.input({pixels.data(), 1, shift_, to + whole * block_pitch, pitch, block_pitch});
}

void WinogradKernel::TransformBlock(const Task& task, size_t first, size_t count, size_t group) const {
  const size_t group_tiles = scheme_.GroupOf(count);
  for (size_t at = 0; at < count;) {
    const size_t size = scheme_.WholeOf(std::min(group_tiles, count - at));
    uint8_t* to = task.inputs + at * blocks_ * scheme_.BlockBytes();
    for (size_t tile = 0; tile < std::min(size, count - at); ++tile)
      TransformTile(task, TileAt(task.plan, first + at + tile), group, to + tile * scheme_.BlockBytes(),
                    size * scheme_.BlockBytes());
    at += size;
  }
}

// Where the tiles of a block end in y, for outputs that go there at once.
void WinogradKernel::ListOutputs(const Task& task, size_t first, size_t count, const Panel& panel) const {
  const ConvShape& s = task.args.shape;
  const auto edge = static_cast<int64_t>(scheme_.tile);
  for (size_t t = 0; t < count; ++t) {
    const Tile tile = TileAt(task.plan, first + t);
    const int64_t pixel = (tile.image * s.out_h + tile.y) * s.out_w + tile.x;
    task.direct[t] = {
        static_cast<uint8_t*>(task.args.y) + pixel * geometry_.out_channels + panel.channel,
        static_cast<size_t>(std::min(edge, s.out_h - tile.y)),
        static_cast<size_t>(std::min(edge, s.out_w - tile.x)),
    };
  }
}

void FetchBytes(const uint8_t* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

// The products of a block's tiles with the weights of some blocks of input channels, at all points.
void WinogradKernel::MultiplySlice(const Task& task, size_t count, const Panel& panel, const Chunk& chunk,
                                   size_t first, size_t end) const {
  const Scratch& layout = task.layout;
  const size_t tile_bytes = blocks_ * scheme_.BlockBytes(), product_bytes = scheme_.ProductBytes();
  const size_t x_slice = first * scheme_.BlockBytes();  // of a tile
  const size_t size = scheme_.GroupOf(count), last = scheme_.WholeOf(count % size);
  const size_t groups = count / size + (last == size ? 1 : 0);
  WinogradWeights weights{panel.taps + first * BlockTaps(),
                          (end - first) * scheme_.block * scheme_.channels / kWinogradGroup, task.weights,
                          layout.weight_pitch, 0};
  WinogradProduct product{};
  product.blocks = end - first;
  product.adds = first > chunk.first;
  // The weights of the next slice, behind these, are fetched meanwhile, at each point its share.
  const uint8_t* next = panel.taps + end * BlockTaps();
  const size_t next_bytes =
      std::min((end - first) * BlockTaps(), static_cast<size_t>(taps_->data() + taps_->size() - next));
  const auto fetch = [&](size_t point, size_t points) {
    FetchBytes(next + next_bytes * point / scheme_.Points(), next_bytes * points / scheme_.Points());
  };
  for (; weights.pass < scheme_.Points() / scheme_.pass_points; ++weights.pass) {
    (four_bits_ ? scheme_.weights4 : scheme_.weights8)(weights);
    const size_t first_point = weights.pass * scheme_.pass_points;
    const uint8_t* inputs = task.inputs + first_point * layout.input_pitch;
    uint8_t* products = task.products + first_point * layout.product_pitch;
    const int32_t* start =
        chunk.start.empty() ? nullptr : chunk.start.data() + first_point * scheme_.channels;
    product.start = start;
    if (size >= count) {  // one group: all points
      product.x = inputs + x_slice * size;
      product.w = task.weights;
      product.to = products;
      product.tiles = size;
      product.count = scheme_.pass_points;
      product.x_step = static_cast<ptrdiff_t>(layout.input_pitch);
      product.w_step = static_cast<ptrdiff_t>(layout.weight_pitch);
      product.to_step = static_cast<ptrdiff_t>(layout.product_pitch);
      product.start_step = start == nullptr ? 0 : scheme_.channels;
      fetch(first_point, scheme_.pass_points);
      scheme_.product(product);
      continue;
    }
    for (size_t point = 0; point < scheme_.pass_points; ++point) {
      const uint8_t* x = inputs + point * layout.input_pitch;
      uint8_t* to = products + point * layout.product_pitch;
      fetch(first_point + point, 1);
      product.w = task.weights + point * layout.weight_pitch;
      if (start != nullptr) product.start = start + point * scheme_.channels;
      product.x = x + x_slice * size;
      product.to = to;
      product.tiles = size;
      product.count = groups;
      product.x_step = static_cast<ptrdiff_t>(size * tile_bytes);
      product.to_step = static_cast<ptrdiff_t>(size * product_bytes);
      scheme_.product(product);
      if (size * groups >= count) continue;
      product.x = x + size * groups * tile_bytes + x_slice * last;
      product.to = to + size * groups * product_bytes;
      product.tiles = last;
      product.count = 1;
      scheme_.product(product);
    }
  }
}

void WinogradKernel::MultiplyBlock(const Task& task, size_t count, const Panel& panel, bool direct) const {
  for (const Chunk& chunk : panel.chunks) {
    const size_t blocks = chunk.end - chunk.first, slices = DivideUp(blocks, task.plan.slice);
    for (size_t slice = 0; slice < slices; ++slice) {
      MultiplySlice(task, count, panel, chunk, chunk.first + blocks * slice / slices,
                    chunk.first + blocks * (slice + 1) / slices);
    }
    const size_t index = static_cast<size_t>(&chunk - panel.chunks.data()), run = scheme_.chunks_per_widening;
    const bool ends = index + 1 == panel.chunks.size();
    scheme_.output({task.products, task.layout.product_pitch, count, chunk.offset.data(), index % run == 0,
                    ends || index % run == run - 1, task.narrow, index < run ? panel.base.data() : nullptr,
                    task.sums, SumRow(task.plan), ends && direct ? task.direct : nullptr, &epilogue_.view(),
                    panel.channel, static_cast<size_t>(task.args.shape.out_w * geometry_.out_channels)});
  }
}

// Sums of tiles -> y, row by row of a run of tiles side by side; outputs beyond the image are dropped.
void WinogradKernel::FinishBlock(const Task& task, size_t first, size_t count, const Panel& panel) const {
  const ConvShape& s = task.args.shape;
  const auto edge = static_cast<int64_t>(scheme_.tile);
  for (size_t t = 0; t < count;) {
    const Tile tile = TileAt(task.plan, first + t);
    const size_t run = std::min(count - t, task.plan.columns - (first + t) % task.plan.columns);
    const auto rows = static_cast<size_t>(std::min(edge, s.out_h - tile.y));
    const size_t columns = std::min(run * scheme_.tile, static_cast<size_t>(s.out_w - tile.x));
    for (size_t row = 0; row < rows; ++row) {
      const int64_t pixel = (tile.image * s.out_h + tile.y + static_cast<int64_t>(row)) * s.out_w + tile.x;
      scheme_.finish({&epilogue_.view(), static_cast<size_t>(pixel), 1,
                      static_cast<const uint8_t*>(task.args.residual), task.args.y},
                     {task.sums + row * SumRow(task.plan) + t * scheme_.tile * scheme_.channels,
                      scheme_.channels, 0, columns, panel.channel, panel.count});
    }
    t += run;
  }
}

// What a block takes some panels of it, alone.
double WinogradKernel::BlockCycles(const TilePlan& plan, size_t panels) const {
  const WinogradCycles& cycles = scheme_.cycles();
  const auto tiles = static_cast<double>(plan.step), blocks = static_cast<double>(blocks_),
             wide = static_cast<double>(panels);
  const auto groups =
      static_cast<double>(DivideUp(panels * static_cast<size_t>(geometry_.group), panels_.size()));
  const BlockProducts products = ProductsOf(scheme_, plan.step);
  const double slices = static_cast<double>(DivideUp(blocks_, plan.slice));
  return groups * blocks * tiles * cycles.input +
         wide * (blocks * cycles.weights +
                 static_cast<double>(scheme_.Points()) *
                     (blocks * products.cycles + slices * products.groups * cycles.sums) +
                 tiles * (cycles.output + cycles.finish));
}

// Deals blocks of tiles and panels out so that the threads are done soonest, as IgemmKernel::MakePlan does. Small blocks
// have their weights transformed more often, parts of the panels their inputs.
WinogradKernel::RunPlan WinogradKernel::MakePlan(const RunKey& key) const {
  const size_t total = TilesOf(scheme_, key.shape);
  const TilePlan whole = PlanTiles(scheme_, blocks_, sums_, key.shape, total);
  const double cycles = static_cast<double>(whole.blocks) * BlockCycles(whole, panels_.size());
  const auto [tiles, split] = DealOut(
      key, cycles, panels_.size(),
      [&](size_t wanted) {
        const size_t most = RoundUp(DivideUp(total, wanted), scheme_.granule),
                     least = key.threads == 0 ? kSharedTiles : 1;
        return PlanTiles(scheme_, blocks_, sums_, key.shape, std::max(most, least));
      },
      [&](const TilePlan& plan, size_t wide) { return BlockCycles(plan, wide); });
  return {tiles, PlanScratch(tiles), split};
}

void WinogradKernel::Run(const ConvArgs& args, ThreadPool& pool) const {
  const size_t total = TilesOf(scheme_, args.shape);
  if (total == 0) return;
  const RunKey key{args.shape, pool.Threads(), pool.TaskCycles()};
  const auto run_plan = plans_.Get(key, [&] { return MakePlan(key); });
  const TilePlan& plan = run_plan->tiles;
  const Scratch& layout = run_plan->layout;
  const TaskSplit& split = run_plan->split;
  // A thread that computes several tasks of a block transforms its inputs once.
  const bool keeps = split.panel_tasks > 1 && split.pixel_tasks == plan.blocks && geometry_.group == 1;
  const uint64_t tickets = keeps ? NewTickets(plan.blocks) : 0;
  pool.ParallelFor(split.tasks(), [&](size_t index) {
    const auto [first_block, end_block, first_panel, end_panel] = split[index];
    const auto [scratch, kept] = ThreadScratch(layout.bytes, keeps ? tickets + first_block : 0);
    const Task task{args,
                    plan,
                    layout,
                    scratch + layout.pad_pixel,
                    scratch + layout.last_channels,
                    scratch + layout.inputs,
                    scratch + layout.weights,
                    scratch + layout.products,
                    scratch + layout.narrow,
                    reinterpret_cast<int32_t*>(scratch + layout.sums),
                    reinterpret_cast<WinogradDirect*>(scratch + layout.direct)};
    std::memset(task.pad_pixel, pad_byte_, blocks_ * scheme_.block);
    for (size_t block = first_block; block < end_block; ++block) {
      const size_t first = block * plan.step;
      const size_t count = block + 1 < plan.blocks ? plan.step : total - first;
      for (size_t p = first_panel; p < end_panel; ++p) {
        const Panel& panel = panels_[p];
        const bool transformed = p == first_panel ? kept : panels_[p - 1].group == panel.group;
        if (!transformed) TransformBlock(task, first, count, panel.group);
        const bool direct = FinishesDirectly(panel);
        if (direct) ListOutputs(task, first, count, panel);
        MultiplyBlock(task, count, panel, direct);
        if (!direct) FinishBlock(task, first, count, panel);
      }
    }
  });
}

// Whether all weights, bytes, transformed are numbers of code_bytes. Those are read whose channel's range
// does not tell.
bool TransformsFit(const ConvSpec& spec, const WinogradScheme& scheme) {
  const int32_t limit = 1 << (8 * static_cast<int>(scheme.code_bytes) - 1);
  int32_t growth = 0;
  for (size_t row = 0; row < scheme.Window(); ++row) {
    const int8_t* g = scheme.g[row];
    growth = std::max(growth, std::abs(g[0]) + std::abs(g[1]) + std::abs(g[2]));
  }
  const auto inputs = static_cast<size_t>(spec.geometry.GroupIn());
  std::vector<int8_t> weights(9 * inputs);
  for (size_t c = 0; c < spec.channel_values.size(); ++c) {
    const ChannelValues& values = spec.channel_values[c];
    if (std::max(std::abs(values.lo), std::abs(values.hi)) * growth * growth < limit) continue;
    LoadChannel(spec, c, 0, weights.data());
    for (size_t i = 0; i < inputs; ++i) {
      for (size_t row = 0; row < scheme.Window(); ++row) {
        int32_t sums[3] = {};
        for (size_t tap = 0; tap < 9; ++tap)
          sums[tap % 3] += scheme.g[row][tap / 3] * weights[tap * inputs + i];
        for (size_t column = 0; column < scheme.Window(); ++column) {
          const int8_t* g = scheme.g[column];
          const int32_t value = g[0] * sums[0] + g[1] * sums[1] + g[2] * sums[2];
          if (value < -limit || value >= limit) return false;
        }
      }
    }
  }
  return true;
}

}  // namespace

std::string WinogradRefusal(const ConvSpec& spec, const WinogradScheme& scheme) {
  const ConvGeometry& g = spec.geometry;
  if (g.kernel_h != 3 || g.kernel_w != 3 || g.stride_h != 1 || g.stride_w != 1 || g.dilation_h != 1 ||
      g.dilation_w != 1)
    return "only 3x3 kernels of stride and dilation 1";
  if (spec.x.encoding == Encoding::kBipolar) return "bipolar activations have no code for the padding";
  if (LargestBlock(scheme, InputBlocks(g, scheme), 1, MostSumBytes(scheme)) == 0)
    return "the transformed inputs of " + std::to_string(scheme.granule) + " tiles exceed the workspace";
  if (!WeightsAreBytes(spec)) return "weights exceed 8 bits";
  if (!TransformsFit(spec, scheme))
    return "transformed weights exceed " + std::to_string(8 * scheme.code_bytes) + " bits";
  if (TotalChunks(spec, scheme) == 0)
    return "the sums of " + std::to_string(scheme.block) + " channels span 2^" + std::to_string(scheme.bits) +
           " or more";
  return {};
}

double WinogradCost(const ConvSpec& spec, const ConvShape& shape, const WinogradScheme& scheme) {
  const ConvGeometry& g = spec.geometry;
  const size_t tiles = TilesOf(scheme, shape);
  const WinogradCycles& cycles = scheme.cycles();
  const TilePlan plan = PlanTiles(scheme, InputBlocks(g, scheme), MostSumBytes(scheme), shape);
  // Of all blocks but the last, and of the last one.
  const BlockProducts each = ProductsOf(scheme, plan.step),
                      last = ProductsOf(scheme, std::max(tiles, size_t{1}) - (plan.blocks - 1) * plan.step);
  const auto others = static_cast<double>(plan.blocks - 1);
  const double groups = others * each.groups + last.groups, steps = others * each.cycles + last.cycles;
  const auto panels = static_cast<double>(PanelsOf(g, scheme)),
             blocks = static_cast<double>(InputBlocks(g, scheme));
  const auto chunks = static_cast<double>(TotalChunks(spec, scheme));
  const double slices =
      std::max(chunks, panels * static_cast<double>(DivideUp(InputBlocks(g, scheme), plan.slice)));
  const double products =
      static_cast<double>(scheme.Points()) * (panels * blocks * steps + slices * groups * cycles.sums);
  const double weights = static_cast<double>(plan.blocks) * panels * blocks * cycles.weights;
  const double inputs = static_cast<double>(g.group) * blocks * cycles.input;
  const double outputs = chunks * cycles.output + panels * cycles.finish;
  constexpr double kCallCycles = 500;  // what a call costs before it computes
  return kCallCycles + products + weights + static_cast<double>(tiles) * (inputs + outputs);
}

std::unique_ptr<ConvKernel> MakeWinograd(const ConvSpec& spec, const WinogradScheme& scheme) {
  return std::make_unique<WinogradKernel>(spec, scheme);
}

}  // namespace lowbit
