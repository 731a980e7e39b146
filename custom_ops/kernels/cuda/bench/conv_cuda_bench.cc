// The 19 convolutions of ResNet-50 (Caffe Model Zoo: stride on the first 1x1 of a block) on the GPU, batch 1
// and 16: replays of a CUDA graph of equal nodes, medians, operands warm in L2, every output sampled against
// a sum on the CPU.
//   lowbit_cuda_bench [--csv FILE] [--commit ID] [--date DATE] [--layer NAME] [--batch N] [--config TEXT]
//   lowbit_cuda_bench --bits 2,4 ..     weights of 2 bits by codes of 4, products of the APNN-TC paper besides
//   lowbit_cuda_bench --bits 1,2 --planes 1,1 ..   the same in planes: of the input, of the output; layers that have them
//   lowbit_cuda_bench --bits 1,2 --floats 1 ..     the same with float32 results, the sums' own four bytes
//   lowbit_cuda_bench --layer apmm                 the paper's products in 8 bits, too
//   lowbit_cuda_bench --pairs FILE      two convolutions whose outputs are added alone; FILE as above
// Prints a markdown page; FILE receives every configuration's time beside the cost model's estimate. The
// peers' columns are recorded numbers, measured on the same kind of machine on 2026-11-20 (cuDNN 9.19 int8
// with fused scale, bias and ReLU, best of its plans; CUTLASS 4.2 int8, best of its wgmma and mma.sync
// kernels).
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "core/status.h"
#include "kernels/cuda/bench/bench_layers.h"
#include "kernels/cuda/bench/graph_timer.h"
#include "kernels/cuda/conv/cuda_conv.h"
#include "kernels/cuda/conv/packed_conv.h"
#include "kernels/cuda/conv/select.h"
#include "kernels/cuda/fused/quantized_conv.h"
#include "kernels/cuda/fused/residual_pair.h"
#include "kernels/cuda/left_out.h"
#include "kernels/cuda/tests/host_planes.h"

