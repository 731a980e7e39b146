// Plans and launches.
#include <algorithm>
#include <utility>

#include "core/status.h"
#include "kernels/cuda/conv/cuda_conv.h"
#include "kernels/cuda/conv/kernels.h"
#include "kernels/cuda/conv/packed_conv.h"

namespace lowbit::cuda {

class ConvPlan {
 public:
  ConvPlan(std::shared_ptr<const PackedConv> conv, const ConvShape& shape, const ConvConfig& config)
      : conv_(std::move(conv)), shape_(shape), config_(config), params_(conv_->Params(shape, config)) {
    if (config.algorithm == Algorithm::kHalo || config.algorithm == Algorithm::kWindows)
      halo_ = conv_->Halo(shape, config);
    if (config.algorithm == Algorithm::kImage) image_ = conv_->Image(shape);
    if (!OnTiles()) return;
    const auto reserve = [&](int64_t bytes) {
      const size_t at = workspace_;
      workspace_ += static_cast<size_t>(RoundUp(bytes, 256));
      return at;
    };
    if (conv_->Repacks()) x_at_ = reserve(InPixels() * params_.pixel_bytes);
    if (conv_->NeedsPixelSums()) sums_at_ = reserve(int64_t{params_.groups} * params_.m * 4);
    if (config.splits > 1 && config.split == Split::kWorkspace) {
      partial_at_ = reserve(int64_t{config.splits} * params_.groups * params_.m * params_.n * 4);
    }
  }

  // Floats are fed in place of codes.
  void Quantize(const PixelQuantizer& quantizer) {
    source_ = quantizer.planes ? ImageSource::kPlanes : ImageSource::kPixels;
    std::copy(quantizer.zero_point.begin(), quantizer.zero_point.end(), image_.zero_point);
    image_.lo = quantizer.lo;
    image_.hi = quantizer.hi;
    image_.rounding = RoundingOf(quantizer);
    for (size_t c = 0; c < quantizer.scale.size(); ++c) image_.codes_add += image_.rounding.add[c] << (8 * c);
  }

  const ConvConfig& Config() const { return config_; }
  size_t WorkspaceBytes() const { return workspace_; }

  void Launch(const void* x, const void* residual, void* y, void* workspace, Queue& queue) const {
    if (params_.m == 0 || params_.n == 0) return;
    DeviceGuard guard(conv_->On().ordinal);
    LaunchOptions options{queue, conv_->On()};
    options.x_signed = conv_->XSigned();
    RequireAligned({config_.algorithm == Algorithm::kImage ? nullptr : x, residual, y});
    ConvParams p = params_;
    p.x = static_cast<const uint8_t*>(x);
    p.residual = residual;
    p.y = y;
    if (!OnTiles()) {
      Check(LaunchFew(p, options), "launching a convolution");
      return;
    }
    uint8_t* const scratch = static_cast<uint8_t*>(workspace);
    if (conv_->Repacks()) {
      RepackParams repack;
      repack.x = p.x;
      repack.y = scratch + x_at_;
      repack.pixels = InPixels();
      repack.groups = p.groups;
      repack.group_in = static_cast<int>(conv_->Geometry().GroupIn());
      repack.channels = p.channels;
      repack.mul = conv_->Bipolar() ? 2 : 1;
      repack.sub = conv_->Bipolar() ? 1 : 0;
      Check(LaunchRepack(repack, options), "launching a repacking");
      p.x = repack.y;
    }
    options.x_signed = conv_->XSigned() || conv_->Bipolar();
    options.vector16 = conv_->Problem(shape_).vector16;
    if (conv_->NeedsPixelSums()) {
      int32_t* const sums = reinterpret_cast<int32_t*>(scratch + sums_at_);
      Check(
          LaunchPixelSums(p, static_cast<int>(conv_->Geometry().GroupIn()), conv_->TileZero(), sums, options),
          "launching pixel sums");
      p.x_sums = sums;
    }
    if (config_.splits > 1 && config_.split == Split::kWorkspace) {
      p.partial = reinterpret_cast<int32_t*>(scratch + partial_at_);
    }
    Check(LaunchTiles(p, options), "launching a convolution");
    if (p.partial != nullptr) Check(LaunchReduce(p, options), "launching a reduction");
  }

 private:
  bool OnTiles() const {
    return config_.algorithm == Algorithm::kMma || config_.algorithm == Algorithm::kWgmma;
  }
  cudaError_t LaunchFew(const ConvParams& p, const LaunchOptions& options) const {
    switch (config_.algorithm) {
      case Algorithm::kImage:
        return LaunchImage(p, image_, source_, config_, options);
      case Algorithm::kDepthwise:
        return LaunchDepthwise(p, options);
      case Algorithm::kVector:
        return LaunchVector(p, options);
      case Algorithm::kResident:
        return LaunchResident(p, config_, options);
      case Algorithm::kTeam:
        return LaunchTeam(p, config_, options);
      case Algorithm::kHalo:
        return LaunchHalo(p, halo_, config_, options);
      case Algorithm::kWindows:
        return LaunchWindows(p, halo_, config_, options);
      default:
        return LaunchPlain(p, options);
    }
  }
  cudaError_t LaunchTiles(const ConvParams& p, const LaunchOptions& options) const {
    return config_.algorithm == Algorithm::kWgmma ? LaunchWgmma(p, config_, options)
                                                  : LaunchMma(p, config_, options);
  }
  int64_t InPixels() const { return shape_.batch * shape_.in_h * shape_.in_w; }

