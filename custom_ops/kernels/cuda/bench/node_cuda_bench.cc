// The nodes between convolutions on the GPU, at the sizes of ResNet-50, DenseNet-121 and their like: replays
// of a CUDA graph of equal nodes with programmatic dependent launch, medians, beside a copy that moves as
// many bytes (half of them read, half written) in the same way.
//   lowbit_cuda_node_bench [name]
// Prints a markdown table.
#include <cuda_runtime.h>

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "kernels/cuda/bench/graph_timer.h"
#include "kernels/cuda/device/memory.h"
#include "kernels/cuda/nodes/cuda_node.h"

namespace lowbit::cuda {
namespace {

using Shape = std::vector<int64_t>;

struct Row {
  std::string name;
  NodeSpec node;
  std::vector<TensorShape> fed;
};

TensorShape Codes(Shape dims) { return {ElementType::kUInt8, std::move(dims)}; }
TensorShape Floats(Shape dims) { return {ElementType::kFloat, std::move(dims)}; }

int64_t BytesOf(const TensorShape& tensor) {
  int64_t bytes = static_cast<int64_t>(ElementSize(tensor.type));
  for (const int64_t dim : tensor.dims) bytes *= dim;
  return bytes;
}

Quantizer Grid() {
  Quantizer q;
  q.scale = 0.02f;
  q.zero_point = 3;
  return q;
}

AffineNode Affine(int64_t channels) {
  AffineNode node;
  AffineSpec& spec = node.spec;
  const auto count = static_cast<size_t>(channels);
  spec.channels = channels;
  spec.has_affine = true;
  spec.x_scale.assign(count, 0.02f);
  spec.x_zero_point.assign(count, 7);
  spec.scale.assign(count, 1.1f);
  spec.shift.assign(count, -0.3f);
  spec.y_scale.assign(count, 0.03f);
  spec.y_zero_point.assign(count, 0);
  spec.quantizer = Grid();
  return node;
}

LookupNode Lookup() {
  LookupNode node;
  for (int i = 0; i < 256; ++i) node.table.push_back(static_cast<uint8_t>(255 - i));
  return node;
}

BinaryNode Add() {
  BinaryNode node;
  node.spec.a_scale = 0.011f;
  node.spec.b_scale = 0.013f;
  node.spec.quantizer = Grid();
  return node;
}

MaxPoolNode MaxPool() {
  MaxPoolNode node;
  node.window.kernel = {1, 3, 3};
  node.window.stride = {1, 2, 2};
  node.window.pad_begin = node.window.pad_end = {0, 1, 1};
  return node;
}

AveragePoolNode AveragePool() {
  AveragePoolNode node;
  node.spec.x_scale = 0.02f;
  node.spec.quantizer = Grid();
  node.window.kernel = node.window.stride = {1, 2, 2};
  return node;
}

GlobalAveragePoolNode GlobalAveragePool() {
  GlobalAveragePoolNode node;
  node.x_scale = 0.02f;
  node.spec.quantizer = Grid();
  return node;
}

ConcatNode Concat(size_t parts, bool copied) {
  ConcatNode node;
  node.quantizer = Grid();
  node.axis = -1;
  for (size_t i = 0; i < parts; ++i) {
    ConcatNode::Part part;
    part.copied = copied;
    part.spec.x_scale = {copied ? 0.02f : 0.017f};
    part.spec.x_zero_point = {3};
    node.parts.push_back(part);
  }
  return node;
}

ResizeNode Resize() {
  ResizeNode node;
  node.scales = {2, 2};
  node.coordinates = ResizeNode::Coordinates::kAsymmetric;
  node.nearest = ResizeNode::Nearest::kFloor;
  return node;
}

ImageNode Picture(std::optional<int64_t> shorter_side, std::optional<ImageNode::Size> crop,
                  std::optional<ImageNode::Size> letterbox) {
  ImageNode node;
  node.shorter_side = shorter_side;
  node.crop = crop;
  node.letterbox = letterbox;
  node.table.resize(static_cast<size_t>(node.Channels()) * 256);
  return node;
}

QuantizeNode Quantize(bool to_channels_last) {
  QuantizeNode node;
  node.grids = {Grid()};
  node.to_channels_last = to_channels_last;
  return node;
}

DequantizeNode Dequantize(bool to_channels_first) {
  DequantizeNode node;
  AffineSpec& spec = node.spec;
  spec.x_scale = {0.02f};
  spec.x_zero_point = {3};
  spec.y_scale = {1};
  spec.y_zero_point = {0};
  spec.quantizer.quantized = false;
  node.to_channels_first = to_channels_first;
  return node;
}

std::vector<Row> Rows() {
  std::vector<Row> rows;
  for (const int64_t n : {int64_t{1}, int64_t{16}, int64_t{128}}) {
    const std::string batch = " b" + std::to_string(n);
    rows.push_back({"max_pool 3x3/2 112x112x64" + batch, MaxPool(), {Codes({n, 112, 112, 64})}});
    rows.push_back({"global_average 7x7x2048" + batch, GlobalAveragePool(), {Codes({n, 7, 7, 2048})}});
    rows.push_back(
        {"quantize to_channels_last 3x224x224" + batch, Quantize(true), {Floats({n, 3, 224, 224})}});
    rows.push_back({"add 56x56x256" + batch, Add(), {Codes({n, 56, 56, 256}), Codes({n, 56, 56, 256})}});
    rows.push_back({"affine 56x56x256, per channel" + batch, Affine(256), {Codes({n, 56, 56, 256})}});
    rows.push_back({"affine 56x56x256, one grid" + batch, Affine(1), {Codes({n, 56, 56, 256})}});
    rows.push_back({"lookup 56x56x256" + batch, Lookup(), {Codes({n, 56, 56, 256})}});
    rows.push_back({"concat 28x28x(384+32), copied" + batch,
                    Concat(2, true),
                    {Codes({n, 28, 28, 384}), Codes({n, 28, 28, 32})}});
  }
  rows.push_back({"global_average 112x112x32 b1", GlobalAveragePool(), {Codes({1, 112, 112, 32})}});
  rows.push_back({"average_pool 2x2/2 56x56x128 b16", AveragePool(), {Codes({16, 56, 56, 128})}});
  rows.push_back({"add 56x56x256 + 256 b16", Add(), {Codes({16, 56, 56, 256}), Codes({256})}});
  rows.push_back({"add 56x56x256 + one b16", Add(), {Codes({16, 56, 56, 256}), Codes({1})}});
  rows.push_back({"concat 28x28x(384+32), requantized b16",
                  Concat(2, false),
                  {Codes({16, 28, 28, 384}), Codes({16, 28, 28, 32})}});
  rows.push_back({"resize x2 40x40x256 b16", Resize(), {Codes({16, 40, 40, 256})}});
  const ImageNode::Size square = {224, 224}, detector = {640, 640};
  for (const int64_t batch : {1, 16}) {
    const std::string of = " b" + std::to_string(batch);
    rows.push_back(
        {"image 375x500, 256, crop 224" + of, Picture(256, square, {}), {Codes({batch, 375, 500, 3})}});
    rows.push_back(
        {"image 960x1280, letterbox 640" + of, Picture({}, {}, detector), {Codes({batch, 960, 1280, 3})}});
  }
  rows.push_back({"quantize 1000 b1", Quantize(false), {Floats({1, 1000})}});
  rows.push_back({"quantize to_channels_last 256x28x28 b16", Quantize(true), {Floats({16, 256, 28, 28})}});
  rows.push_back(
      {"dequantize to_channels_first 28x28x256 b16", Dequantize(true), {Codes({16, 28, 28, 256})}});
  rows.push_back(
      {"dequantize to_channels_first 224x224x3 b16", Dequantize(true), {Codes({16, 224, 224, 3})}});
  rows.push_back({"dequantize 28x28x256 b16", Dequantize(false), {Codes({16, 28, 28, 256})}});
  return rows;
}

class Buffer {
 public:
  explicit Buffer(int64_t bytes) {
    const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
    Check(cudaMalloc(&data_, size), "cudaMalloc");
    std::vector<uint8_t> random(size);
    uint32_t state = 1;
    for (auto& byte : random) byte = static_cast<uint8_t>((state = state * 1664525u + 1013904223u) >> 24);
    Check(cudaMemcpy(data_, random.data(), size, cudaMemcpyHostToDevice), "copy");
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* Get() const { return data_; }

 private:
  void* data_ = nullptr;
};

// Microseconds of one launch: the median of kReplays replays of a graph of kNodes.
double Microseconds(const GraphTimer& timer, const NodePlan& plan, const std::vector<const void*>& fed,
                    void* y, void* workspace, bool overlap) {
  constexpr int kNodes = 40, kReplays = 9;
  const auto launches = [&](Queue& queue) {
    for (int i = 0; i < kNodes; ++i) plan.Launch(fed, y, workspace, queue);
  };
  return timer.Microseconds(launches, overlap, kReplays) / kNodes;
}

double Measure(const PackedNode& node, const std::vector<TensorShape>& fed, const TensorShape& y,
               bool overlap, const GraphTimer& timer, std::string& text) {
  const auto plan = node.Plan(fed, y);
  std::vector<std::unique_ptr<Buffer>> x;
  std::vector<const void*> pointers;
  for (const TensorShape& tensor : fed) {
    x.push_back(std::make_unique<Buffer>(BytesOf(tensor)));
    pointers.push_back(x.back()->Get());
  }
  const Buffer output(BytesOf(y)), workspace(static_cast<int64_t>(plan->WorkspaceBytes()));
  text = plan->Text();
  return Microseconds(timer, *plan, pointers, output.Get(), workspace.Get(), overlap);
}

void Run(const std::string& only) {
  const Device device = Device::Query(0);
  const bool overlap = device.capability >= 90;
  const GraphTimer timer;
  std::cout << device.name << "\n\n| node | kernel | MB | us | TB/s | copy us | node / copy |\n"
            << "| --- | --- | --- | --- | --- | --- | --- |\n"
            << std::fixed << std::setprecision(2);
  for (const Row& row : Rows()) {
    if (!only.empty() && row.name.find(only) == std::string::npos) continue;
    const TensorShape y = OutputOf(row.node, row.fed);
    int64_t bytes = BytesOf(y);
    for (const TensorShape& x : row.fed) bytes += BytesOf(x);
    std::string text, copy_text;
    const double time = Measure(*PackNode(row.node, device), row.fed, y, overlap, timer, text);
    const TensorShape half = Codes({bytes / 2 / 16 * 16});
    const double copy = Measure(*PackCopy(device), {half}, half, overlap, timer, copy_text);
    std::cout << "| " << row.name << " | " << text << " | " << static_cast<double>(bytes) * 1e-6 << " | "
              << time << " | " << static_cast<double>(bytes) * 1e-6 / time << " | " << copy << " | "
              << time / copy << " |\n"
              << std::flush;
  }
}

}  // namespace
}  // namespace lowbit::cuda

int main(int argc, char** argv) {
  try {
    lowbit::cuda::Run(argc > 1 ? argv[1] : "");
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
