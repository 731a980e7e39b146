#include "ep/cuda/graph_instance.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <string>
#include <utility>

#include "core/node_reader.h"
#include "core/status.h"
#include "ep/cuda/cuda_call.h"
#include "ep/cuda/steps.h"
#include "ep/region/step_times.h"

namespace lowbit::ep {
namespace {

// Kernels load 16 bytes at a time. Allocators align to 256 and more, only slices of a tensor lie elsewhere.
constexpr uintptr_t kExternalAlignment = 16;

bool IsAligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % kExternalAlignment == 0; }

// A stream of its own for the time of a capture: capturing one that runs use would take their launches in.
class CaptureStream {
 public:
  CaptureStream() {
    CheckCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream to capture");
    // Thread-local: other threads go on launching and allocating meanwhile.
    const cudaError_t error = cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal);
    if (error == cudaSuccess) return;
    static_cast<void>(cudaStreamDestroy(stream_));
    CheckCuda(error, "capturing a region");
  }
  ~CaptureStream() {
    if (capturing_) {
      cudaGraph_t graph = nullptr;
      static_cast<void>(cudaStreamEndCapture(stream_, &graph));
      if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
      static_cast<void>(cudaGetLastError());
    }
    static_cast<void>(cudaStreamDestroy(stream_));
  }
  CaptureStream(const CaptureStream&) = delete;
  CaptureStream& operator=(const CaptureStream&) = delete;

  cudaStream_t Get() const { return stream_; }
  void End(cudaGraph_t* graph) {
    capturing_ = false;
    CheckCuda(cudaStreamEndCapture(stream_, graph), "capturing a region");
  }

 private:
  cudaStream_t stream_ = nullptr;
  bool capturing_ = true;
};

// Events that a graph records.
class GraphEvents {
 public:
  explicit GraphEvents(size_t count) : events_(count) {
    for (cudaEvent_t& event : events_) CheckCuda(cudaEventCreate(&event), "making an event");
  }
  ~GraphEvents() {
    for (const cudaEvent_t event : events_)
      if (event != nullptr) static_cast<void>(cudaEventDestroy(event));
  }
  GraphEvents(const GraphEvents&) = delete;
  GraphEvents& operator=(const GraphEvents&) = delete;

  void Record(size_t i, cudaStream_t captured) const {
    CheckCuda(cudaEventRecordWithFlags(events_[i], captured, cudaEventRecordExternal), "recording an event");
  }
  StepTimes::Clock::duration Between(size_t first, size_t last) const {
    float milliseconds = 0;
    CheckCuda(cudaEventElapsedTime(&milliseconds, events_[first], events_[last]), "reading a measurement");
    return std::chrono::duration_cast<StepTimes::Clock::duration>(
        std::chrono::duration<float, std::milli>(milliseconds));
  }

 private:
  std::vector<cudaEvent_t> events_;
};

bool IsCapturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CheckCuda(cudaStreamIsCapturing(stream, &status), "asking whether a stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

GraphInstance::Captured::~Captured() {
  if (executable != nullptr) static_cast<void>(cudaGraphExecDestroy(executable));
  if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
}

GraphInstance::GraphInstance(const RegionPlan& plan, std::shared_ptr<CudaDevice> device, bool use_graph)
    : plan_(plan),
      device_(std::move(device)),
      use_graph_(use_graph),
      overlap_(device_->Properties().capability >= 90),
      workspace_(device_, plan.workspace_bytes),
      staging_(plan.inputs.size() + plan.outputs.size()),
      steps_using_(staging_.size()) {
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const PlannedStep& step = plan.steps[i];
    const auto note = [&](const Location& location) {
      if (location.kind != Location::Kind::kExternal) return;
      std::vector<size_t>& steps = steps_using_.at(location.at);
      const size_t launcher = LauncherOf(plan_.steps, i);
      if (steps.empty() || steps.back() != launcher) steps.push_back(launcher);
    };
    std::for_each(step.fed.begin(), step.fed.end(), note);
    note(step.output);
  }
  const DeviceScope scope(device_->Ordinal());
  CheckCuda(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), "making an event");
}

GraphInstance::~GraphInstance() {
  try {
    const DeviceScope scope(device_->Ordinal());
    if (has_run_) static_cast<void>(cudaEventSynchronize(done_));
    captured_.reset();
    static_cast<void>(cudaEventDestroy(done_));
  } catch (const Error&) {
    // The device is lost, or the process is ending.
    static_cast<void>(cudaGetLastError());
  }
}

bool GraphInstance::Busy(const RunContext& context) const {
  if (!has_run_ || context.stream == last_stream_) return false;
  const DeviceScope scope(device_->Ordinal());
  return cudaEventQuery(done_) == cudaErrorNotReady;
}

