// What a convolution costs in a row of others, beside what it costs by itself: the layers' benchmark replays
// equal nodes that read one tensor and one set of weights, a network does not.
//   lowbit_cuda_chain_bench [turns]
// For each layer, microseconds a node, of graphs of
//   alone     20 equal nodes, as the layers' benchmark has them
//   weights   20 nodes with weights of their own
//   outputs   20 nodes that write to tensors of their own
//   chain     20 nodes, each reading what its predecessor wrote (same number of bytes in and out, or the larger)
//   both      chain and weights
//   1, 10, 40 the whole graph of that many equal nodes; event time / wall time where many graphs are queued
// Then the 48 convolutions of ResNet-50's blocks as one chain, with and without weights of their own and
// residuals, beside the sum of their times alone.
// And kernels of every kind in turns with each other: microseconds a launch less what the two take alone. With `turns`
// this alone, of the configurations that the cost model chooses.
#include <algorithm>
#include <functional>
#include <iomanip>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/bench/bench_layers.h"
#include "kernels/cuda/bench/graph_timer.h"
#include "kernels/cuda/conv/cuda_conv.h"
#include "kernels/cuda/fused/quantized_conv.h"
#include "kernels/cuda/left_out.h"
#include "kernels/cuda/nodes/cuda_node.h"

namespace {

using namespace lowbit;
using namespace lowbit::cuda;

struct Launch {
  std::shared_ptr<const ConvPlan> plan;
  const void* x;
  const void* residual;
  void* y;
};

ConvShape ShapeOf(const Layer& layer, int64_t batch) {
  const int64_t out = (layer.size + 2 * layer.pad - layer.kernel) / layer.stride + 1;
  return {batch, layer.size, layer.size, out, out};
}

class ChainBench {
 public:
  ChainBench(const Device& device, int64_t batch)
      : device_(device),
        batch_(batch),
        a_(kTensorBytes),
        b_(kTensorBytes),
        residual_(kTensorBytes),
        workspace_(kWorkspaceBytes) {
    for (const DeviceBuffer* buffer : {&a_, &b_, &residual_})
      Check(cudaMemset(buffer->Get(), 33, kTensorBytes), "fill");
  }

  void Layers() {
    std::cout << "## Batch " << batch_
              << "\n\n| layer | alone | weights | outputs | chain | both | both, serial "
              << "| 1 | 10 | 40 | configuration |\n|" << Rule(11) << "\n";
    for (const Layer& layer : kLayers) {
      if (layer.stride == 1) Row(layer);
    }
    std::cout << "\n";
  }

  void Network() {
    std::cout
        << "| 48 convolutions in a chain | event | queued | sum of alone |\n| --- | --- | --- | --- |\n";
    Chain("one set of weights a layer", false, false, true);
    Chain("weights of their own", true, false, true);
    Chain("and residuals", true, true, true);
    Chain("and residuals, serial", true, true, false);
    std::cout << "\n";
  }

 private:
  static constexpr size_t kTensorBytes = size_t{64} << 20;
  static constexpr int kNodes = 20;

  static std::string Rule(int columns) {
    std::string rule;
    for (int i = 0; i < columns; ++i) rule += " --- |";
    return rule;
  }

  GraphTimer::Launches All(const std::vector<Launch>& launches) const {
    return [this, &launches](Queue& queue) {
      for (const Launch& l : launches) LaunchConv(*l.plan, l.x, l.residual, l.y, workspace_.Get(), queue);
    };
  }
  // Microseconds of a graph: by events around one; wall time of many over their number.
  double Event(const std::vector<Launch>& launches, bool overlap = true) const {
    return timer_.Microseconds(All(launches), overlap, 15);
  }
  double Queued(const std::vector<Launch>& launches, bool overlap = true) const {
    return timer_.QueuedMicroseconds(All(launches), overlap);
  }

