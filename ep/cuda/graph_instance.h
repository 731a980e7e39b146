// One run's memory and, once it has run, the whole region as an instantiated CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <span>
#include <vector>

#include "ep/cuda/runtime.h"
#include "ep/region/program.h"
#include "kernels/cuda/device/queue.h"

namespace lowbit::ep {

class GraphInstance final : public Instance {
 public:
  // `plan` outlives the instance. `use_graph` false: every run launches every kernel.
  GraphInstance(const RegionPlan& plan, std::shared_ptr<CudaDevice> device, bool use_graph);
  ~GraphInstance() override;  // waits for the last run
  GraphInstance(const GraphInstance&) = delete;
  GraphInstance& operator=(const GraphInstance&) = delete;

  void Run(std::span<void* const> externals, const RunContext& context) override;
  bool Busy(const RunContext& context) const override;
  bool Holds(std::span<void* const> externals) const override;

 private:
  // The graph of a region and the kernel nodes of every step. The executable is patched through the nodes of
  // the graph that it was made from, so both live.
  struct Captured {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    std::vector<cuda::RecordedNodes> nodes;

    Captured() = default;
    ~Captured();
    Captured(const Captured&) = delete;
    Captured& operator=(const Captured&) = delete;
  };
  // An external that the kernels cannot take where it lies.
  struct Staged {
    size_t external = 0;
    void* user = nullptr;
  };

  void* Address(const Location& location, std::span<void* const> externals, uint8_t* workspace) const;
  // Step i, with those behind it that the same launch does; nothing where one before did it.
  void Launch(size_t i, std::span<void* const> externals, uint8_t* workspace, cuda::Queue& queue) const;
  void LaunchAll(std::span<void* const> externals, uint8_t* workspace, cudaStream_t stream) const;
  // The next run on another stream, and the destructor, wait for everything on `stream` until here.
  cudaError_t MarkEnd(cudaStream_t stream);
  void RunSteps(std::span<void* const> externals, cudaStream_t stream, StepTimes* times);
  // Twice in a graph of its own: as usual, and one after the other with a measured event between any two. A step's
  // time is its share of the usual run's, by what it takes alone: a kernel that overlaps its predecessor has no time
  // of its own. Waits for them.
  void RunTimed(std::span<void* const> externals, cudaStream_t stream, StepTimes& times) const;
  void Prepare(std::span<void* const> externals);
  void Capture(std::span<void* const> externals);
  void Patch(std::span<void* const> externals);
  std::vector<Staged> Stage(std::vector<void*>& externals, cudaStream_t stream);
  void Unstage(std::span<const Staged> staged, cudaStream_t stream);
  size_t BytesOf(size_t external) const;

  const RegionPlan& plan_;
  const std::shared_ptr<CudaDevice> device_;
  const bool use_graph_, overlap_;
  DeviceBlock workspace_;
  std::vector<DeviceBlock> staging_;  // by external, made when it is needed
  // Workspaces of runs that a graph of the host program holds: it may replay them at any time.
  std::vector<DeviceBlock> foreign_;
  std::unique_ptr<Captured> captured_;
  std::vector<void*> held_;                       // the externals that the executable has
  std::vector<std::vector<size_t>> steps_using_;  // by external
  cudaEvent_t done_ = nullptr;                    // recorded behind every run
  cudaStream_t last_stream_ = nullptr;
  bool has_run_ = false;
};

}  // namespace lowbit::ep