namespace {

using namespace lowbit;
using namespace lowbit::cuda;

// DenseNet-121's convolutions: the 1x1 bottlenecks along the dense blocks, the 3x3 growth layers,
// transitions.
constexpr Layer kDenseNetLayers[] = {
    {"conv1", 64, 56, 128, 1, 1, 0, 1, {6.51}, {}},   {"conv2", 128, 56, 32, 3, 1, 1, 1, {5.48}, {}},
    {"conv3", 160, 56, 128, 1, 1, 0, 1, {3.73}, {}},  {"conv4", 256, 56, 128, 1, 1, 0, 1, {3.68}, {}},
    {"conv5", 128, 28, 128, 1, 1, 0, 1, {6.07}, {}},  {"conv6", 128, 28, 32, 3, 1, 1, 1, {5.35}, {}},
    {"conv7", 320, 28, 128, 1, 1, 0, 1, {3.84}, {}},  {"conv8", 512, 28, 256, 1, 1, 0, 1, {4.14}, {}},
    {"conv9", 256, 14, 128, 1, 1, 0, 1, {3.50}, {}},  {"conv10", 128, 14, 32, 3, 1, 1, 1, {5.28}, {}},
    {"conv11", 480, 14, 128, 1, 1, 0, 1, {4.10}, {}}, {"conv12", 1024, 14, 512, 1, 1, 0, 1, {5.23}, {}},
    {"conv13", 512, 7, 128, 1, 1, 0, 1, {3.96}, {}},  {"conv14", 128, 7, 32, 3, 1, 1, 1, {5.20}, {}},
    {"conv15", 736, 14, 128, 1, 1, 0, 1, {4.68}, {}}, {"conv16", 992, 7, 128, 1, 1, 0, 1, {5.11}, {}},
};

// Convolutions that ResNet-50's tables lack: first ones (codes in) and MobileNetV2's depthwise ones.
constexpr Layer kFirstLayers[] = {
    {"ResNet stem", 3, 224, 64, 7, 2, 3, 1, {}, {}},
    {"MobileNetV2 stem", 3, 224, 32, 3, 2, 1, 1, {}, {}},
    {"CIFAR stem", 3, 32, 16, 3, 1, 1, 1, {}, {}},
};
constexpr Layer kDepthwiseLayers[] = {
    {"depthwise", 32, 112, 32, 3, 1, 1, 1, {}, {}},  {"depthwise", 96, 112, 96, 3, 2, 1, 1, {}, {}},
    {"depthwise", 144, 56, 144, 3, 1, 1, 1, {}, {}}, {"depthwise", 192, 28, 192, 3, 1, 1, 1, {}, {}},
    {"depthwise", 576, 14, 576, 3, 1, 1, 1, {}, {}}, {"depthwise", 960, 7, 960, 3, 1, 1, 1, {}, {}},
    {"depthwise", 120, 28, 120, 5, 1, 2, 1, {}, {}}, {"depthwise", 240, 28, 240, 5, 1, 2, 1, {}, {}},
};

// Of the APNN-TC paper: matrix products of 64 rows, convolutions of 16x16 pixels.
constexpr Layer kPaperLayers[] = {
    {"apmm", 128, 8, 128, 1, 1, 0, 1, {}, {}},      {"apmm", 256, 8, 256, 1, 1, 0, 1, {}, {}},
    {"apmm", 384, 8, 384, 1, 1, 0, 1, {}, {}},      {"apmm", 512, 8, 512, 1, 1, 0, 1, {}, {}},
    {"apmm", 640, 8, 640, 1, 1, 0, 1, {}, {}},      {"apmm", 768, 8, 768, 1, 1, 0, 1, {}, {}},
    {"apmm", 896, 8, 896, 1, 1, 0, 1, {}, {}},      {"apmm", 1024, 8, 1024, 1, 1, 0, 1, {}, {}},
    {"apconv", 128, 16, 128, 3, 1, 1, 1, {}, {}},   {"apconv", 256, 16, 256, 3, 1, 1, 1, {}, {}},
    {"apconv", 512, 16, 512, 3, 1, 1, 1, {}, {}},   {"apconv", 768, 16, 768, 3, 1, 1, 1, {}, {}},
    {"apconv", 1024, 16, 1024, 3, 1, 1, 1, {}, {}},
};

// Microseconds a launch: the median of `replays` of a graph of `nodes` launches.
double Microseconds(const GraphTimer& timer, const ConvPlan& plan, const void* x, void* y, void* workspace,
                    bool overlap, int nodes, int replays, const void* residual = nullptr) {
  const auto launches = [&](Queue& queue) {
    for (int i = 0; i < nodes; ++i) LaunchConv(plan, x, residual, y, workspace, queue);
  };
  return timer.Microseconds(launches, overlap, replays) / nodes;
}

// Some elements of y, recomputed.
void CheckSamples(const ConvSpec& spec, const ConvShape& s, const std::vector<uint8_t>& x,
                  const uint8_t* device_y, int y_planes, std::mt19937& random, const std::string& what) {
  const ConvGeometry& g = spec.geometry;
  const bool has_codes = spec.epilogue.quantized_output;
  const auto outputs = static_cast<size_t>(s.OutPixels() * g.out_channels);
  std::vector<uint8_t> y(has_codes ? outputs : 0);
  std::vector<float> floats(has_codes ? 0 : outputs);
  Check(cudaDeviceSynchronize(), what.c_str());
  Check(cudaMemcpy(y.data(), device_y, y.size(), cudaMemcpyDeviceToHost), "copy y");
  Check(cudaMemcpy(floats.data(), device_y, floats.size() * 4, cudaMemcpyDeviceToHost), "copy y");
  if (y_planes > 0) y = FromPlanes(y, static_cast<int64_t>(y.size()), g.out_channels, y_planes);
  for (int sample = 0; sample < 500; ++sample) {
    const int64_t index = static_cast<int64_t>(random() % outputs);
    const int64_t c = index % g.out_channels, pixel = index / g.out_channels, ox = pixel % s.out_w,
                  oy = pixel / s.out_w % s.out_h, image = pixel / (s.out_w * s.out_h);
    int32_t acc = spec.bias[static_cast<size_t>(c)];
    for (int64_t t = 0; t < g.Taps(); ++t) {
      const int64_t iy = oy * g.stride_h - g.pad_top + t / g.kernel_w,
                    ix = ox * g.stride_w - g.pad_left + t % g.kernel_w;
      if (iy < 0 || iy >= s.in_h || ix < 0 || ix >= s.in_w) continue;
      for (int64_t i = 0; i < g.in_channels; ++i) {
        acc += int32_t{x[static_cast<size_t>(((image * s.in_h + iy) * s.in_w + ix) * g.in_channels + i)]} *
               spec.WeightValue(c, c * g.K() + t * g.in_channels + i);
      }
    }
    if (!has_codes) {
      const float value = static_cast<float>(acc) * spec.epilogue.acc_scale[static_cast<size_t>(c)];
      Require(floats[static_cast<size_t>(index)] == value, what, ": element ", index, " is ",
              floats[static_cast<size_t>(index)], ", expected ", value);
      continue;
    }
    const float v = std::rint(static_cast<float>(acc) * spec.epilogue.multiplier[static_cast<size_t>(c)]);
    const uint8_t expected = static_cast<uint8_t>(std::clamp(v, 0.0f, static_cast<float>(spec.epilogue.hi)));
    Require(y[static_cast<size_t>(index)] == expected, what, ": element ", index, " is ",
            int{y[static_cast<size_t>(index)]}, ", expected ", int{expected});
  }
}

// Times of one convolution: what the tuner finds, and the cost model's choice.
struct Times {
  double tuned = 0, chosen = 0, pixels = 0;  // pixels: from floats
  std::string config, chosen_config;
};

class Extras {
 public:
  Extras(const cuda::Device& device, const GraphTimer& timer) : device_(device), timer_(timer) {}

