// Packing: everything of a node that happens once.
//
// The tile kernels sum products of bytes. Let w' be the packed weight (int8), q the activation's code and
// z_x, z_w the zero points that are left; with padding taps reading the code z_x,
//   sum over the taps in the image of (q - z_x)(w' - z_w)
//     = S(q w') - z_x S(w') - z_w x_sum,   S over all taps, x_sum = sum over the taps in the image of (q -
//     z_x)
// The middle term depends on the channel alone and is folded into the bias. The last one is there only where
// w - z_w leaves int8: everywhere else z_w is subtracted while packing. Bipolar activations are repacked to
// {-1, +1}, whose padding is 0.
#include "kernels/cuda/conv/packed_conv.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "kernels/cuda/conv/cell_weights.h"
#include "kernels/cuda/conv/sum_line.h"
#include "kernels/cuda/conv/weight_layouts.h"

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
  uint32_t magic = 0x3243424C, has_w_zero = 0, sum_form = 0;  // "LBC2"
};

ImageHeader ReadHeader(std::span<const uint8_t> image) {
  ImageHeader header;
  const ImageHeader expected;
  Require(image.size() >= sizeof header, "the packed node has ", image.size(), " bytes, expected at least ",
          sizeof header);
  std::memcpy(&header, image.data(), sizeof header);
  Require(header.magic == expected.magic && header.has_w_zero <= 1 &&
              header.sum_form <= static_cast<uint32_t>(SumForm::kFloatFromZero),
          "the packed node does not begin with the mark of this version; compile the model again");
  return header;
}

// AddResiduals' conditions: nothing overflows, no subnormal number loses bits, sums stay below 2^21 steps.
bool DividesFast(const Epilogue& e) {
  return IsNormal(e.inner_scale) && IsNormal(e.residual_scale) && IsNormal(e.y_scale) &&
         512.0 * (static_cast<double>(e.inner_scale) + static_cast<double>(e.residual_scale)) <
             static_cast<double>(e.y_scale) * 0x1p20;
}

bool IsPadded(const ConvGeometry& g) {
  return g.pad_top != 0 || g.pad_left != 0 || g.pad_bottom != 0 || g.pad_right != 0;
}

// RequantizeFragments takes sums of any form.
bool EndsInFragments(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kMma:
    case Algorithm::kWgmma:
    case Algorithm::kResident:
    case Algorithm::kTeam:
    case Algorithm::kHalo:
    case Algorithm::kWindows:
      return true;
    default:
      return false;
  }
}

bool HasNormalMultipliers(const Epilogue& e) {
  return std::all_of(e.multiplier.begin(), e.multiplier.end(), IsNormal);
}

// Multipliers that are no numbers would need lower bounds other than 0.
Rounding RoundingOf(const Epilogue& e) {
  if (!HasNormalMultipliers(e)) return Rounding::kAny;
  const int32_t lo = e.lo - e.zero_point, hi = e.hi - e.zero_point;
  if (lo == 0) return hi == 255 ? Rounding::kUnsignedBytes : Rounding::kFromZero;
  if (hi - lo != 255) return Rounding::kAny;
  return lo == -128 ? Rounding::kSignedBytes : Rounding::kAllBytes;
}

}  // namespace

// Rounds, adds and clips what rises with the sums, each as float or int32. Neither 0 times infinity nor a
// product that is no number is among it.
bool Rises(const Epilogue& e) {
  return e.kind == EpilogueKind::kRequantize && e.quantized_output && !e.has_residual &&
         HasNormalMultipliers(e);
}

PixelRounding RoundingOf(const PixelQuantizer& quantizer) {
  PixelRounding rounding;
  std::copy(quantizer.scale.begin(), quantizer.scale.end(), rounding.scale);
  rounding.fast_division = std::all_of(quantizer.scale.begin(), quantizer.scale.end(), IsNormal);
  const bool is_signed = quantizer.lo < 0;
  rounding.flip = is_signed ? 0x80808080u : 0u;
  for (size_t c = 0; c < quantizer.scale.size(); ++c) {
    const int32_t zero = quantizer.zero_point[c];
    rounding.inverse[c] = 1.0f / quantizer.scale[c];
    // Rounding puts these products, quotients of which are at most 255 in size, back on the codes.
    rounding.low[c] = static_cast<float>(quantizer.lo - zero) * quantizer.scale[c];
    rounding.high[c] = static_cast<float>(quantizer.hi - zero) * quantizer.scale[c];
    rounding.add[c] = static_cast<uint32_t>(zero + (is_signed ? 128 : 0)) - 0x4B400000u;
  }
  return rounding;
}

