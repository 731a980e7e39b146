// The portable half of the Winograd kernels: chunks of input channels, packing of the weights, addressing of
// the tiles and the split into tasks, around the algebra of winograd_scheme.h.
//
// The 4 x 4 tiles of all images are one sequence, cut into blocks. A block's inputs are transformed into the
// scratch memory of a thread; then every panel of output channels multiplies them, point by point, and its
// products are transformed back and finished. Nothing is transformed for more than a block.
#include "kernels/arm/winograd.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "core/packed_weights.h"
#include "core/selection.h"
#include "kernels/arm/gemm_finish.h"
#include "kernels/arm/winograd_scheme.h"
#include "kernels/common/epilogue_tables.h"
#include "kernels/common/workspace.h"

namespace lowbit {
namespace {

// Of a thread's scratch memory.
constexpr size_t kScratchBytes = 256 * 1024;
constexpr size_t kMaxBlockTiles = 32;
// Between the arrays of two points, so that 36 of them do not meet in the same sets of a cache.
constexpr size_t kPointPadding = 64;

// The narrow form of a tile's sums, at most: two bytes for each of 16 channels.
constexpr size_t kNarrowBytes = kWinogradOutputs * 16 * 2;

// Bytes of scratch memory that every tile needs: transformed inputs, products, sums.
constexpr size_t TileBytes(size_t blocks, size_t panel) {
  return kWinogradPoints * (blocks * kWinogradBlock * sizeof(int16_t) + kWinogradProductBytes) +
         kWinogradOutputs * panel * sizeof(int32_t) + kNarrowBytes + sizeof(WinogradDirect);
}
// And that a block needs besides: a pixel outside the image, the last channels of a window, padding.
constexpr size_t FixedBytes(size_t blocks) {
  return blocks * kWinogradBlock + kWinogradPoints * (kWinogradBlock + 2 * kPointPadding) +
         kWinogradOverread + 6 * 64;
}
size_t LargestBlock(size_t blocks, size_t panel) {
  if (FixedBytes(blocks) >= kScratchBytes) return 0;
  const size_t tiles = (kScratchBytes - FixedBytes(blocks)) / TileBytes(blocks, panel);
  return std::min(tiles / 4 * 4, kMaxBlockTiles);
}

size_t InputBlocks(const ConvGeometry& g) {
  return DivideUp(static_cast<size_t>(g.GroupIn()), kWinogradBlock);
}

// How the bytes of x stand for its codes: u = code ^ flip, of which only [lo, hi] are met.
struct InputBytes {
  uint8_t flip;
  int32_t zero, lo, hi;
};
InputBytes InputBytesOf(const ConvSpec& spec) {
  const int32_t shift = spec.x.encoding == Encoding::kSigned ? 128 : 0;
  const int32_t zero = spec.x_zero_point + shift;
  return {static_cast<uint8_t>(shift), zero, std::min(zero, spec.x.MinCode() + shift),
          std::max(zero, spec.x.MaxCode() + shift)};
}

// Bounds of the weights that their bits and zero points allow.
int32_t LargestWeight(const ConvSpec& spec) {
  if (spec.w.encoding == Encoding::kBipolar) return 1;
  const auto [least, largest] = std::minmax_element(spec.w_zero_point.begin(), spec.w_zero_point.end());
  return std::max(std::abs(spec.w.MinCode() - *largest), std::abs(spec.w.MaxCode() - *least));
}

// Successive blocks of input channels, and what is added to the sums of their products, [panel].
struct Chunk {
  size_t first, end;
  std::vector<int32_t> offset;
};

// The sum of u w over some channels lies between these.
struct SumRange {
  int64_t lo = 0, hi = 0;