  Times Measure(const Layer& layer, int64_t batch, const Variant& variant) {
    const ConvSpec spec = MakeSpec(layer, random_, variant);
    const int64_t out = (layer.size + 2 * layer.pad - layer.kernel) / layer.stride + 1;
    const ConvShape shape{batch, layer.size, layer.size, out, out};
    const size_t outputs = static_cast<size_t>(shape.OutPixels() * layer.out);
    std::vector<uint8_t> x(static_cast<size_t>(batch * layer.size * layer.size * layer.in) *
                           (layer.in <= 4 ? 4 : 1));
    for (auto& v : x) v = static_cast<uint8_t>(random_() % 64);  // as floats: small and normal
    DeviceBuffer device_x(x.size()), device_r(outputs), device_y(outputs * 4), workspace(kWorkspaceBytes);
    Check(cudaMemcpy(device_x.Get(), x.data(), x.size(), cudaMemcpyHostToDevice), "copy x");
    Check(cudaMemset(device_r.Get(), 77, outputs), "residual");
    const auto packed = cuda::PackConv(spec, device_);
    const auto measure = [&](const cuda::ConvPlan& plan, int replays) {
      if (cuda::PlanWorkspaceBytes(plan) > kWorkspaceBytes) return 1e9;
      const bool plain = cuda::PlanConfig(plan).kernel == &cuda::PlainKernel();
      return Microseconds(timer_, plan, device_x.Get(), device_y.Get(), workspace.Get(), true, plain ? 4 : 40,
                          replays, variant.residual ? device_r.Get() : nullptr);
    };
    Times times;
    const cuda::ConvConfig best =
        cuda::TuneConv(packed, shape, [&](const cuda::ConvPlan& plan) { return measure(plan, 5); });
    const cuda::ConvConfig chosen = cuda::CandidateConfigs(*packed, shape).front();
    times.config = best.Text();
    times.chosen_config = chosen.Text();
    times.tuned = measure(*cuda::PlanConv(packed, shape, best), 9);
    times.chosen = chosen == best ? times.tuned : measure(*cuda::PlanConv(packed, shape, chosen), 9);
    if (cuda::FitsPixels(spec)) {
      const size_t channels = static_cast<size_t>(layer.in);
      cuda::PixelQuantizer quantizer;
      quantizer.scale.assign(channels, 0.02f);
      quantizer.zero_point.assign(channels, 0);
      times.pixels = measure(*cuda::PlanPixels(packed, shape, quantizer), 9);
    }
    return times;
  }

  void Table(const char* title, std::span<const Layer> layers, std::span<const int64_t> batches,
             const Variant& variant) {
    std::cout << "## " << title
              << "\n\n| layer | batch | tuned | chosen | cuDNN | from floats | tuned configuration | "
              << "chosen configuration |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n";
    for (const int64_t batch : batches) {
      double tuned = 0, chosen = 0;  // of a network that has each layer `count` times
      for (const Layer& layer : layers) {
        const Times t = Measure(layer, batch, variant);
        tuned += t.tuned * static_cast<double>(layer.count);
        chosen += t.chosen * static_cast<double>(layer.count);
        std::cout << "| " << layer.name << " " << layer.in << "x" << layer.size << "x" << layer.size << " -> "
                  << layer.out << ", " << layer.kernel << "x" << layer.kernel << "/" << layer.stride << " | "
                  << batch << " | " << t.tuned << " | " << t.chosen << " | ";
        if (layer.cudnn[0] > 0 && batch == 1 && !variant.residual && !variant.floats)
          std::cout << layer.cudnn[0];
        std::cout << " | ";
        if (t.pixels > 0) std::cout << t.pixels;
        std::cout << " | " << t.config << " | " << t.chosen_config << " |\n" << std::flush;
      }
      std::cout << "| sum | " << batch << " | " << tuned << " | " << chosen << " | | | | |\n";
    }
    std::cout << "\n";
  }

