#include "kernels/cuda/conv/conv_params.h"

#include <algorithm>

#include "kernels/cuda/conv/conv_row.h"

namespace lowbit::cuda {
namespace {

int Narrow(int64_t v) { return static_cast<int>(v); }

}  // namespace

WindowParams WindowsOf(const ConvProblem& problem) {
  const ConvGeometry& g = problem.geometry;
  const ConvShape& s = problem.shape;
  return {Narrow(s.in_h),     Narrow(s.in_w),     Narrow(s.out_h),   Narrow(s.out_w),
          Narrow(g.stride_h), Narrow(g.stride_w), Narrow(g.pad_top), Narrow(g.pad_left)};
}

TapParams TapsOf(const ConvProblem& problem) {
  const ConvGeometry& g = problem.geometry;
  return {Narrow(g.kernel_h), Narrow(g.kernel_w), Narrow(g.dilation_h), Narrow(g.dilation_w)};
}

PixelParams PixelsOf(const ConvProblem& problem) {
  const ConvGeometry& g = problem.geometry;
  const ConvShape& s = problem.shape;
  PixelParams p = {WindowsOf(problem)};
  p.flat = problem.IsFlat();
  p.pixel_bytes = Narrow(problem.channels * g.group);
  p.by_image = MakeDivisor(std::max<int64_t>(1, s.out_h * s.out_w));
  p.by_row = MakeDivisor(std::max<int64_t>(1, s.out_w));
  return p;
}

std::optional<BorderParams> BorderOf(const ConvGeometry& g) {
  constexpr int64_t kMostClasses = 81;  // those of windows of 5 x 5, padded by 2
  const auto counts = [](int64_t pad, int64_t kernel, int64_t dilation) {
    return std::min({kernel, CeilDiv(pad, dilation), kMostClasses}) + 1;
  };
  const int64_t top = counts(g.pad_top, g.kernel_h, g.dilation_h),
                bottom = counts(g.pad_bottom, g.kernel_h, g.dilation_h),
                left = counts(g.pad_left, g.kernel_w, g.dilation_w),
                right = counts(g.pad_right, g.kernel_w, g.dilation_w);
  if (top * bottom * left * right > kMostClasses) return std::nullopt;
  BorderParams p = {{Narrow(g.kernel_h), Narrow(g.kernel_w), Narrow(g.dilation_h), Narrow(g.dilation_w)}};
  p.step_w = {Narrow(right), 1};
  p.step_h = {Narrow(bottom * left * right), Narrow(left * right)};
  p.classes = Narrow(top * bottom * left * right);
  return p;
}

TileParams TilesOf(const ConvProblem& problem, const ConvConfig& config) {
  TileParams p;
  if (problem.borders) p.border = BorderOf(problem.geometry).value();
  p.n_padded = Narrow(PaddedColumns(problem.n));
  p.n_tiles = Narrow(CeilDiv(problem.n, config.tile_n));
  p.k_tiles = Narrow(problem.KTiles());
  p.stages = config.stages;
  return p;
}

SumsParams SumsOf(const ConvProblem& problem, const ConvConfig& config) {
  SumsParams p;
  p.in_registers = problem.requantizes && !problem.has_w_zero && config.splits == 1;
  p.requantizes_fours = problem.requantizes;
  p.splits = config.splits;
  while ((1 << p.split_shift) < p.splits) ++p.split_shift;  // a power of 2
  return p;
}

BoxParams BoxesOf(const ConvProblem& problem, const ConvConfig& config) {
  BoxParams p = {TilesOf(problem, config), PixelsOf(problem), {TapsOf(problem)}};
  p.channels = Narrow(problem.channels);
  p.by_channels = MakeDivisor(problem.channels);
  p.by_kernel_w = MakeDivisor(problem.geometry.kernel_w);
  return p;
}

}  // namespace lowbit::cuda
