// The portable half of the ARM matrix products: packing, addressing and the split into tasks, around the
// tiles and the algebra of gemm_scheme.h.
//
// The output pixels are cut into blocks. A block's windows are packed into the form of the scheme's tiles,
// then every panel of output channels multiplies them, tile by tile: panels outside, a chunk of K at a time,
// so that the weights stay in L1 while the pixels pass. No window is laid out in memory but for its block, in
// the scratch memory of a thread. There weights of few bits, and those that tiles read as words, are unpacked
// too (gemm_panel.h): a chunk for all pixels of the block, so that blocks are as large as they can be.
//
// A window is packed in one of two ways:
//
//   direct    one tap after the other, straight from x: the channels of a tap are consecutive there. A tap
//             outside the image reads a row of zero points.
//   gathered  the window of a pixel is first copied together. For few channels, where a whole kernel row is
//             one copy; for bipolar activations, which have no code for the padding: their values 2q - 1 are
//             copied, and 0 outside the image; and where the sum of a window is needed.
//
// Of windows too long for the scratch memory only a chunk is packed at a time; then a block is one tile, and
// the sums of as many panels as fit are kept meanwhile.
#include "kernels/arm/gemm.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "core/packed_weights.h"
#include "core/selection.h"
#include "core/status.h"
#include "kernels/arm/gemm_finish.h"
#include "kernels/arm/gemm_pack.h"
#include "kernels/arm/gemm_panel.h"
#include "kernels/arm/gemm_scheme.h"
#include "kernels/common/channel_weights.h"
#include "kernels/common/epilogue_tables.h"
#include "kernels/common/workspace.h"

namespace lowbit {
namespace {

// A thread's scratch memory holds the packed windows of a block, and the sums of the panels that multiply one
// chunk of them. Together with the gathered rows and a chunk's weights, half of L1, below 256 KiB.
constexpr size_t kPackedBytes = 176 * 1024, kSumBytes = 48 * 1024, kChunkBytes = 16 * 1024;
constexpr size_t kMaxBlockPixels = 240;
// What is called and finished at once, where K is in one chunk: a multiple of every tile.
constexpr size_t kGroupPixels = 48;
// A small layer is cut into more blocks than the memory requires, for the threads; not below this many
// pixels.
constexpr size_t kMinSharedPixels = 24;
// Fewer channels are gathered; of more, a row of zero points would be long.
constexpr int64_t kDirectMinChannels = 16, kDirectMaxChannels = 16 * 1024;

// The largest tile of a scheme.
size_t LargestTile(const GemmScheme& scheme) {
  size_t pixels = 0;
  for (int size = 0; size < kGemmTileSizes; ++size) {
    if (scheme.tile[size] != nullptr) pixels = GemmTilePixels(size);
  }
  return pixels;
}

// What a run of at most `left` pixels is given to: the largest tile, or the smallest that holds them all.
int TileSizeFor(const GemmScheme& scheme, size_t left) {
  int chosen = 0;
  for (int size = 0; size < kGemmTileSizes; ++size) {
    if (scheme.tile[size] == nullptr) continue;
    chosen = size;
    if (GemmTilePixels(size) >= left) break;
  }
  return chosen;
}

// x' = code - XOffset, signed and about symmetric; bipolar codes are values from the start.
int32_t XOffset(const OperandType& x) { return x.encoding == Encoding::kUnsigned ? 1 << (x.bits - 1) : 0; }

// The ranges of the operands; of the weights what their bits allow where these are not few: kernels are then
// chosen, and measured (tune_file.h), whatever the values are.
GemmOperands RangesOf(const ConvSpec& spec) {
  GemmOperands o{};
  if (spec.x.encoding == Encoding::kBipolar) {
    o.x_lo = -1;
    o.x_hi = 1;
  } else {
    o.x_lo = spec.x.MinCode() - XOffset(spec.x);
    o.x_hi = spec.x.MaxCode() - XOffset(spec.x);
  }
  int32_t lo = spec.weight_values.lo, hi = spec.weight_values.hi;
  if (spec.w.bits > kFewWeightBits) {
    const auto [least, largest] = std::minmax_element(spec.w_zero_point.begin(), spec.w_zero_point.end());
    lo = spec.w.MinCode() - *largest;
    hi = spec.w.MaxCode() - *least;
  }
  // A channel that leaves int8 at one end is moved back (ByteShift), and its other end with it.
  o.w_lo = std::max(lo - std::max(hi - 127, 0), -128);
  o.w_hi = std::min(hi + std::max(-128 - lo, 0), 127);
  return o;
}

// Consecutive output channels of one convolution group.
struct Panel {
  size_t channel, count, group;
  size_t flush;
  int32_t least;  // of the weights and 0
  const uint8_t* weights;
};

// How K is cut, rounded up to what the scheme takes. All chunks but the last are equal, and whole groups of
// packed codes.
struct KChunks {
  size_t size, count;
};
KChunks ChunksOf(const GemmScheme& scheme, size_t padded_k) {
  const size_t longest = kChunkBytes / (scheme.channels * CodeBytes(scheme.form));
  const size_t count = DivideUp(padded_k, longest);
  return count == 1 ? KChunks{padded_k, 1} : KChunks{RoundUp(DivideUp(padded_k, count), 8), count};
}

// Pixels whose packed windows fit.
size_t PackedPixels(const GemmScheme& scheme, size_t padded_k) {
  return std::min(kPackedBytes / (padded_k * CodeBytes(scheme.form)), kMaxBlockPixels);
}

// How the output pixels of one shape are cut.
struct GemmPlan {
  bool whole_windows = true;  // packed; of others a chunk at a time
  size_t pixels = 0, blocks = 0;
  size_t group = 0;       // pixels whose sums are kept at the same time, of
  size_t sum_panels = 0;  // so many panels
};

struct Scratch {
  size_t pad_row = 0, gathered = 0, packed = 0, weights = 0, row_sums = 0, sums = 0, bytes = 0;
};

class GemmKernel final : public ConvKernel {
 public:
  GemmKernel(const ConvSpec& spec, const GemmScheme& scheme);

