// Float convolutions of ResNet-50: each tile of float32 and each square of winograd with each number of slices, beside what
// the estimate takes, then Tensor Cores; replays of a CUDA graph of equal nodes, medians.
//   lowbit_cuda_float_bench [batch] [layer]
// Prints a markdown table.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <memory>
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

  Timed WithTiling(const FloatTiling& tiling) { return Time(*PackTiled(op_, device_, limits_, tiling)); }
  Timed WithWinograd(const WinogradTiling& tiling) {
    return Time(*PackWinograd(op_, device_, limits_, tiling));
  }
  bool HasWinograd() const { return cuda::HasWinograd(op_); }
  Timed WithPrecision(FloatPrecision precision) { return Time(*Pack(op_, device_, precision, limits_)); }

 private:
  Timed Time(const PackedNode& node) {
    constexpr int kNodes = 20, kReplays = 9;
    const auto plan = node.Plan({&x_, 1}, y_);
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

void Measure(int64_t batch, const std::string& only) {
  std::cout << Device::Query(0).name << ", batch " << batch
            << "\n\n| layer | estimate's | us | best three | winograd us | its best three | 3xtf32 us | "
               "float16 us |\n"
            << "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
            << std::fixed << std::setprecision(1);
  std::vector<Layer> layers = {{"stem", 3, 224, 64, 7, 2, 3, 1, {}, {}},
                               {"3x3 128 14x14", 128, 14, 128, 3, 1, 1, 1, {}, {}},
                               {"512->128 14x14", 512, 14, 128, 1, 1, 0, 1, {}, {}},
                               {"128->512 14x14", 128, 14, 512, 1, 1, 0, 1, {}, {}}};
  layers.insert(layers.end(), std::begin(kLayers), std::end(kLayers));
  for (const Layer& layer : layers) {
    if (!only.empty() && only != layer.name) continue;
    Bench bench(layer, batch);
    const Timed chosen = bench.WithTiling({});
    std::vector<Timed> all, winograd;
    for (int slices = 1; slices <= 16; slices *= 2) {
      for (int tile = 0; tile < FloatTiling::kTiles - 1; ++tile)
        all.push_back(bench.WithTiling({tile, slices}));
      if (!bench.HasWinograd()) continue;
      for (const int made : {2, 4}) winograd.push_back(bench.WithWinograd({made, slices}));
    }
    const auto best_three = [](std::vector<Timed>& timed) {
      std::sort(timed.begin(), timed.end(), [](const Timed& a, const Timed& b) { return a.us < b.us; });
      std::ostringstream out;
      out << std::fixed << std::setprecision(1);
      for (size_t i = 0; i < std::min<size_t>(3, timed.size()); ++i) {
        out << (i > 0 ? "; " : "") << timed[i].text << " " << timed[i].us;
      }
      return out.str();
    };
    std::cout << "| " << layer.name << " " << layer.kernel << "x" << layer.kernel << " " << layer.in << "->"
              << layer.out << " | " << chosen.text << " | " << chosen.us << " | " << best_three(all) << " | ";
    const Timed of_winograd = bench.WithPrecision(FloatPrecision::kWinograd);
    std::cout << of_winograd.text << " " << of_winograd.us << " | " << best_three(winograd) << " | "
              << bench.WithPrecision(FloatPrecision::k3xTf32).us << " | "
              << bench.WithPrecision(FloatPrecision::kFloat16).us << " |\n"
              << std::flush;
  }
}

}  // namespace
}  // namespace lowbit::cuda

int main(int argc, char** argv) {
  try {
    lowbit::cuda::Measure(argc > 1 ? std::atoi(argv[1]) : 1, argc > 2 ? argv[2] : "");
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
