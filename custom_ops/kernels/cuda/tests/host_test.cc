// What convolutions on GPUs compute before any kernel runs, tested without a GPU: the order of packed
// weights, the offsets of taps, divisions by constants, the ranking of tiles. The GPU is the
// emulated one.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/epilogue.h"
#include "kernels/cuda/conv/bits.h"
#include "kernels/cuda/conv/cell_weights.h"
#include "kernels/cuda/conv/channel_lines.h"
#include "kernels/cuda/conv/flat_bits.h"
#include "kernels/cuda/conv/halo.h"
#include "kernels/cuda/conv/packed_conv.h"
#include "kernels/cuda/conv/select.h"
#include "kernels/cuda/conv/sum_line.h"
#include "kernels/cuda/conv/tiles.h"
#include "kernels/cuda/conv/weight_rows.h"
#include "kernels/cuda/device/architectures.h"
#include "kernels/cuda/device/spread.h"
#include "kernels/cuda/fused/affine_conv.h"
#include "kernels/cuda/fused/chain.h"
#include "kernels/cuda/fused/chain_params.h"
#include "kernels/cuda/fused/quantized_conv.h"
#include "kernels/cuda/fused/residual_pair.h"
#include "kernels/cuda/fused/stem_pool.h"
#include "kernels/cuda/fused/stem_pool_params.h"
#include "kernels/cuda/left_out.h"
#include "tests/expect.h"