bool GraphInstance::Holds(std::span<void* const> externals) const {
  return captured_ == nullptr ? !use_graph_
                              : std::equal(externals.begin(), externals.end(), held_.begin(), held_.end());
}

void GraphInstance::Run(std::span<void* const> externals, const RunContext& context) {
  const cudaStream_t stream = static_cast<cudaStream_t>(context.stream);
  const DeviceScope scope(device_->Ordinal());
  if (IsCapturing(stream)) {
    Require(
        std::all_of(externals.begin(), externals.end(), IsAligned),
        "CUDA: a tensor is not aligned to 16 bytes, which a run on a stream that is being captured needs");
    foreign_.emplace_back(device_, plan_.workspace_bytes);
    LaunchAll(externals, foreign_.back().Get(), stream);
    return;
  }
  if (has_run_ && stream != last_stream_)
    CheckCuda(cudaStreamWaitEvent(stream, done_, 0), "ordering two runs");
  try {
    if (std::all_of(externals.begin(), externals.end(), IsAligned)) {
      RunSteps(externals, stream, context.times);
    } else {
      std::vector<void*> aligned(externals.begin(), externals.end());
      const std::vector<Staged> staged = Stage(aligned, stream);
      RunSteps(aligned, stream, context.times);
      Unstage(staged, stream);
    }
  } catch (const Error& e) {
    static_cast<void>(MarkEnd(stream));  // behind what was enqueued nevertheless
    // A kernel of an earlier run may have been the one that failed.
    const cudaError_t state = cudaStreamQuery(stream);
    if (IsLost(state)) Fail(e.what(), "; ", ErrorText(state));
    throw;
  }
  CheckCuda(MarkEnd(stream), "recording an event");
}

cudaError_t GraphInstance::MarkEnd(cudaStream_t stream) {
  last_stream_ = stream;
  has_run_ = true;
  return cudaEventRecord(done_, stream);
}

void GraphInstance::RunSteps(std::span<void* const> externals, cudaStream_t stream, StepTimes* times) {
  if (times != nullptr) {
    RunTimed(externals, stream, *times);
    return;
  }
  if (!use_graph_) {
    LaunchAll(externals, workspace_.Get(), stream);
    return;
  }
  Prepare(externals);
  CheckCuda(cudaGraphLaunch(captured_->executable, stream), "launching a region");
}

void GraphInstance::RunTimed(std::span<void* const> externals, cudaStream_t stream, StepTimes& times) const {
  const std::span<const PlannedStep> steps(plan_.steps);
  const GraphEvents events(steps.size() + 2);
  Captured timed;
  {
    CaptureStream captured;
    cuda::Queue as_usual(captured.Get(), overlap_), apart(captured.Get(), false);
    events.Record(0, captured.Get());
    for (size_t i = 0; i < steps.size(); ++i) Launch(i, externals, workspace_.Get(), as_usual);
    events.Record(1, captured.Get());
    for (size_t i = 0; i < steps.size(); ++i) {
      Launch(i, externals, workspace_.Get(), apart);
      events.Record(i + 2, captured.Get());
    }
    captured.End(&timed.graph);
  }
  CheckCuda(cudaGraphInstantiate(&timed.executable, timed.graph, 0), "instantiating a region's graph");
  const auto begin = StepTimes::Clock::now();
  // The last of these counts: a GPU that was idle is slow at first, its clocks and caches being low and cold.
  constexpr int kLaunches = 8;
  for (int i = 0; i < kLaunches; ++i) {
    CheckCuda(cudaGraphLaunch(timed.executable, stream), "launching a region");
  }
  CheckCuda(cudaStreamSynchronize(stream), "waiting for a region");
  const std::chrono::duration<double> whole = events.Between(0, 1),
                                      alone = events.Between(1, steps.size() + 1);
  const double share = whole < alone ? whole / alone : 1.0;
  const auto shared = [&](size_t from, size_t to) {
    return std::chrono::duration_cast<StepTimes::Clock::duration>(events.Between(from + 1, to + 1) * share);
  };
  for (size_t i = 0; i < steps.size(); ++i) {
    if (LauncherOf(steps, i) != i) continue;
    times.Add(steps.subspan(i, steps[i].with_next != nullptr ? steps[i].together : 1), begin + shared(0, i),
              shared(i, i + 1));
  }
}

void GraphInstance::Prepare(std::span<void* const> externals) {
  if (captured_ != nullptr) {
    try {
      Patch(externals);
      return;
    } catch (const Error&) {
      // Half patched; other pointers may also want other kernels. Captured anew it holds these.
      static_cast<void>(cudaGetLastError());
      captured_.reset();
    }
  }
  Capture(externals);
}

