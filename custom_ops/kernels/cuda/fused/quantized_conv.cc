#include "kernels/cuda/fused/quantized_conv.h"

#include <algorithm>
#include <utility>

#include "core/status.h"
#include "kernels/cuda/conv/packed_conv.h"
#include "kernels/cuda/conv/plan.h"

namespace lowbit::cuda {

namespace {

// The image kernel's configurations, where it applies.
std::vector<ConvConfig> ConfigsOf(const PackedConv& conv, const ConvProblem& problem) {
  std::vector<ConvConfig> configs;
  if (kImageRow.refuse(problem, conv.On()).empty()) kImageRow.add_candidates(problem, conv.On(), configs);
  return configs;
}

}  // namespace

bool FitsPixels(const ConvSpec& spec) { return FitsImage(spec.geometry, spec.x); }

bool FitsPixels(const PackedConv& conv) { return !ConfigsOf(conv, conv.Problem({1, 64, 64, 1, 1})).empty(); }

std::shared_ptr<const ConvPlan> PlanPixels(std::shared_ptr<const PackedConv> conv, const ConvShape& shape,
                                           const PixelQuantizer& quantizer) {
  RequireSize(*conv, shape);
  const size_t channels = static_cast<size_t>(conv->Geometry().in_channels);
  Require(quantizer.scale.size() == channels && quantizer.zero_point.size() == channels, "the quantizer has ",
          quantizer.scale.size(), " channels, expected ", channels);
  const ConvProblem problem = conv->Problem(shape);
  const std::vector<ConvConfig> candidates = ConfigsOf(*conv, problem);
  Require(!candidates.empty(),
          "there is no kernel that quantizes the input of this convolution, an image of ", shape.in_h, " x ",
          shape.in_w);
  const ConvConfig& config = candidates.front();
  ImageParams image = ImageParamsOf(problem, config);
  std::copy(quantizer.zero_point.begin(), quantizer.zero_point.end(), image.zero_point);
  image.lo = quantizer.lo;
  image.hi = quantizer.hi;
  image.rounding = RoundingOf(quantizer);
  for (size_t i = 0; i < channels; ++i) image.codes_add += image.rounding.add[i] << (8 * i);
  image.source = quantizer.planes ? ImageSource::kPlanes : ImageSource::kPixels;
  return MakePlan(std::move(conv), shape, config, LauncherOf(image, config, LaunchImage));
}

}  // namespace lowbit::cuda