void RequireAligned(std::initializer_list<const void*> tensors) {
  for (const void* const tensor : tensors) {
    Require(reinterpret_cast<uintptr_t>(tensor) % 16 == 0,
            "tensors of a convolution on the GPU begin at multiples of 16 bytes; copy the tensor to one");
  }
}

bool PackedConv::FitsImage(const ConvGeometry& g, const OperandType& x) {
  return !g.transposed && g.group == 1 && g.in_channels <= kMaxImageChannels && g.kernel_w <= kMaxImageTaps &&
         g.kernel_h <= 16 && g.dilation_h == 1 && g.dilation_w == 1 && g.stride_h <= 4 && g.stride_w <= 4 &&
         g.pad_top < 4096 && g.pad_left < 4096 && x.encoding != Encoding::kBipolar;
}

bool PackedConv::FitsCells(const ConvGeometry& g, const OperandType& x) {
  constexpr int64_t kPixels = 2 * kCellTaps;
  return FitsImage(g, x) && g.stride_h == 2 && g.stride_w == 2 && g.kernel_h + g.pad_top % 2 <= kPixels &&
         g.kernel_w + g.pad_left % 2 <= kPixels && g.out_channels % 16 == 0;
}

// Tensor maps step up to 8 pixels and know no padding but zeros; they read the input itself, not a repacked
// one. The bounds of boxes are bytes. Of windows, a tile along k lies in one tap.
bool PackedConv::FitsBoxes(const ConvSpec& spec) {
  const ConvGeometry& g = spec.geometry;
  constexpr int64_t kMostReach = 64;
  return !g.transposed && g.group == 1 && g.in_channels % 16 == 0 && spec.x.encoding != Encoding::kBipolar &&
         (g.Taps() == 1 || g.in_channels % kTileK == 0) && (!IsPadded(g) || spec.x_zero_point == 0) &&
         g.stride_h <= 8 && g.stride_w <= 8 && (g.kernel_h - 1) * g.dilation_h <= kMostReach &&
         (g.kernel_w - 1) * g.dilation_w <= kMostReach &&
         std::max({g.pad_top, g.pad_left, g.pad_bottom, g.pad_right}) <= kMostReach;
}

