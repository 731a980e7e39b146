#include "kernels/cuda/conv/image.h"

#include <algorithm>
#include <cstring>

#include "kernels/cuda/conv/conv_row.h"
#include "kernels/cuda/conv/packed_conv.h"
#include "kernels/cuda/conv/weight_rows.h"

namespace lowbit::cuda {
namespace {

constexpr int64_t kImageColumns = 64;  // along n: whole blocks of the widest kernel

bool Applies(const ConvGeometry& g, const OperandType& x, const WeightBits&, const Device&) {
  return FitsImage(g, x);
}

int64_t WeightBytes(const ConvGeometry& g, const WeightBits&) {
  return g.kernel_h * RoundUp(g.out_channels, kImageColumns) * 32;
}

// Where a block's patch begins in shared memory.
int PatchOffset(const ConvGeometry& g) {
  return static_cast<int>(g.kernel_h * std::min(RoundUp(g.out_channels, 32), kImageColumns) * 32);
}

// A block's 8 x 16 outputs; a row of taps counts as kMaxImageTaps.
int PatchBytes(const ConvGeometry& g) {
  return static_cast<int>((7 * g.stride_h + g.kernel_h) * (15 * g.stride_w + kMaxImageTaps) * 4);
}

// [kernel_h][channels in eights][lane][8]: lane 4 r + t has row r of the eight (InterleavedRow), the four
// channels of tap t and of tap 4 + t.
void PackImage(const ConvGeometry& g, const Int8Weights& w, const WeightBits&, uint8_t* out) {
  const int64_t eights = RoundUp(g.out_channels, kImageColumns) / 8;
  for (int64_t c = 0; c < g.out_channels; ++c) {
    const int64_t row = InterleavedRow(static_cast<int>(c));
    for (int64_t tap = 0; tap < g.Taps(); ++tap) {
      const int64_t ky = tap / g.kernel_w, kx = tap % g.kernel_w, lane = row % 8 * 4 + kx % 4;
      std::memcpy(out + ((ky * eights + row / 8) * 32 + lane) * 8 + kx / 4 * 4,
                  w.values.data() + (c * g.Taps() + tap) * g.in_channels, static_cast<size_t>(g.in_channels));
    }
  }
}

// Its places within one image are 31-bit numbers.
std::string Refuse(const ConvProblem& problem, const Device&) {
  const ConvShape& s = problem.shape;
  if (!FitsImage(problem.geometry, problem.x))
    return "more than 4 input channels, or taps that are far apart";
  if (problem.has_places) return "codes that other tensors get, too";
  if (problem.zero == ConvProblem::kNoCode) return "padding that no code stands for";
  const bool is_small =
      s.in_h <= kMaxBytes && s.in_w <= kMaxBytes && s.in_h * s.in_w <= kMaxBytes / kMaxImageChannels;
  return is_small ? "" : "an image of more bytes than 31 bits count";
}

int SharedBytesOf(const ConvProblem& problem, const ConvConfig& config) {
  const bool in_registers = problem.requantizes && !problem.has_w_zero;
  const int finish = config.tile_m * (in_registers ? config.tile_n + 16 : config.tile_n * 4);
  return PatchOffset(problem.geometry) + std::max(PatchBytes(problem.geometry), finish);
}

void AddCandidates(const ConvProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  const ConvConfig config{&kImageRow, 128, problem.n <= 32 ? 32 : 64};
  if (SharedBytesOf(problem, config) <= device.shared_bytes &&
      CeilDiv(problem.n, config.tile_n) <= kMaxColumns)
    out.push_back(config);
}

// It is taken wherever it applies.
double Microseconds(const ConvProblem&, const ConvConfig&, const Device&) { return 0; }

ConvLauncher Launcher(const ConvProblem& problem, const ConvConfig& config, const Device&) {
  return LauncherOf(ImageParamsOf(problem, config), config, LaunchImage);
}

}  // namespace

bool FitsImage(const ConvGeometry& g, const OperandType& x) {
  return !g.transposed && g.group == 1 && g.in_channels >= 1 && g.in_channels <= kMaxImageChannels &&
         g.kernel_w <= kMaxImageTaps && g.kernel_h <= 16 && g.dilation_h == 1 && g.dilation_w == 1 &&
         g.stride_h <= 4 && g.stride_w <= 4 && g.pad_top < 4096 && g.pad_left < 4096 &&
         x.encoding != Encoding::kBipolar;
}

ImageParams ImageParamsOf(const ConvProblem& problem, const ConvConfig& config) {
  const ConvGeometry& g = problem.geometry;
  const ConvShape& s = problem.shape;
  ImageParams image = {TilesOf(problem, config), SumsOf(problem, config), WindowsOf(problem)};
  image.n_padded = static_cast<int>(RoundUp(g.out_channels, kImageColumns));
  image.kernel_h = static_cast<int>(g.kernel_h);
  image.kernel_w = static_cast<int>(g.kernel_w);
  image.fill = problem.Fill();
  image.in_channels = static_cast<int>(g.in_channels);
  image.tiles_x = static_cast<int>((s.out_w + 15) / 16);
  image.tiles_y = static_cast<int>((s.out_h + 7) / 8);
  image.patch_rows = static_cast<int>(7 * g.stride_h + g.kernel_h);
  image.patch_columns = static_cast<int>(15 * g.stride_w + kMaxImageTaps);
  image.by_columns = MakeDivisor(image.patch_columns);
  image.tiles = static_cast<int>(s.batch) * image.tiles_x * image.tiles_y;
  image.patch_offset = PatchOffset(g);
  image.shift = static_cast<int>((4 - g.pad_left % 4) % 4);
  image.units_x = (image.shift + image.patch_columns + 3) / 4;
  image.by_units = MakeDivisor(image.units_x);
  image.by_tiles_x = MakeDivisor(std::max(1, image.tiles_x));
  image.by_tiles_y = MakeDivisor(std::max(1, image.tiles_y));
  return image;
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

const WeightLayout kImageWeights = {Applies, WeightBytes, PackImage};

const ConvRow kImageRow = {
    {"image", "sm_75", "a network's first layer, up to 4 channels: a patch of the image in shared memory"},
    {.refuse = Refuse,
     .add_candidates = AddCandidates,
     .shared_bytes = SharedBytesOf,
     .microseconds = Microseconds,
     .launcher = Launcher,
     .weights = &kImageWeights,
     .traits = {.reads_elements = true}}};

}  // namespace lowbit::cuda
