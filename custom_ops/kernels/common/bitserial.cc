// The portable half of the bit-serial kernels (AP-BIT of Feng et al., "APNN-TC", SC 2021, sections 3 and 4):
// bit planes, addressing, the split into tasks, and the algebra that turns every pair of encodings into
// population counts.
//
// Algebra. An activation code u of q bits is a sum of bit planes, u = sum_t 2^t u_t with u_t in {0, 1};
// signed codes get their top bit flipped first, which adds 2^(q-1). Its value is v(x) = a u + b:
//
//   unsigned   a = 1, b = -zero_point
//   signed     a = 1, b = -zero_point - 2^(q-1)
//   bipolar    a = 2, b = -1
//
// so that for one output, all sums running over the products of its window,
//
//   sum v(w) v(x)  =  b sum v(w)  +  a sum_t 2^t sum v(w) u_t .
//
// The first term is a constant of the channel. The inner sum of the second one is counted in one of three
// ways, whichever needs the fewest instructions for the values (zero points included) that the weights really
// have:
//
//   xor      v(w) = 2w - 1                    sum v(w) u_t = popc(w) - popc(w ^ u_t)
//   masked   v(w) = (2w - 1) m, ternary       sum v(w) u_t = popc(w & m) - popc((w ^ u_t) & m)
//   and      v(w) = sum_s f_s w_s             sum v(w) u_t = sum_s f_s popc(w_s & u_t)
//
// with f_s = 2^s, or -2^s where all values are at most 0, the sign turned around in the top plane where the
// values have both signs. In the first two, popc(w & m) is a constant of the channel too. So no case needs
// the sums of the activations that a correction 2 popc(w & u) - popc(u) would: the operator (XOR or AND)
// follows the weights, and the encoding of x changes nothing but constants and the factor a. Bipolar x
// bipolar comes out as K - 2 popc(w ^ x), as it must.
//
// Joint units. An engine may take three codes of up to 2 bits at once, as the row of a table in L1, and three weights
// that have four values v0 .. v0 + 3, as a place in that row. What it holds, sum u v, is made positive, s = -min added:
//
//     sum (u + b) v  =  sum (table entries)  +  b sum v  -  s units
//
// Padding. A tap outside the image contributes 0. It reads the zero point of x, whose v(x) is 0. Bipolar
// codes have no zero: such a tap reads 0, the value -1, and its weights are added to the bias of the pixels
// that miss it, one bias per set of missing taps.
//
// Addressing. Each block of output pixels first packs the input pixels below it, each once however many taps
// read it, padding included. The window of a pixel is then a list of units (a few bytes of bits) at fixed
// distances from its upper left end:
//
//   pixels   the planes of one input pixel and group lie together, each filled up to whole units
//   rows     few channels: the bits of a whole row form one plane, and a kernel row of kernel_w * channels
//            bits is read across the pixels
//   folded   few channels whose pixels begin inside bytes, as an image's: the kernel_w * channels codes of a
//            kernel row lie together and are packed for every output column, as if they were the channels of
//            a pixel under a kernel one column wide
//   stacked  folded rows that leave much of their last unit empty: the bits of all kernel rows of an output are
//            shifted together, so that only one unit is not full (7x7 windows of 3 channels: 5 units instead of 7)
#include "kernels/common/bitserial.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "core/packed_weights.h"
#include "core/plan_cache.h"
#include "kernels/common/bitserial_bits.h"
#include "kernels/common/few_codes.h"
#include "kernels/common/workspace.h"

namespace lowbit {
namespace {

// ---- how weights become planes

struct WeightPlan {
  BitOp op = BitOp::kAnd;
  int planes = 1;
  bool negated = false;   // kAnd: the planes are those of -v
  bool has_sign = false;  // kAnd: the top plane counts with the other sign
  bool selects = false;   // kMasked: BitserialEngine::masks_by_selection
  bool joint = false;     // BitserialEngine::joint; none of the above
  ValueRange range{};