PackedConv::PackedConv(const ConvSpec& spec, const Device& device, std::span<const uint8_t> image,
                       const std::optional<CodeGrid>& dequantized)
    : geometry_(spec.geometry), x_(spec.x), x_zero_(spec.x_zero_point), device_(device) {
  const ConvGeometry& g = geometry_;
  Require(g.out_channels <= kMaxBytes && g.K() <= kMaxBytes, "weights of ", g.out_channels, " x ", g.K(),
          " are too large for the GPU kernels");
  // Positions are pairs of 16-bit numbers: sizes, pads and windows stay below 2^14 together.
  tiled_ = !g.transposed && (g.group == 1 || (g.GroupIn() >= 16 && g.GroupOut() >= 16)) &&
           (g.kernel_h - 1) * g.dilation_h < 4096 && (g.kernel_w - 1) * g.dilation_w < 4096 &&
           std::max({g.pad_top, g.pad_left, g.pad_bottom, g.pad_right}) < 4096;
  image_ = FitsImage(g, x_);
  cells_ = device.capability == 90 && FitsCells(g, x_);
  depthwise_ = g.IsDepthwise() && !g.transposed && g.group % 16 == 0 && x_.encoding != Encoding::kBipolar;
  vector16_ = g.GroupIn() % 16 == 0;
  boxes_ = FitsBoxes(spec);
  channels_ = RoundUp(g.GroupIn(), 4);
  n_padded_ = RoundUp(g.GroupOut(), 32);
  k_tiles_ = RoundUp(g.Taps() * channels_, kTileK) / kTileK;
  repacks_ = x_.encoding == Encoding::kBipolar || channels_ != g.GroupIn();

  SetEpilogue(spec.epilogue);
  if (dequantized) {
    epilogue_.dequantizes = true;
    epilogue_.output_signed = dequantized->is_signed;
    epilogue_.output_scale = dequantized->scale;
    epilogue_.output_zero_point = dequantized->zero_point;
  }
  Int8Weights weights;
  std::vector<int32_t> bias;  // of the kernels but the plain one
  ImageHeader header;
  if (image.empty()) {
    Require(static_cast<int64_t>(spec.weights.size()) == g.out_channels * g.K(), "the node has ",
            spec.weights.size(), " weights, expected ", g.out_channels * g.K());
    weights = ToInt8(spec);
    has_w_zero_ = std::any_of(weights.zero.begin(), weights.zero.end(), [](int32_t z) { return z != 0; });
    bias = FoldedBias(spec, weights);
    sum_form_ = SumFormOf(spec.epilogue, weights, bias);
    header.has_w_zero = has_w_zero_ ? 1 : 0;
    header.sum_form = static_cast<uint32_t>(sum_form_);
  } else {
    header = ReadHeader(image);
    weights.zero.resize(static_cast<size_t>(g.out_channels));
    bias.resize(spec.bias.size());
    has_w_zero_ = header.has_w_zero != 0;
    sum_form_ = static_cast<SumForm>(header.sum_form);
  }
  rises_ = !has_w_zero_ && !dequantized && Rises(spec.epilogue);

  ConstantBuilder builder(image);
  builder.Add(sizeof header, [&](uint8_t* to) { std::memcpy(to, &header, sizeof header); });
  AddWeights(weights, builder);
  AddEpilogue(spec, weights, bias, builder);
  const std::span<const uint8_t> bytes = builder.Bytes();
  DeviceGuard guard(device.ordinal);
  memory_.Upload(bytes.data(), bytes.size());
  ResolveEpilogue();
}

std::vector<uint8_t> PackedConv::Bytes() const {
  DeviceGuard guard(device_.ordinal);
  return memory_.Download();
}

GemmProblem PackedConv::Problem(const ConvShape& shape) const {
  GemmProblem problem{shape.OutPixels(), geometry_.GroupOut(), geometry_.Taps() * channels_, geometry_.group};
  problem.tiled = tiled_ && std::max(shape.in_h, shape.in_w) < 8192 &&
                  shape.batch * shape.in_h * shape.in_w * geometry_.group * channels_ <= kMaxBytes;
  problem.vector16 = vector16_;
  // The tables by channel hold for any kernel, x_sums for the tile kernels alone.
  const bool requantizes = epilogue_.kind == static_cast<int>(EpilogueKind::kRequantize) &&
                           epilogue_.quantized_output && !epilogue_.dequantizes && !has_w_zero_ &&
                           divides_fast_;
  problem.requantizes = requantizes && (depthwise_ || geometry_.GroupOut() % 16 == 0);
  problem.residual = epilogue_.has_residual;
  const ConvGeometry& g = geometry_;
  problem.boxes = problem.tiled && boxes_;
  problem.streams = problem.boxes && problem.requantizes && g.Taps() == 1 && !IsPadded(g);
  SetHalo(shape, problem);
  problem.depthwise = depthwise_ && !has_w_zero_;
  problem.vector = problem.tiled && vector16_ && !repacks_ && !has_w_zero_ && g.group == 1 && g.Taps() == 1 &&
                   !IsPadded(g) && shape.in_h == shape.out_h && shape.in_w == shape.out_w &&
                   problem.m <= kMaxVectorRows;
  // Its places within one image are 31-bit numbers.
  problem.image = image_ && !has_w_zero_ && shape.in_h <= kMaxBytes && shape.in_w <= kMaxBytes &&
                  shape.in_h * shape.in_w <= kMaxBytes / kMaxImageChannels;
  if (problem.image) {
    problem.image_weight_bytes = PatchOffset();
    problem.image_patch_bytes = PatchBytes();
  }
  return problem;
}

