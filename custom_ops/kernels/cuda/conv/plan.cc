// Plans and launches.
#include "kernels/cuda/conv/plan.h"

#include <algorithm>
#include <utility>

#include "core/bit_planes.h"
#include "core/elementwise.h"
#include "core/status.h"
#include "kernels/cuda/conv/bits.h"
#include "kernels/cuda/conv/cuda_conv.h"
#include "kernels/cuda/conv/packed_conv.h"
#include "kernels/cuda/conv/plain.h"
#include "kernels/cuda/conv/select.h"

namespace lowbit::cuda {

class ConvPlan {
 public:
  ConvPlan(std::shared_ptr<const PackedConv> conv, const ConvShape& shape, const ConvConfig& config,
           ConvLauncher launcher, const ConvPlaces& places, const TensorPlanes& planes)
      : conv_(std::move(conv)),
        shape_(shape),
        config_(config),
        places_(places),
        problem_(conv_->Problem(shape, !places.list.empty(), planes)),
        traits_(RowOf(config).traits),
        shared_bytes_(std::max(SharedBytes(problem_, config), config.apart ? ApartBytes(conv_->On()) : 0)),
        params_(conv_->Params(shape, config)),
        launcher_(std::move(launcher)) {
    params_.epilogue.plane_count = planes.y;
    params_.epilogue.makes_halves = places_.makes_halves;
    params_.epilogue.adds_halves = places_.adds_halves;
    for (const ConvPlace& place : places_.list) {
      PlaceParams& p = params_.epilogue.places[params_.epilogue.place_count++];
      p.pixel_bytes = static_cast<int>(place.channels);
      p.first = static_cast<int>(place.first);
      p.last = static_cast<int>(place.first + place.count);
      p.table = place.table;
      if (!place.rounding) continue;
      p.scale = place.rounding->scale;
      p.zero_point = place.rounding->zero_point;
      p.lo = place.rounding->lo;
      p.hi = place.rounding->hi;
      p.limit = 1024 * p.scale;
      p.inverse = FastIsExact(*place.rounding, double{1024} * p.scale, 1.0) ? 1.0f / p.scale : 0.0f;
    }
    const auto reserve = [&](int64_t bytes) {
      const size_t at = workspace_;
      workspace_ += static_cast<size_t>(RoundUp(bytes, 256));
      return at;
    };
    if (config.packs) {
      const int64_t dims[] = {InPixels(), problem_.channels};
      x_at_ = reserve(PlaneBytes(dims, problem_.x.bits));
    }
    if (!traits_.has_passes) return;
    if (conv_->Repacks()) x_at_ = reserve(InPixels() * problem_.channels * problem_.groups);
    if (config.splits > 1 && config.split == Split::kWorkspace) {
      partial_at_ = reserve(int64_t{config.splits} * params_.groups * params_.m * params_.n * 4);
    }
  }

  const ConvConfig& Config() const { return config_; }
  size_t WorkspaceBytes() const { return workspace_; }

  // From now on codes are made that nothing is added to, by whichever kernel finishes sums.
  void LeaveResidual() {
    EpilogueParams& e = params_.epilogue;
    e.has_residual = e.adds_behind_tail = e.adds_floats = false;
    e.values = nullptr;
    e.y_scale = e.first_scale;
    e.y_zero_point = e.zero_point;
    e.y_lo = e.lo;
    e.y_hi = e.hi;
  }

