// Convolutions of up to four input channels, a network's first one, over a patch of the image in shared
// memory: mma.sync, or wgmma where float planes come in (sm_90a).
#pragma once

#include "kernels/cuda/conv/launch.h"
#include "kernels/cuda/conv/weight_layouts.h"

namespace lowbit::cuda {

struct ConvProblem;
struct ConvRow;

extern const ConvRow kImageRow;
extern const WeightLayout kImageWeights;

// Where the kernels read their pixels.
enum class ImageSource : int { kCodes, kPlanes, kPixels };  // NHWC codes, NCHW floats, NHWC floats
inline constexpr int kMaxImageTaps = 8;
inline constexpr int kMaxPlaneRows = 7;  // of taps, for LaunchPlanes

// Floats in place of codes: what quantizes them on the way into an image kernel.
struct PixelQuantizer {
  bool planes = true;  // NCHW; else NHWC
  std::vector<float> scale;
  std::vector<int32_t> zero_point;  // both by channel
  int32_t lo = 0, hi = 255;
};
PixelRounding RoundingOf(const PixelQuantizer& quantizer);

struct ImageParams : TileParams, SumsParams, WindowParams {
  ImageSource source = ImageSource::kCodes;
  int kernel_h = 1, kernel_w = 1;
  uint32_t fill = 0;  // four times the code that stands for real zero
  int in_channels = 0, tiles_x = 0, tiles_y = 0, tiles = 0;
  FastDivisor by_columns;
  int patch_rows = 0, patch_columns = 0;  // pixels that a block's outputs read
  int patch_offset = 0;                   // in shared memory, behind the weights
  // The quantizer of float pixels.
  PixelRounding rounding;
  int zero_point[kMaxImageChannels] = {};
  int lo = 0, hi = 0;
  // LaunchPlanes: patches in units of four pixels, whose first lies `shift` pixels left of the first tap's.
  int units_x = 0, shift = 0, patch_bytes = 0;
  FastDivisor by_units, by_tiles_x, by_tiles_y;
  uint32_t codes_add = 0;  // PixelRounding::add of all channels, each a byte further
};

// Whether some shape has the kernel.
bool FitsImage(const ConvGeometry& g, const OperandType& x);
// All but the quantizer.
ImageParams ImageParamsOf(const ConvProblem& problem, const ConvConfig& config);

cudaError_t LaunchImage(const ImageParams& params, const ConvConfig& config, const LaunchOptions& options);
// Float planes on sm_90a, where FitsPlanes says so.
bool FitsPlanes(const ImageParams& params, const Device& device);
cudaError_t LaunchPlanes(const ImageParams& params, const ConvConfig& config, const LaunchOptions& options);

}  // namespace lowbit::cuda
