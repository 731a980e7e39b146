// Packing: everything of a node that happens once.
//
// The tile kernels sum products of bytes. Let w' be the packed weight (int8), q the activation's code and
// z_x, z_w the zero points that are left; with padding taps reading the code z_x,
//   sum over the taps in the image of (q - z_x)(w' - z_w)
//     = S(q w') - z_w S(q) - z_x S(w' - z_w),
// where S sums over all taps. The last term depends on the channel alone and is folded into the bias. The one
// before it is there only where w - z_w leaves int8 (ZeroPoints of conv_tile.cuh): everywhere else z_w is
// subtracted while packing. Bipolar activations are bits whose
// z_x is 1/2, with doubled weights (OfBits), or are repacked to {-1, +1}, whose padding is 0.
#include "kernels/cuda/conv/packed_conv.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

#include "core/epilogue.h"
#include "kernels/cuda/conv/bits.h"
#include "kernels/cuda/conv/cell_weights.h"
#include "kernels/cuda/conv/depthwise.h"
#include "kernels/cuda/conv/flat_bits.h"
#include "kernels/cuda/conv/select.h"
#include "kernels/cuda/conv/sum_line.h"
#include "kernels/cuda/conv/weight_layouts.h"
#include "kernels/cuda/conv/weight_rows.h"

namespace lowbit::cuda {

// Lays constants out one after the other; an offset stands for each until they are uploaded together. With an
// image of all of them, nothing is filled in: the image is what is uploaded.
class ConstantBuilder {
 public:
  static constexpr size_t kAbsent = ~size_t{0};

  explicit ConstantBuilder(std::span<const uint8_t> image) : image_(image) {}

  bool restores() const { return !image_.empty(); }
  size_t Add(int64_t bytes, const std::function<void(uint8_t*)>& fill) {
    const size_t offset = size_;
    size_ += static_cast<size_t>(RoundUp(bytes, 256));
    if (!restores()) {
      bytes_.resize(size_);
      fill(bytes_.data() + offset);
    }
    return offset;
  }
  template <typename T>
  size_t Add(const std::vector<T>& values) {
    if (values.empty()) return kAbsent;
    return Add(static_cast<int64_t>(values.size() * sizeof(T)),
               [&](uint8_t* to) { std::memcpy(to, values.data(), values.size() * sizeof(T)); });
  }
  std::span<const uint8_t> Bytes() const {
    if (!restores()) return bytes_;
    Require(image_.size() == size_, "the packed node has ", image_.size(), " bytes, expected ", size_,
            "; compile the model again");
    return image_;
  }

