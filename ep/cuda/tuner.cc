#include "ep/cuda/tuner.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>
#include <thread>
#include <utility>

#include "core/node_reader.h"
#include "core/status.h"
#include "ep/cuda/cuda_call.h"
#include "ep/cuda/fusions.h"
#include "ep/cuda/region_timer.h"
#include "ep/cuda/stopwatch.h"
#include "ep/region/tune_region.h"
#include "kernels/cuda/fused/affine_conv.h"
#include "kernels/cuda/fused/bit_blocks.h"
#include "kernels/cuda/fused/chain.h"
#include "kernels/cuda/left_out.h"

namespace lowbit::ep {
namespace {

// In the place of a configuration of two steps in one launch: they run one after the other.
constexpr const char* kApart = "apart";
// How tensors of few bits lie between the steps of a region.
constexpr const char *kInPlanes = "planes", *kInBytes = "bytes", *kInMostPlanes = "most planes";

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

size_t BytesOf(const TensorShape& tensor) {
  return static_cast<size_t>(ElementCount(tensor.dims)) * ElementSize(tensor.type);
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

bool Holds(const std::vector<cuda::ConvConfig>& candidates, const cuda::ConvConfig& config) {
  return std::find(candidates.begin(), candidates.end(), config) != candidates.end();
}

// Alone, a configuration that keeps its blocks apart is as fast as the same without; among others it may be
// faster.
void AddApart(const std::vector<cuda::ConvConfig>& candidates,
              std::vector<std::pair<double, cuda::ConvConfig>>& ranking) {
  constexpr size_t kMost = 4;
  for (size_t i = 0, count = std::min(kMost, ranking.size()); i < count; ++i) {
    std::pair<double, cuda::ConvConfig> twin = ranking[i];
    twin.second.apart = !twin.second.apart;
    const auto is_twin = [&](const auto& entry) { return entry.second == twin.second; };
    if (Holds(candidates, twin.second) && std::none_of(ranking.begin(), ranking.end(), is_twin))
      ranking.push_back(std::move(twin));
  }
}

// Whom the tuner tells what it measured: the file that LOWBIT_TUNE_LOG names, for those who fit the cost
// model. A line each, with key, configuration and microseconds: "chosen" for the cost model's choice and
// "alone" for the others, in rows of equals, the fastest first; "region" where it is the time of the whole
// region, without key and configuration before the first trial.
class TuneLog {
 public:
  TuneLog() {
    const char* const path = std::getenv("LOWBIT_TUNE_LOG");
    if (path != nullptr && *path != '\0') file_.open(path, std::ios::app);
  }

  bool IsWanted() const { return file_.is_open(); }
  void Add(const char* what, const std::string& key, const std::string& configuration, double microseconds) {
    if (IsWanted()) file_ << what << '\t' << key << '\t' << configuration << '\t' << microseconds << '\n';
  }

 private:
  std::ofstream file_;
};

// The configurations that come close to the fastest, which is the first: a guess at what neighbours can make
// good, and what a user's patience allows. A log wants to know of others as well.
std::vector<cuda::ConvConfig> CloseToFastest(const std::vector<std::pair<double, cuda::ConvConfig>>& ranking,
                                             bool is_logged) {
  const double at_most = is_logged ? 1.6 : 1.25;
  const size_t most = is_logged ? 24 : 10;
  std::vector<cuda::ConvConfig> close;
  for (const auto& [time, config] : ranking) {
    if (time <= at_most * ranking.front().first && close.size() < most) close.push_back(config);
  }
  return close;
}

template <typename Config>
std::vector<std::string> TextsOf(const std::vector<Config>& configs) {
  std::vector<std::string> texts;
  texts.reserve(configs.size());
  for (const Config& each : configs) texts.push_back(each.Text());
  return texts;
}

template <typename Config>
std::optional<Config> Named(const std::vector<Config>& candidates, const std::string& text) {
  const auto found = std::find_if(candidates.begin(), candidates.end(),
                                  [&](const Config& each) { return each.Text() == text; });
  return found == candidates.end() ? std::nullopt : std::optional(*found);
}

// A convolution, or the pair of one and that which makes its residuals, or one and the windows in front of it, and the
// convolution that follows.
class ChainSteps final : public TwoSteps {
 public:
  explicit ChainSteps(cuda::ConvChain chain)
      : chain_(std::move(chain)), configs_(cuda::CandidateChains(chain_)) {}

  std::vector<std::string> Candidates() const override { return TextsOf(configs_); }
  bool Pay() const override { return cuda::ChainPays(chain_); }
  Launcher Plan(const std::string& candidate) const override {
    return [plan = cuda::PlanChain(chain_, Named(configs_, candidate).value()),
            is_pair = chain_.residuals != nullptr](std::span<const void* const> fed, void* y, void* z,
                                                   cuda::Queue& queue) {
      const void* const other = fed.size() > 1 ? fed[1] : nullptr;
      cuda::LaunchChain(*plan, is_pair ? other : fed[0], is_pair ? fed[0] : other, y, z, queue);
    };
  }

 private:
  const cuda::ConvChain chain_;
  const std::vector<cuda::ChainConfig> configs_;
};

// A Concat, and the function and convolution that read its output.
class JoiningSteps final : public TwoSteps {
 public:
  explicit JoiningSteps(cuda::AffineConv nodes)
      : nodes_(std::move(nodes)), configs_(cuda::JoiningConfigs(nodes_)) {
    constexpr size_t kMost = 6;
    configs_.resize(std::min(configs_.size(), kMost));
  }

  std::vector<std::string> Candidates() const override { return TextsOf(configs_); }
  bool Pay() const override { return cuda::JoiningPays(nodes_); }
  Launcher Plan(const std::string& candidate) const override {
    return [plan = cuda::PlanAffineConv(nodes_, Named(configs_, candidate).value())](
               std::span<const void* const> fed, void* y, void* z, cuda::Queue& queue) {
      cuda::LaunchAffineConv(*plan, fed, y, z, queue);
    };
  }

 private:
  const cuda::AffineConv nodes_;
  std::vector<cuda::ConvConfig> configs_;
};

// Residual blocks of planes of bits.
class BlocksSteps final : public TwoSteps {
 public:
  explicit BlocksSteps(cuda::BitBlocks blocks)
      : blocks_(std::move(blocks)), configs_(cuda::BitBlocksConfigs(blocks_)) {}

  std::vector<std::string> Candidates() const override { return TextsOf(configs_); }
  bool Pay() const override { return *Microseconds() < cuda::EstimateApart(blocks_); }
  std::optional<double> Microseconds() const override { return cuda::EstimateMicroseconds(blocks_); }
  Launcher Plan(const std::string& candidate) const override {
    return [plan = cuda::PlanBitBlocks(blocks_, Named(configs_, candidate).value())](
               std::span<const void* const> fed, void*, void* z, cuda::Queue& queue) {
      cuda::LaunchBitBlocks(*plan, fed[0], z, queue);
    };
  }

 private:
  const cuda::BitBlocks blocks_;
  const std::vector<cuda::BitBlocksConfig> configs_;
};

FoundTwo FindThree(std::span<const FedStep> steps) {
  if (cuda::IsLeftOut(kBottleneck)) return {};
  const auto step = [&](size_t i) -> const CudaStep& { return static_cast<const CudaStep&>(steps[i].step); };
  auto chain = cuda::FindChain(step(0).Node(), steps[0].fed, step(1).Node(), steps[1].fed, step(2).Node(),
                               steps[2].fed);
  if (!chain) return {};
  std::string key = "windows and chain, " + step(0).Key() + ", " + step(1).Key() + ", " + step(2).Key() +
                    cuda::ShapeText(chain->windows_shape);
  return {std::make_shared<const ChainSteps>(*std::move(chain)), std::move(key)};
}
FoundTwo FindTogether(std::span<const FedStep> steps) {
  if (steps.size() > 2) return FindThree(steps);
  const auto &first = static_cast<const CudaStep&>(steps[0].step),
             &second = static_cast<const CudaStep&>(steps[1].step);
  const std::span<const TensorShape> first_fed = steps[0].fed, second_fed = steps[1].fed;
  if (auto chain = cuda::FindChain(first.Node(), first_fed, second.Node(), second_fed)) {
    std::string key = "chain, " + first.Key() + ", " + second.Key() + cuda::ShapeText(chain->shape);
    if (chain->residuals != nullptr) key += "+" + cuda::ShapeText(chain->residuals_shape);
    return {std::make_shared<const ChainSteps>(*std::move(chain)), std::move(key)};
  }
  const ConcatNode* const concat = cuda::IsLeftOut(kJoinedConv) ? nullptr : first.Node().Concat();
  if (concat == nullptr) return {};
  const auto nodes = second.Node().Affine(second_fed);
  auto joining = nodes != nullptr ? cuda::BehindConcat(*concat, first_fed, *nodes) : std::nullopt;
  if (!joining) return {};
  std::string key = "concat of " + std::to_string(joining->joined.size()) + ", first " +
                    std::to_string(joining->joined.front().channels) + ", " + second.Key() +
                    cuda::ShapeText(joining->shape);
  return {std::make_shared<const JoiningSteps>(*std::move(joining)), std::move(key)};
}

// Steps in threes, as Backend::PlanBlocks has it.
FoundTwo FindBlocks(std::span<const FedStep> steps) {
  std::vector<cuda::FedNode> nodes;
  std::string keys;
  for (const FedStep& each : steps) {
    const auto& step = static_cast<const CudaStep&>(each.step);
    nodes.push_back({&step.Node(), each.fed});
    keys += step.Key() + ";";
  }
  auto blocks = cuda::FindBitBlocks(nodes);
  if (!blocks) return {};
  // Of blocks that are alike the first one's convolutions say it all, and all of them where they are not.
  std::string key = std::to_string(blocks->convs.size()) + " bit blocks";
  for (size_t i = 0; i < 3; ++i) key += ", " + static_cast<const CudaStep&>(steps[i].step).Key();
  key += cuda::ShapeText(blocks->shape) + ", all " + TextHash(keys);
  return {std::make_shared<const BlocksSteps>(*std::move(blocks)), std::move(key)};
}

// What TuneRegion tries: configurations of one convolution, or two steps apart and then together as each of these.
struct Trials {
  std::string key;
  std::vector<cuda::ConvConfig> convs;
  std::vector<std::string> together;

  std::string Text(size_t choice) const {
    if (!convs.empty()) return convs[choice].Text();
    return choice == 0 ? kApart : together[choice - 1];
  }
};

// The steps of `plan` that go with those behind them and are still to be measured so, by key.
std::map<std::string, std::vector<size_t>> GuessedTwos(const RegionPlan& plan) {
  std::map<std::string, std::vector<size_t>> steps;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const auto* const two = static_cast<const CudaTwoPlan*>(plan.steps[i].with_next.get());
    if (two != nullptr && !two->IsSettled()) steps[two->Key()].push_back(i);
  }
  return steps;
}

// Of a region at its shapes. The first of its convolutions that may read planes stands there as it is, so that a compiled
// model knows that the choice concerns it (Tuner::Choices).
std::string LayoutKey(const RegionPlan& plan) {
  std::string all, first;
  for (const PlannedStep& planned : plan.steps) {
    const auto* const step = static_cast<const CudaStep*>(planned.step);
    const std::string& key = step->Key();
    all += key;
    for (const TensorShape& fed : planned.fed_shapes) {
      for (const int64_t dim : fed.dims) all.append(" ").append(std::to_string(dim));
    }
    all += ";";
    if (first.empty() && step->Node().PlanesRead() > 0) first = key;
  }
  return "planes, " + first + ", region " + TextHash(all);
}

// What the cost model says of a plan's steps, but for those that it does not know; two steps in one launch, which may be
// faster than apart, as if they were apart.
double EstimateOf(const RegionPlan& plan) {
  double sum = 0;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const PlannedStep& planned = plan.steps[i];
    const auto* const together = static_cast<const CudaTwoPlan*>(planned.with_next.get());
    if (const auto known = together != nullptr ? together->Steps()->Microseconds() : std::nullopt) {
      sum += *known;
      i += planned.together - 1;
      continue;
    }
    const auto planes_fed = [&](size_t which) {
      return planned.fed.size() > which ? planned.fed[which].planes : 0;
    };
    const TensorPlanes planes{planes_fed(0), planned.output.planes, planes_fed(1)};
    const cuda::PackedNode& node = static_cast<const CudaStep*>(planned.step)->Node();
    sum += node.Microseconds(planned.fed_shapes, planes).value_or(0);
  }
  return sum;
}

// Of a GPU that is not there the measurements of one that was.
TuneOrigin OriginOf(const cuda::Device& device, const EpOptions& options) {
  TuneOrigin origin = CudaTuneOrigin(device);
  if (device.IsAbsent() && !options.tuned_on.empty()) origin.machine = PrintableOnly(options.tuned_on);
  return origin;
}

}  // namespace