  std::shared_ptr<const ConvPlan> Plan(const Layer& layer, bool residual) {
    Variant variant;
    variant.residual = residual;
    const auto packed = PackConv(MakeSpec(layer, random_, variant), device_);
    const ConvShape shape = ShapeOf(layer, batch_);
    const ConvConfig& config = configs_.at(layer.name);
    const std::vector<ConvConfig> candidates = CandidateConfigs(*packed, shape);
    const bool applies = std::find(candidates.begin(), candidates.end(), config) != candidates.end();
    return PlanConv(packed, shape, applies ? config : candidates.front());
  }

  std::vector<Launch> Equal(const std::shared_ptr<const ConvPlan>& plan, int nodes) const {
    return std::vector<Launch>(static_cast<size_t>(nodes), Launch{plan, a_.Get(), nullptr, b_.Get()});
  }

  // Nodes that hand tensors on between two buffers.
  Launch Link(const std::shared_ptr<const ConvPlan>& plan, size_t i, const void* residual = nullptr) const {
    return {plan, i % 2 == 0 ? a_.Get() : b_.Get(), residual, i % 2 == 0 ? b_.Get() : a_.Get()};
  }

  void Row(const Layer& layer) {
    const ConvShape shape = ShapeOf(layer, batch_);
    const auto packed = PackConv(MakeSpec(layer, random_), device_);
    configs_[layer.name] = TuneConv(packed, shape, [&](const ConvPlan& plan) {
      if (PlanConfig(plan).kernel == &PlainKernel() || PlanWorkspaceBytes(plan) > kWorkspaceBytes) return 1e9;
      const std::shared_ptr<const ConvPlan> borrowed(std::shared_ptr<void>(), &plan);
      return Event(Equal(borrowed, kNodes));
    });
    const auto plan = PlanConv(packed, shape, configs_.at(layer.name));
    std::vector<Launch> weights, outputs, chain, both;
    std::vector<std::unique_ptr<DeviceBuffer>> tensors;
    const size_t bytes = static_cast<size_t>(shape.OutPixels() * layer.out);
    for (size_t i = 0; i < kNodes; ++i) {
      const auto own = Plan(layer, false);
      tensors.push_back(std::make_unique<DeviceBuffer>(bytes));
      weights.push_back({own, a_.Get(), nullptr, b_.Get()});
      outputs.push_back({plan, a_.Get(), nullptr, tensors.back()->Get()});
      chain.push_back(Link(plan, i));
      both.push_back(Link(own, i));
    }
    const auto per_node = [&](const std::vector<Launch>& launches, bool overlap = true) {
      return Event(launches, overlap) / static_cast<double>(launches.size());
    };
    alone_[layer.name] = per_node(Equal(plan, kNodes));
    std::cout << "| " << layer.name << " | " << alone_.at(layer.name) << " | " << per_node(weights) << " | "
              << per_node(outputs) << " | " << per_node(chain) << " | " << per_node(both) << " | "
              << per_node(both, false) << " |";
    for (const int nodes : {1, 10, 40}) {
      const std::vector<Launch> launches = Equal(plan, nodes);
      std::cout << " " << Event(launches) << " / " << Queued(launches) << " |";
    }
    std::cout << " " << PlanConfig(*plan).Text() << " |\n" << std::flush;
  }

