// Float convolutions of ResNet-50 in each precision: what the estimate takes, then each tile with each number of slices;
// replays of a CUDA graph of equal nodes, medians.
//   lowbit_cuda_float_bench [batch] [layer] [precision] [how many of the best]
// Prints a markdown table. A layer of "" is all of them, and so with precisions.
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/bench/bench_layers.h"
#include "kernels/cuda/bench/graph_timer.h"
#include "kernels/cuda/nodes/node_support.h"

namespace lowbit::cuda {
namespace {

FloatConvOp MakeOp(const Layer& layer) {
  FloatConvOp op;
  op.in_channels = layer.in;
  op.out_channels = layer.out;
  Window& w = op.window;
  w.spatial = 2;
  w.kernel[1] = w.kernel[2] = layer.kernel;
  w.stride[1] = w.stride[2] = layer.stride;
  w.pad_begin[1] = w.pad_begin[2] = w.pad_end[1] = w.pad_end[2] = layer.pad;
  op.weights.assign(static_cast<size_t>(layer.out * layer.in * layer.kernel * layer.kernel), 0.01f);
  op.bias.assign(static_cast<size_t>(layer.out), 0.1f);
  return op;
}

struct Timed {
  std::string text;
  double us;
};

class Bench {
 public:
  Bench(const Layer& layer, int64_t batch) : op_(MakeOp(layer)) {
    x_ = {ElementType::kFloat, {batch, layer.in, layer.size, layer.size}};
    y_ = OutputOf(StandardNode(op_), {&x_, 1});
    const auto floats = [](const TensorShape& t) { return static_cast<size_t>(CountOf(t.dims)); };
    const std::vector<float> ones(floats(x_), 1.0f);
    fed_ = std::make_unique<DeviceBuffer>(ones.size() * sizeof(float));
    Check(cudaMemcpy(fed_->Get(), ones.data(), ones.size() * sizeof(float), cudaMemcpyHostToDevice),
          "copying");
    made_ = std::make_unique<DeviceBuffer>(floats(y_) * sizeof(float));
  }

  Timed WithTiling(FloatPrecision precision, const FloatTiling& tiling) {
    return Time(HasTensorProduct(op_, device_, precision)
                    ? *PackTensorProduct(op_, device_, precision, limits_, tiling)
                    : *PackTiled(op_, device_, limits_, tiling));
  }
  Timed WithWinograd(const WinogradTiling& tiling) {
    return Time(*PackWinograd(op_, device_, limits_, tiling));
  }
  int Tiles(FloatPrecision precision) const {
    return precision == FloatPrecision::kFloat32 ? FloatTiling::kTiles - 1 : FloatTiling::kTensorTiles;
  }
  bool HasWinograd() const { return cuda::HasWinograd(op_); }

 private:
  // With the channels last where it reads and makes such tensors, as in the middle of a network.
  Timed Time(const PackedNode& node) {
    constexpr int kNodes = 10, kReplays = 5;
    ChannelsLast last;
    if (node.MayReadChannelsLast({&x_, 1}, 0)) last.Add(0);
    last.y = node.MayMakeChannelsLast({&x_, 1});
    const auto plan =
        last == ChannelsLast{} ? node.Plan({&x_, 1}, y_) : node.InChannelsLast(last)->Plan({&x_, 1}, y_);
    const DeviceBuffer workspace(plan->WorkspaceBytes());
    const void* const fed[] = {fed_->Get()};
    const auto launches = [&](Queue& queue) {
      for (int i = 0; i < kNodes; ++i) plan->Launch(fed, made_->Get(), workspace.Get(), queue);
    };
    return {plan->Text(), timer_.Microseconds(launches, device_.capability >= 90, kReplays) / kNodes};
  }

