#include "ep/cuda/tuner.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <sstream>
#include <utility>

#include "core/node_reader.h"
#include "core/status.h"
#include "ep/cuda/cuda_call.h"

namespace lowbit::ep {
namespace {

std::string DriverVersion() {
  std::ifstream file("/sys/module/nvidia/version");
  std::string version;
  if (std::getline(file, version) && !version.empty()) return version;
  int cuda = 0;
  static_cast<void>(cudaDriverGetVersion(&cuda));
  return "for CUDA " + std::to_string(cuda / 1000) + "." + std::to_string(cuda % 1000 / 10);
}

// Keeps a line of the file one line, whatever a driver calls its GPU.
std::string PrintableOnly(std::string text) {
  std::replace_if(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

std::string ShapeKey(const ConvShape& shape) {
  return std::to_string(shape.batch) + "x" + std::to_string(shape.in_h) + "x" + std::to_string(shape.in_w);
}

size_t Elements(int64_t a, int64_t b, int64_t c, int64_t d) {
  return static_cast<size_t>(
      CheckedProduct(CheckedProduct(a, b, "a tensor"), CheckedProduct(c, d, "a tensor"), "a tensor"));
}

// Times launches as a network runs them: nodes of one graph that follow each other closely, operands in L2
// where they fit.
class Stopwatch {
 public:
  Stopwatch() {
    CheckCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
    CheckCuda(cudaEventCreate(&begin_), "making an event");
    CheckCuda(cudaEventCreate(&end_), "making an event");
  }
  ~Stopwatch() {
    DestroyGraph();
    static_cast<void>(cudaEventDestroy(end_));
    static_cast<void>(cudaEventDestroy(begin_));
    static_cast<void>(cudaStreamDestroy(stream_));
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  // Microseconds of one launch: the median of some replays, or the first replay's where that alone is beyond
  // `limit`.
  double Microseconds(const std::function<void(cuda::Queue&)>& launch, bool overlap, int nodes,
                      double limit) {
    Capture(launch, overlap, nodes);
    static_cast<void>(Replay(nodes));  // loads the kernel, warms the caches
    std::array<double, 5> times = {};
    times[0] = Replay(nodes);
    if (times[0] > limit) return times[0];
    for (size_t i = 1; i < times.size(); ++i) times[i] = Replay(nodes);
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
  }

 private:
  void Capture(const std::function<void(cuda::Queue&)>& launch, bool overlap, int nodes) {
    DestroyGraph();
    CheckCuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capturing a measurement");
    try {
      cuda::Queue queue(stream_, overlap);
      for (int i = 0; i < nodes; ++i) launch(queue);
    } catch (const Error&) {
      static_cast<void>(cudaStreamEndCapture(stream_, &graph_));
      static_cast<void>(cudaGetLastError());
      throw;
    }
    CheckCuda(cudaStreamEndCapture(stream_, &graph_), "capturing a measurement");
    CheckCuda(cudaGraphInstantiate(&executable_, graph_, 0), "instantiating a measurement");
  }

  void DestroyGraph() {
    if (executable_ != nullptr) static_cast<void>(cudaGraphExecDestroy(std::exchange(executable_, nullptr)));
    if (graph_ != nullptr) static_cast<void>(cudaGraphDestroy(std::exchange(graph_, nullptr)));
  }

  double Replay(int nodes) {
    CheckCuda(cudaEventRecord(begin_, stream_), "recording an event");
    CheckCuda(cudaGraphLaunch(executable_, stream_), "launching a measurement");
    CheckCuda(cudaEventRecord(end_, stream_), "recording an event");
    CheckCuda(cudaEventSynchronize(end_), "waiting for a measurement");
    float milliseconds = 0;
    CheckCuda(cudaEventElapsedTime(&milliseconds, begin_, end_), "reading a measurement");
    return 1e3 * static_cast<double>(milliseconds) / nodes;
  }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

// Kernels take less power, and run faster, on zeros.
void FillWithNoise(uint8_t* data, size_t bytes, cudaStream_t stream) {
  constexpr size_t kNoise = 1 << 20;
  std::vector<uint8_t> noise(std::min(bytes, kNoise));
  uint32_t random = 1;
  for (uint8_t& byte : noise) {
    random = random * 1664525 + 1013904223;
    byte = static_cast<uint8_t>(random >> 24);
  }
  for (size_t at = 0; at < bytes; at += kNoise) {
    CheckCuda(cudaMemcpyAsync(data + at, noise.data(), std::min(bytes - at, noise.size()),
                              cudaMemcpyHostToDevice, stream),
              "filling a tensor");
  }
  CheckCuda(cudaStreamSynchronize(stream), "filling a tensor");
}

std::optional<cuda::ConvConfig> Named(const std::vector<cuda::ConvConfig>& candidates,
                                      const std::string& text) {
  const auto found = std::find_if(candidates.begin(), candidates.end(),
                                  [&](const cuda::ConvConfig& each) { return each.Text() == text; });
  return found == candidates.end() ? std::nullopt : std::optional(*found);
}

}  // namespace

TuneOrigin CudaTuneOrigin(const cuda::Device& device) {
  return {
      PrintableOnly(device.name + ", sm_" + std::to_string(device.capability) + ", " +
                    std::to_string(device.multiprocessors) + " multiprocessors, driver " + DriverVersion()),
      std::string("lowbit ") + LOWBIT_VERSION + ", kernels " + LOWBIT_CUDA_KERNELS};
}

Tuner::Shared& Tuner::SharedOf(const TuneOrigin& origin) {
  static std::mutex mutex;
  // Never destroyed: sessions that outlive static destructors hold what is in it.
  static auto& all = *new std::map<std::string, std::unique_ptr<Shared>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Shared>& shared = all[origin.machine];
  if (shared == nullptr) shared = std::make_unique<Shared>(origin);
  return *shared;
}

Tuner::Tuner(std::shared_ptr<CudaDevice> device, const EpOptions& options)
    : device_(std::move(device)),
      tuning_(options.tuning),
      reference_(options.reference),
      warn_(options.warn),
      shared_(SharedOf(CudaTuneOrigin(device_->Properties()))) {
  if (TuneCacheEnabled()) path_ = TuneFilePath(CudaTuneOrigin(device_->Properties()), options.cache_dir);
}

cuda::ConvChooser Tuner::ChooserFor(const ConvSpec& spec) {
  NodeFacts facts;
  facts.key = DescribeForTuning(spec, "", false);
  facts.y_element_bytes = spec.epilogue.quantized_output ? 1 : 4;
  facts.in_channels = spec.geometry.in_channels;
  facts.out_channels = spec.geometry.out_channels;
  facts.has_residual = spec.epilogue.has_residual;
  return
      [self = shared_from_this(), facts](const std::shared_ptr<const cuda::PackedConv>& conv,
                                         const ConvShape& shape) { return self->Choose(facts, conv, shape); };
}

cuda::ConvConfig Tuner::Choose(const NodeFacts& facts, const std::shared_ptr<const cuda::PackedConv>& conv,
                               const ConvShape& shape) {
  if (reference_) return {};  // the plain kernel
  const std::vector<cuda::ConvConfig> candidates = cuda::CandidateConfigs(*conv, shape);
  if (tuning_ == Tuning::kOff || candidates.size() == 1) return candidates.front();
  const std::string key = facts.key + ShapeKey(shape);
  std::optional<cuda::ConvConfig> chosen = Named(candidates, Measured(key));
  if (tuning_ == Tuning::kOn) {
    const std::lock_guard lock(shared_.measuring);
    if (!chosen) chosen = Named(candidates, Measured(key));  // another session may just have measured it
    try {
      if (!chosen) chosen = Measure(facts, conv, shape);
      Keep(key, chosen->Text());
    } catch (const Error& e) {
      Warn(std::string("lowbit: a convolution is not measured: ") + e.what());
      return candidates.front();
    }
  }
  if (!chosen) return candidates.front();
  const std::lock_guard lock(mutex_);
  taken_[key] = chosen->Text();
  return *chosen;
}

std::string Tuner::Measured(const std::string& key) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = adopted_.find(key);
    if (found != adopted_.end()) return found->second;
  }
  const std::pair<std::string, int> entry{key, 1};
  {
    const std::lock_guard lock(shared_.mutex);
    const auto found = shared_.measured.find(entry);
    if (found != shared_.measured.end()) return found->second;
  }
  if (path_.empty()) return {};
  const auto entries = shared_.file.Read(path_, [this](const std::string& warning) { Warn(warning); });
  const auto found = entries->find(entry);
  return found == entries->end() ? std::string() : found->second;
}

cuda::ConvConfig Tuner::Measure(const NodeFacts& facts, const std::shared_ptr<const cuda::PackedConv>& conv,
                                const ConvShape& shape) const {
  const DeviceScope scope(device_->Ordinal());
  const size_t x_bytes = Elements(shape.batch, shape.in_h, shape.in_w, facts.in_channels);
  const size_t y_elements = Elements(shape.batch, shape.out_h, shape.out_w, facts.out_channels);
  const DeviceBlock x(device_, x_bytes), y(device_, y_elements * facts.y_element_bytes),
      residual(device_, facts.has_residual ? y_elements : 0);
  FillWithNoise(x.Get(), x_bytes, device_->CopyStream());
  if (facts.has_residual) FillWithNoise(residual.Get(), y_elements, device_->CopyStream());

  Stopwatch stopwatch;
  const bool overlap = device_->Properties().capability >= 90;
  const auto time = [&](const cuda::ConvPlan& plan, int nodes, double limit) {
    const DeviceBlock workspace(device_, cuda::PlanWorkspaceBytes(plan));
    const auto launch = [&](cuda::Queue& queue) {
      cuda::LaunchConv(plan, x.Get(), facts.has_residual ? residual.Get() : nullptr, y.Get(), workspace.Get(),
                       queue);
    };
    return stopwatch.Microseconds(launch, overlap, nodes, limit);
  };
  // A graph of about half a millisecond: long against what begins and ends it, short against a user's
  // patience. As many nodes for every candidate: what begins and ends the graph is a part of all times.
  constexpr double kGraphMicroseconds = 500, kNoLimit = std::numeric_limits<double>::max();
  constexpr int kFewestNodes = 3, kMostNodes = 40;
  const double estimate = time(*cuda::PlanConv(conv, shape), kFewestNodes, kNoLimit);
  const int nodes = std::clamp(static_cast<int>(kGraphMicroseconds / estimate), kFewestNodes, kMostNodes);
  // Some percent may be chance: the cost model's choice, which is measured first, must be beaten clearly.
  constexpr double kClearly = 0.97;
  double best = kNoLimit;
  const auto measure = [&](const cuda::ConvPlan& plan) {
    const bool is_first = best == kNoLimit;
    const double measured = time(plan, nodes, is_first ? kNoLimit : 1.5 * best) * (is_first ? kClearly : 1);
    best = std::min(best, measured);
    return measured;
  };
  return cuda::TuneConv(conv, shape, measure);
}

void Tuner::Keep(const std::string& key, const std::string& configuration) {
  const std::pair<std::string, int> entry{key, 1};
  {
    const std::lock_guard lock(shared_.mutex);
    shared_.measured[entry] = configuration;
  }
  if (path_.empty()) return;
  try {
    const auto entries = shared_.file.Read(path_, [this](const std::string& warning) { Warn(warning); });
    const auto found = entries->find(entry);
    if (found == entries->end() || found->second != configuration)
      shared_.file.Add(path_, {{entry, configuration}});
  } catch (const Error& e) {
    Warn(e.what());
  }
}

std::string Tuner::Choices() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const auto& [key, configuration] : taken_)
    text.append(key).append("\t").append(configuration).append("\n");
  return text;
}

void Tuner::Adopt(const std::string& text) {
  const std::lock_guard lock(mutex_);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t tab = line.find('\t');
    if (tab != std::string::npos) adopted_[line.substr(0, tab)] = line.substr(tab + 1);
  }
}

void Tuner::Warn(const std::string& warning) const {
  if (warn_) warn_(warning);
}

}  // namespace lowbit::ep