void* GraphInstance::Address(const Location& location, std::span<void* const> externals,
                             uint8_t* workspace) const {
  switch (location.kind) {
    case Location::Kind::kExternal:
      return externals[location.at];
    case Location::Kind::kWorkspace:
      return workspace + location.at;
    case Location::Kind::kConstant:
      return const_cast<void*>(plan_.constants[location.at].get());
  }
  return nullptr;
}

void GraphInstance::Launch(size_t i, std::span<void* const> externals, uint8_t* workspace,
                           cuda::Queue& queue) const {
  if (LauncherOf(plan_.steps, i) != i) return;
  const PlannedStep& step = plan_.steps[i];
  std::vector<const void*> fed;
  fed.reserve(step.fed.size());
  for (const Location& location : step.fed) fed.push_back(Address(location, externals, workspace));
  if (step.with_next != nullptr) {
    const std::span<const PlannedStep> all = std::span(plan_.steps).subspan(i, step.together);
    for (const PlannedStep& behind : all.subspan(1)) {
      for (size_t other = 1; other < behind.fed.size(); ++other)
        fed.push_back(Address(behind.fed[other], externals, workspace));
    }
    static_cast<const CudaTwoPlan&>(*step.with_next)
        .Launch(fed, Address(all[all.size() - 2].output, externals, workspace),
                Address(all.back().output, externals, workspace), queue);
    return;
  }
  static_cast<const CudaStepPlan&>(*step.plan)
      .Launch(fed, Address(step.output, externals, workspace), workspace + step.workspace_at, queue);
}

void GraphInstance::LaunchAll(std::span<void* const> externals, uint8_t* workspace,
                              cudaStream_t stream) const {
  cuda::Queue queue(stream, overlap_);
  for (size_t i = 0; i < plan_.steps.size(); ++i) Launch(i, externals, workspace, queue);
}

void GraphInstance::Capture(std::span<void* const> externals) {
  auto captured = std::make_unique<Captured>();
  captured->nodes.resize(plan_.steps.size());
  CaptureStream stream;
  cuda::Queue queue(stream.Get(), overlap_);
  for (size_t i = 0; i < plan_.steps.size(); ++i) {
    queue.Record(&captured->nodes[i]);
    Launch(i, externals, workspace_.Get(), queue);
  }
  stream.End(&captured->graph);
  CheckCuda(cudaGraphInstantiate(&captured->executable, captured->graph, 0),
            "instantiating a region's graph");
  captured_ = std::move(captured);
  held_.assign(externals.begin(), externals.end());
}

void GraphInstance::Patch(std::span<void* const> externals) {
  std::vector<size_t> stale;  // steps that have an external which moved
  for (size_t i = 0; i < held_.size(); ++i) {
    if (externals[i] != held_[i]) stale.insert(stale.end(), steps_using_[i].begin(), steps_using_[i].end());
  }
  std::sort(stale.begin(), stale.end());
  stale.erase(std::unique(stale.begin(), stale.end()), stale.end());
  cuda::Queue queue(nullptr, overlap_);
  for (const size_t i : stale) {
    queue.Update(captured_->executable, &captured_->nodes[i]);
    Launch(i, externals, workspace_.Get(), queue);
  }
  held_.assign(externals.begin(), externals.end());
}

size_t GraphInstance::BytesOf(size_t external) const {
  const size_t inputs = plan_.inputs.size();
  const TensorShape& shape = external < inputs ? plan_.inputs[external] : plan_.outputs[external - inputs];
  return static_cast<size_t>(ElementCount(shape.dims)) * ElementSize(shape.type);
}

std::vector<GraphInstance::Staged> GraphInstance::Stage(std::vector<void*>& externals, cudaStream_t stream) {
  std::vector<Staged> staged;
  for (size_t i = 0; i < externals.size(); ++i) {
    if (IsAligned(externals[i])) continue;
    if (staging_[i].Get() == nullptr) staging_[i] = DeviceBlock(device_, BytesOf(i));
    staged.push_back({i, externals[i]});
    externals[i] = staging_[i].Get();
    if (i >= plan_.inputs.size()) continue;
    CheckCuda(cudaMemcpyAsync(externals[i], staged.back().user, BytesOf(i), cudaMemcpyDeviceToDevice, stream),
              "copying an input to aligned memory");
  }
  return staged;
}

void GraphInstance::Unstage(std::span<const Staged> staged, cudaStream_t stream) {
  for (const Staged& each : staged) {
    if (each.external < plan_.inputs.size()) continue;
    CheckCuda(cudaMemcpyAsync(each.user, staging_[each.external].Get(), BytesOf(each.external),
                              cudaMemcpyDeviceToDevice, stream),
              "copying an output from aligned memory");
  }
}

}  // namespace lowbit::ep
