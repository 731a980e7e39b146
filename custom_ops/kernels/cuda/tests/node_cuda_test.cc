// Every kernel that is no convolution against the CPU operators' reference kernels, on random nodes.
//   lowbit_cuda_node_test [nodes per kind] [seed] [kind]
// Each node runs three times: on a stream, then in a graph of three kernels (a copy, the node, a copy) that
// was captured with other pointers and is replayed twice with new ones, aligned in another way. Outputs are
// poisoned before each run and followed by guard bytes. Exit code 1 when an element differs.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "core/status.h"
#include "kernels/cuda/device/memory.h"
#include "kernels/cuda/nodes/cuda_node.h"
#include "kernels/cuda/tests/host_planes.h"
#include "kernels/cuda/tests/node_cases.h"

namespace lowbit::cuda::test {
namespace {

constexpr size_t kGuard = 64;
constexpr uint8_t kPoison = 0xA5;

// Memory that begins `offset` bytes behind an aligned address.
class Buffer {
 public:
  Buffer(size_t bytes, size_t offset) : bytes_(bytes), offset_(offset) {
    Check(cudaMalloc(&data_, bytes + offset + kGuard), "cudaMalloc");
    Poison();
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* Get() const { return static_cast<uint8_t*>(data_) + offset_; }
  // Both are done when they return: the tests' stream does not wait for the default one.
  void Poison() {
    Check(cudaMemset(data_, kPoison, bytes_ + offset_ + kGuard), "poison");
    Check(cudaDeviceSynchronize(), "poison");
  }
  void Fill(const std::vector<uint8_t>& bytes) {
    if (bytes.empty()) return;
    Check(cudaMemcpy(Get(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "copy");
    Check(cudaDeviceSynchronize(), "copy");
  }
  // The contents and the guard bytes.
  std::vector<uint8_t> Read() const {
    std::vector<uint8_t> out(bytes_ + kGuard);
    Check(cudaMemcpy(out.data(), Get(), out.size(), cudaMemcpyDeviceToHost), "copy back");
    return out;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_, offset_;
};
using Buffers = std::vector<std::unique_ptr<Buffer>>;

bool Near(float found, float expected, float tolerance) {
  // Sums of both signs may cancel: their error is relative to their terms, about 1.
  return std::fabs(found - expected) <= tolerance * std::max(1e-3f, std::fabs(expected)) ||
         std::fabs(found - expected) <= tolerance || (std::isnan(found) && std::isnan(expected));
}

int64_t CountWrong(const Case& c, const std::vector<uint8_t>& found, int64_t& first) {
  const size_t size = ElementSize(c.y.type);
  int64_t wrong = 0;
  for (size_t i = 0; i < c.expected.size() / size; ++i) {
    const uint8_t *a = &found[i * size], *b = &c.expected[i * size];
    bool equal = std::memcmp(a, b, size) == 0;
    if (!equal && c.tolerance > 0) {
      float x = 0, y = 0;
      std::memcpy(&x, a, size);
      std::memcpy(&y, b, size);
      equal = Near(x, y, c.tolerance);
    }
    if (!equal && wrong++ == 0) first = static_cast<int64_t>(i);
  }
  return wrong;
}

std::ostream& operator<<(std::ostream& out, const TensorShape& tensor) {
  out << TypeName(tensor.type) << "[";
  for (size_t i = 0; i < tensor.dims.size(); ++i) out << (i > 0 ? "," : "") << tensor.dims[i];
  return out << "]";
}

bool Verify(const Case& c, const Buffer& y, const std::string& run) {
  const std::vector<uint8_t> found = y.Read();
  int64_t first = -1;
  const int64_t wrong = CountWrong(c, found, first);
  const bool overrun = std::any_of(found.end() - kGuard, found.end(), [](uint8_t b) { return b != kPoison; });
  if (wrong == 0 && !overrun) return true;
  std::cout << "WRONG " << c.kind << " " << run << ": " << wrong << " of "
            << c.expected.size() / ElementSize(c.y.type) << " elements";
  if (first >= 0) {
    std::cout << ", element " << first << " is " << NumberAt(found, c.y.type, first) << ", expected "
              << NumberAt(c.expected, c.y.type, first);
  }
  std::cout << (overrun ? ", guard bytes overwritten" : "") << ";";
  for (const TensorShape& x : c.fed) std::cout << " " << x;
  std::cout << " -> " << c.y << "\n";
  return false;
}

class Stream {
 public:
  Stream() { Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t Get() const { return stream_; }
  void Synchronize(const std::string& what) const { Check(cudaStreamSynchronize(stream_), what.c_str()); }

 private:
  cudaStream_t stream_ = nullptr;
};

std::unique_ptr<PackedNode> Pack(const Case& c, const Device& device) {
  if (c.lookup)
    return PackMapped(*c.lookup, std::get<BinaryNode>(std::get<NodeSpec>(c.node)), c.mapped_first, device);
  if (const auto* node = std::get_if<NodeSpec>(&c.node)) return PackNode(*node, device);
  const auto& node = std::get<StandardNode>(c.node);
  const std::optional<StandardNode> activation = c.activation;
  const StandardNode* const behind = activation ? &*activation : nullptr;
  if (c.quantizer && std::holds_alternative<FloatConvOp>(node))
    return PackQuantized(node, behind, *c.quantizer, device, c.precision);
  if (c.quantizer) return PackQuantized(std::get<FloatBinaryOp>(node), *c.quantizer);
  if (c.transpose) return PackPooled(*c.transpose, std::get<FloatPoolOp>(node));
  if (c.tiling || c.winograd) {
    Device older = device;
    if (c.is_older) older.capability = 80;
    Limits limits;
    if (c.activation) {
      const bool clips = c.activation->kind == UnaryKind::kClip;
      limits.low = clips ? c.activation->a : 0;
      if (clips) limits.high = c.activation->b;
    }
    limits.adds = c.adds;
    const auto pack_product = [&](const auto& op) {
      if constexpr (std::is_same_v<std::decay_t<decltype(op)>, FloatConvOp>) {
        if (c.winograd) return PackWinograd(op, older, limits, *c.winograd);
      }
      return HasTensorProduct(op, older, c.precision)
                 ? PackTensorProduct(op, older, c.precision, limits, *c.tiling)
                 : PackTiled(op, older, limits, *c.tiling);
    };
    const auto pack = [&](const auto& op) {
      return c.adds ? PackWithAdd(op, pack_product(op), limits, older) : pack_product(op);
    };
    const auto* const gemm = std::get_if<FloatGemmOp>(&node);
    return gemm != nullptr ? pack(*gemm) : pack(std::get<FloatConvOp>(node));
  }
  if (c.adds) return PackAdded(node, behind, device, c.precision);
  return c.activation ? PackActivated(node, *c.activation, device, c.precision)
                      : PackStandard(node, device, c.precision);
}

// Offsets of a tensor's beginning: none, or one that its elements still allow.
size_t OffsetOf(const TensorShape& tensor, bool odd) { return odd ? ElementSize(tensor.type) : 0; }

Buffers MakeInputs(const Case& c, bool odd) {
  Buffers out;
  for (size_t i = 0; i < c.fed.size(); ++i) {
    out.push_back(std::make_unique<Buffer>(c.data[i].size(), OffsetOf(c.fed[i], odd)));
    out.back()->Fill(c.data[i]);
  }
  return out;
}

std::vector<const void*> Pointers(const Buffers& buffers) {
  std::vector<const void*> out;
  for (const auto& buffer : buffers) out.push_back(buffer->Get());
  return out;
}

// A copy of the first input, the node that reads the copy, a copy of its output.
class Chain {
 public:
  Chain(const Case& c, const NodePlan& plan, const Device& device)
      : plan_(plan),
        inner_x_(c.data[0].size(), 0),
        inner_y_(c.expected.size(), 0),
        workspace_(plan.WorkspaceBytes(), 0) {
    const auto copy = PackCopy(device);
    copy_x_ = copy->Plan(std::span(c.fed).first(1), c.fed[0]);
    copy_y_ = copy->Plan(std::span(&c.y, 1), c.y);
  }

  void Launch(std::vector<const void*> fed, void* y, Queue& queue) {
    const void* first[] = {fed[0]};
    copy_x_->Launch(first, inner_x_.Get(), nullptr, queue);
    fed[0] = inner_x_.Get();
    plan_.Launch(fed, inner_y_.Get(), workspace_.Get(), queue);
    const void* last[] = {inner_y_.Get()};
    copy_y_->Launch(last, y, nullptr, queue);
  }

 private:
  const NodePlan& plan_;
  Buffer inner_x_, inner_y_, workspace_;
  std::shared_ptr<const NodePlan> copy_x_, copy_y_;
};

// The chain as an instantiated graph whose pointers change.
class CapturedChain {
 public:
  CapturedChain(Chain& chain, const std::vector<const void*>& fed, void* y, bool overlap,
                const Stream& stream)
      : chain_(chain), stream_(stream), overlap_(overlap) {
    Queue queue(stream.Get(), overlap);
    queue.Record(&nodes_);
    Check(cudaStreamBeginCapture(stream.Get(), cudaStreamCaptureModeThreadLocal), "capture");
    chain.Launch(fed, y, queue);
    Check(cudaStreamEndCapture(stream.Get(), &graph_), "capture");
    Check(cudaGraphInstantiate(&executable_, graph_, 0), "instantiate");
  }
  ~CapturedChain() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  CapturedChain(const CapturedChain&) = delete;
  CapturedChain& operator=(const CapturedChain&) = delete;

  void Replay(const std::vector<const void*>& fed, void* y) {
    Queue queue(stream_.Get(), overlap_);
    queue.Update(executable_, &nodes_);
    chain_.Launch(fed, y, queue);
    Check(cudaGraphLaunch(executable_, stream_.Get()), "graph launch");
  }

 private:
  Chain& chain_;
  const Stream& stream_;
  bool overlap_;
  RecordedNodes nodes_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

// Images as they lie with the channels last: float32 numbers, or their float16.
std::vector<uint8_t> InChannelsLast(const std::vector<uint8_t>& image, const std::vector<int64_t>& dims,
                                    bool halves) {
  const int64_t channels = dims[1], pixels = Count(dims) / dims[0] / channels;
  const size_t size = halves ? sizeof(uint16_t) : sizeof(float);
  std::vector<uint8_t> out(image.size() / sizeof(float) * size);
  for (int64_t i = 0; i < Count(dims); ++i) {
    float v = 0;
    std::memcpy(&v, &image[static_cast<size_t>(i) * sizeof v], sizeof v);
    const int64_t of_image = i % (channels * pixels);
    const int64_t at = i - of_image + of_image % pixels * channels + of_image / pixels;
    const uint16_t half = ToHalf(v);
    const void* const number = halves ? static_cast<const void*>(&half) : &v;
    std::memcpy(&out[static_cast<size_t>(at) * size], number, size);
  }
  return out;
}
std::vector<uint8_t> RoundedToHalves(std::vector<uint8_t> floats) {
  for (size_t i = 0; i < floats.size(); i += sizeof(float)) {
    float v = 0;
    std::memcpy(&v, &floats[i], sizeof v);
    v = FromHalf(ToHalf(v));
    std::memcpy(&floats[i], &v, sizeof v);
  }
  return floats;
}

// The node whose tensors lie with the channels last beside the one whose don't, both fed numbers that either holds.
bool RunChannelsLast(const Case& c, const PackedNode& packed, Draw& draw, const Stream& stream) {
  ChannelsLast last;
  for (size_t i = 0; i < c.fed.size(); ++i) {
    if (draw.Coin(0.7) && packed.MayReadChannelsLast(c.fed, i)) last.Add(i);
  }
  last.y = draw.Coin(0.7) && packed.MayMakeChannelsLast(c.fed);
  if (last == ChannelsLast{}) return true;
  const bool halves = c.precision == FloatPrecision::kFloat16;
  Buffers plain, given;
  for (size_t i = 0; i < c.fed.size(); ++i) {
    const bool lies_last = last.Has(i);
    const std::vector<uint8_t> data = lies_last && halves ? RoundedToHalves(c.data[i]) : c.data[i];
    const std::vector<uint8_t> as_given = lies_last ? InChannelsLast(data, c.fed[i].dims, halves) : data;
    plain.push_back(std::make_unique<Buffer>(data.size(), 0));
    plain.back()->Fill(data);
    given.push_back(std::make_unique<Buffer>(as_given.size(), 0));
    given.back()->Fill(as_given);
  }
  const auto run = [&](const PackedNode& node, const Buffers& fed, Buffer& y) {
    const auto plan = node.Plan(c.fed, c.y);
    Buffer workspace(plan->WorkspaceBytes(), 0);
    Queue queue(stream.Get(), true);
    plan->Launch(Pointers(fed), y.Get(), workspace.Get(), queue);
    stream.Synchronize(plan->Text());
    return plan->Text();
  };
  const size_t bytes = c.expected.size();
  Buffer of_plain(bytes, 0), y(last.y && halves ? bytes / 2 : bytes, 0);
  run(packed, plain, of_plain);
  const std::string text = run(*packed.InChannelsLast(last), given, y);
  Case expected = c;
  expected.expected = of_plain.Read();
  expected.expected.resize(bytes);
  expected.tolerance = 0;
  if (last.y) {
    expected.expected = InChannelsLast(expected.expected, c.y.dims, halves);
    expected.y.type = ElementType::kUInt8;  // compared byte by byte
  }
  return Verify(expected, y, text);
}

bool RunCase(const Case& c, Draw& draw, const Device& device, const Stream& stream) {
  const std::unique_ptr<PackedNode> packed = Pack(c, device);
  const std::shared_ptr<const NodePlan> plan = packed->Plan(c.fed, c.y);
  const bool overlap = device.capability >= 90 && draw.Coin(0.8);
  const std::string text = plan->Text() + (overlap ? " overlap" : "");
  const bool odd = draw.Coin(0.3);
  bool equal = true;

  Buffers x = MakeInputs(c, odd), other_x = MakeInputs(c, !odd);
  const size_t y_bytes = c.expected.size();
  Buffer y(y_bytes, OffsetOf(c.y, draw.Coin(0.3))), other_y(y_bytes, OffsetOf(c.y, draw.Coin(0.3)));
  Buffer workspace(plan->WorkspaceBytes(), 0);
  Queue queue(stream.Get(), overlap);
  plan->Launch(Pointers(x), y.Get(), workspace.Get(), queue);
  stream.Synchronize(text);
  equal = Verify(c, y, text + (odd ? " odd" : "")) && equal;

  if (c.tiling && c.tolerance > 0) {  // sums on Tensor Cores: in other tiles they are the same in every bit
    Case same = c;
    same.tiling->tile = static_cast<int>(draw.Int(0, FloatTiling::kTensorTiles - 1));
    const std::vector<uint8_t> made = y.Read();
    same.expected.assign(made.begin(), made.begin() + static_cast<std::ptrdiff_t>(y_bytes));
    same.tolerance = 0;
    const auto tiled = Pack(same, device)->Plan(c.fed, c.y);
    Buffer scratch(tiled->WorkspaceBytes(), 0);
    y.Poison();
    tiled->Launch(Pointers(x), y.Get(), scratch.Get(), queue);
    stream.Synchronize(tiled->Text());
    equal = Verify(same, y, tiled->Text() + " beside " + text) && equal;
  }

  equal = RunChannelsLast(c, *packed, draw, stream) && equal;

  y.Poison();
  Chain chain(c, *plan, device);
  CapturedChain captured(chain, Pointers(other_x), other_y.Get(), overlap, stream);
  captured.Replay(Pointers(x), y.Get());
  captured.Replay(Pointers(other_x), other_y.Get());
  stream.Synchronize(text + " in a graph");
  equal = Verify(c, y, text + " in a graph") && equal;
  equal = Verify(c, other_y, text + " in a graph, replayed") && equal;
  return equal;
}

// A draw that fits.
Case DrawCase(const std::string& kind, bool standard, Draw& draw) {
  constexpr int kTries = 100;
  for (int i = 0;; ++i) {
    try {
      Case c = standard ? MakeStandardCase(kind, draw) : MakeCase(kind, draw);
      if (!c.expected.empty()) return c;
    } catch (const Error& error) {
      if (i == kTries) throw;
    }
  }
}

// A max pooling of planes of bits: the largest of the highest bits of codes are the highest bits of the largest.
bool RunPlanes(Draw& draw, const Device& device, const Stream& stream) {
  const auto is_signed = [](const Case& c) {
    return std::get<MaxPoolNode>(std::get<NodeSpec>(c.node)).is_signed;
  };
  Case c = DrawCase("max_pool", false, draw);
  while (is_signed(c)) c = DrawCase("max_pool", false, draw);
  const int planes = static_cast<int>(draw.Int(1, 2));
  const auto in_planes = [&](std::vector<uint8_t> codes) {
    for (uint8_t& code : codes) code = static_cast<uint8_t>(code >> (8 - planes));
    return AsPlanes(codes, c.y.dims.back(), planes);
  };
  const auto packed = Pack(c, device)->InPlanes({planes, planes});
  const auto plan = packed->Plan(c.fed, c.y);
  const std::vector<uint8_t> given = in_planes(c.data[0]), expected = in_planes(c.expected);
  Buffer x(given.size(), 0), y(expected.size(), 0);
  x.Fill(given);
  const void* const fed[] = {x.Get()};
  Queue queue(stream.Get(), device.capability >= 90);
  plan->Launch(fed, y.Get(), nullptr, queue);
  stream.Synchronize(plan->Text());
  const std::vector<uint8_t> found = y.Read();
  const bool overrun = std::any_of(found.end() - kGuard, found.end(), [](uint8_t b) { return b != kPoison; });
  if (!overrun && std::equal(expected.begin(), expected.end(), found.begin())) return true;
  std::cout << "WRONG " << plan->Text() << ": " << c.fed[0] << " -> " << c.y
            << (overrun ? ", guard bytes overwritten" : "") << "\n";
  return false;
}

int Run(int64_t per_kind, uint32_t seed, const std::string& only) {
  const Device device = Device::Query(0);
  const Stream stream;
  int64_t cases = 0, wrong = 0;
  for (const bool standard : {false, true}) {
    for (const std::string& kind : standard ? StandardKinds() : Kinds()) {
      if (!only.empty() && kind != only) continue;
      Draw draw(seed, device);
      int64_t wrong_here = 0;
      const int64_t count = kind == "affine_large" ? std::min<int64_t>(per_kind, 5) : per_kind;
      for (int64_t i = 0; i < count; ++i) {
        if (!RunCase(DrawCase(kind, standard, draw), draw, device, stream)) ++wrong_here;
      }
      std::cout << kind << ": " << count << " nodes, " << wrong_here << " wrong\n" << std::flush;
      cases += count;
      wrong += wrong_here;
    }
  }
  if (only.empty() || only == "max_pool_planes") {
    Draw draw(seed, device);
    for (int64_t i = 0; i < per_kind; ++i, ++cases) wrong += RunPlanes(draw, device, stream) ? 0 : 1;
  }
  std::cout << device.name << ", seed " << seed << ": " << cases << " nodes, " << wrong
            << " with a wrong element\n";
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace lowbit::cuda::test

int main(int argc, char** argv) {
  try {
    constexpr int kDecimal = 10;
    return lowbit::cuda::test::Run(
        argc > 1 ? std::strtoll(argv[1], nullptr, kDecimal) : 100,
        argc > 2 ? static_cast<uint32_t>(std::strtoul(argv[2], nullptr, kDecimal)) : 1,
        argc > 3 ? argv[3] : "");
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
