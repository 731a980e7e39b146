// The convolutions that the benchmarks of this folder time, with random weights, and the memory they use.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "core/conv.h"
#include "kernels/cuda/device/memory.h"

namespace lowbit::cuda {

inline constexpr size_t kWorkspaceBytes = size_t{256} << 20;  // more than any configuration here takes

struct Layer {
  const char* name;
  int64_t in, size, out, kernel, stride, pad, count;  // count: how often ResNet-50 has it
  double cudnn[2], cutlass[2];                        // recorded microseconds, batch 1 and 16
};

inline constexpr Layer kLayers[] = {
    {"conv1", 64, 56, 64, 1, 1, 0, 1, {6.50, 9.61}, {2.73, 5.00}},
    {"conv2", 64, 56, 64, 3, 1, 1, 3, {5.52, 15.3}, {4.11, 9.95}},
    {"conv3", 64, 56, 256, 1, 1, 0, 4, {6.52, 17.3}, {3.37, 13.5}},
    {"conv4", 256, 56, 64, 1, 1, 0, 2, {3.50, 7.92}, {2.73, 7.48}},
    {"conv5", 256, 56, 128, 1, 2, 0, 1, {3.53, 3.98}, {3.12, 5.28}},
    {"conv6", 128, 28, 128, 3, 1, 1, 4, {5.53, 6.62}, {4.58, 9.47}},
    {"conv7", 128, 28, 512, 1, 1, 0, 4, {6.31, 9.53}, {2.54, 8.28}},
    {"conv8", 256, 56, 512, 1, 2, 0, 1, {3.62, 8.20}, {3.29, 11.7}},
    {"conv9", 512, 28, 128, 1, 1, 0, 3, {4.10, 4.61}, {3.17, 5.43}},
    {"conv10", 512, 28, 256, 1, 2, 0, 1, {4.04, 4.30}, {3.47, 4.35}},
    {"conv11", 256, 14, 256, 3, 1, 1, 6, {8.04, 8.30}, {6.12, 9.33}},
    {"conv12", 256, 14, 1024, 1, 1, 0, 6, {3.56, 5.83}, {2.79, 6.13}},
    {"conv13", 512, 28, 1024, 1, 2, 0, 1, {4.12, 6.86}, {3.65, 9.83}},
    {"conv14", 1024, 14, 256, 1, 1, 0, 5, {5.18, 5.44}, {3.96, 5.76}},
    {"conv15", 1024, 14, 512, 1, 2, 0, 1, {5.12, 5.32}, {4.17, 4.96}},
    {"conv16", 512, 7, 512, 3, 1, 1, 3, {13.1, 13.3}, {9.41, 12.9}},
    {"conv17", 512, 7, 2048, 1, 1, 0, 3, {4.04, 4.70}, {3.11, 5.67}},
    {"conv18", 1024, 14, 2048, 1, 2, 0, 1, {5.20, 6.09}, {4.21, 7.58}},
    {"conv19", 2048, 7, 512, 1, 1, 0, 2, {7.40, 7.62}, {5.56, 6.69}},
};

// Where a ResNet's block adds its shortcut, as the converter orders the two: the codes of the first
// convolution are the residuals of the second.
struct ResidualPairOfLayers {
  const char* name;
  Layer first, second;
};
inline constexpr ResidualPairOfLayers kResidualPairs[] = {
    {"ResNet-50 stage 1", {"", 64, 56, 256, 1, 1, 0, 1, {}, {}}, {"", 64, 56, 256, 1, 1, 0, 1, {}, {}}},
    {"ResNet-50 stage 2", {"", 128, 28, 512, 1, 1, 0, 1, {}, {}}, {"", 256, 56, 512, 1, 2, 0, 1, {}, {}}},
    {"ResNet-50 stage 3", {"", 256, 14, 1024, 1, 1, 0, 1, {}, {}}, {"", 512, 28, 1024, 1, 2, 0, 1, {}, {}}},
    {"ResNet-50 stage 4", {"", 512, 7, 2048, 1, 1, 0, 1, {}, {}}, {"", 1024, 14, 2048, 1, 2, 0, 1, {}, {}}},
    {"ResNet-18 stage 2", {"", 128, 28, 128, 3, 1, 1, 1, {}, {}}, {"", 64, 56, 128, 1, 2, 0, 1, {}, {}}},
    {"ResNet-18 stage 3", {"", 256, 14, 256, 3, 1, 1, 1, {}, {}}, {"", 128, 28, 256, 1, 2, 0, 1, {}, {}}},
    {"ResNet-18 stage 4", {"", 512, 7, 512, 3, 1, 1, 1, {}, {}}, {"", 256, 14, 512, 1, 2, 0, 1, {}, {}}},
};

struct Variant {
  int weight_bits = 8;                                       // 1: bipolar
  bool depthwise = false, residual = false, floats = false;  // floats: y is dequantized
  int x_bits = 8;                                            // as many as y's
};

inline ConvSpec MakeSpec(const Layer& layer, std::mt19937& random, const Variant& variant = {}) {
  ConvSpec spec;
  ConvGeometry& g = spec.geometry;
  g.in_channels = layer.in;
  g.out_channels = layer.out;
  g.kernel_h = g.kernel_w = layer.kernel;
  g.stride_h = g.stride_w = layer.stride;
  g.pad_top = g.pad_left = g.pad_bottom = g.pad_right = layer.pad;
  if (variant.depthwise) g.group = layer.in;
  spec.x = {variant.x_bits, Encoding::kUnsigned};
  spec.w = {variant.weight_bits, variant.weight_bits == 1 ? Encoding::kBipolar : Encoding::kSigned};
  const int largest_x = (1 << variant.x_bits) - 1,
            largest_w = std::max(1, (1 << (variant.weight_bits - 1)) - 1);
  std::uniform_int_distribution<int> code(spec.w.MinCode() + (variant.weight_bits == 8 ? 1 : 0),
                                          spec.w.MaxCode());
  spec.weights.resize(static_cast<size_t>(layer.out * g.K()));
  for (auto& w : spec.weights) w = static_cast<uint8_t>(code(random));
  const size_t channels = static_cast<size_t>(layer.out);
  spec.w_zero_point.assign(channels, 0);
  for (size_t c = 0; c < channels; ++c) spec.bias.push_back(code(random) * 16);
  spec.epilogue.multiplier.assign(
      channels, 100.0f / (std::sqrt(static_cast<float>(g.K())) * static_cast<float>(largest_w * 73)));
  spec.epilogue.lo = 0;  // ReLU
  spec.epilogue.hi = largest_x;
  if (variant.residual) {
    spec.epilogue.has_residual = true;
    spec.epilogue.inner_scale = 0.02f;
    spec.epilogue.residual_scale = 0.03f;
    spec.epilogue.y_scale = 0.035f;
  }
  if (variant.floats) {
    spec.epilogue.kind = EpilogueKind::kFloat;
    spec.epilogue.quantized_output = false;
    spec.epilogue.acc_scale = spec.epilogue.multiplier;
  }
  return spec;
}

class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) { Check(cudaMalloc(&data_, std::max<size_t>(bytes, 1)), "cudaMalloc"); }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  uint8_t* Get() const { return static_cast<uint8_t*>(data_); }

 private:
  void* data_ = nullptr;
};

}  // namespace lowbit::cuda