// Rows in shared memory begin at multiples of 128 bytes. A window that leaves a row on the right ends in the
// padding on the left of the next one.
void PackedConv::SetHalo(const ConvShape& s, GemmProblem& problem) const {
  const ConvGeometry& g = geometry_;
  const int64_t slab = channels_ % 128 == 0 ? 128 : 64, step = 128 / slab;
  if (!problem.tiled || !problem.requantizes || g.group != 1 || repacks_ || channels_ % 64 != 0 ||
      g.Taps() == 1 || g.stride_h != 1 || g.stride_w != 1 || s.OutPixels() * s.in_h * s.in_w == 0) {
    return;
  }
  const int64_t reach_h = (g.kernel_h - 1) * g.dilation_h, reach_w = (g.kernel_w - 1) * g.dilation_w;
  const int64_t pitch =
      RoundUp(std::max({s.in_w + g.pad_left, s.out_w + reach_w - g.pad_left, s.out_w}), step);
  const int64_t places = s.batch * HaloImageRows(s) * pitch;
  if (pitch > 256 || places > kMaxBytes - 4096 || (IsPadded(g) && TileZero() != 0)) return;
  problem.halo.tiles = (places + 63) / 64;
  problem.halo.pitch = static_cast<int>(pitch);
  problem.halo.reach = static_cast<int>(reach_h * pitch + reach_w);
  problem.halo.slab = static_cast<int>(slab);
  problem.halo.channels = static_cast<int>(channels_);
}

int64_t PackedConv::HaloImageRows(const ConvShape& s) const {
  const ConvGeometry& g = geometry_;
  return std::max({s.in_h + g.pad_top, s.out_h + (g.kernel_h - 1) * g.dilation_h - g.pad_top, s.out_h});
}

HaloParams PackedConv::Halo(const ConvShape& s, const ConvConfig& config) const {
  const GemmProblem problem = Problem(s);
  HaloParams h;
  h.pitch = problem.halo.pitch;
  h.image_rows = static_cast<int>(HaloImageRows(s));
  h.images = static_cast<int>(s.batch);
  h.reach = problem.halo.reach;
  h.slab = problem.halo.slab;
  h.slabs = problem.halo.channels / problem.halo.slab;
  h.tiles = static_cast<int>(problem.halo.tiles);
  h.patch_rows = HaloRows(problem, config);
  h.plane_bytes = HaloPlaneBytes(problem, config);
  const bool windows = config.algorithm == Algorithm::kWindows;
  if (!windows) {
    const int blocks = PersistentBlocks(problem, config, device_);
    h.block_tiles = h.tiles / blocks;
    h.longer_blocks = h.tiles % blocks;
  }
  const int taps = static_cast<int>(geometry_.Taps());
  h.steps = taps * h.slabs;
  for (int tap = 0; tap < taps; ++tap) {
    const int64_t place = tap / geometry_.kernel_w * geometry_.dilation_h * h.pitch +
                          tap % geometry_.kernel_w * geometry_.dilation_w;
    for (int slab = 0; slab < h.slabs; ++slab) {
      h.step[windows ? slab * taps + tap : tap * h.slabs + slab] =
          static_cast<int>(place * h.slab + slab * h.plane_bytes) / 16;
    }
  }
  h.by_pitch = MakeDivisor(h.pitch);
  h.by_rows = MakeDivisor(h.image_rows);
  return h;
}