  void Chain(const char* title, bool own_weights, bool residuals, bool overlap) {
    struct Stage {
      const char* layers[3];
      int blocks;
    };
    constexpr Stage kStages[] = {{{"conv4", "conv2", "conv3"}, 3},
                                 {{"conv9", "conv6", "conv7"}, 4},
                                 {{"conv14", "conv11", "conv12"}, 6},
                                 {{"conv19", "conv16", "conv17"}, 3}};
    std::vector<Launch> launches;
    std::map<std::string, std::shared_ptr<const ConvPlan>> shared;
    double sum = 0;
    for (const Stage& stage : kStages) {
      for (int i = 0; i < stage.blocks * 3; ++i) {
        const char* name = stage.layers[i % 3];
        const Layer& layer = *std::find_if(std::begin(kLayers), std::end(kLayers),
                                           [&](const Layer& each) { return std::string(each.name) == name; });
        const bool adds = residuals && i % 3 == 2;
        std::shared_ptr<const ConvPlan> plan = own_weights ? nullptr : shared[name];
        if (plan == nullptr) plan = Plan(layer, adds);
        if (!own_weights) shared[name] = plan;
        launches.push_back(Link(plan, launches.size(), adds ? residual_.Get() : nullptr));
        sum += alone_.at(name);
      }
    }
    std::cout << "| " << title << " | " << Event(launches, overlap) << " | " << Queued(launches, overlap)
              << " | " << sum << " |\n";
  }

  const Device& device_;
  const int64_t batch_;
  DeviceBuffer a_, b_, residual_, workspace_;
  GraphTimer timer_;
  std::mt19937 random_{5};
  std::map<std::string, ConvConfig> configs_;
  std::map<std::string, double> alone_;
};

// Kernels of every kind, at a size that networks have at batch 1.
class TurnsBench {
 public:
  explicit TurnsBench(const Device& device)
      : device_(device),
        x_(kTensorBytes),
        residual_(kTensorBytes),
        y_(kTensorBytes),
        workspace_(kWorkspaceBytes) {
    for (const DeviceBuffer* buffer : {&x_, &residual_})
      Check(cudaMemset(buffer->Get(), 33, kTensorBytes), "fill");
    AddConv("1x1", {"", 256, 14, 1024, 1, 1, 0, 1, {}, {}});
    AddConv("1x1 + residual", {"", 256, 14, 1024, 1, 1, 0, 1, {}, {}}, {.residual = true});
    AddConv("1x1, many channels", {"", 2048, 7, 512, 1, 1, 0, 1, {}, {}});
    AddConv("3x3 56x56", {"", 64, 56, 64, 3, 1, 1, 1, {}, {}});
    AddConv("3x3 28x28", {"", 128, 28, 128, 3, 1, 1, 1, {}, {}});
    AddConv("3x3 14x14", {"", 256, 14, 256, 3, 1, 1, 1, {}, {}});
    AddConv("depthwise 3x3", {"", 576, 14, 576, 3, 1, 1, 1, {}, {}}, {.depthwise = true});
    AddConv("depthwise 5x5", {"", 240, 28, 240, 5, 1, 2, 1, {}, {}}, {.depthwise = true});
    AddConv("classifier", {"", 2048, 1, 1000, 1, 1, 0, 1, {}, {}});
    AddStem();
    const auto codes = [](std::vector<int64_t> dims) {
      return TensorShape{ElementType::kUInt8, std::move(dims)};
    };
    MaxPoolNode pool;
    pool.window = {.kernel = {1, 3, 3}, .stride = {1, 2, 2}, .pad_begin = {0, 1, 1}, .pad_end = {0, 1, 1}};
    AddNode("max pool", pool, {codes({1, 112, 112, 64})});
    GlobalAveragePoolNode average;
    average.x_scale = average.spec.quantizer.scale = 0.02f;
    AddNode("global average", average, {codes({1, 7, 7, 2048})});
    BinaryNode add;
    add.spec.a_scale = add.spec.b_scale = add.spec.quantizer.scale = 0.02f;
    AddNode("add", add, {codes({1, 14, 14, 256}), codes({1, 14, 14, 256})});
  }

