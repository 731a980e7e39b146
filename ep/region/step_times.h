// Who wants to know how long the steps of a run took: ONNX Runtime's profiler (ep/ort/profiler.h).
#pragma once

#include <chrono>
#include <span>

#include "ep/region/program.h"

namespace lowbit::ep {

class StepTimes {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~StepTimes() = default;
  // `steps`, one to three that one launch does, ran from `begin` on for `duration`: of the device's time where it
  // has one.
  virtual void Add(std::span<const PlannedStep> steps, Clock::time_point begin, Clock::duration duration) = 0;
};

}  // namespace lowbit::ep