namespace lowbit::cuda {

namespace {

ChainParams launched_chain;  // the last one

}  // namespace

cudaError_t LaunchChain(const ChainParams& params, const LaunchOptions&) {
  launched_chain = params;
  return cudaSuccess;
}

namespace {

Device DeviceOf(int capability, int multiprocessors, int shared_kilobytes) {
  Device device;
  device.capability = capability;
  device.multiprocessors = multiprocessors;
  device.shared_bytes = (shared_kilobytes - 4) * 1024;
  device.name = "sm_" + std::to_string(capability);
  return device;
}

// T4, A100, RTX 3090, L4, H200, B200, RTX 5090.
const std::vector<Device>& Devices() {
  static const std::vector<Device> devices = {
      DeviceOf(75, 40, 64),   DeviceOf(80, 108, 164),  DeviceOf(86, 82, 100),  DeviceOf(89, 58, 100),
      DeviceOf(90, 132, 228), DeviceOf(100, 148, 228), DeviceOf(120, 170, 100)};
  return devices;
}

// ---- the ranking

void CheckRanking(const ConvProblem& problem, const Device& device) {
  const std::vector<ConvConfig> ranked = RankConfigs(problem, device);
  Expect(!ranked.empty() && ranked.back() == ConvConfig{}, "the plain kernel is the last resort");
  Expect(problem.tiled ? ranked.size() > 1 : ranked.size() == 1, "tiles where they apply");
  double before = 0;
  std::set<std::string> names;
  for (const ConvConfig& config : ranked) {
    Expect(names.insert(config.Text()).second, "a configuration has a name of its own: " + config.Text());
    if (config.kernel == &PlainKernel() || config.apart) continue;
    const double estimate = EstimateMicroseconds(problem, config, device);
    Expect(estimate > 0 && estimate >= before, "the cheapest estimate comes first");
    before = estimate;
    Expect(SharedBytes(problem, config) <= device.shared_bytes, config.Text() + " fits " + device.name);
    Expect(std::string_view(config.kernel->needs) != "sm_90a" || device.capability == 90,
           "wgmma is sm_90a's alone");
    Expect(config.splits == 1 || config.split == Split::kWorkspace || device.capability >= 90,
           "clusters exist from sm_90 on");
    Expect(config.splits <= (problem.k + kTileK - 1) / kTileK, "every part of K has a tile");
  }
}

void TestRanking() {
  for (const Device& device : Devices()) {
    for (const int64_t m : {1, 49, 196, 3136, 12544, 401408}) {
      for (const int64_t n : {8, 32, 64, 96, 512, 2048}) {
        for (const int64_t k : {16, 128, 576, 4608}) {
          for (const bool tiled : {true, false}) {
            for (const bool requantizes : {true, false}) {
              CheckRanking({.m = m, .n = n, .k = k, .tiled = tiled, .requantizes = requantizes}, device);
            }
          }
        }
      }
    }
    CheckRanking({.m = 12544, .n = 64, .k = 196, .tiled = true, .vector16 = false}, device);
    const ConvProblem empty{.m = 0, .n = 256, .k = 64, .tiled = true, .boxes = true, .streams = true};
    Expect(!RankConfigs(empty, device).empty(), "no pixels are no trouble");
    CheckRanking({.m = 784, .n = 16, .k = 144, .groups = 32, .tiled = true}, device);
    for (const bool has_w_zero : {false, true}) {
      const std::vector<ConvConfig> ranked =
          RankConfigs({.m = 12544, .n = 512, .k = 576, .tiled = true, .has_w_zero = has_w_zero}, device);
      const bool any_wide = std::any_of(ranked.begin(), ranked.end(), [](const ConvConfig& each) {
        return each.tile_n > kMostZeroColumns;
      });
      Expect(any_wide == (device.capability == 90 && !has_w_zero),
             "zero points of few channels fit beside tiles");
    }
    // ResNet-50's 3x3 convolutions as lines of places.
    for (const int64_t batch : {1, 16, 128}) {
      for (const int size : {56, 28, 14, 7}) {
        const int channels = 64 * 56 / size;
        ConvProblem problem{.m = batch * size * size, .n = channels, .k = 9 * channels, .tiled = true};
        problem.geometry.in_channels = problem.geometry.out_channels = problem.channels = channels;
        problem.geometry.kernel_h = problem.geometry.kernel_w = 3;
        problem.geometry.pad_top = problem.geometry.pad_left = 1;
        problem.geometry.pad_bottom = problem.geometry.pad_right = 1;
        problem.shape = {batch, size, size, size, size};
        CheckRanking(problem, device);
        Expect(kHaloRow.refuse(problem, device).empty() == (device.capability == 90), "a line of places");
      }
    }
  }
}

// Names, and what a reader is told where a row does not apply.
void TestRows() {
  std::set<std::string_view> names = {kSeparateKernels.name};
  for (const KernelInfo* const row : FusedTable()) names.insert(row->name);
  for (const ConvRow* const row : ConvTable()) names.insert(row->name);
  Expect(names.size() == 1 + FusedTable().size() + ConvTable().size(), "every kernel has a name of its own");
  Expect(ConvTable().back()->traits.is_reference, "the last row computes every node");
  ConvProblem strided{.m = 49, .n = 64, .k = 576, .tiled = true};
  strided.geometry.kernel_h = strided.geometry.kernel_w = 3;
  strided.geometry.stride_h = strided.geometry.stride_w = 2;
  for (const Device& device : Devices()) {
    const bool is_hopper = device.capability == 90;
    Expect(kHaloRow.refuse(strided, device) == (is_hopper ? "a stride" : "needs sm_90a"), device.name);
    Expect(kMmaRow.refuse(strided, device).empty(), "the tile kernels have strides");
  }
}

void TestNamesLeftOut() {
  Expect(ParseLeftOut("").empty() && ParseLeftOut(" , ").empty(), "nothing is left out");
  Expect(ParseLeftOut("halo, team,,halo") == LeftOut{"halo", "team"}, "names between commas");
  const char* const patterns[] = {"residual_pair"};
  RequireKnownNames({"halo", "chain", "pair", "conv_pool", "kept", "residual_pair"}, patterns);
  const auto message = [&](const LeftOut& names) -> std::string {
    try {
      RequireKnownNames(names, patterns);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  const std::string unknown = message({"halo", "hallo"});
  Expect(unknown.find("names 'hallo', expected some of ") != std::string::npos &&
             unknown.find("residual_pair") != std::string::npos,
         "an error lists what there is: " + unknown);
  Expect(message({"plain"}).find("what no other kernel does") != std::string::npos, "the last resort stays");
  Expect(message({"separate"}).find("names 'separate'") != std::string::npos, "two launches stay");
  Expect(LeftOutText().empty() && !IsLeftOut("halo"), "nothing is left out here");
}

// A first layer whose block takes more shared memory than a T4 has is no kernel of pixels there.
void TestPixels() {
  ConvSpec spec;
  spec.geometry.in_channels = 3;
  spec.geometry.out_channels = 64;
  spec.geometry.kernel_h = 16;
  spec.geometry.kernel_w = 8;
  spec.x = {8, Encoding::kUnsigned};
  spec.w = {8, Encoding::kSigned};
  spec.weights.assign(static_cast<size_t>(64 * spec.geometry.K()), 1);
  spec.w_zero_point.assign(64, 0);
  spec.bias.assign(64, 0);
  spec.epilogue.kind = EpilogueKind::kFloat;
  spec.epilogue.quantized_output = false;
  spec.epilogue.acc_scale.assign(64, 0.01f);
  Expect(FitsPixels(spec), "the geometry is that of an image");
  for (const Device& device : Devices())
    Expect(FitsPixels(PackedConv(spec, device, {})) == (device.capability != 75), "pixels on " + device.name);
}

void CheckResidualPairRanking(const ResidualPairProblem& problem, const Device& device) {
  const std::vector<ConvConfig> ranked = RankConfigs(problem, device);
  double before = 0;
  int separate = 0;
  std::set<std::string> names;
  for (const ConvConfig& config : ranked) {
    Expect(names.insert(config.Text()).second, "a configuration has a name of its own: " + config.Text());
    const double estimate = EstimateMicroseconds(problem, config, device);
    Expect(estimate > 0 && estimate >= before, "the cheapest estimate comes first");
    before = estimate;
    if (config.kernel == &kSeparateKernels) {
      ++separate;
      continue;
    }
    Expect(config.kernel == &kResidualPairKernel && device.capability == 90, "wgmma is sm_90a's alone");
    Expect(SharedBytes(problem, config) <= device.shared_bytes, config.Text() + " fits " + device.name);
    const int64_t tiles = (problem.second.m + config.tile_m - 1) / config.tile_m;
    const int blocks = PersistentBlocks(problem, config, device);
    Expect(blocks >= 1 && blocks <= tiles, "every block has a tile");
  }
  Expect(separate == 1, "two kernels are always a choice");
  Expect((ranked.size() > 1) == kResidualPairKernel.refuse(problem, device).empty(), "or there is a reason");
  const ConvProblem &first = problem.first, &second = problem.second;
  const bool fits =
      first.boxes && second.boxes && !first.residual && second.residual && device.capability == 90 &&
      first.is_tail == second.is_tail &&
      (!first.is_tail || (first.x.encoding == second.x.encoding && first.is_capped && second.is_capped));
  Expect((ranked.size() > 1) == fits, "one kernel where it applies");
}

// What a normalization and its layer are chosen among, and at which sizes the kernel refuses.
void TestAffineConvRanking() {
  for (const Device& device : Devices()) {
    for (const int64_t m : {1, 49, 196, 3136, 401408}) {
      for (const int64_t n : {16, 128, 512}) {
        for (const int64_t k : {16, 160, 1024, 8192, 16384}) {
          ConvProblem problem{.m = m, .n = n, .k = k, .tiled = true, .boxes = true, .streams = true};
          problem.channels = k;
          const std::vector<ConvConfig> ranked = RankAffineConfigs(problem, device);
          std::set<std::string> names;
          for (const ConvConfig& config : ranked) {
            Expect(names.insert(config.Text()).second,
                   "a configuration has a name of its own: " + config.Text());
            if (config.kernel == &kSeparateKernels) continue;
            Expect(config.kernel == &kAffineConvKernel && device.capability == 90, "wgmma is sm_90a's alone");
            Expect(config.stages <= kMaxAffineTiles && config.stages * config.splits * kTileK >= k,
                   "all of k is in a cluster's tiles: " + config.Text());
          }
          Expect(names.contains("separate"), "two kernels are always a choice");
          const bool fits = device.capability == 90 && k <= 8192;
          Expect(fits || ranked.size() == 1, "two kernels alone for what is too deep, or for older GPUs");
          if (fits && k <= 1024) Expect(ranked.size() > 1, "one kernel where all of k fits a block");
          ConvProblem with_residual = problem, mapped = problem, gathers = problem;
          with_residual.residual = mapped.is_mapped = true;
          gathers.streams = false;
          for (const ConvProblem& each : {with_residual, mapped, gathers}) {
            Expect(!kAffineConvKernel.refuse(each, device).empty() &&
                       RankAffineConfigs(each, device).size() == 1,
                   "what the kernel does not do has a reason");
          }
        }
      }
    }
  }
}

void TestResidualPairRanking() {
  for (const Device& device : Devices()) {
    for (const int64_t m : {1, 49, 196, 3136, 401408}) {
      for (const int64_t n : {16, 64, 256, 2048}) {
        for (const int64_t k : {16, 128, 4608}) {
          const ConvProblem first{.m = m, .n = n, .k = k, .tiled = true, .boxes = true},
              second{.m = m, .n = n, .k = 256, .tiled = true, .residual = true, .boxes = true};
          ConvProblem no_boxes = first, no_residual = second;
          no_boxes.boxes = no_residual.residual = false;
          CheckResidualPairRanking({first, second}, device);
          CheckResidualPairRanking({no_boxes, second}, device);
          CheckResidualPairRanking({first, no_residual}, device);
          CheckResidualPairRanking({second, second}, device);
          // Tails of both, or of one; codes of one sign, or of two.
          ConvProblem first_tail = first, second_tail = second;
          first_tail.is_tail = second_tail.is_tail = true;
          CheckResidualPairRanking({first_tail, second_tail}, device);
          first_tail.is_capped = second_tail.is_capped = true;
          CheckResidualPairRanking({first_tail, second_tail}, device);
          CheckResidualPairRanking({first_tail, second}, device);
          CheckResidualPairRanking({first, second_tail}, device);
          first_tail.x.encoding = Encoding::kSigned;
          CheckResidualPairRanking({first_tail, second_tail}, device);
        }
      }
    }
  }
}

// ---- chains

ConvSpec Pointwise(int64_t in, int64_t out, bool residual, int64_t stride = 1) {
  ConvSpec spec;
  spec.geometry.in_channels = in;
  spec.geometry.out_channels = out;
  spec.geometry.stride_h = spec.geometry.stride_w = stride;
  spec.x = {8, Encoding::kUnsigned};
  spec.w = {8, Encoding::kSigned};
  const auto channels = static_cast<size_t>(out);
  spec.weights.assign(channels * static_cast<size_t>(in), 1);
  spec.w_zero_point.assign(channels, 0);
  spec.bias.assign(channels, 0);
  spec.epilogue.multiplier.assign(channels, 0.01f);
  spec.epilogue.hi = 255;
  spec.epilogue.y_hi = 255;
  spec.epilogue.has_residual = residual;
  spec.epilogue.inner_scale = spec.epilogue.residual_scale = spec.epilogue.y_scale = 0.05f;
  return spec;
}

ConvChain ChainOf(const ConvSpec& first, const ConvSpec& second, int64_t batch, int64_t size,
                  const Device& device) {
  return {std::make_shared<const PackedConv>(first, device, std::span<const uint8_t>()),
          std::make_shared<const PackedConv>(second, device, std::span<const uint8_t>()),
          {batch, size, size, size, size},
          nullptr};
}

// The same where `residuals` makes those of `first`; `size` is that of the outputs.
ConvChain ChainOfThree(const ConvSpec& residuals, const ConvSpec& first, const ConvSpec& second,
                       int64_t batch, int64_t size, const Device& device) {
  ConvChain chain = ChainOf(first, second, batch, size, device);
  const auto shape = [&](const ConvGeometry& g) -> ConvShape {
    return {batch, size * g.stride_h, size * g.stride_w, size, size};
  };
  chain.shape = shape(first.geometry);
  chain.residuals = std::make_shared<const PackedConv>(residuals, device, std::span<const uint8_t>());
  chain.residuals_shape = shape(residuals.geometry);
  return chain;
}

void TestChains() {
  struct {
    int64_t in, between, out, size;
    bool is_found;
  } const sites[] = {{64, 256, 64, 56, true},    {64, 256, 128, 56, true},   {128, 512, 128, 28, true},
                     {128, 512, 256, 28, true},  {16, 16, 16, 3, true},      {48, 80, 208, 9, true},
                     {512, 2048, 512, 7, false}, {2048, 512, 2048, 7, false}};
  for (const Device& device : Devices()) {
    for (const auto& site : sites) {
      for (const int64_t batch : {1, 16, 128}) {
        const ConvChain chain = ChainOf(Pointwise(site.in, site.between, true),
                                        Pointwise(site.between, site.out, false), batch, site.size, device);
        const std::vector<ChainConfig> candidates = CandidateChains(chain);
        Expect(candidates.empty() != (site.is_found && device.capability == 90),
               device.name + ": " + std::to_string(site.between) + " channels between two convolutions");
        std::set<std::string> names;
        for (const ChainConfig& config : candidates) {
          Expect(names.insert(config.Text()).second, "a chain has a name of its own: " + config.Text());
          Expect(PlanConfig(*PlanChain(chain, config)) == config, "every candidate has a plan");
        }
        Expect(!ChainPays(chain) || !candidates.empty(), "what does not apply does not pay");
      }
    }
  }
  const Device& hopper = *std::find_if(Devices().begin(), Devices().end(),
                                       [](const Device& device) { return device.capability == 90; });
  const auto applies = [&](const ConvSpec& first, const ConvSpec& second) {
    return !CandidateChains(ChainOf(first, second, 16, 56, hopper)).empty();
  };
  const ConvSpec first = Pointwise(64, 256, true), second = Pointwise(256, 64, false);
  Expect(applies(first, second) && ChainPays(ChainOf(first, second, 16, 56, hopper)),
         "ResNet-50's first stage is worth a launch for two");
  Expect(applies(Pointwise(64, 256, false), second), "the first one need not add residuals");
  Expect(!applies(Pointwise(64, 256, true, 2), second) && !applies(first, Pointwise(256, 64, false, 2)),
         "strides");
  Expect(!applies(first, Pointwise(256, 64, true)), "residuals of the second");
  const auto reason = [&](const ConvSpec& a, const ConvSpec& b) {
    return kChainKernel.refuse(ChainOf(a, b, 16, 56, hopper), hopper);
  };
  Expect(reason(first, second).empty(), "a chain that applies has no reason not to");
  Expect(reason(Pointwise(64, 256, true, 2), second) == "a stride of the first convolution", "the first's");
  Expect(reason(first, Pointwise(256, 64, true)) == "residuals of the second convolution", "the second's");
  Expect(kChainKernel.microseconds(ChainOf(first, second, 16, 56, hopper), hopper) > 0, "it takes time");
  Expect(!applies(first, Pointwise(128, 64, false)), "channels that do not fit");
  ConvSpec floats = second;
  floats.epilogue.kind = EpilogueKind::kFloat;
  floats.epilogue.quantized_output = false;
  floats.epilogue.acc_scale = floats.epilogue.multiplier;
  Expect(!applies(first, floats), "an output that is no code");
}

// Windows of 3x3 in front of a chain, `size` that of all images.
ConvSpec Windows(int64_t in, int64_t out) {
  ConvSpec spec = Pointwise(in, out, false);
  ConvGeometry& g = spec.geometry;
  g.kernel_h = g.kernel_w = 3;
  g.pad_top = g.pad_left = g.pad_bottom = g.pad_right = 1;
  spec.weights.assign(static_cast<size_t>(9 * in * out), 1);
  return spec;
}
ConvChain Behind(const ConvSpec& windows, ConvChain chain, const Device& device) {
  const ConvShape& s = chain.shape;
  const ConvGeometry& g = windows.geometry;
  chain.windows = std::make_shared<const PackedConv>(windows, device, std::span<const uint8_t>());
  chain.windows_shape = {s.batch, s.out_h * g.stride_h, s.out_w * g.stride_w, s.out_h, s.out_w};
  return chain;
}

void TestChainsBehindWindows() {
  const ConvSpec first = Pointwise(64, 256, true), second = Pointwise(256, 64, false),
                 residuals = Pointwise(64, 256, false);
  for (const Device& device : Devices()) {
    for (const bool is_pair : {false, true}) {
      for (const int64_t batch : {1, 16, 128}) {
        const ConvChain chain = Behind(Windows(64, 64),
                                       is_pair ? ChainOfThree(residuals, first, second, batch, 56, device)
                                               : ChainOf(first, second, batch, 56, device),
                                       device);
        const std::vector<ChainConfig> candidates = CandidateChains(chain);
        Expect(candidates.empty() == (device.capability != 90), device.name + ": a bottleneck");
        for (const ChainConfig& config : candidates) {
          Expect(config.ranks == 1, "blocks share no tiles behind windows");
          Expect(PlanConfig(*PlanChain(chain, config)) == config, "every candidate has a plan");
        }
        Expect(!ChainPays(chain) || !candidates.empty(), "what does not apply does not pay");
      }
    }
  }
  const Device& hopper = *std::find_if(Devices().begin(), Devices().end(),
                                       [](const Device& device) { return device.capability == 90; });
  const auto reason = [&](const ConvSpec& windows, const ConvSpec& behind, int64_t size = 56) {
    return kChainKernel.refuse(Behind(windows, ChainOf(behind, second, 16, size, hopper), hopper), hopper);
  };
  const ConvSpec windows = Windows(64, 64);
  for (const int64_t size : {1, 7, 28, 56, 64, 112, 300})
    Expect(reason(windows, first, size).empty(), "images of " + std::to_string(size));
  Expect(reason(windows, first, 67) == "rows that are no equal parts of 33 to 64 outputs", "a prime width");
  ConvSpec other = windows;
  other.geometry.stride_h = 2;
  Expect(reason(other, first) == "windows with a stride", "a stride");
  other = windows;
  other.x_zero_point = 3;
  Expect(reason(other, first) == "padding that is not 0", "what lies outside is no 0");
  other = windows;
  other.epilogue.has_residual = true;
  Expect(!reason(other, first).empty(), "residuals of the windows");
  Expect(reason(Windows(96, 64), first) == "windows of channels that are no multiple of 64", "channels");
  Expect(reason(Windows(256, 64), first) == "windows of more than 32 steps along K", "many channels");
  Expect(reason(Windows(64, 128), first) == "windows that do not fit the convolution behind them",
         "channels that nobody reads");
  ConvSpec is_signed = windows;
  is_signed.x.encoding = Encoding::kSigned;
  Expect(!reason(is_signed, first).empty(), "codes of two signs");
  Expect(CandidateChains(
             Behind(Windows(128, 128),
                    ChainOf(Pointwise(128, 512, true), Pointwise(512, 128, false), 16, 28, hopper), hopper))
             .empty(),
         "weights that no block has room for");
}

void TestChainsOfThree() {
  const ConvSpec residuals = Pointwise(128, 512, false), first = Pointwise(256, 512, true, 2),
                 second = Pointwise(512, 128, false);
  const Device& hopper = *std::find_if(Devices().begin(), Devices().end(),
                                       [](const Device& device) { return device.capability == 90; });
  const auto applies = [&](const ConvSpec& a, const ConvSpec& b, const ConvSpec& c) {
    return !CandidateChains(ChainOfThree(a, b, c, 16, 28, hopper)).empty();
  };
  Expect(applies(residuals, first, second), "a pair with a stride");
  Expect(applies(Pointwise(128, 512, false, 3), first, second), "two strides");
  Expect(!applies(residuals, Pointwise(256, 512, false, 2), second), "nobody adds the residuals");
  Expect(!applies(Pointwise(128, 512, true), first, second), "residuals of the residuals");
  Expect(!applies(Pointwise(128, 256, false), first, second), "fewer residuals than sums");
  Expect(!applies(residuals, first, Pointwise(512, 128, false, 2)), "a stride behind the pair");
  ConvSpec is_signed = residuals;
  is_signed.x.encoding = Encoding::kSigned;
  Expect(!applies(is_signed, first, second), "codes of two signs");
  for (const Device& device : Devices()) {
    for (const int64_t batch : {1, 16, 128}) {
      const ConvChain chain = ChainOfThree(Pointwise(64, 256, false), Pointwise(64, 256, true),
                                           Pointwise(256, 64, false), batch, 56, device);
      const std::vector<ChainConfig> candidates = CandidateChains(chain);
      Expect(candidates.empty() == (device.capability != 90), device.name + ": a pair and the next");
      Expect(batch != 16 || device.capability != 90 || ChainPays(chain), "is worth a launch for both");
      for (const ChainConfig& config : candidates)
        Expect(PlanConfig(*PlanChain(chain, config)) == config, "every candidate has a plan");
      Expect(!ChainPays(chain) || !candidates.empty(), "what does not apply does not pay");
    }
  }
}

// ---- divisions

uint32_t Divide(uint32_t n, const FastDivisor& d) {
  const uint32_t high = static_cast<uint32_t>((uint64_t{n} * d.multiplier) >> 32);
  return (high + n) >> d.shift;
}

void TestDivisions() {
  constexpr uint32_t kLast = 0x7fffffff;
  std::vector<uint32_t> divisors = {kLast, kLast - 1, 1u << 30, (1u << 30) + 1};
  for (uint32_t d = 1; d < 3000; ++d) divisors.push_back(d);
  for (const uint32_t divisor : divisors) {
    const FastDivisor d = MakeDivisor(divisor);
    for (const uint64_t quotient :
         {uint64_t{0}, uint64_t{1}, uint64_t{2}, uint64_t{kLast} / divisor / 2, uint64_t{kLast} / divisor}) {
      const uint64_t n = quotient * divisor;
      for (const uint64_t near : {n, n + 1, n + divisor - 1}) {
        if (near > kLast) continue;
        Expect(Divide(static_cast<uint32_t>(near), d) == near / divisor, "a multiplication divides");
      }
    }
  }
}

// ---- offsets and packed weights

struct Case {
  const char* name;
  ConvGeometry geometry;
  int64_t batch, in_h, in_w;
  Encoding x, w;
  int32_t w_zero_point;
};

ConvGeometry Geometry(int64_t in, int64_t out, int64_t kernel, int64_t stride, int64_t pad) {
  ConvGeometry g;
  g.in_channels = in;
  g.out_channels = out;
  g.kernel_h = g.kernel_w = kernel;
  g.stride_h = g.stride_w = stride;
  g.pad_top = g.pad_left = g.pad_bottom = g.pad_right = pad;
  return g;
}

std::vector<Case> Cases() {
  constexpr Encoding kU = Encoding::kUnsigned, kS = Encoding::kSigned;
  std::vector<Case> cases = {
      {"1x1", Geometry(64, 40, 1, 1, 0), 2, 5, 7, kU, kS, 0},
      {"3x3 with pads", Geometry(48, 32, 3, 1, 1), 2, 5, 6, kU, kS, 0},
      {"3x3 with a stride, K beyond a tile", Geometry(160, 20, 3, 2, 1), 1, 9, 8, kS, kS, 0},
      {"7x7 of 3 channels", Geometry(3, 16, 7, 2, 3), 1, 17, 15, kU, kS, 0},
      {"5x5 of 20 channels", Geometry(20, 9, 5, 1, 2), 1, 6, 6, kS, kS, 0},
      {"weights that leave int8", Geometry(32, 33, 3, 1, 1), 1, 6, 5, kU, kU, 20},
      {"weights of 5 channels that leave int8", Geometry(5, 9, 3, 1, 1), 1, 6, 5, kS, kU, 200},
      {"weights that a zero point brings into int8", Geometry(16, 32, 1, 1, 0), 1, 3, 3, kU, kU, 128},
  };
  Case sides{"sides that differ", Geometry(16, 24, 3, 1, 0), 2, 9, 4, kU, kS, 0};
  sides.geometry.kernel_h = 2, sides.geometry.stride_h = 3, sides.geometry.dilation_h = 2;
  sides.geometry.pad_left = 2, sides.geometry.pad_bottom = 1;
  cases.push_back(sides);
  Case groups{"groups", Geometry(96, 64, 3, 1, 1), 1, 5, 5, kU, kS, 0};
  groups.geometry.group = 2;
  cases.push_back(groups);
  return cases;
}

ConvSpec SpecOf(const Case& c, std::mt19937& random) {
  ConvSpec spec;
  spec.geometry = c.geometry;
  spec.x = {8, c.x};
  spec.w = {8, c.w};
  spec.x_zero_point = c.x == Encoding::kSigned ? -5 : 3;
  const auto channels = static_cast<size_t>(c.geometry.out_channels);
  spec.weights.resize(channels * static_cast<size_t>(c.geometry.K()));
  for (uint8_t& code : spec.weights) code = static_cast<uint8_t>(random());
  spec.w_zero_point.assign(channels, c.w_zero_point);
  for (size_t i = 0; i < channels; ++i) spec.bias.push_back(static_cast<int32_t>(random() % 2000) - 1000);
  spec.epilogue.kind = EpilogueKind::kFloat;
  spec.epilogue.quantized_output = false;
  spec.epilogue.acc_scale.assign(channels, 1.0f);
  return spec;
}

int32_t Code(const ConvSpec& spec, uint8_t byte) {
  return spec.x.encoding == Encoding::kSigned ? static_cast<int8_t>(byte) : byte;
}

// The definition: the sum of one output.
int64_t Definition(const ConvSpec& spec, const ConvShape& shape, const std::vector<uint8_t>& x, int64_t pixel,
                   int64_t channel) {
  const ConvGeometry& g = spec.geometry;
  const int64_t image = pixel / (shape.out_h * shape.out_w), rest = pixel % (shape.out_h * shape.out_w);
  const int64_t group = channel / g.GroupOut();
  int64_t sum = 0;
  int64_t index = channel * g.K();
  for (int64_t ty = 0; ty < g.kernel_h; ++ty) {
    for (int64_t tx = 0; tx < g.kernel_w; ++tx) {
      const int64_t y = rest / shape.out_w * g.stride_h - g.pad_top + ty * g.dilation_h;
      const int64_t column = rest % shape.out_w * g.stride_w - g.pad_left + tx * g.dilation_w;
      for (int64_t i = 0; i < g.GroupIn(); ++i, ++index) {
        if (y < 0 || y >= shape.in_h || column < 0 || column >= shape.in_w) continue;
        const int64_t at =
            ((image * shape.in_h + y) * shape.in_w + column) * g.in_channels + group * g.GroupIn() + i;
        const int64_t value = Code(spec, x[static_cast<size_t>(at)]) - spec.x_zero_point;
        sum += value * spec.WeightValue(channel, index);
      }
    }
  }
  return sum;
}

// The input as the tile kernels read it: channels of a group filled up to `channels`.
std::vector<uint8_t> Repacked(const ConvGeometry& g, const std::vector<uint8_t>& x, int64_t channels) {
  std::vector<uint8_t> out;
  for (size_t at = 0; at < x.size(); at += static_cast<size_t>(g.GroupIn())) {
    const auto first = x.begin() + static_cast<std::ptrdiff_t>(at);
    out.insert(out.end(), first, first + g.GroupIn());
    out.resize(out.size() + static_cast<size_t>(channels - g.GroupIn()), 0x77);
  }
  return out;
}

// A walk along one output pixel's row of the matrix, chunk by chunk, as conv_tile.cuh takes it.
class Walk {
 public:
  Walk(const GatherParams& p, int pixel, int group, int k) : p_(p) {
    const int image = Quotient(pixel, p.by_image), rest = pixel - image * Divisor(p.by_image);
    const int oy = Quotient(rest, p.by_row), ox = rest - oy * Divisor(p.by_row);
    const int iy = oy * p.stride_h - p.pad_top, ix = ox * p.stride_w - p.pad_left;
    const int tap = Quotient(k, p.by_channels), ty = Quotient(tap, p.by_kernel_w);
    channel_ = k - tap * p.channels;
    tx_ = tap - ty * p.kernel_w;
    offset_ = ((image * p.in_h + iy) * p.in_w + ix) * p.pixel_bytes + group * p.channels +
              (ty * p.dilation_h * p.in_w + tx_ * p.dilation_w) * p.pixel_bytes + channel_;
    position_ = (iy + ty * p.dilation_h) * 65536 + ix + tx_ * p.dilation_w;
  }
  bool Inside() const { return ((position_ | (p_.last_position - position_)) & 0x80008000) == 0; }
  int offset() const { return offset_; }
  void Step() {
    channel_ += kTileK;
    offset_ += kTileK;
    while (channel_ >= p_.channels) {
      channel_ -= p_.channels;
      offset_ += p_.tap_step;
      position_ += p_.dilation_w;
      if (++tx_ == p_.kernel_w) {
        tx_ = 0;
        offset_ += p_.tap_row_step;
        position_ += p_.tap_row_position;
      }
    }
  }

 private:
  static int Quotient(int n, const FastDivisor& d) {
    return static_cast<int>(Divide(static_cast<uint32_t>(n), d));
  }
  static int Divisor(const FastDivisor& d) { return static_cast<int>(d.divisor); }

  const GatherParams& p_;
  int offset_ = 0, position_ = 0, channel_ = 0, tx_ = 0;
};

// Where channel n of a group lies among the rows of a weight tile: FinishTile's order.
int64_t TileRow(int64_t n) { return n / 16 * 16 + n % 4 / 2 * 8 + n % 16 / 4 * 2 + n % 2; }

// The sum that a tile kernel forms from packed weights and gathered bytes, the folded bias included, zero
// points of weights taken away.
uint32_t TileSum(const ConvSpec& spec, const GatherParams& p, const std::vector<uint8_t>& x, int pixel,
                 int64_t channel, int vector) {
  const int64_t group = channel / p.n, row = TileRow(channel % p.n);
  uint32_t sum = static_cast<uint32_t>(p.epilogue.bias[channel]);
  const int32_t zero = p.epilogue.w_zero != nullptr ? p.epilogue.w_zero[channel] : 0;
  for (int start = 0; start < kTileK && start < p.k; start += vector) {
    Walk walk(p, pixel, static_cast<int>(group), start);
    for (int k = start; k < p.k; k += kTileK, walk.Step()) {
      const uint8_t* const tile = p.weights + ((group * p.k_tiles + k / kTileK) * p.n_padded + row) * kTileK;
      for (int i = 0; i < vector; ++i) {
        const int64_t at = (k + i) % kTileK;
        const auto weight = static_cast<int8_t>(tile[((at / 16) ^ (row % 8)) * 16 + at % 16]);
        const bool inside = p.all_inside || walk.Inside();
        const uint8_t byte =
            inside ? x[static_cast<size_t>(walk.offset() + i)] : static_cast<uint8_t>(p.fill);
        sum += static_cast<uint32_t>(Code(spec, byte) * (weight - zero));
      }
    }
  }
  return sum;
}

void CheckCase(const Case& c) {
  std::mt19937 random(7);
  const ConvSpec spec = SpecOf(c, random);
  const ConvGeometry& g = spec.geometry;
  const ConvShape shape = InferConvShape(g, c.batch, c.in_h, c.in_w);
  std::vector<uint8_t> x(static_cast<size_t>(c.batch * c.in_h * c.in_w * g.in_channels));
  for (uint8_t& code : x) code = static_cast<uint8_t>(random());

  const PackedConv packed(spec, DeviceOf(80, 108, 164), {});
  const ConvProblem problem = packed.Problem(shape);
  Expect(problem.tiled, std::string(c.name) + ": tile kernels apply");
  const std::vector<ConvConfig> ranked = RankConfigs(problem, packed.On());
  const ConvConfig& config =
      *std::find_if(ranked.begin(), ranked.end(), [](const auto& each) { return each.stages > 0; });
  GatherParams p = GatherParamsOf(problem, config);
  static_cast<ConvParams&>(p) = packed.Params(shape, config);
  const std::vector<uint8_t> gathered = packed.Repacks() ? Repacked(g, x, packed.Channels()) : x;
  int wrong = 0;
  for (int64_t pixel = 0; pixel < shape.OutPixels(); ++pixel) {
    for (int64_t channel = 0; channel < g.out_channels; ++channel) {
      const int64_t sum = Definition(spec, shape, x, pixel, channel);
      const auto at = static_cast<size_t>(channel);
      const uint32_t got =
          TileSum(spec, p, gathered, static_cast<int>(pixel), channel, problem.vector16 ? 16 : 4);
      wrong += got == static_cast<uint32_t>(sum + spec.bias[at]) ? 0 : 1;
    }
  }
  Expect(wrong == 0, std::string(c.name) + ": " + std::to_string(wrong) + " sums differ from the definition");

  const std::vector<uint8_t> image = packed.Bytes();
  ConvSpec bare = spec;
  bare.weights.clear();
  Expect(PackedConv(bare, packed.On(), image).Bytes() == image, "a packed node is restored without weights");
  std::vector<uint8_t> cut(image.begin(), image.end() - 1);
  Expect(Throws([&] { PackedConv(bare, packed.On(), cut); }), "a packed node that is cut short is refused");
}

// ---- weights of cells, strips of pooled rows

ConvSpec StemSpec(std::mt19937& random) {
  ConvSpec spec;
  ConvGeometry& g = spec.geometry;
  g.in_channels = 1 + random() % 4;
  g.out_channels = 16 * (1 + random() % 8);
  g.stride_h = g.stride_w = 2;
  g.pad_top = random() % 4;
  g.pad_left = random() % 4;
  g.kernel_h = 1 + random() % (8 - g.pad_top % 2);
  g.kernel_w = 1 + random() % (8 - g.pad_left % 2);
  spec.x = {8, Encoding::kUnsigned};
  spec.w = {8, Encoding::kSigned};
  const auto channels = static_cast<size_t>(g.out_channels);
  spec.weights.resize(channels * static_cast<size_t>(g.K()));
  for (uint8_t& code : spec.weights) code = static_cast<uint8_t>(random());
  spec.w_zero_point.assign(channels, 0);
  spec.bias.assign(channels, 0);
  spec.epilogue.multiplier.assign(channels, 0.01f);
  return spec;
}

// What the rows of cells in the registers' slots are multiplied with, as fused/stem_pool_sm90.cu has it.
// Weights as bits, and which of them run as such.
void TestBits() {
  const auto bits_of = [](std::vector<int8_t> values, int32_t zero = 0) {
    Int8Weights weights;
    weights.values = std::move(values);
    weights.zero = {zero};
    const WeightBits bits = BitsOf(weights);
    return std::vector<int>{bits.fit, bits.shift, bits.lowest};
  };
  Expect(bits_of({1, -1, 1}) == std::vector<int>{1, 1, -1}, "bipolar");
  Expect(bits_of({-2, 2, 2}) == std::vector<int>{1, 2, -2}, "twice of them");
  Expect(bits_of({5, 5}) == std::vector<int>{1, 0, 5}, "all the same");
  Expect(bits_of({-3, 1})[0] == 1 && bits_of({-128, 0})[0] == 1, "two values a power of 2 apart");
  Expect(bits_of({-3, 0}) == std::vector<int>{2, 0, -3}, "other two");
  Expect(bits_of({0, -1, 1}) == std::vector<int>{2, 0, -1}, "ternary");
  Expect(bits_of({-4, 2, 0, -2}) == std::vector<int>{2, 1, -4}, "twice of two bits");
  Expect(bits_of({0, 4})[0] == 1 && bits_of({0, 4, 1})[0] == 0, "more than two bits apart");
  Expect(bits_of({1, -1}, 3)[0] == 0 && bits_of({})[0] == 0, "zero points, no weights");

  std::set<int> places;
  for (int channel = 0; channel < kBitWord; ++channel) places.insert(BitOfChannel(channel));
  Expect(places.size() == kBitWord && *places.begin() == 0 && *places.rbegin() == kBitWord - 1,
         "a bit for each channel");

  const Device hopper = DeviceOf(90, 132, 228);
  ConvProblem problem{.m = 3136, .n = 256, .k = 2304, .tiled = true, .floats = true};
  problem.geometry.in_channels = problem.geometry.out_channels = problem.channels = 256;
  problem.geometry.kernel_h = problem.geometry.kernel_w = 3;
  problem.shape = {16, 16, 16, 14, 14};
  problem.x = {2, Encoding::kUnsigned};
  problem.w_bits.fit = 1;
  Expect(kBitsRow.refuse(problem, hopper).empty(), "w1a2");
  ConvProblem of_planes = problem;
  of_planes.planes.x = 2;
  Expect(RankConfigs(of_planes, hopper).front().kernel == &kBitsRow, "an eighth of the products");
  for (const Device& device : Devices()) {
    Expect(kBitsRow.refuse(problem, device).empty() == (device.capability == 90), device.name);
  }
  ConvProblem strided = problem;
  strided.geometry.stride_h = strided.geometry.stride_w = 2;
  Expect(!kBitsRow.refuse(strided, hopper).empty(), "a stride");
  ConvProblem pointwise = problem;
  pointwise.geometry.kernel_h = pointwise.geometry.kernel_w = 1;
  pointwise.shape = {16, 14, 14, 14, 14};
  pointwise.k = 256;
  const std::vector<ConvConfig> ranked = RankConfigs(pointwise, hopper);
  Expect(std::all_of(ranked.begin(), ranked.end(),
                     [](const ConvConfig& each) { return each.packs == (each.kernel == &kBitsRow); }),
         "blocks cut no bytes that they read once");
  Expect(!ranked.front().packs, "a small product is not worth a kernel that packs");
  ConvProblem large = pointwise;
  large.x.bits = 1;
  large.m = large.n = large.k = large.channels = 4096;
  large.geometry.in_channels = large.geometry.out_channels = 4096;
  large.shape = {4096, 1, 1, 1, 1};
  Expect(RankConfigs(large, hopper).front().packs, "a large one is");
  ConvProblem rows = pointwise;
  rows.m = 64;
  rows.shape = {64, 1, 1, 1, 1};
  const auto takes_rows = [&](const OperandType& x, int w_bits) {
    rows.x = x;
    rows.w_bits.fit = w_bits;
    return kFlatBitsRow.refuse(rows, hopper).empty();
  };
  Expect(takes_rows({4, Encoding::kSigned}, 1) && takes_rows({2, Encoding::kUnsigned}, 2), "w1a4, w2a2");
  Expect(!takes_rows({4, Encoding::kUnsigned}, 2) && !takes_rows({5, Encoding::kUnsigned}, 1) &&
             !takes_rows({1, Encoding::kBipolar}, 1) && !takes_rows({1, Encoding::kUnsigned}, 0),
         "eight products, five bits, bipolar codes, weights that are no bits");
  ConvProblem long_rows = rows;
  long_rows.x = {2, Encoding::kUnsigned};
  long_rows.w_bits.fit = 1;
  long_rows.geometry.in_channels = 25088;
  Expect(!kFlatBitsRow.refuse(long_rows, hopper).empty(), "rows that no block has room for");
  rows.m = 513;
  Expect(!takes_rows({1, Encoding::kUnsigned}, 1), "many rows");
  problem.x.bits = 3;
  Expect(!kBitsRow.refuse(problem, hopper).empty(), "codes of three bits");
  problem.x = {2, Encoding::kSigned};
  Expect(!kBitsRow.refuse(problem, hopper).empty(), "signed codes");
}

void TestCells() {
  std::mt19937 random(11);
  constexpr int kNodes = 40;
  for (int node = 0; node < kNodes; ++node) {
    const ConvSpec spec = StemSpec(random);
    const ConvGeometry& g = spec.geometry;
    const PackedConv packed(spec, DeviceOf(90, 132, 228), {});
    const uint8_t* const weights = packed.CellWeights();
    Expect(weights != nullptr, "a stem has weights of cells");
    if (weights == nullptr) continue;
    const int64_t channels = g.in_channels;
    int wrong = 0;
    for (int order = 0; order < kCellTaps; ++order) {
      for (int64_t c = 0; c < g.out_channels; ++c) {
        const int64_t own = c % kCellTileN % 16, row = own / 2 * 8 + c % kCellTileN / 16 * 2 + own % 2;
        for (int64_t i = 0; i < kCellTaps * kCellTaps * 4 * channels; ++i) {
          const int64_t byte = i % (4 * channels), t = i / (4 * channels) % kCellTaps,
                        slot = i / (4 * channels) / kCellTaps, word = slot % 2 * channels + byte / 4,
                        half = (slot / 2 + order / 2) % 2,
                        matrix = (order % 2 * 2 + half) * channels + word / 2;
          const auto found = static_cast<int8_t>(
              weights[c / kCellTileN * channels * kCellChannelBytes + matrix * kCellMatrixBytes +
                      row / 8 * 256 + word % 2 * 128 + row % 8 * 16 + t * 4 + byte % 4]);
          const int64_t pixel = byte / channels, cell_row = (slot + kCellTaps - order) % kCellTaps,
                        y = 2 * cell_row + pixel / 2 - g.pad_top % 2, x = 2 * t + pixel % 2 - g.pad_left % 2;
          const bool inside = y >= 0 && y < g.kernel_h && x >= 0 && x < g.kernel_w;
          const int expected =
              inside ? spec.WeightValue(c, c * g.K() + (y * g.kernel_w + x) * channels + byte % channels) : 0;
          wrong += found == expected ? 0 : 1;
        }
      }
    }
    Expect(wrong == 0, std::to_string(wrong) + " weights of cells are not where the kernel reads them");
  }
}

void TestStrips() {
  std::mt19937 random(12);
  for (const int64_t batch : {1, 2, 7, 16, 128, 1000}) {
    const auto packed = std::make_shared<const PackedConv>(StemSpec(random), DeviceOf(90, 132, 228),
                                                           std::span<const uint8_t>());
    const ConvShape shape = InferConvShape(packed->Geometry(), batch, 100, 240);
    const PooledConv pooled{packed, {}, shape, {}, (shape.out_h + 1) / 2, (shape.out_w + 1) / 2};
    const PoolStrips strips = ChooseStrips(pooled);
    Expect(strips.strips >= 1 && strips.rows >= 1, "no strip is empty");
    Expect(strips.strips * strips.rows + strips.longer == pooled.pooled_h && strips.longer < strips.strips,
           "strips make up the image");
  }
  ConvSpec falling = StemSpec(random);
  falling.epilogue.multiplier.front() = -1.0f;
  Expect(PackedConv(falling, DeviceOf(90, 132, 228), {}).CellWeights() == nullptr,
         "codes that fall with their sums are not pooled before they are rounded");
  // Thresholds of a falling channel are turned around, with its weights.
  ConvSpec thresholds = StemSpec(random);
  Epilogue& e = thresholds.epilogue;
  const size_t channels = thresholds.bias.size();
  e = {};
  e.kind = EpilogueKind::kThresholds;
  e.threshold_count = 2;
  e.base.assign(channels, 0);
  e.dir.assign(channels, 1);
  e.dir[1] = -1;
  for (const int32_t dir : e.dir) e.thresholds.insert(e.thresholds.end(), {-100 * dir, 100 * dir});
  std::fill(thresholds.weights.begin(), thresholds.weights.end(), static_cast<uint8_t>(-127));
  const auto pools = [&] {
    return PackedConv(thresholds, DeviceOf(90, 132, 228), {}).CellWeights() != nullptr;
  };
  Expect(pools(), "thresholds that fall");
  thresholds.weights.back() = static_cast<uint8_t>(-128);
  Expect(pools(), "a weight of -128 where codes rise");
  thresholds.weights[static_cast<size_t>(thresholds.geometry.K())] = static_cast<uint8_t>(-128);
  Expect(!pools(), "a weight whose negative is no int8");
}

// ---- the second rounding on a line

Epilogue AddingEpilogue(std::mt19937& random) {
  const auto coin = [&] { return random() % 2 == 0; };
  const auto scale = [&](float least) {
    return least * std::exp2(static_cast<float>(random() % 4000) * 1e-3f);
  };
  Epilogue e;
  e.has_residual = true;
  e.multiplier = {1.0f};
  e.lo = coin() ? -128 : 0;
  e.hi = e.lo + 255;
  e.zero_point = coin() ? e.lo : e.lo + static_cast<int32_t>(random() % 256);
  e.residual_signed = coin();
  e.residual_zero_point = (e.residual_signed ? -128 : 0) + static_cast<int32_t>(random() % 256);
  e.y_lo = coin() ? -128 : 0;
  e.y_hi = e.y_lo + (coin() ? 255 : static_cast<int32_t>(random() % 255));
  e.y_zero_point = coin() ? e.y_lo : e.y_lo + static_cast<int32_t>(random() % 256);
  const bool ties = random() % 8 == 0;  // powers of 2
  e.inner_scale = ties ? 0.25f : scale(0.01f);
  e.residual_scale = ties ? 0.125f : scale(0.01f);
  e.y_scale = ties ? 0.5f : scale(0.02f);
  return e;
}

void TestSums() {
  std::mt19937 random(3);
  constexpr int kNodes = 60;
  int found = 0;
  for (int node = 0; node < kNodes; ++node) {
    const Epilogue e = AddingEpilogue(random);
    const auto line = FitSum(e);
    if (!line.has_value()) continue;
    ++found;
    int wrong = 0;
    const int32_t first = e.residual_signed ? -128 : 0;
    for (int32_t q = e.lo; q <= e.hi; ++q) {
      for (int32_t r = first; r < first + 256; ++r) {
        const float residual =
            SumLine::kResidual + static_cast<float>(line->low) / 256 + static_cast<float>(r - first);
        const float sum = std::fma(static_cast<float>(q - e.hi + 256), line->inner_gain,
                                   std::fma(residual, line->residual_gain, line->offset));
        const int32_t code = std::min(e.y_hi, e.y_lo + static_cast<int32_t>(std::max(std::rint(sum), 0.0f)));
        wrong += code == EpilogueCode(e, q - e.zero_point, 0, r) ? 0 : 1;
      }
    }
    Expect(wrong == 0, std::to_string(wrong) + " pairs of codes have other sums on the line");
  }
  Expect(found > kNodes * 3 / 4, "most sums fit a line: " + std::to_string(found));
}

// ---- codes of float tails on lines

// The code of a sum on the line of a single channel.
int32_t CodeOnLine(const Epilogue& e, bool fuses, const FourLines& four, int64_t sum) {
  const auto [gain, offset, shift] = four.lines[0];
  const float f = 12582912.0f + static_cast<float>(sum + shift), line = std::fma(f, gain, offset),
              saturated = std::clamp(line, 0.0f, 1.0f);
  const auto base = static_cast<float>(LineBaseOf(e));
  const CodeRange codes = FirstCodesOf(e);
  if (e.has_residual) {
    const float start = base + 12582912.0f, product = saturated * four.factor,
                code = fuses ? std::fma(saturated, four.factor, start) : product + start;
    return static_cast<int32_t>(code - 12582912.0f) + codes.zero_point;
  }
  return static_cast<int32_t>(std::rint(std::fma(saturated, four.factor, base))) - (codes.lo < 0 ? 128 : 0);
}

// Every sum of a few channels, and that most of many have a line.
void TestLines() {
  std::mt19937 random(6);
  const auto real = [&](float least, float most) {
    return least + (most - least) * static_cast<float>(random() % 100000) * 1e-5f;
  };
  constexpr int kChannels = 500;
  int found = 0, others = 0;
  for (int i = 0; i < kChannels; ++i) {
    Epilogue e;
    e.kind = EpilogueKind::kTail;
    e.tail = {TailStep::kBias};
    e.y_lo = random() % 2 == 0 ? -128 : 0;
    e.y_hi = e.y_lo + (random() % 2 == 0 ? 255 : static_cast<int32_t>(random() % 255));
    e.y_zero_point = e.y_lo + static_cast<int32_t>(random() % 256);
    e.y_scale = random() % 8 == 0 ? 0.0625f : real(0.01f, 0.1f);
    const float most = real(300.0f, 40000.0f);
    e.acc_scale = {random() % 8 == 0 ? 0x1p-10f : e.y_scale * 200.0f / most};
    e.tail_bias = {real(-1.0f, 1.0f)};
    const SumRange sums{-static_cast<int64_t>(4 * most), static_cast<int64_t>(4 * most)};
    const bool adds = random() % 2 == 0, fuses = random() % 2 == 0;
    if (adds) {
      e.adds_behind_tail = e.has_residual = true;
      e.inner_scale = e.y_scale;
      e.zero_point = e.y_zero_point;
      e.lo = e.y_lo;
      e.hi = e.y_hi;
    }
    const auto four = LineFitter(e, fuses).Fit(0, {&sums, 1});
    if (!four) continue;
    ++found;
    others += four->factor != static_cast<float>(e.y_hi - e.y_lo) ? 1 : 0;
    int wrong = 0;
    for (int64_t sum = sums.least; sum <= sums.most; ++sum)
      wrong += CodeOnLine(e, fuses, *four, sum) == FirstCode(e, sum, 0) ? 0 : 1;
    Expect(wrong == 0, std::to_string(wrong) + " sums have other codes on the line");
  }
  Expect(found > kChannels * 9 / 10, "most tails have a line: " + std::to_string(found));
  Expect(others > 0, "some have none with the first factor");
}

// Thresholds of a quantizer, in either direction: each sum of a few channels, and that all have a line.
void TestLinesOfThresholds() {
  std::mt19937 random(7);
  for (int i = 0; i < 100; ++i) {
    Epilogue e;
    e.kind = EpilogueKind::kThresholds;
    e.threshold_count = 1 + static_cast<int64_t>(random() % 15);
    const double first = static_cast<double>(random() % 2000) - 1000.0,
                 step = 0.375 + static_cast<double>(random() % 3000) * 0.125;
    for (int64_t k = 0; k < e.threshold_count; ++k)
      e.thresholds.push_back(static_cast<int32_t>(std::ceil(first + step * static_cast<double>(k))));
    // What a channel never reaches, as where a batch normalization multiplies by 0.
    if (i % 10 == 0) {
      for (int32_t& threshold : e.thresholds)
        threshold =
            random() % 2 == 0 ? std::numeric_limits<int32_t>::min() : std::numeric_limits<int32_t>::max();
      std::sort(e.thresholds.begin(), e.thresholds.end());
    }
    e.dir = {random() % 2 == 0 ? 1 : -1};
    if (e.dir[0] < 0) std::reverse(e.thresholds.begin(), e.thresholds.end());
    e.base = {static_cast<int32_t>(random() % 100)};
    // Of a single threshold, as binary codes have it, sums may be as large as those of 27 products of bytes.
    const int64_t most = e.threshold_count == 1 ? 440000 : 6000;
    const SumRange sums{-most, most};
    const auto four = LineFitter(e, true).Fit(0, {&sums, 1});
    Expect(four.has_value(), "thresholds of a quantizer have a line");
    if (!four) continue;
    int wrong = 0;
    for (int64_t sum = sums.least; sum <= sums.most; ++sum)
      wrong += CodeOnLine(e, true, *four, sum) == EpilogueCode(e, static_cast<int32_t>(sum), 0, 0) ? 0 : 1;
    Expect(wrong == 0, std::to_string(wrong) + " sums have other codes on the line of thresholds");
  }
}

// How the kernel of a chain finishes its products: the residuals', where there are any, the first and the
// second.
std::vector<Finish> FinishesOf(const ConvChain& chain) {
  const auto plan = PlanChain(chain, CandidateChains(chain).front());
  Queue queue(nullptr);
  LaunchChain(*plan, nullptr, nullptr, nullptr, nullptr, queue);
  std::vector<Finish> finishes;
  if (launched_chain.makes_residuals) finishes.push_back(FinishOf(launched_chain.residuals.epilogue));
  const auto [first, second] = FinishOf(launched_chain);
  finishes.push_back(first);
  finishes.push_back(second);
  return finishes;
}

// The kernel has instances for floats of both convolutions of a chain and for integers of all, and residuals
// that it makes are floats where they are multiplied alone.
void TestFinishesOfChains() {
  using enum Finish;
  const Device hopper = DeviceOf(90, 132, 228);
  const ConvSpec plain = Pointwise(64, 256, false), second = Pointwise(256, 64, false);
  ConvSpec adding = Pointwise(64, 256, true), few_codes = second, few_codes_first = plain, is_signed = second,
           signed_x = plain, half = second, adding_half = adding;
  few_codes.epilogue.hi = few_codes_first.epilogue.hi = 15;
  half.epilogue.hi = adding_half.epilogue.y_hi = 127;
  is_signed.x.encoding = signed_x.x.encoding = Encoding::kSigned;
  const auto of = [&](const ConvSpec& a, const ConvSpec& b) {
    return FinishesOf(ChainOf(a, b, 16, 28, hopper));
  };
  Expect(of(plain, second) == std::vector{kFloatsFromZero, kFloatsFromZero}, "floats of both");
  Expect(of(adding, second) == std::vector{kFloatsOnLine, kFloatsFromZero}, "residuals on a line");
  Expect(of(plain, few_codes) == std::vector{kFloats, kFloats}, "fewer codes of the second");
  Expect(of(few_codes_first, second) == std::vector{kFloats, kFloats}, "fewer codes of the first");
  ConvSpec adding_few = adding;
  adding_few.epilogue.hi = adding_few.epilogue.y_hi = 15;
  Expect(of(adding_few, few_codes) == std::vector{kWordsTailOnLine, kTail}, "few codes of both");
  Expect(of(adding_half, half) == std::vector{kCappedOnLine, kCappedFromZero}, "128 codes of both");
  Expect(of(plain, half) == std::vector{kFloats, kFloats}, "128 codes of the second alone");
  // Of float tails the chain's first one adds residuals itself, to codes of one grid.
  ConvSpec tail = half, adding_in_tail = adding_half;
  for (ConvSpec* const spec : {&tail, &adding_in_tail}) {
    Epilogue& e = spec->epilogue;
    e.kind = EpilogueKind::kTail;
    e.acc_scale = e.multiplier;
    e.tail_bias.resize(e.multiplier.size(), 0.5f);
    e.tail = {TailStep::kBias};
    e.y_scale = 1.0f;
    e.y_hi = 127;
  }
  adding_in_tail.epilogue.tail.push_back(TailStep::kResidual);
  Expect(of(adding_in_tail, tail) == std::vector{kCappedInTail, kLackingTail}, "residuals of a tail");
  ConvSpec in_middle = adding_in_tail;
  in_middle.epilogue.y_zero_point = 64;
  Expect(CandidateChains(ChainOf(in_middle, tail, 16, 28, hopper)).empty(), "codes on both sides of zero");
  Expect(of(adding, is_signed) == std::vector{kIntegers, kIntegers}, "codes between have a sign");
  Expect(of(signed_x, second) == std::vector{kIntegers, kIntegers}, "codes before have a sign");
  ConvSpec shortcut = plain;
  shortcut.epilogue.zero_point = 100;
  Expect(FinishesOf(ChainOfThree(shortcut, adding, second, 16, 28, hopper)) ==
             std::vector{kFloats, kFloatsOnLine, kFloatsFromZero},
         "residuals that are made are floats");
  Expect(FinishesOf(ChainOfThree(plain, adding, second, 16, 28, hopper)) ==
             std::vector{kIntegers, kFloatsAdding, kFloats},
         "residuals of floats that are clipped at 0 are integers");
  // Scales of few digits, whose sums often tie, until there is no line.
  std::mt19937 random(5);
  const auto scale = [&] { return static_cast<float>(50 + random() % 99) / 5100.0f; };
  Finish first = kFloatsOnLine;
  for (int draws = 0; first == kFloatsOnLine && draws < 500; ++draws) {
    adding.epilogue.inner_scale = scale();
    adding.epilogue.residual_scale = scale();
    adding.epilogue.y_scale = scale();
    const Addition addition = ChainOf(adding, second, 16, 28, hopper).first->EpilogueOf().addition;
    if (addition == Addition::kInverseFromLowest) first = of(adding, second)[0];
  }
  Expect(first == kFloatsInverse, "residuals that no line has");
}

// Sums of one channel, of weights `w` and codes of a byte, as they reach the epilogue of a tile kernel.
SumForm FormOf(ConvSpec spec, int8_t w, int32_t bias, float multiplier) {
  std::fill(spec.weights.begin(), spec.weights.end(), static_cast<uint8_t>(w));
  spec.bias[5] = bias;
  spec.epilogue.multiplier[5] = multiplier;
  const PackedConv conv(spec, DeviceOf(90, 132, 227), {});
  const ConvParams p = conv.Params({1, 8, 8, 8, 8}, {&kWgmmaRow, 64, 32, 1});
  const ConvConfig split{&kWgmmaRow, 64, 32, 1, 2};
  Expect(conv.Params({1, 8, 8, 8, 8}, split).epilogue.sums == SumForm::kInteger,
         "sums that others come to are integers");
  ConvSpec signed_x = spec;
  signed_x.x.encoding = Encoding::kSigned;
  const PackedConv of_signed(signed_x, DeviceOf(90, 132, 227), {});
  Expect(FinishOf(of_signed.Params({1, 8, 8, 8, 8}, {&kWgmmaRow, 64, 32, 1}).epilogue) == Finish::kIntegers,
         "sums of codes with a sign are integers where pixels are gathered");
  ConvConfig boxes{&kWgmmaRow, 64, 32, 1};
  boxes.boxes = true;
  const Finish of_boxes = FinishOf(of_signed.Params({1, 8, 8, 8, 8}, boxes).epilogue);
  Expect((of_boxes != Finish::kIntegers) == of_signed.Problem({1, 8, 8, 8, 8}).floats &&
             (of_boxes != Finish::kIntegers || p.epilogue.sums == SumForm::kInteger),
         "and floats, where those of codes without a sign are some, if boxes are fetched");
  return p.epilogue.sums;
}

// 256 products of 127 and 255 are 98048 less than 2^23, of 64 and 255 16384 less than 2^22.
void TestSumForms() {
  const ConvSpec plain = Pointwise(256, 32, false), adding = Pointwise(256, 32, true);
  constexpr float kSmall = 0x1p-20f, kLarge = 0x1p-12f;  // the latter clips what is not exact
  Expect(FormOf(plain, 127, 98047, kSmall) == SumForm::kFloatFromZero, "sums below 2^23 are floats");
  Expect(FormOf(plain, 127, 98049, kSmall) == SumForm::kInteger, "a sum above 2^23 is no float");
  Expect(FormOf(plain, 127, 98049, kLarge) == SumForm::kFloatFromZero, "but one that is clipped");
  Expect(FormOf(plain, -128, -98048, kSmall) == SumForm::kFloatFromZero, "negative sums are clipped");
  Expect(FormOf(plain, 127, 1 << 30, kLarge) == SumForm::kInteger, "bits of floats end");
  Expect(FormOf(plain, -128, -(1 << 30), kLarge) == SumForm::kInteger, "bits of floats begin");
  Expect(FormOf(plain, 1, 0, INFINITY) == SumForm::kInteger, "multipliers are normal numbers");
  Expect(FormOf(adding, 64, 16383, kSmall) == SumForm::kFloat, "sums below 2^22 are floats of any sign");
  Expect(FormOf(adding, 64, 16385, kSmall) == SumForm::kInteger, "a sum above 2^22 is none");
  ConvSpec in_middle = adding;
  in_middle.epilogue.zero_point = 128;
  Expect(FormOf(in_middle, -64, -16385, kSmall) == SumForm::kInteger, "nor is the negative one");
  Expect(FormOf(in_middle, -64, -16385, kLarge) == SumForm::kFloat, "but one that is clipped");
  ConvSpec few_codes = plain, is_signed = adding;
  few_codes.epilogue.hi = 15;
  is_signed.epilogue.residual_signed = true;
  Expect(FormOf(few_codes, 1, 0, kLarge) == SumForm::kFloat, "few codes, which lie on lines");
  few_codes.epilogue.hi = 16;
  Expect(FormOf(few_codes, 1, 0, kLarge) == SumForm::kFloatFromZero, "fewer codes");
  Expect(FormOf(is_signed, 1, 0, kLarge) == SumForm::kFloat, "signed residuals");
}

// Scales in proportion, as those of networks that were made with few digits: many sums tie.
void TestInverses() {
  std::mt19937 random(4);
  const auto scale = [&](int least) { return static_cast<float>(least + random() % 99) / 5100.0f; };
  constexpr int kNodes = 60;
  int found = 0, no_line = 0;
  for (int node = 0; node < kNodes; ++node) {
    Epilogue e = AddingEpilogue(random);
    e.y_zero_point = e.y_lo;
    e.inner_scale = scale(100);
    e.residual_scale = scale(100);
    e.y_scale = scale(120);
    no_line += FitSum(e).has_value() ? 0 : 1;
    const auto inverse = InvertScale(e);
    if (!inverse.has_value()) continue;
    ++found;
    int wrong = 0;
    const int32_t first = e.residual_signed ? -128 : 0;
    for (int32_t q = e.lo; q <= e.hi; ++q) {
      for (int32_t r = first; r < first + 256; ++r) {
        const float sum = static_cast<float>(q - e.zero_point) * e.inner_scale +
                          static_cast<float>(r - e.residual_zero_point) * e.residual_scale;
        const float code = std::rint(std::fma(sum, inverse->near, sum * inverse->rest));
        const int32_t clipped = ClipToCode(code + static_cast<float>(e.y_zero_point), e.y_lo, e.y_hi);
        wrong += clipped == EpilogueCode(e, q - e.zero_point, 0, r) ? 0 : 1;
      }
    }
    Expect(wrong == 0, std::to_string(wrong) + " pairs of codes have other sums by the inverse");
  }
  Expect(found > kNodes * 3 / 4, "most sums have an inverse: " + std::to_string(found));
  Expect(no_line > kNodes / 4, "some of them no line: " + std::to_string(no_line));
}

// Tails that add residuals: floats next to every tie, some far from any.
void TestInversesOfTails() {
  std::mt19937 random(8);
  for (int node = 0; node < 200; ++node) {
    Epilogue e = AddingEpilogue(random);
    e.kind = EpilogueKind::kTail;
    e.tail = {TailStep::kResidual};
    e.acc_scale = {1.0f};
    Expect(StepsOf(e).has_value(), "a tail that ends in the residual");
    const auto inverse = InvertTailScale(e);
    Expect(inverse.has_value(), "every scale has an inverse: " + std::to_string(e.y_scale));
    if (!inverse) continue;
    int wrong = 0;
    const auto check = [&](float v) {
      const float code = std::rint(std::fma(v, inverse->near, v * inverse->rest));
      wrong += ClipToCode(code + static_cast<float>(e.y_zero_point), e.y_lo, e.y_hi) ==
                       QuantizeCode(v, e.y_scale, e.y_zero_point, e.y_lo, e.y_hi)
                   ? 0
                   : 1;
    };
    for (int32_t code = -300; code <= 300; ++code) {
      float v = (static_cast<float>(code) + 0.5f) * e.y_scale;
      for (int i = 0; i < 8; ++i) v = std::nextafter(v, -HUGE_VALF);
      for (int i = 0; i < 16; ++i, v = std::nextafter(v, HUGE_VALF)) check(v);
      check(static_cast<float>(random()) * 0x1p-32f * static_cast<float>(code) * e.y_scale);
    }
    Expect(wrong == 0, std::to_string(wrong) + " floats have other codes by the inverse");
  }
}

void TestArchitectures() {
  const char* const wheel = "75-real,80-real,86-real,89-real,90a-real,100-real,120";
  struct {
    const char* compiled;
    int capability, code;
  } const cases[] = {
      {wheel, 75, 75},          {wheel, 80, 80},
      {wheel, 87, 86},          {wheel, 89, 89},
      {wheel, 90, 90},          {wheel, 100, 100},
      {wheel, 103, 100},        {wheel, 110, 0},
      {wheel, 120, 120},        {wheel, 121, 120},
      {wheel, 130, 120},        {wheel, 70, 0},
      {"80", 90, 80},           {"80-real", 90, 0},
      {"80-virtual", 90, 80},   {"90a-real", 89, 0},
      {"90a", 100, 0},          {"80;90a-real", 90, 90},
      {"80;90a-real", 100, 80}, {"100f-real", 103, 100},
      {"100f-virtual", 120, 0}, {"", 90, 0},
      {"OFF", 90, 0},           {",;,86-real", 86, 86},
  };
  for (const auto& c : cases) {
    const int code = CodeArchitecture(c.compiled, c.capability);
    Expect(code == c.code, std::string("'") + c.compiled + "' on " + std::to_string(c.capability) + ": " +
                               std::to_string(code));
  }
}

// Blocks that are spread: as many of them fit a multiprocessor as it must hold for all to run at once, and no more.
void TestSpreadBlocks() {
  std::mt19937 random(9);
  const Device hopper = DeviceOf(90, 132, 227), ampere = DeviceOf(80, 108, 163);
  constexpr int kAll = 228 * 1024, kReserved = 1024;
  for (int i = 0; i < 1000; ++i) {
    const int cluster = 1 << random() % 5, needed = static_cast<int>(random() % (220 * 1024));
    const int64_t blocks = int64_t{cluster} * (1 + random() % 300);
    Expect(SpreadBytes(needed, blocks, cluster, ampere) == needed, "older GPUs overlap no kernels");
    const int bytes = SpreadBytes(needed, blocks, cluster, hopper);
    Expect(bytes >= needed && bytes <= hopper.shared_bytes, "no less than is needed, no more than there is");
    if (bytes == needed) continue;
    const int held = kAll / (bytes + kReserved);
    Expect(held >= 1 && held * hopper.multiprocessors >= blocks, "all blocks find room at once");
    Expect(cluster > 2 || (held - 1) * hopper.multiprocessors < blocks,
           "no multiprocessor holds more than it must");
  }
}

}  // namespace
}  // namespace lowbit::cuda

int main() {
  lowbit::cuda::TestArchitectures();
  lowbit::cuda::TestSpreadBlocks();
  lowbit::cuda::TestRows();
  lowbit::cuda::TestNamesLeftOut();
  lowbit::cuda::TestRanking();
  lowbit::cuda::TestPixels();
  lowbit::cuda::TestResidualPairRanking();
  lowbit::cuda::TestAffineConvRanking();
  lowbit::cuda::TestChains();
  lowbit::cuda::TestChainsOfThree();
  lowbit::cuda::TestChainsBehindWindows();
  lowbit::cuda::TestDivisions();
  lowbit::cuda::TestSums();
  lowbit::cuda::TestLines();
  lowbit::cuda::TestLinesOfThresholds();
  lowbit::cuda::TestSumForms();
  lowbit::cuda::TestFinishesOfChains();
  lowbit::cuda::TestInverses();
  lowbit::cuda::TestInversesOfTails();
  lowbit::cuda::TestBits();
  lowbit::cuda::TestCells();
  lowbit::cuda::TestStrips();
  for (const lowbit::cuda::Case& c : lowbit::cuda::Cases()) lowbit::cuda::CheckCase(c);
  return lowbit::ReportFailures();
}