ConvParams PackedConv::Params(const ConvShape& s, const ConvConfig& config, bool may_be_floats) const {
  const ConvGeometry& g = geometry_;
  const bool plain = config.algorithm == Algorithm::kPlain;
  const auto narrow = [](int64_t v) { return static_cast<int>(v); };
  ConvParams p;
  p.epilogue = epilogue_;
  p.m = narrow(s.OutPixels());
  p.n = narrow(g.GroupOut());
  p.groups = narrow(g.group);
  p.in_h = narrow(s.in_h);
  p.in_w = narrow(s.in_w);
  p.out_h = narrow(s.out_h);
  p.out_w = narrow(s.out_w);
  p.stride_h = narrow(g.stride_h);
  p.stride_w = narrow(g.stride_w);
  p.pad_top = narrow(g.pad_top);
  p.pad_left = narrow(g.pad_left);
  p.kernel_h = narrow(g.kernel_h);
  p.kernel_w = narrow(g.kernel_w);
  p.dilation_h = narrow(g.dilation_h);
  p.dilation_w = narrow(g.dilation_w);
  p.transposed = g.transposed;
  p.weights = memory_.At(weights_at_);
  p.weights_in_tiles = tiled_;
  p.k_tiles = narrow(k_tiles_);
  p.n_padded = narrow(n_padded_);
  if (plain) {
    p.epilogue.bias = reinterpret_cast<const int32_t*>(memory_.At(plain_bias_at_));
    p.channels = narrow(g.GroupIn());
    p.pixel_bytes = narrow(g.in_channels);
    p.x_mul = Bipolar() ? 2 : 1;
    p.x_zero = Bipolar() ? 1 : x_zero_;
    return p;
  }
  if (config.algorithm == Algorithm::kImage || config.algorithm == Algorithm::kDepthwise) {
    p.weights = memory_.At(few_at_);
  }
  if (config.algorithm == Algorithm::kImage) p.n_padded = narrow(RoundUp(g.out_channels, kImageColumns));
  p.channels = narrow(channels_);
  p.pixel_bytes = narrow(channels_ * g.group);
  p.k = narrow(g.Taps() * channels_);
  p.n_tiles = narrow((g.GroupOut() + config.tile_n - 1) / std::max(1, config.tile_n));
  p.splits = config.splits;
  while ((1 << p.split_shift) < p.splits) ++p.split_shift;  // a power of 2
  p.stages = config.stages;
  p.multicast = config.multicast;
  const GemmProblem problem = Problem(s);
  p.in_registers = problem.requantizes && config.splits == 1;
  p.requantizes_fours = problem.requantizes;
  if (may_be_floats && p.in_registers && sum_form_ != SumForm::kInteger &&
      EndsInFragments(config.algorithm)) {
    p.epilogue.sums = sum_form_;
    p.epilogue.bias = reinterpret_cast<const int32_t*>(memory_.At(at_.float_bias));
    if (sum_form_ == SumForm::kFloatFromZero)
      p.epilogue.start = reinterpret_cast<const float*>(memory_.At(at_.start));
  }
  p.dequantizes_fours = epilogue_.kind == static_cast<int>(EpilogueKind::kFloat) && !has_w_zero_ &&
                        !epilogue_.has_residual && epilogue_.tail_count == 0 && geometry_.GroupOut() % 4 == 0;
  p.shared_bytes = std::max(SharedBytes(problem, config), config.apart ? ApartBytes(device_) : 0);
  // Unsplit sums may overwrite the tiles.
  p.exchange_offset = config.splits > 1 ? TileBytes(config) : 0;
  const bool on_tiles = config.algorithm == Algorithm::kMma || config.algorithm == Algorithm::kWgmma;
  p.staging_offset = on_tiles && problem.residual ? TileBytes(config) : 0;
  if (config.algorithm == Algorithm::kResident) {
    p.staging_offset = p.k_tiles * (config.tile_n + config.stages * config.tile_m) * kTileK;
    p.persistent_blocks = PersistentBlocks(problem, config, device_);
  }
  if (config.algorithm == Algorithm::kTeam) {
    const int tiles = narrow((s.OutPixels() + 63) / 64);
    p.persistent_blocks = PersistentBlocks(problem, config, device_);
    p.block_tiles = tiles * p.n_tiles / p.persistent_blocks;
    p.longer_blocks = tiles * p.n_tiles % p.persistent_blocks;
    p.weight_columns = TeamColumns(problem, config);
    p.by_column = MakeDivisor(std::max(1, tiles));
    p.staging_offset = SharedBytes(problem, config) - 1024 - config.stages * 64 * config.tile_n;
  }
  p.flat = g.Taps() == 1 && g.stride_h == 1 && g.stride_w == 1 && !IsPadded(g);
  if (config.algorithm == Algorithm::kHalo) {
    p.staging_offset = SharedBytes(problem, config) - 1024 - config.tile_m * (config.tile_n + 16);
    p.persistent_blocks = PersistentBlocks(problem, config, device_);
  }
  if (config.algorithm == Algorithm::kWindows) {  // codes or sums lie behind weights and pixels
    p.staging_offset = p.exchange_offset = config.stages * config.tile_n * kTileK +
                                           WindowSlabs(problem, config) * HaloPlaneBytes(problem, config);
  }
  p.by_image = MakeDivisor(std::max<int64_t>(1, s.out_h * s.out_w));
  p.by_row = MakeDivisor(std::max<int64_t>(1, s.out_w));
  // Depthwise: runs of 16 channels.
  p.by_channels = MakeDivisor(config.algorithm == Algorithm::kDepthwise ? g.group / 16 : channels_);
  p.by_kernel_w = MakeDivisor(g.kernel_w);
  p.by_fours = MakeDivisor((std::max<int64_t>(1, s.out_w) + 3) / 4);
  // Taps that are never inside may overflow; their offsets are never used.
  p.tap_step = static_cast<int>(g.dilation_w * p.pixel_bytes - channels_);
  p.tap_row_step = static_cast<int>((g.dilation_h * s.in_w - g.kernel_w * g.dilation_w) * p.pixel_bytes);
  p.tap_row_position = static_cast<int>(g.dilation_h * 65536 - g.kernel_w * g.dilation_w);
  p.fill = static_cast<uint32_t>(TileZero() & 255) * 0x01010101u;
  p.last_position = (p.in_h - 1) * 65536 + p.in_w - 1;
  p.all_inside = g.pad_top == 0 && g.pad_left == 0 &&
                 (s.out_h - 1) * g.stride_h + (g.kernel_h - 1) * g.dilation_h < s.in_h &&
                 (s.out_w - 1) * g.stride_w + (g.kernel_w - 1) * g.dilation_w < s.in_w;
  return p;
}