  std::shared_ptr<const PackedConv> conv_;
  ConvShape shape_;
  ConvConfig config_;
  ConvParams params_;
  HaloParams halo_;
  ImageParams image_;
  ImageSource source_ = ImageSource::kCodes;
  size_t workspace_ = 0, x_at_ = 0, sums_at_ = 0, partial_at_ = 0;
};

std::shared_ptr<const PackedConv> PackConv(const ConvSpec& spec, const Device& device,
                                           std::span<const uint8_t> packed,
                                           const std::optional<CodeGrid>& dequantized) {
  return std::make_shared<const PackedConv>(spec, device, packed, dequantized);
}

std::vector<uint8_t> SavePacked(const PackedConv& conv) { return conv.Bytes(); }

std::vector<ConvConfig> CandidateConfigs(const PackedConv& conv, const ConvShape& shape) {
  return RankConfigs(conv.Problem(shape), conv.On());
}

namespace {

void CheckSize(const ConvGeometry& geometry, const ConvShape& shape) {
  Require(shape.OutPixels() <= kMaxBytes && shape.OutPixels() * geometry.out_channels <= kMaxBytes,
          "the output of ", shape.OutPixels(), " pixels and ", geometry.out_channels,
          " channels is too large for the GPU kernels");
}

}  // namespace

bool FitsPixels(const ConvSpec& spec) { return PackedConv::FitsImage(spec.geometry, spec.x); }

std::shared_ptr<const ConvPlan> PlanPixels(std::shared_ptr<const PackedConv> conv, const ConvShape& shape,
                                           const PixelQuantizer& quantizer) {
  CheckSize(conv->Geometry(), shape);
  const size_t channels = static_cast<size_t>(conv->Geometry().in_channels);
  Require(quantizer.scale.size() == channels && quantizer.zero_point.size() == channels, "the quantizer has ",
          quantizer.scale.size(), " channels, expected ", channels);
  const std::vector<ConvConfig> candidates = CandidateConfigs(*conv, shape);
  const auto found = std::find_if(candidates.begin(), candidates.end(),
                                  [](const ConvConfig& c) { return c.algorithm == Algorithm::kImage; });
  Require(found != candidates.end(),
          "there is no kernel that quantizes the input of this convolution, an image of ", shape.in_h, " x ",
          shape.in_w);
  auto plan = std::make_shared<ConvPlan>(std::move(conv), shape, *found);
  plan->Quantize(quantizer);
  return plan;
}

std::shared_ptr<const ConvPlan> PlanConv(std::shared_ptr<const PackedConv> conv, const ConvShape& shape,
                                         const std::optional<ConvConfig>& config) {
  CheckSize(conv->Geometry(), shape);
  const std::vector<ConvConfig> candidates = CandidateConfigs(*conv, shape);
  if (config.has_value()) {
    Require(std::find(candidates.begin(), candidates.end(), *config) != candidates.end(), "configuration ",
            config->Text(), " does not apply to this node, for example ", candidates.front().Text(), " does");
  }
  return std::make_shared<const ConvPlan>(std::move(conv), shape, config.value_or(candidates.front()));
}

std::shared_ptr<const ConvPlan> PlanConv(const ConvSpec& spec, const ConvShape& shape, const Device& device) {
  return PlanConv(PackConv(spec, device), shape);
}

const ConvConfig& PlanConfig(const ConvPlan& plan) { return plan.Config(); }

size_t PlanWorkspaceBytes(const ConvPlan& plan) { return plan.WorkspaceBytes(); }

void LaunchConv(const ConvPlan& plan, const void* x, const void* residual, void* y, void* workspace,
                Queue& queue) {
  plan.Launch(x, residual, y, workspace, queue);
}

ConvConfig TuneConv(const std::shared_ptr<const PackedConv>& conv, const ConvShape& shape,
                    const std::function<double(const ConvPlan&)>& measure, size_t limit) {
  std::vector<ConvConfig> candidates = CandidateConfigs(*conv, shape);
  candidates.resize(std::min(candidates.size(), std::max<size_t>(limit, 1)));
  const ConvConfig* best = nullptr;
  double best_time = 0;
  for (const ConvConfig& candidate : candidates) {
    const double time = measure(*PlanConv(conv, shape, candidate));
    if (best == nullptr || time < best_time) {
      best = &candidate;
      best_time = time;
    }
  }
  return *best;
}

}  // namespace lowbit::cuda