  // The bits of value v: bit s is the one in plane s; kMasked: bit 0 is w, bit 1 is m or, to select, n.
  uint8_t Bits(int32_t v) const {
    if (joint) return static_cast<uint8_t>(v - range.lo);
    if (op == BitOp::kAnd) return static_cast<uint8_t>(negated ? -v : v);
    return static_cast<uint8_t>((v > 0 ? 1 : 0) | ((selects ? v < 0 : v != 0) ? 2 : 0));
  }
  int32_t Factor(int plane) const {
    const bool minus = negated != (has_sign && plane == planes - 1);
    return (minus ? -1 : 1) * (1 << plane);
  }
};

bool Padded(const ConvGeometry& g) {
  return g.pad_top != 0 || g.pad_left != 0 || g.pad_bottom != 0 || g.pad_right != 0;
}

// A bipolar operand is corrected for each set of missing taps, of which there are at most as many as taps.
constexpr int64_t kMaxPaddedTaps = 1024;

static_assert(kMaxBitPlanes <= kFewWeightBits, "the rows read ConvSpec::weight_values");

int BitsOf(int32_t v) { return static_cast<int>(std::bit_width(static_cast<uint32_t>(v))); }

// The sums of joint units lie between these, and are stored less the first.
struct JointRange {
  int32_t lo, hi;
  static JointRange Of(const ValueRange& weights, int x_bits) {
    const int32_t most = static_cast<int32_t>(kJointCodes) * ((1 << x_bits) - 1);
    return {most * std::min(weights.lo, 0), most * std::max(weights.hi, 0)};
  }
  size_t span() const { return static_cast<size_t>(std::max(hi - lo, 1)); }
};

WeightPlan PlanWeights(const ValueRange& range, const BitserialEngine& engine) {
  WeightPlan plan;
  plan.range = range;
  plan.joint = engine.joint;
  if (plan.joint) return plan;
  const bool within_one = range.lo >= -1 && range.hi <= 1;
  if (within_one && !range.has_zero) {
    plan.op = BitOp::kXor;
  } else if (within_one && range.lo < 0 && range.hi > 0 && engine.has_masked) {
    plan.op = BitOp::kMasked;
    plan.selects = engine.masks_by_selection;
  } else if (range.lo >= 0 || range.hi <= 0) {
    plan.negated = range.lo < 0;
    plan.planes = std::max(1, BitsOf(std::max(range.hi, -range.lo)));
  } else {
    // Two's complement of v holds [-2^n, 2^n - 1], that of -v holds [-(2^n - 1), 2^n].
    const int plain = std::max(BitsOf(range.hi), BitsOf(-range.lo - 1));
    const int negated = std::max(BitsOf(-range.lo), BitsOf(range.hi - 1));
    plan.negated = negated < plain;
    plan.has_sign = true;
    plan.planes = 1 + std::min(plain, negated);
  }
  return plan;
}

int32_t XFactor(const ConvSpec& spec) { return spec.x.encoding == Encoding::kBipolar ? 2 : 1; }

// In the order of a Horner scheme, with the last one that counts nothing.
std::vector<BitserialPass> ListPasses(const ConvSpec& spec, const WeightPlan& plan,
                                      const BitserialEngine& engine) {
  std::vector<BitserialPass> passes;
  for (int s = 0; s < plan.planes; ++s) {
    const int32_t w_factor = plan.op == BitOp::kAnd ? plan.Factor(s) : -1;
    for (int t = 0; t < spec.x.bits; t += engine.digit_planes) {
      const int planes = std::min(engine.digit_planes, spec.x.bits - t);
      passes.push_back({static_cast<size_t>(s), static_cast<size_t>(t / engine.digit_planes), planes,
                        XFactor(spec) * (1 << t) * w_factor, 0, false});
    }
  }
  std::stable_sort(passes.begin(), passes.end(), [](const BitserialPass& a, const BitserialPass& b) {
    return std::pair(std::abs(a.factor), a.factor) > std::pair(std::abs(b.factor), b.factor);
  });
  passes.push_back({0, 0, 0, 1, 0, false});  // what is left of the last factor
  for (size_t i = 1; i < passes.size(); ++i) {
    const int32_t before = passes[i - 1].factor, now = passes[i].factor;
    passes[i].shift = BitsOf(std::abs(before)) - BitsOf(std::abs(now));
    passes[i].negate = (before < 0) != (now < 0);
  }
  return passes;
}

int64_t LargestCount(const BitserialPass& pass, int64_t k) { return ((1 << pass.digit_planes) - 1) * k; }

// The least factor, in magnitude: a divisor of all others.
int32_t UnitOf(const std::vector<BitserialPass>& passes) { return passes[passes.size() - 2].factor; }

// In units of the least factor, as are those of the following function.
bool SumsFitWords(const std::vector<BitserialPass>& passes, int64_t k) {
  const int32_t unit = UnitOf(passes);
  int64_t largest = 0;
  for (const BitserialPass& pass : passes) largest += std::abs(pass.factor / unit) * LargestCount(pass, k);
  return largest <= std::numeric_limits<int16_t>::max();
}

bool TermsFitWords(const std::vector<BitserialPass>& passes, int64_t k) {
  const int32_t unit = UnitOf(passes);
  int64_t raised = 0, lowered = 0;
  for (const BitserialPass& pass : passes) {
    const int32_t factor = pass.factor / unit;
    (factor > 0 ? raised : lowered) += std::abs(factor) * LargestCount(pass, k);
  }
  return std::max(raised, lowered) <= FewCodes::kLargestSum;
}

// Whether sums in 16 bits meet an epilogue there.
bool HasFewCodes(const ConvSpec& spec, const BitserialEngine& engine,
                 const std::vector<BitserialPass>& passes, size_t units) {
  const bool few =
      engine.few_sums ? FewCodes::RepresentsSums(spec.epilogue) : FewCodes::Represents(spec.epilogue);
  if (!few || spec.x.bits > engine.few_codes_bits) return false;
  if (!engine.joint) return TermsFitWords(passes, spec.geometry.K());
  return JointRange::Of(spec.weight_values, spec.x.bits).span() * units <=
         static_cast<size_t>(FewCodes::kLargestSum);
}

// ---- where the bits of a window lie

// One dimension of the window: an input position is packed if an output reads it. With a single tap,
// positions between the strides are left out.
struct Axis {
  int64_t kernel = 1, stride = 1, dilation = 1, pad = 0;

