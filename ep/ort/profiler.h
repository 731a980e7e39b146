// ONNX Runtime's profiler sees the steps of regions, each with its nodes, its kernel and its time, below the
// event of the fused node. Releases before 1.25 do not ask.
#pragma once

#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "ep/ort/ep_api.h"
#include "ep/region/step_times.h"

namespace lowbit::ep {

// Of a session, or of one run. It hears of the steps that run on a thread between its StartEvent and StopEvent.
class Profiler final : public OrtEpProfilerImpl, public StepTimes {
 public:
  // `has_own_time`: the device's times are not those of the thread that runs the node.
  explicit Profiler(bool has_own_time);

  // The one that listens on this thread; null where none does.
  static StepTimes* Listening();

  void Add(std::span<const PlannedStep> steps, Clock::time_point begin, Clock::duration duration) override;

 private:
  struct Event {
    std::string name, kernel, nodes;
    int32_t thread = 0;
    Clock::time_point begin;
    Clock::duration duration;
  };

  void Report(OrtProfilingEventsContainer* container);
  void Report(const Event& event, OrtProfilingEventsContainer* container) const;

  const bool has_own_time_;
  Clock::time_point start_;
  int64_t start_offset_ns_ = 0;  // of `start_`, since ONNX Runtime's own start
  std::mutex mutex_;
  std::vector<Event> events_;
};

}  // namespace lowbit::ep
