// Regions on the CPU: the operators of the core, one after the other, in memory that was planned for all of
// them.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "ep/region/backend.h"

namespace lowbit::ep {

struct CpuOptions {
  bool reference = false;  // the plain reference kernels
  bool tuned = true;       // kernels that were measured, where there are any
  int threads = 0;         // that run a node; 0: not known
  // Hears what the user should know though nothing failed; without it, stderr does.
  std::function<void(const std::string&)> warn;
};

std::shared_ptr<Backend> CreateCpuBackend(CpuOptions options);

}  // namespace lowbit::ep