TuneOrigin CudaTuneOrigin(const cuda::Device& device) {
  return {
      PrintableOnly(device.name + ", sm_" + std::to_string(device.capability) + ", " +
                    std::to_string(device.multiprocessors) + " multiprocessors, driver " + DriverVersion()),
      std::string("lowbit ") + LOWBIT_VERSION + ", kernels " + LOWBIT_CUDA_KERNELS + cuda::LeftOutText()};
}

int MultiprocessorsOf(const std::string& machine) {
  const size_t word = machine.rfind(" multiprocessors");
  const size_t before = word == std::string::npos || word == 0 ? word : machine.rfind(' ', word - 1);
  int count = 0;
  if (word != std::string::npos && before != std::string::npos)
    std::from_chars(machine.data() + before + 1, machine.data() + word, count);
  return count;
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
      use_graph_(options.graph),
      warn_(options.warn),
      shared_(SharedOf(OriginOf(device_->Properties(), options))) {
  if (TuneCacheEnabled()) path_ = TuneFilePath(OriginOf(device_->Properties(), options), options.cache_dir);
}

cuda::ConvChooser Tuner::ChooserFor(const ConvSpec& spec, std::string_view stored_as) {
  return Chooser((stored_as.empty() ? "" : std::string(stored_as) + ", ") +
                 DescribeForTuning(spec, "", false));
}

cuda::ResidualPairChoosers Tuner::ChoosersFor(const ConvSpec& first, const ConvSpec& second) {
  return {Chooser("residual pair, " + DescribeForTuning(first, "", false) + ", " +
                  DescribeForTuning(second, "", false)),
          ChooserFor(first), ChooserFor(second)};
}

cuda::ConvChooser Tuner::Chooser(std::string node) {
  {
    const std::lock_guard lock(mutex_);
    nodes_.insert(node);
  }
  return [self = shared_from_this(), node = std::move(node)](const cuda::ConvChoice& choice) {
    return self->Choose(node, choice);
  };
}

cuda::ConvConfig Tuner::Choose(const std::string& node, const cuda::ConvChoice& choice) {
  const std::vector<cuda::ConvConfig>& candidates = choice.configs;
  if (reference_) return candidates.back();  // the plain kernel
  if (tuning_ == Tuning::kOff || candidates.size() == 1) return candidates.front();
  const std::string key = node + choice.shape;
  if (trial_ != nullptr && trial_->tuner == this) {
    if (!trial_->key.empty()) return Measured(candidates, key).value_or(candidates.front());
    trial_->key = key;
    return trial_->config && Holds(candidates, *trial_->config) ? *trial_->config : candidates.front();
  }
  std::optional<cuda::ConvConfig> chosen = Measured(candidates, key);
  if (tuning_ == Tuning::kOn && !(chosen && IsFiled(key))) {
    try {
      // Before the lock: planning one of them may have to choose for its parts.
      constexpr size_t kMost = 64;
      Plans plans;
      for (size_t i = 0; i < std::min(candidates.size(), kMost); ++i)
        plans.push_back(choice.plan(candidates[i]));
      const std::lock_guard lock(shared_.measuring);
      chosen = Measured(candidates, key);  // another session may just have measured it
      if (chosen) {
        Keep(key, chosen->Text());
      } else {
        chosen = MeasureAndKeep(key, choice, plans);
      }
    } catch (const Error& e) {
      Warn(std::string("lowbit: a convolution is not measured: ") + e.what());
    }
  }
  if (!chosen) return candidates.front();
  const std::lock_guard lock(mutex_);
  taken_[key] = chosen->Text();
  return *chosen;
}

std::optional<std::string> Tuner::Known(const std::string& key,
                                        const std::function<bool(const std::string&)>& accepts) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = adopted_.find(key);
    if (found != adopted_.end() && accepts(found->second)) return found->second;
  }
  const std::pair<std::string, int> entry{key, 1};
  {
    const std::lock_guard lock(shared_.mutex);
    const auto found = shared_.measured.find(entry);
    if (found != shared_.measured.end() && accepts(found->second)) return found->second;
  }
  if (path_.empty()) return std::nullopt;
  const auto entries = shared_.file.Read(path_, [this](const std::string& warning) { Warn(warning); });
  const auto found = entries->find(entry);
  return found != entries->end() && accepts(found->second) ? std::optional(found->second) : std::nullopt;
}

