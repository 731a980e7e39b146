#include "ep/cuda/tuner.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <limits>
#include <sstream>
#include <utility>

#include "core/node_reader.h"
#include "core/status.h"
#include "ep/cuda/cuda_call.h"
#include "ep/cuda/region_timer.h"
#include "ep/cuda/stopwatch.h"
#include "ep/region/tune_region.h"

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

// Launches as a network runs them: nodes of one graph that follow each other closely, operands in L2 where
// they fit.
class Row {
 public:
  Row(const std::function<void(cuda::Queue&)>& launch, bool overlap, int nodes, cudaStream_t stream)
      : nodes_(nodes), stream_(stream) {
    CheckCuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capturing a measurement");
    try {
      cuda::Queue queue(stream_, overlap);
      for (int i = 0; i < nodes; ++i) launch(queue);
    } catch (const Error&) {
      static_cast<void>(cudaStreamEndCapture(stream_, &graph_));
      static_cast<void>(cudaGetLastError());
      Destroy();
      throw;
    }
    CheckCuda(cudaStreamEndCapture(stream_, &graph_), "capturing a measurement");
    const cudaError_t error = cudaGraphInstantiate(&executable_, graph_, 0);
    if (error != cudaSuccess) Destroy();
    CheckCuda(error, "instantiating a measurement");
  }
  ~Row() { Destroy(); }
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;

  // Microseconds of one launch: the median of some replays, or the first replay's where that alone is beyond
  // `limit`.
  double Microseconds(const Stopwatch& stopwatch, double limit) const {
    constexpr int kReplays = 5;
    const auto replay = [&] {
      return stopwatch.Microseconds([&] {
        CheckCuda(cudaGraphLaunch(executable_, stream_), "launching a measurement");
      }) / nodes_;
    };
    static_cast<void>(replay());  // loads the kernel, warms the caches
    std::vector<double> times = {replay()};
    if (times[0] > limit) return times[0];
    while (times.size() < kReplays) times.push_back(replay());
    return Median(times);
  }

 private:
  void Destroy() {
    if (executable_ != nullptr) static_cast<void>(cudaGraphExecDestroy(executable_));
    if (graph_ != nullptr) static_cast<void>(cudaGraphDestroy(graph_));
  }

