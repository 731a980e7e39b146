// Which configuration a convolution runs with: one that was measured on this GPU where there is one, the cost
// model's otherwise. Measurements are kept in a file (core/tune_file.h) and shared by the sessions of a
// process.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/conv.h"
#include "core/provider_options.h"
#include "core/tune_file.h"
#include "ep/cuda/runtime.h"
#include "ep/cuda/steps.h"
#include "ep/region/program.h"
#include "kernels/cuda/nodes/cuda_node.h"

namespace lowbit::ep {

// Whose measurements count: this GPU under this driver, with these kernels.
TuneOrigin CudaTuneOrigin(const cuda::Device& device);
// The multiprocessors of the GPU that the line `machine` of a file of measurements names; 0 where it tells none.
int MultiprocessorsOf(const std::string& machine);

class TwoSteps;
// What steps are in one launch, and how measurements know them; null where they are none.
struct FoundTwo {
  std::shared_ptr<const TwoSteps> steps;
  std::string key;
};

class Tuner : public std::enable_shared_from_this<Tuner> {
 public:
  Tuner(std::shared_ptr<CudaDevice> device, const EpOptions& options);

  // The choosers of one convolution, and of two in one step. `stored_as`: what its codes become where they are
  // stored as something else.
  cuda::ConvChooser ChooserFor(const ConvSpec& spec, std::string_view stored_as = {});
  cuda::ResidualPairChoosers ChoosersFor(const ConvSpec& first, const ConvSpec& second);

  // Steps in a row as one launch (Backend::PlanTogether), where that is possible and, as far as is known, faster; else
  // nullptr.
  std::shared_ptr<const StepPlan> PlanTogether(std::span<const FedStep> steps);
  std::shared_ptr<const StepPlan> PlanBlocks(std::span<const FedStep> steps);

  // Tunes the convolutions of a plan that was just made once more, where they stand (TuneRegion): those that
  // this tuner measured for the first time, and whether two that follow each other go together. Does not
  // throw: what goes wrong is a warning.
  void TuneTogether(RegionPlan& plan);
  // Makes `plan`, which has planes, one without them or with more that `make` makes, where that is known to be faster; all
  // are measured once.
  void ChooseLayout(RegionPlan& plan, const std::function<RegionPlan(PlaneUse)>& make);

  // The measured choices that were taken so far and those in the file that concern the nodes, a line each, and the same
  // text of a compiled model: compiling plans nothing, so that none is taken meanwhile. Nothing in the text is trusted:
  // lines that name no candidate of a node count for nothing.
  std::string Choices() const;
  void Adopt(const std::string& text);

 private:
  // Candidates with their times in a row of equals, the fastest first.
  using Ranking = std::vector<std::pair<double, cuda::ConvConfig>>;
  // While one exists on a thread, a step that is planned there tells its key and takes the given
  // configuration, where it is one of its candidates, or the cost model's. The key of the first choice, where
  // that leads to others: those stay as they were measured.
  struct Trial {
    const Tuner* tuner = nullptr;
    std::optional<cuda::ConvConfig> config;
    std::string key;
  };
  // All that the sessions of this process know about GPUs of one origin.
  struct Shared {
    explicit Shared(const TuneOrigin& origin) : file(origin) {}
    TuneFile file;
    std::mutex mutex;  // of `measured`
    TuneEntries measured;
    std::mutex measuring;  // one measurement at a time
  };
  static Shared& SharedOf(const TuneOrigin& origin);

  // `node`: the key without the shape.
  cuda::ConvChooser Chooser(std::string node);
  cuda::ConvConfig Choose(const std::string& node, const cuda::ConvChoice& choice);
  std::shared_ptr<const StepPlan> PlanFound(const FoundTwo& found);
  // What is known of a key and is accepted.
  std::optional<std::string> Known(const std::string& key,
                                   const std::function<bool(const std::string&)>& accepts);
  // What is known of a key and is one of the candidates.
  std::optional<cuda::ConvConfig> Measured(const std::vector<cuda::ConvConfig>& candidates,
                                           const std::string& key);
  // Whether this session's file holds the key, or there is none to keep it in.
  bool IsFiled(const std::string& key);
  using Plans = std::vector<std::shared_ptr<const cuda::NodePlan>>;  // of the first candidates
  cuda::ConvConfig MeasureAndKeep(const std::string& key, const cuda::ConvChoice& choice, const Plans& plans);
  Ranking Measure(const cuda::ConvChoice& choice, const Plans& plans) const;
  std::shared_ptr<const StepPlan> PlanOnTrial(const PlannedStep& step, Trial& trial) const;
  std::map<std::string, std::vector<size_t>> StepsByKey(const RegionPlan& plan) const;
  void Keep(const std::string& key, const std::string& configuration);
  void Warn(const std::string& warning) const;

  const std::shared_ptr<CudaDevice> device_;
  const Tuning tuning_;
  const bool reference_, use_graph_;
  const std::function<void(const std::string&)> warn_;
  std::string path_;
  Shared& shared_;
  mutable std::mutex mutex_;  // of the four below
  std::map<std::string, std::string> adopted_, taken_;
  std::set<std::string> nodes_;  // the keys without the shape of all choosers
  // Measured alone, by the thread that now makes a plan with them and then calls TuneTogether.
  std::map<std::thread::id, std::map<std::string, Ranking>> fresh_;
  static thread_local Trial* trial_;
};

}  // namespace lowbit::ep