 private:
  std::span<const uint8_t> image_;
  std::vector<uint8_t> bytes_;
  size_t size_ = 0;
};

namespace {

// The first constant of every node, so that an image says what cannot be told from the node without weights.
struct ImageHeader {
  uint32_t magic = 0x4243424C, has_w_zero = 0, sum_form = 0, rounding = 0, lacks_lines = 0, float_lines = 0,
           rises = 0;  // "LBCB"
  WeightBits w_bits;
};

ImageHeader ReadHeader(std::span<const uint8_t> image) {
  ImageHeader header;
  const ImageHeader expected;
  Require(image.size() >= sizeof header, "the packed node has ", image.size(), " bytes, expected at least ",
          sizeof header);
  std::memcpy(&header, image.data(), sizeof header);
  Require(header.magic == expected.magic && header.has_w_zero <= 1 &&
              header.sum_form <= static_cast<uint32_t>(SumForm::kFloatFromZero) &&
              header.rounding <= static_cast<uint32_t>(Rounding::kWords) && header.lacks_lines <= 1 &&
              header.float_lines <= 1 && header.rises <= 1 && header.w_bits.fit >= 0 &&
              header.w_bits.fit <= kMostWeightPlanes && header.w_bits.shift >= 0 && header.w_bits.shift < 8,
          "the packed node does not begin with the mark of this version; compile the model again");
  return header;
}

// AddResiduals' conditions: nothing overflows, no subnormal number loses bits, sums stay below 2^21 steps.
bool DividesFast(const Epilogue& e) {
  return IsNormal(e.inner_scale) && IsNormal(e.residual_scale) && IsNormal(e.y_scale) &&
         512.0 * (static_cast<double>(e.inner_scale) + static_cast<double>(e.residual_scale)) <
             static_cast<double>(e.y_scale) * 0x1p20;
}

bool HasNormalMultipliers(const Epilogue& e) {
  return std::all_of(e.multiplier.begin(), e.multiplier.end(), IsNormal);
}

bool AllRise(const Epilogue& e) {
  return e.kind != EpilogueKind::kThresholds ||
         std::all_of(e.dir.begin(), e.dir.end(), [](int32_t dir) { return dir > 0; });
}

// What stands for the residual that is zero, as the low bits of a float.
float ResidualOffset(const EpilogueParams& p) {
  return 0x1p23f + static_cast<float>((p.residual_signed ? 128 : 0) + p.residual_zero_point);
}

// What rounding sums needs to know of them.
Epilogue AsEpilogue(const ResidualSum& sum) {
  Epilogue e;
  e.y_scale = sum.y.scale;
  e.y_zero_point = sum.y.zero_point;
  e.y_lo = sum.lo;
  e.y_hi = sum.hi;
  return e;
}

bool IsPadded(const ConvGeometry& g) {
  return std::max({g.pad_top, g.pad_left, g.pad_bottom, g.pad_right}) > 0;
}

// Whether tile kernels apply. Positions are pairs of 16-bit numbers: sizes, pads and windows stay below 2^14
// together.
bool IsTiled(const ConvGeometry& g) {
  return !g.transposed && (g.group == 1 || (g.GroupIn() >= 16 && g.GroupOut() >= 16)) &&
         (g.kernel_h - 1) * g.dilation_h < 4096 && (g.kernel_w - 1) * g.dilation_w < 4096 &&
         std::max({g.pad_top, g.pad_left, g.pad_bottom, g.pad_right}) < 4096;
}

// Few sums decide then what a line must be, and nearly all channels have one.
bool BecomeFewCodes(const Epilogue& e) {
  return e.kind == EpilogueKind::kRequantize && e.quantized_output && e.hi - e.lo < 16 &&
         HasNormalMultipliers(e);
}

}  // namespace

std::optional<TailSteps> StepsOf(const Epilogue& e) {
  if (e.kind != EpilogueKind::kTail || !e.quantized_output || e.adds_behind_tail) return std::nullopt;
  TailSteps steps;
  auto at = e.tail.begin();
  const auto is = [&](TailStep step) { return at != e.tail.end() && *at == step; };
  if (is(TailStep::kBias)) {
    steps.has_bias = true;
    ++at;
  }
  if (is(TailStep::kSilu) || is(TailStep::kHardSwish)) {
    steps.function = is(TailStep::kSilu) ? TailFunction::kSilu : TailFunction::kHardSwish;
    ++at;
  }
  if (is(TailStep::kResidual)) ++at;
  Epilogue before = e;  // all that is common with tails on lines
  before.tail.resize(steps.has_bias ? 1 : 0);
  before.has_residual = false;
  const bool has_more = e.has_residual || steps.function != TailFunction::kNone;
  if (at != e.tail.end() || !has_more || !HasLines(before) || !IsNormal(e.residual_scale))
    return std::nullopt;
  return steps;
}

bool FitsTableSum(const ResidualSum& sum) {
  constexpr double kMost = 0x1p120;
  const double of_residuals = 512.0 * static_cast<double>(sum.residuals.scale);
  const auto most_with = [&](float value) {
    const double of_value = std::fabs(static_cast<double>(value));
    return sum.multiplies ? of_value * of_residuals : of_value + of_residuals;
  };
  return sum.values.size() == 256 && IsNormal(sum.residuals.scale) && IsNormal(sum.y.scale) &&
         std::all_of(sum.values.begin(), sum.values.end(),
                     [&](float value) {
                       const double most = most_with(value);
                       return most < kMost && most < static_cast<double>(sum.y.scale) * 0x1p60;
                     }) &&
         InvertTailScale(AsEpilogue(sum)).has_value();
}

bool MayRoundFours(const Epilogue& e) { return HasLines(e) || StepsOf(e); }

// Rounds, adds and clips what rises with the sums, each as float or int32. Neither 0 times infinity nor a
// product that is no number is among it.
bool MayRise(const Epilogue& e) { return HasLines(e) && !e.has_residual && HasNormalMultipliers(e); }

std::optional<ConvSpec> OfBits(const ConvSpec& spec) {
  const ConvGeometry& g = spec.geometry;
  const bool is_small =
      spec.w.encoding == Encoding::kBipolar || (spec.w.encoding == Encoding::kSigned && spec.w.bits < 8);
  const bool knows_outside = !IsPadded(g) || (IsTiled(g) && g.group == 1 && BorderOf(g));
  if (spec.x.encoding != Encoding::kBipolar || !knows_outside || g.transposed || !is_small ||
      std::any_of(spec.w_zero_point.begin(), spec.w_zero_point.end(), [](int32_t z) { return z != 0; })) {
    return std::nullopt;
  }
  ConvSpec bits = spec;
  bits.x = {1, Encoding::kUnsigned};
  bits.w = {8, Encoding::kSigned};
  bits.x_zero_point = 0;
  for (size_t i = 0; i < spec.weights.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    bits.weights[i] = static_cast<uint8_t>(2 * spec.WeightValue(index / g.K(), index));
  }
  return bits;
}

std::optional<ConvSpec> WithRisingThresholds(const ConvSpec& spec) {
  const Epilogue& e = spec.epilogue;
  if (e.kind != EpilogueKind::kThresholds || spec.geometry.transposed || AllRise(e)) return std::nullopt;
  ConvSpec out = spec;
  out.w = {8, Encoding::kSigned};
  std::fill(out.w_zero_point.begin(), out.w_zero_point.end(), 0);
  const int64_t k = spec.geometry.K();
  for (size_t c = 0; c < e.dir.size(); ++c) {
    const int32_t sign = e.dir[c];
    int64_t most = std::abs(int64_t{spec.bias[c]});  // of a sum, which its negative is as large as
    for (int64_t i = static_cast<int64_t>(c) * k; i < static_cast<int64_t>(c + 1) * k; ++i) {
      const int32_t weight = sign * spec.WeightValue(static_cast<int64_t>(c), i);
      if (weight < -128 || weight > 127) return std::nullopt;
      most += 255 * std::abs(weight);
      out.weights[static_cast<size_t>(i)] = static_cast<uint8_t>(weight);
    }
    if (sign > 0) continue;
    if (most >= std::numeric_limits<int32_t>::max()) return std::nullopt;
    out.bias[c] = -spec.bias[c];
    out.epilogue.dir[c] = 1;
    for (int64_t t = 0; t < e.threshold_count; ++t) {
      int32_t& threshold =
          out.epilogue.thresholds[c * static_cast<size_t>(e.threshold_count) + static_cast<size_t>(t)];
      // No sum is as large as the largest number.
      threshold =
          threshold == std::numeric_limits<int32_t>::min() ? std::numeric_limits<int32_t>::max() : -threshold;
    }
  }
  return out;
}

void RequireAligned(std::initializer_list<const void*> tensors) {
  for (const void* const tensor : tensors) {
    Require(reinterpret_cast<uintptr_t>(tensor) % 16 == 0,
            "tensors of a convolution on the GPU begin at multiples of 16 bytes; copy the tensor to one");
  }
}

// Tensor maps step up to 8 pixels and know no padding but zeros; they read the input itself, not a repacked
// one. The bounds of boxes are bytes. Of windows, a tile along k lies in one tap.
bool PackedConv::FitsBorders(const ConvSpec& spec) {
  const ConvGeometry& g = spec.geometry;
  return g.group == 1 && g.in_channels % (g.Taps() == 1 ? 16 : 64) == 0 &&
         spec.x.encoding != Encoding::kBipolar && BorderOf(g).has_value();
}

bool PackedConv::FitsBoxes(const ConvSpec& spec) {
  const ConvGeometry& g = spec.geometry;
  constexpr int64_t kMostReach = 64;
  return !g.transposed && g.group == 1 && g.in_channels % 16 == 0 && spec.x.encoding != Encoding::kBipolar &&
         (g.Taps() == 1 || g.in_channels % kTileK == 0) &&
         (!IsPadded(g) || spec.x_zero_point == 0 || FitsBorders(spec)) && g.stride_h <= 8 &&
         g.stride_w <= 8 && (g.kernel_h - 1) * g.dilation_h <= kMostReach &&
         (g.kernel_w - 1) * g.dilation_w <= kMostReach &&
         std::max({g.pad_top, g.pad_left, g.pad_bottom, g.pad_right}) <= kMostReach;
}

PackedConv::PackedConv(const ConvSpec& given, const Device& device, std::span<const uint8_t> image,
                       const StoredAs& stored)
    : geometry_(given.geometry), device_(device) {
  const ConvGeometry& g = geometry_;
  Require(g.out_channels <= kMaxBytes && g.K() <= kMaxBytes, "weights of ", g.out_channels, " x ", g.K(),
          " are too large for the GPU kernels");
  // Of an image nothing is read that it holds.
  const std::optional<ConvSpec> bits = OfBits(given);
  const ConvSpec& read = bits ? *bits : given;
  is_bits_ = bits.has_value();
  std::optional<ConvSpec> rising;
  if (image.empty()) {
    Require(static_cast<int64_t>(given.weights.size()) == g.out_channels * g.K(), "the node has ",
            given.weights.size(), " weights, expected ", g.out_channels * g.K());
    rising = WithRisingThresholds(read);
  }
  const ConvSpec& spec = rising ? *rising : read;
  x_ = spec.x;
  x_zero_ = spec.x_zero_point;
  tiled_ = IsTiled(g);
  vector16_ = g.GroupIn() % 16 == 0;
  boxes_ = FitsBoxes(spec);
  borders_ = tiled_ && IsPadded(g) && (is_bits_ || (TileZero() != 0 && FitsBorders(spec)));
  channels_ = RoundUp(g.GroupIn(), 4);
  repacks_ = x_.encoding == Encoding::kBipolar || channels_ != g.GroupIn();

  SetEpilogue(spec.epilogue);
  if (const auto& grid = stored.dequantized) {
    epilogue_.dequantizes = true;
    epilogue_.output_signed = grid->is_signed;
    epilogue_.output_scale = grid->scale;
    epilogue_.output_zero_point = grid->zero_point;
  }
  Require(stored.table.empty() || (stored.table.size() == 256 && spec.epilogue.quantized_output &&
                                   !spec.epilogue.has_residual && !stored.dequantized),
          "a table of ", stored.table.size(), " bytes stands behind a convolution that has no use for it");
  Require(!stored.added || (spec.epilogue.quantized_output && !spec.epilogue.has_residual &&
                            !stored.dequantized && !epilogue_.in_tail && FitsTableSum(*stored.added)),
          "residuals are added behind a convolution that has no use for them");
  Require(!stored.float_sum || (!spec.epilogue.quantized_output && !spec.epilogue.has_residual),
          "floats are added behind a convolution that makes none");
  if (const auto& limits = stored.float_sum) {
    epilogue_.adds_floats = true;
    epilogue_.sum_min = limits->low;
    epilogue_.sum_max = limits->high;
  }
  Int8Weights weights;
  ChannelConstants channels(static_cast<size_t>(g.out_channels));
  ImageHeader header;
  if (image.empty()) {
    weights = ToInt8(spec);
    w_bits_ = BitsOf(weights);
  } else {
    header = ReadHeader(image);
    w_bits_ = header.w_bits;
  }
  for (const WeightLayout* const layout : WeightLayouts()) {
    if (layout->applies(g, x_, w_bits_, device)) own_weights_at_.emplace_back(layout, 0);
  }
  if (image.empty()) {
    has_w_zero_ = std::any_of(weights.zero.begin(), weights.zero.end(), [](int32_t z) { return z != 0; });
    channels = ConstantsOf(spec, weights);
    SetRounding(spec.epilogue, channels);
    header.has_w_zero = has_w_zero_ ? 1 : 0;
    header.sum_form = static_cast<uint32_t>(sum_form_);
    header.rounding = static_cast<uint32_t>(epilogue_.rounding);
    header.lacks_lines = epilogue_.lacks_lines ? 1 : 0;
    header.float_lines = float_lines_ ? 1 : 0;
    header.rises = MayRise(spec.epilogue) && AllRise(spec.epilogue) ? 1 : 0;
    header.w_bits = w_bits_;
  } else {
    weights.zero.resize(channels.bias.size());
    has_w_zero_ = header.has_w_zero != 0;
    sum_form_ = static_cast<SumForm>(header.sum_form);
    epilogue_.rounding = static_cast<Rounding>(header.rounding);
    epilogue_.lacks_lines = header.lacks_lines != 0;
    float_lines_ = header.float_lines != 0;
  }
  // Of a tail kernels have no other ways.
  if ((epilogue_.on_lines || epilogue_.in_tail) &&
      (epilogue_.rounding != Rounding::kWords ||
       (epilogue_.has_residual && epilogue_.addition == Addition::kAny))) {
    rounds_fours_ = false;
  }
  rises_ = rounds_fours_ && !has_w_zero_ && !stored.dequantized && stored.table.empty() && !stored.added &&
           header.rises != 0;

  ConstantBuilder builder(image);
  builder.Add(sizeof header, [&](uint8_t* to) { std::memcpy(to, &header, sizeof header); });
  AddWeights(weights, builder);
  AddEpilogue(spec, weights, channels, builder);
  table_at_ = builder.Add(stored.table);
  values_at_ = ConstantBuilder::kAbsent;
  if (stored.added) AddTableSum(*stored.added, builder);
  border_at_ = ConstantBuilder::kAbsent;
  if (borders_) AddBorder(weights, builder);
  const std::span<const uint8_t> bytes = builder.Bytes();
  DeviceGuard guard(device.ordinal);
  memory_.Upload(bytes.data(), bytes.size(), device);
  ResolveEpilogue();
}

std::vector<uint8_t> PackedConv::Bytes() const {
  DeviceGuard guard(device_.ordinal);
  return memory_.Download();
}

const uint8_t* PackedConv::WeightsIn(const WeightLayout& layout) const {
  for (const auto& [each, at] : own_weights_at_) {
    if (each == &layout) return memory_.At(at);
  }
  Fail("the node is not packed in this order");
}

const uint8_t* PackedConv::CellWeights() const {
  return rises_ && kCellWeights.applies(geometry_, x_, w_bits_, device_) ? WeightsIn(kCellWeights) : nullptr;
}

bool PackedConv::MayReadPlanes(int planes) const {
  if (planes > kMostPlanes || planes != x_.bits || x_.encoding != Encoding::kUnsigned) return false;
  return kBitWeights.applies(geometry_, x_, w_bits_, device_) ||
         kFlatBitWeights.applies(geometry_, x_, w_bits_, device_);
}

bool PackedConv::MayStorePlanes(int planes) const {
  const EpilogueParams& e = epilogue_;
  const bool are_on_lines = (e.on_lines || float_lines_) && !e.lacks_lines;
  return planes <= kMostPlanes && (e.has_residual || are_on_lines) && e.quantized_output && !e.dequantizes &&
         e.values == nullptr && e.table == nullptr && geometry_.group == 1 &&
         geometry_.out_channels % 64 == 0 && e.word_lowest >= 0 &&
         e.word_lowest + static_cast<int>(e.word_top & 0xFFFF) < 1 << planes;
}

bool PackedConv::MayAddPlanes(int planes) const {
  const EpilogueParams& e = epilogue_;
  return planes <= kMostPlanes && e.has_residual && !e.residual_signed && e.values == nullptr &&
         geometry_.out_channels % 64 == 0 && kBitWeights.applies(geometry_, x_, w_bits_, device_);
}

ConvProblem PackedConv::Problem(const ConvShape& shape, bool has_places, const TensorPlanes& planes) const {
  const ConvGeometry& g = geometry_;
  ConvProblem problem{shape.OutPixels(), g.GroupOut(), g.Taps() * channels_, g.group};
  problem.geometry = g;
  problem.shape = shape;
  problem.x = x_;
  problem.w_bits = w_bits_;
  problem.channels = channels_;
  problem.repacks = repacks_;
  problem.has_w_zero = has_w_zero_;
  problem.zero = is_bits_ && IsPadded(g) ? ConvProblem::kNoCode : TileZero();
  problem.is_bits = is_bits_;
  problem.borders = borders_;
  problem.tiled = tiled_ && std::max(shape.in_h, shape.in_w) < 8192 &&
                  shape.batch * shape.in_h * shape.in_w * g.group * channels_ <= kMaxBytes;
  problem.weights_in_tiles = tiled_;
  problem.vector16 = vector16_;
  const bool requantizes = rounds_fours_ && !epilogue_.dequantizes && divides_fast_;
  // Channels that are finished together have one group, or are groups each.
  // Sums behind which there is a tail are floats, but for kernels that take any (Finish::kIntegersOfTail).
  problem.requantizes = requantizes && (FitsDepthwise(g, x_) || g.GroupOut() % 16 == 0);
  problem.is_tail = requantizes && (epilogue_.on_lines || epilogue_.in_tail);
  problem.in_tail = requantizes && epilogue_.in_tail;
  const bool is_float = sum_form_ != SumForm::kInteger;
  problem.is_capped =
      epilogue_.is_capped &&
      (epilogue_.in_tail ? is_float : !epilogue_.has_residual || epilogue_.addition == Addition::kOnLine);
  problem.integers_of_tail = requantizes && epilogue_.on_lines && !is_float;
  problem.is_mapped = epilogue_.table != nullptr || epilogue_.values != nullptr;
  problem.floats = requantizes && is_float;
  problem.residual = epilogue_.has_residual;
  // Whatever the tail, what adds up codes finishes it behind shared memory.
  problem.boxes = problem.tiled && boxes_ && (!problem.integers_of_tail || has_w_zero_);
  const bool may_be_bits = epilogue_.has_residual || epilogue_.steps != nullptr || epilogue_.line_base == 0;
  if (problem.requantizes && sum_form_ == SumForm::kFloat && (epilogue_.on_lines || float_lines_) &&
      !epilogue_.lacks_lines && !borders_ && may_be_bits)
    problem.codes_on_lines = static_cast<int64_t>(epilogue_.line_top - epilogue_.line_base) + 1;
  problem.has_places = has_places;
  problem.planes = planes;
  // What streams stores whole boxes of codes, as they are.
  problem.streams = problem.boxes && problem.requantizes && !has_w_zero_ && g.Taps() == 1 &&
                    !problem.IsPadded() && !has_places;
  return problem;
}

ConvParams PackedConv::Params(const ConvShape& s, const ConvConfig& config, bool may_be_floats) const {
  const ConvRow& row = RowOf(config);
  const auto narrow = [](int64_t v) { return static_cast<int>(v); };
  const ConvProblem problem = Problem(s);
  ConvParams p;
  p.weights = row.weights != nullptr ? WeightsIn(*row.weights) : memory_.At(weights_at_);
  p.m = narrow(problem.m);
  p.n = narrow(problem.n);
  p.k = narrow(problem.k);
  p.groups = narrow(problem.groups);
  p.epilogue = epilogue_;
  // What gathers pixels reads the code of zero outside of the image, where there is one.
  if (row.traits.gathers && !config.boxes && problem.zero != ConvProblem::kNoCode)
    p.epilogue.border = nullptr;
  const bool finishes_ones = row.traits.is_reference || row.traits.finishes_ones || !problem.requantizes ||
                             (config.splits > 1 && config.split == Split::kWorkspace);
  if (finishes_ones) {
    const size_t bias_at = row.traits.is_reference ? plain_bias_at_ : at_.bias;
    p.epilogue.bias = reinterpret_cast<const int32_t*>(memory_.At(bias_at));
    p.epilogue.scale = reinterpret_cast<const float*>(memory_.At(at_.scale));
  }
  // What gathers pixels has no instances for floats of inputs with signs (WithGatheredFinish).
  const bool has_instance = row.traits.takes_floats && (!XSigned() || !row.traits.gathers || config.boxes);
  if (may_be_floats && sum_form_ != SumForm::kInteger && has_instance &&
      SumsOf(problem, config).in_registers) {
    p.epilogue.sums = sum_form_;
    p.epilogue.bias = reinterpret_cast<const int32_t*>(memory_.At(at_.float_bias));
    if (float_lines_) {
      p.epilogue.on_lines = true;
      p.epilogue.scale = reinterpret_cast<const float*>(memory_.At(at_.gain));
      if (!p.epilogue.has_residual || p.epilogue.values != nullptr) p.epilogue.word_shift = 0;
    }
    if (sum_form_ == SumForm::kFloatFromZero)
      p.epilogue.start = reinterpret_cast<const float*>(memory_.At(at_.start));
  }
  return p;
}

void PackedConv::AddWeights(const Int8Weights& weights, ConstantBuilder& builder) {
  const ConvGeometry& g = geometry_;
  if (tiled_) {
    const int64_t rows = PaddedColumns(g.GroupOut()), k = RoundUp(g.Taps() * channels_, kTileK);
    weights_at_ = builder.Add(g.group * k * rows + kWeightSlackRows * kTileK,
                              [&](uint8_t* to) { PackTiles(g, weights, channels_, rows, to); });
  } else {
    weights_at_ = builder.Add(g.out_channels * g.Taps() * channels_,
                              [&](uint8_t* to) { PackRows(g, weights, channels_, to); });
  }
  for (auto& [layout, at] : own_weights_at_)
    at = builder.Add(layout->bytes(g, w_bits_), [&](uint8_t* to) { layout->pack(g, weights, w_bits_, to); });
}

// The sums of products count the taps outside of the image as if the zero point lay there, for the bias has
// -z * S(w') of all taps. Where 0 lies there, z times the weights of these taps is to be added again.
void PackedConv::AddBorder(const Int8Weights& weights, ConstantBuilder& builder) {
  const ConvGeometry& g = geometry_;
  const BorderParams border = BorderOf(g).value();
  epilogue_.border_pitch = static_cast<int>(RoundUp(g.out_channels, kWeightSlackRows));
  const int64_t bytes = border.classes * epilogue_.border_pitch * int64_t{sizeof(int32_t)};
  border_at_ = builder.Add(bytes, [&](uint8_t* to) {
    auto* const sums = reinterpret_cast<int32_t*>(to);
    for (int64_t c = 0; c < g.out_channels; ++c) {
      std::vector<uint32_t> of_tap(static_cast<size_t>(g.Taps()));
      for (int64_t i = 0; i < g.K(); ++i) {
        const int32_t weight =
            weights.values[static_cast<size_t>(c * g.K() + i)] - weights.zero[static_cast<size_t>(c)];
        of_tap[static_cast<size_t>(i / g.GroupIn())] += static_cast<uint32_t>(weight);
      }
      for (int64_t at = 0; at < border.classes; ++at) {
        const int64_t along_h = at % border.step_h.before, along_w = along_h % border.step_h.behind;
        const int64_t top = at / border.step_h.before, bottom = along_h / border.step_h.behind,
                      left = along_w / border.step_w.before, right = along_w % border.step_w.before;
        uint32_t sum = 0;
        for (int64_t tap = 0; tap < g.Taps(); ++tap) {
          const int64_t ty = tap / g.kernel_w, tx = tap % g.kernel_w;
          const bool is_inside =
              ty >= top && ty < g.kernel_h - bottom && tx >= left && tx < g.kernel_w - right;
          if (!is_inside) sum += of_tap[static_cast<size_t>(tap)];
        }
        sums[at * epilogue_.border_pitch + c] = ZeroTimes(static_cast<int32_t>(sum));
      }
    }
  });
}

void PackedConv::AddTableSum(const ResidualSum& sum, ConstantBuilder& builder) {
  values_at_ = builder.Add(sum.values);
  EpilogueParams& p = epilogue_;
  const Inverse inverse = InvertTailScale(AsEpilogue(sum)).value();
  p.has_residual = true;
  p.multiplies = sum.multiplies;
  p.residual_signed = sum.residuals.is_signed;
  p.residual_scale = sum.residuals.scale;
  p.residual_zero_point = sum.residuals.zero_point;
  p.residual_offset = ResidualOffset(p);
  p.y_scale = sum.y.scale;
  p.y_inverse = inverse.near;
  p.y_inverse_rest = inverse.rest;
  p.y_zero_point = sum.y.zero_point;
  p.y_lo = sum.lo;
  p.y_hi = sum.hi;
}

// The doubled weights of bits have even sums. Else modulo 2^32, as every sum of the kernels.
int32_t PackedConv::ZeroTimes(int32_t weights) const {
  if (is_bits_) return weights / 2;
  return static_cast<int32_t>(static_cast<uint32_t>(TileZero()) * static_cast<uint32_t>(weights));
}

PackedConv::ChannelConstants PackedConv::ConstantsOf(const ConvSpec& spec, const Int8Weights& weights) const {
  const Epilogue& e = spec.epilogue;
  ChannelConstants channels(spec.bias.size());
  channels.bias = spec.bias;
  if (tiled_ || !own_weights_at_.empty()) {
    for (size_t c = 0; c < channels.bias.size(); ++c) {
      channels.bias[c] = static_cast<int32_t>(static_cast<uint32_t>(channels.bias[c]) -
                                              static_cast<uint32_t>(ZeroTimes(weights.sum[c])));
    }
  }
  // Of the input's codes, whatever they are.
  const int64_t codes = int64_t{1} << spec.x.bits,
                lowest = XSigned()   ? -codes / 2
                         : Bipolar() ? -1
                                     : 0,
                highest = Bipolar() ? 1 : lowest + codes - 1;
  for (size_t c = 0; c < channels.bias.size(); ++c) {
    const int64_t above = weights.above[c], below = weights.sum[c] - above;
    channels.sums.push_back({channels.bias[c] + highest * below + lowest * above,
                             channels.bias[c] + highest * above + lowest * below});
  }
  channels.gain = e.kind == EpilogueKind::kRequantize ? e.multiplier : e.acc_scale;
  channels.gain.resize(channels.bias.size());
  if (epilogue_.in_tail) {
    if (StepsOf(e)->has_bias) channels.offset = e.tail_bias;
  } else if (epilogue_.on_lines || BecomeFewCodes(e)) {
    FitLines(e, channels);
  }
  return channels;
}

void PackedConv::FitLines(const Epilogue& e, ChannelConstants& channels) const {
  LineFitter fitter(e, epilogue_.is_capped);
  for (size_t c = 0; c < channels.bias.size(); c += 4) {
    const size_t count = std::min<size_t>(4, channels.bias.size() - c);
    const auto four = fitter.Fit(c, std::span(channels.sums).subspan(c, count));
    channels.factor[c / 4] = four ? four->factor : -1.0f;
    for (size_t i = c; i < c + count; ++i) {
      if (four) {
        const ChannelLine& line = four->lines[i - c];
        channels.gain[i] = line.gain;
        channels.offset[i] = line.offset;
        channels.shift[i] = line.shift;
      } else if (!e.tail.empty()) {
        channels.offset[i] = e.tail_bias[i];
      }
    }
  }
}

// Let f be the float whose bits are those of 2^23 (1.5 * 2^23) plus a sum. As long as the sum stays in 0 ..
// 2^23 (-2^22 .. 2^22) f is 2^23 (1.5 * 2^23) plus the sum. f rises with the sum everywhere as long as its
// bits are those of a positive normal number, hence beyond it is enough that codes are clipped there. (Lines
// were found for f as it is, and saturate.) A code is smaller than 2^15 before it is clipped where those of the
// least and the most sum are.
bool PackedConv::Allows(SumForm form, const Epilogue& e, const ChannelConstants& channels) const {
  constexpr int64_t kMost = int64_t{1} << 29;  // either float is further from what is no normal number
  const bool from_zero = form == SumForm::kFloatFromZero, is_float = form != SumForm::kInteger;
  const int64_t exact = from_zero ? 1 << 23 : 1 << 22;
  const CodeRange codes = FirstCodesOf(e);
  const bool in_tail = epilogue_.in_tail, on_lines = epilogue_.on_lines || float_lines_;
  const auto has_line = [&](size_t c) { return on_lines && channels.factor[c / 4] >= 0; };
  // With the least or the most residual, where the tail adds them. A function's value is no larger than it.
  const int32_t least_residual = e.residual_signed ? -128 : 0;
  const auto code_of = [&](size_t c, int64_t sum, int32_t residual) {
    return in_tail ? EpilogueCode(e, static_cast<int32_t>(sum), static_cast<int64_t>(c), residual)
                   : FirstCode(e, sum, c);
  };
  const auto with_residual = [&](float v, int32_t code) {
    const float residual =
        e.has_residual ? DequantizeCode(code, e.residual_scale, e.residual_zero_point) : 0.0f;
    return (std::fabs(v) + std::fabs(residual)) / e.y_scale;
  };
  const auto unrounded = [&](size_t c, int64_t sum) {
    const auto bits = [&](int32_t from) { return std::bit_cast<float>(from + static_cast<int32_t>(sum)); };
    if (from_zero) return std::fma(bits(0x4B000000), e.multiplier[c], -0x1p23f * e.multiplier[c]);
    const float v = is_float ? bits(0x4B400000) - 12582912.0f : static_cast<float>(sum);
    if (in_tail) {
      const float before = v * channels.gain[c] + channels.offset[c];
      return std::max(with_residual(before, least_residual), with_residual(before, least_residual + 255));
    }
    return on_lines ? TailQuotient(e, v, c) : v * e.multiplier[c];
  };
  const auto fits = [&](size_t c, int64_t sum) {
    if (is_float && std::abs(sum) > kMost) return false;
    if (has_line(c)) return true;
    if ((e.has_residual && !in_tail) || epilogue_.rounding != Rounding::kWords) return true;
    // Of a tail that is computed step by step, or for channels without a line, floats are clipped; products must be finite.
    return std::fabs(unrounded(c, sum)) < (in_tail || on_lines ? 0x1p60f : 0x1p15f - 512);
  };
  for (size_t c = 0; c < channels.sums.size(); ++c) {
    const auto [least, most] = channels.sums[c];
    if (!fits(c, least) || !fits(c, most)) return false;
    if (!is_float || has_line(c)) continue;
    if (most > exact && code_of(c, exact, least_residual) != codes.hi) return false;
    if (!from_zero && least < -exact && code_of(c, -exact, least_residual + 255) != codes.lo) return false;
  }
  return true;
}

// Multipliers that are no numbers would need lower bounds other than 0.
void PackedConv::SetRounding(const Epilogue& e, ChannelConstants& channels) {
  EpilogueParams& p = epilogue_;
  if (!rounds_fours_ || !HasNormalMultipliers(e)) return;
  const bool may_be_floats = !Bipolar() && !has_w_zero_ && tiled_ && !p.dequantizes;
  const bool lacks_lines =
      std::any_of(channels.factor.begin(), channels.factor.end(), [](float f) { return f < 0; });
  if (p.in_tail) {
    p.rounding = Rounding::kWords;  // says that fours are rounded: codes are clipped as floats
    if (!Allows(SumForm::kInteger, e, channels)) {
      p.rounding = Rounding::kAny;
    } else if (may_be_floats && e.has_residual && p.function == TailFunction::kNone && p.is_capped &&
               Allows(SumForm::kFloat, e, channels)) {
      sum_form_ = SumForm::kFloat;
    }
    return;
  }
  if (p.on_lines) {
    p.lacks_lines = lacks_lines;
    p.rounding = Rounding::kWords;
    if ((p.lacks_lines && e.kind == EpilogueKind::kThresholds) || !Allows(SumForm::kFloat, e, channels)) {
      p.rounding = Rounding::kAny;
    } else if (may_be_floats) {
      sum_form_ = SumForm::kFloat;
    }
    return;
  }
  p.rounding = e.lo == e.zero_point && e.hi == e.lo + 255 ? Rounding::kBytes : Rounding::kWords;
  const Rounding of_integers = p.rounding;
  if (of_integers == Rounding::kWords && !Allows(SumForm::kInteger, e, channels)) {
    p.rounding = Rounding::kAny;
    return;
  }
  if (!may_be_floats) return;
  if (of_integers == Rounding::kWords && BecomeFewCodes(e) && !lacks_lines &&
      (!e.has_residual || p.addition == Addition::kOnLine)) {
    float_lines_ = true;
    float_lines_ = Allows(SumForm::kFloat, e, channels);
  }
  if (float_lines_) {
    sum_form_ = SumForm::kFloat;
    return;
  }
  std::fill(channels.shift.begin(), channels.shift.end(), 0);  // of lines that are not taken
  if (!e.has_residual && e.lo == e.zero_point && (e.lo == 0 || of_integers == Rounding::kWords) &&
      Allows(SumForm::kFloatFromZero, e, channels)) {
    sum_form_ = SumForm::kFloatFromZero;
    return;
  }
  p.rounding = Rounding::kWords;
  if ((!e.has_residual || p.addition != Addition::kAny) && Allows(SumForm::kInteger, e, channels) &&
      Allows(SumForm::kFloat, e, channels)) {
    sum_form_ = SumForm::kFloat;
  } else {
    p.rounding = of_integers;
  }
}

void PackedConv::AddEpilogue(const ConvSpec& spec, const Int8Weights& weights,
                             const ChannelConstants& channels, ConstantBuilder& builder) {
  const Epilogue& e = spec.epilogue;
  Require(e.tail.size() <= kMaxTailSteps, "the tail has ", e.tail.size(), " steps, expected at most ",
          kMaxTailSteps);
  // Thresholds have none; kernels read it all the same.
  std::vector<float> scale = e.kind == EpilogueKind::kRequantize ? e.multiplier : e.acc_scale;
  scale.resize(channels.bias.size());
  plain_bias_at_ = builder.Add(spec.bias);
  std::vector<int32_t> float_bias;
  std::vector<float> start;
  if (sum_form_ != SumForm::kInteger || epilogue_.on_lines) {
    const uint32_t bits = sum_form_ == SumForm::kFloatFromZero ? 0x4B000000 : 0x4B400000;
    for (size_t c = 0; c < channels.bias.size(); ++c) {
      float_bias.push_back(static_cast<int32_t>(static_cast<uint32_t>(channels.bias[c]) + bits +
                                                static_cast<uint32_t>(channels.shift[c])));
    }
  }
  if (sum_form_ == SumForm::kFloatFromZero) {
    for (const float s : scale) start.push_back(-0x1p23f * s);
  }
  std::vector<int32_t> steps, last_steps;
  std::vector<uint8_t> step_flips;
  if (HasSteps(e)) FindSteps(e, channels, steps, last_steps, step_flips);
  at_ = {builder.Add(channels.bias),   builder.Add(scale),
         builder.Add(channels.gain),   builder.Add(channels.offset),
         builder.Add(channels.factor), builder.Add(float_bias),
         builder.Add(start),           has_w_zero_ ? builder.Add(weights.zero) : ConstantBuilder::kAbsent,
         builder.Add(e.thresholds),    builder.Add(e.base),
         builder.Add(e.dir),           builder.Add(e.tail_bias),
         builder.Add(e.tail_scale),    builder.Add(e.tail_shift),
         builder.Add(steps),           builder.Add(last_steps),
         builder.Add(step_flips)};
}

bool PackedConv::HasSteps(const Epilogue& e) const {
  const bool are_on_lines = (epilogue_.on_lines || float_lines_) && !epilogue_.lacks_lines;
  if (!are_on_lines || sum_form_ != SumForm::kFloat || !kBitWeights.applies(geometry_, x_, w_bits_, device_))
    return false;
  const CodeRange codes = FirstCodesOf(e);
  return codes.hi - codes.lo <= BitStepsOf(geometry_, x_.bits, w_bits_).count;
}

// Codes only rise with the sum, or only fall: where each one begins is looked for between the sums that there are. Those
// that fall are told as the highest one less what rises.
void PackedConv::FindSteps(const Epilogue& e, const ChannelConstants& channels, std::vector<int32_t>& steps,
                           std::vector<int32_t>& last_steps, std::vector<uint8_t>& flips) const {
  const CodeRange codes = FirstCodesOf(e);
  const BitSteps all = BitStepsOf(geometry_, x_.bits, w_bits_);
  steps.resize(static_cast<size_t>(RoundUp(geometry_.out_channels, 4)));
  last_steps.resize(steps.size());
  flips.resize(static_cast<size_t>(CeilDiv(geometry_.out_channels, kPlaneChannels) * kPlaneWordBytes));
  for (size_t c = 0; c < channels.sums.size(); ++c) {  // none of what comes packed
    const auto [least, most] = channels.sums[c];
    const bool falls = FirstCode(e, most, c) < FirstCode(e, least, c);
    for (int step = 1; step <= all.count; ++step) {
      const auto reaches = [&](int64_t sum) {
        const int32_t code = FirstCode(e, sum, c) - codes.lo;
        return (falls ? all.count - code : code) >= step;
      };
      int64_t from = least, to = most + 1;  // sums before `from` do not, from `to` on they do
      while (from < to) {
        const int64_t middle = from + (to - from) / 2;
        if (reaches(middle)) {
          to = middle;
        } else {
          from = middle + 1;
        }
      }
      const int64_t first = std::clamp(from - channels.bias[c], all.least, all.most + 1);
      const auto word = c / 4 * 4 + c % 4 / 2 + (step == 2 ? 2 : 0);
      (step == 3 ? last_steps : steps)[word] |=
          static_cast<int32_t>(static_cast<uint32_t>((1 << 15) - (first - all.least)) << 16 * (c % 2));
    }
    if (!falls) continue;
    const int at = BitOfChannel(static_cast<int>(c % kPlaneChannels));
    flips[c / kPlaneChannels * kPlaneWordBytes + static_cast<size_t>(at / 8)] |=
        static_cast<uint8_t>(1 << at % 8);
  }
}

void PackedConv::SetEpilogue(const Epilogue& e) {
  EpilogueParams& p = epilogue_;
  p.kind = static_cast<int>(e.kind);
  p.quantized_output = e.quantized_output;
  p.has_residual = e.has_residual;
  p.residual_signed = e.residual_signed;
  p.out_channels = static_cast<int>(geometry_.out_channels);
  p.zero_point = e.zero_point;
  p.lo = e.lo;
  p.hi = e.hi;
  p.threshold_count = static_cast<int>(e.threshold_count);
  p.tail_count = static_cast<int>(e.tail.size());
  for (size_t i = 0; i < e.tail.size(); ++i) p.tail[i] = static_cast<uint8_t>(e.tail[i]);
  p.clip_min = e.clip_min;
  p.clip_max = e.clip_max;
  p.residual_scale = e.residual_scale;
  p.inner_scale = e.inner_scale;
  p.y_scale = e.y_scale;
  p.residual_zero_point = e.residual_zero_point;
  p.y_zero_point = e.y_zero_point;
  const std::optional<TailSteps> steps = StepsOf(e);
  divides_fast_ = !e.has_residual || steps || DividesFast(e);
  p.y_inverse = 1.0f / e.y_scale;
  constexpr int32_t kMagic = 12582912;                                              // 1.5 * 2^23
  const auto units = [](double codes) { return static_cast<float>(codes / 256); };  // exact
  p.unit_zero = static_cast<float>(e.hi - 256 - e.zero_point);
  p.unit_offset = units(-12582912.0 - static_cast<double>(p.unit_zero));
  p.unit_lo = units(e.lo - (e.hi - 256));
  p.residual_offset = ResidualOffset(p);
  p.adds_behind_tail = e.adds_behind_tail;
  p.first_scale = e.adds_behind_tail ? e.inner_scale : e.y_scale;
  p.first_inverse = 1.0f / p.first_scale;
  const CodeRange codes = e.has_residual ? CodeRange{e.y_lo, e.y_hi, e.y_zero_point} : FirstCodesOf(e);
  const auto twice = [](int32_t v) { return static_cast<unsigned>(v & 0xFFFF) * 0x10001u; };
  p.word_lowest = codes.lo;
  p.word_top = twice(codes.hi - codes.lo);
  p.word_shift = twice(codes.zero_point - codes.lo);
  rounds_fours_ = MayRoundFours(e);
  p.on_lines = HasLines(e) && e.kind != EpilogueKind::kRequantize;
  if (HasLines(e)) {
    const CodeRange first = FirstCodesOf(e);
    const int32_t base = LineBaseOf(e) + (e.has_residual ? kMagic : 0);
    p.line_base = static_cast<float>(base);
    p.line_top = static_cast<float>(base + first.hi - first.lo);
    p.line_flip = !e.has_residual && first.lo < 0 ? 0x80808080u : 0u;
    p.line_shift = static_cast<float>(base - (first.lo - first.zero_point) - kMagic);
  }
  if (p.on_lines && !e.has_residual) p.word_shift = 0;
  if (e.kind != EpilogueKind::kRequantize && (!e.has_residual || steps)) {
    p.zero_point = codes.zero_point;
    p.lo = codes.lo;
    p.hi = codes.hi;
  }
  if (steps) {
    p.in_tail = true;
    p.function = steps->function;
    if (const auto inverse = InvertTailScale(e)) {
      p.addition = Addition::kInTail;
      p.y_inverse = inverse->near;
      p.y_inverse_rest = inverse->rest;
    } else {
      rounds_fours_ = false;
    }
  } else if (e.has_residual && divides_fast_) {
    p.residual_start = -0x1p23f * e.residual_scale;
    if (const auto line = FitSum(e)) {
      p.addition = Addition::kOnLine;
      p.word_shift = 0;
      p.unit_gain = 256 * line->inner_gain;
      p.residual_gain = line->residual_gain;
      p.sum_offset = line->offset;
      static_assert(SumLine::kResidual == 0x1p15f);
      p.residual_bits = 0x47000000u + static_cast<uint32_t>(line->low);
    } else if (const auto inverse = InvertScale(e)) {
      p.addition = p.residual_offset == 0x1p23f ? Addition::kInverseFromLowest : Addition::kInverse;
      p.y_inverse_rest = inverse->rest;
    }
  }
  p.y_lo = e.y_lo;
  p.y_hi = e.y_hi;
  const bool is_half = p.word_top == twice(127);
  p.is_capped = p.word_shift == 0 && (is_half || p.word_top == twice(255)) &&
                (p.word_lowest == 0 || (p.word_lowest == -128 && !is_half));
  p.cap_select = is_half ? 0xBA98u : 0x4444u;
  p.cap_flip = p.word_lowest < 0 ? 0x80808080u : 0u;
}

void PackedConv::ResolveEpilogue() {
  const auto ints = [&](size_t at) {
    return at == ConstantBuilder::kAbsent ? nullptr : reinterpret_cast<const int32_t*>(memory_.At(at));
  };
  const auto floats = [&](size_t at) {
    return at == ConstantBuilder::kAbsent ? nullptr : reinterpret_cast<const float*>(memory_.At(at));
  };
  epilogue_.bias = ints(epilogue_.on_lines ? at_.float_bias : at_.bias);
  epilogue_.scale = floats(epilogue_.on_lines ? at_.gain : at_.scale);
  epilogue_.start = floats(at_.offset);
  epilogue_.factor = floats(at_.factor);
  epilogue_.w_zero = ints(at_.w_zero);
  epilogue_.thresholds = ints(at_.thresholds);
  epilogue_.base = ints(at_.base);
  epilogue_.dir = ints(at_.dir);
  epilogue_.tail_bias = floats(at_.tail_bias);
  epilogue_.tail_scale = floats(at_.tail_scale);
  epilogue_.tail_shift = floats(at_.tail_shift);
  epilogue_.steps = ints(at_.steps);
  epilogue_.last_steps = ints(at_.last_steps);
  epilogue_.step_flips = at_.step_flips == ConstantBuilder::kAbsent ? nullptr : memory_.At(at_.step_flips);
  epilogue_.border = ints(border_at_);
  epilogue_.values = floats(values_at_);
  epilogue_.table = table_at_ == ConstantBuilder::kAbsent ? nullptr : memory_.At(table_at_);
}

}  // namespace lowbit::cuda