  int nodes_;
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

// Alone, a configuration that keeps its blocks apart is as fast as the same without; among others it may be
// faster.
void AddApart(const std::vector<cuda::ConvConfig>& candidates,
              std::vector<std::pair<double, cuda::ConvConfig>>& ranking) {
  constexpr size_t kMost = 4;
  for (size_t i = 0, count = std::min(kMost, ranking.size()); i < count; ++i) {
    auto [time, apart] = ranking[i];
    apart.apart = !apart.apart;
    if (std::find(candidates.begin(), candidates.end(), apart) != candidates.end())
      ranking.emplace_back(time, apart);
  }
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

cuda::ConvChooser Tuner::ChooserFor(const ConvSpec& spec, bool dequantized) {
  NodeFacts facts;
  facts.key = DescribeForTuning(spec, "", false);
  if (dequantized) facts.key = "dequantized, " + facts.key;
  facts.y_element_bytes = spec.epilogue.quantized_output && !dequantized ? 1 : 4;
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
  if (trial_ != nullptr && trial_->tuner == this) {
    trial_->key = key;
    if (trial_->config) return *trial_->config;
  }
  std::optional<cuda::ConvConfig> chosen = Named(candidates, Measured(key));
  if (tuning_ == Tuning::kOn) {
    const std::lock_guard lock(shared_.measuring);
    if (!chosen) chosen = Named(candidates, Measured(key));  // another session may just have measured it
    try {
      if (!chosen) {
        Ranking ranking = Measure(facts, conv, shape);
        chosen = ranking.front().second;
        const std::lock_guard fresh_lock(mutex_);
        fresh_[key] = std::move(ranking);
      }
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

Tuner::Ranking Tuner::Measure(const NodeFacts& facts, const std::shared_ptr<const cuda::PackedConv>& conv,
                              const ConvShape& shape) const {
  const DeviceScope scope(device_->Ordinal());
  const TensorShape x_shape{ElementType::kUInt8, {shape.batch, shape.in_h, shape.in_w, facts.in_channels}},
      y_shape{ElementType::kUInt8, {shape.batch, shape.out_h, shape.out_w, facts.out_channels}};
  const size_t y_elements = Elements(shape.batch, shape.out_h, shape.out_w, facts.out_channels);
  const DeviceBlock x(device_, Elements(shape.batch, shape.in_h, shape.in_w, facts.in_channels)),
      y(device_, y_elements * facts.y_element_bytes), residual(device_, facts.has_residual ? y_elements : 0);
  FillWithNoise(x.Get(), x_shape, *device_);
  if (facts.has_residual) FillWithNoise(residual.Get(), y_shape, *device_);

  const Stopwatch stopwatch;
  const bool overlap = device_->Properties().capability >= 90;
  const auto time = [&](const cuda::ConvPlan& plan, int nodes, double limit) {
    const DeviceBlock workspace(device_, cuda::PlanWorkspaceBytes(plan));
    const auto launch = [&](cuda::Queue& queue) {
      cuda::LaunchConv(plan, x.Get(), facts.has_residual ? residual.Get() : nullptr, y.Get(), workspace.Get(),
                       queue);
    };
    return Row(launch, overlap, nodes, stopwatch.Stream()).Microseconds(stopwatch, limit);
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
  Ranking ranking;
  const auto measure = [&](const cuda::ConvPlan& plan) {
    const bool is_first = ranking.empty();
    const double measured = time(plan, nodes, is_first ? kNoLimit : 1.5 * best) * (is_first ? kClearly : 1);
    best = std::min(best, measured);
    ranking.emplace_back(measured, cuda::PlanConfig(plan));
    return measured;
  };
  static_cast<void>(cuda::TuneConv(conv, shape, measure));
  const auto faster = [](const auto& a, const auto& b) { return a.first < b.first; };
  std::stable_sort(ranking.begin(), ranking.end(), faster);
  AddApart(cuda::CandidateConfigs(*conv, shape), ranking);
  std::stable_sort(ranking.begin(), ranking.end(), faster);
  return ranking;
}

thread_local Tuner::Trial* Tuner::trial_ = nullptr;

std::shared_ptr<const StepPlan> Tuner::PlanOnTrial(const PlannedStep& step, Trial& trial) const {
  trial.tuner = this;
  trial_ = &trial;
  const std::shared_ptr<Trial*> end(&trial_, [](Trial** of_thread) { *of_thread = nullptr; });
  return step.step->Plan(step.fed_shapes);
}

std::map<std::string, std::vector<size_t>> Tuner::StepsByKey(const RegionPlan& plan) const {
  std::map<std::string, std::vector<size_t>> steps;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    Trial trial;
    static_cast<void>(PlanOnTrial(plan.steps[i], trial));
    if (!trial.key.empty()) steps[trial.key].push_back(i);
  }
  return steps;
}

std::vector<cuda::ConvConfig> Tuner::TakeClose(const std::string& key) {
  // What is slower by more in a row of equals will not be faster among others.
  constexpr double kClose = 1.25;
  constexpr size_t kMost = 10;
  const std::lock_guard lock(mutex_);
  const auto ranking = fresh_.find(key);
  if (ranking == fresh_.end()) return {};
  std::vector<cuda::ConvConfig> close;
  for (const auto& [time, config] : ranking->second) {
    if (time <= kClose * ranking->second.front().first && close.size() < kMost) close.push_back(config);
  }
  fresh_.erase(ranking);
  return close;
}

void Tuner::TuneTogether(RegionPlan& plan) {
  constexpr std::chrono::seconds kPatience{20};
  try {
    {
      const std::lock_guard lock(mutex_);
      if (fresh_.empty()) return;
    }
    struct Group {
      std::string key;
      std::vector<cuda::ConvConfig> configs;
    };
    std::vector<Group> groups;
    std::vector<TunedSteps> tuned;
    std::vector<size_t> group_of(plan.steps.size());
    for (auto& [key, steps] : StepsByKey(plan)) {
      std::vector<cuda::ConvConfig> configs = TakeClose(key);
      if (configs.empty()) continue;
      for (const size_t step : steps) group_of[step] = groups.size();
      tuned.push_back({std::move(steps), configs.size()});
      groups.push_back({key, std::move(configs)});
    }
    if (groups.empty()) return;
    const std::lock_guard lock(shared_.measuring);
    const DeviceScope scope(device_->Ordinal());
    const RegionTimer timer(plan, device_);
    const auto plan_again = [&](size_t step, size_t choice) {
      Trial trial;
      trial.config = groups[group_of[step]].configs[choice];
      return PlanOnTrial(plan.steps[step], trial);
    };
    TuneRegion(
        plan, tuned, plan_again, [&](const RegionPlan& trial) { return timer.Microseconds(trial); },
        kPatience);
    for (size_t i = 0; i < groups.size(); ++i) {
      const std::string chosen = groups[i].configs[tuned[i].chosen].Text();
      Keep(groups[i].key, chosen);
      const std::lock_guard taken_lock(mutex_);
      taken_[groups[i].key] = chosen;
    }
  } catch (const Error& e) {
    Warn(std::string("lowbit: a region is not measured as a whole: ") + e.what());
  }
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