  void Table() const {
    std::vector<double> alone;
    for (const Kernel& kernel : kernels_) alone.push_back(Microseconds(kernel, kernel));
    std::cout << "## Kernels in turns with others, batch 1\n\n| kernel | alone |";
    for (const Kernel& kernel : kernels_) std::cout << " " << kernel.name << " |";
    std::cout << " configuration |\n| --- | --- |";
    for (size_t i = 0; i < kernels_.size(); ++i) std::cout << " --- |";
    std::cout << " --- |\n";
    double sum = 0, largest = 0;
    for (size_t i = 0; i < kernels_.size(); ++i) {
      std::cout << "| " << kernels_[i].name << " | " << alone[i] << " |";
      for (size_t j = 0; j < kernels_.size(); ++j) {
        if (j <= i) {
          std::cout << " |";
          continue;
        }
        const double more = Microseconds(kernels_[i], kernels_[j]) - (alone[i] + alone[j]) / 2;
        sum += more;
        largest = std::max(largest, more);
        std::cout << " " << more << " |";
      }
      std::cout << " " << kernels_[i].config << " |\n" << std::flush;
    }
    const double pairs = static_cast<double>(kernels_.size() * (kernels_.size() - 1)) / 2;
    std::cout << "\nA launch between unlike kernels takes " << sum / pairs
              << " us more than between equal ones, at most " << largest << ".\n\n";
  }

 private:
  static constexpr size_t kTensorBytes = size_t{8} << 20;

  struct Kernel {
    std::string name, config;
    std::function<void(Queue&)> launch;
  };

  // Of a launch, where the two take turns.
  double Microseconds(const Kernel& first, const Kernel& second) const {
    constexpr int kTurns = 20, kReplays = 15;
    return timer_.Microseconds(
               [&](Queue& queue) {
                 for (int i = 0; i < kTurns; ++i) first.launch(queue), second.launch(queue);
               },
               true, kReplays) /
           (2 * kTurns);
  }
  void Add(const char* name, const std::shared_ptr<const ConvPlan>& plan, bool residual) {
    const void* const added = residual ? residual_.Get() : nullptr;
    kernels_.push_back({name, PlanConfig(*plan).Text(), [=, this](Queue& queue) {
                          LaunchConv(*plan, x_.Get(), added, y_.Get(), workspace_.Get(), queue);
                        }});
  }
  void AddConv(const char* name, const Layer& layer, const Variant& variant = {}) {
    Add(name, PlanConv(PackConv(MakeSpec(layer, random_, variant), device_), ShapeOf(layer, 1)),
        variant.residual);
  }
  void AddStem() {
    const Layer layer = {"", 3, 224, 32, 3, 2, 1, 1, {}, {}};
    PixelQuantizer quantizer;
    quantizer.scale.assign(3, 0.02f);
    quantizer.zero_point.assign(3, 0);
    Add("first layer", PlanPixels(PackConv(MakeSpec(layer, random_), device_), ShapeOf(layer, 1), quantizer),
        false);
  }
  void AddNode(const char* name, const NodeSpec& node, const std::vector<TensorShape>& fed) {
    const std::shared_ptr<const NodePlan> plan = PackNode(node, device_)->Plan(fed, OutputOf(node, fed));
    kernels_.push_back({name, plan->Text(), [=, this](Queue& queue) {
                          const void* const tensors[] = {x_.Get(), residual_.Get()};
                          plan->Launch(std::span(tensors, fed.size()), y_.Get(), workspace_.Get(), queue);
                        }});
  }

  const Device& device_;
  DeviceBuffer x_, residual_, y_, workspace_;
  GraphTimer timer_;
  std::mt19937 random_{5};
  std::vector<Kernel> kernels_;
};

}  // namespace

int main(int argc, char** argv) {
  try {
    RequireKnownNames(LeftOutHere());
    const Device device = Device::Query(0);
    std::cout << "# Convolutions in a row on the GPU\n\n"
              << device.name << "\n\n"
              << std::fixed << std::setprecision(2);
    const bool only_turns = argc > 1 && std::string(argv[1]) == "turns";
    for (const int64_t batch : {1, 16}) {
      if (only_turns) break;
      ChainBench bench(device, batch);
      bench.Layers();
      bench.Network();
    }
    TurnsBench(device).Table();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
