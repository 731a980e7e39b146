// Times plans of one region on a GPU, on inputs of its own.
#pragma once

#include <memory>
#include <vector>

#include "ep/cuda/runtime.h"
#include "ep/cuda/stopwatch.h"
#include "ep/region/program.h"

namespace lowbit::ep {

class RegionTimer {
 public:
  // `use_graph`: as the session runs.
  RegionTimer(const RegionPlan& plan, std::shared_ptr<CudaDevice> device, bool use_graph);

  // The time of a run, the median of some. Throws Error.
  double Microseconds(const RegionPlan& plan) const;

 private:
  uint8_t* Allocate(const TensorShape& tensor);

  const std::shared_ptr<CudaDevice> device_;
  const bool use_graph_;
  std::vector<DeviceBlock> blocks_;
  std::vector<void*> externals_;
  Stopwatch stopwatch_;
};

}  // namespace lowbit::ep
