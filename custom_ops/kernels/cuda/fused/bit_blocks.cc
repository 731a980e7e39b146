#include "kernels/cuda/fused/bit_blocks.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "core/status.h"
#include "kernels/cuda/conv/packed_conv.h"
#include "kernels/cuda/conv/select.h"

namespace lowbit::cuda {
namespace {

constexpr int kUnit = 64;
constexpr size_t kLayers = 3;
using Layers = std::array<ConvProblem, kLayers>;

const ConvConfig& OfBits() {
  static const ConvConfig config{&kBitsRow, kUnit, kUnit, 1};
  return config;
}

Layers ProblemsOf(const BitBlocks& blocks, size_t block) {
  Layers layers;
  const int bits = blocks.convs[block][0]->Problem(blocks.shape).x.bits;
  for (size_t i = 0; i < kLayers; ++i)
    layers[i] = blocks.convs[block][i]->Problem(blocks.shape, false, {bits, bits, i == 2 ? bits : 0});
  return layers;
}

// Those of a layer, of which each block's are the same but for what the nodes hold.
std::optional<BitsParams> ParamsOf(const PackedConv& conv, const ConvShape& shape,
                                   const ConvProblem& problem) {
  BitsParams bits = BitsParamsOf(problem, OfBits());
  static_cast<ConvParams&>(bits) = conv.Params(shape, OfBits());
  bits.epilogue.plane_count = problem.planes.y;
  const int32_t *const steps = bits.epilogue.steps, *const last = bits.epilogue.last_steps;
  FindConstants(problem, bits);
  bits.epilogue.steps = steps;
  bits.epilogue.last_steps = last;
  if (!bits.has_steps || (!problem.residual && !bits.copies)) return std::nullopt;
  return bits;
}

bool IsWindow(const ConvGeometry& g) {
  return g.kernel_h == 3 && g.kernel_w == 3 && g.pad_top == 1 && g.pad_left == 1 && g.pad_bottom == 1 &&
         g.pad_right == 1 && g.dilation_h == 1 && g.dilation_w == 1 && g.stride_h == 1 && g.stride_w == 1;
}

std::string Refuse(const BitBlocks& blocks, const Device& device) {
  const ConvShape& s = blocks.shape;
  if (blocks.convs.empty() || blocks.convs.size() > kMostBitBlocks) return "no blocks, or more than eight";
  if (s.OutPixels() == 0 || s.in_h != s.out_h || s.in_w != s.out_w || s.in_h * s.in_w > 1 << 16)
    return "images of none or of more than 65536 pixels";
  const Layers first = ProblemsOf(blocks, 0);
  for (size_t block = 0; block < blocks.convs.size(); ++block) {
    const Layers layers = ProblemsOf(blocks, block);
    for (size_t i = 0; i < kLayers; ++i) {
      const ConvProblem& layer = layers[i];
      const ConvGeometry& g = layer.geometry;
      if (i == 1 ? !IsWindow(g) : !layer.IsFlat())
        return "other convolutions than 1x1, 3x3 and 1x1 of stride 1";
      if (layer.residual != (i == 2)) return "residuals of another than the last of three";
      if (layer.x.bits != first[0].x.bits) return "codes of two widths";
      const ConvGeometry &before = layers[(i + 2) % kLayers].geometry, &of_first = first[i].geometry;
      if (g.in_channels != before.out_channels || g.out_channels != of_first.out_channels)
        return "convolutions of other channels than those before make";
      if (std::string reason = kBitsRow.refuse(layer, device); !reason.empty()) return reason;
    }
  }
  const ConvGeometry& widest = first[0].geometry;
  if (widest.in_channels % (2 * kUnit) != 0 || widest.out_channels % kUnit != 0)
    return "channels that are no multiple of 128, of 64 between";
  for (size_t block = 0; block < blocks.convs.size(); ++block) {
    const Layers layers = ProblemsOf(blocks, block);
    for (size_t i = 0; i < kLayers; ++i) {
      if (!ParamsOf(*blocks.convs[block][i], s, layers[i])) return "codes that are not told by steps";
    }
  }
  return "";
}

// All but what tensors and nodes hold; of problems that are not refused.
BitBlocksParams ShapeOf(const BitBlocks& blocks, const BitBlocksConfig& config) {
  BitBlocksParams p;
  const Layers first = ProblemsOf(blocks, 0);
  const ConvShape& s = blocks.shape;
  p.blocks = static_cast<int>(blocks.convs.size());
  p.images = static_cast<int>(s.batch);
  p.h = static_cast<int>(s.in_h);
  p.w = static_cast<int>(s.in_w);
  p.bits = first[0].x.bits;
  p.bands = config.bands;
  p.slices = config.slices;
  p.groups = config.groups;
  p.rows = static_cast<int>(CeilDiv(p.h, p.bands));
  p.pitch = p.w + 1;
  p.pixel_tiles = static_cast<int>(CeilDiv(p.rows * p.w, 64));
  p.place_tiles = static_cast<int>(CeilDiv((p.rows - 1) * p.pitch + p.w, 64));
  p.by_w = MakeDivisor(p.w);
  p.by_pitch = MakeDivisor(p.pitch);
  // What windows read: whole tiles, from the first tap to the last; and all rows.
  const int reach = 2 * p.pitch + 2;
  p.windows_places =
      static_cast<int>(RoundUp(std::max(64 * p.place_tiles + reach, (p.rows + 1) * p.pitch + p.w + 2), 8));
  p.x_places = 64 * p.pixel_tiles;
  p.made_places = 64 * p.place_tiles;
  p.turns = p.bands > 1 ? 2 : 1;
  if (p.bands > 1) {
    // The first pixel of the last row of a band that is not the last one, and the last pixel of a first row.
    const int first = (p.rows - 1) * p.w;
    p.above_tiles = (p.rows * p.w - 1) / 64 - first / 64 + 1;
    p.below_tiles = (p.w - 1) / 64 + 1;
  }
  int at = 0;
  for (size_t i = 0; i < kLayers; ++i) {
    const ConvGeometry& g = first[i].geometry;
    BitBlockLayer& layer = p.layers[i];
    int planes = 1;
    for (size_t block = 0; block < blocks.convs.size(); ++block)
      planes = std::max(planes, ProblemsOf(blocks, block)[i].w_bits.fit);
    layer.words = static_cast<int>(CeilDiv(g.out_channels, kPlaneChannels));
    layer.units = static_cast<int>(g.out_channels / kUnit / p.slices);
    layer.rows = BitsParamsOf(first[i], OfBits()).rows;
    const int places = i == 0 ? p.x_places : i == 1 ? p.windows_places : p.made_places;
    std::vector<int> from;
    for (int64_t word = 0; word < CeilDiv(g.in_channels, kPlaneChannels); ++word) {
      for (int64_t tap = 0; tap < g.Taps(); ++tap) {
        const int64_t place = tap / g.kernel_w * p.pitch + tap % g.kernel_w;
        from.push_back(static_cast<int>(place + word * places));
      }
    }
    if (from.size() % 2 == 1) from.push_back(from.back());  // times weights that are 0
    layer.steps = static_cast<int>(from.size() / 2);
    for (int step = 0; step < std::min(layer.steps, BitBlockLayer::kMostSteps); ++step) {
      const int word = from[static_cast<size_t>(step) * 2], next = from[static_cast<size_t>(step) * 2 + 1];
      layer.step[step] = word | (next - word) << 16;
    }
    layer.unit_bytes = layer.steps * planes * BitStepBytes(kUnit) + kBitUnitConstants;
    layer.weights_at = at;
    at += layer.units * layer.unit_bytes;
  }
  const auto place = [&](int layer, int places) {
    const int begin = at;
    at += p.bits * p.layers[layer].words * places * kBitWordBytes;
    return begin;
  };
  p.x_at = place(2, p.x_places);
  p.windows_at = place(0, p.windows_places);
  p.windows_bytes = at - p.windows_at;
  p.made_at = place(1, p.made_places);
  const int parts = p.bits * static_cast<int>(first[1].geometry.in_channels) / kUnit * kBitPartsBytes;
  p.window_parts_at = at;
  p.window_parts_bytes = parts * (p.pixel_tiles + p.above_tiles + p.below_tiles);
  p.made_parts_at = at += p.turns * p.window_parts_bytes;
  at += parts * p.place_tiles;
  // In front lies up to 1 KB that is not used; behind, 1 KB that compute-sanitizer takes for read (BitPairKernel).
  p.shared_bytes = at + 2048;
  return p;
}

// Whether a cluster can have these blocks. All of a GPU's parts have room for clusters of eight.
bool Fits(const BitBlocks& blocks, const BitBlocksConfig& config, const Device& device) {
  constexpr int kMostOfCluster = 8;
  const ConvGeometry& g = blocks.convs[0][0]->Geometry();
  const int64_t rows = CeilDiv(blocks.shape.in_h, config.bands);
  // Words are sent within a cluster alone.
  if (config.bands * config.slices == 1 || config.bands * config.slices > kMostOfCluster ||
      (config.bands - 1) * rows >= blocks.shape.in_h)
    return false;
  if (g.out_channels % (kUnit * config.slices) != 0 || g.in_channels % (2 * kUnit * config.slices) != 0)
    return false;
  const BitBlocksParams p = ShapeOf(blocks, config);
  const bool has_room = std::all_of(std::begin(p.layers), std::end(p.layers), [](const BitBlockLayer& layer) {
    return layer.steps <= BitBlockLayer::kMostSteps;
  });
  return has_room && p.shared_bytes <= device.shared_bytes;
}

// Clusters that run at once. On an H100 of 132 multiprocessors 16 clusters of 6 blocks did, of 7 and of 8 not, and 128 of 4
// took five turns.
int64_t ClustersAtOnce(int size, const Device& device) {
  const double share = size <= 2 ? 1 : 0.8;
  return std::max<int64_t>(1, static_cast<int64_t>(share * device.multiprocessors / size));
}

// Fitted to clocks of each layer and to 60 times on an H100, batch 16, 10 % off.
double EstimateOf(const BitBlocks& blocks, const BitBlocksConfig& config, const Device& device) {
  const BitBlocksParams p = ShapeOf(blocks, config);
  const int products = p.bits * blocks.convs[0][1]->Problem(blocks.shape).w_bits.fit;
  // What blocks of a cluster wait for each other, and put parts in their places.
  const int64_t units = blocks.convs[0][1]->Geometry().in_channels / kUnit;
  const auto parts = [&](int tiles) { return static_cast<double>(CeilDiv(units * tiles, config.groups)); };
  double block =
      1500 + 300 * parts(p.pixel_tiles + p.above_tiles + p.below_tiles) + 210 * parts(p.place_tiles);
  // One warp fetches the weights of the next block meanwhile, copy by copy.
  constexpr double kCopy = 75;
  double copies = 0;
  const int w_planes = products / p.bits;
  for (size_t i = 0; i < kLayers; ++i) {
    const BitBlockLayer& layer = p.layers[i];
    copies += layer.units * (2 * layer.steps * w_planes + 3);
    // The last convolution's units come in pairs.
    const int in_row = i == 2 ? 2 : 1, tiles = i == 0 ? p.pixel_tiles : p.place_tiles;
    const int64_t items = int64_t{tiles} * layer.units / in_row, rounds = CeilDiv(items, config.groups);
    // Warpgroups share the multiprocessor.
    const auto sharing = static_cast<double>(std::min<int64_t>(items, config.groups));
    const double codes = (1000 + 80 * sharing) * (1 + 0.87 * (p.bits - 1)), step = 40 + 22 * sharing;
    block += static_cast<double>(rounds) * in_row * (codes + step * layer.steps * products);
  }
  const int64_t turns = CeilDiv(p.images, ClustersAtOnce(p.bands * p.slices, device));
  return static_cast<double>(turns) * (3500 + block + (p.blocks - 1) * std::max(block, kCopy * copies)) /
         kClocksPerMicrosecond;
}

std::vector<BitBlocksConfig> Rank(const BitBlocks& blocks) {
  const Device& device = blocks.convs[0][0]->On();
  std::vector<std::pair<double, BitBlocksConfig>> ranking;
  for (int bands = 1; bands <= 8; ++bands) {
    for (int slices = 1; slices <= 8; slices *= 2) {
      for (const int groups : {4, kMostBitBlocksGroups}) {
        const BitBlocksConfig config{bands, slices, groups};
        if (Fits(blocks, config, device)) ranking.emplace_back(EstimateOf(blocks, config, device), config);
      }
    }
  }
  std::stable_sort(ranking.begin(), ranking.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<BitBlocksConfig> configs;
  configs.reserve(ranking.size());
  for (const auto& [time, config] : ranking) configs.push_back(config);
  return configs;
}

double EstimateOfBest(const BitBlocks& blocks, const Device& device) {
  const std::vector<BitBlocksConfig> configs = Rank(blocks);
  return configs.empty() ? HUGE_VAL : EstimateOf(blocks, configs.front(), device);
}

BitBlocksParams ParamsOf(const BitBlocks& blocks, const BitBlocksConfig& config) {
  BitBlocksParams p = ShapeOf(blocks, config);
  for (size_t block = 0; block < blocks.convs.size(); ++block) {
    const Layers layers = ProblemsOf(blocks, block);
    for (size_t i = 0; i < kLayers; ++i) {
      const std::optional<BitsParams> bits = ParamsOf(*blocks.convs[block][i], blocks.shape, layers[i]);
      Require(bits.has_value(), "codes that are not told by steps");
      p.block[block].convs[i] = {bits->weights,
                                 bits->ones,
                                 bits->epilogue.steps,
                                 bits->epilogue.last_steps,
                                 bits->epilogue.step_flips,
                                 bits->w_planes,
                                 bits->w_shift,
                                 bits->w_lowest,
                                 bits->sum_offset};
      if (i < 2) continue;
      std::copy(&bits->products[0][0], &bits->products[0][0] + kMostPlanes * kBitProducts,
                &p.block[block].products[0][0]);
    }
  }
  return p;
}

}  // namespace

std::string BitBlocksConfig::Text() const {
  return "bit_blocks_" + std::to_string(bands) + "x" + std::to_string(slices) + "_groups" +
         std::to_string(groups);
}

std::vector<BitBlocksConfig> BitBlocksConfigs(const BitBlocks& blocks) {
  if (blocks.convs.empty() || !kBitBlocksKernel.Applies(blocks, blocks.convs[0][0]->On())) return {};
  std::vector<BitBlocksConfig> configs = Rank(blocks);
  constexpr size_t kMost = 6;
  configs.resize(std::min(configs.size(), kMost));
  return configs;
}

double EstimateMicroseconds(const BitBlocks& blocks) {
  return kBitBlocksKernel.microseconds(blocks, blocks.convs[0][0]->On());
}

double EstimateApart(const BitBlocks& blocks) {
  double apart = 0;
  for (size_t block = 0; block < blocks.convs.size(); ++block) {
    const Layers layers = ProblemsOf(blocks, block);
    for (size_t i = 0; i < kLayers; ++i)
      apart +=
          EstimateMicroseconds(*blocks.convs[block][i], blocks.shape, layers[i].planes).value_or(HUGE_VAL);
  }
  return apart;
}

const FusedRow<BitBlocks> kBitBlocksKernel = {{"bit_blocks", "sm_90a",
                                               "a run of residual blocks on planes of bits, 1x1, 3x3 and "
                                               "1x1: an image stays in the shared memory of a cluster"},
                                              Refuse,
                                              EstimateOfBest};

class BitBlocksPlan {
 public:
  BitBlocksPlan(const BitBlocks& blocks, const BitBlocksConfig& config)
      : blocks_(blocks), params_(ParamsOf(blocks, config)) {}

  void Launch(const void* x, void* y, Queue& queue) const {
    const Device& device = blocks_.convs[0][0]->On();
    DeviceGuard guard(device.ordinal);
    RequireAligned({x, y});
    BitBlocksParams p = params_;
    p.x = static_cast<const uint8_t*>(x);
    p.y = static_cast<uint8_t*>(y);
    Check(cuda::LaunchBitBlocks(p, LaunchOptions{queue, device}), "launching residual blocks of bits");
  }

 private:
  BitBlocks blocks_;  // whose constants are read
  BitBlocksParams params_;
};

std::shared_ptr<const BitBlocksPlan> PlanBitBlocks(const BitBlocks& blocks, const BitBlocksConfig& config) {
  const std::vector<BitBlocksConfig> configs = BitBlocksConfigs(blocks);
  Require(std::find(configs.begin(), configs.end(), config) != configs.end(), "configuration ", config.Text(),
          " does not apply to these residual blocks");
  return std::make_shared<const BitBlocksPlan>(blocks, config);
}

void LaunchBitBlocks(const BitBlocksPlan& plan, const void* x, void* y, Queue& queue) {
  plan.Launch(x, y, queue);
}

}  // namespace lowbit::cuda
