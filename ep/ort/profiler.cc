#include "ep/ort/profiler.h"

#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

#include <chrono>
#include <iterator>
#include <memory>
#include <string_view>
#include <utility>

namespace lowbit::ep {
namespace {

using Nanoseconds = std::chrono::nanoseconds;

// A thread runs events inside of events: those of a run around those of its nodes.
thread_local std::vector<Profiler*> t_listening;

struct ReleaseEvent {
  void operator()(OrtProfilingEvent* p) const { EpApi().ReleaseProfilingEvent(p); }
};

Profiler& Self(OrtEpProfilerImpl* profiler) { return *static_cast<Profiler*>(profiler); }

std::string& Append(std::string& text, const char* between, std::string_view more) {
  if (!text.empty()) text += between;
  return text += more;
}

constexpr int32_t kNoThread = -1;

// As ONNX Runtime numbers threads, so that its events and these stand in one row.
int32_t ThisThread() {
#ifdef __linux__
  return static_cast<int32_t>(::syscall(SYS_gettid));
#else
  return kNoThread;
#endif
}

int64_t Count(StepTimes::Clock::duration duration) {
  return std::chrono::duration_cast<Nanoseconds>(duration).count();
}

}  // namespace

Profiler::Profiler(bool has_own_time) : OrtEpProfilerImpl{}, has_own_time_(has_own_time) {
  ort_version_supported = ort::RuntimeApiVersion();
  Release = [](OrtEpProfilerImpl* profiler) noexcept { delete &Self(profiler); };
  StartProfiling = [](OrtEpProfilerImpl* profiler, int64_t offset_ns) noexcept -> OrtStatus* {
    Self(profiler).start_ = Clock::now();
    Self(profiler).start_offset_ns_ = offset_ns;
    return nullptr;
  };
  StartEvent = [](OrtEpProfilerImpl* profiler, uint64_t) noexcept {
    return Guarded([&] { t_listening.push_back(&Self(profiler)); });
  };
  StopEvent = [](OrtEpProfilerImpl*, uint64_t, const OrtProfilingEvent*) noexcept -> OrtStatus* {
    if (!t_listening.empty()) t_listening.pop_back();
    return nullptr;
  };
  EndProfiling = [](OrtEpProfilerImpl* profiler, OrtProfilingEventsContainer* container) noexcept {
    return Guarded([&] { Self(profiler).Report(container); });
  };
}

StepTimes* Profiler::Listening() { return t_listening.empty() ? nullptr : t_listening.back(); }

void Profiler::Add(std::span<const PlannedStep> steps, Clock::time_point begin, Clock::duration duration) {
  Event event{{}, {}, {}, has_own_time_ ? kNoThread : ThisThread(), begin, duration};
  for (const PlannedStep& step : steps) {
    Append(event.name, " and ", step.name);
    for (const std::string& node : step.nodes) Append(event.nodes, ", ", node);
  }
  event.kernel = steps.size() > 1 ? steps[0].with_next->Text() : steps[0].plan->Text();
  const std::lock_guard lock(mutex_);
  events_.push_back(std::move(event));
}

void Profiler::Report(OrtProfilingEventsContainer* container) {
  const std::lock_guard lock(mutex_);
  for (const Event& event : events_) Report(event, container);
  events_.clear();
}

void Profiler::Report(const Event& event, OrtProfilingEventsContainer* container) const {
  const int64_t begin_ns = start_offset_ns_ + Count(event.begin - start_);
  // The end is rounded as the beginning of what follows, so that short steps add up to what they took together.
  const int64_t begin_us = begin_ns / 1000, end_us = (begin_ns + Count(event.duration)) / 1000;
  const std::string exact = std::to_string(Count(event.duration));
  const char* const keys[] = {"provider", "kernel", "nodes", "duration_ns"};
  const char* const values[] = {kProviderName, event.kernel.c_str(), event.nodes.c_str(), exact.c_str()};
  OrtProfilingEvent* made = nullptr;
  Check(EpApi().CreateProfilingEvent(OrtProfilingEventCategory_KERNEL, static_cast<int32_t>(::getpid()),
                                     event.thread, event.name.c_str(), begin_us, end_us - begin_us, keys,
                                     values, std::size(keys), &made));
  const std::unique_ptr<OrtProfilingEvent, ReleaseEvent> owned(made);
  const OrtProfilingEvent* const reported = made;
  Check(EpApi().ProfilingEventsContainer_AddEvents(container, &reported, 1));
}

}  // namespace lowbit::ep
