// What a convolution costs in a row of others, beside what it costs by itself: the layers' benchmark replays
// equal nodes that read one tensor and one set of weights, a network does not.
//   lowbit_cuda_chain_bench
// For each layer, microseconds a node, of graphs of
//   alone     20 equal nodes, as the layers' benchmark has them
//   weights   20 nodes with weights of their own
//   outputs   20 nodes that write to tensors of their own
//   chain     20 nodes, each reading what its predecessor wrote (same number of bytes in and out, or the
//   larger) both      chain and weights 1, 10, 40 the whole graph of that many equal nodes; event time / wall
//   time where many graphs are queued
// Then the 48 convolutions of ResNet-50's blocks as one chain, with and without weights of their own and
// residuals, beside the sum of their times alone.
#include <algorithm>
#include <chrono>
#include <iomanip>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/bench/bench_layers.h"
#include "kernels/cuda/cuda_conv.h"

namespace {

using namespace lowbit;
using namespace lowbit::cuda;

struct Launch {
  std::shared_ptr<const ConvPlan> plan;
  const void* x;
  const void* residual;
  void* y;
};

struct Time {
  double event = 0,
         queued = 0;  // microseconds of a graph: by events around one; wall time of many over their number
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

class Replayer {
 public:
  Replayer() : workspace_(kWorkspaceBytes) {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    Check(cudaEventCreate(&begin_), "event");
    Check(cudaEventCreate(&end_), "event");
  }

  Time Measure(const std::vector<Launch>& launches, bool overlap = true, bool queued = false) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    Queue queue(stream_, overlap);
    for (const Launch& l : launches) LaunchConv(*l.plan, l.x, l.residual, l.y, workspace_.Get(), queue);
    Check(cudaStreamEndCapture(stream_, &graph), "capture");
    Check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
    for (int i = 0; i < 5; ++i) Check(cudaGraphLaunch(executable, stream_), "launch");
    Check(cudaStreamSynchronize(stream_), "synchronize");
    Time time;
    time.event = Events(executable);
    if (queued) time.queued = Queued(executable);
    Check(cudaGraphExecDestroy(executable), "destroy");
    Check(cudaGraphDestroy(graph), "destroy");
    return time;
  }

 private:
  double Events(cudaGraphExec_t executable) {
    std::vector<double> times;
    for (int i = 0; i < 15; ++i) {
      Check(cudaEventRecord(begin_, stream_), "record");
      Check(cudaGraphLaunch(executable, stream_), "launch");
      Check(cudaEventRecord(end_, stream_), "record");
      Check(cudaEventSynchronize(end_), "synchronize");
      float milliseconds = 0;
      Check(cudaEventElapsedTime(&milliseconds, begin_, end_), "elapsed");
      times.push_back(1e3 * static_cast<double>(milliseconds));
    }
    return Median(times);
  }

  double Queued(cudaGraphExec_t executable) {
    constexpr int kGraphs = 100;
    std::vector<double> times;
    for (int round = 0; round < 5; ++round) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < kGraphs; ++i) Check(cudaGraphLaunch(executable, stream_), "launch");
      Check(cudaStreamSynchronize(stream_), "synchronize");
      const std::chrono::duration<double, std::micro> wall = std::chrono::steady_clock::now() - start;
      times.push_back(wall.count() / kGraphs);
    }
    return Median(times);
  }

  DeviceBuffer workspace_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

ConvShape ShapeOf(const Layer& layer, int64_t batch) {
  const int64_t out = (layer.size + 2 * layer.pad - layer.kernel) / layer.stride + 1;
  return {batch, layer.size, layer.size, out, out};
}

class ChainBench {
 public:
  ChainBench(const Device& device, int64_t batch)
      : device_(device), batch_(batch), a_(kTensorBytes), b_(kTensorBytes), residual_(kTensorBytes) {
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
      if (PlanConfig(plan).algorithm == Algorithm::kPlain || PlanWorkspaceBytes(plan) > kWorkspaceBytes)
        return 1e9;
      const std::shared_ptr<const ConvPlan> borrowed(std::shared_ptr<void>(), &plan);
      return replayer_.Measure(Equal(borrowed, kNodes)).event;
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
      return replayer_.Measure(launches, overlap).event / static_cast<double>(launches.size());
    };
    alone_[layer.name] = per_node(Equal(plan, kNodes));
    std::cout << "| " << layer.name << " | " << alone_.at(layer.name) << " | " << per_node(weights) << " | "
              << per_node(outputs) << " | " << per_node(chain) << " | " << per_node(both) << " | "
              << per_node(both, false) << " |";
    for (const int nodes : {1, 10, 40}) {
      const Time time = replayer_.Measure(Equal(plan, nodes), true, true);
      std::cout << " " << time.event << " / " << time.queued << " |";
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
    const Time time = replayer_.Measure(launches, overlap, true);
    std::cout << "| " << title << " | " << time.event << " | " << time.queued << " | " << sum << " |\n";
  }

  const Device& device_;
  const int64_t batch_;
  DeviceBuffer a_, b_, residual_;
  Replayer replayer_;
  std::mt19937 random_{5};
  std::map<std::string, ConvConfig> configs_;
  std::map<std::string, double> alone_;
};

}  // namespace

int main() {
  try {
    const Device device = Device::Query(0);
    std::cout << "# Convolutions in a row on the GPU\n\n"
              << device.name << "\n\n"
              << std::fixed << std::setprecision(2);
    for (const int64_t batch : {1, 16}) {
      ChainBench bench(device, batch);
      bench.Layers();
      bench.Network();
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