  int64_t PackedStep() const {
    return kernel == 1 ? stride : 1;
  }  // from one packed position to the next, in x
  int64_t Stride() const { return kernel == 1 ? 1 : stride; }  // of outputs, in packed positions
  size_t Span(size_t outputs) const {
    return (outputs - 1) * static_cast<size_t>(Stride()) + static_cast<size_t>((kernel - 1) * dilation) + 1;
  }
};

Axis Vertical(const ConvGeometry& g) { return {g.kernel_h, g.stride_h, g.dilation_h, g.pad_top}; }
Axis Horizontal(const ConvGeometry& g) { return {g.kernel_w, g.stride_w, g.dilation_w, g.pad_left}; }

// Packed bits of one block, at most. Engines ask for fewer, that stay in a cache together with a panel of
// weights; the window of a single output may need more than that.
constexpr size_t kPackedBytes = 128 * 1024;

// What depends on the node alone.
struct WindowLayout {
  bool rows = false, folded = false, stacked = false;  // the addressing; what is stacked is folded, too
  size_t segments = 0;                                 // taps, or kernel rows
  size_t segment_bits = 0;                             // used in each
  size_t segment_units = 0;
  size_t digit_bytes = 0;  // of a pixel and group; addressing `rows`: of a pixel
  size_t pixel_pitch = 0;  // from one packed pixel to the next
  size_t strips = 1;       // addressing `rows`: one per digit; a pixel has pixel_pitch bytes in each
  size_t row_bits = 0;     // of a folded kernel row
  size_t units() const { return segments * segment_units; }
};

WindowLayout PlanWindow(const ConvGeometry& g, int x_bits, const WeightPlan& weights,
                        const BitserialEngine& engine) {
  const size_t unit_bits = engine.unit_bits, digits = engine.DigitCount(x_bits);
  const size_t group_in = static_cast<size_t>(g.GroupIn()), kernel_w = static_cast<size_t>(g.kernel_w);
  WindowLayout w;
  w.segments = static_cast<size_t>(g.Taps());
  w.segment_bits = group_in;
  w.segment_units = DivideUp(group_in, unit_bits);
  w.digit_bytes = w.segment_units * engine.UnitDigitBytes();
  w.pixel_pitch = digits * static_cast<size_t>(g.group) * w.digit_bytes;

  // XOR counts what lies behind the kernel row in its last unit.
  const size_t row_bits = kernel_w * group_in;
  const bool exact = weights.op != BitOp::kXor || row_bits % unit_bits == 0;
  const size_t row_units = DivideUp(row_bits, unit_bits);
  if (!engine.joint && g.group == 1 && g.dilation_w == 1 && group_in % engine.codes_per_byte == 0 && exact &&
      row_units < kernel_w * w.segment_units) {
    w.rows = true;
    w.segments = static_cast<size_t>(g.kernel_h);
    w.segment_bits = row_bits;
    w.segment_units = row_units;
    w.digit_bytes = w.pixel_pitch = group_in / engine.codes_per_byte;
    w.strips = digits;
  } else if (g.group == 1 && g.dilation_w == 1 && 2 * row_units <= kernel_w * w.segment_units &&
             g.stride_w <= static_cast<int64_t>(kPackedBytes)) {
    w.folded = true;
    w.segments = static_cast<size_t>(g.kernel_h);
    w.segment_bits = row_bits;
    w.segment_units = row_units;
    w.digit_bytes = row_units * engine.UnitDigitBytes();
    w.pixel_pitch = digits * w.digit_bytes;
    w.row_bits = row_bits;
    const size_t window_bits = w.segments * row_bits, window_units = DivideUp(window_bits, unit_bits);
    if (engine.HasWordUnits() && window_units < w.units()) {
      w.stacked = true;
      w.segments = 1;
      w.segment_bits = window_bits;
      w.segment_units = window_units;
    }
  }
  return w;
}

// The columns that are packed.
Axis PackedColumns(const ConvGeometry& g, const WindowLayout& w) {
  const Axis axis = Horizontal(g);
  return w.folded ? Axis{1, axis.stride, 1, axis.pad} : axis;
}

// Codes of a packed column and group.
size_t RunCodes(const ConvGeometry& g, const WindowLayout& w) {
  return static_cast<size_t>(g.GroupIn() * (w.folded ? g.kernel_w : 1));
}

// Whether the codes of a run lie in the engine's own order; a kernel row is read across pixels, in theirs.
bool IsTransposed(const WindowLayout& w, const BitserialEngine& engine) {
  return engine.transposed_codes != 0 && !w.rows;
}

// Where the bit of code i of a run of `codes` lies.
size_t BitPlace(const WindowLayout& w, const BitserialEngine& engine, size_t i, size_t codes) {
  const size_t size = engine.transposed_codes;
  if (!IsTransposed(w, engine) || i >= codes / size * size) return i;
  const size_t first = i / size * size, width = size / 8;
  return first + (i - first) % width * 8 + (i - first) / width;
}

// How a block of output rows and columns is packed.
struct PackedBlock {
  size_t rows = 0, columns = 0;  // packed input positions
  size_t digit_pitch = 0;        // from one digit to the next
  size_t row_pitch = 0;
  size_t padded_row = 0;  // where a row of x lies with its padding, under folded columns
  size_t stacked = 0;     // where stacked windows lie: [output rows][units][columns][digits]
  size_t bytes = 0;
};

// Pixels of x under so many folded columns.
int64_t FoldedWidth(const ConvGeometry& g, size_t columns) {
  return (static_cast<int64_t>(columns) - 1) * g.stride_w + g.kernel_w;
}

// From a unit of stacked windows to the next one: that unit of all columns and digits.
size_t StackedPitch(const PackedBlock& p, size_t digits) { return p.columns * digits * sizeof(uint32_t); }

PackedBlock PlanPacked(const ConvGeometry& g, const WindowLayout& w, int x_bits,
                       const BitserialEngine& engine, size_t rows, size_t columns) {
  PackedBlock p;
  p.rows = Vertical(g).Span(rows);
  p.columns = PackedColumns(g, w).Span(columns);
  // The last unit of a kernel row may reach behind the last pixel.
  const size_t strip = RoundUp(p.columns * w.pixel_pitch + engine.UnitDigitBytes(), 8);
  p.digit_pitch = w.rows ? strip : w.digit_bytes;
  p.row_pitch = w.rows ? w.strips * strip : p.columns * w.pixel_pitch;
  p.padded_row = p.rows * p.row_pitch;
  p.bytes = p.padded_row;
  if (w.folded) p.bytes += static_cast<size_t>(FoldedWidth(g, p.columns) * g.in_channels);
  if (w.stacked) {
    p.stacked = RoundUp(p.bytes, sizeof(uint32_t));
    p.bytes = p.stacked + rows * w.units() * StackedPitch(p, engine.DigitCount(x_bits));
  }
  return p;
}

// ---- how the output is cut into blocks

constexpr size_t kMaxBlockPixels = 1024;
// A small layer is cut into more blocks than that requires, for the threads; not below this many pixels,
// where a block's tiles no longer share the weights well.
constexpr size_t kMinSharedPixels = 48;

struct BlockGrid {
  size_t rows = 0, columns = 0;  // of outputs, per block
  size_t row_blocks = 0, column_blocks = 0, blocks = 0;
  PackedBlock packed;
  size_t pixels() const { return rows * columns; }
};

template <class BytesOf>
BlockGrid CutBlocks(const ConvShape& s, size_t wanted_blocks, size_t block_bytes, const BytesOf& bytes_of) {
  BlockGrid grid;
  const size_t out_h = static_cast<size_t>(s.out_h), out_w = static_cast<size_t>(s.out_w);
  const size_t total = static_cast<size_t>(s.OutPixels());
  const size_t limit =
      std::clamp(DivideUp(total, std::max<size_t>(wanted_blocks, 1)), kMinSharedPixels, kMaxBlockPixels);
  grid.columns = std::min(out_w, limit);
  while (grid.columns > 1 && bytes_of(1, grid.columns) > block_bytes)
    grid.columns = DivideUp(grid.columns, 2);
  grid.column_blocks = DivideUp(out_w, grid.columns);
  grid.columns = DivideUp(out_w, grid.column_blocks);
  grid.rows = 1;
  if (grid.column_blocks == 1) {
    while (grid.rows < out_h && (grid.rows + 1) * out_w <= limit &&
           bytes_of(grid.rows + 1, out_w) <= block_bytes)
      ++grid.rows;
  }
  grid.row_blocks = DivideUp(out_h, grid.rows);
  grid.rows = DivideUp(out_h, grid.row_blocks);
  grid.blocks = static_cast<size_t>(s.batch) * grid.row_blocks * grid.column_blocks;
  return grid;
}

// ---- what depends on the shape

// The outputs of one dimension, sorted by the taps of theirs that lie inside the image: [first, end).
struct TapClasses {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  std::vector<uint32_t> of_output;