  // Weights of 4 and 2 bits against 8, in turns.
  void FewBits(std::span<const Layer> layers) {
    std::cout << "## Weights of fewer bits, batch 1\n\n| layer | 8 bits | 4 bits | 2 bits |\n"
              << "| --- | --- | --- | --- |\n";
    std::vector<double> ratios[2];
    for (const Layer& layer : layers) {
      const double w8 = Measure(layer, 1, {8}).tuned, w4 = Measure(layer, 1, {4}).tuned,
                   w2 = Measure(layer, 1, {2}).tuned;
      std::cout << "| " << layer.name << " | " << w8 << " | " << w4 << " | " << w2 << " |\n";
      ratios[0].push_back(w4 / w8);
      ratios[1].push_back(w2 / w8);
    }
    for (auto& r : ratios)
      std::nth_element(r.begin(), r.begin() + static_cast<int64_t>(r.size() / 2), r.end());
    std::cout << "\nMedian ratio to 8 bits: " << ratios[0][ratios[0].size() / 2] << " and "
              << ratios[1][ratios[1].size() / 2] << ".\n\n";
  }

 private:
  const cuda::Device& device_;
  const GraphTimer& timer_;
  std::mt19937 random_{11};
};

// Two convolutions whose outputs are added, as a kernel each and as one.
class ResidualPairBench {
 public:
  ResidualPairBench(const cuda::Device& device, const GraphTimer& timer, std::ostream& csv)
      : device_(device), timer_(timer), csv_(csv) {}

  void Table() {
    std::cout
        << "## Convolutions of a block whose outputs are added\n\n| pair | batch | a kernel each, tuned | "
        << "one kernel, tuned | chosen | tuned configuration | chosen configuration |\n"
        << "| --- | --- | --- | --- | --- | --- | --- |\n";
    for (const ResidualPairOfLayers& pair : kResidualPairs) {
      for (const int64_t batch : {1, 16, 128}) Row(pair, batch);
    }
    std::cout << "\n";
  }

 private:
  static constexpr int kNodes = 20, kReplays = 5;

  static ConvShape ShapeOf(const Layer& layer, int64_t batch) {
    const int64_t out = (layer.size + 2 * layer.pad - layer.kernel) / layer.stride + 1;
    return {batch, layer.size, layer.size, out, out};
  }
  // The time of one launch in a graph of kNodes equal ones.
  double Time(const GraphTimer::Launches& launch) const {
    return timer_.Microseconds(
               [&](Queue& queue) {
                 for (int i = 0; i < kNodes; ++i) launch(queue);
               },
               true, kReplays) /
           kNodes;
  }
  static size_t InputBytes(const Layer& layer, int64_t batch) {
    return static_cast<size_t>(batch * layer.size * layer.size * layer.in);
  }
  void FillRandomly(const DeviceBuffer& buffer, size_t bytes) {
    std::vector<uint8_t> codes(bytes);
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random_());
    Check(cudaMemcpy(buffer.Get(), codes.data(), bytes, cudaMemcpyHostToDevice), "copy x");
  }

