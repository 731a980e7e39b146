// What the cost model chooses for the convolutions of four networks on an H200, beside what the file says
// that it chose before (untuned_choices.txt): a change of the model is seen, and nothing else may be one.
//
// lowbit_cuda_choices_test FILE    compares; prints what the model chooses now where that differs
// lowbit_cuda_choices_test FILE ROW    with ROW left out: every layer has another kernel
// lowbit_cuda_choices_test         prints the text of the file
// lowbit_cuda_choices_test all     prints every candidate in its order with its launch parameters
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/cuda/conv/packed_conv.h"
#include "kernels/cuda/fused/affine_conv.h"
#include "kernels/cuda/fused/chain.h"
#include "kernels/cuda/fused/residual_pair.h"
#include "tests/expect.h"

namespace lowbit::cuda {
namespace {

constexpr int64_t kBatches[] = {1, 16, 128};

// A convolution of square windows over a square image.
struct Layer {
  int64_t in, size, out, kernel, stride = 1, group = 1;
  bool residual = false;

  std::string Text() const {
    std::string text = std::to_string(in) + "x" + std::to_string(size) + " to " + std::to_string(out) + ", " +
                       std::to_string(kernel) + "x" + std::to_string(kernel);
    if (stride > 1) text += ", stride " + std::to_string(stride);
    if (group > 1) text += ", depthwise";
    if (residual) text += ", residual";
    return text;
  }
};

// What follows each other in a network: one layer; two, the first of which makes the residuals of the second;
// two, the second of which reads the first; these three.
enum class Site : uint8_t { kOne, kResidualPair, kChain, kChainBehindPair, kChainBehindWindows, kAffine };

struct Place {
  Site site;
  std::vector<Layer> layers;
};

using Network = std::vector<Place>;

Network ResNet50() {
  Network net = {{Site::kOne, {{3, 224, 64, 7, 2}}}};
  int64_t in = 64, size = 56;
  const int64_t blocks[] = {3, 4, 6, 3};
  for (int stage = 0; stage < 4; ++stage) {
    const int64_t mid = 64 << stage, out = 4 * mid;
    for (int64_t block = 0; block < blocks[stage]; ++block) {
      const int64_t stride = block == 0 && stage > 0 ? 2 : 1;
      const int64_t inner = size / stride;
      const bool is_last = block + 1 == blocks[stage];
      const Layer expand{mid, inner, out, 1, 1, 1, true}, shortcut{in, size, out, 1, stride};
      const Layer next{out, inner, is_last ? 2 * mid : mid, 1};
      net.push_back({Site::kOne, {{in, size, mid, 1}}});
      net.push_back({Site::kOne, {{mid, size, mid, 3, stride}}});
      net.push_back({Site::kOne, {expand}});
      net.push_back({Site::kChain, {expand, next}});
      if (stride == 1 && block > 0)
        net.push_back({Site::kChainBehindWindows, {{mid, size, mid, 3}, expand, next}});
      if (block == 0) {
        Layer adds = shortcut, made = expand;
        adds.residual = true;
        made.residual = false;
        net.push_back({Site::kOne, {shortcut}});
        net.push_back({Site::kResidualPair, {shortcut, expand}});
        net.push_back({Site::kResidualPair, {made, adds}});
        net.push_back({Site::kChainBehindPair, {made, adds, next}});
      }
      in = out;
      size = inner;
    }
  }
  net.push_back({Site::kOne, {{2048, 1, 1000, 1}}});
  return net;
}

Network ResNet18() {
  Network net = {{Site::kOne, {{3, 224, 64, 7, 2}}}};
  int64_t in = 64, size = 56;
  for (int stage = 0; stage < 4; ++stage) {
    const int64_t out = 64 << stage, stride = stage > 0 ? 2 : 1;
    net.push_back({Site::kOne, {{in, size, out, 3, stride}}});
    const Layer shortcut{in, size, out, 1, stride};
    size /= stride;
    Layer made{out, size, out, 3}, last{out, size, out, 3};
    last.residual = true;
    net.push_back({Site::kOne, {made}});
    net.push_back({Site::kOne, {last}});
    if (stage > 0) {
      Layer adds = shortcut;
      adds.residual = true;
      net.push_back({Site::kResidualPair, {made, adds}});
    }
    in = out;
  }
  net.push_back({Site::kOne, {{512, 1, 1000, 1}}});
  return net;
}

Network MobileNetV2() {
  Network net = {{Site::kOne, {{3, 224, 32, 3, 2}}}};
  int64_t in = 32, size = 112;
  const struct {
    int64_t expansion, out, blocks, stride;
  } stages[] = {{1, 16, 1, 1}, {6, 24, 2, 2},  {6, 32, 3, 2}, {6, 64, 4, 2},
                {6, 96, 3, 1}, {6, 160, 3, 2}, {6, 320, 1, 1}};
  for (const auto& stage : stages) {
    for (int64_t block = 0; block < stage.blocks; ++block) {
      const int64_t stride = block == 0 ? stage.stride : 1, wide = in * stage.expansion;
      if (stage.expansion > 1) net.push_back({Site::kOne, {{in, size, wide, 1}}});
      net.push_back({Site::kOne, {{wide, size, wide, 3, stride, wide}}});
      size /= stride;
      const Layer project{wide, size, stage.out, 1, 1, 1, block > 0};
      net.push_back({Site::kOne, {project}});
      net.push_back({Site::kChain, {project, {stage.out, size, stage.out * 6, 1}}});
      in = stage.out;
    }
  }
  net.push_back({Site::kOne, {{320, 7, 1280, 1}}});
  net.push_back({Site::kOne, {{1280, 1, 1000, 1}}});
  return net;
}

Network DenseNet121() {
  Network net = {{Site::kOne, {{3, 224, 64, 7, 2}}}};
  int64_t in = 64, size = 56;
  for (const int64_t layers : {6, 12, 24, 16}) {
    for (int64_t layer = 0; layer < layers; ++layer, in += 32)
      net.push_back({Site::kAffine, {{in, size, 128, 1}}});
    net.push_back({Site::kOne, {{128, size, 32, 3}}});
    if (size == 7) break;
    net.push_back({Site::kAffine, {{in, size, in / 2, 1}}});
    in /= 2;
    size /= 2;
  }
  net.push_back({Site::kOne, {{1024, 1, 1000, 1}}});
  return net;
}

ConvSpec SpecOf(const Layer& layer) {
  ConvSpec spec;
  ConvGeometry& g = spec.geometry;
  g.in_channels = layer.in;
  g.out_channels = layer.out;
  g.group = layer.group;
  g.kernel_h = g.kernel_w = layer.kernel;
  g.stride_h = g.stride_w = layer.stride;
  g.pad_top = g.pad_left = g.pad_bottom = g.pad_right = layer.kernel / 2;
  spec.x = {8, Encoding::kUnsigned};
  spec.w = {8, Encoding::kSigned};
  spec.weights.resize(static_cast<size_t>(layer.out * g.K()));
  for (size_t i = 0; i < spec.weights.size(); ++i)
    spec.weights[i] = static_cast<uint8_t>(static_cast<int>(i * 37 % 255) - 127);
  const auto channels = static_cast<size_t>(layer.out);
  spec.w_zero_point.assign(channels, 0);
  spec.bias.assign(channels, 100);
  spec.epilogue.multiplier.assign(channels, 100.0f / (std::sqrt(static_cast<float>(g.K())) * 127 * 73));
  if (layer.residual) {
    spec.epilogue.has_residual = true;
    spec.epilogue.inner_scale = 0.02f;
    spec.epilogue.residual_scale = 0.03f;
    spec.epilogue.y_scale = 0.035f;
  }
  return spec;
}

Device H200() {
  Device device;
  device.capability = device.hardware = 90;
  device.multiprocessors = 132;
  device.shared_bytes = 223 * 1024;
  device.name = "sm_90";
  return device;
}

using Conv = std::shared_ptr<const PackedConv>;

ConvShape ShapeOf(const Layer& layer, int64_t batch) {
  const int64_t out = (layer.size - 1) / layer.stride + 1;
  return {batch, layer.size, layer.size, out, out};
}

std::string ChoiceOf(const Place& place, const std::vector<Conv>& convs, int64_t batch) {
  std::vector<ConvShape> shapes;
  for (const Layer& layer : place.layers) shapes.push_back(ShapeOf(layer, batch));
  switch (place.site) {
    case Site::kOne:
      return CandidateConfigs(*convs[0], shapes[0]).front().Text();
    case Site::kAffine:  // "?" where a Concat in front is better apart
      return AffineConvConfigs(*convs[0], shapes[0]).front().Text() +
             (JoiningPays({nullptr, convs[0], shapes[0], {}}) ? "" : "?");
    case Site::kResidualPair:
      return ResidualPairConfigs({convs[0], convs[1]}, {shapes[0], shapes[1]}).front().Text();
    case Site::kChain:
    case Site::kChainBehindPair:
    case Site::kChainBehindWindows: {
      const ConvChain chain =
          place.site == Site::kChain ? ConvChain{convs[0], convs[1], shapes[0], nullptr}
          : place.site == Site::kChainBehindPair
              ? ConvChain{convs[1], convs[2], shapes[1], convs[0], shapes[0]}
              : ConvChain{convs[1], convs[2], shapes[1], nullptr, {}, convs[0], shapes[0]};
      const std::vector<ChainConfig> configs = CandidateChains(chain);
      if (configs.empty()) return "none";
      return configs.front().Text() + (ChainPays(chain) ? "" : "?");
    }
  }
  return "";
}

std::string Choices() {
  const Device device = H200();
  std::ostringstream text;
  const struct {
    const char* name;
    Network net;
  } networks[] = {{"ResNet-18", ResNet18()},
                  {"ResNet-50", ResNet50()},
                  {"MobileNetV2", MobileNetV2()},
                  {"DenseNet-121", DenseNet121()}};
  for (const auto& [name, net] : networks) {
    text << name << "\n";
    std::set<std::string> seen;
    for (const Place& place : net) {
      std::string line;
      std::vector<Conv> convs;
      for (const Layer& layer : place.layers) line += (line.empty() ? "" : " + ") + layer.Text();
      if (place.site == Site::kAffine) line = "normalized: " + line;
      if (place.site != Site::kOne && place.site != Site::kResidualPair && place.site != Site::kAffine)
        line = "in turn: " + line;
      if (!seen.insert(line).second) continue;
      for (const Layer& layer : place.layers) convs.push_back(PackConv(SpecOf(layer), device));
      line += ":";
      for (const int64_t batch : kBatches) line += " " + ChoiceOf(place, convs, batch);
      text << "  " << line << "\n";
    }
  }
  return text.str();
}

// How many choices of a text are of a row.
int64_t CountOf(const std::string& row, const std::string& choices) {
  std::istringstream words(choices);
  return std::count_if(std::istream_iterator<std::string>(words), {},
                       [&](const std::string& word) { return word == row || word.starts_with(row + "_"); });
}

// `now`: the choices while LOWBIT_CUDA_WITHOUT names the row.
int WithoutRow(const std::string& row, const std::string& before, const std::string& now) {
  Expect(CountOf(row, before) > 0, "the row is chosen where it is not left out: " + row);
  Expect(CountOf(row, now) == 0, "the row is left out: " + row);
  std::istringstream lines(now);
  for (std::string line; std::getline(lines, line);) {
    const size_t colon = line.rfind(':');
    if (colon == std::string::npos) continue;  // a network's name
    std::istringstream words(line.substr(colon + 1));
    const auto choices = std::distance(std::istream_iterator<std::string>(words), {});
    Expect(choices == std::ssize(kBatches), "a choice for every batch size: " + line);
  }
  return ReportFailures();
}

int Run(int argc, char** argv) {
  if (argc > 2) ::setenv("LOWBIT_CUDA_WITHOUT", argv[2], 1);
  const std::string now = Choices();
  if (argc < 2) {
    std::fputs(now.c_str(), stdout);
    return 0;
  }
  std::ifstream file(argv[1]);
  std::ostringstream before;
  before << file.rdbuf();
  if (argc > 2) return WithoutRow(argv[2], before.str(), now);
  if (before.str() == now) return 0;
  std::fprintf(stderr, "the untuned choices are not those of %s; where they should be, write them there:\n%s",
               argv[1], now.c_str());
  return 1;
}

}  // namespace
}  // namespace lowbit::cuda

int main(int argc, char** argv) { return lowbit::cuda::Run(argc, argv); }