std::optional<cuda::ConvConfig> Tuner::Measured(const std::vector<cuda::ConvConfig>& candidates,
                                                const std::string& key) {
  const auto text = Known(key, [&](const std::string& each) { return Named(candidates, each).has_value(); });
  return text ? Named(candidates, *text) : std::nullopt;
}

std::shared_ptr<const StepPlan> Tuner::PlanTogether(std::span<const FedStep> steps) {
  return reference_ ? nullptr : PlanFound(FindTogether(steps));
}

std::shared_ptr<const StepPlan> Tuner::PlanBlocks(std::span<const FedStep> steps) {
  return reference_ ? nullptr : PlanFound(FindBlocks(steps));
}

std::shared_ptr<const StepPlan> Tuner::PlanFound(const FoundTwo& found) {
  if (found.steps == nullptr) return nullptr;
  const std::vector<std::string> candidates = found.steps->Candidates();
  if (candidates.empty()) return nullptr;
  const auto is_candidate = [&](const std::string& each) {
    return std::find(candidates.begin(), candidates.end(), each) != candidates.end();
  };
  const auto plan = [&](const std::string& candidate, bool is_settled) {
    return std::make_shared<const CudaTwoPlan>(found.steps, candidate, found.key, is_settled);
  };
  if (tuning_ != Tuning::kOff) {
    const auto known =
        Known(found.key, [&](const std::string& each) { return each == kApart || is_candidate(each); });
    if (known) {
      if (tuning_ == Tuning::kOn && !IsFiled(found.key)) Keep(found.key, *known);
      {
        const std::lock_guard lock(mutex_);
        taken_[found.key] = *known;
      }
      return *known == kApart ? nullptr : plan(*known, true);
    }
  }
  // TuneTogether is asked next.
  if (tuning_ != Tuning::kOn && !found.steps->Pay()) return nullptr;
  return plan(candidates.front(), tuning_ != Tuning::kOn);
}