  TapClasses(const Axis& axis, int64_t in, int64_t out) {
    for (int64_t o = 0; o < out; ++o) {
      const int64_t start = o * axis.stride - axis.pad;
      int64_t first = 0, end = axis.kernel;
      while (first < end && start + first * axis.dilation < 0) ++first;
      while (end > first && start + (end - 1) * axis.dilation >= in) --end;
      const std::pair<int64_t, int64_t> range = {first, end};
      auto it = std::find(ranges.begin(), ranges.end(), range);
      if (it == ranges.end()) it = ranges.insert(ranges.end(), range);
      of_output.push_back(static_cast<uint32_t>(it - ranges.begin()));
    }
  }
};

struct ShapePlan {
  ConvShape shape;  // flattened
  BlockGrid grid;
  std::vector<uint32_t> offsets;  // [digits][units]
  // Bipolar x with padding: a bias per class of rows and class of columns.
  std::vector<uint32_t> row_class, column_class;
  size_t column_classes = 0;
  std::vector<int32_t> class_bias;    // [row classes][column classes][channels + padding]
  std::vector<int16_t> class_limits;  // of these biases, where the kernel has few codes
};

// ---- the kernel

struct Estimate {
  double packing = 0;   // cycles to pack every input position once
  double products = 0;  // cycles for all counts, and for what is done once per output
};

struct Rows {
  double computed = 0;  // of tiles, for all pixels
  double passes = 0;    // over such a row, for the planes of the weights and what digits are no rows
};

Rows CountRows(const BitserialEngine& engine, size_t pixels, size_t digits, size_t planes) {
  const auto tile = static_cast<size_t>(engine.tile_rows), least = static_cast<size_t>(engine.least_rows);
  if (!engine.digits_are_rows) {
    const size_t rest = pixels % tile;
    return {static_cast<double>(pixels - rest + (rest == 0 ? 0 : std::max(rest, least))),
            static_cast<double>(planes * digits)};
  }
  const size_t rows = std::bit_ceil(digits);
  return {static_cast<double>(RoundUp(pixels * rows, least)), static_cast<double>(planes)};
}

Estimate EstimateCycles(const ConvGeometry& g, const WindowLayout& w, const WeightPlan& weights, int x_bits,
                        bool few_codes, const BitserialEngine& engine, const ConvShape& shape) {
  const Axis vertical = Vertical(g), horizontal = PackedColumns(g, w);
  const double outputs = static_cast<double>(shape.OutPixels());
  const double positions =
      std::min(static_cast<double>(shape.batch * shape.in_h * (w.folded ? shape.out_w : shape.in_w)),
               outputs * static_cast<double>(vertical.Span(1) * horizontal.Span(1)));
  const size_t lanes = static_cast<size_t>(engine.lanes);
  const double channels =
      static_cast<double>(static_cast<size_t>(g.group) * RoundUp(static_cast<size_t>(g.GroupOut()), lanes));
  const double digits = static_cast<double>(engine.DigitCount(x_bits));
  const Rows rows = CountRows(engine, static_cast<size_t>(shape.OutPixels()), engine.DigitCount(x_bits),
                              static_cast<size_t>(weights.planes));
  const double sums = static_cast<double>(weights.planes) * digits;
  const size_t step = engine.joint ? kJointStep : 1;
  const double k = static_cast<double>(w.segments * RoundUp(w.segment_units, step) * engine.unit_bits);
  const double operations = weights.op == BitOp::kMasked ? engine.masked_operations : 1.0;
  Estimate e;
  constexpr double kRunCycles = 6;  // of a short run, packed by itself
  const size_t codes = RoundUp(static_cast<size_t>(g.group) * RunCodes(g, w), engine.unit_bits);
  e.packing = positions * (static_cast<double>(codes) * (engine.code_cycles + digits * engine.digit_cycles) +
                           (w.folded ? kRunCycles : 0.0));
  constexpr double kPieceCycles =
      0.2;  // of a digit, shifted into a unit; nearly half of the rows have two pieces
  if (w.stacked) e.packing += outputs * digits * 1.5 * static_cast<double>(g.kernel_h) * kPieceCycles;
  const double panels = std::ceil(channels / static_cast<double>(lanes) / engine.max_vectors);
  e.products = rows.computed * rows.passes * k *
                   (channels * operations / engine.products_per_cycle + panels * engine.fetch_cycles) +
               outputs * channels *
                   (1 / (few_codes ? engine.few_codes_per_cycle : engine.outputs_per_cycle) +
                    sums / engine.sums_per_cycle);
  return e;
}

class BitserialKernel final : public ConvKernel {
 public:
  BitserialKernel(const ConvSpec& spec, const BitserialEngine& engine);

  void Run(const ConvArgs& args, ThreadPool& pool) const override;
  size_t WorkspaceBytes(const ConvShape& shape) const override {
    return shape.OutPixels() == 0 ? 0 : PlanScratch(GridOf(Flatten(geometry_, shape))).bytes;
  }
  size_t PackedBytes() const override {
    return weights_->size() + epilogue_.Bytes() + (few_codes_ ? few_codes_->Bytes() : 0);
  }

 private:
  // The parts of a thread's scratch memory, as offsets.
  struct Scratch {
    size_t packed = 0, pixels = 0, bias_rows = 0, limit_rows = 0, bytes = 0;
  };

  bool FoldConstants(const ConvSpec& spec);
  void PackWeights(const ConvSpec& spec);
  void PackPadding(const ConvSpec& spec);
  void FillTable();

  std::shared_ptr<const ShapePlan> PlanOf(const ConvShape& shape) const {
    return plans_.Get(shape, [&] { return MakePlan(shape); });
  }
  ShapePlan MakePlan(const ConvShape& shape) const;
  BlockGrid GridOf(const ConvShape& flattened) const;
  size_t PaddedPixels(size_t count) const { return RoundUp(count, static_cast<size_t>(engine_.tile_rows)); }
  void AddClassBiases(ShapePlan& plan) const;
  Scratch PlanScratch(const BlockGrid& grid) const;
  void PackBlock(const ConvArgs& args, const ShapePlan& plan, int64_t image, size_t row, size_t column,
                 uint8_t* packed) const;
  void PackRun(const uint8_t* x, size_t count, size_t x_step, size_t digit_pitch, uint8_t* to) const;
  void PadRun(size_t first, size_t end, size_t digit_pitch, uint8_t* row) const;
  void StackRows(const PackedBlock& block, size_t rows, uint8_t* packed) const;

