#include "kernels/cuda/fused/affine_conv.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/status.h"
#include "kernels/cuda/conv/packed_conv.h"
#include "kernels/cuda/conv/select.h"
#include "kernels/cuda/conv/tiles.h"
#include "kernels/cuda/fused/residual_pair.h"

namespace lowbit::cuda {

namespace {

constexpr Tile kTiles[] = {{64, 32}, {64, 64}, {64, 128}};
constexpr int kMaxSplits = 8;
constexpr int kLineFloats = 2 * kTileK;  // of a tile of k

std::string Refuse(const ConvProblem& problem, const Device& device) {
  if (device.capability != 90) return "needs sm_90a";
  if (!problem.streams || !problem.IsFlat() || problem.groups != 1 || problem.borders)
    return "not a 1x1 convolution of stride 1 whose codes are rounded in registers";
  if (problem.x.encoding == Encoding::kBipolar || problem.is_bits) return "bipolar codes";
  if (problem.residual) return "residuals";
  if (problem.in_tail || problem.is_mapped) return "a function or a table behind the convolution";
  return problem.m == 0 || problem.n == 0 ? "no pixels or channels" : "";
}

int TileBytes(const ConvConfig& config) {
  return config.stages * ((config.tile_m + config.tile_n) * kTileK + kLineFloats * 4);
}

// As FinishTile has it.
int SharedBytesOf(const ConvConfig& config) {
  const int tiles = TileBytes(config), sums = config.tile_m * config.tile_n * 4,
            codes = config.tile_m * (config.tile_n + 16);
  return 1024 + (config.splits > 1 ? tiles + sums : std::max(tiles, codes));
}

void AddCandidates(const ConvProblem& problem, const Device& device, std::vector<ConvConfig>& out) {
  if (!kAffineConvKernel.Applies(problem, device)) return;
  for (const Tile& tile : kTiles) {
    const int64_t columns = CeilDiv(problem.n, tile.n), blocks = CeilDiv(problem.m, tile.m) * columns;
    // What a narrower tile has in one column.
    if (columns > kMaxColumns || (tile.n > 32 && problem.n <= tile.n / 2)) continue;
    for (int splits = 1; splits <= kMaxSplits && splits <= problem.KTiles(); splits *= 2) {
      if (splits > 1 && (IsLeftOut("cluster") || blocks * splits > 2 * int64_t{device.multiprocessors}))
        break;
      ConvConfig config{&kAffineConvKernel, tile.m, tile.n};
      config.splits = splits;
      // All of a block's tiles are there at once.
      const int64_t tiles = CeilDiv(problem.KTiles(), splits);
      config.stages = static_cast<int>(std::min<int64_t>(tiles, kMaxAffineTiles));
      if (tiles > kMaxAffineTiles || SharedBytesOf(config) > device.shared_bytes) continue;
      for (const bool helped : {false, true}) {
        config.producers = helped;
        out.push_back(config);
      }
    }
  }
}

// Apart: a launch more, codes read and written at 3 TB/s; rates, not fitted.
constexpr double kLaunchMicroseconds = 1.1, kBytesOfMicrosecond = 3e6;

// In clocks, fitted to 286 configurations of DenseNet-121's layers at batch 1 and 16 on one H100, in rows of equals:
// what it chooses takes 1.01 of the best. `joins`: codes are rounded twice, and stored by the blocks of the first
// channels.
double MicrosecondsTogether(const ConvProblem& problem, const ConvConfig& config, const Device& device,
                            bool joins) {
  const int64_t blocks =
      CeilDiv(problem.m, config.tile_m) * CeilDiv(problem.n, config.tile_n) * config.splits;
  const int64_t per_multiprocessor = CeilDiv(blocks, device.multiprocessors);
  const int threads = config.producers ? 256 : 128,
            registers = config.tile_n > 64 && !config.producers ? 168 : 128;
  const int by_shared = (device.shared_bytes + 5120) / (SharedBytesOf(config) + 1500),
            by_registers = 65536 / (registers * threads);
  const int64_t fit = std::max(1, std::min(by_shared, by_registers));
  const double at_once = static_cast<double>(std::min(per_multiprocessor, fit)),
               waves = static_cast<double>(per_multiprocessor) / at_once;
  const double outputs = config.tile_m * config.tile_n;
  // Of a tile's codes: what they take a block by itself, and what blocks share of a multiprocessor.
  const double alone = (joins ? 1484 : 1127) / (config.producers ? 1.96 : 1),
               shared = (joins ? 1003 : 711) + 2.57 * config.tile_n;
  double block =
      2620 + config.stages * std::max(alone, at_once * shared) + 0.033 * at_once * outputs / config.splits;
  if (config.splits > 1) block += 414 + 0.33 * at_once * outputs;
  if (config.splits > 4) block += 360;
  const double bytes = static_cast<double>(problem.m * problem.k) * (joins ? 2 : 1);
  return ((1 + 0.729 * (waves - 1)) * block + 0.000159 * bytes) / kClocksPerMicrosecond;
}

double MicrosecondsOf(const ConvProblem& problem, const ConvConfig& config, const Device& device,
                      bool joins) {
  if (config.kernel != &kSeparateKernels) return MicrosecondsTogether(problem, config, device, joins);
  return kLaunchMicroseconds + 2 * static_cast<double>(problem.m * problem.k) / kBytesOfMicrosecond +
         EstimateOfBest(problem, device);
}

std::vector<double> Rank(const ConvProblem& problem, const Device& device, bool joins,
                         std::vector<ConvConfig>& out) {
  AddCandidates(problem, device, out);
  if (!joins) out.push_back({&kSeparateKernels});
  return SortByEstimate(
      [&](const ConvConfig& config) { return MicrosecondsOf(problem, config, device, joins); }, out);
}

double EstimateOfBestFused(const ConvProblem& problem, const Device& device) {
  std::vector<ConvConfig> configs;
  AddCandidates(problem, device, configs);
  const std::vector<double> estimates = SortByEstimate(
      [&](const ConvConfig& config) { return MicrosecondsOf(problem, config, device, false); }, configs);
  return estimates.empty() ? std::numeric_limits<double>::infinity() : estimates.front();
}

// Those of the product. The sums are floats where the kernel has an instance for them, else integers.
AffineConvParams ProductOf(const PackedConv& conv, const ConvShape& shape, const ConvConfig& config) {
  const ConvProblem problem = conv.Problem(shape);
  AffineConvParams p = {TilesOf(problem, config), SumsOf(problem, config)};
  const auto set_common = [&](bool may_be_floats) {
    ConvConfig tiles = config;
    tiles.kernel = &kWgmmaRow;
    tiles.boxes = true;  // nothing lies outside of the image: it has the instances of what fetches boxes
    static_cast<ConvParams&>(p) = conv.Params(shape, tiles, may_be_floats);
  };
  set_common(true);
  if (!HasAffineInstance(AffineFinishOf(p))) set_common(false);
  return p;
}

// Leaves out those whose help has no instance.
void DropHelp(const PackedConv& conv, const ConvShape& shape, std::vector<ConvConfig>& configs) {
  std::erase_if(configs, [&](const ConvConfig& config) {
    return config.producers && !MayHelp(AffineFinishOf(ProductOf(conv, shape, config)), conv.XSigned());
  });
}

AffineConvParams ParamsOf(const AffineConv& nodes, const ConvConfig& config) {
  AffineConvParams p = ProductOf(*nodes.conv, nodes.shape, config);
  // Unsplit sums may overwrite the tiles.
  p.exchange_offset = config.splits > 1 ? TileBytes(config) : 0;
  p.lines = reinterpret_cast<const float*>(nodes.lines->memory.At(0));
  const auto flip = [](bool is_signed) { return is_signed ? 0x80808080u : 0u; };
  const auto bias = [](bool is_signed) { return 8388608.0f + (is_signed ? 128.0f : 0.0f); };
  p.made_flip = flip(nodes.lines->x_signed);
  p.made_bias = bias(nodes.lines->x_signed);
  const bool is_capped = nodes.lines->hi - nodes.lines->lo < 255;
  p.cap_select = is_capped ? 0xBA98u : 0x4444u;
  p.cap_mask = is_capped ? 0x7F7F7F7Fu : ~0u;
  p.cap_flip = flip(nodes.lines->lo != 0);
  p.joins = !nodes.joined.empty();
  p.parts[0] = {nullptr, 0, p.k, p.made_flip};
  if (!p.joins) return p;
  p.part_count = static_cast<int>(nodes.joined.size());
  for (p.part_step = 1; 2 * p.part_step < p.part_count;) p.part_step *= 2;
  int first = 0;
  for (size_t i = 0; i < nodes.joined.size(); ++i) {
    const JoinedLine& line = nodes.joined[i];
    AffinePart& part = p.parts[i];
    part.first = first;
    part.channels = static_cast<int>(line.channels);
    part.flip = flip(line.is_signed);
    part.bias = bias(line.is_signed);
    part.gain = line.gain;
    part.offset = line.offset;
    part.is_copied = line.gain == 1 && line.offset == (line.is_signed ? 128 : 0);
    first += part.channels;
  }
  return p;
}

}  // namespace

const FusedRow<ConvProblem> kAffineConvKernel = {
    {"affined", "sm_90a", "a normalization's codes and the 1x1 layer that reads them"},
    Refuse,
    EstimateOfBestFused};

std::vector<ConvConfig> RankAffineConfigs(const ConvProblem& problem, const Device& device) {
  std::vector<ConvConfig> out;
  Rank(problem, device, false, out);
  return out;
}

std::vector<ConvConfig> AffineConvConfigs(const PackedConv& conv, const ConvShape& shape) {
  std::vector<ConvConfig> out = RankAffineConfigs(conv.Problem(shape), conv.On());
  DropHelp(conv, shape, out);
  return out;
}

std::vector<ConvConfig> JoiningConfigs(const AffineConv& nodes) {
  std::vector<ConvConfig> out;
  Rank(nodes.conv->Problem(nodes.shape), nodes.conv->On(), true, out);
  DropHelp(*nodes.conv, nodes.shape, out);
  return out;
}

std::shared_ptr<const PackedLines> PackLines(const AffineLines& lines, int64_t k, const Device& device) {
  const auto count = static_cast<int64_t>(lines.gain.size());
  Require(count == 1 || count == k, "there are lines of ", count, " channels, expected ", k);
  // Channels past the last one have a line of 0: their codes meet weights of 0.
  std::vector<float> numbers(static_cast<size_t>(CeilDiv(k, kTileK)) * kLineFloats);
  for (int64_t c = 0; c < k; ++c) {
    const auto at = static_cast<size_t>(c / kTileK * kLineFloats + LineIndex(static_cast<int>(c % kTileK)));
    const auto line = static_cast<size_t>(count == 1 ? 0 : c);
    numbers[at] = lines.gain[line];
    numbers[at + kTileK] = lines.offset[line];
  }
  auto packed = std::make_shared<PackedLines>();
  packed->x_signed = lines.x_signed;
  packed->y_signed = lines.y_signed;
  packed->lo = lines.lo;
  packed->hi = lines.hi;
  const DeviceGuard guard(device.ordinal);
  packed->memory.Upload(numbers.data(), numbers.size() * sizeof(float), device);
  return packed;
}

class AffineConvPlan {
 public:
  AffineConvPlan(const AffineConv& nodes, const ConvConfig& config)
      : nodes_(nodes), config_(config), params_(ParamsOf(nodes, config)) {}