  void Run(const ConvArgs& args, ThreadPool& pool) const override;
  size_t WorkspaceBytes(const ConvShape& shape) const override {
    return PlanScratch(Plan(Flatten(geometry_, shape))).bytes;
  }
  size_t PackedBytes() const override {
    return weights_->size() + epilogue_.Bytes() + panels_.size() * sizeof(Panel) +
           (bias_.size() + row_sum_weight_.size()) * sizeof(int32_t);
  }

 private:
  // The window of an output pixel: its image, and where it begins.
  struct Window {
    const uint8_t* image;
    int64_t z, y, x;
  };
  // Goes from pixel to pixel without divisions.
  class OutputPixel {
   public:
    OutputPixel(const ConvGeometry& g, const ConvArgs& args, const ConvShape& s, size_t pixel)
        : geometry_(g), shape_(s), image_bytes_(s.in_d * s.in_h * s.in_w * g.in_channels) {
      const auto p = static_cast<int64_t>(pixel);
      x_ = p % s.out_w;
      y_ = p / s.out_w % s.out_h;
      const int64_t plane = p / s.out_w / s.out_h;
      z_ = plane % s.out_d;
      image_ = static_cast<const uint8_t*>(args.x) + plane / s.out_d * image_bytes_;
    }
    Window window() const {
      return {image_, z_ * geometry_.stride_d - geometry_.pad_front,
              y_ * geometry_.stride_h - geometry_.pad_top, x_ * geometry_.stride_w - geometry_.pad_left};
    }
    void Advance() {
      if (++x_ < shape_.out_w) return;
      x_ = 0;
      if (++y_ < shape_.out_h) return;
      y_ = 0;
      if (++z_ < shape_.out_d) return;
      z_ = 0;
      image_ += image_bytes_;
    }

   private:
    const ConvGeometry& geometry_;
    const ConvShape& shape_;
    int64_t image_bytes_, x_, y_, z_;
    const uint8_t* image_;
  };
  // What one task works with.
  struct Task {
    const ConvArgs& args;
    const ConvShape& shape;
    const GemmPlan& plan;
    uint8_t *pad_row, *gathered, *packed, *weights;
    int32_t *row_sums, *sums;
  };

  void PackWeights(const ConvSpec& spec);
  void PackPanel(const int8_t* stored, const Panel& panel, uint8_t* to) const;
  const uint8_t* Weights(const Task& task, const Panel& panel, size_t chunk) const;
  GemmPlan Plan(const ConvShape& shape) const;
  Scratch PlanScratch(const GemmPlan& plan) const;
  double Cycles(const ConvShape& shape) const {
    return static_cast<double>(shape.OutPixels() * geometry_.out_channels * geometry_.K()) /
           scheme_.macs_per_cycle(MachinePipeline(), least_flush_);
  }

