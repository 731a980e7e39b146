#include "kernels/cuda/fused/chain.h"

#include <algorithm>
#include <utility>

#include "core/status.h"
#include "kernels/cuda/conv/packed_conv.h"
#include "kernels/cuda/conv/select.h"
#include "kernels/cuda/conv/tiles.h"
#include "kernels/cuda/fused/chain_params.h"
#include "kernels/cuda/fused/residual_pair.h"

namespace lowbit::cuda {

namespace {

constexpr int kTilePixels = 64;
constexpr int kStateBytes = 3 * kChainBox * 4 + kChainBox + 16;  // of a box's constants, BlockState

int CeilDiv(int a, int b) { return (a + b - 1) / b; }

ChainProduct ProductOf(const PackedConv& conv, const ConvShape& shape, int ranks, bool may_be_floats) {
  // What depends on no configuration.
  const ConvConfig config{&kWgmmaRow, kTilePixels, kChainBox, 2};
  const ConvProblem problem = conv.Problem(shape);
  const ConvParams p = conv.Params(shape, config, may_be_floats);
  const TileParams tiles = TilesOf(problem, config);
  ChainProduct product;
  product.weights = p.weights;
  product.n = p.n;
  product.n_padded = tiles.n_padded;
  product.k = p.k;
  product.k_tiles = tiles.k_tiles;
  product.k_boxes = CeilDiv(p.k, kChainBox);
  product.n_boxes = CeilDiv(p.n, kChainBox);
  product.own_boxes = CeilDiv(product.n_boxes, ranks);
  product.pixels = PixelsOf(problem);
  product.epilogue = p.epilogue;
  return product;
}

// Those of a block, tiles of k wide.
int WeightBoxes(const ChainParams& p) {
  const ChainProduct& windows = p.windows.product;
  return (p.residuals.k_tiles + p.first.k_tiles) * p.first.own_boxes + p.second.k_tiles * p.second.own_boxes +
         windows.k_tiles * windows.own_boxes;
}

// Of a row of so many outputs, those of a tile: all, or the largest part of equal parts; 0 where parts would be narrow.
int ColumnsOf(int64_t out_w) {
  if (out_w <= kTilePixels) return static_cast<int>(out_w);
  for (int columns = kTilePixels; columns > kTilePixels / 2; --columns) {
    if (out_w % columns == 0) return columns;
  }
  return 0;
}

// All but the product itself, of those that RefuseWindows does not refuse. Rows of a patch begin at multiples of 128
// bytes.
ChainWindows WindowsOf(const ConvProblem& problem, const ChainProduct& product) {
  const ConvGeometry& g = problem.geometry;
  const int reach_h = static_cast<int>((g.kernel_h - 1) * g.dilation_h),
            reach_w = static_cast<int>((g.kernel_w - 1) * g.dilation_w);
  ChainWindows w;
  w.product = product;
  w.product.k_boxes = static_cast<int>(problem.channels) / kChainBox;
  w.image = cuda::WindowsOf(problem);
  w.images = static_cast<int>(problem.shape.batch);
  w.columns = ColumnsOf(problem.shape.out_w);
  w.pitch = (w.columns + reach_w + 1) / 2 * 2;
  w.rows = std::clamp((kTilePixels - w.columns) / w.pitch + 1, 1, std::max(1, w.image.out_h));
  w.reach = reach_h;
  w.plane_bytes = CeilDiv((w.rows + reach_h) * w.pitch * kChainBox, 1024) * 1024;
  for (int64_t tap = 0; tap < g.Taps(); ++tap) {
    const int64_t place = tap / g.kernel_w * g.dilation_h * w.pitch + tap % g.kernel_w * g.dilation_w;
    for (int box = 0; box < w.product.k_boxes; ++box)
      w.step[w.steps++] = (static_cast<int>(place) * kChainBox + box * w.plane_bytes) / 16;
  }
  w.by_parts = MakeDivisor(std::max(1, w.image.out_w / w.columns));
  w.by_bands = MakeDivisor(std::max(1, CeilDiv(w.image.out_h, w.rows)));
  return w;
}

// The second convolution's shape: its input is the pixels that the first one makes.
ConvShape SecondShape(const ConvChain& chain) {
  const ConvShape& s = chain.shape;
  return {s.batch, s.out_h, s.out_w, s.out_h, s.out_w};
}

ResidualPairProblem ResidualPairOf(const ConvChain& chain) {
  return {chain.residuals->Problem(chain.residuals_shape), chain.first->Problem(chain.shape)};
}

// Everything but the pointers of a launch.
ChainParams ParamsOf(const ConvChain& chain, const ChainConfig& config) {
  ChainParams p;
  const auto set_products = [&](bool may_be_floats) {
    p.first = ProductOf(*chain.first, chain.shape, config.ranks, may_be_floats);
    p.second = ProductOf(*chain.second, SecondShape(chain), config.ranks, may_be_floats);
  };
  set_products(true);
  // The kernel takes floats of both or of none.
  const auto has_integers = [](const ChainProduct& product) {
    return product.epilogue.sums == SumForm::kInteger;
  };
  if (has_integers(p.first) != has_integers(p.second)) set_products(false);
  p.makes_residuals = chain.residuals != nullptr;
  if (p.makes_residuals) {
    const auto set_residuals = [&](bool may_be_floats) {
      p.residuals = ProductOf(*chain.residuals, chain.residuals_shape, config.ranks, may_be_floats);
    };
    set_residuals(true);
    if (!MakesFloats(FinishOf(p).first)) set_residuals(false);
  }
  p.m = static_cast<int>(chain.shape.OutPixels());
  p.tiles = CeilDiv(p.m, kTilePixels);
  p.has_windows = chain.windows != nullptr;
  if (p.has_windows) {
    p.windows = WindowsOf(chain.windows->Problem(chain.windows_shape),
                          ProductOf(*chain.windows, chain.windows_shape, 1, true));
    p.tiles = static_cast<int>(p.windows.by_parts.divisor) * static_cast<int>(p.windows.by_bands.divisor) *
              p.windows.images;
  }
  p.ranks = config.ranks;
  p.teams = config.teams;
  p.team_groups = config.groups;
  p.x_signed = chain.first->XSigned();
  p.y_signed = chain.second->XSigned();
  // What windows make takes turns with z.
  const int reads = p.residuals.k_boxes + p.first.k_boxes, made = p.windows.product.n_boxes;
  const int between =
      p.has_windows ? reads - made + std::max(made, p.second.own_boxes) : reads + p.second.own_boxes;
  p.team_bytes = (between + p.first.n_boxes) * kChainBoxBytes +
                 (p.has_windows ? p.windows.product.k_boxes * p.windows.plane_bytes : 0);
  p.shared_bytes =
      1024 + WeightBoxes(p) * kChainBox * kTileK + p.teams * p.team_bytes +
      (p.residuals.own_boxes + p.first.own_boxes + p.second.own_boxes + p.windows.product.own_boxes) *
          kStateBytes;
  p.clusters = std::clamp(chain.first->On().multiprocessors / p.ranks, 1, std::max(1, p.tiles));
  return p;
}

bool Fits(const ChainParams& p, const Device& device) {
  // How many large clusters a GPU has room for at once depends on which of its parts are whole: they are for
  // few tiles, where blocks idle anyway.
  const bool has_room = p.ranks <= 2 || p.tiles * p.ranks <= device.multiprocessors / 2;
  // Behind integers there is neither a tail nor a table here, but for residuals of what finishes
  // any floats.
  const auto fits = [](const ChainProduct& product) {
    const EpilogueParams& e = product.epilogue;
    return e.values == nullptr &&
           (e.sums != SumForm::kInteger || (!e.on_lines && !e.in_tail && e.table == nullptr));
  };
  if (p.has_windows && (p.ranks > 1 || !FitsWindows(p.windows.product.epilogue, FinishOf(p)))) return false;
  const EpilogueParams& made = p.residuals.epilogue;
  const bool makes_fitting =
      !made.in_tail && made.values == nullptr &&
      ((!made.on_lines && made.table == nullptr) || MayMakeBehindTail(FinishOf(p).first));
  return has_room && makes_fitting && fits(p.first) && fits(p.second) && p.first.n_boxes % p.ranks == 0 &&
         p.first.n_boxes <= kMaxChainBoxes && p.team_groups <= p.first.own_boxes &&
         p.teams * p.team_groups <= kMaxChainGroups && p.shared_bytes <= device.shared_bytes;
}

std::string RefuseWindows(const ConvChain& chain) {
  const ConvProblem problem = chain.windows->Problem(chain.windows_shape);
  const ConvGeometry& g = problem.geometry;
  const bool rounds = problem.tiled && problem.requantizes && problem.floats && !problem.is_mapped &&
                      !problem.residual && !problem.has_places && problem.planes == TensorPlanes{};
  if (!rounds) return "windows whose codes are not rounded in registers, or are stored elsewhere";
  if (g.stride_h != 1 || g.stride_w != 1) return "windows with a stride";
  if (g.group != 1 || problem.repacks || problem.channels % kChainBox != 0)
    return "windows of channels that are no multiple of 64";
  if (problem.borders || (problem.IsPadded() && problem.zero != 0)) return "padding that is not 0";
  if (g.Taps() * (problem.channels / kChainBox) > kMaxWindowSteps)
    return "windows of more than 32 steps along K";
  if (ColumnsOf(problem.shape.out_w) == 0) return "rows that are no equal parts of 33 to 64 outputs";
  const int64_t pitch = ColumnsOf(problem.shape.out_w) + (g.kernel_w - 1) * g.dilation_w + 1;
  if (pitch > 256 || (g.kernel_h - 1) * g.dilation_h > 64)
    return "windows of more than 64 rows or 192 columns";
  const PackedConv& reader = chain.residuals != nullptr ? *chain.residuals : *chain.first;
  const ConvGeometry& behind = reader.Geometry();
  const bool fits = g.out_channels == behind.in_channels && behind.stride_h == 1 && behind.stride_w == 1 &&
                    problem.m == chain.shape.OutPixels() && chain.windows->XSigned() == reader.XSigned();
  return fits ? "" : "windows that do not fit the convolution behind them";
}

std::string Refuse(const ConvChain& chain, const Device& device) {
  const ConvGeometry &a = chain.first->Geometry(), &b = chain.second->Geometry();
  const auto unit_stride = [](const ConvGeometry& g) { return g.stride_h == 1 && g.stride_w == 1; };
  if (device.capability != 90) return "needs sm_90a";
  if (!unit_stride(b)) return "a stride of the second convolution";
  if (a.out_channels != b.in_channels) return "the second convolution reads other channels than there are";
  const ConvProblem first = chain.first->Problem(chain.shape),
                    second = chain.second->Problem(SecondShape(chain));
  // Weights of more channels are larger than the shared memory of the largest cluster, and ParamsOf counts in
  // int.
  const auto is_small = [](const ConvProblem& each) {
    constexpr int64_t kMostChannels = 1 << 14;
    return each.k <= kMostChannels && each.n <= kMostChannels;
  };
  if (!first.streams || !second.streams) return "not 1x1 convolutions whose codes are rounded in registers";
  if (second.residual) return "residuals of the second convolution";
  if (first.m == 0 || first.n == 0 || second.n == 0) return "no pixels or channels";
  if (!is_small(first) || !is_small(second)) return "more than 16384 channels";
  if (chain.windows != nullptr) {
    if (std::string reason = RefuseWindows(chain); !reason.empty()) return reason;
  }
  if (chain.residuals == nullptr) return unit_stride(a) ? "" : "a stride of the first convolution";
  const ConvProblem residuals = chain.residuals->Problem(chain.residuals_shape);
  const bool fits = residuals.streams && is_small(residuals) && !residuals.residual && first.residual &&
                    residuals.m == first.m && residuals.n == first.n &&
                    chain.residuals->XSigned() == chain.first->XSigned();
  return fits ? "" : "the residuals' convolution does not fit that which adds them";
}

// In clocks, fitted to what chains in place of two kernels cost ResNet-50 and MobileNetV2 on one H200, batch
// 1 to 128 (EstimateMicroseconds). What making residuals adds: to ResNet-50's stages 1 and 2 at batch 16. What windows
// add: to stage 1 on an H100, batch 1 to 256.
double EstimateChain(const ChainParams& p) {
  const int teams = std::min(p.teams, CeilDiv(p.tiles, p.clusters)),
            y_rounds = CeilDiv(p.first.own_boxes, p.team_groups),
            z_rounds = CeilDiv(p.second.own_boxes, p.team_groups);
  const int weight_rows = WeightBoxes(p) * kChainBox;
  // What a tile takes by itself; what it takes of a multiprocessor that others share.
  const int k_boxes = p.residuals.k_boxes + p.first.k_boxes;
  const int window_steps = p.windows.steps * p.windows.product.n_boxes;
  const double latency = 3840 + ((p.makes_residuals ? 2460 : 1460) + 25.7 * k_boxes) * y_rounds +
                         (303 + 94.9 * p.first.n_boxes) * z_rounds + (p.ranks > 1 ? 279 : 0) +
                         100.0 * window_steps;
  const double work = (p.makes_residuals ? 599.0 : 499.0) * p.first.own_boxes + 326.0 * k_boxes +
                      85.9 * (p.first.n_boxes - p.first.own_boxes) + 153.0 * window_steps;
  const double rounds = CeilDiv(p.tiles, p.clusters * teams);
  return (5.4 * weight_rows + rounds * std::max(latency, teams * work)) / kClocksPerMicrosecond;
}

double EstimateOfBest(const ConvChain& chain, const Device&) {
  return EstimateChain(ParamsOf(chain, CandidateChains(chain).front()));
}

}  // namespace

const FusedRow<ConvChain> kChainKernel = {
    {"chain", "sm_90a",
     "two 1x1 layers in a row, and what makes the first one's residuals, or its input by windows"},
    Refuse,
    EstimateOfBest};

std::string ChainConfig::Text() const {
  std::string text =
      std::string(kChainKernel.name) + "_" + std::to_string(teams) + "x" + std::to_string(groups);
  if (ranks > 1) text += "_cluster" + std::to_string(ranks);
  return text;
}

std::vector<ChainConfig> CandidateChains(const ConvChain& chain) {
  if (!kChainKernel.Applies(chain, chain.first->On())) return {};
  std::vector<std::pair<double, ChainConfig>> ranked;
  for (const int ranks : {1, 2, 4, 8}) {
    if (ranks > 1 && (chain.windows != nullptr || IsLeftOut("cluster"))) break;
    for (int groups = 4; groups >= 1; --groups) {  // of equals the one with more
      for (int teams = 1; teams * groups <= kMaxChainGroups; ++teams) {
        const ChainConfig config{ranks, teams, groups};
        const ChainParams p = ParamsOf(chain, config);
        // Teams without a tile only take room.
        if (!Fits(p, chain.first->On()) || (teams > 1 && (teams - 1) * p.clusters >= p.tiles)) continue;
        ranked.emplace_back(EstimateChain(p), config);
      }
    }
  }
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  constexpr size_t kMost = 8;
  std::vector<ChainConfig> out;
  for (size_t i = 0; i < std::min(kMost, ranked.size()); ++i) out.push_back(ranked[i].second);
  return out;
}

bool ChainPays(const ConvChain& chain) {
  if (CandidateChains(chain).empty()) return false;
  const Device& device = chain.first->On();
  const double first = chain.residuals != nullptr ? EstimateOfBest(ResidualPairOf(chain), device)
                                                  : EstimateOfBest(chain.first->Problem(chain.shape), device);
  double apart =
      kUnlikeNeighbours * (first + EstimateOfBest(chain.second->Problem(SecondShape(chain)), device));
  if (chain.windows != nullptr) {
    ConvChain behind = chain;
    behind.windows = nullptr;
    if (ChainPays(behind)) apart = kChainKernel.microseconds(behind, device);
    // What unlike neighbours cost in ResNet-50's first stage.
    constexpr double kTurn = 0.5;
    apart += kTurn + EstimateOfBest(chain.windows->Problem(chain.windows_shape), device);
  }
  return kChainKernel.microseconds(chain, device) < apart;
}

class ChainPlan {
 public:
  ChainPlan(ConvChain chain, const ChainConfig& config) : chain_(std::move(chain)), config_(config) {
    const Device& device = chain_.first->On();
    const std::string reason = kChainKernel.refuse(chain_, device);
    // What is refused has no parameters.
    if (reason.empty()) params_ = ParamsOf(chain_, config);
    Require(reason.empty() && Fits(params_, device), "configuration ", config.Text(),
            " does not apply to these two convolutions", reason.empty() ? "" : ": ", reason);
  }