  const ConvGeometry geometry_;
  const BitserialEngine& engine_;
  const int x_bits_;
  WeightPlan plan_;
  WindowLayout window_;
  EpilogueTables epilogue_;
  const std::vector<BitserialPass> passes_;
  const bool sums_fit_words_, terms_fit_words_;
  std::optional<FewCodes> few_codes_;
  FewCodesView few_codes_view_{};
  std::vector<int16_t> limits_;
  std::vector<int32_t> bias_;  // [out_channels + padding], constants folded in
  std::vector<int32_t>
      tap_sums_;  // [taps][out_channels] of weight values; empty where padding needs no correction
  uint8_t x_flip_ = 0, pad_code_ = 0;
  std::vector<uint8_t> pad_pixel_;  // packed: [strips][pixel_pitch]
  PackedWeights weights_;
  std::optional<AlignedBytes> table_;  // BitserialBlock::table
  std::vector<BitserialPanel> panels_;
  mutable PlanCache<ConvShape, ShapePlan> plans_;
};

BitserialKernel::BitserialKernel(const ConvSpec& spec, const BitserialEngine& engine)
    : geometry_(spec.geometry),
      engine_(engine),
      x_bits_(spec.x.bits),
      plan_(PlanWeights(spec.weight_values, engine)),
      window_(PlanWindow(spec.geometry, spec.x.bits, plan_, engine)),
      epilogue_(spec),
      passes_(ListPasses(spec, plan_, engine)),
      sums_fit_words_(SumsFitWords(passes_, spec.geometry.K())),
      terms_fit_words_(TermsFitWords(passes_, spec.geometry.K())) {
  const bool constants_fit = FoldConstants(spec);
  if (constants_fit && HasFewCodes(spec, engine, passes_, window_.units())) {
    few_codes_.emplace(spec.epilogue, static_cast<size_t>(spec.geometry.out_channels), UnitOf(passes_));
    limits_ = few_codes_->Limits(bias_.data());
    if (engine_.few_bytes && tap_sums_.empty()) few_codes_->NarrowLimits(limits_);
    few_codes_view_ = few_codes_->view();
  }
  PackWeights(spec);
  PackPadding(spec);
  if (plan_.joint) FillTable();
}

void BitserialKernel::FillTable() {
  table_.emplace(kJointRows * kJointRow);
  const int32_t lo = JointRange::Of(plan_.range, x_bits_).lo;
  for (size_t codes = 0; codes < kJointRows; ++codes) {
    for (size_t weights = 0; weights < kJointRow; ++weights) {
      int32_t sum = -lo;
      for (size_t i = 0; i < 2 * kJointCodes; i += 2)
        sum +=
            static_cast<int32_t>(codes >> i & 3) * (plan_.range.lo + static_cast<int32_t>(weights >> i & 3));
      table_->data()[codes * kJointRow + weights] = static_cast<uint8_t>(sum);
    }
  }
}

// Whether the constants are numbers of 32 bits, and not only modulo 2^32.
bool BitserialKernel::FoldConstants(const ConvSpec& spec) {
  const ConvGeometry& g = geometry_;
  const size_t channels = static_cast<size_t>(g.out_channels);
  const bool bipolar = spec.x.encoding == Encoding::kBipolar;
  x_flip_ = spec.x.encoding == Encoding::kSigned ? static_cast<uint8_t>(1 << (x_bits_ - 1)) : 0;
  const int64_t b = bipolar ? -1 : -int64_t{spec.x_zero_point} - x_flip_;
  const int64_t ones = XFactor(spec) * ((1 << x_bits_) - 1);  // a sum_t 2^t
  if (bipolar && Padded(g)) tap_sums_.resize(static_cast<size_t>(g.Taps()) * channels);

  bias_.assign(channels + kEpiloguePadding, 0);
  bool fit = true;
  std::vector<int64_t> largest(channels);
  for (size_t c = 0; c < channels; ++c) {
    int64_t sum = 0, magnitude = 0, positive = 0;
    int64_t index = static_cast<int64_t>(c) * g.K();
    for (int64_t tap = 0; tap < g.Taps(); ++tap) {
      int64_t tap_sum = 0;
      for (int64_t i = 0; i < g.GroupIn(); ++i, ++index) {
        const int32_t v = spec.WeightValue(static_cast<int64_t>(c), index);
        tap_sum += v;
        magnitude += std::abs(v);
        positive += v > 0;
      }
      sum += tap_sum;
      if (!tap_sums_.empty())
        tap_sums_[static_cast<size_t>(tap) * channels + c] = static_cast<int32_t>(tap_sum);
    }
    int64_t constant = spec.bias[c] + b * sum + (plan_.op == BitOp::kAnd ? 0 : ones * positive);
    if (plan_.joint)
      constant += static_cast<int64_t>(window_.units()) * JointRange::Of(plan_.range, x_bits_).lo;
    bias_[c] = static_cast<int32_t>(static_cast<uint32_t>(constant));  // wraps as the sums do
    fit = fit && constant == bias_[c];
    largest[c] = 256 * magnitude + std::abs(static_cast<int64_t>(spec.bias[c]));  // |v(x)| <= 256
  }
  epilogue_.LimitAccumulators(largest);
  return fit;
}

void BitserialKernel::PackWeights(const ConvSpec& spec) {
  const ConvGeometry& g = geometry_;
  const size_t lanes = static_cast<size_t>(engine_.lanes), unit = engine_.UnitWeightBytes();
  const size_t planes = static_cast<size_t>(plan_.planes), operands = plan_.op == BitOp::kMasked ? 2 : 1;
  const size_t group_out = static_cast<size_t>(g.GroupOut()), k = static_cast<size_t>(g.K());
  std::vector<size_t> offsets;
  size_t bytes = 0;
  for (size_t group = 0; group < static_cast<size_t>(g.group); ++group) {
    const size_t vectors = DivideUp(group_out, lanes);
    const size_t count = DivideUp(vectors, static_cast<size_t>(engine_.max_vectors));
    size_t vector = 0;
    for (size_t i = 0; i < count; ++i) {
      const size_t width = vectors / count + (i < vectors % count ? 1 : 0);
      BitserialPanel panel{};
      panel.channel = group * group_out + vector * lanes;
      panel.count = std::min(width * lanes, group_out - vector * lanes);
      panel.x_offset = group * engine_.DigitCount(x_bits_) * window_.digit_bytes;
      panel.vectors = static_cast<int>(width);
      panels_.push_back(panel);
      offsets.push_back(bytes);
      bytes += planes * window_.units() * operands * width * lanes * unit;
      vector += width;
    }
  }

  AlignedBytes packed(bytes);
  const size_t step = static_cast<size_t>(engine_.lane_step);
  const size_t segment_weights = k / window_.segments, segment_bytes = window_.segment_units * unit;
  std::vector<uint8_t> bits(
      RoundUp(segment_weights, 8));  // of the values of a segment; zeros behind the last one
  for (size_t p = 0; p < panels_.size(); ++p) {
    const BitserialPanel& panel = panels_[p];
    const size_t width = static_cast<size_t>(panel.vectors) * lanes;
    const size_t plane_bytes = window_.units() * operands * width * unit;
    for (size_t lane = 0; lane < panel.count; ++lane) {
      const size_t channel = panel.channel + lane, stepped = lane % lanes * step;
      const size_t place = lane / lanes * lanes + stepped % lanes + stepped / lanes;
      for (size_t segment = 0; segment < window_.segments; ++segment) {
        const size_t first = channel * k + segment * segment_weights;
        const auto bits_of = [&](size_t i) {
          return plan_.Bits(spec.WeightValue(static_cast<int64_t>(channel), static_cast<int64_t>(first + i)));
        };
        if (plan_.joint) {
          uint8_t* to = packed.data() + offsets[p] + segment * window_.segment_units * width + place;
          for (size_t i = 0; i < segment_weights; i += kJointCodes, to += width) {
            for (size_t j = 0; j < std::min(kJointCodes, segment_weights - i); ++j)
              *to |= static_cast<uint8_t>(bits_of(i + j) << 2 * j);
          }
          continue;
        }
        for (size_t i = 0; i < segment_weights; ++i) {
          bits[BitPlace(window_, engine_, i, segment_weights)] = bits_of(i);
        }
        for (size_t i = 0; i < bits.size(); i += 8) {
          const size_t byte = segment * segment_bytes + i / 8;
          uint8_t* to =
              packed.data() + offsets[p] + (byte / unit * operands * width + place) * unit + byte % unit;
          for (size_t s = 0; s < planes; ++s) to[s * plane_bytes] = GatherBit(&bits[i], static_cast<int>(s));
          if (operands == 2) to[width * unit] = GatherBit(&bits[i], 1);
        }
      }
    }
  }
  weights_ = ShareWeights(std::move(packed));
  for (size_t p = 0; p < panels_.size(); ++p) panels_[p].weights = weights_->data() + offsets[p];
}

void BitserialKernel::PackPadding(const ConvSpec& spec) {
  const uint8_t code = spec.x.encoding == Encoding::kBipolar ? 0 : static_cast<uint8_t>(spec.x_zero_point);
  const std::vector<uint8_t> codes(static_cast<size_t>(geometry_.group) * RunCodes(geometry_, window_), code);
  pad_code_ = code;
  pad_pixel_.resize(window_.strips * window_.pixel_pitch);
  PackRun(codes.data(), 1, codes.size(), window_.rows ? window_.pixel_pitch : window_.digit_bytes,
          pad_pixel_.data());
}

// `count` packed columns whose codes begin x_step bytes apart, with the addressing `rows` side by side.
void BitserialKernel::PackRun(const uint8_t* x, size_t count, size_t x_step, size_t digit_pitch,
                              uint8_t* to) const {
  const size_t channels = static_cast<size_t>(geometry_.in_channels);
  if (window_.rows) {
    const size_t bytes = count * window_.pixel_pitch;
    engine_.pack({x, 1, 0, count * channels, to, 0, digit_pitch, bytes, x_bits_, x_flip_, false});
    return;
  }
  const size_t groups = static_cast<size_t>(geometry_.group), group_in = RunCodes(geometry_, window_);
  const size_t pitch = window_.pixel_pitch / groups, bytes = window_.digit_bytes;
  const bool transposed = IsTransposed(window_, engine_);
  const auto pack_runs = [&](const uint8_t* from, size_t runs, size_t x_pitch, uint8_t* digits) {
    engine_.pack(
        {from, runs, x_pitch, group_in, digits, pitch, digit_pitch, bytes, x_bits_, x_flip_, transposed});
  };
  if (window_.folded) return pack_runs(x, count, x_step, to);
  if (x_step != channels) {
    if (groups == 1) return pack_runs(x, count, x_step, to);
    for (size_t i = 0; i < count; ++i)
      pack_runs(x + i * x_step, groups, group_in, to + i * window_.pixel_pitch);
    return;
  }
  // One digit, no bits left over, and the order of the codes does not end with a run: one run.
  const size_t runs = count * groups;
  if (pitch == bytes && window_.segment_units * engine_.unit_bits == group_in &&
      (!transposed || group_in % engine_.transposed_codes == 0)) {
    engine_.pack({x, 1, 0, runs * group_in, to, 0, digit_pitch, runs * bytes, x_bits_, x_flip_, transposed});
    return;
  }
  pack_runs(x, runs, group_in, to);
}

// Packed positions [first, end) of a row, outside the image.
void BitserialKernel::PadRun(size_t first, size_t end, size_t digit_pitch, uint8_t* row) const {
  const size_t pitch = window_.pixel_pitch;
  for (size_t strip = 0; strip < window_.strips; ++strip) {
    for (size_t i = first; i < end; ++i)
      std::memcpy(row + strip * digit_pitch + i * pitch, pad_pixel_.data() + strip * pitch, pitch);
  }
}

void BitserialKernel::PackBlock(const ConvArgs& args, const ShapePlan& plan, int64_t image, size_t row,
                                size_t column, uint8_t* packed) const {
  const ConvGeometry& g = geometry_;
  const Axis vertical = Vertical(g), horizontal = PackedColumns(g, window_);
  const ConvShape& s = plan.shape;
  const PackedBlock& block = plan.grid.packed;
  const int64_t step = horizontal.PackedStep(), columns = static_cast<int64_t>(block.columns);
  const int64_t first_y = static_cast<int64_t>(row) * g.stride_h - g.pad_top;
  const int64_t first_x = static_cast<int64_t>(column) * g.stride_w - g.pad_left;
  // Packed columns [begin, end) lie in the image.
  const int64_t begin = std::clamp<int64_t>((step - 1 - first_x) / step, 0, columns);
  const int64_t end = std::clamp<int64_t>((s.in_w - 1 - first_x + step) / step, begin, columns);
  const uint8_t* x = static_cast<const uint8_t*>(args.x);
  // Of a row of x under folded columns [first_x, ...) those that lie in the image.
  const int64_t width = FoldedWidth(g, block.columns);
  uint8_t* const padded_row = packed + block.padded_row;
  const int64_t from_x = std::clamp<int64_t>(first_x, 0, s.in_w), end_x = std::min(first_x + width, s.in_w);
  for (size_t r = 0; r < block.rows; ++r) {
    uint8_t* to = packed + r * block.row_pitch;
    // The last unit of a kernel row may reach behind the last pixel: engines count on what a digit can be.
    for (size_t strip = 0; window_.rows && strip < window_.strips; ++strip) {
      const size_t used = block.columns * window_.pixel_pitch;
      std::memset(to + strip * block.digit_pitch + used, 0, block.digit_pitch - used);
    }
    const int64_t y = first_y + static_cast<int64_t>(r) * vertical.PackedStep();
    if (window_.folded && y >= 0 && y < s.in_h && from_x < end_x) {
      const uint8_t* const of_row = x + (image * s.in_h + y) * s.in_w * g.in_channels;
      const uint8_t* codes = of_row + from_x * g.in_channels;
      if (from_x != first_x || end_x != first_x + width) {
        std::memset(padded_row, pad_code_, static_cast<size_t>(width * g.in_channels));
        std::memcpy(padded_row + (from_x - first_x) * g.in_channels, codes,
                    static_cast<size_t>((end_x - from_x) * g.in_channels));
        codes = padded_row;
      }
      PackRun(codes, block.columns, static_cast<size_t>(g.stride_w * g.in_channels), block.digit_pitch, to);
      continue;
    }
    if (window_.folded || y < 0 || y >= s.in_h || begin == end) {
      PadRun(0, block.columns, block.digit_pitch, to);
      continue;
    }
    const uint8_t* from = x + ((image * s.in_h + y) * s.in_w + first_x + begin * step) * g.in_channels;
    uint8_t* first = to + static_cast<size_t>(begin) * window_.pixel_pitch;
    PackRun(from, static_cast<size_t>(end - begin), static_cast<size_t>(step * g.in_channels),
            block.digit_pitch, first);
    PadRun(0, static_cast<size_t>(begin), block.digit_pitch, to);
    PadRun(static_cast<size_t>(end), block.columns, block.digit_pitch, to);
  }
}

// A part of a unit of stacked windows: words of a packed kernel row, shifted left or right.
struct Piece {
  const uint32_t* from;
  size_t left, right;
};

// to[i] = all pieces of word i, whose words are `step` apart.
template <size_t kCount>
void JoinPieces(const Piece* pieces, size_t step, size_t count, uint32_t* __restrict to) {
  const auto join = [&](size_t at) {
    uint32_t word = 0;
    for (size_t k = 0; k < kCount; ++k) word |= pieces[k].from[at] << pieces[k].left >> pieces[k].right;
    return word;
  };
  if (step == 1) {  // what a compiler turns into vectors
    for (size_t i = 0; i < count; ++i) to[i] = join(i);
  } else {
    for (size_t i = 0; i < count; ++i) to[i] = join(i * step);
  }
}

// The windows of `rows` output rows, from packed kernel rows, whose last words end with zeros.
void BitserialKernel::StackRows(const PackedBlock& block, size_t rows, uint8_t* packed) const {
  constexpr size_t kWord = 32;
  const size_t digits = block.columns * engine_.DigitCount(x_bits_), row_bits = window_.row_bits;
  const size_t row_words = DivideUp(row_bits, kWord), window_bits = window_.segment_bits;
  const size_t stride = static_cast<size_t>(Vertical(geometry_).Stride()) * block.row_pitch;
  const size_t dilation = static_cast<size_t>(geometry_.dilation_h) * block.row_pitch;
  auto* to = reinterpret_cast<uint32_t*>(packed + block.stacked);
  for (size_t r = 0; r < rows; ++r) {
    for (size_t first = 0; first < window_bits; first += kWord, to += digits) {
      const size_t end = std::min(first + kWord, window_bits);
      Piece pieces[kWord];
      size_t count = 0;
      // A piece ends with a word of a kernel row, with that row or with the unit.
      for (size_t bit = first; bit < end; ++count) {
        const size_t ky = bit / row_bits, in_row = bit % row_bits, in_word = in_row % kWord;
        const auto* row = reinterpret_cast<const uint32_t*>(packed + r * stride + ky * dilation);
        const bool later = bit != first;  // then it is the beginning of a word
        pieces[count] = {row + in_row / kWord, later ? bit - first : 0, later ? 0 : in_word};
        bit += std::min({kWord - in_word, row_bits - in_row, end - bit});
      }
      switch (count) {
        case 1:
          JoinPieces<1>(pieces, row_words, digits, to);
          break;
        case 2:
          JoinPieces<2>(pieces, row_words, digits, to);
          break;
        case 3:
          JoinPieces<3>(pieces, row_words, digits, to);
          break;
        default:
          JoinPieces<4>(pieces, row_words, digits, to);
          for (size_t k = 4; k < count; ++k) {
            for (size_t i = 0; i < digits; ++i) to[i] |= pieces[k].from[i * row_words] << pieces[k].left;
          }
          break;
      }
    }
  }
}

BlockGrid BitserialKernel::GridOf(const ConvShape& flattened) const {
  const double cycles =
      EstimateCycles(geometry_, window_, plan_, x_bits_, few_codes_.has_value(), engine_, flattened).products;
  const auto packed = [&](size_t rows, size_t columns) {
    return PlanPacked(geometry_, window_, x_bits_, engine_, rows, columns);
  };
  BlockGrid grid = CutBlocks(flattened, DivideUp(WantedTasks(cycles), panels_.size()), engine_.block_bytes,
                             [&](size_t rows, size_t columns) { return packed(rows, columns).bytes; });
  grid.packed = packed(grid.rows, grid.columns);
  return grid;
}

ShapePlan BitserialKernel::MakePlan(const ConvShape& whole) const {
  const ConvGeometry& g = geometry_;
  ShapePlan plan;
  plan.shape = Flatten(g, whole);
  plan.grid = GridOf(plan.shape);

  const PackedBlock& block = plan.grid.packed;
  const size_t digits = engine_.DigitCount(x_bits_);
  if (window_.stacked) {
    const size_t pitch = StackedPitch(block, digits);
    for (size_t digit = 0; digit < digits; ++digit) {
      for (size_t u = 0; u < window_.units(); ++u)
        plan.offsets.push_back(static_cast<uint32_t>(u * pitch + digit * sizeof(uint32_t)));
    }
  } else {
    const size_t tap_w = window_.rows || window_.folded ? 1 : static_cast<size_t>(g.kernel_w);
    for (size_t digit = 0; digit < digits; ++digit) {
      for (size_t segment = 0; segment < window_.segments; ++segment) {
        const size_t y = segment / tap_w * static_cast<size_t>(g.dilation_h);
        const size_t x = segment % tap_w * static_cast<size_t>(g.dilation_w);
        const size_t start = y * block.row_pitch + x * window_.pixel_pitch + digit * block.digit_pitch;
        for (size_t u = 0; u < window_.segment_units; ++u)
          plan.offsets.push_back(static_cast<uint32_t>(start + u * engine_.UnitDigitBytes()));
      }
    }
  }
  if (!tap_sums_.empty()) AddClassBiases(plan);
  return plan;
}

void BitserialKernel::AddClassBiases(ShapePlan& plan) const {
  const ConvGeometry& g = geometry_;
  const TapClasses rows(Vertical(g), plan.shape.in_h, plan.shape.out_h);
  const TapClasses columns(Horizontal(g), plan.shape.in_w, plan.shape.out_w);
  plan.row_class = rows.of_output;
  plan.column_class = columns.of_output;
  plan.column_classes = columns.ranges.size();
  const size_t channels = static_cast<size_t>(g.out_channels);
  for (const auto& [first_y, end_y] : rows.ranges) {
    for (const auto& [first_x, end_x] : columns.ranges) {
      const size_t start = plan.class_bias.size();
      plan.class_bias.insert(plan.class_bias.end(), bias_.begin(), bias_.end());
      int32_t* bias = plan.class_bias.data() + start;
      for (int64_t y = 0; y < g.kernel_h; ++y) {
        for (int64_t x = 0; x < g.kernel_w; ++x) {
          if (y >= first_y && y < end_y && x >= first_x && x < end_x) continue;
          const int32_t* sums = tap_sums_.data() + static_cast<size_t>(y * g.kernel_w + x) * channels;
          for (size_t c = 0; c < channels; ++c)
            bias[c] = static_cast<int32_t>(static_cast<uint32_t>(bias[c]) + static_cast<uint32_t>(sums[c]));
        }
      }
      if (!few_codes_) continue;
      const std::vector<int16_t> limits = few_codes_->Limits(bias);
      plan.class_limits.insert(plan.class_limits.end(), limits.begin(), limits.end());
    }
  }
}

// Tiles may read what belongs to pixels behind the last one: the same again.
template <class T>
void Repeat(T** of_pixels, size_t count, size_t padded) {
  std::fill(of_pixels + count, of_pixels + padded, of_pixels[count - 1]);
}

BitserialKernel::Scratch BitserialKernel::PlanScratch(const BlockGrid& grid) const {
  ScratchLayout layout;
  const size_t pixels = PaddedPixels(grid.pixels());
  Scratch scratch;
  scratch.packed = layout.Take(grid.packed.bytes);
  scratch.pixels = layout.Take(pixels * sizeof(void*));
  scratch.bias_rows = layout.Take(tap_sums_.empty() || few_codes_ ? 0 : pixels * sizeof(void*));
  scratch.limit_rows = layout.Take(tap_sums_.empty() || !few_codes_ ? 0 : pixels * sizeof(void*));
  scratch.bytes = layout.bytes();
  return scratch;
}

void BitserialKernel::Run(const ConvArgs& args, ThreadPool& pool) const {
  if (args.shape.OutPixels() == 0) return;
  const std::shared_ptr<const ShapePlan> shared = PlanOf(args.shape);
  const ShapePlan& plan = *shared;
  const ConvShape& shape = plan.shape;
  const BlockGrid& grid = plan.grid;
  const Scratch parts = PlanScratch(grid);

  // Blocks of pixels are dealt out first. Every task of a block that is split by panels packs it again; such
  // a task is large enough for that to be a twentieth of its work.
  const Estimate estimate =
      EstimateCycles(geometry_, window_, plan_, x_bits_, few_codes_.has_value(), engine_, shape);
  const double blocks = static_cast<double>(grid.blocks);
  const size_t pixel_tasks =
      std::clamp(static_cast<size_t>(estimate.products / kTaskCycles), size_t{1}, grid.blocks);
  const double least = std::max(kTaskCycles, 20 * estimate.packing / blocks);
  const size_t panel_tasks =
      std::clamp(static_cast<size_t>(estimate.products / blocks / least), size_t{1}, panels_.size());

  const TaskSplit split = {grid.blocks, pixel_tasks, panels_.size(), panel_tasks};
  pool.ParallelFor(split.tasks(), [&](size_t task) {
    const auto [first_block, end_block, first_panel, end_panel] = split[task];

    uint8_t* scratch = ThreadScratch(parts.bytes);
    uint8_t* packed = scratch + parts.packed;
    auto** pixels = reinterpret_cast<const uint8_t**>(scratch + parts.pixels);
    auto** bias_rows = reinterpret_cast<const int32_t**>(scratch + parts.bias_rows);
    auto** limit_rows = reinterpret_cast<const int16_t**>(scratch + parts.limit_rows);

    BitserialBlock block{};
    block.op = plan_.op;
    block.pixels = pixels;
    block.offsets = plan.offsets.data();
    block.units = window_.units();
    if (plan_.joint) {
      block.table = table_->data();
      block.segment_units = window_.segment_units;
      block.units_per_byte = 255 / JointRange::Of(plan_.range, x_bits_).span();
    }
    block.passes = passes_.data();
    block.pass_count = passes_.size() - 1;
    block.sums_fit_words = sums_fit_words_;
    block.terms_fit_words = terms_fit_words_;
    block.panels = panels_.data() + first_panel;
    block.panel_count = end_panel - first_panel;
    block.bias_rows = tap_sums_.empty() || few_codes_ ? nullptr : bias_rows;
    block.bias = bias_.data();
    block.few_codes = few_codes_ ? &few_codes_view_ : nullptr;
    block.limit_rows = few_codes_ && !tap_sums_.empty() ? limit_rows : nullptr;
    block.limits = limits_.data();
    block.output = {&epilogue_.view(), 0, 1, static_cast<const uint8_t*>(args.residual), args.y};
    const uint8_t* const windows = packed + grid.packed.stacked;
    size_t stride_h = static_cast<size_t>(Vertical(geometry_).Stride()) * grid.packed.row_pitch;
    size_t stride_w = static_cast<size_t>(PackedColumns(geometry_, window_).Stride()) * window_.pixel_pitch;
    if (window_.stacked) {
      const size_t digits = engine_.DigitCount(x_bits_);
      stride_h = window_.units() * StackedPitch(grid.packed, digits);
      stride_w = digits * sizeof(uint32_t);
    }
    for (size_t i = first_block; i < end_block; ++i) {
      const size_t column = i % grid.column_blocks * grid.columns;
      const size_t row = i / grid.column_blocks % grid.row_blocks * grid.rows;
      const auto image = static_cast<int64_t>(i / grid.column_blocks / grid.row_blocks);
      const size_t rows = std::min(grid.rows, static_cast<size_t>(shape.out_h) - row);
      const size_t columns = std::min(grid.columns, static_cast<size_t>(shape.out_w) - column);
      PackBlock(args, plan, image, row, column, packed);
      if (window_.stacked) StackRows(grid.packed, rows, packed);
      const size_t count = rows * columns;
      for (size_t r = 0; r < rows; ++r) {
        const uint8_t* pixel = windows + r * stride_h;
        for (size_t c = 0; c < columns; ++c, pixel += stride_w) pixels[r * columns + c] = pixel;
      }
      if (!tap_sums_.empty()) {
        // The bias of each pixel, or what follows from it.
        const auto set = [&](auto** to, const auto* tables, size_t size) {
          for (size_t r = 0; r < rows; ++r) {
            const auto* table = tables + plan.row_class[row + r] * plan.column_classes * size;
            const uint32_t* column_class = plan.column_class.data() + column;
            for (size_t c = 0; c < columns; ++c) to[r * columns + c] = table + column_class[c] * size;
          }
          Repeat(to, count, PaddedPixels(count));
        };
        if (few_codes_) {
          set(limit_rows, plan.class_limits.data(), few_codes_->LimitsSize());
        } else {
          set(bias_rows, plan.class_bias.data(), bias_.size());
        }
      }
      Repeat(pixels, count, PaddedPixels(count));
      block.pixel_count = count;
      block.output.first_pixel = static_cast<size_t>(
          (image * shape.out_h + static_cast<int64_t>(row)) * shape.out_w + static_cast<int64_t>(column));
      engine_.run(block);
    }
  });
}

// ---- the table rows

// More products of planes than this are slower than any int8 kernel, by far.
constexpr int kMaxPasses = 16;

}  // namespace

std::string BitserialRefusal(const ConvSpec& spec, const BitserialEngine& engine) {
  const ConvGeometry& g = spec.geometry;
  if (g.IsDepthwise()) return "depthwise: a channel's bits share nothing";
  if (spec.x.encoding == Encoding::kBipolar && Padded(g) && g.Taps() > kMaxPaddedTaps)
    return "bipolar activations with padding and a window of more than 1024 taps";
  const WeightPlan weights = PlanWeights(spec.weight_values, engine);
  if (weights.planes * spec.x.bits > kMaxPasses) return "more than 16 products of bit planes";
  const WindowLayout w = PlanWindow(g, spec.x.bits, weights, engine);
  if (engine.joint) {
    if (spec.x.encoding == Encoding::kBipolar) return "bipolar activations have no code for the padding";
    if (weights.range.hi - weights.range.lo > 3)
      return "weights, less their zero points, have more than four values";
    const size_t span = JointRange::Of(weights.range, spec.x.bits).span();
    if (kJointStep * span > 255) return "sums of twelve products exceed a byte";
    if (w.units() > 65535 / span) return "sums exceed 16 bits";
  }
  // Bounded before they are multiplied: one row and one column of a huge dilated window may overflow.
  const Axis vertical = Vertical(g), horizontal = PackedColumns(g, w);
  if (vertical.Span(1) > kPackedBytes || horizontal.Span(1) > kPackedBytes || w.pixel_pitch > kPackedBytes ||
      w.units() > kPackedBytes || vertical.Span(1) * horizontal.Span(1) > kPackedBytes ||
      PlanPacked(g, w, spec.x.bits, engine, 1, 1).bytes > kPackedBytes) {
    return "kernel window exceeds the workspace";
  }
  return {};
}

double BitserialCycles(const ConvSpec& spec, const ConvShape& shape, const BitserialEngine& engine) {
  const WeightPlan weights = PlanWeights(spec.weight_values, engine);
  const WindowLayout w = PlanWindow(spec.geometry, spec.x.bits, weights, engine);
  const bool few_codes = HasFewCodes(spec, engine, ListPasses(spec, weights, engine), w.units());
  const Estimate e = EstimateCycles(spec.geometry, w, weights, spec.x.bits, few_codes, engine, shape);
  return engine.call_cycles + e.packing + e.products;
}

std::unique_ptr<ConvKernel> MakeBitserialKernel(const ConvSpec& spec, const BitserialEngine& engine) {
  return std::make_unique<BitserialKernel>(spec, engine);
}

}  // namespace lowbit