  void Row(const ResidualPairOfLayers& layers, int64_t batch) {
    const ResidualPairShapes shapes{ShapeOf(layers.first, batch), ShapeOf(layers.second, batch)};
    const size_t outputs = static_cast<size_t>(shapes.second.OutPixels() * layers.second.out);
    const DeviceBuffer first_x(InputBytes(layers.first, batch)), second_x(InputBytes(layers.second, batch)),
        between(outputs), y(outputs), workspace(kWorkspaceBytes);
    FillRandomly(first_x, InputBytes(layers.first, batch));
    FillRandomly(second_x, InputBytes(layers.second, batch));
    Variant with_residual;
    with_residual.residual = true;
    const ResidualPair pair{PackConv(MakeSpec(layers.first, random_), device_),
                            PackConv(MakeSpec(layers.second, random_, with_residual), device_)};
    const auto first = [&](const ConvPlan& plan, Queue& queue) {
      LaunchConv(plan, first_x.Get(), nullptr, between.Get(), workspace.Get(), queue);
    };
    const auto second = [&](const ConvPlan& plan, Queue& queue) {
      LaunchConv(plan, second_x.Get(), between.Get(), y.Get(), workspace.Get(), queue);
    };
    const auto tune = [&](const std::shared_ptr<const PackedConv>& conv, const ConvShape& shape,
                          const auto& launch) {
      return PlanConv(
          conv, shape, TuneConv(conv, shape, [&](const ConvPlan& plan) {
            if (PlanConfig(plan).kernel == &PlainKernel() || PlanWorkspaceBytes(plan) > kWorkspaceBytes)
              return 1e9;
            return Time([&](Queue& queue) { launch(plan, queue); });
          }));
    };
    const auto first_plan = tune(pair.first, shapes.first, first),
               second_plan = tune(pair.second, shapes.second, second);
    const double each = Time([&](Queue& queue) {
      first(*first_plan, queue);
      second(*second_plan, queue);
    });
    const std::vector<uint8_t> expected = Download(y, outputs);

    const std::vector<ConvConfig> configs = ResidualPairConfigs(pair, shapes);
    const ResidualPairProblem problem{pair.first->Problem(shapes.first), pair.second->Problem(shapes.second)};
    double best = 1e9, chosen = each;
    std::string config;
    for (const ConvConfig& candidate : configs) {
      const double estimate = EstimateMicroseconds(problem, candidate, device_);
      csv_ << layers.name << "," << batch << "," << candidate.Text() << "," << candidate.tile_m << ","
           << candidate.tile_n << "," << candidate.stages << "," << candidate.keeps_weights << ","
           << estimate;
      if (candidate.kernel == &kSeparateKernels) {
        csv_ << "," << each << "\n";
        continue;
      }
      const auto plan = PlanResidualPair(pair, shapes, candidate);
      Check(cudaMemset(y.Get(), 0xA5, outputs), "poison");
      const double time = Time(
          [&](Queue& queue) { LaunchResidualPair(*plan, first_x.Get(), second_x.Get(), y.Get(), queue); });
      Require(Download(y, outputs) == expected, layers.name, ": ", candidate.Text(),
              " differs from a kernel each");
      csv_ << "," << time << "\n";
      if (candidate == configs.front()) chosen = time;
      if (time >= best) continue;
      best = time;
      config = candidate.Text();
    }
    std::cout << "| " << layers.name << " | " << batch << " | " << each << " | " << best << " | " << chosen
              << " | " << config << " | " << configs.front().Text() << " |\n"
              << std::flush;
  }

  static std::vector<uint8_t> Download(const DeviceBuffer& buffer, size_t bytes) {
    std::vector<uint8_t> codes(bytes);
    Check(cudaDeviceSynchronize(), "a pair");
    Check(cudaMemcpy(codes.data(), buffer.Get(), bytes, cudaMemcpyDeviceToHost), "copy y");
    return codes;
  }

  const cuda::Device& device_;
  const GraphTimer& timer_;
  std::ostream& csv_;
  std::mt19937 random_{13};
};