  const ChainConfig& Config() const { return config_; }
  void Launch(const void* x, const void* added, void* y, void* z, Queue& queue) const {
    const Device& device = chain_.first->On();
    DeviceGuard guard(device.ordinal);
    RequireAligned({x, added, y, z});
    ChainParams p = params_;
    const uint8_t*& read_by_windows = p.windows.product.x;
    (p.has_windows && !p.makes_residuals ? read_by_windows : p.first.x) = static_cast<const uint8_t*>(x);
    const uint8_t*& read_for_residuals = p.has_windows ? read_by_windows : p.residuals.x;
    (p.makes_residuals ? read_for_residuals : p.residual) = static_cast<const uint8_t*>(added);
    p.y = y;
    p.z = z;
    Check(cuda::LaunchChain(p, LaunchOptions{queue, device}), "launching two convolutions");
  }

 private:
  ConvChain chain_;
  ChainConfig config_;
  ChainParams params_;
};

std::shared_ptr<const ChainPlan> PlanChain(const ConvChain& chain, const ChainConfig& config) {
  return std::make_shared<const ChainPlan>(chain, config);
}

const ChainConfig& PlanConfig(const ChainPlan& plan) { return plan.Config(); }

void LaunchChain(const ChainPlan& plan, const void* x, const void* added, void* y, void* z, Queue& queue) {
  plan.Launch(x, added, y, z, queue);
}

}  // namespace lowbit::cuda