  void Add(const InputBytes& x, int32_t weight) {
    lo += std::min(weight * x.lo, weight * x.hi);
    hi += std::max(weight * x.lo, weight * x.hi);
  }
  SumRange operator+(const SumRange& other) const { return {lo + other.lo, hi + other.hi}; }
};

// The chunks of a panel: each as long as the sums of all its channels allow. None where a single block's sums
// span too much.
std::vector<Chunk> ChunksOf(const ConvSpec& spec, const WinogradScheme& scheme, size_t channel,
                            size_t count) {
  const ConvGeometry& g = spec.geometry;
  const auto inputs = static_cast<size_t>(g.GroupIn()), k = static_cast<size_t>(g.K());
  const InputBytes x = InputBytesOf(spec);
  const int64_t span = int64_t{1} << scheme.bits;
  std::vector<SumRange> sums(count), with(count);
  std::vector<Chunk> chunks;
  const auto close = [&](size_t first, size_t end) {
    Chunk chunk{first, end, std::vector<int32_t>(scheme.channels)};
    for (size_t c = 0; c < count; ++c) chunk.offset[c] = static_cast<int32_t>(-span / 2 - sums[c].lo);
    chunks.push_back(std::move(chunk));
  };
  size_t first = 0;
  const size_t blocks = InputBlocks(g);
  for (size_t block = 0; block < blocks; ++block) {
    const size_t begin = block * kWinogradBlock, end = std::min(begin + kWinogradBlock, inputs);
    bool fits = true;
    std::vector<SumRange> added(count);
    for (size_t c = 0; c < count; ++c) {
      for (size_t tap = 0; tap < 9; ++tap) {
        const size_t at = (channel + c) * k + tap * inputs;
        for (size_t i = begin; i < end; ++i)
          added[c].Add(x, spec.WeightValue(static_cast<int64_t>(channel + c), static_cast<int64_t>(at + i)));
      }
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

// The chunks of all panels together; 0 where there is a panel that cannot be cut. Weights are read only where
// their range does not tell.
size_t TotalChunks(const ConvSpec& spec, const WinogradScheme& scheme) {
  const InputBytes x = InputBytesOf(spec);
  const int64_t span = int64_t{x.hi - x.lo} * LargestWeight(spec) * spec.geometry.K();
  if (span < int64_t{1} << scheme.bits) return PanelsOf(spec.geometry, scheme);
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
  const int16_t* weights;     // [point][block][8 channels][panel]
  std::vector<int32_t> base;  // bias, less what zero points and offsets add to the sums; [panel]
  std::vector<Chunk> chunks;
};

template <class T>
ptrdiff_t Bytes(size_t elements) {
  return static_cast<ptrdiff_t>(elements * sizeof(T));
}

// How the tiles of one shape are cut.
struct TilePlan {
  size_t rows, columns;  // of tiles, in an image
  size_t step, blocks;   // tiles from block to block
  size_t tiles;          // of the largest block, the last
};

struct Scratch {
  size_t pad_pixel = 0, last_channels = 0, inputs = 0, products = 0, narrow = 0, sums = 0, direct = 0,
         bytes = 0;
  size_t input_pitch = 0;    // of the points, in elements
  size_t product_pitch = 0;  // in bytes
};

class WinogradKernel final : public ConvKernel {
 public:
  WinogradKernel(const ConvSpec& spec, const WinogradScheme& scheme);

  void Run(const ConvArgs& args, ThreadPool& pool) const override;
  size_t WorkspaceBytes(const ConvShape& shape) const override { return PlanScratch(Plan(shape)).bytes; }
  size_t PackedBytes() const override { return weights_->size() + epilogue_.Bytes(); }

 private:
  // What one task works with.
  struct Task {
    const ConvArgs& args;
    const TilePlan& plan;
    const Scratch& layout;
    uint8_t *pad_pixel, *last_channels;
    int16_t* inputs;
    uint8_t* products;
    void* narrow;
    int32_t* sums;
    WinogradDirect* direct;
  };
  // A tile's image and the first of its outputs.
  struct Tile {
    int64_t image, y, x;
  };

  void PackWeights(const ConvSpec& spec, const Panel& panel, int16_t* to) const;
  TilePlan Plan(const ConvShape& shape) const;
  Scratch PlanScratch(const TilePlan& plan) const;
  static Tile TileAt(const TilePlan& plan, size_t index);
  void TransformTile(const Task& task, const Tile& tile, size_t group, int16_t* to, size_t block_pitch) const;
  void TransformBlock(const Task& task, size_t first, size_t count, size_t group) const;
  bool FinishesDirectly(const Panel& panel) const {
    const EpilogueView& e = epilogue_.view();
    return e.pack_clips && !e.has_residual && panel.count == scheme_.channels;
  }
  void ListOutputs(const Task& task, size_t first, size_t count, const Panel& panel) const;
  void MultiplyBlock(const Task& task, size_t count, const Panel& panel, bool direct) const;
  void FinishBlock(const Task& task, size_t first, size_t count, const Panel& panel) const;

  // The tiles from `at` on of `count` that are multiplied together.
  static size_t GroupSize(size_t count, size_t at) { return count - at > 4 ? 8 : 4; }
  // Of the sums of a block, [4 rows][tile][4 pixels][panel].
  size_t SumRow(const TilePlan& plan) const { return plan.tiles * kWinogradTile * scheme_.channels; }
  size_t PointWeights() const { return blocks_ * kWinogradBlock * scheme_.channels; }

  const ConvGeometry geometry_;
  const WinogradScheme& scheme_;
  const size_t blocks_;  // of input channels
  const uint8_t flip_, pad_byte_;
  EpilogueTables epilogue_;
  PackedWeights weights_;
  std::vector<Panel> panels_;
};

WinogradKernel::WinogradKernel(const ConvSpec& spec, const WinogradScheme& scheme)
    : geometry_(spec.geometry),
      scheme_(scheme),
      blocks_(InputBlocks(spec.geometry)),
      flip_(InputBytesOf(spec).flip),
      pad_byte_(static_cast<uint8_t>(spec.x_zero_point)),
      epilogue_(spec.epilogue, static_cast<size_t>(spec.geometry.out_channels)) {
  const ConvGeometry& g = geometry_;
  const InputBytes x = InputBytesOf(spec);
  const auto k = static_cast<size_t>(g.K());
  std::vector<int64_t> largest(static_cast<size_t>(g.out_channels));
  ForEachPanel(g, scheme, [&](size_t group, size_t channel, size_t count) {
    Panel panel{channel,
                count,
                group,
                nullptr,
                std::vector<int32_t>(scheme.channels),
                ChunksOf(spec, scheme, channel, count)};
    for (size_t c = 0; c < count; ++c) {
      int64_t sum = 0, magnitude = 0;
      for (size_t i = (channel + c) * k; i < (channel + c + 1) * k; ++i) {
        const int32_t value = spec.WeightValue(static_cast<int64_t>(channel + c), static_cast<int64_t>(i));
        sum += value;
        magnitude += std::abs(value);
      }
      int64_t base = spec.bias[channel + c] - x.zero * sum;
      for (const Chunk& chunk : panel.chunks) base -= chunk.offset[c];
      panel.base[c] = static_cast<int32_t>(static_cast<uint32_t>(base));
      // |x - zero point| < 256
      largest[channel + c] = 256 * magnitude + std::abs(static_cast<int64_t>(spec.bias[channel + c]));
    }
    panels_.push_back(std::move(panel));
    return true;
  });
  epilogue_.LimitAccumulators(largest);

  const size_t panel_weights = kWinogradPoints * PointWeights();
  AlignedBytes packed(panels_.size() * panel_weights * sizeof(int16_t) + kWinogradOverread);
  auto* to = reinterpret_cast<int16_t*>(packed.data());
  for (size_t p = 0; p < panels_.size(); ++p) PackWeights(spec, panels_[p], to + p * panel_weights);
  weights_ = ShareWeights(std::move(packed));
  const auto* from = reinterpret_cast<const int16_t*>(weights_->data());
  for (size_t p = 0; p < panels_.size(); ++p) panels_[p].weights = from + p * panel_weights;
}

// `to` is zeroed, for the channels that fill up blocks and panels.
void WinogradKernel::PackWeights(const ConvSpec& spec, const Panel& panel, int16_t* to) const {
  const auto inputs = static_cast<size_t>(geometry_.GroupIn()), k = static_cast<size_t>(geometry_.K());
  for (size_t c = 0; c < panel.count; ++c) {
    const size_t channel = panel.channel + c;
    for (size_t i = 0; i < inputs; ++i) {
      std::array<int32_t, 9> taps;
      for (size_t tap = 0; tap < taps.size(); ++tap) {
        taps[tap] = spec.WeightValue(static_cast<int64_t>(channel),
                                     static_cast<int64_t>(channel * k + tap * inputs + i));
      }
      std::array<int16_t, kWinogradPoints> values;
      scheme_.weights(taps.data(), values.data());
      for (size_t point = 0; point < kWinogradPoints; ++point)
        to[point * PointWeights() + i * scheme_.channels + c] = values[point];
    }
  }
}

TilePlan WinogradKernel::Plan(const ConvShape& shape) const {
  TilePlan plan;
  plan.rows = DivideUp(static_cast<size_t>(shape.out_h), kWinogradTile);
  plan.columns = DivideUp(static_cast<size_t>(shape.out_w), kWinogradTile);
  const size_t total = static_cast<size_t>(shape.batch) * plan.rows * plan.columns;
  // Whole groups of 8 tiles; what is left belongs to the last block where it has room.
  const size_t limit = LargestBlock(blocks_, scheme_.channels);
  plan.step = limit >= 8 ? limit / 8 * 8 : limit;
  plan.blocks = total <= limit ? 1 : 1 + DivideUp(total - limit, plan.step);
  plan.tiles = std::min(RoundUp(std::max(total, size_t{1}), 4), limit);
  return plan;
}

Scratch WinogradKernel::PlanScratch(const TilePlan& plan) const {
  Scratch s;
  s.input_pitch = plan.tiles * blocks_ * kWinogradBlock + kPointPadding / sizeof(int16_t);
  s.product_pitch = plan.tiles * kWinogradProductBytes + kPointPadding;
  ScratchLayout layout;
  s.pad_pixel = layout.Take(blocks_ * kWinogradBlock);
  s.last_channels = layout.Take(kWinogradPoints * kWinogradBlock);
  s.inputs = layout.Take(kWinogradPoints * s.input_pitch * sizeof(int16_t) + kWinogradOverread);
  s.products = layout.Take(kWinogradPoints * s.product_pitch);
  s.narrow = layout.Take(scheme_.chunks_per_widening > 1 ? plan.tiles * kNarrowBytes : 0);
  s.sums = layout.Take(plan.tiles * kWinogradOutputs * scheme_.channels * sizeof(int32_t));
  s.direct = layout.Take(plan.tiles * sizeof(WinogradDirect));
  s.bytes = layout.bytes();
  return s;
}

WinogradKernel::Tile WinogradKernel::TileAt(const TilePlan& plan, size_t index) {
  const size_t column = index % plan.columns, row = index / plan.columns % plan.rows;
  return {static_cast<int64_t>(index / plan.columns / plan.rows), static_cast<int64_t>(row * kWinogradTile),
          static_cast<int64_t>(column * kWinogradTile)};
}

void WinogradKernel::TransformTile(const Task& task, const Tile& tile, size_t group, int16_t* to,
                                   size_t block_pitch) const {
  const ConvGeometry& g = geometry_;
  const ConvShape& s = task.args.shape;
  const auto channels = static_cast<size_t>(g.GroupIn());
  const uint8_t* image = static_cast<const uint8_t*>(task.args.x) +
                         tile.image * s.in_h * s.in_w * g.in_channels +
                         static_cast<int64_t>(group * channels);
  std::array<const uint8_t*, kWinogradPoints> pixels;
  for (size_t i = 0; i < kWinogradPoints; ++i) {
    const int64_t y = tile.y - g.pad_top + static_cast<int64_t>(i / kWinogradWindow);
    const int64_t x = tile.x - g.pad_left + static_cast<int64_t>(i % kWinogradWindow);
    const bool inside = y >= 0 && y < s.in_h && x >= 0 && x < s.in_w;
    pixels[i] = inside ? image + (y * s.in_w + x) * g.in_channels : task.pad_pixel;
  }
  const size_t whole = channels / kWinogradBlock, rest = channels % kWinogradBlock;
  const size_t pitch = task.layout.input_pitch;
  scheme_.input({pixels.data(), whole, flip_, to, pitch, block_pitch});
  if (rest == 0) return;
  for (size_t i = 0; i < kWinogradPoints; ++i) {
    uint8_t* last = task.last_channels + i * kWinogradBlock;  // beyond the channels anything: weights are 0
    std::memcpy(last, pixels[i] + whole * kWinogradBlock, rest);
    pixels[i] = last;
  }
  scheme_.input({pixels.data(), 1, flip_, to + whole * block_pitch, pitch, block_pitch});
}

void WinogradKernel::TransformBlock(const Task& task, size_t first, size_t count, size_t group) const {
  for (size_t at = 0; at < count;) {
    const size_t size = GroupSize(count, at);
    int16_t* to = task.inputs + at * blocks_ * kWinogradBlock;
    for (size_t tile = 0; tile < std::min(size, count - at); ++tile)
      TransformTile(task, TileAt(task.plan, first + at + tile), group, to + tile * kWinogradBlock,
                    size * kWinogradBlock);
    at += size;
  }
}

// Where the tiles of a block end in y, for outputs that go there at once.
void WinogradKernel::ListOutputs(const Task& task, size_t first, size_t count, const Panel& panel) const {
  const ConvShape& s = task.args.shape;
  for (size_t t = 0; t < count; ++t) {
    const Tile tile = TileAt(task.plan, first + t);
    const int64_t pixel = (tile.image * s.out_h + tile.y) * s.out_w + tile.x;
    task.direct[t] = {
        static_cast<uint8_t*>(task.args.y) + pixel * geometry_.out_channels + panel.channel,
        static_cast<size_t>(std::min(int64_t{kWinogradTile}, s.out_h - tile.y)),
        static_cast<size_t>(std::min(int64_t{kWinogradTile}, s.out_w - tile.x)),
    };
  }
}

void WinogradKernel::MultiplyBlock(const Task& task, size_t count, const Panel& panel, bool direct) const {
  const Scratch& layout = task.layout;
  for (const Chunk& chunk : panel.chunks) {
    const size_t channel = chunk.first * kWinogradBlock;
    const int16_t* w = panel.weights + channel * scheme_.channels;
    WinogradProduct product{};
    product.blocks = chunk.end - chunk.first;
    if (GroupSize(count, 0) >= count) {  // one group: all points
      const size_t size = GroupSize(count, 0);
      product.x = task.inputs + channel * size;
      product.w = w;
      product.to = task.products;
      product.count = kWinogradPoints;
      product.x_step = Bytes<int16_t>(layout.input_pitch);
      product.w_step = Bytes<int16_t>(PointWeights());
      product.to_step = Bytes<uint8_t>(layout.product_pitch);
      (size == 8 ? scheme_.product8 : scheme_.product4)(product);
    } else {
      const size_t whole = count / 8 + (count % 8 > 4 ? 1 : 0);
      for (size_t point = 0; point < kWinogradPoints; ++point) {
        const int16_t* x = task.inputs + point * layout.input_pitch;
        uint8_t* to = task.products + point * layout.product_pitch;
        product.w = w + point * PointWeights();
        product.x = x + channel * 8;
        product.to = to;
        product.count = whole;
        product.x_step = Bytes<int16_t>(8 * blocks_ * kWinogradBlock);
        product.to_step = Bytes<uint8_t>(8 * kWinogradProductBytes);
        scheme_.product8(product);
        if (8 * whole >= count) continue;
        product.x = x + 8 * whole * blocks_ * kWinogradBlock + channel * 4;
        product.to = to + 8 * whole * kWinogradProductBytes;
        product.count = 1;
        scheme_.product4(product);
      }
    }
    const size_t index = static_cast<size_t>(&chunk - panel.chunks.data()), run = scheme_.chunks_per_widening;
    const bool ends = index + 1 == panel.chunks.size();
    scheme_.output({task.products, layout.product_pitch, count, chunk.offset.data(), index % run == 0,
                    ends || index % run == run - 1, task.narrow, index < run ? panel.base.data() : nullptr,
                    task.sums, SumRow(task.plan), ends && direct ? task.direct : nullptr, &epilogue_.view(),
                    panel.channel, static_cast<size_t>(task.args.shape.out_w * geometry_.out_channels)});
  }
}

// Sums of tiles -> y, row by row of a run of tiles side by side; outputs beyond the image are dropped.
void WinogradKernel::FinishBlock(const Task& task, size_t first, size_t count, const Panel& panel) const {
  const ConvShape& s = task.args.shape;
  for (size_t t = 0; t < count;) {
    const Tile tile = TileAt(task.plan, first + t);
    const size_t run = std::min(count - t, task.plan.columns - (first + t) % task.plan.columns);
    const auto rows = static_cast<size_t>(std::min(int64_t{kWinogradTile}, s.out_h - tile.y));
    const size_t columns = std::min(run * kWinogradTile, static_cast<size_t>(s.out_w - tile.x));
    for (size_t row = 0; row < rows; ++row) {
      const int64_t pixel = (tile.image * s.out_h + tile.y + static_cast<int64_t>(row)) * s.out_w + tile.x;
      FinishSums({&epilogue_.view(), static_cast<size_t>(pixel), 1,
                  static_cast<const uint8_t*>(task.args.residual), task.args.y},
                 {task.sums + row * SumRow(task.plan) + t * kWinogradTile * scheme_.channels,
                  scheme_.channels, 0, columns, panel.channel, panel.count});
    }
    t += run;
  }
}

// Cycles of a call, and of a group of tiles' products beside their multiplications; modelled Cortex-A53.
constexpr double kCallCycles = 500, kProductCycles = 60;

double Cycles(const ConvSpec& spec, const WinogradScheme& scheme, const ConvShape& shape) {
  const ConvGeometry& g = spec.geometry;
  const auto edge = static_cast<int64_t>(kWinogradTile);
  const auto tiles = static_cast<size_t>(shape.batch * ((shape.out_h + edge - 1) / edge) *
                                         ((shape.out_w + edge - 1) / edge));
  const size_t rest = tiles % 8;
  const auto groups8 = static_cast<double>(tiles / 8 + (rest > 4 ? 1 : 0));
  const double groups4 = rest > 0 && rest <= 4 ? 1 : 0;
  const auto panels = static_cast<double>(PanelsOf(g, scheme)), blocks = static_cast<double>(InputBlocks(g));
  const auto chunks = static_cast<double>(TotalChunks(spec, scheme));
  const double steps = groups8 * scheme.product8_cycles + groups4 * scheme.product4_cycles;
  const double products = static_cast<double>(kWinogradPoints) *
                          (panels * blocks * steps + chunks * (groups8 + groups4) * kProductCycles);
  const double inputs = static_cast<double>(g.group) * blocks * scheme.input_cycles;
  const double outputs = chunks * scheme.output_cycles + panels * scheme.finish_cycles;
  return kCallCycles + products + static_cast<double>(tiles) * (inputs + outputs);
}

void WinogradKernel::Run(const ConvArgs& args, ThreadPool& pool) const {
  const TilePlan plan = Plan(args.shape);
  const size_t total = static_cast<size_t>(args.shape.batch) * plan.rows * plan.columns;
  if (total == 0) return;
  const Scratch layout = PlanScratch(plan);
  // Blocks are dealt out first; a task of a block that is split by panels transforms its inputs again, which
  // must remain a small part of its work.
  const double inputs = static_cast<double>(plan.tiles * blocks_) * scheme_.input_cycles;
  const double products = static_cast<double>(plan.tiles * blocks_ * panels_.size() * kWinogradPoints) *
                          scheme_.product8_cycles / 8;
  const size_t pixel_tasks = std::clamp(
      static_cast<size_t>(static_cast<double>(plan.blocks) * products / kTaskCycles), size_t{1}, plan.blocks);
  const size_t few = DivideUp(static_cast<size_t>(kFewTasks), plan.blocks);
  const size_t panel_tasks = std::clamp(static_cast<size_t>(products / std::max(kTaskCycles, 16 * inputs)),
                                        size_t{1}, std::min(few, panels_.size()));
  const TaskSplit split = {plan.blocks, pixel_tasks, panels_.size(), panel_tasks};
  pool.ParallelFor(split.tasks(), [&](size_t index) {
    const auto [first_block, end_block, first_panel, end_panel] = split[index];
    uint8_t* scratch = ThreadScratch(layout.bytes);
    const Task task{args,
                    plan,
                    layout,
                    scratch + layout.pad_pixel,
                    scratch + layout.last_channels,
                    reinterpret_cast<int16_t*>(scratch + layout.inputs),
                    scratch + layout.products,
                    scratch + layout.narrow,
                    reinterpret_cast<int32_t*>(scratch + layout.sums),
                    reinterpret_cast<WinogradDirect*>(scratch + layout.direct)};
    std::memset(task.pad_pixel, pad_byte_, blocks_ * kWinogradBlock);
    for (size_t block = first_block; block < end_block; ++block) {
      const size_t first = block * plan.step;
      const size_t count = block + 1 < plan.blocks ? plan.step : total - first;
      for (size_t p = first_panel; p < end_panel; ++p) {
        const Panel& panel = panels_[p];
        if (p == first_panel || panels_[p - 1].group != panel.group)
          TransformBlock(task, first, count, panel.group);
        const bool direct = FinishesDirectly(panel);
        if (direct) ListOutputs(task, first, count, panel);
        MultiplyBlock(task, count, panel, direct);
        if (!direct) FinishBlock(task, first, count, panel);
      }
    }
  });
}

template <const WinogradScheme& kScheme>
std::string Refuse(const ConvSpec& spec) {
  const ConvGeometry& g = spec.geometry;
  if (g.kernel_h != 3 || g.kernel_w != 3 || g.stride_h != 1 || g.stride_w != 1 || g.dilation_h != 1 ||
      g.dilation_w != 1)
    return "only 3x3 kernels of stride and dilation 1";
  if (spec.x.encoding == Encoding::kBipolar) return "bipolar activations have no code for the padding";
  if (LargestBlock(InputBlocks(g), kScheme.channels) == 0)
    return "the transformed inputs of four tiles exceed the workspace";
  if (LargestWeight(spec) > kScheme.largest_weight) {
    for (int64_t c = 0; c < g.out_channels; ++c) {
      for (int64_t i = c * g.K(); i < (c + 1) * g.K(); ++i) {
        if (std::abs(spec.WeightValue(c, i)) > kScheme.largest_weight)
          return "transformed weights exceed 16 bits";
      }
    }
  }
  if (TotalChunks(spec, kScheme) == 0)
    return "the sums of 8 channels span 2^" + std::to_string(kScheme.bits) + " or more";
  return {};
}

template <const WinogradScheme& kScheme>
double Cost(const ConvSpec& spec, const ConvShape& shape) {
  return Cycles(spec, kScheme, shape);
}

template <const WinogradScheme& kScheme>
std::unique_ptr<ConvKernel> Create(const ConvSpec& spec) {
  return std::make_unique<WinogradKernel>(spec, kScheme);
}

template <const WinogradScheme& kScheme>
KernelRow Row(const KernelInfo& info) {
  return {info, &Refuse<kScheme>, &Cost<kScheme>, &Create<kScheme>};
}

}  // namespace

std::span<const KernelRow> ArmWinogradRows() {
  static const KernelRow kRows[] = {
#define LOWBIT_ARM_WINOGRAD(scheme, name, algorithm, isa, x_bits, w_bits, note) \
  HasKernels(name) ? Row<scheme>({name, "conv", algorithm, isa, x_bits, w_bits, note}) : KernelRow{},
#include "kernels/arm/rows.inc"
  };
  return kRows;
}

}  // namespace lowbit