  void Launch(const void* x, const void* residual, void* y, void* workspace, Queue& queue,
              std::span<void* const> places) const {
    Require(places.size() == places_.list.size(), "a convolution stores codes in ", places_.list.size(),
            " places, got ", places.size());
    if (params_.m == 0 || params_.n == 0) return;
    DeviceGuard guard(conv_->On().ordinal);
    LaunchOptions options{queue, conv_->On()};
    options.x_signed = conv_->XSigned();
    options.shared_bytes = shared_bytes_;
    RequireAligned({traits_.reads_elements ? nullptr : x, residual, y});
    ConvParams p = params_;
    p.x = static_cast<const uint8_t*>(x);
    p.residual = residual;
    p.y = places_.keeps_output ? y : nullptr;
    for (size_t i = 0; i < places.size(); ++i) {
      RequireAligned({places[i]});
      p.epilogue.places[i].y = static_cast<uint8_t*>(places[i]) + places_.list[i].at;
    }
    uint8_t* const scratch = static_cast<uint8_t*>(workspace);
    if (config_.packs) {
      const PackPlanesParams pack = {p.x, scratch + x_at_, static_cast<int>(InPixels()),
                                     static_cast<int>(problem_.channels), problem_.x.bits};
      Check(LaunchPackPlanes(pack, options), "launching a packing of planes");
      p.x = pack.planes;
    }
    if (!traits_.has_passes) {
      Check(launcher_(p, options), "launching a convolution");
      return;
    }
    if (conv_->Repacks()) {
      RepackParams repack;
      repack.x = p.x;
      repack.y = scratch + x_at_;
      repack.pixels = InPixels();
      repack.groups = p.groups;
      repack.group_in = static_cast<int>(conv_->Geometry().GroupIn());
      repack.channels = static_cast<int>(problem_.channels);
      repack.mul = conv_->Bipolar() ? 2 : 1;
      repack.sub = conv_->Bipolar() ? 1 : 0;
      Check(LaunchRepack(repack, options), "launching a repacking");
      p.x = repack.y;
    }
    options.x_signed = conv_->XSigned() || conv_->Bipolar();
    const bool reduces = config_.splits > 1 && config_.split == Split::kWorkspace;
    if (reduces) options.partial = reinterpret_cast<int32_t*>(scratch + partial_at_);
    Check(launcher_(p, options), "launching a convolution");
    if (reduces) {
      const ReduceParams parts = {p, config_.splits, options.partial};
      Check(LaunchReduce(parts, options), "launching a reduction");
    }
  }

 private:
  int64_t InPixels() const { return shape_.batch * shape_.in_h * shape_.in_w; }