int PackedConv::PatchOffset() const {
  return static_cast<int>(geometry_.kernel_h * std::min(RoundUp(geometry_.out_channels, 32), kImageColumns) *
                          32);
}

// A block's 8 x 16 outputs; a row of taps counts as kMaxImageTaps.
int PackedConv::PatchBytes() const {
  const ConvGeometry& g = geometry_;
  return static_cast<int>((7 * g.stride_h + g.kernel_h) * (15 * g.stride_w + kMaxImageTaps) * 4);
}

ImageParams PackedConv::Image(const ConvShape& s) const {
  const ConvGeometry& g = geometry_;
  ImageParams image;
  image.in_channels = static_cast<int>(g.in_channels);
  image.tiles_x = static_cast<int>((s.out_w + 15) / 16);
  image.tiles_y = static_cast<int>((s.out_h + 7) / 8);
  image.patch_rows = static_cast<int>(7 * g.stride_h + g.kernel_h);
  image.patch_columns = static_cast<int>(15 * g.stride_w + kMaxImageTaps);
  image.by_columns = MakeDivisor(image.patch_columns);
  image.tiles = static_cast<int>(s.batch) * image.tiles_x * image.tiles_y;
  image.patch_offset = PatchOffset();
  image.shift = static_cast<int>((4 - g.pad_left % 4) % 4);
  image.units_x = (image.shift + image.patch_columns + 3) / 4;
  image.by_units = MakeDivisor(image.units_x);
  image.by_tiles_x = MakeDivisor(std::max(1, image.tiles_x));
  image.by_tiles_y = MakeDivisor(std::max(1, image.tiles_y));
  return image;
}