void RunExtras(const cuda::Device& device, const GraphTimer& timer) {
  Extras extras(device, timer);
  constexpr int64_t kOne[] = {1}, kBoth[] = {1, 16}, kMany[] = {128};
  extras.Table("ResNet-50's convolutions, batch 128", kLayers, kMany, {});
  extras.Table("DenseNet-121's convolutions", kDenseNetLayers, kOne, {});
  extras.Table("First convolutions", kFirstLayers, kBoth, {});
  extras.Table("Depthwise convolutions of MobileNetV2 and V3", kDepthwiseLayers, kBoth, {8, true});
  std::vector<Layer> last;  // of a block: a residual is added
  for (const Layer& layer : kLayers) {
    if (layer.out > layer.in && layer.stride == 1) last.push_back(layer);
  }
  extras.Table("With a residual added", last, kBoth, {8, false, true});
  extras.Table("Convolution and dequantization to floats in one", last, kBoth, {8, false, false, true});
  extras.FewBits(kLayers);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    RequireKnownNames(LeftOutHere());
    std::string only_layer, only_batch, only_config, csv_path, pairs_path, commit = "?", date = "?";
    size_t limit = 64;
    Variant variant;
    TensorPlanes has_planes;  // 1: as many as the codes have bits
    for (int i = 1; i + 1 < argc; i += 2) {
      const std::string option = argv[i];
      if (option == "--csv") csv_path = argv[i + 1];
      if (option == "--pairs") pairs_path = argv[i + 1];
      if (option == "--commit") commit = argv[i + 1];
      if (option == "--date") date = argv[i + 1];
      if (option == "--layer") only_layer = argv[i + 1];
      if (option == "--batch") only_batch = argv[i + 1];
      if (option == "--config") only_config = argv[i + 1];
      if (option == "--bits") {
        char comma = 0;
        std::istringstream(argv[i + 1]) >> variant.weight_bits >> comma >> variant.x_bits;
      }
      if (option == "--planes") {
        char comma = 0;
        std::istringstream(argv[i + 1]) >> has_planes.x >> comma >> has_planes.y;
      }
      if (option == "--floats") variant.floats = std::atoi(argv[i + 1]) != 0;
      if (option == "--limit") limit = static_cast<size_t>(std::atoll(argv[i + 1]));
    }
    const cuda::Device device = cuda::Device::Query(0);
    std::mt19937 random(7);
    const GraphTimer timer;
    std::ofstream csv;
    if (!pairs_path.empty()) {
      csv.open(pairs_path);
      csv << "pair,batch,config,tile_m,tile_n,stages,kept,estimate,us\n";
      std::cout << std::fixed << std::setprecision(2);
      ResidualPairBench(device, timer, csv).Table();
      return 0;
    }
    if (!csv_path.empty()) {
      csv.open(csv_path);
      csv << "layer,batch,m,n,k,config,tile_m,tile_n,stages,splits,estimate,us\n";
    }
    const bool has_few_bits = variant.x_bits < 8;
    const TensorPlanes planes{has_planes.x * variant.x_bits, has_planes.y * variant.x_bits};
    std::cout
        << "# ResNet-50's convolutions on the GPU, weights of " << variant.weight_bits << " bits, codes of "
        << variant.x_bits << "\n\n"
        << device.name << ", " << device.multiprocessors << " multiprocessors; " << date << ", commit "
        << commit << ": `lowbit_cuda_bench`\n\n"
        << "- Microseconds; uint8 activations, int8 weights, bias, ReLU and requantization fused, NHWC codes "
           "in "
           "and out. Graph replays of 40 equal nodes, medians of 9, operands warm in L2, outputs sampled "
           "against the CPU.\n"
        << "- tuned: the fastest configuration; chosen: the cost model's; serial: the tuned one without "
           "programmatic dependent launch.\n"
        << "- cuDNN (9.19) and CUTLASS (4.2, best of its kernels): recorded numbers from the same kind of "
           "machine, "
           "2026-11-20, without programmatic dependent launch; not measured in this run.\n"
        << "- all 52: the layers weighted by how often the network has them.\n\n"
        << std::fixed << std::setprecision(2);
    for (int b = 0; b < 2; ++b) {
      const int64_t batch = b == 0 ? 1 : 16;
      if (!only_batch.empty() && only_batch != std::to_string(batch)) continue;
      std::cout << "## Batch " << batch << "\n\n"
                << "| layer | tuned | chosen | serial | cuDNN | CUTLASS | tuned / best peer | tuned "
                   "configuration | "
                   "chosen configuration |\n"
                << "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
      double totals[5] = {}, log_ratio = 0, worst_choice = 0;
      int at_or_below = 0;
      std::vector<Layer> layers(std::begin(kLayers), std::end(kLayers));
      if (has_few_bits || only_layer.starts_with("ap"))
        layers.insert(layers.end(), std::begin(kPaperLayers), std::end(kPaperLayers));
      for (const Layer& layer : layers) {
        if (!only_layer.empty() && only_layer != layer.name) continue;
        const ConvSpec spec = MakeSpec(layer, random, variant);
        const int64_t out = (layer.size + 2 * layer.pad - layer.kernel) / layer.stride + 1;
        const ConvShape shape{batch, layer.size, layer.size, out, out};
        const auto packed = cuda::PackConv(spec, device);
        if (cuda::CandidateConfigs(*packed, shape, false, planes).empty()) continue;
        std::vector<uint8_t> x(static_cast<size_t>(batch * layer.size * layer.size * layer.in));
        for (auto& v : x) v = static_cast<uint8_t>(random() % (1 << variant.x_bits));
        const size_t y_bytes = static_cast<size_t>(shape.OutPixels() * layer.out) * (variant.floats ? 4 : 1);
        DeviceBuffer device_x(x.size()), device_y(y_bytes), workspace(kWorkspaceBytes);
        const std::vector<uint8_t> given = planes.x > 0 ? AsPlanes(x, layer.in, planes.x) : x;
        Check(cudaMemcpy(device_x.Get(), given.data(), given.size(), cudaMemcpyHostToDevice), "copy x");
        const auto measure = [&](const cuda::ConvPlan& plan, bool overlap, int replays) {
          Require(cuda::PlanWorkspaceBytes(plan) <= kWorkspaceBytes, "workspace too small");
          const std::string what = std::string(layer.name) + " " + cuda::PlanConfig(plan).Text();
          Check(cudaMemset(device_y.Get(), 0xA5, y_bytes), "poison");
          const bool plain = cuda::PlanConfig(plan).kernel == &cuda::PlainKernel();
          const double time = Microseconds(timer, plan, device_x.Get(), device_y.Get(), workspace.Get(),
                                           overlap, plain ? 4 : 40, replays);
          CheckSamples(spec, shape, x, device_y.Get(), planes.y, random, what);
          return time;
        };
        const cuda::ConvProblem problem = packed->Problem(shape, false, planes);
        const cuda::ConvConfig tuned = cuda::TuneConv(
            packed, shape,
            [&](const cuda::ConvPlan& plan) {
              const cuda::ConvConfig& c = cuda::PlanConfig(plan);
              if (!only_config.empty() && c.Text() != only_config) return 1e9;
              const double time = measure(plan, true, 5);
              if (csv.is_open()) {
                csv << layer.name << "," << batch << "," << problem.m << "," << problem.n << "," << problem.k
                    << "," << c.Text() << "," << c.tile_m << "," << c.tile_n << "," << c.stages << ","
                    << c.splits << "," << cuda::EstimateMicroseconds(problem, c, device) << "," << time
                    << std::endl;
              }
              return time;
            },
            limit, planes);
        const cuda::ConvConfig chosen = cuda::CandidateConfigs(*packed, shape, false, planes).front();
        const auto plan = [&](const ConvConfig& of) { return PlanConv(packed, shape, of, {}, planes); };
        const double tuned_time = measure(*plan(tuned), true, 9);
        const double chosen_time = chosen == tuned ? tuned_time : measure(*plan(chosen), true, 9);
        const double serial_time = measure(*plan(tuned), false, 9);
        // No peer was recorded for fewer bits.
        const double peer =
            has_few_bits || layer.cudnn[b] == 0 ? tuned_time : std::min(layer.cudnn[b], layer.cutlass[b]);
        at_or_below += tuned_time <= peer ? 1 : 0;
        log_ratio +=
            std::log((has_few_bits || layer.cudnn[b] == 0 ? tuned_time : layer.cudnn[b]) / tuned_time);
        worst_choice = std::max(worst_choice, chosen_time / tuned_time);
        const double row[] = {tuned_time, chosen_time, serial_time, layer.cudnn[b], layer.cutlass[b]};
        std::cout << "| " << layer.name << " " << layer.in << "x" << layer.size << "x" << layer.size << " -> "
                  << layer.out << ", " << layer.kernel << "x" << layer.kernel << "/" << layer.stride << " |";
        for (int i = 0; i < 5; ++i) {
          std::cout << " " << row[i] << " |";
          totals[i] += row[i] * static_cast<double>(layer.count);
        }
        std::cout << " " << tuned_time / peer << " | " << tuned.Text() << " | " << chosen.Text() << " |\n"
                  << std::flush;
      }
      std::cout << "| all 52 |";
      for (const double total : totals) std::cout << " " << total << " |";
      std::cout << " | | |\n\nAt or below the best peer on " << at_or_below << " of " << std::size(kLayers)
                << " layers; geometric mean of cuDNN / tuned " << std::exp(log_ratio / std::size(kLayers))
                << "; chosen / tuned at most " << worst_choice << ".\n\n";
    }
    if (only_layer.empty() && only_config.empty() && !has_few_bits) {
      RunExtras(device, timer);
      std::ofstream none;
      ResidualPairBench(device, timer, none).Table();
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