bool Tuner::IsFiled(const std::string& key) {
  if (path_.empty()) return true;
  const auto entries = shared_.file.Read(path_, [this](const std::string& warning) { Warn(warning); });
  return entries->contains({key, 1});
}

cuda::ConvConfig Tuner::MeasureAndKeep(const std::string& key, const cuda::ConvChoice& choice,
                                       const Plans& plans) {
  Ranking ranking = Measure(choice, plans);
  TuneLog log;
  for (const auto& [time, config] : ranking)
    log.Add(config == choice.configs.front() ? "chosen" : "alone", key, config.Text(), time);
  const cuda::ConvConfig chosen = ranking.front().second;
  {
    const std::lock_guard lock(mutex_);
    fresh_[std::this_thread::get_id()][key] = std::move(ranking);
  }
  Keep(key, chosen.Text());
  return chosen;
}

Tuner::Ranking Tuner::Measure(const cuda::ConvChoice& choice, const Plans& plans) const {
  const DeviceScope scope(device_->Ordinal());
  std::vector<DeviceBlock> blocks;
  std::vector<const void*> fed;
  for (const TensorShape& tensor : choice.fed) {
    blocks.emplace_back(device_, BytesOf(tensor));
    FillWithNoise(blocks.back().Get(), tensor, *device_);
    fed.push_back(blocks.back().Get());
  }
  const DeviceBlock y(device_, BytesOf(choice.y));

  const Stopwatch stopwatch;
  const bool overlap = device_->Properties().capability >= 90;
  const auto time = [&](const cuda::NodePlan& plan, int nodes, double limit) {
    const DeviceBlock workspace(device_, plan.WorkspaceBytes());
    const auto launch = [&](cuda::Queue& queue) { plan.Launch(fed, y.Get(), workspace.Get(), queue); };
    return Row(launch, overlap, nodes, stopwatch.Stream()).Microseconds(stopwatch, limit);
  };
  // A graph of about half a millisecond: long against what begins and ends it, short against a user's
  // patience. As many nodes for every candidate: what begins and ends the graph is a part of all times.
  constexpr double kGraphMicroseconds = 500, kNoLimit = std::numeric_limits<double>::max();
  constexpr int kFewestNodes = 3, kMostNodes = 40;
  const double estimate = time(*plans.front(), kFewestNodes, kNoLimit);
  const int nodes = std::clamp(static_cast<int>(kGraphMicroseconds / estimate), kFewestNodes, kMostNodes);
  // Some percent may be chance: the cost model's choice, which is measured first, must be beaten clearly.
  constexpr double kClearly = 0.97;
  double best = kNoLimit;
  Ranking ranking;
  for (size_t i = 0; i < plans.size(); ++i) {
    const double measured = time(*plans[i], nodes, i == 0 ? kNoLimit : 1.5 * best) * (i == 0 ? kClearly : 1);
    best = std::min(best, measured);
    ranking.emplace_back(measured, choice.configs[i]);
  }
  const auto faster = [](const auto& a, const auto& b) { return a.first < b.first; };
  std::stable_sort(ranking.begin(), ranking.end(), faster);
  AddApart(choice.configs, ranking);
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

void Tuner::TuneTogether(RegionPlan& plan) {
  // For configurations, and again for steps in one launch. ResNet-50 takes 4 s at batch 1, DenseNet-121 all of the former.
  constexpr std::chrono::seconds kPatience{20};
  try {
    std::map<std::string, Ranking> fresh;
    {
      // What is left of a plan that could not be made goes too.
      const std::lock_guard lock(mutex_);
      const auto own = fresh_.find(std::this_thread::get_id());
      if (own != fresh_.end()) {
        fresh = std::move(own->second);
        fresh_.erase(own);
      }
    }
    std::map<std::string, std::vector<size_t>> guessed = GuessedTwos(plan);
    if (fresh.empty() && guessed.empty()) return;
    TuneLog log;
    std::vector<Trials> trials;
    std::vector<TunedSteps> tuned;
    for (auto& [key, steps] : StepsByKey(plan)) {
      const auto ranking = fresh.find(key);
      if (ranking == fresh.end()) continue;
      trials.push_back({key, CloseToFastest(ranking->second, log.IsWanted()), {}});
      tuned.push_back({std::move(steps), trials.back().convs.size()});
    }
    // Steps are tuned apart before two are tried together.
    const size_t alone = tuned.size();
    std::vector<std::shared_ptr<const TwoSteps>> twos(plan.steps.size());
    for (auto& [key, steps] : guessed) {
      for (const size_t step : steps) {
        const auto with_next = std::move(plan.steps[step].with_next);
        twos[step] = static_cast<const CudaTwoPlan&>(*with_next).Steps();
      }
      trials.push_back({key, {}, twos[steps[0]]->Candidates()});
      const size_t estimated = twos[steps[0]]->Pay() ? 1 : 0;
      tuned.push_back({std::move(steps), trials.back().together.size() + 1, 0, true, 0, estimated});
    }
    if (tuned.empty()) return;
    const std::lock_guard lock(shared_.measuring);
    const DeviceScope scope(device_->Ordinal());
    const RegionTimer timer(plan, device_, use_graph_);
    std::string tried_key, tried;
    const auto plan_again = [&](const TunedSteps& group, size_t step,
                                size_t choice) -> std::shared_ptr<const StepPlan> {
      const Trials& of_group = trials[static_cast<size_t>(&group - tuned.data())];
      tried_key = of_group.key;
      tried = of_group.Text(choice);
      if (group.together) {
        if (choice == 0) return nullptr;
        return std::make_shared<const CudaTwoPlan>(twos[step], tried, of_group.key, true);
      }
      Trial trial;
      trial.config = of_group.convs[choice];
      return PlanOnTrial(plan.steps[step], trial);
    };
    const RegionTime time = [&](const RegionPlan& trial) {
      const double microseconds = timer.Microseconds(trial);
      log.Add("region", tried_key, tried, microseconds);
      return microseconds;
    };
    TuneRegion(plan, std::span(tuned).first(alone), plan_again, time, kPatience);
    tried_key.clear();
    tried.clear();
    TuneRegion(plan, std::span(tuned).subspan(alone), plan_again, time, kPatience);
    for (size_t i = 0; i < trials.size(); ++i) {
      // What was measured alone is worth keeping without a trial; that two are faster apart was not measured.
      if (tuned[i].together && tuned[i].tried == 0) continue;
      const std::string chosen = trials[i].Text(tuned[i].chosen);
      Keep(trials[i].key, chosen);
      const std::lock_guard taken_lock(mutex_);
      taken_[trials[i].key] = chosen;
    }
  } catch (const std::exception& e) {
    Warn(std::string(
             "lowbit: a region is not measured as a whole, its kernels are those that were fastest alone: ") +
         e.what());
  }
}

void Tuner::ChooseLayout(RegionPlan& plan, const std::function<RegionPlan(PlaneUse)>& make) {
  if (reference_) return;
  // One launch for many steps needs planes between all of them, where those of each step alone may not pay.
  const auto estimate = [&] {
    constexpr double kClearly = 0.9;
    RegionPlan most = make(PlaneUse::kWherever);
    if (EstimateOf(most) < kClearly * EstimateOf(plan)) plan = std::move(most);
  };
  constexpr struct {
    const char* name;
    PlaneUse use;
  } kLayouts[] = {
      {kInPlanes, PlaneUse::kWhereFaster}, {kInBytes, PlaneUse::kNone}, {kInMostPlanes, PlaneUse::kWherever}};
  try {
    if (tuning_ == Tuning::kOff) return estimate();
    const std::string key = LayoutKey(plan);
    std::optional<std::string> chosen = Known(key, [&](const std::string& each) {
      return std::any_of(std::begin(kLayouts), std::end(kLayouts),
                         [&](const auto& layout) { return each == layout.name; });
    });
    std::optional<RegionPlan> best;
    bool is_whole = true;
    if (tuning_ == Tuning::kOn && !(chosen && IsFiled(key))) {
      if (!chosen) {
        double least = 0;
        TuneLog log;
        const auto measure = [&](const char* name, PlaneUse use) {
          RegionPlan trial = use == PlaneUse::kWhereFaster ? plan : make(use);
          const std::lock_guard lock(shared_.measuring);
          const DeviceScope scope(device_->Ordinal());
          const double microseconds = RegionTimer(trial, device_, use_graph_).Microseconds(trial);
          log.Add("region", key, name, microseconds);
          if (chosen && microseconds >= least) return;
          chosen = name;
          least = microseconds;
          best = std::move(trial);
        };
        for (const auto& [name, use] : kLayouts) {
          try {
            measure(name, use);
          } catch (const std::exception& e) {
            // What fails once, for want of memory, say, may be measured by the next session.
            is_whole = false;
            Warn("lowbit: of a region's layouts '" + std::string(name) + "' is not measured: " + e.what());
          }
        }
      }
      if (chosen && is_whole) Keep(key, *chosen);
    }
    if (!chosen) return estimate();
    {
      const std::lock_guard lock(mutex_);
      taken_[key] = *chosen;
    }
    for (const auto& [name, use] : kLayouts) {
      if (*chosen == name && use != PlaneUse::kWhereFaster) plan = best ? std::move(*best) : make(use);
    }
  } catch (const std::exception& e) {
    Warn(std::string("lowbit: a region keeps its planes of bits as they are: ") + e.what());
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
  std::map<std::string, std::string> choices = taken_;
  if (!path_.empty() && tuning_ != Tuning::kOff && !reference_) {
    const std::shared_ptr<const TuneEntries> known = shared_.file.Read(path_, warn_);
    for (const auto& [key, configuration] : *known) {
      // Of several convolutions in one step, all stand in the key.
      const bool concerns = std::any_of(nodes_.begin(), nodes_.end(), [&](const std::string& node) {
        return key.first.find(node) != std::string::npos;
      });
      if (concerns) choices.emplace(key.first, configuration);
    }
  }
  std::string text;
  for (const auto& [key, configuration] : choices)
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