void PackedConv::AddWeights(const Int8Weights& weights, ConstantBuilder& builder) {
  const ConvGeometry& g = geometry_;
  if (tiled_) {
    weights_at_ = builder.Add((g.group * k_tiles_ * n_padded_ + kWeightSlackRows) * kTileK,
                              [&](uint8_t* to) { PackTiles(g, weights, channels_, n_padded_, to); });
  } else {
    weights_at_ = builder.Add(g.out_channels * g.Taps() * channels_,
                              [&](uint8_t* to) { PackRows(g, weights, channels_, to); });
  }
  if (image_) {
    few_at_ = builder.Add(g.kernel_h * RoundUp(g.out_channels, kImageColumns) * 32,
                          [&](uint8_t* to) { PackImage(g, weights, to); });
  }
  if (cells_) {
    cells_at_ =
        builder.Add(RoundUp(g.out_channels, kCellTileN) / kCellTileN * g.in_channels * kCellChannelBytes,
                    [&](uint8_t* to) { PackCells(g, weights, to); });
  }
  if (depthwise_) {
    few_at_ = builder.Add(g.kernel_h * RoundUp(g.kernel_w, 4) * g.out_channels,
                          [&](uint8_t* to) { PackDepthwise(g, weights, to); });
  }
}

std::vector<int32_t> PackedConv::FoldedBias(const ConvSpec& spec, const Int8Weights& weights) const {
  std::vector<int32_t> bias(spec.bias);
  if (!tiled_ && !image_ && !depthwise_) return bias;
  for (size_t c = 0; c < bias.size(); ++c) {
    // Modulo 2^32, as every sum of the kernels.
    bias[c] = static_cast<int32_t>(static_cast<uint32_t>(bias[c]) -
                                   static_cast<uint32_t>(TileZero()) * static_cast<uint32_t>(weights.sum[c]));
  }
  return bias;
}

// Let f be the float whose bits are those of 2^23 (1.5 * 2^23) plus a sum. As long as the sum stays in
// 0 .. 2^23 (-2^22 .. 2^22) f is 2^23 (1.5 * 2^23) plus the sum. f rises with the sum everywhere as long as
// its bits are those of a positive normal number, hence beyond it is enough that codes are clipped there: at
// 2^23 (2^22) by the upper bound, times multipliers that are large enough; below 0 (-2^22) by the lower one.
SumForm PackedConv::SumFormOf(const Epilogue& e, const Int8Weights& weights,
                              const std::vector<int32_t>& bias) const {
  const bool adds = e.has_residual;
  const bool fits =
      adds ? !e.residual_signed && e.y_lo == 0 &&
                 (epilogue_.addition == Addition::kOnLine || epilogue_.addition == Addition::kBothFromLowest)
           : epilogue_.rounding == Rounding::kUnsignedBytes && e.lo == 0;
  // Kernels have no instances for floats of inputs with signs (WithFinish): these networks' codes have signs,
  // too, and do not fit either.
  if (XSigned() || Bipolar() || !tiled_ || has_w_zero_ || e.kind != EpilogueKind::kRequantize ||
      !e.quantized_output || epilogue_.dequantizes || !fits || !HasNormalMultipliers(e)) {
    return SumForm::kInteger;
  }
  constexpr int64_t kMost = int64_t{1} << 29;  // either float is further from what is no normal number
  constexpr double kClipped = 512;             // codes lie nearer to each other
  const double exact = adds ? 0x1p22 : 0x1p23;
  constexpr int64_t kHighest = 255;  // of a byte; the lowest is 0
  for (size_t c = 0; c < bias.size(); ++c) {
    const int64_t above = weights.above[c], below = weights.sum[c] - above;
    const int64_t least = bias[c] + kHighest * below, most = bias[c] + kHighest * above;
    if (least < -kMost || most > kMost) return SumForm::kInteger;
    const auto size = static_cast<double>(adds ? std::max(-least, most) : most);
    if (size >= exact && exact * static_cast<double>(e.multiplier[c]) < kClipped) return SumForm::kInteger;
  }
  return adds ? SumForm::kFloat : SumForm::kFloatFromZero;
}