  std::shared_ptr<const PackedConv> conv_;
  ConvShape shape_;
  ConvConfig config_;
  ConvPlaces places_;
  ConvProblem problem_;
  ConvTraits traits_;
  int shared_bytes_;
  ConvParams params_;
  ConvLauncher launcher_;
  size_t workspace_ = 0, x_at_ = 0, partial_at_ = 0;
};

std::shared_ptr<const PackedConv> PackConv(const ConvSpec& spec, const Device& device,
                                           std::span<const uint8_t> packed, const StoredAs& stored) {
  return std::make_shared<const PackedConv>(spec, device, packed, stored);
}

std::vector<uint8_t> SavePacked(const PackedConv& conv) { return conv.Bytes(); }

std::vector<ConvConfig> CandidateConfigs(const PackedConv& conv, const ConvShape& shape, bool has_places,
                                         const TensorPlanes& planes) {
  if ((planes.x > 0 && !conv.MayReadPlanes(planes.x)) || (planes.y > 0 && !conv.MayStorePlanes(planes.y)) ||
      (planes.added > 0 && !conv.MayAddPlanes(planes.added))) {
    return {};
  }
  return RankConfigs(conv.Problem(shape, has_places, planes), conv.On());
}

int PlanesRead(const PackedConv& conv) {
  for (int planes = kMostPlanes; planes > 0; --planes) {
    if (conv.MayReadPlanes(planes)) return planes;
  }
  return 0;
}

std::optional<double> EstimateMicroseconds(const PackedConv& conv, const ConvShape& shape,
                                           const TensorPlanes& planes) {
  const std::vector<ConvConfig> configs = CandidateConfigs(conv, shape, false, planes);
  if (configs.empty()) return std::nullopt;
  return EstimateMicroseconds(conv.Problem(shape, false, planes), configs.front(), conv.On());
}

void RequireSize(const PackedConv& conv, const ConvShape& shape) {
  const ConvGeometry& geometry = conv.Geometry();
  Require(shape.OutPixels() <= kMaxBytes && shape.OutPixels() * geometry.out_channels <= kMaxBytes,
          "the output of ", shape.OutPixels(), " pixels and ", geometry.out_channels,
          " channels is too large for the GPU kernels");
}

void RequirePlaces(const PackedConv& conv, const ConvShape& shape, const ConvPlaces& places) {
  Require(places.list.size() <= kMostPlaces && (places.keeps_output || !places.list.empty()),
          "a convolution stores codes in ", places.list.size(), " places, expected at most ", kMostPlaces);
  const int64_t out_channels = conv.Geometry().out_channels;
  const EpilogueParams& e = conv.EpilogueOf();
  const bool has_codes = e.quantized_output;
  Require(
      (!places.makes_halves || (!has_codes && places.keeps_output)) && (!places.adds_halves || e.adds_floats),
      "a convolution has no use for float16 numbers");
  for (const ConvPlace& place : places.list) {
    const bool is_whole = place.first == 0 && place.at == 0 && place.count == out_channels &&
                          place.channels == out_channels && place.table == nullptr;
    const bool fits = place.first >= 0 && place.count > 0 && place.at >= 0 &&
                      place.first + place.count <= out_channels && place.at + place.count <= place.channels &&
                      (place.first | place.count | place.at | place.channels) % 16 == 0 &&
                      shape.OutPixels() * place.channels <= kMaxBytes && !e.dequantizes;
    Require(has_codes ? fits && !place.rounding : is_whole && place.rounding, "channels from ", place.first,
            " on, ", place.count, " of them, have no place in ", place.channels, " from ", place.at, " on");
  }
}

std::shared_ptr<const ConvPlan> MakePlan(std::shared_ptr<const PackedConv> conv, const ConvShape& shape,
                                         const ConvConfig& config, ConvLauncher launcher,
                                         const ConvPlaces& places, const TensorPlanes& planes) {
  return std::make_shared<const ConvPlan>(std::move(conv), shape, config, std::move(launcher), places,
                                          planes);
}

std::shared_ptr<const ConvPlan> PlanConv(std::shared_ptr<const PackedConv> conv, const ConvShape& shape,
                                         const std::optional<ConvConfig>& config, const ConvPlaces& places,
                                         const TensorPlanes& planes) {
  RequireSize(*conv, shape);
  RequirePlaces(*conv, shape, places);
  const bool has_places = !places.list.empty();
  const std::vector<ConvConfig> candidates = CandidateConfigs(*conv, shape, has_places, planes);
  Require(!candidates.empty(), "the convolution has no kernel that reads ", planes.x, " planes, adds ",
          planes.added, " and stores ", planes.y, "; let it read and store bytes");
  const ConvProblem problem = conv->Problem(shape, has_places, planes);
  if (config && std::find(candidates.begin(), candidates.end(), *config) == candidates.end()) {
    const std::string reason = RowOf(*config).refuse(problem, conv->On());
    Fail("configuration ", config->Text(), " does not apply to this node", reason.empty() ? "" : ": ", reason,
         "; for example ", candidates.front().Text(), " does");
  }
  const ConvConfig& chosen = config.has_value() ? *config : candidates.front();
  ConvLauncher launcher = RowOf(chosen).launcher(problem, chosen, conv->On());
  return MakePlan(std::move(conv), shape, chosen, std::move(launcher), places, planes);
}

std::shared_ptr<const ConvPlan> PlanWithoutResidual(std::shared_ptr<const PackedConv> conv,
                                                    const ConvShape& shape) {
  RequireSize(*conv, shape);
  // Numbers of a table stand behind the node, whose own codes any kernel makes.
  const ConvConfig config =
      conv->EpilogueOf().values != nullptr ? CandidateConfigs(*conv, shape).front() : ConvConfig();
  ConvLauncher launch = RowOf(config).launcher(conv->Problem(shape), config, conv->On());
  auto plan = std::make_shared<ConvPlan>(std::move(conv), shape, config, std::move(launch), ConvPlaces(),
                                         TensorPlanes());
  plan->LeaveResidual();
  return plan;
}

std::shared_ptr<const ConvPlan> PlanConv(const ConvSpec& spec, const ConvShape& shape, const Device& device) {
  return PlanConv(PackConv(spec, device), shape);
}

const ConvConfig& PlanConfig(const ConvPlan& plan) { return plan.Config(); }

size_t PlanWorkspaceBytes(const ConvPlan& plan) { return plan.WorkspaceBytes(); }

void LaunchConv(const ConvPlan& plan, const void* x, const void* residual, void* y, void* workspace,
                Queue& queue, std::span<void* const> places) {
  plan.Launch(x, residual, y, workspace, queue, places);
}

ConvConfig TuneConv(const std::shared_ptr<const PackedConv>& conv, const ConvShape& shape,
                    const std::function<double(const ConvPlan&)>& measure, size_t limit,
                    const TensorPlanes& planes) {
  std::vector<ConvConfig> candidates = CandidateConfigs(*conv, shape, false, planes);
  candidates.resize(std::min(candidates.size(), std::max<size_t>(limit, 1)));
  const ConvConfig* best = nullptr;
  double best_time = 0;
  for (const ConvConfig& candidate : candidates) {
    const double time = measure(*PlanConv(conv, shape, candidate, {}, planes));
    if (best == nullptr || time < best_time) {
      best = &candidate;
      best_time = time;
    }
  }
  return *best;
}

}  // namespace lowbit::cuda