  void Launch(std::span<const void* const> x, void* joined, void* y, Queue& queue) const {
    const Device& device = nodes_.conv->On();
    DeviceGuard guard(device.ordinal);
    LaunchOptions options{queue, device};
    options.x_signed = nodes_.conv->XSigned();
    options.shared_bytes = SharedBytesOf(config_);
    const auto parts = static_cast<size_t>(params_.part_count);
    Require(x.size() == parts, "a convolution behind an affine function was fed ", x.size(),
            " tensors, expected ", parts);
    AffineConvParams p = params_;
    for (size_t i = 0; i < parts; ++i) {
      RequireAligned({x[i]});
      p.parts[i].x = static_cast<const uint8_t*>(x[i]);
    }
    RequireAligned({joined, y});
    p.made = static_cast<uint8_t*>(joined);
    p.y = y;
    Check(cuda::LaunchAffineConv(p, config_, options), "launching a convolution behind an affine function");
  }

 private:
  AffineConv nodes_;
  ConvConfig config_;
  AffineConvParams params_;
};

std::optional<AffineConv> BehindConcat(const ConcatNode& concat, std::span<const TensorShape> fed,
                                       AffineConv nodes) {
  const Quantizer& quantizer = concat.quantizer;
  constexpr int kBytes = 256;
  const size_t count = fed.size();
  if (count < 2 || count > kMaxJoinedParts || concat.parts.size() != count ||
      quantizer.is_signed != nodes.lines->x_signed || quantizer.hi - quantizer.lo != kBytes - 1) {
    return std::nullopt;
  }
  int64_t channels = 0;
  for (size_t i = 0; i < count; ++i) {
    const std::vector<int64_t>& dims = fed[i].dims;
    if (dims.empty() || concat.Axis(dims.size()) != dims.size() - 1 || dims.back() % 16 != 0)
      return std::nullopt;
    JoinedLine line{dims.back(), 1, static_cast<float>(-quantizer.lo), quantizer.is_signed};
    if (const auto& [copied, grid] = concat.parts[i]; !copied) {
      AffineSpec spec = grid;
      spec.y_scale = {quantizer.scale};
      spec.y_zero_point = {quantizer.zero_point};
      spec.quantizer = quantizer;
      const std::optional<AffineLines> found = spec.channels == 1 ? AffineLinesOf(spec) : std::nullopt;
      if (!found) return std::nullopt;
      line = {dims.back(), found->gain.front(), found->offset.front(), found->x_signed};
    }
    channels += line.channels;
    nodes.joined.push_back(line);
  }
  if (channels != nodes.conv->Geometry().in_channels) return std::nullopt;
  return nodes;
}

// A Concat reads and writes all codes.
bool JoiningPays(const AffineConv& nodes) {
  const ConvProblem problem = nodes.conv->Problem(nodes.shape);
  const Device& device = nodes.conv->On();
  const double concat =
      kLaunchMicroseconds + 2 * static_cast<double>(problem.m * problem.k) / kBytesOfMicrosecond;
  const auto best = [&](const std::vector<ConvConfig>& ranked, bool joins) {
    return ranked.empty() ? std::numeric_limits<double>::infinity()
                          : MicrosecondsOf(problem, ranked.front(), device, joins);
  };
  return best(JoiningConfigs(nodes), true) <
         best(AffineConvConfigs(*nodes.conv, nodes.shape), false) + concat;
}

std::shared_ptr<const AffineConvPlan> PlanAffineConv(const AffineConv& nodes, const ConvConfig& config) {
  const ConvProblem problem = nodes.conv->Problem(nodes.shape);
  std::vector<ConvConfig> configs;
  AddCandidates(problem, nodes.conv->On(), configs);
  DropHelp(*nodes.conv, nodes.shape, configs);
  const std::string reason = kAffineConvKernel.refuse(problem, nodes.conv->On());
  Require(nodes.lines->y_signed == nodes.conv->XSigned() &&
              std::find(configs.begin(), configs.end(), config) != configs.end(),
          "configuration ", config.Text(), " does not apply to these two nodes", reason.empty() ? "" : ": ",
          reason);
  return std::make_shared<const AffineConvPlan>(nodes, config);
}

void LaunchAffineConv(const AffineConvPlan& plan, std::span<const void* const> x, void* joined, void* y,
                      Queue& queue) {
  plan.Launch(x, joined, y, queue);
}

}  // namespace lowbit::cuda