void PackedConv::AddEpilogue(const ConvSpec& spec, const Int8Weights& weights,
                             const std::vector<int32_t>& bias, ConstantBuilder& builder) {
  const Epilogue& e = spec.epilogue;
  Require(e.tail.size() <= kMaxTailSteps, "the tail has ", e.tail.size(), " steps, expected at most ",
          kMaxTailSteps);
  // Thresholds have none; kernels read it all the same.
  std::vector<float> scale = e.kind == EpilogueKind::kRequantize ? e.multiplier : e.acc_scale;
  scale.resize(static_cast<size_t>(geometry_.out_channels));
  plain_bias_at_ = builder.Add(spec.bias);
  std::vector<int32_t> float_bias;
  std::vector<float> start;
  if (sum_form_ != SumForm::kInteger) {
    float_bias = bias;
    for (int32_t& b : float_bias) b += sum_form_ == SumForm::kFloat ? 0x4B400000 : 0x4B000000;
  }
  if (sum_form_ == SumForm::kFloatFromZero) {
    for (const float s : scale) start.push_back(-0x1p23f * s);
  }
  at_ = {builder.Add(bias),
         builder.Add(scale),
         builder.Add(float_bias),
         builder.Add(start),
         has_w_zero_ ? builder.Add(weights.zero) : ConstantBuilder::kAbsent,
         builder.Add(e.thresholds),
         builder.Add(e.base),
         builder.Add(e.dir),
         builder.Add(e.tail_bias),
         builder.Add(e.tail_scale),
         builder.Add(e.tail_shift)};
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
  divides_fast_ = !e.has_residual || DividesFast(e);
  p.y_inverse = 1.0f / e.y_scale;
  const auto units = [](double codes) { return static_cast<float>(codes / 256); };  // exact
  p.unit_zero = static_cast<float>(e.hi - 256 - e.zero_point);
  p.unit_offset = units(-12582912.0 - static_cast<double>(p.unit_zero));
  p.unit_lo = units(e.lo - (e.hi - 256));
  p.code_unit_offset = units(0x1p23 + (e.lo < 0 ? 128 : 0) + e.hi - 256);
  p.residual_offset = 0x1p23f + static_cast<float>((e.residual_signed ? 128 : 0) + e.residual_zero_point);
  if (e.kind == EpilogueKind::kRequantize) p.rounding = RoundingOf(e);
  p.byte_offset = static_cast<float>(e.zero_point - e.lo) - 12582912.0f;
  if (e.has_residual && divides_fast_) {
    p.residual_start = -0x1p23f * e.residual_scale;
    if (const auto line = FitSum(e)) {
      p.addition = Addition::kOnLine;
      p.unit_gain = 256 * line->inner_gain;
      p.residual_gain = line->residual_gain;
      p.sum_offset = line->offset;
      static_assert(SumLine::kResidual == 0x1p15f);
      p.residual_bits = 0x47000000u + static_cast<uint32_t>(line->low);
    } else if (const auto inverse = InvertScale(e)) {
      p.addition = p.residual_offset == 0x1p23f ? Addition::kBothFromLowest : Addition::kFromLowest;
      p.y_inverse_rest = inverse->rest;
    }
  }
  p.y_lo = e.y_lo;
  p.y_hi = e.y_hi;
}

void PackedConv::ResolveEpilogue() {
  const auto ints = [&](size_t at) {
    return at == ConstantBuilder::kAbsent ? nullptr : reinterpret_cast<const int32_t*>(memory_.At(at));
  };
  const auto floats = [&](size_t at) {
    return at == ConstantBuilder::kAbsent ? nullptr : reinterpret_cast<const float*>(memory_.At(at));
  };
  epilogue_.bias = ints(at_.bias);
  epilogue_.scale = floats(at_.scale);
  epilogue_.w_zero = ints(at_.w_zero);
  epilogue_.thresholds = ints(at_.thresholds);
  epilogue_.base = ints(at_.base);
  epilogue_.dir = ints(at_.dir);
  epilogue_.tail_bias = floats(at_.tail_bias);
  epilogue_.tail_scale = floats(at_.tail_scale);
  epilogue_.tail_shift = floats(at_.tail_shift);
}

}  // namespace lowbit::cuda