  const Device device_ = Device::Query(0);
  const GraphTimer timer_;
  const Limits limits_ = {.low = 0};
  FloatConvOp op_;
  TensorShape x_, y_;
  std::unique_ptr<DeviceBuffer> fed_, made_;
};

void Measure(int64_t batch, const std::string& only, const std::string& only_precision, size_t shown) {
  std::cout << Device::Query(0).name << ", batch " << batch
            << "\n\n| layer | precision | estimate's | us | best |\n| --- | --- | --- | --- | --- |\n"
            << std::fixed << std::setprecision(1);
  std::vector<Layer> layers = {{"stem", 3, 224, 64, 7, 2, 3, 1, {}, {}},
                               {"3x3 128 14x14", 128, 14, 128, 3, 1, 1, 1, {}, {}},
                               {"512->128 14x14", 512, 14, 128, 1, 1, 0, 1, {}, {}},
                               {"128->512 14x14", 128, 14, 512, 1, 1, 0, 1, {}, {}}};
  if (batch == 1) {
    layers.insert(layers.end(), {{"28x28 map", 1, 28, 512, 3, 1, 1, 1, {}, {}},
                                 {"224x224 map", 1, 224, 64, 3, 1, 1, 1, {}, {}},
                                 {"3x3 128 112x112", 128, 112, 128, 3, 1, 1, 1, {}, {}},
                                 {"5x5 256 56x56", 256, 56, 256, 5, 1, 2, 1, {}, {}}});
  }
  layers.insert(layers.end(), std::begin(kLayers), std::end(kLayers));
  for (const Layer& layer : layers) {
    if (!only.empty() && only != layer.name) continue;
    std::optional<Bench> bench(std::in_place, layer, batch);
    const auto print = [&](FloatPrecision precision, const Timed& chosen, std::vector<Timed> all) {
      std::sort(all.begin(), all.end(), [](const Timed& a, const Timed& b) { return a.us < b.us; });
      std::cout << "| " << layer.name << " " << layer.kernel << "x" << layer.kernel << " " << layer.in << "->"
                << layer.out << " | " << NameOf(precision) << " | " << chosen.text << " | " << chosen.us
                << " | ";
      for (size_t i = 0; i < std::min(shown, all.size()); ++i)
        std::cout << (i > 0 ? "; " : "") << all[i].text << " " << all[i].us;
      std::cout << " |\n" << std::flush;
    };
    const auto is_asked = [&](FloatPrecision precision) {
      return only_precision.empty() || only_precision == NameOf(precision);
    };
    for (const FloatPrecision precision : {FloatPrecision::kFloat32, FloatPrecision::k3xTf32,
                                           FloatPrecision::kTf32, FloatPrecision::kFloat16}) {
      if (!is_asked(precision)) continue;
      const Timed chosen = bench->WithTiling(precision, {});
      std::vector<Timed> all;
      const bool is_exact = precision == FloatPrecision::kFloat32;
      for (int tile = 0; tile < bench->Tiles(precision); ++tile) {
        for (const int slices : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64}) {
          if (!is_exact && (slices > 16 || !std::has_single_bit(static_cast<unsigned>(slices)))) continue;
          try {
            Timed timed = bench->WithTiling(precision, {tile, slices});
            timed.text = std::to_string(tile) + ": " + timed.text;
            all.push_back(std::move(timed));
          } catch (const std::exception& error) {  // a launch that the device refuses ends the stream, too
            std::cerr << layer.name << ", tile " << tile << ", slices " << slices << ": " << error.what()
                      << "\n";
            bench.emplace(layer, batch);
          }
        }
      }
      print(precision, chosen, std::move(all));
    }
    if (!is_asked(FloatPrecision::kWinograd) || !bench->HasWinograd()) continue;
    std::vector<Timed> all;
    for (int slices = 1; slices <= 16; slices *= 2) {
      for (int tile = 0; tile < WinogradTiling::kTiles; ++tile) {
        all.push_back(bench->WithWinograd({2, slices, tile}));
      }
      all.push_back(bench->WithWinograd({4, slices}));
    }
    print(FloatPrecision::kWinograd, bench->WithWinograd({}), std::move(all));
  }
}

}  // namespace
}  // namespace lowbit::cuda

int main(int argc, char** argv) {
  try {
    lowbit::cuda::Measure(argc > 1 ? std::atoi(argv[1]) : 1, argc > 2 ? argv[2] : "", argc > 3 ? argv[3] : "",
                          argc > 4 ? std::strtoul(argv[4], nullptr, 10) : 3);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