  void GatherWindow(const ConvShape& shape, const Window& window, size_t group, size_t begin, size_t end,
                    uint8_t* to) const;
  uint8_t* PackGathered(const Task& task, const Window* windows, int rows, size_t group, size_t begin,
                        size_t end, int32_t* row_sums, uint8_t* to) const;
  uint8_t* PackDirect(const Task& task, const Window* windows, int rows, size_t group, size_t begin,
                      size_t end, uint8_t* to) const;
  void PackBlock(const Task& task, size_t first, size_t count, size_t group, size_t chunk) const;
  void RunBlock(const Task& task, size_t first, size_t count, size_t first_panel, size_t end_panel) const;
  size_t ChunkCodes(size_t chunk) const { return std::min(chunks_.size, padded_k_ - chunk * chunks_.size); }
  // Where the chunk of a block's windows is packed.
  size_t PackedOffset(const GemmPlan& plan, size_t chunk) const {
    return plan.whole_windows ? chunk * chunks_.size * plan.pixels * CodeBytes(scheme_.form) : 0;
  }
  // Where a chunk of a panel is held, from its beginning.
  size_t ChunkOffset(size_t chunk) const {
    return chunk * GemmPanelBytes(chunks_.size * scheme_.channels, weight_bits_);
  }

  const ConvGeometry geometry_;
  const GemmScheme& scheme_;
  const GemmPacker packer_;
  const size_t tile_pixels_;
  EpilogueTables epilogue_;
  const bool bipolar_;
  GemmXMap x_map_;        // of what is packed, codes or gathered values
  uint8_t zero_byte_;     // packs to 0
  uint8_t pad_byte_ = 0;  // the code outside the image, as stored in x
  bool gathers_ = false;
  size_t padded_k_ = 0;
  KChunks chunks_{};
  size_t least_flush_ = 1;
  int weight_bits_ = 8;               // as held
  GemmPanelUnpack unpack_ = nullptr;  // where tiles read something else
  PackedWeights weights_;
  std::vector<Panel> panels_;
  std::vector<int32_t> bias_;            // [out_channels + padding]
  std::vector<int32_t> row_sum_weight_;  // [out_channels + padding], empty when all are 0
};

GemmKernel::GemmKernel(const ConvSpec& spec, const GemmScheme& scheme)
    : geometry_(spec.geometry),
      scheme_(scheme),
      packer_(GemmPackerFor(scheme.form, scheme.unit)),
      tile_pixels_(LargestTile(scheme)),
      epilogue_(spec),
      bipolar_(spec.x.encoding == Encoding::kBipolar) {
  // Signed bytes, codes or gathered values: b = (b ^ 0x80) - 128.
  x_map_ = spec.x.encoding == Encoding::kUnsigned ? GemmXMap{0, static_cast<uint8_t>(XOffset(spec.x))}
                                                  : GemmXMap{0x80, 0x80};
  zero_byte_ = x_map_.flip ^ x_map_.offset;
  pad_byte_ = bipolar_ ? 0 : static_cast<uint8_t>(spec.x_zero_point);
  PackWeights(spec);
  gathers_ = bipolar_ || !row_sum_weight_.empty() || geometry_.GroupIn() < kDirectMinChannels ||
             geometry_.GroupIn() > kDirectMaxChannels ||
             geometry_.GroupIn() % static_cast<int64_t>(scheme.unit) != 0;
}

void GemmKernel::PackWeights(const ConvSpec& spec) {
  const ConvGeometry& g = geometry_;
  const size_t channels = static_cast<size_t>(g.out_channels), k = static_cast<size_t>(g.K());
  padded_k_ = RoundUp(k, scheme_.k_multiple);

  // bias + (x_offset - zx) * sum (w - zw), which wraps like the accumulators do. A bipolar x' is the value.
  const int64_t zero = bipolar_ ? 0 : spec.x_zero_point - XOffset(spec.x);
  bias_.assign(channels + kEpiloguePadding, 0);
  std::vector<int32_t> shift(channels);
  std::vector<int64_t> largest(channels);
  std::vector<int8_t> stored(channels * k);
  for (size_t c = 0; c < channels; ++c) {
    const ChannelValues& values = spec.channel_values[c];
    shift[c] = ByteShift(values);
    largest[c] = 256 * values.magnitude + std::abs(static_cast<int64_t>(spec.bias[c]));  // |x - zx| < 256
    bias_[c] = static_cast<int32_t>(static_cast<uint32_t>(spec.bias[c] - zero * values.sum));
    LoadChannel(spec, c, shift[c], stored.data() + c * k);
  }
  epilogue_.LimitAccumulators(largest);
  if (std::any_of(shift.begin(), shift.end(), [](int32_t s) { return s != 0; })) {
    row_sum_weight_ = shift;
    row_sum_weight_.resize(channels + kEpiloguePadding);
  }

  const size_t group_out = static_cast<size_t>(g.GroupOut());
  GemmOperands operands = RangesOf(spec);
  operands.k = k;
  for (size_t group = 0; group < static_cast<size_t>(g.group); ++group) {
    for (size_t c = 0; c < group_out; c += scheme_.channels) {
      Panel panel{};
      panel.channel = group * group_out + c;
      panel.count = std::min(scheme_.channels, group_out - c);
      panel.group = group;
      operands.weights = stored.data() + panel.channel * k;
      operands.channels = panel.count;
      panel.flush = scheme_.flush(operands);
      Require(panel.flush != 0, "weights outside the range for which this kernel was chosen");
      const auto [least, largest] = std::minmax_element(operands.weights, operands.weights + panel.count * k);
      panel.least = std::min<int32_t>(*least, 0);
      const int panel_bits = GemmPanelBits(*least, *largest);
      least_flush_ = panels_.empty() ? panel.flush : std::min(least_flush_, panel.flush);
      weight_bits_ = panels_.empty() ? panel_bits : std::max(weight_bits_, panel_bits);
      panels_.push_back(panel);
    }
  }
  unpack_ = GemmPanelUnpackFor(scheme_.form, weight_bits_);
  chunks_ = ChunksOf(scheme_, padded_k_);
  const size_t last = ChunkCodes(chunks_.count - 1) * scheme_.channels;
  const size_t panel_bytes = ChunkOffset(chunks_.count - 1) + GemmPanelBytes(last, weight_bits_);
  AlignedBytes packed(panels_.size() * panel_bytes + kGemmOverread);
  for (size_t p = 0; p < panels_.size(); ++p) {
    PackPanel(stored.data() + panels_[p].channel * k, panels_[p], packed.data() + p * panel_bytes);
  }
  weights_ = ShareWeights(std::move(packed));
  for (size_t p = 0; p < panels_.size(); ++p) panels_[p].weights = weights_->data() + p * panel_bytes;
}

// The chunks of one panel, each [K / unit][channels][unit] in the order of the scheme's form.
void GemmKernel::PackPanel(const int8_t* stored, const Panel& panel, uint8_t* to) const {
  const size_t k = static_cast<size_t>(geometry_.K()), unit = scheme_.unit;
  const size_t swap = scheme_.form == GemmForm::kPairs ? 1 : 0;
  std::vector<int8_t> codes(padded_k_ * scheme_.channels);
  for (size_t c = 0; c < panel.count; ++c, stored += k) {
    for (size_t i = 0; i < k; ++i)
      codes[(i / unit * scheme_.channels + c) * unit + (i % unit ^ swap)] = stored[i];
  }
  for (size_t chunk = 0; chunk < chunks_.count; ++chunk) {
    PackGemmPanel(scheme_.form, weight_bits_, codes.data() + chunk * chunks_.size * scheme_.channels,
                  ChunkCodes(chunk) * scheme_.channels, panel.least, to + ChunkOffset(chunk));
  }
}

// A chunk as tiles read it.
const uint8_t* GemmKernel::Weights(const Task& task, const Panel& panel, size_t chunk) const {
  const uint8_t* held = panel.weights + ChunkOffset(chunk);
  if (unpack_ == nullptr) return held;
  unpack_(held, ChunkCodes(chunk) * scheme_.channels, panel.least, task.weights);
  return task.weights;
}

GemmPlan GemmKernel::Plan(const ConvShape& shape) const {
  GemmPlan plan;
  const size_t total = static_cast<size_t>(shape.OutPixels());
  const size_t limit = PackedPixels(scheme_, padded_k_);
  plan.whole_windows = limit >= tile_pixels_;
  if (!plan.whole_windows) {
    plan.pixels = plan.group = tile_pixels_;
    plan.sum_panels = kSumBytes / (tile_pixels_ * scheme_.channels * sizeof(int32_t));
  } else {
    const size_t shared = std::clamp(DivideUp(WantedTasks(Cycles(shape)), panels_.size()), size_t{1},
                                     std::max(size_t{1}, total / kMinSharedPixels));
    const size_t even = DivideUp(total, std::max(DivideUp(total, limit), shared));
    plan.pixels =
        std::min(RoundUp(std::max(even, size_t{1}), tile_pixels_), limit / tile_pixels_ * tile_pixels_);
    plan.group = chunks_.count == 1 ? std::min(plan.pixels, kGroupPixels) : plan.pixels;
    plan.sum_panels = 1;
  }
  plan.blocks = DivideUp(total, plan.pixels);
  return plan;
}

Scratch GemmKernel::PlanScratch(const GemmPlan& plan) const {
  Scratch s;
  ScratchLayout layout;
  const auto row = static_cast<size_t>(geometry_.GroupIn());
  s.pad_row = layout.Take(gathers_ ? 0 : row);
  s.gathered = layout.Take(gathers_ ? 8 * chunks_.size : 0);
  const size_t packed_k = plan.whole_windows ? chunks_.size * chunks_.count : chunks_.size;
  s.packed = layout.Take(plan.pixels * packed_k * CodeBytes(scheme_.form) + kGemmOverread);
  s.weights = layout.Take(unpack_ == nullptr ? 0
                                             : RoundUp(chunks_.size * scheme_.channels, kGemmPanelGroup) *
                                                       CodeBytes(scheme_.form) +
                                                   kGemmOverread);
  s.row_sums = layout.Take(row_sum_weight_.empty() ? 0 : plan.pixels * sizeof(int32_t));
  s.sums = layout.Take(plan.sum_panels * plan.group * scheme_.channels * sizeof(int32_t));
  s.bytes = layout.bytes();
  return s;
}

// Products [begin, end) of a window, codes or (bipolar) values.
void GemmKernel::GatherWindow(const ConvShape& s, const Window& window, size_t group, size_t begin,
                              size_t end, uint8_t* to) const {
  const ConvGeometry& g = geometry_;
  const int64_t channels = g.GroupIn();
  // A run of consecutive bytes of x is a tap; with one group and without dilation all taps of a kernel row
  // inside the image.
  const bool whole_rows = g.group == 1 && g.dilation_w == 1;
  const int64_t run_taps = whole_rows ? g.kernel_w : 1, run_bytes = run_taps * channels;
  const auto last = static_cast<int64_t>(end);
  for (auto k = static_cast<int64_t>(begin); k < last;) {
    const int64_t run = k / run_bytes, from = k - run * run_bytes;
    const int64_t until = std::min(run_bytes, from + last - k);
    const int64_t row = whole_rows ? run : run / g.kernel_w, kx = whole_rows ? 0 : run % g.kernel_w;
    const int64_t kz = row / g.kernel_h, ky = row % g.kernel_h;
    const int64_t iz = window.z + kz * g.dilation_d, iy = window.y + ky * g.dilation_h,
                  ix = window.x + kx * g.dilation_w;
    // Bytes [first, past) of the run lie in the image.
    int64_t first = until, past = until;
    if (iz >= 0 && iz < s.in_d && iy >= 0 && iy < s.in_h && ix < s.in_w && ix > -run_taps) {
      first = std::clamp(-ix * channels, from, until);
      past = std::clamp(std::min(run_taps, s.in_w - ix) * channels, first, until);
    }
    std::memset(to, pad_byte_, static_cast<size_t>(first - from));
    to += first - from;
    if (first < past) {
      const uint8_t* source = window.image + ((iz * s.in_h + iy) * s.in_w + ix) * g.in_channels +
                              static_cast<int64_t>(group) * channels + first;
      if (bipolar_) {
        for (int64_t i = 0; i < past - first; ++i) to[i] = static_cast<uint8_t>(2 * source[i] - 1);
      } else {
        std::memcpy(to, source, static_cast<size_t>(past - first));
      }
      to += past - first;
    }
    std::memset(to, pad_byte_, static_cast<size_t>(until - past));
    to += until - past;
    k += until - from;
  }
}

// Products [begin, end) of `rows` windows; returns the end of what was packed. Adds to row_sums where it is
// not null.
uint8_t* GemmKernel::PackGathered(const Task& task, const Window* windows, int rows, size_t group,
                                  size_t begin, size_t end, int32_t* row_sums, uint8_t* to) const {
  const size_t codes = end - begin, real = std::min(end, static_cast<size_t>(geometry_.K())) - begin;
  std::array<const uint8_t*, 8> from;
  for (int r = 0; r < rows; ++r) {
    uint8_t* row = task.gathered + static_cast<size_t>(r) * chunks_.size;
    GatherWindow(task.shape, windows[r], group, begin, begin + real, row);
    std::memset(row + real, zero_byte_, codes - real);
    from[static_cast<size_t>(r)] = row;
    if (row_sums != nullptr) {
      int32_t sum = 0;
      for (size_t i = 0; i < real; ++i) sum += (row[i] ^ x_map_.flip) - x_map_.offset;
      row_sums[r] += sum;
    }
  }
  (rows == 8 ? packer_.rows8 : packer_.rows4)(from.data(), codes, x_map_, to);
  return to + static_cast<size_t>(rows) * codes * CodeBytes(scheme_.form);
}

uint8_t* GemmKernel::PackDirect(const Task& task, const Window* windows, int rows, size_t group, size_t begin,
                                size_t end, uint8_t* to) const {
  const ConvGeometry& g = geometry_;
  const ConvShape& s = task.shape;
  const size_t channels = static_cast<size_t>(g.GroupIn()), k = static_cast<size_t>(g.K());
  const size_t code_bytes = static_cast<size_t>(rows) * CodeBytes(scheme_.form);
  const GemmPackFunction pack = rows == 8 ? packer_.rows8 : packer_.rows4;
  std::array<const uint8_t*, 8> from;
  // Not divided for every tap: of a 1x1 convolution of few channels that would be a part of the packing.
  int64_t kz = 0, ky = 0, kx = 0;
  size_t first = 0;
  if (begin > 0) {
    const auto tap = static_cast<int64_t>(begin / channels);
    kz = tap / g.kernel_w / g.kernel_h;
    ky = tap / g.kernel_w % g.kernel_h;
    kx = tap % g.kernel_w;
    first = begin % channels;
  }
  for (size_t at = begin; at < std::min(end, k); first = 0) {
    const size_t bytes = std::min(channels - first, std::min(end, k) - at);
    for (int r = 0; r < rows; ++r) {
      const int64_t iz = windows[r].z + kz * g.dilation_d, iy = windows[r].y + ky * g.dilation_h,
                    ix = windows[r].x + kx * g.dilation_w;
      const bool inside = iz >= 0 && iz < s.in_d && iy >= 0 && iy < s.in_h && ix >= 0 && ix < s.in_w;
      from[static_cast<size_t>(r)] = inside ? windows[r].image +
                                                  ((iz * s.in_h + iy) * s.in_w + ix) * g.in_channels +
                                                  group * channels + first
                                            : task.pad_row;
    }
    pack(from.data(), bytes, x_map_, to);
    to += bytes * code_bytes;
    at += bytes;
    if (++kx == g.kernel_w) {
      kx = 0;
      if (++ky == g.kernel_h) {
        ky = 0;
        ++kz;
      }
    }
  }
  if (end > k) {
    std::memset(to, 0, (end - k) * code_bytes);
    to += (end - k) * code_bytes;
  }
  return to;
}

// The windows of pixels [first, first + count), in tiles. Tiles reach beyond the last pixel; it is repeated.
void GemmKernel::PackBlock(const Task& task, size_t first, size_t count, size_t group, size_t chunk) const {
  const size_t begin = chunk * chunks_.size, end = begin + ChunkCodes(chunk);
  const bool sums_rows = !row_sum_weight_.empty();
  if (sums_rows && chunk == 0) std::memset(task.row_sums, 0, task.plan.pixels * sizeof(int32_t));
  uint8_t* to = task.packed + PackedOffset(task.plan, chunk);
  OutputPixel at(geometry_, task.args, task.shape, first);
  for (size_t p = 0; p < count;) {
    size_t left = GemmTilePixels(TileSizeFor(scheme_, count - p));
    while (left > 0) {
      const int rows = left >= 8 ? 8 : 4;
      std::array<Window, 8> windows;
      for (int r = 0; r < rows; ++r) {
        windows[static_cast<size_t>(r)] = at.window();
        if (p + static_cast<size_t>(r) + 1 < count) at.Advance();
      }
      to = gathers_ ? PackGathered(task, windows.data(), rows, group, begin, end,
                                   sums_rows ? task.row_sums + p : nullptr, to)
                    : PackDirect(task, windows.data(), rows, group, begin, end, to);
      p += static_cast<size_t>(rows);
      left -= static_cast<size_t>(rows);
    }
  }
}

void GemmKernel::RunBlock(const Task& task, size_t first, size_t count, size_t first_panel,
                          size_t end_panel) const {
  const GemmPlan& plan = task.plan;
  const size_t code_bytes = CodeBytes(scheme_.form), sums_size = plan.group * scheme_.channels;
  const TileOutput output{&epilogue_.view(), first, 1, static_cast<const uint8_t*>(task.args.residual),
                          task.args.y};
  for (size_t begin = first_panel; begin < end_panel;) {
    const size_t group = panels_[begin].group;
    size_t end = begin + 1;
    while (end < end_panel && end - begin < plan.sum_panels && panels_[end].group == group) ++end;
    const bool packed = plan.whole_windows && begin > first_panel && panels_[begin - 1].group == group;
    for (size_t chunk = 0; chunk < chunks_.count; ++chunk) {
      if (!packed) PackBlock(task, first, count, group, chunk);
      const size_t codes = ChunkCodes(chunk);
      const uint8_t* packed_chunk = task.packed + PackedOffset(plan, chunk);
      for (size_t p = begin; p < end; ++p) {
        const Panel& panel = panels_[p];
        int32_t* sums = task.sums + (p - begin) * sums_size;
        GemmTile tile{};
        tile.w = Weights(task, panel, chunk);
        tile.steps = codes / scheme_.unit;
        tile.flush = panel.flush;
        if (chunk == 0) tile.bias = bias_.data() + panel.channel;
        for (size_t pixel = 0; pixel < count; pixel += plan.group) {
          const size_t pixels = std::min(plan.group, count - pixel);
          // The largest tiles, and a smaller one.
          for (size_t at = 0; at < pixels;) {
            const int size = TileSizeFor(scheme_, pixels - at);
            const size_t tile_pixels = GemmTilePixels(size);
            tile.x = packed_chunk + (pixel + at) * codes * code_bytes;
            tile.sums = sums + at * scheme_.channels;
            tile.count = std::max((pixels - at) / tile_pixels, size_t{1});
            tile.pixels = std::min(tile.count * tile_pixels, pixels - at);
            scheme_.tile[size](tile);
            at += tile.count * tile_pixels;
          }
          if (chunk + 1 < chunks_.count) continue;
          const TileSums part{sums, scheme_.channels, pixel, pixels, panel.channel, panel.count};
          if (!row_sum_weight_.empty())
            AddRowSums(part, task.row_sums + pixel, row_sum_weight_.data() + panel.channel);
          FinishSums(output, part);
        }
      }
    }
    begin = end;
  }
}

void GemmKernel::Run(const ConvArgs& args, ThreadPool& pool) const {
  const ConvShape shape = Flatten(geometry_, args.shape);
  const auto total = static_cast<size_t>(shape.OutPixels());
  if (total == 0) return;
  const GemmPlan plan = Plan(shape);
  const Scratch layout = PlanScratch(plan);

  // Blocks of pixels are dealt out first. Every task of a block that is split by panels packs it again, which
  // must remain a small part of its work: only where blocks are few.
  const double cycles = Cycles(shape), blocks = static_cast<double>(plan.blocks);
  const double packing = static_cast<double>(plan.pixels * padded_k_);
  const size_t pixel_tasks = std::clamp(static_cast<size_t>(cycles / kTaskCycles), size_t{1}, plan.blocks);
  const size_t few = std::min(DivideUp(FewTasks(pool), plan.blocks), panels_.size());
  const size_t panel_tasks =
      pixel_tasks < plan.blocks
          ? 1
          : std::clamp(static_cast<size_t>(cycles / blocks / std::max(kTaskCycles, 4 * packing)), size_t{1},
                       few);
  const TaskSplit split = {plan.blocks, pixel_tasks, panels_.size(), panel_tasks};
  pool.ParallelFor(split.tasks(), [&](size_t index) {
    const auto [first_block, end_block, first_panel, end_panel] = split[index];
    uint8_t* scratch = ThreadScratch(layout.bytes);
    const Task task{args,
                    shape,
                    plan,
                    scratch + layout.pad_row,
                    scratch + layout.gathered,
                    scratch + layout.packed,
                    scratch + layout.weights,
                    reinterpret_cast<int32_t*>(scratch + layout.row_sums),
                    reinterpret_cast<int32_t*>(scratch + layout.sums)};
    if (!gathers_) std::memset(task.pad_row, pad_byte_, static_cast<size_t>(geometry_.GroupIn()));
    for (size_t block = first_block; block < end_block; ++block) {
      const size_t first = block * plan.pixels;
      RunBlock(task, first, std::min(plan.pixels, total - first), first_panel, end_panel);
    }
  });
}

// The interval for all weights of a node: by their range, or by their values where only those can tell.
size_t FlushOf(const GemmScheme& scheme, const ConvSpec& spec) {
  GemmOperands operands = RangesOf(spec);
  const size_t flush = scheme.flush(operands);
  if (flush != 0 || spec.w.bits > kFewWeightBits) return flush;
  operands.channels = 1;
  operands.k = static_cast<size_t>(spec.geometry.K());
  std::vector<int8_t> weights(operands.k);
  operands.weights = weights.data();
  size_t least = SIZE_MAX;
  for (size_t c = 0; c < static_cast<size_t>(spec.geometry.out_channels) && least != 0; ++c) {
    LoadChannel(spec, c, ByteShift(spec.channel_values[c]), weights.data());
    least = std::min(least, scheme.flush(operands));
  }
  return least;
}

template <const GemmScheme& kScheme>
std::string Refuse(const ConvSpec& spec) {
  if (FlushOf(kScheme, spec) == 0) return "sums of these products overflow narrow accumulators";
  return {};
}

// Cycles of a call, of a tile and of an output beside their products, of packing a code and of unpacking a
// weight, into words or else; modelled Cortex-A53 and A72.
struct FixedCycles {
  double call, tile, output, pack, unpack_word, unpack;
};
constexpr FixedCycles kInOrderCycles = {
    .call = 500, .tile = 45, .output = 3, .pack = 0.6, .unpack_word = 0.5, .unpack = 0.35};
constexpr FixedCycles kOutOfOrderCycles = {
    .call = 500, .tile = 25, .output = 1.8, .pack = 0.3, .unpack_word = 0.25, .unpack = 0.2};

template <const GemmScheme& kScheme>
double Cost(const ConvSpec& spec, const ConvShape& shape) {
  const ConvGeometry& g = spec.geometry;
  const Pipeline pipeline = MachinePipeline();
  const FixedCycles& cycles = pipeline == Pipeline::kInOrder ? kInOrderCycles : kOutOfOrderCycles;
  const double panels = static_cast<double>(static_cast<size_t>(g.group) *
                                            DivideUp(static_cast<size_t>(g.GroupOut()), kScheme.channels));
  const auto total = static_cast<size_t>(shape.OutPixels());
  const size_t largest = LargestTile(kScheme), rest = total % largest;
  const auto pixels =
      static_cast<double>(total - rest + (rest == 0 ? 0 : GemmTilePixels(TileSizeFor(kScheme, rest))));
  const auto k = static_cast<double>(RoundUp(static_cast<size_t>(g.K()), kScheme.k_multiple));
  const double outputs = pixels * panels * static_cast<double>(kScheme.channels);
  const GemmOperands ranges = RangesOf(spec);
  const size_t flush = std::max(kScheme.flush(ranges), size_t{1});
  const bool unpacks = GemmPanelUnpackFor(kScheme.form, GemmPanelBits(ranges.w_lo, ranges.w_hi)) != nullptr;
  const double unpack = !unpacks ? 0 : kScheme.form == GemmForm::kWords ? cycles.unpack_word : cycles.unpack;
  const size_t block = std::max(PackedPixels(kScheme, static_cast<size_t>(k)), largest);
  return cycles.call +
         static_cast<double>(DivideUp(total, block)) * panels * static_cast<double>(kScheme.channels) * k *
             unpack +
         outputs * k / kScheme.macs_per_cycle(pipeline, flush) +
         panels * static_cast<double>(DivideUp(total, largest)) * cycles.tile + outputs * cycles.output +
         pixels * static_cast<double>(g.group) * k * cycles.pack;
}

template <const GemmScheme& kScheme>
std::unique_ptr<ConvKernel> Create(const ConvSpec& spec) {
  return std::make_unique<GemmKernel>(spec, kScheme);
}

template <const GemmScheme& kScheme>
KernelRow Row(const KernelInfo& info) {
  return {info, &Refuse<kScheme>, &Cost<kScheme>, &Create<kScheme>, true};
}

}  // namespace

std::span<const KernelRow> ArmGemmRows() {
  static const KernelRow kRows[] = {
#define LOWBIT_ARM_GEMM(scheme, name, algorithm, isa, x_bits, w_bits, note) \
  HasKernels(name) ? Row<scheme>({name, "conv", algorithm, isa, x_bits, w_bits, note}) : KernelRow{},
#include "kernels/arm/rows.inc"
  };
  return kRows;
}

}  // namespace lowbit
